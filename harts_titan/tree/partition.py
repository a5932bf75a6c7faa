"""Level 1 of the planner: prefix compression (HARTS 3.2, A.1).

Shapes: N trajectories by sorted place, M leaves (trajectories that are no prefix of the next one), K groups
(microbatches), S slots, D replicas.
"""

from __future__ import annotations

from dataclasses import dataclass

import numba
import numpy as np

from harts_titan.tree.contiguous import contiguous_partition, search_contiguous
from harts_titan.tree.greedy import greedy_groups
from harts_titan.tree.groups import leaves
from harts_titan.tree.refine import refine
from harts_titan.tree.slots import assign_slots, initial_objective
from harts_titan.tree.sorted_step import SortedStep, common_prefix

__all__ = ["Partition", "contiguous_partition", "partition_step"]

# Moves of the local search for each trajectory: 0.2 s for 1,617 trajectories.
_MOVES = 90
# Leaves of a group up to which the number of moves is not reduced.
_CROWD = 16


@dataclass(frozen=True)
class Partition:
    """Microbatches of a step and their initial places.

    Attributes:
        group_N: int64 group of the trajectory at each sorted place; every group has at least one.
        rows_K: int64 compact rows of each group.
        group_SD: int64 (num_slots, dp_degree) group that replica ``d`` runs in slot ``j``.
        method: search that found the groups, for reports.
    """

    group_N: np.ndarray
    rows_K: np.ndarray
    group_SD: np.ndarray
    method: str

    @property
    def num_groups(self) -> int:
        """Number of microbatches over all replicas."""
        return int(self.rows_K.shape[0])

    @property
    def objective(self) -> tuple[int, int, int]:
        """``J_init``: total compact rows, sum over slots of the largest replica, rows of the heaviest replica."""
        return initial_objective(self.rows_K, self.group_SD)


def partition_step(
    step: SortedStep, *, capacity: int, dp_degree: int = 1, index_N: np.ndarray | None = None
) -> Partition:
    """Divide a step's trajectories into microbatches with few compact rows (HARTS 3.2).

    Candidates are the best contiguous partition, the greedy ones, and what a local search makes of the best of them
    (not in the paper); the least ``J_init`` is chosen.

    Args:
        step: trajectories in lexicographic order.
        capacity: compact rows a microbatch may have.
        dp_degree: number of replicas; the number of microbatches is a multiple of it.
        index_N: names of the trajectories by sorted place, for error messages; default ``step.order_N``.

    Returns:
        The microbatches and their initial places: a function of the arguments only.

    Raises:
        ValueError: If a trajectory is longer than ``capacity``, there are fewer trajectories than replicas, no
            partition into a multiple of ``dp_degree`` microbatches is found, or an argument is out of range.
    """
    names_N = step.order_N if index_N is None else index_N
    found = search_contiguous(step.length_N, step.lcp_N, capacity, dp_degree, index_N=names_N)
    best = None
    if found is not None:
        group_N = np.repeat(np.arange(found.num_groups), np.diff(found.bound_K1))
        best = Partition(group_N, found.rows_K, found.group_SD, "contiguous")
    # No group can have more rows than the step; the search scales its temperatures with the capacity.
    rows = min(capacity, step.distinct_tokens)
    leaf_N, leaf_step = leaves(step)
    for method, group_M in greedy_groups(leaf_step, capacity=rows):
        best = _better(best, _aligned(step, group_M[leaf_N], dp_degree, method))
    if best is None or best.objective[0] > step.distinct_tokens:
        start_M = group_M if best is None else best.group_N[leaf_step.order_N]
        # A move in a large group takes time in proportion to its leaves.
        crowd = max(1, leaf_step.num_trajectories // (_CROWD * int(np.unique(start_M).size)))
        moves = _MOVES * step.num_trajectories // crowd
        for group_M in refine(leaf_step, start_M, capacity=rows, dp_degree=dp_degree, moves=moves):
            best = _better(best, _aligned(step, group_M[leaf_N], dp_degree, "ruin and recreate"))
    if best is None:
        raise ValueError(_nothing_found(step, int(group_M.max()) + 1, capacity=capacity, dp_degree=dp_degree))
    return best


def _nothing_found(step: SortedStep, num_groups: int, *, capacity: int, dp_degree: int) -> str:
    """The refusal where microbatches within the capacity exist, but no multiple of the replicas of them."""
    least, rounded = -(-step.distinct_tokens // capacity), num_groups + -num_groups % dp_degree
    return (
        f"no partition of {step.num_trajectories} trajectories into microbatches of at most {capacity} rows was found "
        f"whose number is a multiple of dp_degree ({dp_degree}): {step.distinct_tokens} distinct tokens need at least "
        f"{least}, the search came to {num_groups}, and rounded up to {rounded} some would be "
        "empty; raise the capacity (tree.max_tokens in training), or change dp_degree or the number of trajectories"
    )


def _better(best: Partition | None, other: Partition | None) -> Partition | None:
    if best is None or other is None:
        return best or other
    return best if best.objective <= other.objective else other


def _aligned(step: SortedStep, group_N: np.ndarray, dp_degree: int, method: str) -> Partition | None:
    """Split off single trajectories, least increase first, until the count fits; None if there are too few."""
    num_groups = int(group_N.max()) + 1
    missing = -num_groups % dp_degree
    if num_groups + missing > step.num_trajectories:
        return None
    group_N = np.array(group_N, np.int64)
    last_K = np.empty(num_groups + missing, np.int64)
    shared_N, size_K = np.empty(step.num_trajectories, np.int64), np.empty(num_groups + missing, np.int64)
    rows_K = np.empty(num_groups + missing, np.int64)
    for new in range(num_groups, num_groups + missing):
        _measure(step.length_N, step.minimum_LN, group_N, last_K, shared_N, size_K, rows_K)
        # What a member of a larger group shares with its neighbours there is computed again once it is alone.
        shared_N[size_K[group_N] < 2] = np.iinfo(np.int64).max
        group_N[shared_N.argmin()] = new
    _measure(step.length_N, step.minimum_LN, group_N, last_K, shared_N, size_K, rows_K)
    return Partition(group_N, rows_K, assign_slots(rows_K, dp_degree), method)


@numba.njit(cache=True)
def _measure(length_N, minimum_LN, group_N, last_K, shared_N, size_K, rows_K):
    """Set the rows and sizes of the groups, and what each trajectory shares with its neighbours in its group."""
    last_K[:] = -1
    size_K[:] = 0
    rows_K[:] = 0
    for x in range(group_N.shape[0]):
        g = group_N[x]
        p = last_K[g]
        shared_N[x] = 0
        if p >= 0:
            shared_N[x] = common_prefix(minimum_LN, p, x)
            shared_N[p] = max(shared_N[p], shared_N[x])
        rows_K[g] += length_N[x] - shared_N[x]
        size_K[g] += 1
        last_K[g] = x
