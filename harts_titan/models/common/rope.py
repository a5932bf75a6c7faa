"""Rotary position embedding on interleaved pairs.

Letters: T rows, H heads, P rotated dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from harts_titan.ops.dtypes import wide_dtype
from harts_titan.ops.rope import apply_rope

__all__ = ["apply_rope", "rope_tables"]


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
