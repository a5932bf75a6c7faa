"""Sums over trajectories of values that exist once per compact row.

A trajectory consists of whole parts (runs of rows between two forks or trajectory ends), so a sum over its positions is
a sum over its parts, and a sum over all trajectories costs rows + parts, not positions. Sums run in a fixed order in
both directions: no atomics.

Letters: T compact rows, N trajectories, J parts, L (trajectory, part) links, E features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harts_titan.ops.host_tables import to_device


def _csr(group: np.ndarray, num_groups: int) -> tuple[np.ndarray, np.ndarray]:
    """Members of each group in increasing order: (member indices sorted by group, int64 offsets)."""
    order = np.argsort(group, kind="stable")
    offsets = np.concatenate([[0], np.cumsum(np.bincount(group, minlength=num_groups))])
    return order.astype(np.int64), offsets.astype(np.int64)


def _segment_sum(values: Tensor, index: Tensor, offsets: Tensor) -> Tensor:
    gathered = values.index_select(0, index)
    if values.is_floating_point():
        return torch.segment_reduce(gathered, "sum", offsets=offsets, axis=0, initial=0, unsafe=True)
    # Integer sums are exact in any order.
    group = torch.repeat_interleave(torch.diff(offsets), output_size=index.numel())
    return gathered.new_zeros(offsets.numel() - 1, *values.shape[1:]).index_add_(0, group, gathered)


class _RowsToParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values_TE: Tensor, statistics: TreeStatistics) -> Tensor:
        ctx.part_T = statistics.part_T
        return _segment_sum(values_TE, statistics.rows_by_part, statistics.part_offsets)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].index_select(0, ctx.part_T), None


@dataclass(frozen=True, eq=False)
class TreeStatistics:
    """Index tables of one call, on one device."""

    multiplicity_T: Tensor
    """int64 positions that share each row."""
    length_N: Tensor
    """int64 positions of each trajectory."""
    part_T: Tensor
    rows_by_part: Tensor
    part_offsets: Tensor
    parts_by_trajectory: Tensor
    trajectory_offsets: Tensor
    trajectories_by_part: Tensor
    link_offsets: Tensor

    @classmethod
    def build(
        cls,
        *,
        multiplicity_T: np.ndarray,
        part_T: np.ndarray,
        path_trajectory: np.ndarray,
        path_part: np.ndarray,
        length_N: np.ndarray,
        device: torch.device,
    ) -> TreeStatistics:
        """Build the tables on the host and copy them without waiting.

        Args:
            multiplicity_T: int64 positions per row.
            part_T: int64 part of each row.
            path_trajectory: int64 (L,) local trajectory of each link.
            path_part: int64 (L,) part of each link.
            length_N: int64 positions of each trajectory.
            device: Where the tables go.
        """
        num_parts = int(part_T.max()) + 1 if part_T.size else 0
        rows, part_offsets = _csr(part_T, num_parts)
        links, trajectory_offsets = _csr(path_trajectory, length_N.size)
        reverse, link_offsets = _csr(path_part, num_parts)
        tables = (
            multiplicity_T,
            length_N,
            part_T,
            rows,
            part_offsets,
            path_part[links],
            trajectory_offsets,
            path_trajectory[reverse],
            link_offsets,
        )
        return cls(*(to_device(table, device) for table in tables))

    @property
    def num_parts(self) -> int:
        """J."""
        return self.part_offsets.numel() - 1

    def part_sums(self, values_TE: Tensor) -> Tensor:
        """Sum rows inside each part: (J, E). Differentiable."""
        return _RowsToParts.apply(values_TE, self)

    def trajectory_sums(self, part_JE: Tensor) -> Tensor:
        """Sum parts along each trajectory: (N, E). Not differentiable."""
        return _segment_sum(part_JE, self.parts_by_trajectory, self.trajectory_offsets)

    def sums_over_trajectories(self, trajectory_NE: Tensor) -> Tensor:
        """Sum, for each part, over the trajectories that contain it: (J, E). Not differentiable."""
        return _segment_sum(trajectory_NE, self.trajectories_by_part, self.link_offsets)
