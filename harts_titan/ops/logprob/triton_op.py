"""The head on CUDA: matrix products of vocabulary blocks, one kernel over each block's logits forward and backward.

Letters: T rows, S positions, D model dim, W vocabulary (or one rank's part of it), NB column tiles.

Blocks are ranges of the vocabulary over all rows: a block's weight gradient is then one product over all rows, rounded
once, and only the hidden rows' gradient, a hundred times smaller than the weight's, is added up over blocks in
float32. Logits are float32 products of 16-bit inputs. No host synchronisation, no atomics, nothing sorted but the S
positions (by row and label, in backward).

A product's bits may depend on its number of rows (cuBLAS picks its kernel by shape); those of the kernels here do not.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from harts_titan.ops.logprob.kernels import (
    combine_tiles,
    gather_labels,
    label_gradients,
    logit_gradients,
    segment_sums,
    tile_statistics,
)

_TILE = 1024
"""Columns of one tile; blocks are multiples of it, so that tiles do not depend on the block width."""
_BLOCK_TILES = (1, 2, 5, 8, 11)
"""Tiles per block, then multiples of the last. 11 tiles are 88 GEMM tiles of 128 words: with 6 of 256 columns
(D = 1536) 4 full waves of the weight gradient's product on 132 multiprocessors; 8 tiles 2.9 of 3, 5 tiles 1.8 of 2."""
_STATISTICS_ROWS, _STATISTICS_WARPS = 4, 4
_GRADIENT_ROWS, _GRADIENT_WARPS = 4, 4
_KEY_SHIFT = 32


class Statistics(NamedTuple):
    """Of each row over the words at hand, float32, and the label logits of the positions (0 where there is none)."""

    max_T: Tensor
    sum_T: Tensor
    """``sum exp(z - max)``."""
    slope_T: Tensor
    """``sum exp(z - max) (z - max)``."""
    label_logit_S: Tensor


def block_width(num_rows: int, num_words: int, max_elements: int) -> int:
    """Words per block: at most ``max_elements`` logits at once where a block of one tile allows it.

    Args:
        num_rows: T.
        num_words: W.
        max_elements: Logits that may exist at once.
    """
    tiles = max_elements // max(num_rows, 1) // _TILE
    largest = _BLOCK_TILES[-1]
    fitting = tiles // largest * largest if tiles >= largest else max([1, *(n for n in _BLOCK_TILES if n <= tiles)])
    return min(fitting * _TILE, triton.cdiv(num_words, _TILE) * _TILE)


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


def device_of(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def _product(left: Tensor, right: Tensor, out: Tensor, *, add: bool = False) -> None:
    """``out = left @ right`` or ``out += left @ right``, rounded to the dtype of ``out`` only."""
    if out.dtype == left.dtype:
        torch.addmm(out, left, right, out=out) if add else torch.mm(left, right, out=out)
    elif left.is_cuda:
        if add:
            torch.addmm(out, left, right, out_dtype=out.dtype, out=out)
        else:
            torch.mm(left, right, out_dtype=out.dtype, out=out)
    else:
        # The CPU runs these kernels in tests only and has no mixed product.
        product = left.to(out.dtype) @ right.to(out.dtype)
        out.copy_(out + product if add else product)


class _Tiles:
    """Tile statistics of a row set, filled block after block and then combined."""

    def __init__(self, like: Tensor, num_rows: int, num_words: int, label_S: Tensor) -> None:
        self.num_rows, self.num_tiles = num_rows, triton.cdiv(num_words, _TILE)
        self.tiles = like.new_empty((3, self.num_tiles, num_rows), dtype=torch.float32)
        self.label_logit = like.new_zeros(label_S.shape, dtype=torch.float32)

    def add(self, z: Tensor, first: int, row_S: Tensor, label_S: Tensor, first_word: int) -> None:
        (T, W), S = z.shape, label_S.numel()
        num_tiles, rows = triton.cdiv(W, _TILE), _STATISTICS_ROWS
        if T:
            tile_statistics[(triton.cdiv(T, rows) * num_tiles,)](
                z,
                *self.tiles.unbind(0),
                T,
                W,
                z.stride(0),
                first // _TILE,
                num_tiles,
                BT=rows,
                BW=_TILE,
                num_warps=_STATISTICS_WARPS,
            )
        if S:
            gather_labels[(triton.cdiv(S, 512),)](
                z, row_S, label_S, self.label_logit, S, W, z.stride(0), first_word + first, BS=512, num_warps=4
            )

    def combine(self) -> tuple[Tensor, ...]:
        rows = self.tiles.new_empty((3, self.num_rows))
        if self.num_rows:
            combine_tiles[(triton.cdiv(self.num_rows, 128),)](
                *self.tiles.unbind(0), *rows.unbind(0), self.num_rows, self.num_tiles, BT=128, num_warps=4
            )
        return (*(r.clone() for r in rows.unbind(0)), self.label_logit)


class _LabelTerms:
    """Gradients of the log-probs, gathered by row and by (row, label), and what the gradient kernels read."""

    def __init__(
        self,
        row_S: Tensor,
        label_S: Tensor,
        saved: tuple[Tensor, Tensor, Tensor],
        dlogprob_S: Tensor | None,
        dentropy_T: Tensor | None,
    ) -> None:
        self.lse, self.entropy, self.label_logit = (t.contiguous() for t in saved)
        T, S = self.lse.shape[0], label_S.numel()
        self.dentropy = torch.zeros_like(self.lse) if dentropy_T is None else dentropy_T.float().contiguous()
        self.row_gradient = torch.zeros_like(self.lse)
        self.num_positions = S if dlogprob_S is not None else 0
        if dlogprob_S is None or S == 0 or T == 0:
            self.num_positions = 0
            return
        # Unlabelled positions sort behind every row; the stable sort fixes the order in which gradients add up.
        key = torch.where(label_S < 0, T << _KEY_SHIFT, (row_S << _KEY_SHIFT) + label_S)
        self.key, self.index = torch.sort(key, stable=True)
        edges = torch.searchsorted(self.key, torch.arange(T + 1, device=key.device) << _KEY_SHIFT)
        own = torch.arange(S, device=key.device)
        end = torch.searchsorted(self.key, self.key, right=True)
        repeated = torch.zeros_like(own, dtype=torch.bool)
        repeated[1:] = self.key[1:] == self.key[:-1]
        self.group_end = torch.where(repeated | (self.key >= T << _KEY_SHIFT), 0, end)
        self.group_gradient = torch.empty_like(self.label_logit)
        value = dlogprob_S.float().contiguous()
        segment_sums[(T,)](value, self.index, edges[:-1], edges[1:], self.row_gradient, T, B=64, num_warps=1)
        segment_sums[(S,)](value, self.index, own, self.group_end, self.group_gradient, S, B=64, num_warps=1)

    def write(self, z: Tensor, dz: Tensor, first_word: int) -> None:
        """Gradient of logits ``z`` of the words from ``first_word`` on into ``dz``, which may be ``z``."""
        (T, W), rows = z.shape, _GRADIENT_ROWS
        if T == 0 or W == 0:
            return
        num_tiles = triton.cdiv(W, _TILE)
        terms = (self.lse, self.entropy, self.row_gradient, self.dentropy)
        logit_gradients[(triton.cdiv(T, rows) * num_tiles,)](
            z,
            dz,
            *terms,
            T,
            W,
            z.stride(0),
            dz.stride(0),
            num_tiles,
            BT=rows,
            BW=_TILE,
            num_warps=_GRADIENT_WARPS,
        )
        if self.num_positions:
            label_gradients[(triton.cdiv(self.num_positions, 256),)](
                dz,
                self.key,
                self.index,
                self.group_end,
                self.group_gradient,
                self.label_logit,
                *terms,
                self.num_positions,
                W,
                dz.stride(0),
                first_word,
                BS=256,
                num_warps=4,
            )


def _blocks(num_words: int, width: int) -> list[tuple[int, int]]:
    return [(a, min(a + width, num_words)) for a in range(0, num_words, width)]


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
        tiles = _Tiles(hidden, T, W, label)
        # Here, not in a traced caller: a graph must not depend on the block width.
        width = block_width(T, W, max_elements)
        buffer = hidden.new_empty((T * min(width, W),), dtype=torch.float32)
        for a, b in _blocks(W, width):
            z = buffer[: T * (b - a)].view(T, b - a)
            _product(hidden, weight[a:b].t(), z)
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
        terms = _LabelTerms(row.contiguous(), label.contiguous(), (lse, entropy, label_logit), dlogprob, dentropy)
        width = block_width(T, W, max_elements)
        buffer = hidden.new_empty((T * min(width, W),), dtype=torch.float32)
        narrow = buffer if hidden.dtype == torch.float32 else hidden.new_empty(buffer.shape)
        for a, b in _blocks(W, width):
            z, dz = (flat[: T * (b - a)].view(T, b - a) for flat in (buffer, narrow))
            _product(hidden, weight[a:b].t(), z)
            terms.write(z, dz, first_word + a)
            if need_hidden:
                _product(dz, weight[a:b], dhidden, add=a > 0)
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
        tiles = _Tiles(logits, logits.shape[0], logits.shape[1], label)
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
        terms = _LabelTerms(row.contiguous(), label.contiguous(), (lse, entropy, label_logit), dlogprob, dentropy)
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
