"""Cells first: cut a step into cells of equal work, then deal each cell's trajectories to its consumers (HARTS A.2).

The groups of Level 1 fill microbatches with whatever fits, which scatters a tree over cells. Starting from cells keeps
trees together; a cell whose trajectories do not fit its consumers then exchanges some with another cell.

Shapes: N trajectories by sorted place, C cells, K consumers of a cell, R places that a cell has room for.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

from harts_titan.tree.compiled import kernel
from harts_titan.tree.draws import draw
from harts_titan.tree.sorted_step import common_prefix
from harts_titan.tree.trie_sets import (
    balance_change,
    change,
    exchange,
    fill_sets,
    find,
    gather,
    merge,
    near_places,
    neighbour,
    set_cost,
)

_NEAR = near_places(11 / 12)
"""Distances in sorted order at which a partner is looked for."""
# What a complete row of a cell that does not fit counts in rows too many. Moves between consumers per trajectory of a
# cell, at first and after an exchange. First bound on what such a move may add, as a share of the capacity.
_ROOM, _FIRST, _AGAIN, _HEAT = 0.02, 100, 12, 0.005


@numba.njit(cache=True, nogil=True)
def cut_cells(length_N, lcp_N, consumers_C, balance):
    """Cut trajectories in sorted order into cells; return the cell of each place: int64 (N,).

    Minimises the common prefixes at the cuts plus ``balance`` times ``(rows - target)^2 / target`` over the cells; the
    targets are proportional to the consumers. A layer computes each end from the starts whose cell is within two fifths
    of its target; the band is dropped for a cell that cannot keep it.
    """
    n, num_cells = length_N.shape[0], consumers_C.shape[0]
    work = np.zeros(n + 1)
    for i in range(n):
        work[i + 1] = work[i] + length_N[i] - lcp_N[i]
    total = work[n] + (num_cells - 1) * lcp_N.mean()
    cost, back = np.full(n + 1, np.inf), np.zeros((num_cells, n + 1), np.int64)
    cost[0] = 0.0
    for c in range(num_cells):
        target = total * consumers_C[c] / consumers_C.sum()
        for band in (0.4, np.inf):
            layer = np.full(n + 1, np.inf)
            for s in range(c, n):
                if cost[s] == np.inf:
                    continue
                head = lcp_N[s] if s > 0 else 0
                for e in range(s + 1, n - num_cells + c + 2):
                    rows = work[e] - work[s] + head
                    if rows > target * (1.0 + band):
                        break
                    if rows < target * (1.0 - band):
                        continue
                    value = cost[s] + head + balance * (rows - target) ** 2 / target
                    if value < layer[e]:
                        layer[e], back[c, e] = value, s
            if layer[n if c == num_cells - 1 else c + 1 :].min() < np.inf:
                break
        cost = layer
    cell_N = np.zeros(n, np.int64)
    end = n
    for c in range(num_cells - 1, -1, -1):
        cell_N[back[c, end] : end] = c
        end = back[c, end]
    return cell_N


@numba.njit(cache=True, nogil=True)
def _split(member, n, consumers, length_N, minimum_LN, label):
    """Label a cell's members with consumers: runs in sorted order whose largest complete layout is smallest."""
    new = np.zeros(n, np.int64)
    for i in range(1, n):
        new[i] = length_N[member[i]] - common_prefix(minimum_LN, member[i - 1], member[i])
    low, high = np.int64(0), np.int64(0)
    for i in range(n):
        low = max(low, length_N[member[i]])
        high += length_N[member[i]]
    while low < high:
        limit = (low + high) // 2
        runs, rows = 1, length_N[member[0]]
        for i in range(1, n):
            rows += new[i]
            if rows > limit:
                runs, rows = runs + 1, length_N[member[i]]
        if runs <= consumers:
            high = limit
        else:
            low = limit + 1
    k, rows, first = 0, length_N[member[0]], 0
    label[0] = 0
    for i in range(1, n):
        rows += new[i]
        # The last members go to consumers that would be empty.
        if rows > low or (i > first and consumers - 1 - k >= n - i):
            k, rows, first = k + 1, length_N[member[i]], i
        label[i] = k


class _State(NamedTuple):
    """Cells, and the consumers of the one that is looked at, as sorted sets.

    Attributes:
        cell_N: int64 cell of each place.
        member_CR, label_CR, count_C: places of each cell, and the consumer of each.
        consumers_C, share_C: consumers of each cell, and its share of all.
        cost_C: float64 cost of each cell.
        over_C, bad_C: float64 complete rows too many in each cell, and how bad that is.
        member_2R, label_2R: the two cells that an exchange would make.
        part_KR, size_K, complete_K: places, their number and complete rows of the consumers of one cell.
        best_R, run_4R, scratch_R: best labels, runs exchanged between cells and between consumers, scratch.
        length_N, minimum_LN, random_1: as :class:`SortedStep` has them; state of the random numbers.
    """

    cell_N: np.ndarray
    member_CR: np.ndarray
    label_CR: np.ndarray
    count_C: np.ndarray
    consumers_C: np.ndarray
    share_C: np.ndarray
    cost_C: np.ndarray
    over_C: np.ndarray
    bad_C: np.ndarray
    member_2R: np.ndarray
    label_2R: np.ndarray
    part_KR: np.ndarray
    size_K: np.ndarray
    complete_K: np.ndarray
    best_R: np.ndarray
    run_4R: np.ndarray
    scratch_R: np.ndarray
    length_N: np.ndarray
    minimum_LN: np.ndarray
    random_1: np.ndarray


@kernel
def _open(state, member, label, n, consumers):
    """List the places of each consumer of a cell; those without one (-1) are left out."""
    state.size_K[:] = 0
    for i in range(n):
        k = label[i]
        if k >= 0:
            state.part_KR[k, state.size_K[k]] = member[i]
            state.size_K[k] += 1
    for k in range(consumers):
        state.complete_K[k] = set_cost(state.part_KR[k], state.size_K[k], state.length_N, state.minimum_LN, 0.0)


@kernel
def _add(state, member, label, n, consumers, capacity):
    """Label the members that have none (-1), one after another: where least overflows, then where least is added."""
    part_KR, size_K, complete_K = state.part_KR, state.size_K, state.complete_K
    for i in range(n):
        if label[i] >= 0:
            continue
        one = member[i : i + 1]
        best, least, grown = -1, 0.0, 0.0
        for k in range(consumers):
            more = change(part_KR[k], size_K[k], one, 0, one, 1, state.length_N, state.minimum_LN, 0.0)
            value = more + 10.0 * max(0.0, complete_K[k] + more - capacity)
            if best < 0 or value < least:
                best, least, grown = k, value, more
        label[i] = best
        complete_K[best] += grown
        size_K[best] = exchange(part_KR[best], size_K[best], one, 0, one, 1, state.scratch_R)


@kernel
def _pack(state, member, label, n, consumers, capacity, moves):
    """Deal a cell's members to its consumers anew, by moves and swaps of runs; the state has the consumers opened.

    Returns the complete rows too many, and how bad that is: a cell in which something does not fit is the better the
    fewer complete rows it has, for that is what makes room.
    """
    part_KR, size_K, complete_K, random_1 = state.part_KR, state.size_K, state.complete_K, state.random_1
    length_N, minimum_LN, out, back = state.length_N, state.minimum_LN, state.run_4R[2], state.run_4R[3]
    over, rows = 0.0, 0.0
    for k in range(consumers):
        over += max(complete_K[k] - capacity, 0.0)
        rows += complete_K[k]
    best, best_rows = over, rows
    for i in range(n):
        state.best_R[i] = label[i]
    for move in range(moves):
        if over <= 0.0:
            break
        x, y = draw(random_1, n), draw(random_1, n)
        a, b = label[x], label[y]
        if a == b:
            b = draw(random_1, consumers)
            y = -1
            if a == b:
                continue
        reach = min(1 + draw(random_1, 1 << draw(random_1, 4)), size_K[a])
        num_out = gather(part_KR[a], size_K[a], member[x], reach, minimum_LN, out)
        num_back = 0
        if y >= 0 and draw(random_1, 2) == 0:
            reach = min(1 + draw(random_1, 2 * reach), size_K[b])
            num_back = gather(part_KR[b], size_K[b], member[y], reach, minimum_LN, back)
        elif num_out == size_K[a]:
            continue
        grown_a = change(part_KR[a], size_K[a], out, num_out, back, num_back, length_N, minimum_LN, 0.0)
        grown_b = change(part_KR[b], size_K[b], back, num_back, out, num_out, length_N, minimum_LN, 0.0)
        more = max(0.0, complete_K[a] + grown_a - capacity) - max(0.0, complete_K[a] - capacity)
        more += max(0.0, complete_K[b] + grown_b - capacity) - max(0.0, complete_K[b] - capacity)
        if grown_a + grown_b + 5.0 * more > _HEAT * capacity * (moves - move) / moves:
            continue
        for i in range(num_out):
            label[find(member, n, out[i])] = b
        for i in range(num_back):
            label[find(member, n, back[i])] = a
        size_K[a] = exchange(part_KR[a], size_K[a], out, num_out, back, num_back, state.scratch_R)
        size_K[b] = exchange(part_KR[b], size_K[b], back, num_back, out, num_out, state.scratch_R)
        complete_K[a] += grown_a
        complete_K[b] += grown_b
        over += more
        rows += grown_a + grown_b
        if over < best or (over == best and rows < best_rows):
            best, best_rows = over, rows
            for i in range(n):
                state.best_R[i] = label[i]
    for i in range(n):
        label[i] = state.best_R[i]
    return best, best + _ROOM * best_rows if best > 0 else 0.0


@kernel
def _remake(state, which, c, out, num_out, inn, num_inn, capacity):
    """Write cell ``c`` without ``out`` and with ``inn``, dealt anew, to ``member_2R``; return what ``_pack`` does.

    Where that leaves a consumer empty, it is infinitely bad.
    """
    old, old_label, n = state.member_CR[c], state.label_CR[c], state.count_C[c]
    member, label = state.member_2R[which], state.label_2R[which]
    size = merge(old, n, out, num_out, inn, num_inn, member)
    at = 0
    for i in range(size):
        while at < n and old[at] < member[i]:
            at += 1
        label[i] = old_label[at] if at < n and old[at] == member[i] else -1
    consumers = state.consumers_C[c]
    _open(state, member, label, size, consumers)
    _add(state, member, label, size, consumers, capacity)
    over, bad = _pack(state, member, label, size, consumers, capacity, _AGAIN * size)
    state.size_K[:] = 0
    for i in range(size):
        state.size_K[label[i]] = 1
    return over, bad if state.size_K.sum() == consumers else np.inf


def pack_cells(
    cell_N: np.ndarray,
    consumers_C: np.ndarray,
    length_N: np.ndarray,
    minimum_LN: np.ndarray,
    *,
    capacity: float,
    pair: float,
    trials: int,
    weight: float,
    hopeless: float,
    seed: int,
) -> tuple[np.ndarray, float]:
    """Deal every cell's trajectories to its consumers; exchange some where they do not fit; changes ``cell_N``.

    Args:
        cell_N: int64 cell of each place; every cell has at least as many places as consumers.
        consumers_C: int64 consumers of each cell.
        length_N: int64 tokens.
        minimum_LN: ``SortedStep.minimum_LN``.
        capacity: complete rows of a consumer.
        pair: cost of an attended pair in rows.
        trials: exchanges to try.
        weight: of equal cells, as in ``search_cells``.
        hopeless: complete rows too many, as a share of all capacity, above which no exchange is tried.
        seed: of the random numbers.

    Returns:
        label_N: int64 consumer of each place within its cell.
        over: complete rows above capacity that are left; 0 where everything fits.
    """
    num_cells, num_labels = consumers_C.size, int(consumers_C.max())
    room = min(cell_N.size, 2 * int(np.bincount(cell_N).max()) + 64)
    state = _State(
        cell_N=cell_N,
        member_CR=np.empty((num_cells, room), np.int64),
        label_CR=np.empty((num_cells, room), np.int64),
        count_C=np.zeros(num_cells, np.int64),
        consumers_C=consumers_C,
        share_C=consumers_C / consumers_C.sum(),
        cost_C=np.zeros(num_cells),
        over_C=np.zeros(num_cells),
        bad_C=np.zeros(num_cells),
        member_2R=np.empty((2, room), np.int64),
        label_2R=np.empty((2, room), np.int64),
        part_KR=np.empty((num_labels, room), np.int64),
        size_K=np.zeros(num_labels, np.int64),
        complete_K=np.zeros(num_labels),
        best_R=np.empty(room, np.int64),
        run_4R=np.empty((4, room), np.int64),
        scratch_R=np.empty(room, np.int64),
        length_N=length_N,
        minimum_LN=minimum_LN,
        random_1=np.array([seed], np.uint64),
    )
    fill_sets(cell_N, state.member_CR, state.count_C)
    for c in range(num_cells):
        _split(state.member_CR[c], state.count_C[c], consumers_C[c], length_N, minimum_LN, state.label_CR[c])
    _pack_cells(state, float(capacity), float(pair), trials, float(weight), float(hopeless))
    label_N = np.empty_like(cell_N)
    for c in range(num_cells):
        label_N[state.member_CR[c, : state.count_C[c]]] = state.label_CR[c, : state.count_C[c]]
    return label_N, float(state.over_C.sum())


@kernel
def _pack_cells(state, capacity, pair, trials, weight, hopeless):
    member_CR, count_C, consumers_C, random_1 = state.member_CR, state.count_C, state.consumers_C, state.random_1
    cost_C, over_C, bad_C, length_N, minimum_LN = (
        state.cost_C,
        state.over_C,
        state.bad_C,
        state.length_N,
        state.minimum_LN,
    )
    num_cells, room = member_CR.shape
    for c in range(num_cells):
        n, label = count_C[c], state.label_CR[c]
        cost_C[c] = set_cost(member_CR[c], n, length_N, minimum_LN, pair)
        _open(state, member_CR[c], label, n, consumers_C[c])
        over_C[c], bad_C[c] = _pack(state, member_CR[c], label, n, consumers_C[c], capacity, _FIRST * n)
    total, left, out, back = cost_C.sum(), over_C.sum(), state.run_4R[0], state.run_4R[1]
    for trial in range(trials):
        if left <= 0.0 or (trial == 0 and left > hopeless * capacity * consumers_C.sum()):
            break
        # What a row too many may cost grows until the last of them is gone at any price.
        price = 2.0 * 10.0 ** (trial / trials)
        a = draw(random_1, num_cells)
        while over_C[a] <= 0.0:
            a = (a + 1) % num_cells
        x = member_CR[a, draw(random_1, count_C[a])]
        if draw(random_1, 3) > 0:
            y = neighbour(random_1, x, length_N.shape[0], _NEAR)
            if y < 0:
                continue
        else:
            y = draw(random_1, length_N.shape[0])
        b = state.cell_N[y]
        if a == b:
            continue
        reach = min(1 + draw(random_1, 1 << draw(random_1, 6)), count_C[a])
        num_out = gather(member_CR[a], count_C[a], x, reach, minimum_LN, out)
        num_back = 0
        if draw(random_1, 4) > 0:
            reach = min(1 + draw(random_1, 2 * reach), count_C[b])
            num_back = gather(member_CR[b], count_C[b], y, reach, minimum_LN, back)
        size_a, size_b = count_C[a] - num_out + num_back, count_C[b] - num_back + num_out
        if not (consumers_C[a] <= size_a <= room and consumers_C[b] <= size_b <= room):
            continue
        delta_a = change(member_CR[a], count_C[a], out, num_out, back, num_back, length_N, minimum_LN, pair)
        delta_b = change(member_CR[b], count_C[b], back, num_back, out, num_out, length_N, minimum_LN, pair)
        delta = delta_a + delta_b + weight * balance_change(cost_C, total, state.share_C, a, b, delta_a, delta_b)
        if delta >= price * (bad_C[a] + bad_C[b]):
            continue
        over_a, bad_a = _remake(state, 0, a, out, num_out, back, num_back, capacity)
        if delta >= price * (bad_C[a] + bad_C[b] - bad_a):
            continue
        over_b, bad_b = _remake(state, 1, b, back, num_back, out, num_out, capacity)
        if delta >= price * (bad_C[a] + bad_C[b] - bad_a - bad_b):
            continue
        left += over_a + over_b - over_C[a] - over_C[b]
        total += delta_a + delta_b
        _accept(state, 0, a, size_a, delta_a, over_a, bad_a)
        _accept(state, 1, b, size_b, delta_b, over_b, bad_b)


@kernel
def _accept(state, which, c, size, delta, over, bad):
    """Let a cell be what ``_remake`` made of it."""
    state.cost_C[c] += delta
    state.over_C[c], state.bad_C[c], state.count_C[c] = over, bad, size
    for i in range(size):
        x = state.member_2R[which, i]
        state.member_CR[c, i], state.label_CR[c, i], state.cell_N[x] = x, state.label_2R[which, i], c
