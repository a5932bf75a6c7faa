"""Local search of Level 2: which trajectories share a replica and a sharing window (HARTS 3.2, A.2).

A *cell* is one replica's part of one window: ``n`` consumers and the producer that serves them. Together they execute
every distinct prefix of the cell once, however its trajectories are dealt to its consumers. So the search looks at the
tries of cells alone: it makes their sum small and equal from replica to replica, and only keeps the complete layout of
every consumer within capacity. What each consumer and producer executes is levelled afterwards (``levelling.py``).

Shapes: N trajectories by sorted place, C cells, P consumers (of cell ``c`` from ``c * most consumers of a cell`` on),
R places that a set has room for.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from harts_titan.tree.compiled import kernel
from harts_titan.tree.draws import draw
from harts_titan.tree.trie_sets import (
    balance_change,
    change,
    exchange,
    fill_sets,
    gather,
    merge,
    near_places,
    neighbour,
    rows_needed,
    set_cost,
)

_NEAR = near_places(23 / 24)
"""Related trajectories are close."""


class Moves(NamedTuple):
    """What a search looks for.

    Attributes:
        moves: proposals to try.
        whole: True to swap whole consumers, False to move and swap runs of trajectories.
        weight, last_weight: of the balance term at first and at last: trees are cut late.
        heat: first bound on what a change may add, in units of the mean cost of a trajectory.
        complete_weight: of complete rows, which capacity makes scarce.
        row_limit: rows of a consumer for ``rows_needed``.
        fill: rows a consumer may need for what its cell holds; 0 for no such term. Where ``rows_needed`` of a cell is
            more than ``fill`` for each of its consumers, the rest is added to the objective.
        seed: of the random numbers.
    """

    moves: int
    whole: bool = False
    weight: float = 0.0
    last_weight: float = 0.0
    heat: float = 0.0
    complete_weight: float = 0.0
    row_limit: float = 0.0
    fill: float = 0.0
    seed: int = 0


class _State(NamedTuple):
    """Cells, and consumers unless ``apart`` is false, as sorted sets.

    Attributes:
        cell_N, label_N: int64 cell, and consumer within it, of each place.
        member_CR, count_C: places of each cell.
        part_PR, size_P: places of each consumer.
        complete_P: float64 complete rows of each consumer.
        consumers_C, share_C: consumers of each cell, and its share of all.
        cost_C, excess_C: float64 cost of each cell, and rows it needs beyond ``Moves.fill``.
        end_R, below_R: float64 scratch of ``rows_needed``.
        out_R, back_R, scratch_R: int64 runs that a change exchanges, and scratch.
        length_N, minimum_LN: as :class:`SortedStep` has them.
        random_1: state of the random numbers.
    """

    cell_N: np.ndarray
    label_N: np.ndarray
    member_CR: np.ndarray
    count_C: np.ndarray
    part_PR: np.ndarray
    size_P: np.ndarray
    complete_P: np.ndarray
    consumers_C: np.ndarray
    share_C: np.ndarray
    cost_C: np.ndarray
    excess_C: np.ndarray
    end_R: np.ndarray
    below_R: np.ndarray
    out_R: np.ndarray
    back_R: np.ndarray
    scratch_R: np.ndarray
    length_N: np.ndarray
    minimum_LN: np.ndarray
    random_1: np.ndarray


def search_cells(
    cell_N: np.ndarray,
    label_N: np.ndarray,
    consumers_C: np.ndarray,
    length_N: np.ndarray,
    minimum_LN: np.ndarray,
    capacity: float,
    pair: float,
    moves: Moves,
) -> np.ndarray:
    """Exchange runs of trajectories between cells until tries are small and alike; changes ``cell_N``, ``label_N``.

    The objective is ``sum_c G_c + weight * sum_c (G_c - t_c)^2 / t_c + complete_weight * complete rows``, ``G`` the
    cost of a cell's trie and ``t`` its share of the total by number of consumers. A change is taken if it adds at most
    a bound that falls linearly to zero. Consumers stay non-empty and within ``capacity`` complete rows.

    Args:
        cell_N: int64 cell of each place.
        label_N: int64 consumer within the cell.
        consumers_C: int64 consumers of each cell.
        length_N: int64 tokens.
        minimum_LN: ``SortedStep.minimum_LN``.
        capacity: complete rows of a consumer; infinite where consumers are made later: cells stay non-empty then.
        pair: cost of an attended pair in rows.
        moves: how to search.

    Returns:
        float64 (C,) costs of the cells.
    """
    apart = bool(np.isfinite(capacity))
    num_cells, num_labels = consumers_C.size, int(consumers_C.max())
    room, part_room = (
        min(cell_N.size, 2 * int(np.bincount(set_N).max()) + 64) for set_N in (cell_N, cell_N * num_labels + label_N)
    )
    num_parts = num_cells * num_labels if apart else 0
    state = _State(
        cell_N=cell_N,
        label_N=label_N,
        member_CR=np.empty((num_cells, room), np.int64),
        count_C=np.zeros(num_cells, np.int64),
        part_PR=np.empty((num_parts, part_room), np.int64),
        size_P=np.zeros(num_parts, np.int64),
        complete_P=np.zeros(num_parts),
        consumers_C=consumers_C,
        share_C=consumers_C / consumers_C.sum(),
        cost_C=np.zeros(num_cells),
        excess_C=np.zeros(num_cells),
        end_R=np.zeros(room + 2),
        below_R=np.zeros(room + 2),
        out_R=np.zeros(room + 1, np.int64),
        back_R=np.zeros(room + 1, np.int64),
        scratch_R=np.zeros(room, np.int64),
        length_N=length_N,
        minimum_LN=minimum_LN,
        random_1=np.array([moves.seed], np.uint64),
    )
    fill_sets(cell_N, state.member_CR, state.count_C)
    if apart:
        fill_sets(cell_N * num_labels + label_N, state.part_PR, state.size_P)
    _search(state, float(capacity), float(pair), apart, num_labels, moves)
    return state.cost_C


@kernel
def _search(state, capacity, pair, apart, num_labels, moves):
    length_N, minimum_LN, cost_C, random_1 = state.length_N, state.minimum_LN, state.cost_C, state.random_1
    for c in range(cost_C.shape[0]):
        cost_C[c] = set_cost(state.member_CR[c], state.count_C[c], length_N, minimum_LN, pair)
        if moves.fill > 0:
            state.excess_C[c] = _excess(state, c, state.member_CR[c], state.count_C[c], moves)
    for p in range(state.size_P.shape[0]):
        state.complete_P[p] = set_cost(state.part_PR[p], state.size_P[p], length_N, minimum_LN, 0.0)
    total = cost_C.sum()
    bound = moves.heat * total / length_N.shape[0]
    out, back = state.out_R, state.back_R
    for move in range(moves.moves):
        x, y = _draw_pair(random_1, length_N.shape[0])
        if y < 0:
            continue
        a, b = state.cell_N[x], state.cell_N[y]
        p, q = a * num_labels + state.label_N[x], b * num_labels + state.label_N[y]
        if p == q or (a == b and (moves.whole or not apart)):
            continue
        num_out, num_back = _draw_runs(state, x, y, a, b, p, q, apart, moves.whole)
        if num_out == 0:
            continue
        grown_a, grown_b = 0.0, 0.0
        if apart:
            if (
                state.size_P[p] + num_back > state.part_PR.shape[1]
                or state.size_P[q] + num_out > state.part_PR.shape[1]
            ):
                continue
            grown_b = change(state.part_PR[q], state.size_P[q], back, num_back, out, num_out, length_N, minimum_LN, 0.0)
            if state.complete_P[q] + grown_b > capacity:
                continue
            grown_a = change(state.part_PR[p], state.size_P[p], out, num_out, back, num_back, length_N, minimum_LN, 0.0)
            if state.complete_P[p] + grown_a > capacity:
                continue
        delta, delta_a, delta_b = moves.complete_weight * (grown_a + grown_b), 0.0, 0.0
        limit = bound * (moves.moves - move) / moves.moves
        if a != b:
            room = state.member_CR.shape[1]
            if state.count_C[a] + num_back > room or state.count_C[b] + num_out > room:
                continue
            delta_a = change(
                state.member_CR[a], state.count_C[a], out, num_out, back, num_back, length_N, minimum_LN, pair
            )
            delta_b = change(
                state.member_CR[b], state.count_C[b], back, num_back, out, num_out, length_N, minimum_LN, pair
            )
            delta += delta_a + delta_b
            weight = moves.weight + (moves.last_weight - moves.weight) * move / moves.moves
            delta += weight * balance_change(cost_C, total, state.share_C, a, b, delta_a, delta_b)
            if moves.fill > 0 and delta - state.excess_C[a] - state.excess_C[b] <= limit:
                n = merge(state.member_CR[a], state.count_C[a], out, num_out, back, num_back, state.scratch_R)
                excess_a = _excess(state, a, state.scratch_R, n, moves)
                n = merge(state.member_CR[b], state.count_C[b], back, num_back, out, num_out, state.scratch_R)
                excess_b = _excess(state, b, state.scratch_R, n, moves)
                delta += excess_a + excess_b - state.excess_C[a] - state.excess_C[b]
                if delta <= limit:
                    state.excess_C[a], state.excess_C[b] = excess_a, excess_b
        if delta > limit:
            continue
        if a != b:
            _exchange(state.member_CR, state.count_C, a, b, state, num_out, num_back)
            cost_C[a] += delta_a
            cost_C[b] += delta_b
            total += delta_a + delta_b
        if apart:
            _exchange(state.part_PR, state.size_P, p, q, state, num_out, num_back)
            state.complete_P[p] += grown_a
            state.complete_P[q] += grown_b
        ka, kb = state.label_N[x], state.label_N[y]
        for i in range(num_out):
            state.cell_N[out[i]], state.label_N[out[i]] = b, kb
        for i in range(num_back):
            state.cell_N[back[i]], state.label_N[back[i]] = a, ka


@kernel
def _draw_pair(random_1, num_places):
    """Return a place and another one, mostly near it; -1 for none."""
    x = draw(random_1, num_places)
    if draw(random_1, 16) < 15:
        return x, neighbour(random_1, x, num_places, _NEAR)
    return x, draw(random_1, num_places)


@kernel
def _draw_runs(state, x, y, a, b, p, q, apart, whole):
    """Draw the runs to exchange and return their sizes: 0 and 0 where a set would be left empty."""
    table_SR, size_S = state.member_CR, state.count_C
    if apart:
        table_SR, size_S, a, b = state.part_PR, state.size_P, p, q
    if whole:
        num_out = gather(table_SR[a], size_S[a], x, size_S[a], state.minimum_LN, state.out_R)
        return num_out, gather(table_SR[b], size_S[b], y, size_S[b], state.minimum_LN, state.back_R)
    reach = 1 + draw(state.random_1, 1 << draw(state.random_1, 6))
    reach = min(reach, size_S[a])
    num_out = gather(table_SR[a], size_S[a], x, reach, state.minimum_LN, state.out_R)
    if draw(state.random_1, 2) == 0:
        reach = min(1 + draw(state.random_1, 2 * reach), size_S[b])
        return num_out, gather(table_SR[b], size_S[b], y, reach, state.minimum_LN, state.back_R)
    return (0, 0) if num_out == size_S[a] else (num_out, 0)


@kernel
def _excess(state, c, member, n, moves):
    need = rows_needed(member, n, moves.row_limit, state.length_N, state.minimum_LN, state.end_R, state.below_R)
    return max(0.0, need - moves.fill * state.consumers_C[c])


@kernel
def _exchange(table_SR, size_S, a, b, state, num_out, num_back):
    """Move the runs between two sets of a table."""
    out, back, scratch_R = state.out_R, state.back_R, state.scratch_R
    size_S[a] = exchange(table_SR[a], size_S[a], out, num_out, back, num_back, scratch_R)
    size_S[b] = exchange(table_SR[b], size_S[b], back, num_back, out, num_out, scratch_R)
