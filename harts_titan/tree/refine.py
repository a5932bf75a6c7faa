"""Ruin-and-recreate search for microbatches with few compact rows (not in the paper).

Shapes: M leaves by sorted place, K groups, see :mod:`harts_titan.tree.groups`.

A move takes some leaves out of their groups and puts each back where it costs least; simulated annealing decides
whether it stays. The idea is slack induction by string removals from vehicle routing (Christiaens and Vanden Berghe,
2020); a group here is a set, so a removal is a run of the sorted order, two whole groups, or scattered leaves.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from harts_titan.tree.compiled import kernel
from harts_titan.tree.draws import draw
from harts_titan.tree.groups import (
    GROUP,
    HEAD,
    LCP,
    LENGTH,
    SHIFT,
    SIZE,
    SQUARES,
    USED,
    empty_groups,
    fill,
    put_back,
    remove,
    settle,
    take_out,
)
from harts_titan.tree.sorted_step import SortedStep

# Quantiles of the exponential distribution, in 1/1024: -log(u) for a uniform u, without floats at run time.
_EXPONENTIAL = np.round(-np.log((np.arange(256) + 0.5) / 256) * 1024).astype(np.int64)
# Chance, in 1/1024, that a recreation passes over a feasible group.
_SKIP = 20
_RUN, _PAIR, _SCATTERED = 8, 1, 4
# Leaves from which a move draws.
_PART = 1024
_LONGEST_RUN, _LARGEST_GROUP, _MOST_SCATTERED = 8, 24, 8


def refine(
    leaves: SortedStep, group_M: np.ndarray, *, capacity: int, dp_degree: int, moves: int
) -> Iterator[np.ndarray]:
    """Improve an assignment of leaves to groups whose number shall be a multiple of ``dp_degree``.

    First the number of groups is free. Then the search aims at the multiple below, if the rows would fit, with free
    capacity gathered in few groups; at last it minimises rows alone at the multiple reached.

    Args:
        leaves: trajectories of which none is a prefix of another.
        group_M: int64 group of each leaf; any numbers.
        capacity: compact rows a group may have.
        dp_degree: number of replicas.
        moves: bound on the number of moves.

    Yields:
        int64 (M,) group of each leaf in 0..K-1; K is not always a multiple of ``dp_degree``.
    """
    if leaves.num_trajectories < 2:
        return
    common = int(leaves.lcp_N[1:].min())
    # Temperatures in proportion to the capacity.
    hot, warm, cool, cold = (max(1, capacity * part // 65536) for part in (2000, 1000, 50, 20))
    scale: dict[str, Any] = {"leaves": leaves, "capacity": capacity}
    prices: dict[str, Any] = {"excess": max(1, capacity // 8), "deficit": common}
    first, second = moves // 4, moves // 2
    group_M = anneal(**scale, group_M=group_M, moves=first, hot=hot, cold=warm, fullness=100, seed=1)
    count = int(group_M.max()) + 1
    down, up = count // dp_degree * dp_degree, -(-count // dp_degree) * dp_degree
    yield group_M
    rest = moves - first
    target, temperature = up, warm
    if 0 < down < up:
        group_M = anneal(
            **scale, group_M=group_M, moves=second, hot=warm, cold=cool, fullness=250, target=down, **prices, seed=2
        )
        yield group_M
        rest -= second
        temperature = cool
        if group_M.max() < down:
            target = down
    yield anneal(
        **scale, group_M=group_M, moves=rest, hot=temperature, cold=cold, fullness=0, target=target, **prices, seed=3
    )


class Search(NamedTuple):
    """Working arrays of a search, all int64.

    Attributes:
        removed_M5: of each leaf a move takes out: its place, group, leaf before, and common prefixes with its
            neighbours in the group, as they were.
        order_M2: of each of them in order of insertion: sorting key, leaf.
        best_M: group of each leaf in the best state so far.
        stale_M2: stack of the leaves moved since that state; and 1 for each leaf on it.
    """

    removed_M5: np.ndarray
    order_M2: np.ndarray
    best_M: np.ndarray
    stale_M2: np.ndarray


def anneal(
    leaves: SortedStep,
    group_M: np.ndarray,
    *,
    capacity: int,
    moves: int,
    hot: int,
    cold: int,
    fullness: int,
    target: int = -1,
    excess: int = 0,
    deficit: int = 0,
    seed: int = 0,
) -> np.ndarray:
    """Search from a given assignment with a temperature that falls linearly.

    The energy is the compact rows, less ``fullness / 1024`` of the sum over groups of rows squared over capacity, so
    that free capacity gathers in few groups, plus ``excess`` for each group above ``target`` and ``deficit`` for each
    below it.

    Args:
        leaves: trajectories of which none is a prefix of another.
        group_M: int64 group of each leaf; any numbers.
        capacity: compact rows a group may have.
        moves: number of moves.
        hot: temperature of the first move, rows.
        cold: temperature of the last move, rows.
        fullness: in 1/1024, at most 512, so that the energy grows with every insertion.
        target: wanted number of groups; -1 for none.
        excess: rows.
        deficit: rows.
        seed: of the random numbers.

    Returns:
        int64 (M,) group of each leaf in 0..K-1, of the least energy found.
    """
    m = leaves.num_trajectories
    groups = empty_groups(leaves, capacity=capacity, seed=seed)
    search = Search(*(np.zeros(shape, np.int64) for shape in ((m, 5), (m, 2), m, (m, 2))))
    fill(groups, np.unique(group_M, return_inverse=True)[1].astype(np.int64), search.best_M)
    search.best_M[:] = groups.leaf_M6[:, GROUP]
    # Weight of the squares as the state keeps them, in 2**-20 rows.
    weight = (fullness << (2 * int(groups.scalar_7[SHIFT]) + 10)) // capacity
    _anneal(groups, search, moves, hot, cold, (target, excess, deficit, weight))
    return np.unique(search.best_M, return_inverse=True)[1].astype(np.int64)


@kernel
def _anneal(groups, search, moves, hot, cold, prices):
    energy, best, num_stale = 0, 0, 0
    for move in range(moves):
        temperature = hot + (cold - hot) * move // moves
        limit = temperature * _EXPONENTIAL[draw(groups.random_1, 256)] // 1024
        before = _price(groups, prices)
        n, saved = _ruin(groups, search.removed_M5, move)
        _arrange(groups, search, n)
        done, rows = 0, -saved
        change = rows + _price(groups, prices) - before
        # An insertion never lowers the energy, so a move over the limit is over.
        while done < n and change <= limit:
            rows += settle(groups, search.order_M2[done, 1], False, _SKIP)
            done += 1
            change = rows + _price(groups, prices) - before
        if change <= limit:
            energy += change
            num_stale = _note_moved(search, n, num_stale)
            if energy < best:
                best = energy
                for i in range(num_stale):
                    x = search.stale_M2[i, 0]
                    search.best_M[x] = groups.leaf_M6[x, GROUP]
                    search.stale_M2[x, 1] = 0
                num_stale = 0
        else:
            for i in range(done - 1, -1, -1):
                remove(groups, search.order_M2[i, 1])
            put_back(groups, search.removed_M5, n)


@kernel
def _note_moved(search, n, num_stale):
    """Add the leaves of an accepted move to the stack; a copy of all groups for each best state would cost O(M)."""
    for i in range(n):
        x = search.removed_M5[i, 0]
        if search.stale_M2[x, 1] == 0:
            search.stale_M2[x, 1] = 1
            search.stale_M2[num_stale, 0] = x
            num_stale += 1
    return num_stale


@kernel
def _price(groups, prices):
    target, excess, deficit, weight = prices
    used = groups.scalar_7[USED]
    price = -(groups.scalar_7[SQUARES] * weight >> 20)
    if target < 0:
        return price
    return price + max(used - target, 0) * excess + max(target - used, 0) * deficit


@kernel
def _draw_leaf(groups, move):
    """Return any leaf of a part of the sorted order that moves on: a large step stays in the processor's cache."""
    m = groups.leaf_M6.shape[0]
    if m <= _PART:
        return draw(groups.random_1, m)
    return (move // 8 + draw(groups.random_1, _PART)) % m


@kernel
def _ruin(groups, removed_M5, move):
    """Take leaves out of their groups, note where they were, and return (their number, rows saved)."""
    m = groups.leaf_M6.shape[0]
    x = _draw_leaf(groups, move)
    kind = draw(groups.random_1, _RUN + _PAIR + _SCATTERED)
    n, saved = 0, 0
    if kind < _RUN:
        run = 1 + draw(groups.random_1, _LONGEST_RUN)
        first = max(0, x - draw(groups.random_1, run))
        for y in range(first, min(m, first + run)):
            saved += take_out(groups, y, removed_M5, n)
            n += 1
    elif kind < _RUN + _PAIR:
        g = groups.leaf_M6[x, GROUP]
        h = groups.leaf_M6[_partner(groups, x, move), GROUP]
        for one in (g, h):
            if groups.group_K8[one, SIZE] <= _LARGEST_GROUP:
                while groups.group_K8[one, SIZE] > 0:
                    y = groups.group_K8[one, HEAD]
                    saved += take_out(groups, y, removed_M5, n)
                    n += 1
    else:
        for _ in range(2 + draw(groups.random_1, _MOST_SCATTERED - 1)):
            if groups.leaf_M6[x, GROUP] >= 0:
                saved += take_out(groups, x, removed_M5, n)
                n += 1
            x = _draw_leaf(groups, move)
    return n, saved


@kernel
def _partner(groups, x, move):
    """Return a leaf to pair with ``x``: the nearest of another group on one side, or any leaf."""
    m = groups.leaf_M6.shape[0]
    way = draw(groups.random_1, 4) - 1
    if way == -1 or way == 1:
        y = x + way
        while 0 <= y < m and abs(y - x) <= _LARGEST_GROUP:
            if groups.leaf_M6[y, GROUP] != groups.leaf_M6[x, GROUP]:
                return y
            y += way
    return _draw_leaf(groups, move)


@kernel
def _arrange(groups, search, n):
    """Put the removed leaves into one of several orders of insertion."""
    order, order_M2 = draw(groups.random_1, 8), search.order_M2
    for i in range(n):
        x = search.removed_M5[i, 0]
        if order < 3:
            key = -groups.leaf_M6[x, LENGTH]
        elif order < 5:
            key = draw(groups.random_1, 1 << 20)
        elif order < 6:
            key = x
        elif order < 7:
            key = -x
        else:
            after = groups.leaf_M6[x + 1, LCP] if x + 1 < groups.leaf_M6.shape[0] else 0
            key = max(groups.leaf_M6[x, LCP], after) - groups.leaf_M6[x, LENGTH]
        j = i
        while j > 0 and order_M2[j - 1, 0] > key:
            order_M2[j, 0], order_M2[j, 1] = order_M2[j - 1, 0], order_M2[j - 1, 1]
            j -= 1
        order_M2[j, 0], order_M2[j, 1] = key, x
