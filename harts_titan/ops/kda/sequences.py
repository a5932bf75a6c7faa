"""Packed linear-attention sequences of one model call, and the index tables the KDA backends read.

Letters: T own compact rows, X external rows, Y = X + T path rows, P packed rows (replay rows included), Q sequences,
C chunks of all sequences, E exported states, R rounds. The state pool of a call is
``[external states | exported states]``; its rows are what ``init_state`` and the export tables name.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from harts_titan.ops.host_tables import as_int64, to_device


class StateFanIn(NamedTuple):
    """CSR from the pool rows one round starts from to the sequences that start there, in sequence order."""

    pool_row_F: Tensor
    ptr_F1: Tensor
    sequence_M: Tensor


class ReplayFanIn(NamedTuple):
    """CSR from every path row to the packed rows that read it, in packed order."""

    ptr_Y1: Tensor
    packed_P: Tensor


@dataclass(frozen=True)
class _HostTables:
    """NumPy copies shared by every device copy of one PackedSequences; derived tables are built once."""

    chunk_size: int
    num_path_rows: int
    cu_seqlens: np.ndarray
    packed_row: np.ndarray
    kept: np.ndarray
    init_state: np.ndarray
    export_sequence: np.ndarray
    export_boundary: np.ndarray
    rounds: tuple[tuple[int, int], ...]
    num_external_states: int
    separate_calls: bool

    @cached_property
    def num_chunks(self) -> np.ndarray:
        return -(-np.diff(self.cu_seqlens) // self.chunk_size)

    @cached_property
    def chunk_offset(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self.num_chunks)]).astype(np.int64)

    @cached_property
    def chunk_indices(self) -> np.ndarray:
        sequence = np.repeat(np.arange(self.num_chunks.size), self.num_chunks)
        chunk = np.arange(sequence.size) - self.chunk_offset[:-1][sequence]
        return np.stack([sequence, chunk], axis=1)

    @cached_property
    def export_row(self) -> np.ndarray:
        rows = np.full(int(self.chunk_offset[-1]) + self.num_chunks.size, -1, dtype=np.int64)
        boundary = self.chunk_offset[self.export_sequence] + self.export_sequence + self.export_boundary
        rows[boundary] = self.num_external_states + np.arange(self.export_sequence.size)
        return rows

    @cached_property
    def replay_fan_in(self) -> tuple[np.ndarray, np.ndarray]:
        # A stable sort keeps packed order inside a row: the fixed order of the gradient sums.
        packed = np.argsort(self.packed_row, kind="stable")
        count = np.bincount(self.packed_row, minlength=self.num_path_rows)
        return np.concatenate([[0], np.cumsum(count)]).astype(np.int64), packed

    def state_fan_in(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        sequence = first + np.flatnonzero(self.init_state[first:last] >= 0)
        sequence = sequence[np.argsort(self.init_state[sequence], kind="stable")]
        pool_row, count = np.unique(self.init_state[sequence], return_counts=True)
        return pool_row, np.concatenate([[0], np.cumsum(count)]).astype(np.int64), sequence


@dataclass(frozen=True)
class PackedSequences:
    """The packed sequences of one call, round after round; build it with :meth:`build`.

    Tensor fields and tables live on one device; the ``*_host`` tuples are Python integers, so that launching a round
    never waits for the device. Derived tables are built on the host on first use and cached.
    """

    chunk_size: int
    cu_seqlens_Q1: Tensor
    """int64 (Q+1): first packed row of each sequence."""
    packed_row_P: Tensor
    """int64 (P): path row each packed row reads."""
    kept_T: Tensor
    """int64 (T): packed row that produces own row t; increasing."""
    init_state_Q: Tensor
    """int32 (Q): pool row a sequence starts from, -1 = zero state."""
    cu_seqlens_host: tuple[int, ...]
    init_state_host: tuple[int, ...]
    export_sequence_host: tuple[int, ...]
    export_boundary_host: tuple[int, ...]
    """Export e is the state of its sequence after ``boundary`` chunks; boundary == ceil(len/chunk) = after its end."""
    rounds: tuple[tuple[int, int], ...]
    """Sequences of round r: [rounds[r][0], rounds[r][1])."""
    num_external_states: int
    num_path_rows: int
    _host: _HostTables = field(repr=False, compare=False)

    @classmethod
    def build(
        cls,
        *,
        chunk_size: int,
        cu_seqlens: Tensor | Sequence[int],
        packed_row: Tensor | Sequence[int],
        kept: Tensor | Sequence[int],
        init_state: Tensor | Sequence[int],
        export_sequence: Tensor | Sequence[int] = (),
        export_boundary: Tensor | Sequence[int] = (),
        round_ptr: Tensor | Sequence[int],
        num_external_states: int = 0,
        num_path_rows: int,
        separate_calls: bool = False,
        device: torch.device | str = "cpu",
    ) -> PackedSequences:
        """Check the host arrays of a call layout and pack them.

        Args:
            chunk_size: Tokens per chunk of the linear-attention core.
            cu_seqlens: int64 (Q+1,) first packed row of each sequence; every sequence has at least one row.
            packed_row: int64 (P,) path row of each packed row.
            kept: int64 (T,) packed row that produces own row t (path row X + t).
            init_state: int64 (Q,) pool row each sequence starts from, -1 for the zero state.
            export_sequence: int64 (E,) sequence whose state is exported.
            export_boundary: int64 (E,) full chunks counted from that sequence's start.
            round_ptr: int64 (R+1,) first sequence of each round.
            num_external_states: States handed in from outside the call.
            num_path_rows: Y = X + T.
            separate_calls: Whether every round is a call of its own, see :attr:`separate_calls`.
            device: Where the index tensors go.

        Returns:
            The checked sequences on ``device``.

        Raises:
            ValueError: If the arrays contradict each other, or a sequence starts from a state that no earlier round
                exports (HARTS 3.3).
        """
        host = _HostTables(
            chunk_size=int(chunk_size),
            num_path_rows=int(num_path_rows),
            cu_seqlens=as_int64(cu_seqlens),
            packed_row=as_int64(packed_row),
            kept=as_int64(kept),
            init_state=as_int64(init_state),
            export_sequence=as_int64(export_sequence),
            export_boundary=as_int64(export_boundary),
            rounds=_rounds(as_int64(round_ptr)),
            num_external_states=int(num_external_states),
            separate_calls=bool(separate_calls),
        )
        _check_packing(host)
        _check_states(host)
        return cls._from_host(host, torch.device(device))

    @classmethod
    def _from_host(cls, host: _HostTables, device: torch.device) -> PackedSequences:
        return cls(
            chunk_size=host.chunk_size,
            cu_seqlens_Q1=to_device(host.cu_seqlens, device),
            packed_row_P=to_device(host.packed_row, device),
            kept_T=to_device(host.kept, device),
            init_state_Q=to_device(host.init_state, device, torch.int32),
            cu_seqlens_host=tuple(host.cu_seqlens.tolist()),
            init_state_host=tuple(host.init_state.tolist()),
            export_sequence_host=tuple(host.export_sequence.tolist()),
            export_boundary_host=tuple(host.export_boundary.tolist()),
            rounds=host.rounds,
            num_external_states=host.num_external_states,
            num_path_rows=host.num_path_rows,
            _host=host,
        )

    def to(self, device: torch.device | str) -> PackedSequences:
        """Return the same sequences with their index tensors on ``device`` (self if they are there)."""
        device = torch.device(device)
        same = device.type == self.device.type and device.index in (None, self.device.index)
        return self if same else self._from_host(self._host, device)

    @property
    def device(self) -> torch.device:
        """Device of the index tensors."""
        return self.cu_seqlens_Q1.device

    @property
    def num_rows(self) -> int:
        """T, own rows."""
        return self._host.kept.size

    @property
    def num_packed_rows(self) -> int:
        """P, packed rows with replay."""
        return self._host.packed_row.size

    @property
    def num_sequences(self) -> int:
        """Q."""
        return self._host.init_state.size

    @property
    def num_chunks(self) -> int:
        """C, chunks of all sequences."""
        return int(self._host.chunk_offset[-1])

    @property
    def num_exports(self) -> int:
        """E."""
        return self._host.export_sequence.size

    @property
    def num_pool_rows(self) -> int:
        """External states + exports."""
        return self.num_external_states + self.num_exports

    @property
    def separate_calls(self) -> bool:
        """Whether every round is a call of its own, as when a model calls linear attention node by node.

        Then the CUDA path launches all kernels of a round before those of the next one, on one stream, backward in the
        opposite order. Otherwise the kernels that need no state run over the chunks of several rounds at once. The bits
        of results are the same.
        """
        return self._host.separate_calls

    @property
    def packed_row_host(self) -> np.ndarray:
        """int64 (P): host copy of :attr:`packed_row_P`."""
        return self._host.packed_row

    @property
    def kept_host(self) -> np.ndarray:
        """int64 (T): host copy of :attr:`kept_T`."""
        return self._host.kept

    @cached_property
    def chunk_offset_host(self) -> tuple[int, ...]:
        """First chunk of each sequence, Q+1 entries."""
        return tuple(self._host.chunk_offset.tolist())

    @cached_property
    def export_row_host(self) -> tuple[int, ...]:
        """Host copy of :attr:`export_row_B`."""
        return tuple(self._host.export_row.tolist())

    @cached_property
    def chunk_offset_Q1(self) -> Tensor:
        """int32 (Q+1): first chunk of each sequence."""
        return to_device(self._host.chunk_offset, self.device, torch.int32)

    @cached_property
    def chunk_indices_C2(self) -> Tensor:
        """int64 (C, 2): (sequence, chunk inside it) of every chunk."""
        return to_device(self._host.chunk_indices, self.device)

    @cached_property
    def export_row_B(self) -> Tensor:
        """int32 (C+Q): pool row written at a boundary, -1 = none; boundary c of sequence n is chunk_offset[n]+n+c."""
        return to_device(self._host.export_row, self.device, torch.int32)

    @cached_property
    def state_fan_in(self) -> tuple[StateFanIn | None, ...]:
        """Per round: which sequences start from which pool row (int32 tables); None if all start from zero."""
        tables: list[StateFanIn | None] = []
        for first, last in self.rounds:
            arrays = self._host.state_fan_in(first, last)
            some = arrays[0].size > 0
            tables.append(StateFanIn(*(to_device(a, self.device, torch.int32) for a in arrays)) if some else None)
        return tuple(tables)

    @cached_property
    def replay_fan_in(self) -> ReplayFanIn:
        """Packed rows that read each path row, int64; gradients of a path row are summed in this order."""
        ptr, packed = self._host.replay_fan_in
        return ReplayFanIn(to_device(ptr, self.device), to_device(packed, self.device))


def _rounds(round_ptr: np.ndarray) -> tuple[tuple[int, int], ...]:
    ptr = round_ptr.tolist()
    return tuple(itertools.pairwise(ptr))


def _check_packing(host: _HostTables) -> None:
    if host.chunk_size < 1:
        raise ValueError(f"chunk_size ({host.chunk_size}) must be positive")
    cu, packed, kept = host.cu_seqlens, host.packed_row, host.kept
    if cu.size < 1 or cu[0] != 0 or cu[-1] != packed.size or (np.diff(cu) < 1).any():
        raise ValueError(
            f"cu_seqlens must rise strictly from 0 to the number of packed rows ({packed.size}); "
            f"got {cu.size} entries ending in {cu[-1:].tolist()}"
        )
    if host.init_state.size != cu.size - 1:
        raise ValueError(f"init_state has {host.init_state.size} entries for {cu.size - 1} sequences")
    if packed.size and (packed.min() < 0 or packed.max() >= host.num_path_rows):
        raise ValueError(
            f"packed_row spans [{packed.min()}, {packed.max()}], outside the {host.num_path_rows} path rows; "
            "check num_path_rows (external + own rows)"
        )
    if kept.size and (kept.min() < 0 or kept.max() >= packed.size or (np.diff(kept) < 1).any()):
        raise ValueError(f"kept must be increasing and below the number of packed rows ({packed.size})")
    own = np.arange(host.num_path_rows - kept.size, host.num_path_rows)
    if kept.size > host.num_path_rows or not np.array_equal(packed[kept], own):
        raise ValueError("packed_row[kept[t]] must be path row num_external_rows + t for every own row t")


def _check_states(host: _HostTables) -> None:
    num_sequences, num_exports = host.init_state.size, host.export_sequence.size
    edges = [first for first, _ in host.rounds] + [host.rounds[-1][1] if host.rounds else 0]
    if edges[0] != 0 or edges[-1] != num_sequences or any(b < a for a, b in itertools.pairwise(edges)):
        raise ValueError(f"round_ptr must rise from 0 to the number of sequences ({num_sequences}); got {edges}")
    if host.num_external_states < 0 or host.export_boundary.size != num_exports:
        raise ValueError(
            f"export_sequence has {num_exports} entries, export_boundary {host.export_boundary.size}; "
            f"num_external_states is {host.num_external_states}"
        )
    if num_exports:
        sequence = host.export_sequence
        if sequence.min() < 0 or sequence.max() >= num_sequences:
            raise ValueError(f"export_sequence names a sequence outside [0, {num_sequences})")
        if (host.export_boundary < 0).any() or (host.export_boundary > host.num_chunks[sequence]).any():
            raise ValueError("export_boundary lies outside [0, number of chunks] of its sequence")
        if np.unique(np.stack([sequence, host.export_boundary]), axis=1).shape[1] != num_exports:
            raise ValueError("the same boundary of a sequence is exported twice")
    pool = host.num_external_states + num_exports
    if num_sequences and (host.init_state.min() < -1 or host.init_state.max() >= pool):
        raise ValueError(f"init_state names a state outside the pool of {pool} rows")
    round_of = np.repeat(np.arange(len(host.rounds)), [last - first for first, last in host.rounds])
    inside = np.flatnonzero(host.init_state >= host.num_external_states)
    source = host.export_sequence[host.init_state[inside] - host.num_external_states]
    late = inside[round_of[source] >= round_of[inside]]
    if late.size:
        raise ValueError(
            f"sequence {late[0]} of round {round_of[late[0]]} starts from a state exported in the same or a later "
            "round; a state is usable only after its call has returned"
        )
