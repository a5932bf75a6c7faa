"""Local search of Level 2: which trajectories share a replica and a sharing window (HARTS 3.2, A.2).

A *cell* is one replica's part of one window: ``n`` consumers and the producer that serves them. Together they execute
every distinct prefix of the cell once, however its trajectories are dealt to its consumers. So the search looks at the
tries of cells alone: it makes their sum small and equal from replica to replica, and only keeps the complete layout of
every consumer within capacity. What each consumer and producer executes is levelled afterwards (``levelling.py``).

Shapes: N trajectories by sorted place, C cells.
"""

from __future__ import annotations

import numba
import numpy as np

from harts_titan.tree.trie_sets import cell_cost, change, draw, find, gather, merge, rows_needed

_FAR = 256
"""Sorted places within which a neighbour is looked for: related trajectories are close."""


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
    row_limit,
    fill,
    seed,
):
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
        capacity: complete rows of a consumer.
        pair: cost of an attended pair in rows.
        moves: proposals to try.
        whole: True to swap whole consumers, False to move and swap runs of trajectories.
        weight: of the balance term.
        heat: first bound, in units of the mean cost of a trajectory.
        complete_weight: of complete rows, which capacity makes scarce.
        row_limit: rows of a consumer for ``rows_needed``.
        fill: rows a consumer may need for what its cell holds; 0 for no such term. Where ``rows_needed`` of a cell is
            more than ``fill`` for each of its consumers, the rest is added to the objective.
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
    end, below, excess = np.zeros(room + 2), np.zeros(room + 2), np.zeros(num_cells)
    if fill > 0:
        for c in range(num_cells):
            need = rows_needed(member[c], count[c], row_limit, length_N, minimum_LN, end, below)
            excess[c] = max(0.0, need - fill * consumers_C[c])
    for move in range(moves):
        x = draw(random) % num_places
        if draw(random) % 16 < 15:
            far = 1
            while far < _FAR and draw(random) % 24 > 0:
                far += 1
            y = x + far if draw(random) % 2 == 0 else x - far
            if y < 0 or y >= num_places:
                continue
        else:
            y = draw(random) % num_places
        a, b, ka, kb = cell_N[x], cell_N[y], label_N[x], label_N[y]
        if a == b and (ka == kb or whole):
            continue
        num_back = 0
        if whole:
            num_out = gather(member[a], label[a], count[a], ka, x, size[a, ka], minimum_LN, out)
            num_back = gather(member[b], label[b], count[b], kb, y, size[b, kb], minimum_LN, back)
        else:
            reach = 1 + draw(random) % (1 << (draw(random) % 6))
            reach = min(reach, size[a, ka])
            num_out = gather(member[a], label[a], count[a], ka, x, reach, minimum_LN, out)
            if draw(random) % 2 == 0:
                reach = min(1 + draw(random) % (2 * reach), size[b, kb])
                num_back = gather(member[b], label[b], count[b], kb, y, reach, minimum_LN, back)
            elif num_out == size[a, ka]:
                continue
        grown_b = change(member[b], label[b], count[b], kb, back, num_back, out, num_out, length_N, minimum_LN, 0.0)
        if complete[b, kb] + grown_b > capacity:
            continue
        grown_a = change(member[a], label[a], count[a], ka, out, num_out, back, num_back, length_N, minimum_LN, 0.0)
        if complete[a, ka] + grown_a > capacity:
            continue
        delta, delta_a, delta_b = complete_weight * (grown_a + grown_b), 0.0, 0.0
        if a != b:
            if count[a] + num_back > room or count[b] + num_out > room:
                continue
            delta_a = change(
                member[a], label[a], count[a], -1, out, num_out, back, num_back, length_N, minimum_LN, pair
            )
            delta_b = change(
                member[b], label[b], count[b], -1, back, num_back, out, num_out, length_N, minimum_LN, pair
            )
            ta, tb = total * share * consumers_C[a], total * share * consumers_C[b]
            ea, eb = cost[a] - ta, cost[b] - tb
            delta += delta_a + delta_b
            delta += weight * (((ea + delta_a) ** 2 - ea * ea) / ta + ((eb + delta_b) ** 2 - eb * eb) / tb)
        limit = bound * (moves - move) / moves
        if fill > 0 and a != b and delta - excess[a] - excess[b] <= limit:
            n = merge(member[a], label[a], count[a], out, num_out, back, num_back, ka, buffer_m, buffer_l)
            need = rows_needed(buffer_m, n, row_limit, length_N, minimum_LN, end, below)
            excess_a = max(0.0, need - fill * consumers_C[a])
            n = merge(member[b], label[b], count[b], back, num_back, out, num_out, kb, buffer_m, buffer_l)
            need = rows_needed(buffer_m, n, row_limit, length_N, minimum_LN, end, below)
            excess_b = max(0.0, need - fill * consumers_C[b])
            delta += excess_a + excess_b - excess[a] - excess[b]
            if delta <= limit:
                excess[a], excess[b] = excess_a, excess_b
        if delta > limit:
            continue
        if a == b:
            for i in range(num_out):
                label[a, find(member[a], count[a], out[i])] = kb
            for i in range(num_back):
                label[a, find(member[a], count[a], back[i])] = ka
        else:
            count[a] = merge(member[a], label[a], count[a], out, num_out, back, num_back, ka, buffer_m, buffer_l)
            member[a, : count[a]], label[a, : count[a]] = buffer_m[: count[a]], buffer_l[: count[a]]
            count[b] = merge(member[b], label[b], count[b], back, num_back, out, num_out, kb, buffer_m, buffer_l)
            member[b, : count[b]], label[b, : count[b]] = buffer_m[: count[b]], buffer_l[: count[b]]
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
