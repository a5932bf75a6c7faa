"""Log-probs and entropies when the vocabulary is spread over ranks.

Letters: T rows, S positions, D model dim, W words of one rank.

Each rank reduces its own logits to three numbers per row and one per position; one maximum and one sum over the ranks
make whole rows of them. In backward every rank computes its own words' gradients, and only the hidden rows' gradient is
summed over ranks. Every rank holds all rows and gets all results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harts_titan.ops.logprob.reference import shard_gradients_reference, shard_statistics_reference


@dataclass(frozen=True)
class VocabularyShard:
    """One rank's part of the vocabulary, and how its ranks add up.

    The functions get a contiguous tensor and return the reduced one on every rank; they may work in place. All ranks
    call them in the same order.
    """

    first_word: int
    """Token id of the first word of this rank's weight."""
    reduce_max: Callable[[Tensor], Tensor]
    reduce_sum: Callable[[Tensor], Tensor]


def sharded_logprobs(
    hidden_TD: Tensor,
    weight_WD: Tensor,
    row_of_position_S: Tensor,
    label_S: Tensor,
    shard: VocabularyShard,
    *,
    rows_per_chunk: int,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Return log-probs (S,) and entropies (T,) of the whole vocabulary; see ``linear_logprobs``.

    Args:
        hidden_TD: Hidden rows, equal on all ranks.
        weight_WD: This rank's words, at least one.
        row_of_position_S: int64 row of each position.
        label_S: int64 token ids of the whole vocabulary, or -100.
        shard: This rank's part.
        rows_per_chunk: As in ``linear_logprobs``.
        backend: "triton" or "reference".

    Returns:
        float32 (float64 for float64), equal on all ranks. The gradient of ``hidden`` is complete on every rank; that of
        the weight is this rank's.

    Raises:
        ValueError: If the rank has no words.
    """
    if weight_WD.shape[0] == 0:
        raise ValueError("a rank without words cannot take part; use fewer ranks for the vocabulary")
    return _ShardedLogprobs.apply(
        hidden_TD, weight_WD, row_of_position_S, label_S, shard, rows_per_chunk, backend == "triton"
    )


class _ShardedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        row: Tensor,
        label: Tensor,
        shard: VocabularyShard,
        rows_per_chunk: int,
        use_triton: bool,
    ) -> tuple[Tensor, Tensor]:
        # What exists at once: logits in the kernels, rows in the reference.
        if use_triton:
            from harts_titan.ops.logprob.triton_op import head_statistics

            block = rows_per_chunk * weight.shape[0]
            parts: tuple[Tensor, ...] = head_statistics(hidden, weight, row, label, shard.first_word, block)
        else:
            block = rows_per_chunk
            parts = shard_statistics_reference(hidden, weight, row, label, shard.first_word, block)
        own_max, own_sum, own_slope, own_label = parts
        row_max = shard.reduce_max(own_max.clone())
        shift = own_max - row_max
        factor = shift.exp()
        T = own_max.shape[0]
        total = shard.reduce_sum(torch.cat([own_sum * factor, (own_slope + shift * own_sum) * factor, own_label]))
        row_sum, slope, label_logit = total[:T], total[T : 2 * T], total[2 * T :]
        log_sum = torch.log(row_sum)
        lse, entropy = row_max + log_sum, log_sum - slope / row_sum
        logprob = torch.where(label >= 0, label_logit - lse[row], 0.0) if T else torch.zeros_like(label_logit)
        ctx.save_for_backward(hidden, weight, row, label, lse, entropy, label_logit)
        ctx.shard, ctx.block, ctx.use_triton = shard, block, use_triton
        ctx.set_materialize_grads(False)
        return logprob, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, row, label, lse, entropy, label_logit = ctx.saved_tensors
        dlogprob, dentropy = grads
        saved, first_word, needs = (lse, entropy, label_logit), ctx.shard.first_word, ctx.needs_input_grad[:2]
        gradients: Callable[..., tuple[Tensor, Tensor]] = shard_gradients_reference
        if ctx.use_triton:
            from harts_titan.ops.logprob.triton_op import head_gradients

            gradients = head_gradients
        own_dhidden, dweight = gradients(
            hidden, weight, row, label, saved, (dlogprob, dentropy), first_word, ctx.block, needs
        )
        dhidden = ctx.shard.reduce_sum(own_dhidden).to(hidden.dtype) if needs[0] else None
        return dhidden, dweight if needs[1] else None, None, None, None, None, None
