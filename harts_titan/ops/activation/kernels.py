"""Triton kernels of the gates: tiles of rows and columns, float32 inside, one rounding, everything recomputed."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["N"])
def swiglu_forward(
    gate,
    up,
    y,
    N,
    F,
    gate_stride,
    up_stride,
    limit,
    CLAMPED: tl.constexpr,
    BR: tl.constexpr,
    BF: tl.constexpr,
):
    """``y = silu(gate) * up``, both factors clamped if ``CLAMPED``."""
    NF = (F + BF - 1) // BF
    pid = tl.program_id(0)
    o_r = (pid // NF).to(tl.int64) * BR + tl.arange(0, BR)
    o_f = (pid % NF) * BF + tl.arange(0, BF)
    m = (o_r < N)[:, None] & (o_f < F)[None, :]
    b_g = tl.load(gate + o_r[:, None] * gate_stride + o_f[None, :], mask=m, other=0.0).to(tl.float32)
    b_u = tl.load(up + o_r[:, None] * up_stride + o_f[None, :], mask=m, other=0.0).to(tl.float32)
    b_a = b_g * tl.sigmoid(b_g)
    if CLAMPED:
        b_a = tl.minimum(b_a, limit)
        b_u = tl.minimum(tl.maximum(b_u, -limit), limit)
    tl.store(y + o_r[:, None] * F + o_f[None, :], (b_a * b_u).to(y.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["N"])
def swiglu_backward(
    gate,
    up,
    dy,
    dgate,
    dup,
    N,
    F,
    gate_stride,
    up_stride,
    limit,
    CLAMPED: tl.constexpr,
    BR: tl.constexpr,
    BF: tl.constexpr,
):
    """Both gradients; a clamped value passes none."""
    NF = (F + BF - 1) // BF
    pid = tl.program_id(0)
    o_r = (pid // NF).to(tl.int64) * BR + tl.arange(0, BR)
    o_f = (pid % NF) * BF + tl.arange(0, BF)
    m = (o_r < N)[:, None] & (o_f < F)[None, :]
    o_o = o_r[:, None] * F + o_f[None, :]
    b_g = tl.load(gate + o_r[:, None] * gate_stride + o_f[None, :], mask=m, other=0.0).to(tl.float32)
    b_u = tl.load(up + o_r[:, None] * up_stride + o_f[None, :], mask=m, other=0.0).to(tl.float32)
    b_dy = tl.load(dy + o_o, mask=m, other=0.0).to(tl.float32)
    b_s = tl.sigmoid(b_g)
    b_a = b_g * b_s
    b_da = b_s * (1.0 + b_g * (1.0 - b_s))
    if CLAMPED:
        b_da = tl.where(b_a <= limit, b_da, 0.0)
        b_a = tl.minimum(b_a, limit)
        b_c = tl.minimum(tl.maximum(b_u, -limit), limit)
        b_a = tl.where(b_c == b_u, b_a, 0.0)
        b_u = b_c
    tl.store(dgate + o_o, (b_dy * b_u * b_da).to(dgate.dtype.element_ty), mask=m)
    tl.store(dup + o_o, (b_dy * b_a).to(dup.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["N"])
def head_gate_forward(o, gate, y, N, V, BR: tl.constexpr, BV: tl.constexpr):
    """``y = o * sigmoid(gate)`` for ``N`` (row, head) pairs."""
    o_r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    o_v = tl.arange(0, BV)
    m_r = o_r < N
    m = m_r[:, None] & (o_v < V)[None, :]
    o_o = o_r[:, None] * V + o_v[None, :]
    b_o = tl.load(o + o_o, mask=m, other=0.0).to(tl.float32)
    b_s = tl.sigmoid(tl.load(gate + o_r, mask=m_r, other=0.0).to(tl.float32))
    tl.store(y + o_o, (b_o * b_s[:, None]).to(y.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["N"])
def head_gate_backward(o, gate, dy, d_o, dgate, N, V, BR: tl.constexpr, BV: tl.constexpr):
    """Gradients of the heads' outputs, and of their gates by a sum over the head."""
    o_r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    o_v = tl.arange(0, BV)
    m_r = o_r < N
    m = m_r[:, None] & (o_v < V)[None, :]
    o_o = o_r[:, None] * V + o_v[None, :]
    b_o = tl.load(o + o_o, mask=m, other=0.0).to(tl.float32)
    b_dy = tl.load(dy + o_o, mask=m, other=0.0).to(tl.float32)
    b_s = tl.sigmoid(tl.load(gate + o_r, mask=m_r, other=0.0).to(tl.float32))
    tl.store(d_o + o_o, (b_dy * b_s[:, None]).to(d_o.dtype.element_ty), mask=m)
    b_dg = tl.sum(b_dy * b_o, 1) * b_s * (1.0 - b_s)
    tl.store(dgate + o_r, b_dg.to(dgate.dtype.element_ty), mask=m_r)
