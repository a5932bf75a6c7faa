"""RMS norms in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from harts_titan.ops.dtypes import wide_dtype


def rms_norm_reference(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """See :func:`harts_titan.ops.norm.rms_norm`."""
    return _wide_rms_norm(x, weight_D, eps).to(x.dtype)


def gated_rms_norm_reference(x: Tensor, gate: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """See :func:`harts_titan.ops.norm.gated_rms_norm`."""
    normed = _wide_rms_norm(x, weight_D, eps)
    return (normed * torch.sigmoid(gate.to(normed.dtype))).to(gate.dtype)


def _wide_rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    wide = x.to(wide_dtype(x.dtype))
    return wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps) * weight_D.to(wide.dtype)
