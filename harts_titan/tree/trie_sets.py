"""Sets of trajectories in sorted order, and what they cost: the kernels under the searches of Level 2.

A set is ``member[:n]``, ascending sorted places, with the consumer of each in ``label[:n]``. Its cost is that of its
trie: the first ``t`` tokens of a trajectory cost ``H(t) = t + pair * t * (t + 1) / 2`` rows, so a set costs
``sum H(length) - sum H(common prefix of neighbours)``.
"""

from __future__ import annotations

import numba
import numpy as np

from harts_titan.tree.compiled import kernel
from harts_titan.tree.sorted_step import common_prefix


@kernel
def find(member, n, x):
    """Return the number of members before ``x``."""
    low, high = 0, n
    while low < high:
        middle = (low + high) // 2
        if member[middle] < x:
            low = middle + 1
        else:
            high = middle
    return low


@numba.njit(cache=True, nogil=True, inline="always")
def draw(random):
    """Return 31 bits of a linear congruential generator: the same on every machine."""
    random[0] = random[0] * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
    return np.int64(random[0] >> np.uint64(33))


@numba.njit(cache=True, nogil=True, inline="always")
def _cost(depth, pair):
    return depth + pair * (0.5 * depth * (depth + 1))


@kernel
def gather(member, label, n, consumer, x, reach, minimum_LN, out):
    """Write the members of ``consumer`` that form a subtree around ``x``; return their number.

    It is the largest subtree that leaves out the members ``reach`` away on either side.
    """
    at = find(member, n, x)
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


@kernel
def _shared_after(member, label, n, consumer, skip, num_skip, add, num_add, minimum_LN, pair):
    """Return what inserting ``add`` into a sorted set saves: the gain of ``sum H(common prefix of neighbours)``.

    The set is the cell's members (``consumer < 0``) or one consumer's, without ``skip``.
    """
    at = find(member, n, add[0])
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


@kernel
def change(member, label, n, consumer, out, num_out, inn, num_inn, length_N, minimum_LN, pair):
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


@kernel
def merge(member, label, n, out, num_out, inn, num_inn, consumer, new_member, new_label):
    """Write a set without ``out`` and with ``inn`` under ``consumer`` to new arrays; return its size."""
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
    return size


@kernel
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


@kernel
def rows_needed(member, n, capacity, length_N, minimum_LN, end, below):
    """Return complete rows that microbatches of ``capacity`` need at least for a set: the bound of HARTS A.1 by node.

    A node of the trie has to be in as many microbatches as the rows below it, beside the path to it, fill.

    Args:
        member: int64 (n,) places, ascending.
        n: places in use.
        capacity: rows of a microbatch.
        length_N: int64 tokens.
        minimum_LN: ``SortedStep.minimum_LN``.
        end: float64 scratch, n + 2 entries.
        below: float64 scratch, n + 2 entries.
    """
    total, top = 0.0, 0
    end[0], below[0] = 0.0, 0.0
    for i in range(n + 1):
        shared = common_prefix(minimum_LN, member[i - 1], member[i]) if 0 < i < n else 0
        # Close the nodes that the next trajectory does not pass, cutting the one in which it leaves.
        while top > 0 and end[top] > shared:
            start = max(end[top - 1], float(shared))
            length = end[top] - start
            copies = max(1.0, np.ceil((below[top] + 1.0) / (capacity - end[top] + 1.0)))
            total += length * copies
            if end[top - 1] >= shared:
                below[top - 1] += below[top] + length
                top -= 1
            else:
                end[top] = shared
                below[top] += length
        if i < n and length_N[member[i]] > end[top]:
            top += 1
            end[top], below[top] = length_N[member[i]], 0.0
    return total
