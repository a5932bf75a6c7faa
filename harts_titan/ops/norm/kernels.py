"""Triton kernels of the RMS norms: whole rows per program, float32 inside, one rounding.

The gradient of the scale is summed over a program's rows in registers, then over programs in a fixed order outside; no
atomics. A row's result depends on that row alone.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit(do_not_specialize=["N"])
def norm_forward(
    x,
    gate,
    weight,
    y,
    N,
    D,
    x_stride,
    gate_stride,
    eps,
    GATED: tl.constexpr,
    BR: tl.constexpr,
    BD: tl.constexpr,
):
    """``y = x * rsqrt(mean(x^2) + eps) * weight [* sigmoid(gate)]`` for ``N`` rows of ``D``."""
    o_r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    m = (o_r < N)[:, None] & m_d[None, :]
    b_x = tl.load(x + o_r[:, None] * x_stride + o_d[None, :], mask=m, other=0.0).to(tl.float32)
    b_w = tl.load(weight + o_d, mask=m_d, other=0.0).to(tl.float32)
    if GATED:
        b_g = tl.load(gate + o_r[:, None] * gate_stride + o_d[None, :], mask=m, other=0.0).to(tl.float32)
    b_s = tl.rsqrt(tl.sum(b_x * b_x, 1) / D + eps)
    b_y = b_x * b_s[:, None] * b_w[None, :]
    if GATED:
        b_y *= tl.sigmoid(b_g)
    tl.store(y + o_r[:, None] * D + o_d[None, :], b_y.to(y.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["N"])
def norm_backward(
    x,
    gate,
    weight,
    dy,
    dx,
    dgate,
    dw,
    N,
    D,
    x_stride,
    gate_stride,
    eps,
    GATED: tl.constexpr,
    BT: tl.constexpr,
    BR: tl.constexpr,
    BD: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr = 0,
):
    """Gradients of ``BT`` rows, and their share ``dw`` (programs, D) of the scale's gradient.

    ``STAGES`` tiles are on their way at a time. With ``EARLY`` the next kernel, launched as a dependent one, may take
    its place on the device while this one runs.
    """
    if EARLY:
        gdc_launch_dependents()
    i_b = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    b_w = tl.load(weight + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_dw = tl.zeros([BR, BD], dtype=tl.float32)
    for i_r in tl.range(0, BT, BR, num_stages=STAGES):
        o_r = i_b * BT + i_r + tl.arange(0, BR)
        m = (o_r < N)[:, None] & m_d[None, :]
        o_o = o_r[:, None] * D + o_d[None, :]
        b_x = tl.load(x + o_r[:, None] * x_stride + o_d[None, :], mask=m, other=0.0).to(tl.float32)
        b_dy = tl.load(dy + o_o, mask=m, other=0.0).to(tl.float32)
        if GATED:
            b_g = tl.load(gate + o_r[:, None] * gate_stride + o_d[None, :], mask=m, other=0.0).to(tl.float32)
        b_s = tl.rsqrt(tl.sum(b_x * b_x, 1) / D + eps)
        b_x *= b_s[:, None]
        if GATED:
            b_g = tl.sigmoid(b_g)
            b_dg = b_dy * b_x * b_w[None, :] * b_g * (1.0 - b_g)
            tl.store(dgate + o_o, b_dg.to(dgate.dtype.element_ty), mask=m)
            b_dy *= b_g
        b_dw += b_dy * b_x
        b_dy *= b_w[None, :]
        b_c = tl.sum(b_dy * b_x, 1) / D
        b_dx = (b_dy - b_x * b_c[:, None]) * b_s[:, None]
        tl.store(dx + o_o, b_dx.to(dx.dtype.element_ty), mask=m)
    tl.store(dw + i_b * D + o_d, tl.sum(b_dw, 0), mask=m_d)


@triton.jit(do_not_specialize=["N"])
def scale_gradient(dw, y, N, D, EARLY: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr):
    """Sum the ``N`` shares of ``norm_backward`` in order; with ``EARLY`` it is launched as its dependent kernel."""
    if EARLY:
        gdc_wait()
    o_m = tl.program_id(0) * BM + tl.arange(0, BM)
    b_a = tl.zeros([BN, BM], dtype=tl.float32)
    for i_n in range(0, N, BN):
        o_n = (i_n + tl.arange(0, BN)).to(tl.int64)
        m = (o_n < N)[:, None] & (o_m < D)[None, :]
        b_a += tl.load(dw + o_n[:, None] * D + o_m[None, :], mask=m, other=0.0)
    tl.store(y + o_m, tl.sum(b_a, 0).to(y.dtype.element_ty), mask=o_m < D)
