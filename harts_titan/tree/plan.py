"""The plan of a training step as tensors: storage, transport and checks (HARTS 3.2 to 3.4).

Shapes: as in ``layout.py``. All tensors are int64 unless said.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorClass, TensorDict
from torch import Tensor

from harts_titan.tree.invariants import check_call, check_step
from harts_titan.tree.stats import PlanStats

_FORMAT = 1


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
        seg_depth_V: forks above, 0 at a root.
        seg_sequence_V: packed sequence that computes the segment.
        seg_round_V: its round.
        seg_continues_V: bool, True where the segment continues its parent's sequence.
        seg_attach_V: producer row a root hangs on, else -1.
        part_T: part of each own row; parts are segments cut at trajectory ends.
        path_trajectory_J: trajectory (local index) of each (trajectory, part) pair; ascending.
        path_part_J: part of the pair, in path order; a trajectory's own rows are exactly the rows of its parts.
        chunk_size: tokens in a linear-attention chunk.
        num_external_states: states handed over by a producer, pool rows ``[0, num_external_states)``.
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
    def from_arrays(cls, arrays: dict[str, np.ndarray], *, chunk_size: int, num_external_states: int = 0) -> CallLayout:
        """Wrap the arrays of ``build_layout`` without copying them.

        Args:
            arrays: every tensor field by name.
            chunk_size: tokens in a linear-attention chunk.
            num_external_states: states handed over by a producer.

        Returns:
            The layout on the CPU.
        """
        fields: dict[str, Any] = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return cls(**fields, chunk_size=chunk_size, num_external_states=num_external_states, batch_size=[])

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the tensor fields as NumPy arrays by name (copied if not on the CPU)."""
        return {name: getattr(self, name).cpu().numpy() for name in _TENSOR_FIELDS}


_TENSOR_FIELDS = tuple(name for name, kind in CallLayout.__annotations__.items() if kind in ("Tensor", Tensor))


@dataclass(frozen=True)
class ConsumerPlan:
    """One microbatch: complete trajectories that one replica runs in one slot.

    Attributes:
        replica: data-parallel rank.
        slot: microbatch index on the replica.
        trajectory_N: int64 indices into the step batch.
        calls: layouts of its model calls; one, except in mode ``expanded``.
        producer: index of the producer it attaches to, -1 for none.
    """

    replica: int
    slot: int
    trajectory_N: Tensor
    calls: tuple[CallLayout, ...]
    producer: int = -1


@dataclass(frozen=True)
class StepPlan:
    """The immutable plan of one training step.

    Attributes:
        mode: ``compact``, ``nodewise`` or ``expanded``.
        chunk_size: tokens in a linear-attention chunk.
        capacity: compact rows a consumer may have.
        call_capacity: rows at which an ``expanded`` call is closed; equal to ``capacity`` in other modes.
        num_taps: width of the short convolution.
        dp_degree: replicas.
        num_slots: consumers of each replica.
        stats: sizes and times.
        tensordict: the storage, ``{"consumer_<k>": {"trajectory_N", "calls": {"0": CallLayout, ...}}}`` with
            ``k = slot * dp_degree + replica``.
    """

    mode: str
    chunk_size: int
    capacity: int
    call_capacity: int
    num_taps: int
    dp_degree: int
    num_slots: int
    stats: PlanStats
    tensordict: TensorDict

    def consumer(self, replica: int, slot: int) -> ConsumerPlan:
        """Return the microbatch of a replica in a slot.

        Raises:
            ValueError: If there is no such replica or slot.
        """
        if not (0 <= replica < self.dp_degree and 0 <= slot < self.num_slots):
            raise ValueError(
                f"no consumer (replica {replica}, slot {slot}): the plan has {self.dp_degree} replicas and "
                f"{self.num_slots} slots"
            )
        entry = self.tensordict[f"consumer_{slot * self.dp_degree + replica}"]
        calls = tuple(entry["calls", str(i)] for i in range(len(entry["calls"].keys())))
        return ConsumerPlan(replica, slot, entry["trajectory_N"], calls)

    def consumers(self) -> list[ConsumerPlan]:
        """Return every consumer, slot after slot."""
        return [self.consumer(d, j) for j in range(self.num_slots) for d in range(self.dp_degree)]

    def to(self, device: torch.device | str) -> StepPlan:
        """Return the plan with its tensors on ``device``."""
        return replace(self, tensordict=self.tensordict.to(device))

    def save(self, path: str | Path) -> None:
        """Write the plan to a file that ``load`` reads without executing code."""
        header, flat = _flatten(self)
        torch.save({"header": header, "flat": flat}, path)

    @classmethod
    def load(cls, path: str | Path) -> StepPlan:
        """Read a plan that ``save`` wrote.

        Raises:
            ValueError: If the file is no plan of this format.
        """
        content = torch.load(path, weights_only=True)
        if not isinstance(content, dict) or content.get("header", {}).get("format") != _FORMAT:
            raise ValueError(f"{path} is no step plan of format {_FORMAT}")
        return _unflatten(content["header"], content["flat"])

    @classmethod
    def broadcast(cls, plan: StepPlan | None, src: int = 0, group: dist.ProcessGroup | None = None) -> StepPlan:
        """Send the plan of one rank to all ranks of a group.

        Args:
            plan: the plan on rank ``src``; ignored elsewhere.
            src: global rank that has the plan.
            group: process group; default all ranks.

        Returns:
            The plan, on the CPU, on every rank.

        Raises:
            ValueError: On every rank alike, if ``plan`` is None on rank ``src``.
        """
        sends = dist.get_rank() == src
        header, flat = _flatten(plan) if sends and plan is not None else (None, torch.empty(0, dtype=torch.int64))
        box: list[Any] = [header]
        dist.broadcast_object_list(box, src=src, group=group)
        header = box[0]
        if header is None:
            raise ValueError(f"rank {src} has no plan to broadcast")
        device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else "cpu"
        if not sends:
            flat = torch.empty(header["numel"], dtype=torch.int64)
        flat = flat.to(device)
        dist.broadcast(flat, src=src, group=group)
        return plan if sends and plan is not None else _unflatten(header, flat.cpu())

    def validate(self, tokens: np.ndarray, offsets: np.ndarray) -> None:
        """Prove every invariant of the plan against the trajectories, by checks that share no code with the planner.

        Args:
            tokens: int32 (S,) token ids of the step.
            offsets: int64 (N+1,) trajectory bounds.

        Raises:
            ValueError: Naming the violated invariant and the place.
        """
        consumers = self.consumers()
        parts = [[call.arrays() for call in consumer.calls] for consumer in consumers]
        for consumer, calls in zip(consumers, parts, strict=True):
            for i, (call, layout) in enumerate(zip(calls, consumer.calls, strict=True)):
                where = f"replica {consumer.replica}, slot {consumer.slot}, call {i}"
                if layout.chunk_size != self.chunk_size or call["conv_tap_TW"].shape[1] != self.num_taps:
                    raise ValueError(f"invariant 'one chunk size and tap count in a plan' violated at {where}")
                check_call(call, tokens, offsets, chunk_size=self.chunk_size, mode=self.mode, where=where)
        check_step(
            [consumer.trajectory_N.cpu().numpy() for consumer in consumers],
            parts,
            tokens,
            offsets,
            mode=self.mode,
            capacity=self.capacity,
            call_capacity=self.call_capacity,
            num_consumers=self.dp_degree * self.num_slots,
            stored_consumers=len(self.tensordict.keys()),
        )


def assemble(consumers: list[tuple[np.ndarray, list[CallLayout]]]) -> TensorDict:
    """Return the storage of a plan from its consumers in the order ``slot * dp_degree + replica``."""
    return TensorDict(
        {
            f"consumer_{k}": TensorDict(
                {
                    "trajectory_N": torch.from_numpy(trajectory_N),
                    "calls": TensorDict({str(i): call for i, call in enumerate(calls)}, batch_size=[]),
                },
                batch_size=[],
            )
            for k, (trajectory_N, calls) in enumerate(consumers)
        },
        batch_size=[],
    )


def _flatten(plan: StepPlan) -> tuple[dict[str, Any], Tensor]:
    """Return a header of plain values and one int64 tensor: one collective and one file entry for all fields."""
    tensors: list[Tensor] = []
    consumers: list[dict[str, Any]] = []
    for consumer in plan.consumers():
        tensors.append(consumer.trajectory_N)
        for call in consumer.calls:
            tensors += [getattr(call, name) for name in _TENSOR_FIELDS]
        consumers.append({"external_states": [call.num_external_states for call in consumer.calls]})
    flat = torch.cat([t.reshape(-1).to("cpu", torch.int64) for t in tensors])
    fields = ("mode", "chunk_size", "capacity", "call_capacity", "num_taps", "dp_degree", "num_slots")
    header = {
        "format": _FORMAT,
        "plan": {name: getattr(plan, name) for name in fields},
        "stats": asdict(plan.stats),
        "consumers": consumers,
        "shapes": [list(t.shape) for t in tensors],
        "numel": flat.numel(),
    }
    return header, flat


def _unflatten(header: dict[str, Any], flat: Tensor) -> StepPlan:
    shapes = header["shapes"]
    pieces = iter(flat.split([int(np.prod(shape)) for shape in shapes]))
    shape = iter(shapes)

    def take() -> Tensor:
        return next(pieces).view(next(shape))

    consumers: list[tuple[np.ndarray, list[CallLayout]]] = []
    for entry in header["consumers"]:
        trajectory_N = take().numpy()
        calls = []
        for states in entry["external_states"]:
            fields: dict[str, Any] = {name: take() for name in _TENSOR_FIELDS}
            fields["seg_continues_V"] = fields["seg_continues_V"].bool()
            calls.append(
                CallLayout(**fields, chunk_size=header["plan"]["chunk_size"], num_external_states=states, batch_size=[])
            )
        consumers.append((trajectory_N, calls))
    return StepPlan(**header["plan"], stats=PlanStats(**header["stats"]), tensordict=assemble(consumers))
