"""RMS normalisation.

Letters: D normalised dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from harts_titan.ops.dtypes import wide_dtype


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension by its root mean square, in at least float32.

    Args:
        x: (..., D) in any floating dtype.
        weight_D: (D,) scale.
        eps: Added to the mean square.

    Returns:
        (..., D) in the wide dtype of ``x``; the caller rounds once, after whatever follows.
    """
    wide = x.to(wide_dtype(x.dtype))
    return wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps) * weight_D.to(wide.dtype)


class RMSNorm(nn.Module):
    """RMS norm with a learned scale; computes in at least float32 and returns the input's dtype."""

    def __init__(self, dim: int, *, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised (..., D) input in its own dtype."""
        return rms_norm(x, self.weight, self.eps).to(x.dtype)


class GatedRMSNorm(nn.Module):
    """RMS norm followed by a sigmoid gate: ``norm(x) * weight * sigmoid(gate)``, rounded once at the end."""

    def __init__(self, dim: int, *, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Return the gated norm of (..., D) ``x`` in the gate's dtype; ``gate`` has the same shape, before sigmoid."""
        normed = rms_norm(x, self.weight, self.eps)
        return (normed * torch.sigmoid(gate.to(normed.dtype))).to(gate.dtype)
