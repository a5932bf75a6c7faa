"""Sums of partial results over row blocks, in a fixed order."""

from __future__ import annotations

import contextlib

import torch
import triton
import triton.language as tl
from torch import Tensor

CONFIG = {"BN": 256, "BM": 16, "num_warps": 8}
NARROW = {"BN": 1024, "BM": 8, "num_warps": 8}
"""Pinned launch configurations: partial rows of a step, columns of a program; narrow is up to ``_NARROW`` columns."""
_NARROW = 1024


@triton.jit(do_not_specialize=["N"])
def _row_sums(x, y, N, M, A, BN: tl.constexpr, BM: tl.constexpr):
    o_m = tl.program_id(0) * BM + tl.arange(0, BM)
    m_m = o_m < M
    b_a = tl.zeros([BN, BM], dtype=tl.float32)
    for i_n in range(0, N, BN):
        o_n = (i_n + tl.arange(0, BN)).to(tl.int64)
        m = (o_n < N)[:, None] & m_m[None, :]
        b_a += tl.load(x + o_n[:, None] * M + o_m[None, :], mask=m, other=0.0)
    B = M // A
    tl.store(y + (o_m % B) * A + o_m // B, tl.sum(b_a, 0).to(y.dtype.element_ty), mask=m_m)


def row_sums(partial_NAB: Tensor, dtype: torch.dtype, config: dict[str, int] | None = None) -> Tensor:
    """Sum contiguous float32 (N, A, B) over N and transpose; repeats are bit-equal.

    Args:
        partial_NAB: One entry per block; the order of the blocks is the order of the sum's terms.
        dtype: Of the result.
        config: As ``CONFIG``; by default the pinned one of the size.

    Returns:
        (B, A).
    """
    N, A, B = partial_NAB.shape
    y = partial_NAB.new_empty((B, A), dtype=dtype)
    if config is None:
        config = NARROW if A * B <= _NARROW else CONFIG
    if y.numel():
        # Triton launches on the current device, which need not be the tensors'.
        with torch.cuda.device(y.device) if y.is_cuda else contextlib.nullcontext():
            _row_sums[(triton.cdiv(A * B, config["BM"]),)](partial_NAB, y, N, A * B, A, **config)
    return y
