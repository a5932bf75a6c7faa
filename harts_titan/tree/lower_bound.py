"""The least compact rows any partition of a step can have (not in the paper).

Shapes: N trajectories by sorted place, U trie nodes.
"""

from __future__ import annotations

import numba
import numpy as np

from harts_titan.tree.compiled import kernel
from harts_titan.tree.forest import open_trie
from harts_titan.tree.sorted_step import SortedStep


def lower_bound(step: SortedStep, *, capacity: int, dp_degree: int) -> int:
    """Return a lower bound of the compact rows of all microbatches, over every feasible partition.

    A trie node ``u`` of ``len(u)`` tokens ends at depth ``end(u)`` and has ``Csub(u)`` tokens in its subtree, itself
    included. A microbatch with the last token of ``u`` has the ``end(u) - 1`` tokens above as well, so at most
    ``T - end(u) + 1`` of the ``Csub(u) - len(u) + 1`` tokens from there on. That token, hence every token of ``u``, is
    in at least ``n(u) = max(n of its children, ceil((Csub(u) - len(u) + 1) / (T - end(u) + 1)))`` microbatches, and
    the partition has ``sum_u len(u) * n(u)`` rows or more. A node that every trajectory begins with is in all
    microbatches, whose number is a multiple of ``D`` and at least the largest ``n``, ``D`` and rows over ``T``.

    Args:
        step: trajectories in lexicographic order.
        capacity: compact rows a microbatch may have, ``T``; at least the longest trajectory.
        dp_degree: replicas, ``D``.

    Returns:
        The bound in rows; at least the distinct tokens of the step.

    Raises:
        ValueError: If a trajectory is longer than ``capacity`` or ``dp_degree`` is not positive.

    Time: O(N log N).
    """
    if dp_degree < 1:
        raise ValueError(f"dp_degree is {dp_degree}, must be at least 1")
    longest = int(step.length_N.max())
    if longest > capacity:
        raise ValueError(f"capacity ({capacity}) is smaller than the longest trajectory ({longest} tokens)")
    end_U, parent_U, _, _ = open_trie(step.length_N, step.lcp_N)
    rows, common, count = _bound(end_U, parent_U, np.argsort(-end_U, kind="stable"), capacity)
    num_groups = dp_degree * -(-max(count, -(-rows // capacity)) // dp_degree)
    while common:
        # More microbatches repeat the common node more often, which may need more of them.
        total = rows + common * (num_groups - count)
        needed = dp_degree * -(-total // (capacity * dp_degree))
        if needed <= num_groups:
            return int(total)
        num_groups = needed
    return int(rows)


@kernel
def copies(below, end, capacity):
    """Return in how many microbatches a node that ends at ``end`` is at least, for ``below`` rows beneath it: a float.

    The quotient is a fraction of at most ``capacity`` parts: far enough from integers for 64-bit floats.
    """
    return np.ceil((below + 1.0) / (capacity - end + 1.0))


@numba.njit(cache=True)
def _bound(end_U, parent_U, bottom_up, capacity):
    """Return the rows, the tokens of a node that all trajectories begin with, and the largest node count."""
    below_U, count_U = np.zeros_like(end_U), np.zeros_like(end_U)
    rows, roots, root = 0, 0, -1
    for u in bottom_up:
        p = parent_U[u]
        if p < 0:
            continue
        length = end_U[u] - end_U[p]
        count_U[u] = max(count_U[u], np.int64(copies(below_U[u], end_U[u], capacity)))
        rows += length * count_U[u]
        below_U[p] += below_U[u] + length
        count_U[p] = max(count_U[p], count_U[u])
        if p == 0:
            roots, root = roots + 1, u
    return rows, end_U[root] if roots == 1 else 0, count_U[0]
