"""Rotary position embedding on interleaved pairs.

Letters: T rows, H heads, P rotated dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from harts_titan.ops.dtypes import wide_dtype


def rope_tables(position_T: Tensor, *, dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the rotation angles of each row.

    Angles are computed in float64: at position 2^18 a float32 angle is already wrong by more than 1e-2.

    Args:
        position_T: int64 absolute position in the trajectory, never the place in memory.
        dim: P, even.
        theta: Base of the frequencies ``theta^(-2i/P)``.
        dtype: Dtype of the activations; the tables have its wide dtype.

    Returns:
        Two (T, P/2) tensors.
    """
    exponent = torch.arange(0, dim, 2, dtype=torch.float64, device=position_T.device) / dim
    angle = position_T.to(torch.float64)[:, None] * theta ** (-exponent)
    return angle.cos().to(wide_dtype(dtype)), angle.sin().to(wide_dtype(dtype))


def apply_rope(x_THP: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair ``(x[2i], x[2i+1])`` by the row's angle ``i``.

    Args:
        x_THP: (T, H, P).
        cos: (T, P/2), from :func:`rope_tables`.
        sin: (T, P/2).

    Returns:
        (T, H, P) in the dtype of ``x_THP``; pairs stay interleaved.
    """
    even, odd = x_THP.to(cos.dtype).unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).to(x_THP.dtype)
