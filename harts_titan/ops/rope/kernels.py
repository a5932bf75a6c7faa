"""Triton kernels of the rotary embedding: one pass that rotates, copies and assembles.

The gradient of a rotation is the rotation back, so the kernel of the queries serves both directions.
"""

import triton
import triton.language as tl


@triton.jit
def _rotate(b_x, b_cos, b_sin, R: tl.constexpr, BP: tl.constexpr):
    """Rotate interleaved pairs of (R, BP) by (R, BP / 2) angles."""
    even, odd = tl.split(tl.reshape(b_x, (R, BP // 2, 2)))
    return tl.reshape(tl.join(even * b_cos - odd * b_sin, even * b_sin + odd * b_cos), (R, BP))


@triton.jit(do_not_specialize=["N"])
def rope_queries_kernel(
    x,
    cos,
    sin,
    y,
    N,
    H,
    NOPE: tl.constexpr,
    P: tl.constexpr,
    INVERSE: tl.constexpr,
    BR: tl.constexpr,
    BN: tl.constexpr,
    BP: tl.constexpr,
):
    """Rotate the last ``P`` of ``NOPE + P`` columns of ``N`` (row, head) pairs, backwards if ``INVERSE``."""
    o_r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    m_r = (o_r < N)[:, None]
    o_x = o_r[:, None] * (NOPE + P)
    o_p = tl.arange(0, BP)
    o_c = tl.arange(0, BP // 2)
    m_p = m_r & (o_p < P)[None, :]
    m_c = m_r & (o_c < P // 2)[None, :]
    o_a = (o_r // H)[:, None] * (P // 2) + o_c[None, :]
    b_p = tl.load(x + o_x + NOPE + o_p[None, :], mask=m_p, other=0.0).to(tl.float32)
    b_cos = tl.load(cos + o_a, mask=m_c, other=0.0)
    b_sin = tl.load(sin + o_a, mask=m_c, other=0.0)
    if NOPE > 0:
        o_n = tl.arange(0, BN)
        m_n = m_r & (o_n < NOPE)[None, :]
        b_n = tl.load(x + o_x + o_n[None, :], mask=m_n, other=0.0)
        tl.store(y + o_x + o_n[None, :], b_n, mask=m_n)
    if INVERSE:
        b_sin = -b_sin
    b_p = _rotate(b_p, b_cos, b_sin, BR, BP)
    tl.store(y + o_x + NOPE + o_p[None, :], b_p.to(y.dtype.element_ty), mask=m_p)


@triton.jit(do_not_specialize=["N"])
def rope_keys_values_forward(
    kv,
    k_rope,
    cos,
    sin,
    k,
    v,
    N,
    H,
    k_rope_stride,
    NOPE: tl.constexpr,
    P: tl.constexpr,
    V: tl.constexpr,
    BR: tl.constexpr,
    BN: tl.constexpr,
    BP: tl.constexpr,
    BV: tl.constexpr,
):
    """Keys and values of ``N`` (row, head) pairs."""
    o_r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    m_r = (o_r < N)[:, None]
    i_t = (o_r // H)[:, None]
    o_n = tl.arange(0, BN)[None, :]
    o_v = tl.arange(0, BV)[None, :]
    o_p = tl.arange(0, BP)[None, :]
    o_c = tl.arange(0, BP // 2)[None, :]
    m_n = m_r & (o_n < NOPE)
    m_v = m_r & (o_v < V)
    m_p = m_r & (o_p < P)
    m_c = m_r & (o_c < P // 2)
    o_x = o_r[:, None] * (NOPE + V)
    o_k = o_r[:, None] * (NOPE + P)
    b_n = tl.load(kv + o_x + o_n, mask=m_n, other=0.0)
    b_v = tl.load(kv + o_x + NOPE + o_v, mask=m_v, other=0.0)
    b_p = tl.load(k_rope + i_t * k_rope_stride + o_p, mask=m_p, other=0.0).to(tl.float32)
    b_cos = tl.load(cos + i_t * (P // 2) + o_c, mask=m_c, other=0.0)
    b_sin = tl.load(sin + i_t * (P // 2) + o_c, mask=m_c, other=0.0)
    tl.store(k + o_k + o_n, b_n, mask=m_n)
    tl.store(v + o_r[:, None] * V + o_v, b_v, mask=m_v)
    b_p = _rotate(b_p, b_cos, b_sin, BR, BP)
    tl.store(k + o_k + NOPE + o_p, b_p.to(k.dtype.element_ty), mask=m_p)


@triton.jit(do_not_specialize=["T"])
def rope_keys_values_backward(
    dk,
    dv,
    cos,
    sin,
    dkv,
    dk_rope,
    T,
    H: tl.constexpr,
    NOPE: tl.constexpr,
    P: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BH: tl.constexpr,
    BN: tl.constexpr,
    BP: tl.constexpr,
    BV: tl.constexpr,
):
    """Gradients of ``BT`` rows; the rotary key's is summed over heads in float32, then rotated back."""
    o_m = tl.arange(0, BT * BH)
    i_t = tl.program_id(0).to(tl.int64) * BT + o_m // BH
    i_h = o_m % BH
    m_r = ((i_t < T) & (i_h < H))[:, None]
    o_r = (i_t * H + i_h)[:, None]
    o_n = tl.arange(0, BN)[None, :]
    o_v = tl.arange(0, BV)[None, :]
    o_p = tl.arange(0, BP)[None, :]
    m_n = m_r & (o_n < NOPE)
    m_v = m_r & (o_v < V)
    b_n = tl.load(dk + o_r * (NOPE + P) + o_n, mask=m_n, other=0.0)
    b_v = tl.load(dv + o_r * V + o_v, mask=m_v, other=0.0)
    b_p = tl.load(dk + o_r * (NOPE + P) + NOPE + o_p, mask=m_r & (o_p < P), other=0.0).to(tl.float32)
    tl.store(dkv + o_r * (NOPE + V) + o_n, b_n, mask=m_n)
    tl.store(dkv + o_r * (NOPE + V) + NOPE + o_v, b_v, mask=m_v)
    b_s = tl.sum(tl.reshape(b_p, (BT, BH, BP)), 1)
    o_t = (tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT))[:, None]
    o_c = tl.arange(0, BP // 2)[None, :]
    m_c = (o_t < T) & (o_c < P // 2)
    b_cos = tl.load(cos + o_t * (P // 2) + o_c, mask=m_c, other=0.0)
    b_sin = tl.load(sin + o_t * (P // 2) + o_c, mask=m_c, other=0.0)
    b_s = _rotate(b_s, b_cos, -b_sin, BT, BP)
    tl.store(dk_rope + o_t * P + o_p, b_s.to(dk_rope.dtype.element_ty), mask=(o_t < T) & (o_p < P))
