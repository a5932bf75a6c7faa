"""Level 1 of the planner: prefix compression (HARTS 3.2, A.1).

Shapes: N trajectories by sorted place, K groups (microbatches), S slots, D replicas.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from harts_titan.tree.contiguous import contiguous_partition
from harts_titan.tree.slots import initial_objective
from harts_titan.tree.sorted_step import SortedStep

__all__ = ["Partition", "contiguous_partition", "partition_step"]


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

    Args:
        step: trajectories in lexicographic order.
        capacity: compact rows a microbatch may have.
        dp_degree: number of replicas; the number of microbatches is a multiple of it.
        index_N: names of the trajectories by sorted place, for error messages; default ``step.order_N``.

    Returns:
        The microbatches and their initial places: a function of the arguments only.

    Raises:
        ValueError: If a trajectory is longer than ``capacity``, there are fewer trajectories than replicas, or an
            argument is out of range.
    """
    found = contiguous_partition(
        step.length_N, step.lcp_N, capacity, dp_degree, index_N=step.order_N if index_N is None else index_N
    )
    group_N = np.repeat(np.arange(found.num_groups), np.diff(found.bound_K1))
    return Partition(group_N, found.rows_K, found.group_SD, "contiguous")
