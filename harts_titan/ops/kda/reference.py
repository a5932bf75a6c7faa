"""KDA over packed sequences in plain PyTorch: "reference" (chunkwise, any device) and "recurrent" (by token, tests).

Letters: T own rows, X external rows, Y = X + T path rows, P packed rows, E external or exported states, B chunk rows,
H heads, K key dim, V value dim.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.profiler import record_function

from harts_titan.ops.kda.chunk import ChunkInputs, chunk_step, l2norm, safe_gate
from harts_titan.ops.kda.sequences import PackedSequences


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of the state and of the arithmetic: float64 for float64 inputs, float32 otherwise."""
    return torch.float64 if dtype == torch.float64 else torch.float32


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
    Memory beyond the inputs: one state per chunk and one output row per packed row.
    """
    return _ChunkwiseKDA.apply(
        q_YHK, k_YHK, v_YHV, f_YHK, b_YH, A_log_H, dt_bias_HK, external_state_EHKV, sequences, lower_bound
    )


class _ChunkwiseKDA(torch.autograd.Function):
    """Forward keeps inputs and chunk-start states; backward walks the chunks in reverse and differentiates each."""

    @staticmethod
    def forward(ctx, q, k, v, f, b, A_log, dt_bias, external_state, sequences, lower_bound):
        dtype = compute_dtype(q.dtype)
        packed = sequences.packed_row_P
        A_log_c, dt_bias_c = A_log.to(dtype), dt_bias.to(dtype)
        state_shape = (q.shape[1], q.shape[2], v.shape[2])
        pool = q.new_zeros((sequences.num_pool_rows, *state_shape), dtype=dtype)
        if external_state is not None:
            pool[: sequences.num_external_states] = external_state
        starts = q.new_empty((sequences.num_chunks, *state_shape), dtype=dtype)
        o_PHV = q.new_empty((packed.numel(), *v.shape[1:]), dtype=dtype)
        chunks = _Chunks(sequences, (q, k, v, f, b), dtype)
        for n in _by_round(sequences, "harts::round{}"):
            init = sequences.init_state_host[n]
            state = pool[init].clone() if init >= 0 else q.new_zeros(state_shape, dtype=dtype)
            for c, (first, last) in chunks.of_sequence(n):
                _export(pool, chunks.export_row(n, c), state)
                starts[chunks.index(n, c)] = state
                inputs, valid = chunks.load(first, last)
                o_BHV, state = chunk_step(inputs, valid, A_log_c, dt_bias_c, state, lower_bound)
                o_PHV[first:last] = o_BHV[: last - first]
            _export(pool, chunks.export_row(n, chunks.count(n)), state)
        exported = pool[sequences.num_external_states :].clone()
        ctx.save_for_backward(q, k, v, f, b, A_log, dt_bias, starts)
        ctx.sequences, ctx.lower_bound = sequences, lower_bound
        ctx.external_dtype = None if external_state is None else external_state.dtype
        ctx.set_materialize_grads(False)
        return o_PHV.index_select(0, sequences.kept_T).to(v.dtype), exported

    @staticmethod
    def backward(ctx, do, dexported):
        q, k, v, f, b, A_log, dt_bias, starts = ctx.saved_tensors
        sequences, lower_bound = ctx.sequences, ctx.lower_bound
        dtype = compute_dtype(q.dtype)
        A_log_c, dt_bias_c = A_log.to(dtype), dt_bias.to(dtype)
        dpool = starts.new_zeros((sequences.num_pool_rows, *starts.shape[1:]))
        if dexported is not None:
            dpool[sequences.num_external_states :] = dexported
        do_PHV = starts.new_zeros((sequences.num_packed_rows, *v.shape[1:]))
        if do is not None:
            do_PHV[sequences.kept_T] = do.to(dtype)
        chunks = _Chunks(sequences, (q, k, v, f, b), dtype)
        dpacked = [x.new_zeros((sequences.num_packed_rows, *x.shape[1:]), dtype=dtype) for x in (q, k, v, f, b)]
        # Thousands of chunks add into these two: float64 keeps the sums exact enough for any order of chunks.
        dA_log = torch.zeros_like(A_log, dtype=torch.float64)
        ddt_bias = torch.zeros_like(dt_bias, dtype=torch.float64)
        # Later rounds first: their initial-state gradients enter the exports of earlier rounds.
        for n in _by_round(sequences, "harts::round{}_backward", backward=True):
            dstate = _injected(dpool, chunks.export_row(n, chunks.count(n)), starts.new_zeros(starts.shape[1:]))
            for c, (first, last) in reversed(chunks.of_sequence(n)):
                inputs, valid = chunks.load(first, last)
                leaves = [x.requires_grad_() for x in (*inputs, A_log_c.clone(), dt_bias_c.clone())]
                state = starts[chunks.index(n, c)].clone().requires_grad_()
                with torch.enable_grad():
                    outputs = chunk_step(ChunkInputs(*leaves[:5]), valid, leaves[5], leaves[6], state, lower_bound)
                do_BHV = chunks.padded(do_PHV, first, last)
                *dinputs, dA, dbias, dstate = torch.autograd.grad(outputs, [*leaves, state], [do_BHV, dstate])
                for total, part in zip(dpacked, dinputs):
                    total[first:last] = part[: last - first]
                dA_log += dA
                ddt_bias += dbias
                dstate = _injected(dpool, chunks.export_row(n, c), dstate)
            if sequences.init_state_host[n] >= 0:
                dpool[sequences.init_state_host[n]] += dstate
        dinputs = [_sum_replays(x, part, sequences) for x, part in zip((q, k, v, f, b), dpacked)]
        dexternal = None
        if ctx.external_dtype is not None:
            dexternal = dpool[: sequences.num_external_states].to(ctx.external_dtype)
        return (*dinputs, dA_log.to(A_log.dtype), ddt_bias.to(dt_bias.dtype), dexternal, None, None)


def _by_round(sequences: PackedSequences, name: str, *, backward: bool = False) -> Iterator[int]:
    """Yield the sequences round after round, each round inside a profiler range; last to first for ``backward``."""
    rounds = list(enumerate(sequences.rounds))
    for r, (first, last) in reversed(rounds) if backward else rounds:
        with record_function(name.format(r)):
            yield from reversed(range(first, last)) if backward else range(first, last)


class _Chunks:
    """Row ranges and zero-padded inputs of the chunks of a call."""

    def __init__(self, sequences: PackedSequences, inputs: tuple[Tensor, ...], dtype: torch.dtype) -> None:
        self.sequences, self.inputs, self.dtype = sequences, inputs, dtype
        self.size = sequences.chunk_size
        self.valid_masks = torch.ones(self.size, self.size, dtype=dtype, device=inputs[0].device).tril()

    def count(self, n: int) -> int:
        return self.sequences.chunk_offset_host[n + 1] - self.sequences.chunk_offset_host[n]

    def index(self, n: int, c: int) -> int:
        return self.sequences.chunk_offset_host[n] + c

    def export_row(self, n: int, boundary: int) -> int:
        return self.sequences.export_row_host[self.index(n, boundary) + n]

    def of_sequence(self, n: int) -> list[tuple[int, tuple[int, int]]]:
        begin, end = self.sequences.cu_seqlens_host[n : n + 2]
        starts = range(begin, end, self.size)
        return [(c, (start, min(start + self.size, end))) for c, start in enumerate(starts)]

    def load(self, first: int, last: int) -> tuple[ChunkInputs, Tensor]:
        """Raw inputs of packed rows [first, last) in fresh chunk-sized buffers, and their 0/1 validity."""
        rows = self.sequences.packed_row_P[first:last]
        buffers = []
        for x in self.inputs:
            buffer = x.new_zeros((self.size, *x.shape[1:]), dtype=self.dtype)
            buffer[: last - first] = x.detach().index_select(0, rows)
            buffers.append(buffer)
        # A fresh copy, so that its alignment is the same for every length.
        return ChunkInputs(*buffers), self.valid_masks[last - first - 1].clone()

    def padded(self, x_PHV: Tensor, first: int, last: int) -> Tensor:
        buffer = x_PHV.new_zeros((self.size, *x_PHV.shape[1:]))
        buffer[: last - first] = x_PHV[first:last]
        return buffer


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
    dtype = compute_dtype(q_YHK.dtype)
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
