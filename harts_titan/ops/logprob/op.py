"""Log-probabilities of semantic positions and entropies of compact rows (HARTS 3.5).

Letters: T rows, S semantic positions, D model dim, W vocabulary, R rows of one block.

``logprob_s = z[m(s), y_s] - lse[m(s)]`` and ``entropy_c = lse_c - sum_w p_cw z_cw``, in float32 (float64 for float64
logits). With ``G_c`` = the sum of the log-prob gradients of the row's positions and ``e_c`` its entropy gradient,
``dz_cw = sum_{s in c} dlogprob_s [w = y_s] - p_cw (G_c + e_c (log p_cw + entropy_c))``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from harts_titan.ops.dtypes import wide_dtype

IGNORED_LABEL = -100
"""Label of a position that predicts nothing; ``tree`` cannot import it and states the same number."""

_BLOCK_ELEMENTS = 1 << 26


class _Positions(NamedTuple):
    """Positions sorted by row, so that a block of rows owns a contiguous range; the unlabelled ones come last."""

    index_S: Tensor
    row_S: Tensor
    label_S: Tensor
    ptr: list[int]
    """First sorted position of each block of rows; host integers."""


def recover_logprobs(logits_TW: Tensor, row_of_position_S: Tensor, label_S: Tensor) -> tuple[Tensor, Tensor]:
    """Log-prob of every position's label and entropy of every row, from compact logits.

    Args:
        logits_TW: Logits of the rows, any floating dtype.
        row_of_position_S: int64 row of each position, in [0, T).
        label_S: int64 next-token id in [0, W); -100 marks a position without a label.

    Returns:
        ``logprob_S`` (0 where ignored) and ``entropy_T`` in nats, float32 (float64 for float64 logits). Both are
        differentiable in the logits.

    Raises:
        ValueError: If shapes disagree.

    Memory: blocks of rows; O(T + S) beyond the logits and their gradient, never (S, W).
    """
    _check(row_of_position_S, label_S, logits_TW.shape[0], "logits")
    return _RecoverLogprobs.apply(logits_TW, row_of_position_S, label_S)


def linear_logprobs(
    hidden_TD: Tensor,
    weight_WD: Tensor,
    row_of_position_S: Tensor,
    label_S: Tensor,
    *,
    rows_per_chunk: int = 2048,
) -> tuple[Tensor, Tensor]:
    """:func:`recover_logprobs` of ``hidden @ weight^T`` without ever holding all logits.

    Logits are computed in the inputs' dtype for ``rows_per_chunk`` rows at a time and again in backward; the weight's
    gradient is accumulated in float32 over the chunks.

    Args:
        hidden_TD: Final hidden rows.
        weight_WD: LM head weight, same dtype.
        row_of_position_S: int64 row of each position, in [0, T).
        label_S: int64 next-token id in [0, W), or -100.
        rows_per_chunk: Rows whose logits exist at once; memory is ``rows_per_chunk * W`` float32 values, twice.

    Returns:
        As :func:`recover_logprobs`; differentiable in ``hidden`` and ``weight``.

    Raises:
        ValueError: If shapes or dtypes disagree or ``rows_per_chunk`` is not positive.
    """
    _check(row_of_position_S, label_S, hidden_TD.shape[0], "hidden")
    if rows_per_chunk < 1:
        raise ValueError(f"rows_per_chunk ({rows_per_chunk}) must be positive")
    if hidden_TD.dtype != weight_WD.dtype or hidden_TD.shape[1] != weight_WD.shape[1]:
        raise ValueError(
            f"hidden is {hidden_TD.dtype} {tuple(hidden_TD.shape)}, weight {weight_WD.dtype} {tuple(weight_WD.shape)}; "
            "they must share the dtype and the last dimension"
        )
    return _LinearLogprobs.apply(hidden_TD, weight_WD, row_of_position_S, label_S, rows_per_chunk)


def _check(row_of_position_S: Tensor, label_S: Tensor, num_rows: int, name: str) -> None:
    if row_of_position_S.shape != label_S.shape or label_S.dim() != 1:
        raise ValueError(
            f"row_of_position has shape {tuple(row_of_position_S.shape)}, label {tuple(label_S.shape)}; both need (S,)"
        )
    if num_rows == 0 and label_S.numel():
        raise ValueError(f"{label_S.numel()} positions but {name} has no rows")


def _sort_positions(row_S: Tensor, label_S: Tensor, num_rows: int, rows_per_block: int) -> _Positions:
    # Unlabelled positions sort behind every row. The stable sort fixes the order in which one row's positions add up.
    row = torch.where(label_S == IGNORED_LABEL, num_rows, row_S)
    row, index = torch.sort(row, stable=True)
    edges = torch.arange(0, num_rows + rows_per_block, rows_per_block, device=row.device).clamp_(max=num_rows)
    # One host read per call: the block ranges.
    ptr = torch.searchsorted(row, edges.to(row.dtype)).tolist()
    return _Positions(index, row, label_S[index], ptr)


def _blocks(num_rows: int, rows_per_block: int) -> list[tuple[int, int]]:
    return [(a, min(a + rows_per_block, num_rows)) for a in range(0, num_rows, rows_per_block)]


def _forward_block(
    z_RW: Tensor, first: int, block: int, positions: _Positions, logprob_S: Tensor, lse_T: Tensor, entropy_T: Tensor
) -> None:
    """Fill the block's entries of the three outputs; ``z_RW`` is float32 or float64."""
    rows = slice(first, first + z_RW.shape[0])
    lse_R = torch.logsumexp(z_RW, dim=-1)
    lse_T[rows] = lse_R
    logp_RW = z_RW - lse_R[:, None]
    # Equal to lse - sum p z, without the cancellation of two large numbers.
    entropy_T[rows] = -(logp_RW.exp() * logp_RW).sum(-1)
    span = slice(positions.ptr[block], positions.ptr[block + 1])
    local = positions.row_S[span] - first
    logprob_S[positions.index_S[span]] = logp_RW[local, positions.label_S[span]]


def _backward_block(
    z_RW: Tensor,
    first: int,
    block: int,
    positions: _Positions,
    dlogprob_S: Tensor | None,
    dentropy_T: Tensor | None,
    lse_T: Tensor,
    entropy_T: Tensor,
) -> Tensor:
    """Gradient of the block's logits, same shape and dtype as ``z_RW`` (which is overwritten)."""
    rows = slice(first, first + z_RW.shape[0])
    logp_RW = z_RW.sub_(lse_T[rows, None])
    dz_RW = logp_RW.exp()
    scale_R = z_RW.new_zeros(z_RW.shape[0])
    span = slice(positions.ptr[block], positions.ptr[block + 1])
    local, label = positions.row_S[span] - first, positions.label_S[span]
    if dlogprob_S is not None:
        g_L = dlogprob_S[positions.index_S[span]].to(z_RW.dtype)
        scale_R.index_put_((local,), g_L, accumulate=True)
    if dentropy_T is None:
        dz_RW.mul_(-scale_R[:, None])
    else:
        e_R1 = dentropy_T[rows, None].to(z_RW.dtype)
        factor_RW = logp_RW.add_(entropy_T[rows, None]).mul_(e_R1).add_(scale_R[:, None])
        dz_RW.mul_(factor_RW.neg_())
    if dlogprob_S is not None:
        dz_RW.index_put_((local, label), g_L, accumulate=True)
    return dz_RW


class _RecoverLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, row_S, label_S):
        num_rows, vocab = logits.shape
        dtype = wide_dtype(logits.dtype)
        ctx.rows_per_block = max(1, _BLOCK_ELEMENTS // max(vocab, 1))
        positions = _sort_positions(row_S, label_S, num_rows, ctx.rows_per_block)
        logprob = logits.new_zeros(label_S.shape, dtype=dtype)
        lse, entropy = (logits.new_zeros(num_rows, dtype=dtype) for _ in range(2))
        for i, (a, b) in enumerate(_blocks(num_rows, ctx.rows_per_block)):
            _forward_block(logits[a:b].to(dtype), a, i, positions, logprob, lse, entropy)
        ctx.save_for_backward(logits, lse, entropy, *positions[:3])
        ctx.ptr = positions.ptr
        ctx.set_materialize_grads(False)
        return logprob, entropy

    @staticmethod
    def backward(ctx, dlogprob, dentropy):
        logits, lse, entropy, index, row, label = ctx.saved_tensors
        positions = _Positions(index, row, label, ctx.ptr)
        dlogits = torch.zeros_like(logits)
        if dlogprob is not None or dentropy is not None:
            for i, (a, b) in enumerate(_blocks(logits.shape[0], ctx.rows_per_block)):
                z = logits[a:b].to(lse.dtype, copy=True)
                dlogits[a:b] = _backward_block(z, a, i, positions, dlogprob, dentropy, lse, entropy)
        return dlogits, None, None


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, row_S, label_S, rows_per_chunk):
        num_rows = hidden.shape[0]
        dtype = wide_dtype(hidden.dtype)
        positions = _sort_positions(row_S, label_S, num_rows, rows_per_chunk)
        logprob = hidden.new_zeros(label_S.shape, dtype=dtype)
        lse, entropy = (hidden.new_zeros(num_rows, dtype=dtype) for _ in range(2))
        for i, (a, b) in enumerate(_blocks(num_rows, rows_per_chunk)):
            _forward_block((hidden[a:b] @ weight.t()).to(dtype), a, i, positions, logprob, lse, entropy)
        ctx.save_for_backward(hidden, weight, lse, entropy, *positions[:3])
        ctx.ptr, ctx.rows_per_chunk = positions.ptr, rows_per_chunk
        ctx.set_materialize_grads(False)
        return logprob, entropy

    @staticmethod
    def backward(ctx, dlogprob, dentropy):
        hidden, weight, lse, entropy, index, row, label = ctx.saved_tensors
        positions = _Positions(index, row, label, ctx.ptr)
        dhidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        dweight = torch.zeros_like(weight, dtype=lse.dtype) if ctx.needs_input_grad[1] else None
        if dlogprob is not None or dentropy is not None:
            for i, (a, b) in enumerate(_blocks(hidden.shape[0], ctx.rows_per_chunk)):
                z = (hidden[a:b] @ weight.t()).to(lse.dtype)
                dz = _backward_block(z, a, i, positions, dlogprob, dentropy, lse, entropy).to(hidden.dtype)
                if dhidden is not None:
                    dhidden[a:b] = dz @ weight
                if dweight is not None:
                    _add_product(dweight, dz.t(), hidden[a:b])
        return dhidden, None if dweight is None else dweight.to(weight.dtype), None, None, None


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """``total += left @ right`` with the product accumulated in the dtype of ``total``."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.device.type == "cuda":
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))
