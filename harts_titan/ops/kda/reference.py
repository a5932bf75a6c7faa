"""KDA over packed sequences in plain PyTorch: "reference" (chunkwise, any device) and "recurrent" (by token, tests).

Letters: T own rows, X external rows, Y = X + T path rows, P packed rows, E external or exported states, B chunk rows,
H heads, K key dim, V value dim.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import record_function

from harts_titan.ops.dtypes import wide_dtype
from harts_titan.ops.kda.chunk import (
    ChunkInputs,
    ChunkTerms,
    Gate,
    chunk_outputs,
    chunk_terms,
    l2norm,
    next_state,
    previous_dstate,
    safe_gate,
)
from harts_titan.ops.kda.sequences import PackedSequences
from harts_titan.ops.single_thread import single_thread

GROUP_ROWS = 512
"""Rows computed at once, about: a multiple of 8 chunks, padded if there are fewer. A function of the chunk size only:
shapes, and with them the rounding, must not depend on the call."""

# K and V are padded to the first, rows of a chunk to the second multiple: every matrix then starts at 64 bytes, where
# BLAS takes the same path for each, and every tensor of a group is whole SIMD vectors, so that no element is the tail.
DIM_MULTIPLE = 16
ROW_MULTIPLE = 4


def kda_reference(
    q_YHK: Tensor,
    k_YHK: Tensor,
    v_YHV: Tensor,
    f_YHK: Tensor,
    b_YH: Tensor,
    A_log_H: Tensor,
    dt_bias_HK: Tensor,
    sequences: PackedSequences,
    lower_bound: float,
    external_state_EHKV: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Chunkwise KDA; arguments and results as in :func:`harts_titan.ops.kda.kda`.

    A row's output is bit-identical whatever the packing, as long as its path and its chunk grid are the same.
    Memory beyond the inputs: one state per chunk, one output row per packed row, and the temporaries of one group.
    """
    key_dim, value_dim = q_YHK.shape[2], v_YHV.shape[2]
    key_pad, value_pad = -key_dim % DIM_MULTIPLE, -value_dim % DIM_MULTIPLE
    if key_pad or value_pad:
        q_YHK, k_YHK, f_YHK, dt_bias_HK = (F.pad(x, (0, key_pad)) for x in (q_YHK, k_YHK, f_YHK, dt_bias_HK))
        v_YHV = F.pad(v_YHV, (0, value_pad))
        if external_state_EHKV is not None:
            external_state_EHKV = F.pad(external_state_EHKV, (0, value_pad, 0, key_pad))
    o_THV, exported_EHKV = _ChunkwiseKDA.apply(
        *(q_YHK, k_YHK, v_YHV, f_YHK, b_YH, A_log_H, dt_bias_HK),
        *(external_state_EHKV, sequences, lower_bound, key_dim**-0.5),
    )
    return o_THV[..., :value_dim], exported_EHKV[:, :, :key_dim, :value_dim]


class _ChunkwiseKDA(torch.autograd.Function):
    """Forward keeps inputs and chunk-start states; backward recomputes group by group, last chunk first."""

    @staticmethod
    def forward(ctx, q, k, v, f, b, A_log, dt_bias, external_state, sequences, lower_bound, scale):
        dtype = wide_dtype(q.dtype)
        chunks = _Chunks(sequences)
        gate = Gate(A_log.double(), dt_bias.double(), lower_bound)
        zero = q.new_zeros((q.shape[1], q.shape[2], v.shape[2]), dtype=dtype)
        pool = zero.new_zeros((sequences.num_pool_rows, *zero.shape))
        if external_state is not None:
            pool[: sequences.num_external_states] = external_state
        starts = zero.new_zeros((chunks.num_groups * chunks.group, *zero.shape))
        o_PHV = zero.new_empty((sequences.num_packed_rows, *v.shape[1:]))
        state = zero
        with single_thread(q.device):
            for group in chunks.groups():
                inputs = ChunkInputs(*chunks.load(group, (q, k, v, f, b)))
                terms = chunk_terms(inputs, chunks.valid(group), gate, scale, dtype)
                each = _by_chunk(terms.w_GHBK, terms.u_GHBV, terms.k_GHKB, terms.decay_GHK1)
                for c in chunks.of_group(group, "harts::round{}"):
                    if chunks.is_first(c):
                        state = _initial_state(pool, chunks.init_state(c), zero)
                        _export(pool, chunks.export_before(c), state)
                    starts[c] = state
                    state = next_state(state, *each[c - group.start])
                    _export(pool, chunks.export_behind(c), state)
                o_GHBV, _ = chunk_outputs(terms, chunks.rows_of(group, starts))
                chunks.store(group, o_GHBV.transpose(1, 2), o_PHV)
        exported = pool[sequences.num_external_states :].clone()
        ctx.save_for_backward(q, k, v, f, b, A_log, dt_bias, starts)
        ctx.chunks, ctx.lower_bound, ctx.scale = chunks, lower_bound, scale
        ctx.external_dtype = None if external_state is None else external_state.dtype
        ctx.set_materialize_grads(False)
        return o_PHV.index_select(0, sequences.kept_T).to(v.dtype), exported

    @staticmethod
    def backward(ctx, do, dexported):
        q, k, v, f, b, A_log, dt_bias, starts = ctx.saved_tensors
        chunks, sequences = ctx.chunks, ctx.chunks.sequences
        dpool = starts.new_zeros((sequences.num_pool_rows, *starts.shape[1:]))
        if dexported is not None:
            dpool[sequences.num_external_states :] = dexported
        do_PHV = starts.new_zeros((sequences.num_packed_rows, *v.shape[1:]))
        if do is not None:
            do_PHV[sequences.kept_T] = do.to(starts.dtype)
        dpacked = [starts.new_empty((sequences.num_packed_rows, *x.shape[1:])) for x in (q, k, v, f, b)]
        parameters = [x.to(torch.float64, copy=True).requires_grad_() for x in (A_log, dt_bias)]
        gate = Gate(parameters[0], parameters[1], ctx.lower_bound)
        dgate = [torch.zeros_like(x) for x in parameters]
        dstate = zero = starts.new_zeros(starts.shape[1:])
        with single_thread(q.device):
            for group in reversed(chunks.groups()):
                leaves = [x.requires_grad_() for x in chunks.load(group, (q, k, v, f, b))]
                with torch.enable_grad():
                    terms = chunk_terms(ChunkInputs(*leaves), chunks.valid(group), gate, ctx.scale, starts.dtype)
                fixed = ChunkTerms(*(x.detach() for x in terms))
                do_GHBV = chunks.load_packed(group, do_PHV).transpose(1, 2).contiguous()
                dr_GHBV = fixed.scores_GHBB.transpose(2, 3) @ do_GHBV
                ds_GHKV = fixed.q_GHBK.transpose(2, 3) @ do_GHBV
                each = _by_chunk(fixed.w_GHBK, fixed.k_GHKB, fixed.decay_GHK1, dr_GHBV, ds_GHKV)
                dnext_GHKV = torch.zeros_like(ds_GHKV)
                # Later rounds first: their initial-state gradients enter the exports of earlier rounds.
                for c in chunks.of_group(group, "harts::round{}_backward", backward=True):
                    if chunks.is_last(c):
                        dstate = _injected(dpool, chunks.export_behind(c), zero)
                    dnext_GHKV[c - group.start] = dstate
                    dstate = previous_dstate(dstate, *each[c - group.start])
                    dstate = _injected(dpool, chunks.export_before(c), dstate)
                    if chunks.is_first(c) and chunks.init_state(c) >= 0:
                        dpool[chunks.init_state(c)] += dstate
                with torch.enable_grad():
                    outputs = chunk_outputs(terms, chunks.rows_of(group, starts))
                leaves += parameters
                *dinputs, dA_log, ddt_bias = torch.autograd.grad(outputs, leaves, [do_GHBV, dnext_GHKV])
                for total, part in zip(dpacked, dinputs):
                    chunks.store(group, part, total)
                for total, part in zip(dgate, (dA_log, ddt_bias)):
                    total += part
        dinputs = [_sum_replays(x, part, sequences) for x, part in zip((q, k, v, f, b), dpacked)]
        dexternal = None
        if ctx.external_dtype is not None:
            dexternal = dpool[: sequences.num_external_states].to(ctx.external_dtype)
        return (*dinputs, dgate[0].to(A_log.dtype), dgate[1].to(dt_bias.dtype), dexternal, None, None, None)


class _Chunks:
    """The chunks of a call, sequence after sequence, in groups of a fixed number; groups may span rounds."""

    def __init__(self, sequences: PackedSequences) -> None:
        self.sequences = sequences
        size = sequences.chunk_size
        self.size = -(-size // ROW_MULTIPLE) * ROW_MULTIPLE
        self.group = max(GROUP_ROWS // self.size // 8, 1) * 8
        self.num_groups = -(-sequences.num_chunks // self.group)
        sequence_C, chunk_C = sequences.chunk_indices_C2.unbind(1)
        self.sequence = sequence_C.tolist()
        offset = sequences.chunk_offset_host
        self.round = [r for r, (i, j) in enumerate(sequences.rounds) for _ in range(offset[i], offset[j])]
        first_row_C = sequences.cu_seqlens_Q1[sequence_C] + chunk_C * size
        self.first_row = [*first_row_C.tolist(), sequences.num_packed_rows]
        packed_P = torch.arange(sequences.num_packed_rows, device=sequences.device)
        chunk_P = torch.searchsorted(first_row_C, packed_P, right=True) - 1
        # Where a packed row lies among the rows of all chunks.
        self.slot_P = chunk_P * self.size + packed_P - first_row_C[chunk_P]

    def groups(self) -> list[range]:
        count = self.sequences.num_chunks
        return [range(c, min(c + self.group, count)) for c in range(0, count, self.group)]

    def of_group(self, group: range, name: str, *, backward: bool = False) -> Iterator[int]:
        """Yield the chunks of a group, each round's inside its profiler range; last to first for ``backward``."""
        chunks = reversed(group) if backward else group
        for r, inside in itertools.groupby(chunks, key=self.round.__getitem__):
            with record_function(name.format(r)):
                yield from inside

    def is_first(self, c: int) -> bool:
        return c == self.sequences.chunk_offset_host[self.sequence[c]]

    def is_last(self, c: int) -> bool:
        return c + 1 == self.sequences.chunk_offset_host[self.sequence[c] + 1]

    def init_state(self, c: int) -> int:
        return self.sequences.init_state_host[self.sequence[c]]

    def export_before(self, c: int) -> int:
        return self.sequences.export_row_host[c + self.sequence[c]]

    def export_behind(self, c: int) -> int:
        return self.sequences.export_row_host[c + self.sequence[c] + 1]

    def rows_of(self, group: range, x_CHKV: Tensor) -> Tensor:
        return x_CHKV[group.start : group.start + self.group]

    def _slots(self, group: range) -> tuple[slice, Tensor]:
        rows = slice(self.first_row[group.start], self.first_row[group.stop])
        return rows, self.slot_P[rows] - group.start * self.size

    def load(self, group: range, inputs: tuple[Tensor, ...]) -> list[Tensor]:
        """Path rows of the group's chunks, in float64 and zero where a chunk has no row: (G, B, ...)."""
        rows, slots = self._slots(group)
        packed = self.sequences.packed_row_P[rows]
        return [self._spread(x.detach().index_select(0, packed).double(), slots) for x in inputs]

    def load_packed(self, group: range, x_PHV: Tensor) -> Tensor:
        """Packed rows of the group's chunks, likewise, in their own dtype."""
        rows, slots = self._slots(group)
        return self._spread(x_PHV[rows], slots)

    def valid(self, group: range) -> Tensor:
        """1.0 where the group's chunks have a row: (G, B)."""
        _, slots = self._slots(group)
        return self._spread(torch.ones_like(slots, dtype=torch.float64), slots)

    def _spread(self, rows: Tensor, slots: Tensor) -> Tensor:
        buffer = rows.new_zeros((self.group * self.size, *rows.shape[1:]))
        return buffer.index_copy_(0, slots, rows).unflatten(0, (self.group, self.size))

    def store(self, group: range, x_GBHV: Tensor, x_PHV: Tensor) -> None:
        """Copy the rows of the group's chunks to their packed rows."""
        rows, slots = self._slots(group)
        x_PHV[rows] = x_GBHV.flatten(0, 1).index_select(0, slots)


def _by_chunk(*terms: Tensor) -> list[tuple[Tensor, ...]]:
    return list(zip(*(x.unbind() for x in terms), strict=True))


def _initial_state(pool: Tensor, row: int, zero: Tensor) -> Tensor:
    return pool[row] if row >= 0 else zero


def _export(pool: Tensor, row: int, state: Tensor) -> None:
    if row >= 0:
        pool[row] = state


def _injected(dpool: Tensor, row: int, dstate: Tensor) -> Tensor:
    return dstate if row < 0 else dstate + dpool[row]


def _sum_replays(x: Tensor, dpacked: Tensor, sequences: PackedSequences) -> Tensor:
    """Gradient of a path-row input: its packed readers summed in packed order, one order on every device."""
    dx = x.new_zeros(x.shape, dtype=dpacked.dtype)
    if x.device.type == "cpu":
        dx.index_add_(0, sequences.packed_row_P, dpacked)
    else:
        # Atomics would sum in any order; accumulating index_put sorts by row first.
        dx.index_put_((sequences.packed_row_P,), dpacked, accumulate=True)
    return dx.to(x.dtype)


def kda_recurrent(
    q_YHK: Tensor,
    k_YHK: Tensor,
    v_YHV: Tensor,
    f_YHK: Tensor,
    b_YH: Tensor,
    A_log_H: Tensor,
    dt_bias_HK: Tensor,
    sequences: PackedSequences,
    lower_bound: float,
    external_state_EHKV: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """KDA token by token with plain autograd; arguments and results as in :func:`harts_titan.ops.kda.kda`.

    For tests: one Python step and one saved state per packed row.
    """
    dtype = wide_dtype(q_YHK.dtype)
    q, k, v, f, b, A_log, dt_bias = (x.to(dtype) for x in (q_YHK, k_YHK, v_YHV, f_YHK, b_YH, A_log_H, dt_bias_HK))
    q, k, beta = l2norm(q) * q.shape[-1] ** -0.5, l2norm(k), torch.sigmoid(b)
    decay = safe_gate(f, A_log, dt_bias, lower_bound).exp()
    pool: dict[int, Tensor] = {}
    if external_state_EHKV is not None:
        pool.update(enumerate(external_state_EHKV.to(dtype)))
    rows = sequences.packed_row_P.tolist()
    outputs: list[Tensor] = []
    for n in range(sequences.num_sequences):
        begin, end = sequences.cu_seqlens_host[n : n + 2]
        init = sequences.init_state_host[n]
        state = pool[init] if init >= 0 else q.new_zeros(q.shape[1], q.shape[2], v.shape[2])
        boundary = sequences.chunk_offset_host[n] + n
        for i in range(begin, end):
            if (i - begin) % sequences.chunk_size == 0:
                pool[sequences.export_row_host[boundary]] = state
                boundary += 1
            row = rows[i]
            state = state * decay[row][..., None]
            seen = torch.einsum("hk,hkv->hv", k[row], state)
            state = state + torch.einsum("hk,hv->hkv", k[row], beta[row][:, None] * (v[row] - seen))
            outputs.append(torch.einsum("hk,hkv->hv", q[row], state))
        pool[sequences.export_row_host[boundary]] = state
    exported = [pool[sequences.num_external_states + e] for e in range(sequences.num_exports)]
    o_PHV = torch.stack(outputs) if outputs else v[:0]
    empty = q.new_zeros(0, q.shape[1], q.shape[2], v.shape[2])
    return o_PHV[sequences.kept_T].to(v_YHV.dtype), torch.stack(exported) if exported else empty
