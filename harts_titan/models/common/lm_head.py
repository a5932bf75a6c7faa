"""Output projection that returns log-probabilities, not logits.

Letters: T rows, S semantic positions, D model dimension, W vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harts_titan.ops.dtypes import wide_dtype
from harts_titan.ops.logprob import linear_logprobs


class HeadOutput(NamedTuple):
    """What the head returns; a named tuple so that sharding hooks see its tensors."""

    logprob_S: Tensor
    """Log-probability of each position's label, 0 where there is none; at least float32."""
    entropy_T: Tensor
    """Entropy (nats) of each row's distribution; at least float32."""
    logits_TW: Tensor | None
    """Logits in at least float32, only when asked for."""


class LMHead(nn.Module):
    """The untied output matrix. The projection runs inside ``forward`` so that a sharded weight is gathered for it."""

    def __init__(self, dim: int, vocab_size: int, *, rows_per_chunk: int) -> None:
        super().__init__()
        self.rows_per_chunk = rows_per_chunk
        self.weight = nn.Parameter(torch.empty(vocab_size, dim))

    def forward(
        self, hidden_TD: Tensor, row_of_position_S: Tensor, label_S: Tensor, *, return_logits: bool = False
    ) -> HeadOutput:
        """Recover log-probabilities and entropy without holding (T, W) (HARTS 3.5).

        Args:
            hidden_TD: Normalised final hidden rows.
            row_of_position_S: int64 row of each position, in [0, T).
            label_S: int64 next-token id, -100 for none.
            return_logits: Also return the (T, W) logits; for comparisons on small batches.
        """
        logprob_S, entropy_T = linear_logprobs(
            hidden_TD, self.weight, row_of_position_S, label_S, rows_per_chunk=self.rows_per_chunk
        )
        logits_TW = None
        if return_logits:
            logits_TW = F.linear(hidden_TD, self.weight).to(wide_dtype(hidden_TD.dtype))
        return HeadOutput(logprob_S, entropy_T, logits_TW)
