"""Index tables of the KDA kernels for the packed sequences of one call.

Letters: T own rows, X external rows, Y = X + T path rows, S slots (rows of all chunks, padding included), Q sequences,
C chunks, E exports.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from harts_titan.ops.host_tables import any_length, to_device
from harts_titan.ops.kda.sequences import PackedSequences


class KDATables(NamedTuple):
    """Index tables of one call, in the order the custom ops take them.

    All tables a kernel reads lie in one tensor: torch.compile makes a graph of its own for every table of size 0 or 1
    and for every two tables that happen to have one size, and a call has a dozen.
    """

    index_I: Tensor
    """int64 on the device; ``unpack`` cuts it."""
    header_J: Tensor
    """int64 on the host: Q, F, M, D, N, 1 if calls are separate, rounds, then one ``Round`` after another."""
    packed_row_S: Tensor
    """int64: path row of every slot, -1 = padding at the end of a sequence."""
    kept_T: Tensor
    """Only its size is read."""
    export_sequence_E: Tensor
    """On the host; only its size is read."""


class Index(NamedTuple):
    """What the kernels read, cut out of :class:`KDATables`; int64 on the device."""

    own_row_S: Tensor
    """Own row a slot's output goes to, -1 = replay row or padding."""
    copy_slot_S: Tensor
    """Row of the buffers of copies, -1 = nobody else reads the slot's path row."""
    chunk_offset_Q1: Tensor
    init_row_Q: Tensor
    init_slot_Q: Tensor
    """Row of the round's initial-state gradient buffer, -1 = the sequence starts from zero."""
    export_row_B: Tensor
    fan_row_F: Tensor
    """Pool rows that sequences start from, round after round."""
    fan_ptr_F1: Tensor
    fan_slot_M: Tensor
    shared_row_D: Tensor
    """Path rows that several packed rows read, or none."""
    shared_ptr_D1: Tensor
    """Their copies."""
    packed_row_S: Tensor
    kept_T: Tensor
    num_copies: int
    num_exports: int
    separate_calls: bool
    """As :attr:`PackedSequences.separate_calls`."""
    rounds: list[Round]


class Round(NamedTuple):
    """One launch of a state scan, and the chunks it runs over."""

    first_sequence: int
    num_sequences: int
    first_fan: int
    """Position in ``fan_row_F``."""
    num_fans: int
    num_starts: int
    """Sequences that start from a pool row."""
    first_chunk: int
    num_chunks: int


# Tables start at multiples of 16 int64: Triton compiles kernels anew for pointers of another alignment.
_ALIGN = 16
_HEADER = 7
_ROUND = len(Round._fields)


def prepare_tables(sequences: PackedSequences) -> KDATables:
    """Return the kernels' index tables of ``sequences``, built once and kept with it.

    Call it before a ``torch.compile`` region that runs :func:`kda_triton`: building them is host work that cannot be
    traced.
    """
    cached = getattr(sequences, "_triton_tables", None)
    if cached is not None:
        return cached
    if torch.compiler.is_compiling():
        raise ValueError("call prepare_tables(sequences) before the compiled region that runs kda_triton")
    init, slot, rounds_R, fan_row, fan_ptr, fan_slot = _round_tables(sequences)
    packed_row, own_row, copy_slot, shared_row, shared_ptr = _slot_tables(sequences)
    device = sequences.device
    pieces: list[np.ndarray] = []
    for table in (
        own_row,
        copy_slot,
        np.asarray(sequences.chunk_offset_host, dtype=np.int64),
        init,
        slot,
        np.asarray(sequences.export_row_host, dtype=np.int64),
        fan_row,
        fan_ptr,
        fan_slot,
        shared_row,
        shared_ptr,
    ):
        pieces += [table, np.zeros(-table.size % _ALIGN, dtype=np.int64)]
    header = [
        sequences.num_sequences,
        fan_row.size,
        fan_slot.size,
        shared_row.size,
        int(shared_ptr[-1]),
        int(sequences.separate_calls),
        rounds_R.shape[0],
        *rounds_R.reshape(-1).tolist(),
    ]
    tables = KDATables(
        to_device(np.concatenate(pieces), device),
        any_length(torch.tensor(header, dtype=torch.int64)),
        to_device(packed_row, device),
        sequences.kept_T,
        any_length(torch.tensor(sequences.export_sequence_host, dtype=torch.int64)),
    )
    object.__setattr__(sequences, "_triton_tables", tables)
    return tables


def _round_tables(sequences: PackedSequences) -> tuple[np.ndarray, ...]:
    """``init_row_Q``, ``init_slot_Q``, a row for every ``Round``, ``fan_row_F``, ``fan_ptr_F1`` and ``fan_slot_M``."""
    bounds_R2 = np.array(sequences.rounds, dtype=np.int64).reshape(-1, 2)
    first_R, num_R = bounds_R2[:, 0], bounds_R2[:, 1] - bounds_R2[:, 0]
    init = np.asarray(sequences.init_state_host, dtype=np.int64)
    start_M = np.flatnonzero(init >= 0)
    round_M = np.repeat(np.arange(num_R.size), num_R)[start_M]
    starts_R = np.bincount(round_M, minlength=num_R.size)
    slot = np.full(init.size, -1, dtype=np.int64)
    slot[start_M] = np.arange(start_M.size) - (np.cumsum(starts_R) - starts_R)[round_M]
    # Stable: the order of sequences inside a round and pool row is the fixed order of the gradient sum.
    order = np.lexsort((init[start_M], round_M))
    key_M2 = np.stack([round_M, init[start_M]], axis=1)[order]
    fan_F = np.flatnonzero((np.diff(key_M2, axis=0, prepend=-1) != 0).any(axis=1))
    fans_R = np.bincount(key_M2[fan_F, 0], minlength=num_R.size)
    chunk_offset = np.asarray(sequences.chunk_offset_host, dtype=np.int64)
    first_chunk_R = chunk_offset[first_R]
    columns = {
        "first_sequence": first_R,
        "num_sequences": num_R,
        "first_fan": np.cumsum(fans_R) - fans_R,
        "num_fans": fans_R,
        "num_starts": starts_R,
        "first_chunk": first_chunk_R,
        "num_chunks": chunk_offset[bounds_R2[:, 1]] - first_chunk_R,
    }
    rounds_R = np.stack([columns[name] for name in Round._fields], axis=1)
    return init, slot, rounds_R, key_M2[fan_F, 1], np.append(fan_F, start_M.size), slot[start_M][order]


def _slot_tables(sequences: PackedSequences) -> tuple[np.ndarray, ...]:
    """``packed_row_S``, ``own_row_S``, ``copy_slot_S``, ``shared_row_D`` and ``shared_ptr_D1``."""
    packed, kept = sequences.packed_row_host, sequences.kept_host
    cu, chunk_offset = (np.asarray(x) for x in (sequences.cu_seqlens_host, sequences.chunk_offset_host))
    size = sequences.num_chunks * sequences.chunk_size
    slot_P = np.arange(packed.size) + np.repeat(chunk_offset[:-1] * sequences.chunk_size - cu[:-1], np.diff(cu))
    packed_row, own_row, copy_slot = (np.full(size, -1, dtype=np.int64) for _ in range(3))
    packed_row[slot_P] = packed
    own_row[slot_P[kept]] = np.arange(kept.size)
    count = np.bincount(packed, minlength=sequences.num_path_rows)
    shared_row = np.flatnonzero(count != 1)
    shared_ptr = np.concatenate([[0], np.cumsum(count[shared_row])]).astype(np.int64)
    # A stable sort keeps packed order inside a path row: the fixed order of the gradient sums.
    order = np.argsort(packed, kind="stable")
    copies = order[count[packed[order]] > 1]
    copy_slot[slot_P[copies]] = np.arange(copies.size)
    return packed_row, own_row, copy_slot, shared_row, shared_ptr


def unpack(tables: list[Tensor], chunk_size: int) -> Index:
    """Cut the tables of a call; ``tables`` are the fields of :class:`KDATables`."""
    t = KDATables(*tables)
    header = t.header_J.tolist()
    Q, F, M, D, N, separate, num_rounds = header[:_HEADER]
    S = t.packed_row_S.shape[0]
    views, at = [], 0
    for size in (S, S, Q + 1, Q, Q, S // chunk_size + Q, F, F + 1, M, D, D + 1):
        views.append(t.index_I[at : at + size])
        at += -(-size // _ALIGN) * _ALIGN
    rounds = [Round._make(header[i : i + _ROUND]) for i in range(_HEADER, _HEADER + _ROUND * num_rounds, _ROUND)]
    return Index._make([*views, t.packed_row_S, t.kept_T, N, t.export_sequence_E.shape[0], bool(separate), rounds])
