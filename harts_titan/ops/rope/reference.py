"""Rotary embedding in plain PyTorch.

Letters: T rows, H heads, P rotated dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor


def apply_rope(x_THP: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair ``(x[2i], x[2i+1])`` by the row's angle ``i``.

    Args:
        x_THP: (T, H, P).
        cos: (T, P/2), at least float32.
        sin: (T, P/2).

    Returns:
        (T, H, P) in the dtype of ``x_THP``; pairs stay interleaved.
    """
    even, odd = x_THP.to(cos.dtype).unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).to(x_THP.dtype)


def rope_queries_reference(q_THK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See :func:`harts_titan.ops.rope.rope_queries`."""
    rope_dim = 2 * cos.shape[1]
    q_nope, q_rope = q_THK.split((q_THK.shape[2] - rope_dim, rope_dim), dim=2)
    return torch.cat((q_nope, apply_rope(q_rope, cos, sin)), dim=2)


def rope_keys_values_reference(
    kv_THX: Tensor, k_rope_TP: Tensor, cos: Tensor, sin: Tensor, nope_dim: int
) -> tuple[Tensor, Tensor]:
    """See :func:`harts_titan.ops.rope.rope_keys_values`; the values are a view."""
    k_nope, v_THV = kv_THX.split((nope_dim, kv_THX.shape[2] - nope_dim), dim=2)
    k_rope = apply_rope(k_rope_TP[:, None, :], cos, sin).expand(-1, k_nope.shape[1], -1)
    return torch.cat((k_nope, k_rope), dim=2), v_THV
