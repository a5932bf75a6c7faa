"""The head on CUDA: matrix products of vocabulary blocks, one kernel over each block's logits forward and backward.

Letters: T rows, S positions, D model dim, W vocabulary (or one rank's part of it), NB column tiles.

Blocks are ranges of the vocabulary over all rows: a block's weight gradient is then one product over all rows, rounded
once, and only the hidden rows' gradient, a hundred times smaller than the weight's, is added up over blocks in
float32. Logits are float32 products of 16-bit inputs. No host synchronisation, no atomics, nothing sorted but the S
positions (by row and label, in backward).

A product's bits may depend on its number of rows (cuBLAS picks its kernel by shape); those of the kernels here do not.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from harts_titan.ops.logprob.launches import (
    LabelTerms,
    TileStatistics,
    block_width,
    device_of,
    product,
    vocabulary_blocks,
)


class Statistics(NamedTuple):
    """Of each row over the words at hand, float32, and the label logits of the positions (0 where there is none)."""

    max_T: Tensor
    sum_T: Tensor
    """``sum exp(z - max)``."""
    slope_T: Tensor
    """``sum exp(z - max) (z - max)``."""
    label_logit_S: Tensor


def head_statistics(
    hidden_TD: Tensor, weight_WD: Tensor, row_S: Tensor, label_S: Tensor, first_word: int, max_elements: int
) -> Statistics:
    """Statistics of the rows' logits over the words ``first_word + [0, W)``.

    Args:
        hidden_TD: float16, bfloat16 or float32 hidden rows.
        weight_WD: Output weight, same dtype; W >= 1.
        row_S: int64 row of each position.
        label_S: int64 label of each position; labels outside of the words give 0.
        first_word: Token id of the first word.
        max_elements: Logits that may exist at once; see :func:`block_width`.
    """
    return Statistics(*_head_statistics(hidden_TD, weight_WD, row_S, label_S, first_word, max_elements))


def head_gradients(
    hidden_TD: Tensor,
    weight_WD: Tensor,
    row_S: Tensor,
    label_S: Tensor,
    saved: tuple[Tensor, Tensor, Tensor],
    gradients: tuple[Tensor | None, Tensor | None],
    first_word: int,
    max_elements: int,
    needs: tuple[bool, bool] = (True, True),
) -> tuple[Tensor, Tensor]:
    """Gradients of hidden rows and weight.

    Args:
        hidden_TD: As in :func:`head_statistics`.
        weight_WD: As in :func:`head_statistics`.
        row_S: As in :func:`head_statistics`.
        label_S: As in :func:`head_statistics`.
        saved: float32 (T,) log-sum-exp, (T,) entropy, both over the whole vocabulary, and (S,) label logits.
        gradients: Of the log-probs (S,) and the entropies (T,), or None.
        first_word: As in :func:`head_statistics`.
        max_elements: As in :func:`head_statistics`.
        needs: Which gradients are wanted; the other is empty.

    Returns:
        float32 (T, D), these words' share of the hidden rows' gradient, and (W, D) in the dtype of the weight.
    """
    dlogprob, dentropy = gradients
    lse, entropy, label_logit = saved
    return _head_gradients(
        hidden_TD,
        weight_WD,
        row_S,
        label_S,
        lse,
        entropy,
        label_logit,
        dlogprob,
        dentropy,
        first_word,
        max_elements,
        *needs,
    )


@torch.library.custom_op(
    "harts_titan::head_statistics",
    mutates_args=(),
    schema="(Tensor hidden, Tensor weight, Tensor row, Tensor label, int first_word, int max_elements) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
)
def _head_statistics(hidden, weight, row, label, first_word, max_elements):
    T, W = hidden.shape[0], weight.shape[0]
    row, label = row.contiguous(), label.contiguous()
    with device_of(hidden):
        tiles = TileStatistics(hidden, T, W, label)
        # Here, not in a traced caller: a graph must not depend on the block width.
        width = block_width(T, W, max_elements)
        buffer = hidden.new_empty((T * min(width, W),), dtype=torch.float32)
        for a, b in vocabulary_blocks(W, width):
            z = buffer[: T * (b - a)].view(T, b - a)
            product(hidden, weight[a:b].t(), z)
            tiles.add(z, a, row, label, first_word)
        return tiles.combine()


@_head_statistics.register_fake
def _(hidden, weight, row, label, first_word, max_elements):
    rows = [hidden.new_empty((hidden.shape[0],), dtype=torch.float32) for _ in range(3)]
    return (*rows, hidden.new_empty(label.shape, dtype=torch.float32))


@torch.library.custom_op(
    "harts_titan::head_gradients",
    mutates_args=(),
    schema="(Tensor hidden, Tensor weight, Tensor row, Tensor label, Tensor lse, Tensor entropy, Tensor label_logit, "
    "Tensor? dlogprob, Tensor? dentropy, int first_word, int max_elements, bool need_hidden, bool need_weight) "
    "-> (Tensor, Tensor)",
)
def _head_gradients(
    hidden,
    weight,
    row,
    label,
    lse,
    entropy,
    label_logit,
    dlogprob,
    dentropy,
    first_word,
    max_elements,
    need_hidden,
    need_weight,
):
    (T, D), W = hidden.shape, weight.shape[0]
    dhidden = hidden.new_empty((T, D) if need_hidden else (0,), dtype=torch.float32)
    dweight = weight.new_empty((W, D) if need_weight else (0,))
    if T == 0 or not (need_hidden or need_weight):
        return dhidden.zero_(), dweight.zero_()
    with device_of(hidden):
        terms = LabelTerms(row.contiguous(), label.contiguous(), (lse, entropy, label_logit), dlogprob, dentropy)
        width = block_width(T, W, max_elements)
        buffer = hidden.new_empty((T * min(width, W),), dtype=torch.float32)
        narrow = buffer if hidden.dtype == torch.float32 else hidden.new_empty(buffer.shape)
        for a, b in vocabulary_blocks(W, width):
            z, dz = (flat[: T * (b - a)].view(T, b - a) for flat in (buffer, narrow))
            product(hidden, weight[a:b].t(), z)
            terms.write(z, dz, first_word + a)
            if need_hidden:
                product(dz, weight[a:b], dhidden, add=a > 0)
            if need_weight:
                torch.mm(dz.t(), hidden, out=dweight[a:b])
    return dhidden, dweight


@_head_gradients.register_fake
def _(
    hidden,
    weight,
    row,
    label,
    lse,
    entropy,
    label_logit,
    dlogprob,
    dentropy,
    first_word,
    max_elements,
    need_hidden,
    need_weight,
):
    dhidden = hidden.new_empty(hidden.shape if need_hidden else (0,), dtype=torch.float32)
    return dhidden, weight.new_empty(weight.shape if need_weight else (0,))


@torch.library.custom_op(
    "harts_titan::logit_statistics",
    mutates_args=(),
    schema="(Tensor logits, Tensor row, Tensor label) -> (Tensor, Tensor, Tensor, Tensor)",
)
def logit_statistics(logits, row, label):
    """:class:`Statistics` of logits that exist already."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    with device_of(logits):
        label = label.contiguous()
        tiles = TileStatistics(logits, logits.shape[0], logits.shape[1], label)
        tiles.add(logits, 0, row.contiguous(), label, 0)
        return tiles.combine()


@logit_statistics.register_fake
def _(logits, row, label):
    rows = [logits.new_empty((logits.shape[0],), dtype=torch.float32) for _ in range(3)]
    return (*rows, logits.new_empty(label.shape, dtype=torch.float32))


@torch.library.custom_op(
    "harts_titan::logit_gradients",
    mutates_args=(),
    schema="(Tensor logits, Tensor row, Tensor label, Tensor lse, Tensor entropy, Tensor label_logit, "
    "Tensor? dlogprob, Tensor? dentropy) -> Tensor",
)
def logit_gradient(logits, row, label, lse, entropy, label_logit, dlogprob, dentropy):
    """Gradient of logits that exist already, in their dtype."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    dlogits = logits.new_empty(logits.shape)
    with device_of(logits):
        terms = LabelTerms(row.contiguous(), label.contiguous(), (lse, entropy, label_logit), dlogprob, dentropy)
        terms.write(logits, dlogits, 0)
    return dlogits


@logit_gradient.register_fake
def _(logits, row, label, lse, entropy, label_logit, dlogprob, dentropy):
    return logits.new_empty(logits.shape)


def finish(max_T: Tensor, sum_T: Tensor, slope_T: Tensor) -> tuple[Tensor, Tensor]:
    """Log-sum-exp and entropy from the statistics of whole rows.

    ``entropy = log sum - slope / sum`` has no cancellation: both terms are small where the entropy is.
    """
    log_sum = torch.log(sum_T)
    return max_T + log_sum, log_sum - slope_T / sum_T


def _pick(label_logit: Tensor, lse: Tensor, row: Tensor, label: Tensor) -> Tensor:
    if lse.numel() == 0:
        return torch.zeros_like(label_logit)
    return torch.where(label >= 0, label_logit - lse[row], 0.0)


def linear_logprobs_triton(
    hidden_TD: Tensor, weight_WD: Tensor, row_of_position_S: Tensor, label_S: Tensor, max_elements: int
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of ``hidden @ weight^T``; see :func:`harts_titan.ops.logprob.linear_logprobs`."""
    return _linear_logprobs(hidden_TD, weight_WD, row_of_position_S, label_S, max_elements)[:2]


def recover_logprobs_triton(logits_TW: Tensor, row_of_position_S: Tensor, label_S: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of logits; see :func:`harts_titan.ops.logprob.recover_logprobs`."""
    return _recover_logprobs(logits_TW, row_of_position_S, label_S)[:2]


def _fake_outputs(like: Tensor, num_rows: int, label: Tensor) -> tuple[Tensor, ...]:
    S, T = ((label.shape[0],), (num_rows,))
    return tuple(like.new_empty(shape, dtype=torch.float32) for shape in (S, T, T, S))


@torch.library.custom_op(
    "harts_titan::linear_logprobs",
    mutates_args=(),
    schema="(Tensor hidden, Tensor weight, Tensor row, Tensor label, int max_elements) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
)
def _linear_logprobs(hidden, weight, row, label, max_elements):
    *statistics, label_logit = _head_statistics(hidden, weight, row, label, 0, max_elements)
    lse, entropy = finish(*statistics)
    return _pick(label_logit, lse, row, label), entropy, lse, label_logit


@_linear_logprobs.register_fake
def _(hidden, weight, row, label, max_elements):
    return _fake_outputs(hidden, hidden.shape[0], label)


def _save_linear(ctx, inputs, output):
    hidden, weight, row, label, ctx.max_elements = inputs
    _, entropy, lse, label_logit = output
    ctx.save_for_backward(hidden, weight, row, label, lse, entropy, label_logit)
    ctx.set_materialize_grads(False)


def _differentiate_linear(ctx, dlogprob, dentropy, _dlse, _dlabel_logit):
    hidden, weight, *rest = ctx.saved_tensors
    needs = ctx.needs_input_grad[:2]
    dhidden, dweight = _head_gradients(hidden, weight, *rest, dlogprob, dentropy, 0, ctx.max_elements, *needs)
    return dhidden.to(hidden.dtype) if needs[0] else None, dweight if needs[1] else None, None, None, None


_linear_logprobs.register_autograd(_differentiate_linear, setup_context=_save_linear)


@torch.library.custom_op(
    "harts_titan::recover_logprobs",
    mutates_args=(),
    schema="(Tensor logits, Tensor row, Tensor label) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _recover_logprobs(logits, row, label):
    *statistics, label_logit = logit_statistics(logits, row, label)
    lse, entropy = finish(*statistics)
    return _pick(label_logit, lse, row, label), entropy, lse, label_logit


@_recover_logprobs.register_fake
def _(logits, row, label):
    return _fake_outputs(logits, logits.shape[0], label)


def _save_recover(ctx, inputs, output):
    _, entropy, lse, label_logit = output
    ctx.save_for_backward(*inputs, lse, entropy, label_logit)
    ctx.set_materialize_grads(False)


def _differentiate_recover(ctx, dlogprob, dentropy, _dlse, _dlabel_logit):
    return logit_gradient(*ctx.saved_tensors, dlogprob, dentropy), None, None


_recover_logprobs.register_autograd(_differentiate_recover, setup_context=_save_recover)
