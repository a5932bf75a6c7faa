"""Local search of Level 2: which trajectories share a replica and a sharing window (HARTS 3.2, A.2).

A *cell* is one replica's part of one window: ``n`` consumers and the producer that serves them. Together they execute
every distinct prefix of the cell once, however its trajectories are dealt to its consumers. So the search looks at the
tries of cells alone: it makes their sum small and equal from replica to replica, and only keeps the complete layout of
every consumer within capacity. What each consumer and producer executes is levelled afterwards (``levelling.py``).

Costs are taken along depth: the first ``t`` tokens of a trajectory cost ``H(t) = t + pair * t * (t + 1) / 2`` rows, so
a set of trajectories in sorted order costs ``sum H(length) - sum H(common prefix of neighbours)``.

Shapes: N trajectories by sorted place, C cells, M most consumers of a cell.
"""

from __future__ import annotations

import numba
import numpy as np

from harts_titan.tree.sorted_step import common_prefix

_FAR = 256
"""Sorted places within which a neighbour is looked for: related trajectories are close."""


@numba.njit(cache=True, nogil=True, inline="always")
def _next(random):
    """Return 31 bits of a linear congruential generator: the same on every machine."""
    random[0] = random[0] * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
    return np.int64(random[0] >> np.uint64(33))


@numba.njit(cache=True, nogil=True, inline="always")
def _cost(depth, pair):
    return depth + pair * (0.5 * depth * (depth + 1))


@numba.njit(cache=True, nogil=True)
def _gather(member, label, n, consumer, x, reach, minimum_LN, out):
    """Write the members of ``consumer`` that form a subtree around ``x``; return their number.

    It is the largest subtree that leaves out the members ``reach`` away on either side.
    """
    at = np.searchsorted(member[:n], x)
    # Members of the consumer to the left, nearest first, then to the right.
    left, i = 0, at - 1
    while i >= 0 and left < reach:
        if label[i] == consumer:
            left += 1
            out[reach - left] = member[i]
        i -= 1
    out[reach] = x
    right, i = 0, at + 1
    while i < n and right < reach:
        if label[i] == consumer:
            right += 1
            out[reach + right] = member[i]
        i += 1
    depth = 0
    if left == reach:
        depth = max(depth, common_prefix(minimum_LN, out[0], x) + 1)
    if right == reach:
        depth = max(depth, common_prefix(minimum_LN, x, out[2 * reach]) + 1)
    first, last = reach - left, reach + right
    while first < reach and (reach - first >= reach or common_prefix(minimum_LN, out[first], x) < depth):
        first += 1
    while last > reach and (last - reach >= reach or common_prefix(minimum_LN, x, out[last]) < depth):
        last -= 1
    size = last - first + 1
    for i in range(size):
        out[i] = out[first + i]
    return size


@numba.njit(cache=True, nogil=True)
def _shared_after(member, label, n, consumer, skip, num_skip, add, num_add, minimum_LN, pair):
    """Return what inserting ``add`` into a sorted set saves: the gain of ``sum H(common prefix of neighbours)``.

    The set is the cell's members (``consumer < 0``) or one consumer's, without ``skip``.
    """
    at = np.searchsorted(member[:n], add[0])
    before, i = -1, at - 1
    s = num_skip - 1
    while s >= 0 and skip[s] >= add[0]:
        s -= 1
    while i >= 0:
        while s >= 0 and skip[s] > member[i]:
            s -= 1
        if (consumer < 0 or label[i] == consumer) and not (s >= 0 and skip[s] == member[i]):
            before = member[i]
            break
        i -= 1
    gain = 0.0
    old, new = before, before
    i, s, a = at, 0, 0
    while True:
        while i < n:
            while s < num_skip and skip[s] < member[i]:
                s += 1
            if (consumer < 0 or label[i] == consumer) and not (s < num_skip and skip[s] == member[i]):
                break
            i += 1
        if a < num_add and (i >= n or add[a] < member[i]):
            if new >= 0:
                gain += _cost(common_prefix(minimum_LN, new, add[a]), pair)
            new = add[a]
            a += 1
            continue
        if i >= n:
            return gain
        if new >= 0:
            gain += _cost(common_prefix(minimum_LN, new, member[i]), pair)
        if old >= 0:
            gain -= _cost(common_prefix(minimum_LN, old, member[i]), pair)
        if a == num_add:
            return gain
        old = new = member[i]
        i += 1


@numba.njit(cache=True, nogil=True)
def _change(member, label, n, consumer, out, num_out, inn, num_inn, length_N, minimum_LN, pair):
    """Return by how much the cost of a sorted set grows when ``out`` leaves and ``inn`` enters."""
    delta = 0.0
    if num_inn > 0:
        delta -= _shared_after(member, label, n, consumer, out, num_out, inn, num_inn, minimum_LN, pair)
        for i in range(num_inn):
            delta += _cost(length_N[inn[i]], pair)
    if num_out > 0:
        delta += _shared_after(member, label, n, consumer, out, num_out, out, num_out, minimum_LN, pair)
        for i in range(num_out):
            delta -= _cost(length_N[out[i]], pair)
    return delta


@numba.njit(cache=True, nogil=True)
def _replace(member, label, n, out, num_out, inn, num_inn, consumer, new_member, new_label):
    """Rewrite a cell's members without ``out`` and with ``inn`` under ``consumer``; return their number."""
    i, r, a, size = 0, 0, 0, 0
    while i < n or a < num_inn:
        if i < n and r < num_out and member[i] == out[r]:
            i += 1
            r += 1
        elif a < num_inn and (i >= n or inn[a] < member[i]):
            new_member[size], new_label[size] = inn[a], consumer
            size += 1
            a += 1
        else:
            new_member[size], new_label[size] = member[i], label[i]
            size += 1
            i += 1
    for i in range(size):
        member[i], label[i] = new_member[i], new_label[i]
    return size


@numba.njit(cache=True, nogil=True)
def cell_cost(member, label, n, consumer, length_N, minimum_LN, pair):
    """Return the cost of a cell's trie (``consumer < 0``) or of one consumer's, in rows."""
    total, last = 0.0, -1
    for i in range(n):
        if consumer < 0 or label[i] == consumer:
            total += _cost(length_N[member[i]], pair)
            if last >= 0:
                total -= _cost(common_prefix(minimum_LN, last, member[i]), pair)
            last = member[i]
    return total


@numba.njit(cache=True, nogil=True)
def search_cells(
    cell_N,
    label_N,
    consumers_C,
    length_N,
    minimum_LN,
    capacity,
    pair,
    moves,
    whole,
    weight,
    heat,
    complete_weight,
    seed,
):
    """Exchange runs of trajectories between cells until tries are small and alike; changes ``cell_N``, ``label_N``.

    The objective is ``sum_c G_c + weight * sum_c (G_c - t_c)^2 / t_c + complete_weight * complete rows``, ``G`` the
    cost of a cell's trie and ``t`` its share of the total by number of consumers. A change is taken if it adds at most a
    bound that falls linearly to zero. Consumers stay non-empty and within ``capacity`` complete rows.

    Args:
        cell_N: int64 cell of each place.
        label_N: int64 consumer within the cell.
        consumers_C: int64 consumers of each cell.
        length_N: int64 tokens.
        minimum_LN: ``SortedStep.minimum_LN``.
        capacity: complete rows of a consumer.
        pair: cost of an attended pair in rows.
        moves: proposals to try.
        whole: True to swap whole consumers, False to move and swap runs of trajectories.
        weight: of the balance term.
        heat: first bound, in units of the mean cost of a trajectory.
        complete_weight: of complete rows, which capacity makes scarce.
        seed: of the random numbers.

    Returns:
        float64 (C,) costs of the cells.
    """
    num_places, num_cells = length_N.shape[0], consumers_C.shape[0]
    num_labels = consumers_C.max()
    count = np.zeros(num_cells, np.int64)
    for x in range(num_places):
        count[cell_N[x]] += 1
    room = min(num_places, 2 * count.max() + 64)
    member, label = np.zeros((num_cells, room), np.int64), np.zeros((num_cells, room), np.int64)
    count[:] = 0
    for x in range(num_places):
        c = cell_N[x]
        member[c, count[c]], label[c, count[c]] = x, label_N[x]
        count[c] += 1
    cost, complete = np.zeros(num_cells), np.zeros((num_cells, num_labels))
    size = np.zeros((num_cells, num_labels), np.int64)
    for c in range(num_cells):
        cost[c] = cell_cost(member[c], label[c], count[c], -1, length_N, minimum_LN, pair)
        for k in range(consumers_C[c]):
            complete[c, k] = cell_cost(member[c], label[c], count[c], k, length_N, minimum_LN, 0.0)
    for x in range(num_places):
        size[cell_N[x], label_N[x]] += 1
    total, share = cost.sum(), 1.0 / consumers_C.sum()
    bound = heat * total / num_places
    random = np.zeros(1, np.uint64)
    random[0] = np.uint64(seed)
    out, back = np.zeros(2 * room + 1, np.int64), np.zeros(2 * room + 1, np.int64)
    buffer_m, buffer_l = np.zeros(room, np.int64), np.zeros(room, np.int64)
    for move in range(moves):
        x = _next(random) % num_places
        if _next(random) % 4 < 3:
            far = 1
            while far < _FAR and _next(random) % 8 > 0:
                far += 1
            y = x + far if _next(random) % 2 == 0 else x - far
            if y < 0 or y >= num_places:
                continue
        else:
            y = _next(random) % num_places
        a, b, ka, kb = cell_N[x], cell_N[y], label_N[x], label_N[y]
        if a == b and (ka == kb or whole):
            continue
        num_back = 0
        if whole:
            num_out = _gather(member[a], label[a], count[a], ka, x, size[a, ka], minimum_LN, out)
            num_back = _gather(member[b], label[b], count[b], kb, y, size[b, kb], minimum_LN, back)
        else:
            reach = 1 + _next(random) % (1 << (_next(random) % 6))
            reach = min(reach, size[a, ka])
            num_out = _gather(member[a], label[a], count[a], ka, x, reach, minimum_LN, out)
            if _next(random) % 2 == 0:
                reach = min(1 + _next(random) % (2 * reach), size[b, kb])
                num_back = _gather(member[b], label[b], count[b], kb, y, reach, minimum_LN, back)
            elif num_out == size[a, ka]:
                continue
        grown_b = _change(member[b], label[b], count[b], kb, back, num_back, out, num_out, length_N, minimum_LN, 0.0)
        if complete[b, kb] + grown_b > capacity:
            continue
        grown_a = _change(member[a], label[a], count[a], ka, out, num_out, back, num_back, length_N, minimum_LN, 0.0)
        if complete[a, ka] + grown_a > capacity:
            continue
        delta, delta_a, delta_b = complete_weight * (grown_a + grown_b), 0.0, 0.0
        if a != b:
            if count[a] + num_back > room or count[b] + num_out > room:
                continue
            delta_a = _change(
                member[a], label[a], count[a], -1, out, num_out, back, num_back, length_N, minimum_LN, pair
            )
            delta_b = _change(
                member[b], label[b], count[b], -1, back, num_back, out, num_out, length_N, minimum_LN, pair
            )
            ta, tb = total * share * consumers_C[a], total * share * consumers_C[b]
            ea, eb = cost[a] - ta, cost[b] - tb
            delta += delta_a + delta_b
            delta += weight * (((ea + delta_a) ** 2 - ea * ea) / ta + ((eb + delta_b) ** 2 - eb * eb) / tb)
        if delta > bound * (moves - move) / moves:
            continue
        if a == b:
            for i in range(num_out):
                label[a, np.searchsorted(member[a, : count[a]], out[i])] = kb
            for i in range(num_back):
                label[a, np.searchsorted(member[a, : count[a]], back[i])] = ka
        else:
            count[a] = _replace(member[a], label[a], count[a], out, num_out, back, num_back, ka, buffer_m, buffer_l)
            count[b] = _replace(member[b], label[b], count[b], back, num_back, out, num_out, kb, buffer_m, buffer_l)
            cost[a] += delta_a
            cost[b] += delta_b
            total += delta_a + delta_b
        for i in range(num_out):
            cell_N[out[i]], label_N[out[i]] = b, kb
        for i in range(num_back):
            cell_N[back[i]], label_N[back[i]] = a, ka
        size[a, ka] += num_back - num_out
        size[b, kb] += num_out - num_back
        complete[a, ka] += grown_a
        complete[b, kb] += grown_b
    return cost
