"""Plain PyTorch form of the log-probs and entropies: blocks of rows, any dtype. The equations are those of ``op.py``.

Letters: T rows, S semantic positions, D model dim, W vocabulary, R rows of one block.
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


def recover_logprobs_reference(logits_TW: Tensor, row_of_position_S: Tensor, label_S: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of logits; see :func:`harts_titan.ops.logprob.recover_logprobs`."""
    return _RecoverLogprobs.apply(logits_TW, row_of_position_S, label_S)


def linear_logprobs_reference(
    hidden_TD: Tensor, weight_WD: Tensor, row_of_position_S: Tensor, label_S: Tensor, rows_per_chunk: int
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of ``hidden @ weight^T``; see :func:`harts_titan.ops.logprob.linear_logprobs`."""
    return _LinearLogprobs.apply(hidden_TD, weight_WD, row_of_position_S, label_S, rows_per_chunk)


def shard_statistics_reference(
    hidden_TD: Tensor, weight_WD: Tensor, row_S: Tensor, label_S: Tensor, first_word: int, rows_per_chunk: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Statistics of the logits of one rank's words, at least float32.

    Args:
        hidden_TD: Hidden rows.
        weight_WD: The rank's words, at least one.
        row_S: int64 row of each position.
        label_S: int64 label of each position, in the whole vocabulary.
        first_word: Token id of the first word.
        rows_per_chunk: Rows whose logits exist at once.

    Returns:
        ``m = max z``, ``sum exp(z - m)`` and ``sum exp(z - m) (z - m)`` of each row, and each position's label logit, 0
        if the label is another rank's.
    """
    dtype = wide_dtype(hidden_TD.dtype)
    row_max, row_sum, slope = (hidden_TD.new_empty(hidden_TD.shape[0], dtype=dtype) for _ in range(3))
    label_logit_S = hidden_TD.new_zeros(label_S.shape, dtype=dtype)
    for a, b in _blocks(hidden_TD.shape[0], rows_per_chunk):
        z_RW = (hidden_TD[a:b] @ weight_WD.t()).to(dtype)
        row_max[a:b] = z_RW.amax(dim=1)
        shifted_RW = z_RW - row_max[a:b, None]
        p_RW = shifted_RW.exp()
        row_sum[a:b], slope[a:b] = p_RW.sum(dim=1), (p_RW * shifted_RW).sum(dim=1)
        own_S, local_S, word_S = _owned(row_S, label_S, (a, b), first_word, weight_WD.shape[0])
        label_logit_S = torch.where(own_S, z_RW[local_S, word_S], label_logit_S)
    return row_max, row_sum, slope, label_logit_S


def shard_gradients_reference(
    hidden_TD: Tensor,
    weight_WD: Tensor,
    row_S: Tensor,
    label_S: Tensor,
    saved: tuple[Tensor, Tensor, Tensor],
    gradients: tuple[Tensor | None, Tensor | None],
    first_word: int,
    rows_per_chunk: int,
    needs: tuple[bool, bool] = (True, True),
) -> tuple[Tensor, Tensor]:
    """Gradients of the hidden rows (one rank's share, at least float32) and of the rank's weight.

    Args:
        hidden_TD: As in :func:`shard_statistics_reference`.
        weight_WD: As in :func:`shard_statistics_reference`.
        row_S: As in :func:`shard_statistics_reference`.
        label_S: As in :func:`shard_statistics_reference`.
        saved: Log-sum-exp (T,) and entropy (T,) over the whole vocabulary, and label logits (S,).
        gradients: Of the log-probs (S,) and the entropies (T,), or None.
        first_word: As in :func:`shard_statistics_reference`.
        rows_per_chunk: As in :func:`shard_statistics_reference`.
        needs: Ignored: both are computed.
    """
    lse_T, entropy_T, _ = saved
    dlogprob_S, dentropy_T = gradients
    dtype = lse_T.dtype
    g_S = torch.zeros(label_S.shape, dtype=dtype, device=lse_T.device) if dlogprob_S is None else dlogprob_S.to(dtype)
    g_S = torch.where(label_S >= 0, g_S, 0.0)
    e_T = torch.zeros_like(lse_T) if dentropy_T is None else dentropy_T.to(dtype)
    scale_T = torch.zeros_like(lse_T).index_put_((row_S,), g_S, accumulate=True)
    dhidden, dweight = torch.zeros_like(hidden_TD, dtype=dtype), torch.zeros_like(weight_WD, dtype=dtype)
    for a, b in _blocks(hidden_TD.shape[0], rows_per_chunk):
        logp_RW = (hidden_TD[a:b] @ weight_WD.t()).to(dtype) - lse_T[a:b, None]
        dz_RW = -logp_RW.exp() * (scale_T[a:b, None] + e_T[a:b, None] * (logp_RW + entropy_T[a:b, None]))
        own_S, local_S, word_S = _owned(row_S, label_S, (a, b), first_word, weight_WD.shape[0])
        dz_RW.index_put_((local_S, word_S), torch.where(own_S, g_S, 0.0), accumulate=True)
        dz_RW = dz_RW.to(hidden_TD.dtype)
        dhidden[a:b] = dz_RW.to(dtype) @ weight_WD.to(dtype)
        _add_product(dweight, dz_RW.t(), hidden_TD[a:b])
    return dhidden, dweight.to(weight_WD.dtype)


def _owned(
    row_S: Tensor, label_S: Tensor, rows: tuple[int, int], first_word: int, num_words: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Positions of these rows whose label is one of the words, and valid local indices for all positions."""
    a, b = rows
    word_S = label_S - first_word
    own_S = (label_S >= 0) & (word_S >= 0) & (word_S < num_words) & (row_S >= a) & (row_S < b)
    return own_S, (row_S - a).clamp(0, b - a - 1), word_S.clamp(0, num_words - 1)


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
