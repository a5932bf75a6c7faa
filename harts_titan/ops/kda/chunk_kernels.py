"""Triton kernels of everything inside a KDA chunk, forward: what a state scan needs, and the outputs.

A program owns all rows of one (chunk, head), so a row's result depends on its own chunk's earlier rows and the incoming
state only. Intermediate tensors are tiles: ``[C, H, BT, width]``, one contiguous block per program, rows past a
sequence's end included. Such rows hold zeros and a gate of 0, so no tile needs a mask and the cumulative gate of the
last row is the decay of the chunk whatever its length. Gates have a kernel of their own: what the pair products read
of them, the first rows of blocks among it, can then be loaded early.

Decays between two rows, ``exp(G_i - G_j)``, are split at one row of the block of ``BC`` = 32 rows that holds ``i``. In
forward it is the first one, so that no row depends on later ones. The left factor then lies in ``[exp(-155), 1]`` and
the right one in ``[1, exp(155)]``, more than half the range of float32 and bfloat16 each; a shift by ``2**112``
centres both, ``[2**-112, 2**112]``, and cancels in their product. Backward takes the middle row: both factors are at
most ``exp(5 * BC / 2)``. There the same rounded products with q and k are the operands for rows and columns: then the
gradient of the gate, a difference of sums over the same products, cancels as it should.

``first`` is the first program of a launch: a launch may cover some of the chunks.

Letters: S slots (rows of all chunks), H heads, K/V key/value width, BT chunk rows. Prefixes as in ``kernels.py``.
"""

import triton
import triton.language as tl


@triton.jit
def running_sums(x, BT: tl.constexpr, WIDE: tl.constexpr, REVERSE: tl.constexpr):
    """Sums of the rows up to each row, or from it on if ``REVERSE``.

    Three bfloat16 parts hold all bits of a float32: products with ones sum them on the tensor cores, in less time than
    a scan over rows takes.
    """
    if WIDE:
        return tl.cumsum(x, 0, reverse=REVERSE)
    o_t = tl.arange(0, BT)[:, None]
    o_j = tl.arange(0, BT)[None, :]
    b_one = tl.where(o_t <= o_j if REVERSE else o_t >= o_j, 1.0, 0.0).to(tl.bfloat16)
    b_0 = x.to(tl.bfloat16)
    x -= b_0.to(tl.float32)
    b_1 = x.to(tl.bfloat16)
    b_2 = (x - b_1.to(tl.float32)).to(tl.bfloat16)
    return tl.dot(b_one, b_0, tl.dot(b_one, b_1, tl.dot(b_one, b_2)))


@triton.jit
def shifted_exp2(x, SHIFT: tl.constexpr, WIDE: tl.constexpr):
    """``2 ** (x + SHIFT)``; in float32 without the rounding of a small ``x`` at the last place of the shift."""
    if WIDE:
        return tl.where(tl.abs(x) < 100.0, tl.math.exp2(x) * 2.0**SHIFT, tl.math.exp2(x + SHIFT))
    return tl.math.exp2(x + SHIFT)


@triton.jit(do_not_specialize=["first"])
def chunk_gates(
    q,
    k,
    f,
    b,
    A_log,
    dt_bias,
    packed_row,
    qg,
    kg,
    g,
    row,
    lower_bound,
    scale,
    NS,
    first,
    H: tl.constexpr,
    K: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Gates, and q and k as the scans read them, for ``BK`` key channels of one chunk.

    ``row`` (3, S * H) receives beta and the reciprocal norms of q and k.
    """
    RCP_LN2: tl.constexpr = 1.4426950408889634
    TYPE: tl.constexpr = qg.dtype.element_ty
    NK: tl.constexpr = K // BK
    pid = first + tl.program_id(0)
    i_k = pid % NK
    i_h = (pid // NK) % H
    i_p = (pid // NK).to(tl.int64)
    i_c = i_p // H
    o_t = tl.arange(0, BT)
    o_k = i_k * BK + tl.arange(0, BK)
    i_y = tl.load(packed_row + i_c * BT + o_t)
    b_a = tl.exp(tl.load(A_log + i_h).to(tl.float32))
    b_bias = tl.load(dt_bias + i_h * K + o_k).to(tl.float32)
    m_t = i_y >= 0
    i_r = tl.maximum(i_y, 0) * H + i_h
    o_r = i_r[:, None] * K + o_k[None, :]
    b_f = tl.load(f + o_r, mask=m_t[:, None], other=0.0)
    b_b = tl.load(b + i_r, mask=m_t, other=0.0).to(tl.float32)
    b_q = tl.load(q + o_r, mask=m_t[:, None], other=0.0)
    b_k = tl.load(k + o_r, mask=m_t[:, None], other=0.0)

    b_sq = tl.zeros([BT], dtype=tl.float32)
    b_sk = tl.zeros([BT], dtype=tl.float32)
    for i_n in tl.static_range(NK):
        o_n = i_r[:, None] * K + (i_n * BK + tl.arange(0, BK))[None, :]
        b_x = tl.load(q + o_n, mask=m_t[:, None], other=0.0).to(tl.float32)
        b_z = tl.load(k + o_n, mask=m_t[:, None], other=0.0).to(tl.float32)
        b_sq += tl.sum(b_x * b_x, 1)
        b_sk += tl.sum(b_z * b_z, 1)
    b_f = (lower_bound * RCP_LN2) * tl.sigmoid(b_a * (b_f.to(tl.float32) + b_bias[None, :]))
    b_f = tl.where(m_t[:, None], b_f, 0.0)
    b_g = running_sums(b_f, BT, WIDE, False)
    p_k = i_p * BT * K
    o_tk = o_t[:, None] * K + o_k[None, :]
    tl.store(g + p_k + o_tk, b_g)
    b_last = tl.sum(tl.where((o_t == BT - 1)[:, None], b_g, 0.0), 0)
    b_q = b_q.to(tl.float32)
    b_k = b_k.to(tl.float32)
    b_rq = 1.0 / tl.sqrt(b_sq + 1e-6)
    b_rk = 1.0 / tl.sqrt(b_sk + 1e-6)
    if i_k == 0:
        b_b = tl.where(m_t, tl.sigmoid(b_b), 0.0)
        tl.store(row + i_p * BT + o_t, b_b)
        tl.store(row + NS + i_p * BT + o_t, b_rq)
        tl.store(row + 2 * NS.to(tl.int64) + i_p * BT + o_t, b_rk)
    tl.store(qg + p_k + o_tk, (b_q * (b_rq * scale)[:, None] * tl.math.exp2(b_g)).to(TYPE))
    tl.store(kg + p_k + o_tk, (b_k * b_rk[:, None] * tl.math.exp2(b_last[None, :] - b_g)).to(TYPE))


@triton.jit(do_not_specialize=["first"])
def chunk_forward(
    q,
    k,
    v,
    packed_row,
    w,
    u,
    g,
    Aqk,
    Akk,
    row,
    scale,
    NS,
    first,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BW: tl.constexpr,
    WIDE: tl.constexpr,
    SOLVE: tl.constexpr,
):
    """P and ``(I + A)^-1`` of the README, W and U, from the gates and norms of ``chunk_gates``."""
    # 31 rows at the lowest bound decay by 2**-223.6, so decays' factors lie in [2**-111.6, 2**112]; q and k are at most
    # 1. Pairs of a row with a later one may overflow: zeros replace them, they are not multiplied by zeros.
    SHIFT: tl.constexpr = 112.0
    UNDO: tl.constexpr = 2.0**-112
    tl.static_assert(BC == 32 and BT <= 2 * BC)
    LEVELS: tl.constexpr = 5 if BT == 32 else 6
    TYPE: tl.constexpr = w.dtype.element_ty
    PAIR: tl.constexpr = tl.float32 if WIDE else TYPE
    pid = first + tl.program_id(0)
    i_h = pid % H
    i_c = (pid // H).to(tl.int64)
    i_p = pid.to(tl.int64)
    o_t = tl.arange(0, BT)
    o_j = tl.arange(0, BT)
    i_y = tl.load(packed_row + i_c * BT + o_t)
    b_b = tl.load(row + i_p * BT + o_t)
    b_rq = tl.load(row + NS + i_p * BT + o_t)
    b_rk = tl.load(row + 2 * NS.to(tl.int64) + i_p * BT + o_t)
    m_t = i_y >= 0
    i_r = tl.maximum(i_y, 0) * H + i_h
    b_Aq = tl.zeros([BT, BT], dtype=tl.float32)
    b_Ak = tl.zeros([BT, BT], dtype=tl.float32)
    b_Bq = tl.zeros([BT, BT], dtype=tl.float32)
    b_Bk = tl.zeros([BT, BT], dtype=tl.float32)
    p_k = i_p * BT * K
    for i_k in range(K // BK):
        o_k = i_k * BK + tl.arange(0, BK)
        o_tk = o_t[:, None] * K + o_k[None, :]
        b_q = tl.load(q + i_r[:, None] * K + o_k[None, :], mask=m_t[:, None], other=0.0)
        b_k = tl.load(k + i_r[:, None] * K + o_k[None, :], mask=m_t[:, None], other=0.0)
        b_g = tl.load(g + p_k + o_tk)
        b_0 = tl.load(g + p_k + o_k)
        b_1 = tl.load(g + p_k + (BT - BC) * K + o_k)
        b_q = b_q.to(tl.float32) * b_rq[:, None]
        b_k = b_k.to(tl.float32) * b_rk[:, None]
        b_ref = tl.where((o_t < BC)[:, None], b_0[None, :], b_1[None, :])
        b_left = shifted_exp2(b_g - b_ref, SHIFT, WIDE)
        b_kr = tl.trans((b_k * shifted_exp2(b_ref - b_g, -SHIFT, WIDE)).to(PAIR))
        b_lq = (b_q * b_left).to(PAIR)
        b_lk = (b_k * b_left).to(PAIR)
        b_Aq = tl.dot(b_lq, b_kr, b_Aq)
        b_Ak = tl.dot(b_lk, b_kr, b_Ak)
        if BT > BC:
            # Second block's rows with the first one's: the reference is in between, no factor grows.
            b_kr = tl.trans((b_k * tl.math.exp2(b_1[None, :] - b_g)).to(PAIR))
            b_Bq = tl.dot(b_lq, b_kr, b_Bq)
            b_Bk = tl.dot(b_lk, b_kr, b_Bk)
    if BT > BC:
        m_b = o_t[:, None] // BC == o_j[None, :] // BC
        b_Aq = tl.where(m_b, b_Aq, b_Bq * UNDO)
        b_Ak = tl.where(m_b, b_Ak, b_Bk * UNDO)

    p_a = i_p * BT * BT
    o_tj = o_t[:, None] * BT + o_j[None, :]
    tl.store(Aqk + p_a + o_tj, tl.where(o_t[:, None] >= o_j[None, :], b_Aq * scale, 0.0).to(TYPE))
    b_Ak = tl.where(o_t[:, None] > o_j[None, :], b_Ak * b_b[:, None], 0.0)
    # Inverse of the diagonal blocks of 2 rows, then of 4, 8, ...: -D A D fills what is new in a block. Substitution,
    # not powers of A, which would cancel badly when keys repeat.
    b_D = tl.where(o_t[:, None] == o_j[None, :], 1.0, 0.0)
    b_D -= tl.where(o_t[:, None] // 2 == o_j[None, :] // 2, b_Ak, 0.0)
    for i_l in tl.static_range(1, LEVELS):
        m_l = (o_t[:, None] // (2 << i_l) == o_j[None, :] // (2 << i_l)) & (
            o_t[:, None] // (1 << i_l) != o_j[None, :] // (1 << i_l)
        )
        b_x = tl.dot(b_D, tl.where(m_l, b_Ak, 0.0), input_precision=SOLVE)
        b_D -= tl.dot(b_x, b_D, input_precision=SOLVE)
    b_A = b_D.to(TYPE)
    tl.store(Akk + p_a + o_tj, b_A)

    for i_v in range(V // BV):
        o_v = i_v * BV + tl.arange(0, BV)
        b_v = tl.load(v + i_r[:, None] * V + o_v[None, :], mask=m_t[:, None], other=0.0).to(tl.float32)
        b_u = tl.dot(b_A, (b_v * b_b[:, None]).to(TYPE))
        tl.store(u + i_p * BT * V + o_t[:, None] * V + o_v[None, :], b_u.to(TYPE))
    b_rk *= b_b
    for i_k in range(K // BW):
        o_k = i_k * BW + tl.arange(0, BW)
        o_tk = o_t[:, None] * K + o_k[None, :]
        b_k = tl.load(k + i_r[:, None] * K + o_k[None, :], mask=m_t[:, None], other=0.0).to(tl.float32)
        b_k *= b_rk[:, None] * tl.math.exp2(tl.load(g + p_k + o_tk))
        tl.store(w + p_k + o_tk, tl.dot(b_A, b_k.to(TYPE)).to(TYPE))


@triton.jit(do_not_specialize=["first"])
def chunk_output(
    qg,
    Aqk,
    v_new,
    h,
    o,
    own_row,
    first,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """``O = (q~ exp(G)) S + P R``, written to own rows; replay rows have none."""
    NV: tl.constexpr = V // BV
    pid = first + tl.program_id(0)
    i_v = pid % NV
    i_p = (pid // NV).to(tl.int64)
    i_h = (pid // NV) % H
    i_c = i_p // H
    o_t = tl.arange(0, BT)
    o_j = tl.arange(0, BT)
    o_v = i_v * BV + tl.arange(0, BV)
    b_o = tl.zeros([BT, BV], dtype=tl.float32)
    for i_k in tl.static_range(K // BK):
        o_k = i_k * BK + tl.arange(0, BK)
        b_q = tl.load(qg + i_p * BT * K + o_t[:, None] * K + o_k[None, :])
        b_h = tl.load(h + i_p * K * V + o_k[:, None] * V + o_v[None, :])
        b_o = tl.dot(b_q, b_h, b_o)
    b_A = tl.load(Aqk + i_p * BT * BT + o_t[:, None] * BT + o_j[None, :])
    b_v = tl.load(v_new + i_p * BT * V + o_t[:, None] * V + o_v[None, :])
    b_o = tl.dot(b_A, b_v, b_o)
    i_t = tl.load(own_row + i_c * BT + o_t)
    tl.store(o + (i_t * H + i_h)[:, None] * V + o_v[None, :], b_o.to(o.dtype.element_ty), mask=(i_t >= 0)[:, None])
