"""Cells first: cut a step into cells of equal work, then deal each cell's trajectories to its consumers (HARTS A.2).

The groups of Level 1 fill microbatches with whatever fits, which scatters a tree over cells. Starting from cells keeps
trees together; a cell whose trajectories do not fit its consumers then exchanges some with another cell.

Shapes: N trajectories by sorted place, C cells.
"""

from __future__ import annotations

import numba
import numpy as np

from harts_titan.tree.sorted_step import common_prefix
from harts_titan.tree.trie_sets import cell_cost, change, draw, find, gather, merge

_FAR = 256
"""Sorted places within which a neighbour is looked for."""
_ROOM = 0.02
"""What a complete row of a cell that does not fit counts in rows too many."""


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


@numba.njit(cache=True, nogil=True)
def _add(member, label, n, consumers, capacity, length_N, minimum_LN):
    """Label the members that have none (-1), one after another: where least overflows, then where least is added."""
    complete = np.zeros(consumers)
    for k in range(consumers):
        complete[k] = cell_cost(member, label, n, k, length_N, minimum_LN, 0.0)
    none = member[:0]
    for i in range(n):
        if label[i] >= 0:
            continue
        best, least, grown = -1, 0.0, 0.0
        for k in range(consumers):
            more = change(member, label, n, k, none, 0, member[i : i + 1], 1, length_N, minimum_LN, 0.0)
            value = more + 10.0 * max(0.0, complete[k] + more - capacity)
            if best < 0 or value < least:
                best, least, grown = k, value, more
        label[i] = best
        complete[best] += grown


@numba.njit(cache=True, nogil=True)
def _pack(member, label, n, consumers, capacity, moves, heat, length_N, minimum_LN, random, scratch):
    """Deal a cell's members to its consumers anew, by moves and swaps of runs.

    Returns the complete rows too many, and how bad that is: a cell in which something does not fit is the better the
    fewer complete rows it has, for that is what makes room.
    """
    complete, size = np.zeros(consumers), np.zeros(consumers, np.int64)
    for k in range(consumers):
        complete[k] = cell_cost(member, label, n, k, length_N, minimum_LN, 0.0)
    for i in range(n):
        size[label[i]] += 1
    over = np.maximum(complete - capacity, 0.0).sum()
    rows = complete.sum()
    best, best_rows = over, rows
    out, back, best_label = scratch[0], scratch[1], scratch[2]
    best_label[:n] = label[:n]
    for move in range(moves):
        if over <= 0.0:
            break
        x, y = draw(random) % n, draw(random) % n
        a, b = label[x], label[y]
        if a == b:
            b = draw(random) % consumers
            y = -1
            if a == b:
                continue
        reach = min(1 + draw(random) % (1 << (draw(random) % 4)), size[a])
        num_out = gather(member, label, n, a, member[x], reach, minimum_LN, out)
        num_back = 0
        if y >= 0 and draw(random) % 2 == 0:
            reach = min(1 + draw(random) % (2 * reach), size[b])
            num_back = gather(member, label, n, b, member[y], reach, minimum_LN, back)
        elif num_out == size[a]:
            continue
        grown_a = change(member, label, n, a, out, num_out, back, num_back, length_N, minimum_LN, 0.0)
        grown_b = change(member, label, n, b, back, num_back, out, num_out, length_N, minimum_LN, 0.0)
        more = max(0.0, complete[a] + grown_a - capacity) - max(0.0, complete[a] - capacity)
        more += max(0.0, complete[b] + grown_b - capacity) - max(0.0, complete[b] - capacity)
        if grown_a + grown_b + 5.0 * more > heat * (moves - move) / moves:
            continue
        for i in range(num_out):
            label[find(member, n, out[i])] = b
        for i in range(num_back):
            label[find(member, n, back[i])] = a
        size[a] += num_back - num_out
        size[b] += num_out - num_back
        complete[a] += grown_a
        complete[b] += grown_b
        over += more
        rows += grown_a + grown_b
        if over < best or (over == best and rows < best_rows):
            best, best_rows = over, rows
            best_label[:n] = label[:n]
    label[:n] = best_label[:n]
    return best, best + _ROOM * best_rows if best > 0 else 0.0


@numba.njit(cache=True, nogil=True)
def pack_cells(cell_N, consumers_C, length_N, minimum_LN, capacity, pair, trials, weight, hopeless, seed):
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
    num_places, num_cells = length_N.shape[0], consumers_C.shape[0]
    random = np.zeros(1, np.uint64)
    random[0] = np.uint64(seed)
    count = np.bincount(cell_N, minlength=num_cells)
    room = min(num_places, 2 * count.max() + 64)
    member, label = np.zeros((num_cells, room), np.int64), np.zeros((num_cells, room), np.int64)
    zero, scratch = np.zeros(room, np.int64), np.zeros((3, 2 * room + 1), np.int64)
    count[:] = 0
    for x in range(num_places):
        member[cell_N[x], count[cell_N[x]]] = x
        count[cell_N[x]] += 1
    cost, over, bad = np.zeros(num_cells), np.zeros(num_cells), np.zeros(num_cells)
    heat = 0.005 * capacity
    for c in range(num_cells):
        _split(member[c], count[c], consumers_C[c], length_N, minimum_LN, label[c])
        cost[c] = cell_cost(member[c], label[c], count[c], -1, length_N, minimum_LN, pair)
        over[c], bad[c] = _pack(
            member[c], label[c], count[c], consumers_C[c], capacity, 100 * count[c], heat, length_N, minimum_LN, random,
            scratch,
        )  # fmt: skip
    total, share = cost.sum(), 1.0 / consumers_C.sum()
    left = over.sum()
    out, back = np.zeros(2 * room + 1, np.int64), np.zeros(2 * room + 1, np.int64)
    m1, l1 = np.zeros(room, np.int64), np.zeros(room, np.int64)
    m2, l2 = np.zeros(room, np.int64), np.zeros(room, np.int64)
    for trial in range(trials):
        if left <= 0.0 or (trial == 0 and left > hopeless * capacity * consumers_C.sum()):
            break
        # What a row too many may cost grows until the last of them is gone at any price.
        price = 2.0 * 10.0 ** (trial / trials)
        a = draw(random) % num_cells
        while over[a] <= 0.0:
            a = (a + 1) % num_cells
        x = member[a, draw(random) % count[a]]
        if draw(random) % 3 > 0:
            far = 1
            while far < _FAR and draw(random) % 12 > 0:
                far += 1
            y = x + far if draw(random) % 2 == 0 else x - far
            if y < 0 or y >= num_places:
                continue
        else:
            y = draw(random) % num_places
        b = cell_N[y]
        if a == b:
            continue
        reach = min(1 + draw(random) % (1 << (draw(random) % 6)), count[a])
        num_out = gather(member[a], zero, count[a], 0, x, reach, minimum_LN, out)
        num_back = 0
        if draw(random) % 4 > 0:
            reach = min(1 + draw(random) % (2 * reach), count[b])
            num_back = gather(member[b], zero, count[b], 0, y, reach, minimum_LN, back)
        size_a, size_b = count[a] - num_out + num_back, count[b] - num_back + num_out
        if not (consumers_C[a] <= size_a <= room and consumers_C[b] <= size_b <= room):
            continue
        delta_a = change(member[a], zero, count[a], -1, out, num_out, back, num_back, length_N, minimum_LN, pair)
        delta_b = change(member[b], zero, count[b], -1, back, num_back, out, num_out, length_N, minimum_LN, pair)
        ta, tb = total * share * consumers_C[a], total * share * consumers_C[b]
        ea, eb = cost[a] - ta, cost[b] - tb
        delta = delta_a + delta_b
        delta += weight * (((ea + delta_a) ** 2 - ea * ea) / ta + ((eb + delta_b) ** 2 - eb * eb) / tb)
        if delta >= price * (bad[a] + bad[b]):
            continue
        merge(member[a], label[a], count[a], out, num_out, back, num_back, -1, m1, l1)
        _add(m1, l1, size_a, consumers_C[a], capacity, length_N, minimum_LN)
        over_a, bad_a = _pack(
            m1, l1, size_a, consumers_C[a], capacity, 12 * size_a, heat, length_N, minimum_LN, random, scratch
        )
        if delta >= price * (bad[a] + bad[b] - bad_a):
            continue
        merge(member[b], label[b], count[b], back, num_back, out, num_out, -1, m2, l2)
        _add(m2, l2, size_b, consumers_C[b], capacity, length_N, minimum_LN)
        over_b, bad_b = _pack(
            m2, l2, size_b, consumers_C[b], capacity, 12 * size_b, heat, length_N, minimum_LN, random, scratch
        )
        if delta >= price * (bad[a] + bad[b] - bad_a - bad_b):
            continue
        if np.unique(l1[:size_a]).size < consumers_C[a] or np.unique(l2[:size_b]).size < consumers_C[b]:
            continue
        left += over_a + over_b - over[a] - over[b]
        total += delta_a + delta_b
        cost[a] += delta_a
        cost[b] += delta_b
        over[a], over[b], bad[a], bad[b] = over_a, over_b, bad_a, bad_b
        count[a], count[b] = size_a, size_b
        member[a, :size_a], label[a, :size_a] = m1[:size_a], l1[:size_a]
        member[b, :size_b], label[b, :size_b] = m2[:size_b], l2[:size_b]
        for i in range(size_a):
            cell_N[m1[i]] = a
        for i in range(size_b):
            cell_N[m2[i]] = b
    label_N = np.zeros(num_places, np.int64)
    for c in range(num_cells):
        for i in range(count[c]):
            label_N[member[c, i]] = label[c, i]
    return label_N, over.sum()
