"""The tensors of one model call (HARTS 3.3, 3.4).

Shapes: as in ``layout.py``. All tensors are int64 unless said.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorClass
from torch import Tensor


class CallLayout(TensorClass, nocast=True):
    """Everything one model call needs to know about its trajectories.

    Path rows: ``[0, X)`` are rows of a producer's interface (none unless the consumer attaches to a producer),
    ``[X, X+T)`` own rows. "Own row" below counts from the first own row.

    Attributes:
        token_T: token id of each own row.
        position_T: absolute position in the trajectory.
        multiplicity_T: trajectories whose path contains the row.
        segment_T: segment of the row.
        parent_Y: path row of the previous token of the path, -1 at position 0; always a smaller row.
        tin_Y: depth-first interval start; row ``k`` is visible to ``q`` iff ``tin[k] <= tin[q] < tout[k]``.
        tout_Y: depth-first interval end.
        conv_tap_TW: last W path rows, oldest first, the row itself last, -1 before the root.
        row_of_position_S: path row of each position: the map m.
        label_S: next token of the trajectory, -100 at its last position.
        source_position_S: flat position in the step batch.
        trajectory_N: index in the step batch; fixes the order of positions.
        position_offset_N1: positions of trajectory ``n`` are ``[offset[n], offset[n+1])``.
        packed_row_P: path row of each packed row, replay rows included.
        kept_T: packed row that produces each own row; increasing.
        cu_seqlens_Q1: bounds of the packed sequences.
        init_state_Q: state-pool row each sequence starts from, -1 for the zero state.
        replay_Q: replay rows in front of each sequence.
        start_Q: absolute position of each sequence's first packed row.
        export_sequence_E: sequence whose state is exported as pool row ``num_external_states + e``.
        export_boundary_E: full chunks from the sequence's start after which the state is taken;
            ``ceil(len / chunk_size)`` means after its last row.
        round_ptr_R1: sequences of round ``r`` are ``[round_ptr[r], round_ptr[r+1])``.
        seg_parent_V: segment above, -1 at a root. Segments are numbered depth first.
        seg_start_V: absolute position of the first token.
        seg_length_V: tokens.
        seg_row_V: first own row; the rows of a segment are contiguous.
        seg_depth_V: segments above, 0 at a root.
        seg_sequence_V: packed sequence that computes the segment.
        seg_round_V: its round.
        seg_continues_V: bool, True where the segment continues its parent's sequence.
        seg_attach_V: producer row a root hangs on, else -1.
        part_T: part of each own row; parts are segments cut at trajectory ends.
        path_trajectory_J: trajectory (local index) of each (trajectory, part) pair; ascending.
        path_part_J: part of the pair, in path order; a trajectory's own rows are exactly the rows of its parts.
        chunk_size: tokens in a linear-attention chunk.
        num_external_states: states handed over by a producer, pool rows ``[0, num_external_states)``.
        restarts_chunks: True in modes ``nodewise`` and ``depthwise``: every segment is a sequence with a chunk grid of
            its own, whose state starts the sequences of its children; rounds are then calls one after another.
    """

    token_T: Tensor
    position_T: Tensor
    multiplicity_T: Tensor
    segment_T: Tensor
    parent_Y: Tensor
    tin_Y: Tensor
    tout_Y: Tensor
    conv_tap_TW: Tensor
    row_of_position_S: Tensor
    label_S: Tensor
    source_position_S: Tensor
    trajectory_N: Tensor
    position_offset_N1: Tensor
    packed_row_P: Tensor
    kept_T: Tensor
    cu_seqlens_Q1: Tensor
    init_state_Q: Tensor
    replay_Q: Tensor
    start_Q: Tensor
    export_sequence_E: Tensor
    export_boundary_E: Tensor
    round_ptr_R1: Tensor
    seg_parent_V: Tensor
    seg_start_V: Tensor
    seg_length_V: Tensor
    seg_row_V: Tensor
    seg_depth_V: Tensor
    seg_sequence_V: Tensor
    seg_round_V: Tensor
    seg_continues_V: Tensor
    seg_attach_V: Tensor
    part_T: Tensor
    path_trajectory_J: Tensor
    path_part_J: Tensor
    chunk_size: int
    num_external_states: int
    restarts_chunks: bool

    @property
    def num_rows(self) -> int:
        """Own rows."""
        return self.token_T.shape[0]

    @property
    def num_external_rows(self) -> int:
        """Rows of the producer's interface."""
        return self.parent_Y.shape[0] - self.token_T.shape[0]

    @property
    def num_positions(self) -> int:
        """Positions of all trajectories of the call."""
        return self.row_of_position_S.shape[0]

    @property
    def num_trajectories(self) -> int:
        """Trajectories of the call."""
        return self.trajectory_N.shape[0]

    @property
    def num_sequences(self) -> int:
        """Packed linear-attention sequences."""
        return self.init_state_Q.shape[0]

    @property
    def num_rounds(self) -> int:
        """Packed linear-attention calls, one after another."""
        return self.round_ptr_R1.shape[0] - 1

    @property
    def num_segments(self) -> int:
        """Segments of the forest."""
        return self.seg_parent_V.shape[0]

    @classmethod
    def from_arrays(
        cls,
        arrays: dict[str, np.ndarray],
        *,
        chunk_size: int,
        num_external_states: int = 0,
        restarts_chunks: bool = False,
    ) -> CallLayout:
        """Wrap the arrays of ``build_layout`` without copying them.

        Args:
            arrays: every tensor field by name.
            chunk_size: tokens in a linear-attention chunk.
            num_external_states: states handed over by a producer.
            restarts_chunks: True if every segment restarts the chunk grid.

        Returns:
            The layout on the CPU.
        """
        fields: dict[str, Any] = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return cls(
            **fields,
            chunk_size=chunk_size,
            num_external_states=num_external_states,
            restarts_chunks=restarts_chunks,
            batch_size=[],
        )

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the tensor fields as NumPy arrays by name (copied if not on the CPU)."""
        return {name: getattr(self, name).cpu().numpy() for name in TENSOR_FIELDS}


TENSOR_FIELDS = tuple(name for name, kind in CallLayout.__annotations__.items() if kind in ("Tensor", Tensor))
