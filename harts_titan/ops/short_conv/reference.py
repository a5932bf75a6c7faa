"""Short convolution along tree paths in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from harts_titan.ops.dtypes import wide_dtype
from harts_titan.ops.single_thread import single_thread

ROW_MULTIPLE = 32
"""Elements of a SIMD loop step at most: so many rows of any width are whole steps."""


def tree_short_conv_reference(x_YD: Tensor, weight_DW: Tensor, conv_tap_TW: Tensor) -> Tensor:
    """See :func:`harts_titan.ops.short_conv.tree_short_conv`; one gather per tap, taps added oldest first."""
    dtype = wide_dtype(x_YD.dtype)
    # Taps before the root read an extra row of zeros.
    padded = torch.cat([x_YD, x_YD.new_zeros(1, x_YD.shape[1])])
    taps = torch.where(conv_tap_TW < 0, x_YD.shape[0], conv_tap_TW).long()
    weight = weight_DW.to(dtype)
    total = x_YD.new_zeros((taps.shape[0], x_YD.shape[1]), dtype=dtype)
    for j in range(weight_DW.shape[1]):
        total = total + padded.index_select(0, taps[:, j]).to(dtype) * weight[:, j]
    # exp is the only step that SIMD and scalar code round differently. Whole vectors on one thread (which cuts nothing)
    # leave no element to scalar code: a row has the same bits whatever the number of rows.
    num_rows = total.shape[0]
    with single_thread(x_YD.device):
        activated = F.silu(F.pad(total, (0, 0, 0, -num_rows % ROW_MULTIPLE)))
    return activated[:num_rows].to(x_YD.dtype)
