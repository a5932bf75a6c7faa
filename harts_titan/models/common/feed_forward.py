"""SwiGLU feed-forward layers.

Letters: D model dimension, F hidden dimension.
"""

from __future__ import annotations

from torch import Tensor, nn

from harts_titan.ops.activation import swiglu

__all__ = ["FeedForward", "swiglu"]


class FeedForward(nn.Module):
    """SwiGLU: ``w2(silu(w1 x) * (w3 x))``, optionally clamped."""

    def __init__(self, dim: int, hidden_dim: int, *, limit: float = 0.0) -> None:
        super().__init__()
        self.limit = limit
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)

    def forward(self, x_TD: Tensor) -> Tensor:
        """Return (T, D)."""
        return self.w2(swiglu(self.w1(x_TD), self.w3(x_TD), self.limit))
