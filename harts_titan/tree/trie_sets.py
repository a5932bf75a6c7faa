"""Sets of trajectories in sorted order, and what they cost: the kernels under the searches of Level 2.

A set is ``member[:n]``, ascending sorted places. Its cost is that of its trie: the first ``t`` tokens of a trajectory
cost ``H(t) = t + pair * t * (t + 1) / 2`` rows, so a set costs ``sum H(length) - sum H(common prefix of neighbours)``.
"""

from __future__ import annotations

import numba
import numpy as np

from harts_titan.tree.compiled import kernel
from harts_titan.tree.draws import draw
from harts_titan.tree.lower_bound import copies
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
def _cost(depth, pair):
    return depth + pair * (0.5 * depth * (depth + 1))


@kernel
def gather(member, n, x, reach, minimum_LN, out):
    """Write the members of a set that form a subtree around its member ``x``; return their number.

    It is the largest subtree that leaves out the members ``reach`` away on either side.
    """
    at = find(member, n, x)
    depth = 0
    if at >= reach:
        depth = common_prefix(minimum_LN, member[at - reach], x) + 1
    if at + reach < n:
        depth = max(depth, common_prefix(minimum_LN, x, member[at + reach]) + 1)
    first, last = max(0, at - reach + 1), min(n - 1, at + reach - 1)
    while first < at and common_prefix(minimum_LN, member[first], x) < depth:
        first += 1
    while last > at and common_prefix(minimum_LN, x, member[last]) < depth:
        last -= 1
    size = last - first + 1
    for i in range(size):
        out[i] = member[first + i]
    return size


@kernel
def _shared_after(member, n, skip, num_skip, add, num_add, minimum_LN, pair):
    """Return what inserting ``add`` into a set without ``skip`` saves: the gain of ``sum H(common prefix)``."""
    at = find(member, n, add[0])
    s = find(skip, num_skip, add[0])
    before = at - 1
    while before >= 0 and s - at + before >= 0 and skip[s - at + before] == member[before]:
        before -= 1
    old = member[before] if before >= 0 else -1
    gain, new = 0.0, old
    i, a = at, 0
    while True:
        while i < n and s < num_skip and skip[s] == member[i]:
            i += 1
            s += 1
        if a < num_add and (i >= n or add[a] < member[i]):
            if new >= 0:
                gain += _cost(common_prefix(minimum_LN, new, add[a]), pair)
            new = add[a]
            a += 1
            continue
        if i >= n:
            return gain
        if new != old:
            gain += _cost(common_prefix(minimum_LN, new, member[i]), pair)
            if old >= 0:
                gain -= _cost(common_prefix(minimum_LN, old, member[i]), pair)
        if a == num_add:
            return gain
        old = new = member[i]
        i += 1


@kernel
def change(member, n, out, num_out, inn, num_inn, length_N, minimum_LN, pair):
    """Return by how much the cost of a set grows when its members ``out`` leave and ``inn`` enter."""
    delta = 0.0
    if num_inn > 0:
        delta -= _shared_after(member, n, out, num_out, inn, num_inn, minimum_LN, pair)
        for i in range(num_inn):
            delta += _cost(length_N[inn[i]], pair)
    if num_out > 0:
        delta += _shared_after(member, n, out, num_out, out, num_out, minimum_LN, pair)
        for i in range(num_out):
            delta -= _cost(length_N[out[i]], pair)
    return delta


@kernel
def merge(member, n, out, num_out, inn, num_inn, new_member):
    """Write a set without its members ``out`` and with ``inn`` to another array; return its size."""
    i, r, a, size = 0, 0, 0, 0
    while i < n or a < num_inn:
        if i < n and r < num_out and member[i] == out[r]:
            i += 1
            r += 1
        elif a < num_inn and (i >= n or inn[a] < member[i]):
            new_member[size] = inn[a]
            size += 1
            a += 1
        else:
            new_member[size] = member[i]
            size += 1
            i += 1
    return size


@kernel
def exchange(member, n, out, num_out, inn, num_inn, scratch):
    """Take ``out`` out of a set and put ``inn`` in; return its size."""
    size = merge(member, n, out, num_out, inn, num_inn, scratch)
    for i in range(size):
        member[i] = scratch[i]
    return size


@kernel
def set_cost(member, n, length_N, minimum_LN, pair):
    """Return the cost of a set's trie, in rows."""
    total = 0.0
    for i in range(n):
        total += _cost(length_N[member[i]], pair)
        if i > 0:
            total -= _cost(common_prefix(minimum_LN, member[i - 1], member[i]), pair)
    return total


@kernel
def fill_sets(set_N, member_SR, size_S):
    """List the members of each set in a table: ``set_N`` is the set of each place."""
    size_S[:] = 0
    for x in range(set_N.shape[0]):
        c = set_N[x]
        member_SR[c, size_S[c]] = x
        size_S[c] += 1


def near_places(chance: float) -> np.ndarray:
    """Return distances to a neighbour: int64 (1024,) quantiles of 1, 2, ..., each next one with the given chance.

    Products are the same on every machine; logarithms need not be.
    """
    power = np.multiply.accumulate(np.full(256, chance))
    return 1 + np.searchsorted(-power, -(np.arange(1024) + 0.5) / 1024)


@kernel
def neighbour(random_1, x, num_places, near):
    """Draw a place near ``x`` from distances of :func:`near_places`; -1 where it would be outside."""
    far = near[draw(random_1, near.shape[0])]
    y = x + far if draw(random_1, 2) == 0 else x - far
    return y if 0 <= y < num_places else -1


@kernel
def balance_change(cost_C, total, share_C, a, b, delta_a, delta_b):
    """Return the change of ``sum (cost - target)^2 / target`` of two sets; the targets are shares of the total."""
    target_a, target_b = total * share_C[a], total * share_C[b]
    from_a, from_b = cost_C[a] - target_a, cost_C[b] - target_b
    square_a = ((from_a + delta_a) ** 2 - from_a * from_a) / target_a
    return square_a + ((from_b + delta_b) ** 2 - from_b * from_b) / target_b


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
            total += length * max(1.0, copies(below[top], end[top], capacity))
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
