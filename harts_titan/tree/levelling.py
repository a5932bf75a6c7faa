"""Producers of a placement, and how deep they reach: the same work in every computation (HARTS 3.2, A.2).

A producer computes every prefix that two or more consumers of its cell use. What is left differs from replica to
replica, and each computation waits for the slowest. A prefix that only one consumer uses costs the same wherever it is
computed, so producers with less to do than the largest of their window take such rows over from the consumers that
would be the slowest of their slot. Not in the paper: its producers hold prefixes that at least two consumers use.

Shapes: N trajectories by sorted place, D replicas, K slots of a window.
"""

from __future__ import annotations

import numba
import numpy as np

from harts_titan.tree.sorted_step import common_prefix

_STEPS = 256
"""Steps in which the largest producer of a window is divided when levels are searched."""


@numba.njit(cache=True, nogil=True)
def shared_depths(place, label, minimum_LN):
    """Return how many tokens each trajectory shares with another consumer of its cell.

    Args:
        place: int64 (n,) sorted places of the cell's trajectories, ascending.
        label: int64 (n,) consumer of each.
        minimum_LN: ``SortedStep.minimum_LN``.

    Returns:
        int64 (n,) depths, closed as ``Placement.shared_N`` asks.
    """
    n = place.shape[0]
    depth = np.zeros(n, np.int64)
    nearest = 0
    for i in range(1, n):
        common = common_prefix(minimum_LN, place[i - 1], place[i])
        # Common prefixes shrink with distance, so the nearest trajectory of another consumer shares most.
        nearest = common if label[i] != label[i - 1] else min(nearest, common)
        depth[i] = nearest
    nearest = 0
    for i in range(n - 2, -1, -1):
        common = common_prefix(minimum_LN, place[i], place[i + 1])
        nearest = common if label[i] != label[i + 1] else min(nearest, common)
        depth[i] = max(depth[i], nearest)
    return depth


@numba.njit(cache=True, nogil=True)
def producer_rows(place, depth, minimum_LN):
    """Return the rows of the union of the prefixes of ``depth`` tokens."""
    rows, last = 0, -1
    for i in range(place.shape[0]):
        if depth[i] > 0:
            seen = common_prefix(minimum_LN, last, place[i]) if last >= 0 else 0
            rows += max(0, depth[i] - seen)
            last = place[i]
    return rows


@numba.njit(cache=True, nogil=True)
def fit_producer(place, label, depth, num_labels, capacity, minimum_LN):
    """Cut the prefixes of a producer that is too large, in place: those of the fewest consumers first (HARTS A.2).

    Prefixes that ``u`` or more consumers use are kept for the least ``u`` that fits, then those of ``u - 1`` consumers
    in sorted order as far as there is room.
    """
    if producer_rows(place, depth, minimum_LN) <= capacity:
        return
    n = place.shape[0]
    # used[u, i]: depth of the deepest row of i that u consumers use.
    used = np.zeros((num_labels + 2, n), np.int64)
    seen = np.zeros(num_labels, np.int64)
    for i in range(n):
        seen[:] = 0
        seen[label[i]] = 1
        count, lo, hi, common = 1, i - 1, i + 1, 1 << 62
        while count < num_labels and common > 0:
            left = common_prefix(minimum_LN, place[lo], place[i]) if lo >= 0 else 0
            right = common_prefix(minimum_LN, place[i], place[hi]) if hi < n else 0
            common = max(left, right)
            j = lo if left >= right else hi
            if left >= right:
                lo -= 1
            else:
                hi += 1
            if common > 0 and seen[label[j]] == 0:
                seen[label[j]] = 1
                count += 1
                used[count, i] = common
    keep = 2
    while keep <= num_labels and producer_rows(place, used[keep], minimum_LN) > capacity:
        keep += 1
    depth[:] = used[keep]
    room = capacity - producer_rows(place, depth, minimum_LN)
    # One consumer fewer: a row is added once for all trajectories below it, so walk in sorted order.
    reached, last = 0, -1
    for i in range(n):
        have = depth[i]
        if last >= 0:
            have = max(have, min(reached, common_prefix(minimum_LN, last, place[i])))
        more = min(room, used[keep - 1, i] - have)
        if more > 0:
            have += more
            room -= more
        depth[i] = have
        if have > 0:
            reached, last = have, place[i]
    # Rows added on behalf of a later trajectory belong to the earlier ones that share them, too.
    reached, last = 0, -1
    for i in range(n - 1, -1, -1):
        if last >= 0:
            depth[i] = max(depth[i], min(reached, common_prefix(minimum_LN, place[i], last)))
        if depth[i] > 0:
            reached, last = depth[i], place[i]


@numba.njit(cache=True, nogil=True)
def window_levels(consumer_DK, producer_D, room_D):
    """Return what each slot and the producers of a window may cost at most: their sum is made small.

    Replica ``d`` hands ``sum_k max(0, consumer_DK[d, k] - level_K[k])`` over to its producer, which thereby stays below
    the producers' level. Levels are lowered in small steps, first where that takes least of what replicas have left.

    Args:
        consumer_DK: float64 cost of each consumer.
        producer_D: float64 cost of each producer.
        room_D: float64 cost each producer may take over; 0 where there is none.

    Returns:
        float64 (K,) levels of the slots.
    """
    num_replicas, num_slots = consumer_DK.shape
    top_K = np.zeros(num_slots)
    for k in range(num_slots):
        top_K[k] = consumer_DK[:, k].max()
    best_K, best = top_K.copy(), top_K.sum() + producer_D.max()
    if producer_D.max() <= 0:
        return best_K
    step = producer_D.max() / _STEPS
    for trial in range(24):
        level = producer_D.max() * (1.0 + trial / 32.0)
        level_K = top_K.copy()
        left_D = np.zeros(num_replicas)
        for d in range(num_replicas):
            left_D[d] = min(level - producer_D[d], room_D[d])
        while True:
            chosen, least = -1, 0.0
            for k in range(num_slots):
                if level_K[k] < step:
                    continue
                price, possible = 0.0, True
                for d in range(num_replicas):
                    take = min(step, consumer_DK[d, k] - level_K[k] + step)
                    if take > 0:
                        if take > left_D[d]:
                            possible = False
                            break
                        price += take / left_D[d]
                if possible and (chosen < 0 or price < least):
                    chosen, least = k, price
            if chosen < 0:
                break
            for d in range(num_replicas):
                left_D[d] -= max(0.0, min(step, consumer_DK[d, chosen] - level_K[chosen] + step))
            level_K[chosen] -= step
        total = level_K.sum() + level
        if total < best:
            best, best_K = total, level_K
    return best_K


@numba.njit(cache=True, nogil=True, inline="always")
def _rows_for(depth, cost, pair):
    """Return how many rows from ``depth`` on cost at most ``cost`` (in rows, attended pairs weighted by ``pair``)."""
    if pair == 0.0:
        return np.int64(cost)
    # r + pair * (r * depth + r * (r + 1) / 2) = cost, solved for r.
    half = 1.0 + pair * (depth + 0.5)
    return np.int64((np.sqrt(half * half + 2.0 * pair * cost) - half) / pair)


@numba.njit(cache=True, nogil=True)
def deepen(place, label, consumer, depth, cost, length_N, minimum_LN, pair, grid):
    """Let a cell's producer take over rows of one consumer worth about ``cost``, in place.

    The rows continue a prefix that the producer has, down to the next fork of the consumer at most; the consumer's
    largest trees give first. New depths are multiples of ``grid`` (a chunk boundary needs no replay) where possible.

    Args:
        place: int64 (n,) places of the cell, ascending.
        label: int64 (n,) consumer of each.
        consumer: the one to relieve.
        depth: int64 (n,) ``shared`` depths, changed.
        cost: of the rows to take, in rows.
        length_N: int64 tokens.
        minimum_LN: ``SortedStep.minimum_LN``.
        pair: cost of an attended pair in rows.
        grid: tokens in a chunk.
    """
    n = place.shape[0]
    while cost >= 1.0:
        best_first, best_last, best_end, best = -1, -1, 0, 0.0
        first, last, end = -1, -1, 0
        for i in range(n + 1):
            if i < n and label[i] != consumer:
                continue
            if i < n and first >= 0:
                common = common_prefix(minimum_LN, place[last], place[i])
                if common > depth[i]:
                    # The same tree: it hangs on the same row of the producer.
                    end = min(end, common)
                    last = i
                    continue
            if first >= 0:
                value = (end - depth[first]) + pair * 0.5 * (end * (end + 1.0) - depth[first] * (depth[first] + 1.0))
                if value > best:
                    best_first, best_last, best_end, best = first, last, end, value
            if i < n:
                first, last, end = i, i, length_N[place[i]]
        if best_first < 0:
            return
        start = depth[best_first]
        stop = min(best_end, start + _rows_for(start, cost, pair))
        if stop < best_end:
            stop = max(start, stop // grid * grid)
        if stop <= start:
            return
        for i in range(best_first, best_last + 1):
            if label[i] == consumer:
                depth[i] = stop
        cost -= (stop - start) + pair * 0.5 * (stop * (stop + 1.0) - start * (start + 1.0))
