"""Everything a model needs to run one call of a plan, on one device.

Letters: T own compact rows, S semantic positions, N trajectories, X external rows, Y = X + T path rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from harts_titan.models.common.tree_statistics import TreeStatistics
from harts_titan.ops.attention import TreeMask, prepare_attention
from harts_titan.ops.backend import OpsBackends
from harts_titan.ops.host_tables import to_device
from harts_titan.ops.kda import PackedSequences, prepare_kda
from harts_titan.ops.short_conv import ConvTaps, prepare_short_conv
from harts_titan.ops.untraced import plan_handle
from harts_titan.tree import CallLayout


class TreeInputs:
    """Rows, positions and index tables of one call.

    A plain object on purpose: sharding and recomputation hooks walk through tuples and dataclasses to find tensors, and
    a fixed plan is neither an input with a gradient nor something to save again.
    """

    __slots__ = (
        "__weakref__",
        "attention",
        "backends",
        "conv_taps",
        "device",
        "handle",
        "kda",
        "label_S",
        "max_position",
        "num_external_rows",
        "num_positions",
        "num_rows",
        "num_trajectories",
        "position_T",
        "row_of_position_S",
        "statistics",
        "token_T",
    )

    token_T: Tensor
    """int64 token ids."""
    position_T: Tensor
    """int64 absolute positions in the trajectory."""
    row_of_position_S: Tensor
    """int64 own row of each position, in [0, T)."""
    label_S: Tensor
    """int64 next token of each position, -100 where there is none."""
    conv_taps: ConvTaps
    """Path rows the short convolution reads."""
    kda: PackedSequences
    attention: TreeMask
    statistics: TreeStatistics
    backends: OpsBackends
    device: torch.device
    num_rows: int
    num_positions: int
    num_trajectories: int
    num_external_rows: int
    max_position: int
    """Largest absolute position, -1 without rows."""
    handle: Tensor
    """Names these inputs in a compiled graph."""

    def __init__(self, **fields: Any) -> None:
        missing = set(self.__slots__) - set(fields) - {"__weakref__", "handle"}
        if missing:
            raise TypeError(f"TreeInputs needs {sorted(missing)}")
        for name, value in fields.items():
            setattr(self, name, value)
        self.handle = plan_handle(self)

    @property
    def multiplicity_T(self) -> Tensor:
        """int64 positions that share each row."""
        return self.statistics.multiplicity_T

    def prepare(self, *, dtype: torch.dtype, key_dim: int) -> None:
        """Build the tables of the chosen backends, so that every layer finds them, compiled or not.

        Nothing happens for backends without tables, such as those of the CPU, and in a second forward pass.

        Args:
            dtype: Dtype the layers compute in.
            key_dim: Width of a query and key head of full attention.

        Raises:
            ValueError: If a forced backend cannot run.
        """
        prepare_short_conv(self.conv_taps, dtype=dtype, backend=self.backends.short_conv)
        prepare_kda(self.kda, dtype=dtype, backend=self.backends.kda)
        prepare_attention(self.attention, key_dim=key_dim, dtype=dtype, backend=self.backends.attention)

    @classmethod
    def from_layout(
        cls, layout: CallLayout, device: torch.device | str = "cpu", backends: OpsBackends | None = None
    ) -> TreeInputs:
        """Read the host integers of a layout, then copy its tables to the device without waiting.

        Args:
            layout: One call of a plan, on the CPU.
            device: Where the model is.
            backends: Implementations of the ops; default: chosen by device.

        Raises:
            ValueError: If the layout is not on the CPU: reading it would stall the device.
        """
        device = torch.device(device)
        if layout.token_T.device.type != "cpu":
            raise ValueError(f"the call layout is on {layout.token_T.device}; keep plans on the CPU and pass device=")

        def host(name: str) -> np.ndarray:
            return getattr(layout, name).numpy()

        num_external_rows, num_rows = int(layout.num_external_rows), int(layout.num_rows)
        offsets_N1 = host("position_offset_N1")
        statistics = TreeStatistics.build(
            multiplicity_T=host("multiplicity_T"),
            part_T=host("part_T"),
            path_trajectory=host("path_trajectory_J"),
            path_part=host("path_part_J"),
            length_N=np.diff(offsets_N1),
            device=device,
        )
        return cls(
            token_T=to_device(host("token_T"), device),
            position_T=to_device(host("position_T"), device),
            row_of_position_S=to_device(host("row_of_position_S") - num_external_rows, device),
            label_S=to_device(host("label_S"), device),
            conv_taps=ConvTaps(
                to_device(host("conv_tap_TW"), device), num_external_rows + num_rows, host("conv_tap_TW")
            ),
            kda=packed_sequences(layout, device),
            attention=tree_mask(layout, device),
            statistics=statistics,
            backends=backends or OpsBackends(),
            device=device,
            num_rows=num_rows,
            num_positions=int(layout.num_positions),
            num_trajectories=int(layout.num_trajectories),
            num_external_rows=num_external_rows,
            max_position=int(host("position_T").max(initial=-1)),
        )


def packed_sequences(layout: CallLayout, device: torch.device | str = "cpu") -> PackedSequences:
    """Return the linear-attention sequences of a call layout (on the CPU), with their tables on ``device``.

    Where every segment restarts the chunk grid (modes ``nodewise`` and ``depthwise``), each round is a call of its own.
    """
    return PackedSequences.build(
        chunk_size=layout.chunk_size,
        cu_seqlens=layout.cu_seqlens_Q1,
        packed_row=layout.packed_row_P,
        kept=layout.kept_T,
        init_state=layout.init_state_Q,
        export_sequence=layout.export_sequence_E,
        export_boundary=layout.export_boundary_E,
        round_ptr=layout.round_ptr_R1,
        num_external_states=layout.num_external_states,
        num_path_rows=layout.parent_Y.shape[0],
        separate_calls=layout.restarts_chunks,
        device=device,
    )


def tree_mask(layout: CallLayout, device: torch.device | str = "cpu") -> TreeMask:
    """Return who sees whom in a call layout (on the CPU), with its tables on ``device``."""
    return TreeMask.build(
        tin=layout.tin_Y,
        tout=layout.tout_Y,
        seg_parent=layout.seg_parent_V,
        seg_start=layout.seg_start_V,
        seg_length=layout.seg_length_V,
        seg_row=layout.seg_row_V,
        seg_attach=layout.seg_attach_V,
        num_external_rows=layout.num_external_rows,
        device=device,
    )
