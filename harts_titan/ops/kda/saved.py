"""What a call of the CUDA path keeps for its backward pass; letters as in ``triton_op.py``."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Saved(NamedTuple):
    """What the backward pass keeps beside the inputs; S slots lie in tiles [C, H, chunk_size, width]."""

    w: Tensor
    kg: Tensor
    qg: Tensor
    g: Tensor
    """float32 cumulative log2 decay inside the chunk."""
    v_new: Tensor
    h: Tensor
    """State in front of each chunk (C, H, K, V)."""
    Aqk: Tensor
    Akk: Tensor
    row: Tensor
    """float32 (3, S, H): beta, reciprocal norms of q and k."""


def new_saved(q: Tensor, v: Tensor, num_slots: int, chunk_size: int) -> Saved:
    """Room for what forward keeps, on the device of ``q``."""
    (H, K), V = q.shape[1:], v.shape[-1]
    S = num_slots
    wide = q.new_empty((S, H, K), dtype=torch.float32)
    return Saved(
        w=q.new_empty((S, H, K)),
        kg=q.new_empty((S, H, K)),
        qg=q.new_empty((S, H, K)),
        g=wide,
        v_new=q.new_empty((S, H, V)),
        h=q.new_empty((S // chunk_size, H, K, V)),
        Aqk=q.new_empty((S, H, chunk_size)),
        Akk=q.new_empty((S, H, chunk_size)),
        row=q.new_empty((3, S, H), dtype=torch.float32),
    )
