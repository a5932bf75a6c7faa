"""Short convolution along tree paths in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def tree_short_conv_reference(x_YD: Tensor, weight_DW: Tensor, conv_tap_TW: Tensor) -> Tensor:
    """See :func:`harts_titan.ops.short_conv.tree_short_conv`; one gather per tap, taps added oldest first."""
    dtype = torch.float64 if x_YD.dtype == torch.float64 else torch.float32
    # Taps before the root read an extra row of zeros.
    padded = torch.cat([x_YD, x_YD.new_zeros(1, x_YD.shape[1])])
    taps = torch.where(conv_tap_TW < 0, x_YD.shape[0], conv_tap_TW).long()
    weight = weight_DW.to(dtype)
    total = x_YD.new_zeros((taps.shape[0], x_YD.shape[1]), dtype=dtype)
    for j in range(weight_DW.shape[1]):
        total = total + padded.index_select(0, taps[:, j]).to(dtype) * weight[:, j]
    return F.silu(total).to(x_YD.dtype)
