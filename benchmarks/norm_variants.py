"""Another form of the norm's backward pass, for ``gpu_elementwise.py`` to measure beside the one in use."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from harts_titan.ops.norm.kernels import scale_gradient


@triton.jit
def _tile(x, o_r, o_d, stride, N, D):
    m = (o_r < N)[:, None] & (o_d < D)[None, :]
    return tl.load(x + o_r[:, None] * stride + o_d[None, :], mask=m, other=0.0)


@triton.jit(do_not_specialize=["N"])
def norm_backward_registers(
    x, weight, dy, dx, dw, N, D, x_stride, eps, EARLY: tl.constexpr, BT: tl.constexpr, BR: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    """``norm_backward`` without shared memory: the next tile is on its way to registers."""
    if EARLY:
        gdc_launch_dependents()
    i_b = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BD)
    b_w = tl.load(weight + o_d, mask=o_d < D, other=0.0).to(tl.float32)
    b_dw = tl.zeros([BR, BD], dtype=tl.float32)
    i_e = tl.minimum((i_b + 1) * BT, N)
    o_r = i_b * BT + tl.arange(0, BR)
    n_x = _tile(x, o_r, o_d, x_stride, i_e, D)
    n_dy = _tile(dy, o_r, o_d, D, i_e, D)
    for _ in tl.range(0, BT, BR, num_stages=1):
        b_x = n_x.to(tl.float32)
        b_dy = n_dy.to(tl.float32)
        n_x = _tile(x, o_r + BR, o_d, x_stride, i_e, D)
        n_dy = _tile(dy, o_r + BR, o_d, D, i_e, D)
        b_s = tl.rsqrt(tl.sum(b_x * b_x, 1) / D + eps)
        b_x *= b_s[:, None]
        b_dw += b_dy * b_x
        b_dy *= b_w[None, :]
        b_c = tl.sum(b_dy * b_x, 1) / D
        b_dx = (b_dy - b_x * b_c[:, None]) * b_s[:, None]
        m = (o_r < i_e)[:, None] & (o_d < D)[None, :]
        tl.store(dx + o_r[:, None] * D + o_d[None, :], b_dx.to(dx.dtype.element_ty), mask=m)
        o_r += BR
    tl.store(dw + i_b * D + o_d, tl.sum(b_dw, 0), mask=o_d < D)


def launch_registers(x: Tensor, weight: Tensor, dy: Tensor, dx: Tensor, eps: float, config: dict[str, int]) -> Tensor:
    """As ``harts_titan.ops.norm.triton_op.launch_backward``; ``TILE`` elements, ``BT`` rows of a program."""
    N, D = x.shape
    BD = triton.next_power_of_2(D)
    BR = max(1, config["TILE"] // BD)
    BT = triton.cdiv(config["BT"], BR) * BR
    blocks = triton.cdiv(N, BT)
    dw, scale = x.new_empty((blocks, D), dtype=torch.float32), weight.new_empty(weight.shape)
    early = int(x.is_cuda)
    norm_backward_registers[(blocks,)](
        x, weight, dy, dx, dw, N, D, x.stride(0), eps, EARLY=early, BT=BT, BR=BR, BD=BD, num_warps=config["num_warps"]
    )
    options = {"launch_pdl": True} if early else {}
    scale_gradient[(triton.cdiv(D, 8),)](dw, scale, blocks, D, EARLY=early, BN=512, BM=8, num_warps=8, **options)
    return scale
