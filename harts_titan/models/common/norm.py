"""RMS normalisation.

Letters: D normalised dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from harts_titan.ops.norm import gated_rms_norm, rms_norm


class RMSNorm(nn.Module):
    """RMS norm with a learned scale; computes in at least float32 and returns the input's dtype."""

    def __init__(self, dim: int, *, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised (..., D) input in its own dtype."""
        return rms_norm(x, self.weight, self.eps)


class GatedRMSNorm(nn.Module):
    """RMS norm followed by a sigmoid gate: ``norm(x) * weight * sigmoid(gate)``, rounded once at the end."""

    def __init__(self, dim: int, *, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Return the gated norm of (..., D) ``x`` in the gate's dtype; ``gate`` has the same shape, before sigmoid."""
        return gated_rms_norm(x, gate, self.weight, self.eps)
