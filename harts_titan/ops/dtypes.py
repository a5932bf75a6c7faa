"""The precision rule of the package: what loses too much in 16 bits runs in float32, and nothing wider is narrowed."""

from __future__ import annotations

import torch


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of states, softmaxes, norms, gates and sums over ``dtype`` inputs: at least float32.

    float32 for the 16-bit types and float32, float64 for float64: the same code serves training and exact checks.
    """
    return torch.promote_types(dtype, torch.float32)
