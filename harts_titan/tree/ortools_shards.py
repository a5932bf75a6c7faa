"""Shards of the OR-Tools baseline: which replica trains which trajectory, decided on original tokens (HARTS 5.3).

Shapes: N trajectories by sorted place, I items, D replicas.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from harts_titan.tree.sorted_step import SortedStep


def subtree_items(step: SortedStep, limit: int) -> np.ndarray:
    """Cut a step into the largest subtrees of its trie that hold at most ``limit`` original tokens each.

    A subtree with more is replaced by its children: runs of sorted places that share more than their fork. A single
    trajectory is never cut.

    Args:
        step: sorted trajectories.
        limit: original tokens; 0 makes every trajectory an item of its own.

    Returns:
        int64 (I+1,) item ``i`` is the sorted places ``[bound[i], bound[i+1])``.
    """
    tokens = np.concatenate([[0], np.cumsum(step.length_N)])
    bounds, todo = [step.num_trajectories], [(0, step.num_trajectories)]
    while todo:
        first, end = todo.pop()
        if end - first == 1 or tokens[end] - tokens[first] <= limit:
            bounds.append(first)
            continue
        inner = step.lcp_N[first + 1 : end]
        cuts = [first, *(first + 1 + np.flatnonzero(inner == inner.min())).tolist(), end]
        todo.extend(pairwise(cuts))
    return np.array(sorted(bounds), dtype=np.int64)


def first_fit_decreasing(weight_I: np.ndarray, bin_capacity: int, num_bins: int) -> np.ndarray | None:
    """Return the bin of each item, or None where one fits nowhere.

    Items are taken heaviest first, equal ones in their order; each goes to the first bin with room for it.

    Args:
        weight_I: int64 weight of each item.
        bin_capacity: weight a bin may hold.
        num_bins: number of bins.
    """
    bin_I, load = np.zeros(weight_I.shape[0], np.int64), [0] * num_bins
    for i in np.argsort(-weight_I, kind="stable").tolist():
        weight = int(weight_I[i])
        target = next((b for b in range(num_bins) if load[b] + weight <= bin_capacity), -1)
        if target < 0:
            return None
        bin_I[i] = target
        load[target] += weight
    return bin_I


def shard_by_original_tokens(step: SortedStep, dp_degree: int, items_per_replica: int) -> np.ndarray:
    """Assign trajectories to replicas by first-fit decreasing on original tokens.

    The items are the largest subtrees of at most ``1 / items_per_replica`` of a replica's fair share (the step's
    original tokens over ``dp_degree``); more items than a share has tokens means single trajectories. Every replica
    is a bin of the same capacity: the smallest, found by bisection, with which first-fit decreasing needs no more than
    ``dp_degree`` bins, so the loads are as even as this rule makes them (MULTIFIT: Coffman, Garey and Johnson 1978).
    A replica left without a trajectory, possible only where there are few, takes one from the replica with the most.

    Args:
        step: sorted trajectories, at least ``dp_degree``.
        dp_degree: number of replicas.
        items_per_replica: fineness of the items.

    Returns:
        int64 (N,) replica of each trajectory, by sorted place.
    """
    share = -(-step.original_tokens // dp_degree)
    bound_I1 = subtree_items(step, share // items_per_replica)
    weight_I = np.add.reduceat(step.length_N, bound_I1[:-1])
    low = max(share, int(weight_I.max()))
    # An item that fits nowhere would find every bin filled above `high - its weight` >= the fair share.
    high = share + int(weight_I.max())
    while low < high:
        middle = (low + high) // 2
        if first_fit_decreasing(weight_I, middle, dp_degree) is None:
            low = middle + 1
        else:
            high = middle
    replica_I = first_fit_decreasing(weight_I, high, dp_degree)
    assert replica_I is not None
    replica_N = np.repeat(replica_I, np.diff(bound_I1))
    count_D = np.bincount(replica_N, minlength=dp_degree)
    for d in np.flatnonzero(count_D == 0):
        moved = np.flatnonzero(replica_N == np.bincount(replica_N, minlength=dp_degree).argmax())[-1]
        replica_N[moved] = d
    return replica_N
