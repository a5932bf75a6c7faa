"""Initial assignment of microbatches to replicas and slots (HARTS 3.2).

Shapes: K groups (microbatches), J slots, D replicas.
"""

from __future__ import annotations

import numpy as np


def assign_slots(rows_K: np.ndarray, dp_degree: int) -> np.ndarray:
    """Put groups of similar size into one slot, the heavier ones on the replica with less work so far.

    Args:
        rows_K: int64 compact rows of each group; K is a multiple of ``dp_degree``.
        dp_degree: number of replicas.

    Returns:
        int64 (J, D) group that replica ``d`` runs in slot ``j``; ties go to the smaller index, so the result is a
        function of ``rows_K`` alone.
    """
    group_JD = np.argsort(-rows_K, kind="stable").reshape(-1, dp_degree)
    total_D = np.zeros(dp_degree, np.int64)
    for slot in range(group_JD.shape[0]):
        replica = np.argsort(total_D, kind="stable")
        placed = np.empty(dp_degree, np.int64)
        placed[replica] = group_JD[slot]
        group_JD[slot] = placed
        total_D += rows_K[placed]
    return group_JD


def initial_objective(rows_K: np.ndarray, group_JD: np.ndarray) -> tuple[int, int, int]:
    """Return ``J_init``: total compact rows, sum over slots of the largest replica, rows of the heaviest replica."""
    rows_JD = rows_K[group_JD]
    return int(rows_K.sum()), int(rows_JD.max(axis=1).sum()), int(rows_JD.sum(axis=0).max())
