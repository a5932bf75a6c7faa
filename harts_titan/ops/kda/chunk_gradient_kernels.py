"""Triton kernels of everything inside a KDA chunk, backward; tiles, factors and letters as in ``chunk_kernels.py``."""

import triton
import triton.language as tl

from harts_titan.ops.kda.chunk_kernels import running_sums


@triton.jit(do_not_specialize=["first"])
def chunk_output_gradient(
    do,
    Aqk,
    do_tile,
    dv,
    own_row,
    first,
    H: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BV: tl.constexpr,
):
    """``dR = P^T dO`` and dO itself as tiles: zero where a row is a replay row or past the end."""
    NV: tl.constexpr = V // BV
    pid = first + tl.program_id(0)
    i_v = pid % NV
    i_p = (pid // NV).to(tl.int64)
    i_h = (pid // NV) % H
    i_c = i_p // H
    o_t = tl.arange(0, BT)
    o_j = tl.arange(0, BT)
    o_v = i_v * BV + tl.arange(0, BV)
    o_tv = i_p * BT * V + o_t[:, None] * V + o_v[None, :]
    i_t = tl.load(own_row + i_c * BT + o_t)
    b_do = tl.load(do + (i_t * H + i_h)[:, None] * V + o_v[None, :], mask=(i_t >= 0)[:, None], other=0.0)
    tl.store(do_tile + o_tv, b_do)
    b_A = tl.load(Aqk + i_p * BT * BT + o_t[:, None] * BT + o_j[None, :])
    tl.store(dv + o_tv, tl.dot(tl.trans(b_A), b_do).to(dv.dtype.element_ty))


@triton.jit(do_not_specialize=["first"])
def chunk_backward_values(
    k,
    v,
    packed_row,
    copy_slot,
    g,
    row,
    Akk,
    h,
    v_new,
    do,
    dv,
    dv_out,
    dv_copy,
    dAqk,
    dAkk,
    diagonal,
    db_part,
    NS,
    first,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Gradients of P, of A and of v from dO and dR; ``db_part[0]`` gets the part of beta's gradient that sums over V.

    ``dAqk`` and ``dAkk`` (PARTS, C, H, BT, BT) hold what is below the diagonals, as a rounded part and, with two parts,
    the rest; ``diagonal`` (S, H) the float32 diagonal of P's gradient, which is most of it under strong decay.

    A path row that one packed row reads gets its gradient here. Copies of a row that several packed rows read go to
    ``dv_copy`` in float32, at ``copy_slot``.
    """
    TYPE: tl.constexpr = h.dtype.element_ty
    pid = first + tl.program_id(0)
    i_h = pid % H
    i_c = (pid // H).to(tl.int64)
    i_p = pid.to(tl.int64)
    o_t = tl.arange(0, BT)
    o_j = tl.arange(0, BT)
    o_v = tl.arange(0, V)
    o_tv = o_t[:, None] * V + o_v[None, :]
    o_tj = o_t[:, None] * BT + o_j[None, :]
    i_y = tl.load(packed_row + i_c * BT + o_t)
    m_t = i_y >= 0
    i_r = tl.maximum(i_y, 0) * H + i_h
    b_b = tl.load(row + i_p * BT + o_t)
    m_lower = o_t[:, None] > o_j[None, :]

    b_do = tl.load(do + i_p * BT * V + o_tv)
    b_vn = tl.load(v_new + i_p * BT * V + o_tv)
    tl.store(diagonal + i_p * BT + o_t, tl.sum(b_do.to(tl.float32) * b_vn.to(tl.float32), 1))
    b_dAq = tl.where(m_lower, tl.dot(b_do, tl.trans(b_vn)), 0.0)
    for i_m in tl.static_range(PARTS):
        b_part = b_dAq.to(dAqk.dtype.element_ty)
        tl.store(dAqk + i_m * NS.to(tl.int64) * BT + i_p * BT * BT + o_tj, b_part)
        b_dAq -= b_part.to(tl.float32)

    b_dv = tl.load(dv + i_p * BT * V + o_tv)
    b_A = tl.trans(tl.load(Akk + i_p * BT * BT + o_tj))
    b_v = tl.load(v + i_r[:, None] * V + o_v[None, :], mask=m_t[:, None], other=0.0)
    b_dA = tl.dot(b_dv, tl.trans(b_v))
    b_dvb = tl.dot(b_A, b_dv)
    tl.store(db_part + i_p * BT + o_t, tl.sum(b_dvb * b_v.to(tl.float32), 1))
    b_dvb *= b_b[:, None]
    i_s = tl.load(copy_slot + i_c * BT + o_t)
    m_y = (m_t & (i_s < 0))[:, None]
    m_s = (i_s >= 0)[:, None]
    i_s = tl.maximum(i_s, 0) * H + i_h
    tl.store(dv_out + i_r[:, None] * V + o_v[None, :], b_dvb.to(dv_out.dtype.element_ty), mask=m_y)
    tl.store(dv_copy + i_s[:, None] * V + o_v[None, :], b_dvb, mask=m_s)

    b_rk = tl.load(row + 2 * NS.to(tl.int64) + i_p * BT + o_t)
    for i_k in range(K // BK):
        o_k = i_k * BK + tl.arange(0, BK)
        b_h = tl.load(h + i_p * K * V + o_k[:, None] * V + o_v[None, :])
        b_dw = tl.dot(b_dv, tl.trans(b_h))
        b_k = tl.load(k + i_r[:, None] * K + o_k[None, :], mask=m_t[:, None], other=0.0).to(tl.float32)
        b_k *= b_rk[:, None] * tl.math.exp2(tl.load(g + i_p * BT * K + o_t[:, None] * K + o_k[None, :]))
        b_dA -= tl.dot(b_dw.to(TYPE), tl.trans(b_k.to(TYPE)))
    b_dA = tl.where(m_lower, b_dA * b_b[None, :], 0.0).to(TYPE)
    b_dA = tl.dot(b_A, tl.dot(b_dA, b_A).to(TYPE))
    b_dA = tl.where(m_lower, -b_dA, 0.0)
    for i_m in tl.static_range(PARTS):
        b_part = b_dA.to(dAkk.dtype.element_ty)
        tl.store(dAkk + i_m * NS.to(tl.int64) * BT + i_p * BT * BT + o_tj, b_part)
        b_dA -= b_part.to(tl.float32)


@triton.jit(do_not_specialize=["first"])
def chunk_backward_keys(
    q,
    k,
    f,
    A_log,
    dt_bias,
    packed_row,
    copy_slot,
    g,
    row,
    Akk,
    h,
    v_new,
    do,
    dh,
    dv,
    dAqk,
    dAkk,
    diagonal,
    dq,
    dk,
    df_out,
    df_copy,
    db_part,
    part,
    lower_bound,
    scale,
    NS,
    first,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    BK: tl.constexpr,
    PARTS: tl.constexpr,
    WIDE: tl.constexpr,
    BV: tl.constexpr,
):
    """Gradients of the normalised q and k (float32 tiles) and of the raw gate, for ``BK`` key channels of one chunk.

    ``part`` (2, C, H, K) receives this chunk's sums for ``dt_bias`` and ``A_log``, ``db_part[1 + i_k]`` the part of
    beta's gradient that sums over these channels.
    """
    tl.static_assert(BT <= 2 * BC)
    TYPE: tl.constexpr = h.dtype.element_ty
    PAIR: tl.constexpr = tl.float32 if WIDE else TYPE
    NK: tl.constexpr = K // BK
    pid = first + tl.program_id(0)
    i_k = pid % NK
    i_h = (pid // NK) % H
    i_p = (pid // NK).to(tl.int64)
    i_c = i_p // H
    o_t = tl.arange(0, BT)
    o_j = tl.arange(0, BT)
    o_k = i_k * BK + tl.arange(0, BK)
    o_tk = o_t[:, None] * K + o_k[None, :]
    o_tj = o_t[:, None] * BT + o_j[None, :]
    i_y = tl.load(packed_row + i_c * BT + o_t)
    i_s = tl.load(copy_slot + i_c * BT + o_t)
    # All loads first: most of this kernel's time was waiting for one load after the other.
    g += i_p * BT * K
    b_b = tl.load(row + i_p * BT + o_t)
    b_rq = tl.load(row + NS + i_p * BT + o_t) * scale
    b_rk = tl.load(row + 2 * NS.to(tl.int64) + i_p * BT + o_t)
    b_d = tl.load(diagonal + i_p * BT + o_t)[:, None]
    b_last = tl.load(g + (BT - 1) * K + o_k)
    b_a = tl.load(A_log + i_h).to(tl.float32)
    b_bias = tl.load(dt_bias + i_h * K + o_k).to(tl.float32)
    # The middle rows of the one or two blocks.
    b_m0 = tl.load(g + (BC // 2) * K + o_k)
    b_m1 = tl.load(g + (BT - BC // 2) * K + o_k)
    b_A = tl.load(Akk + i_p * BT * BT + o_tj)
    b_g = tl.load(g + o_tk)
    m_t = i_y >= 0
    i_r = tl.maximum(i_y, 0) * H + i_h
    b_q = tl.load(q + i_r[:, None] * K + o_k[None, :], mask=m_t[:, None], other=0.0)
    b_k = tl.load(k + i_r[:, None] * K + o_k[None, :], mask=m_t[:, None], other=0.0)
    b_f = tl.load(f + i_r[:, None] * K + o_k[None, :], mask=m_t[:, None], other=0.0)

    # Through the state: A^T dW, dq and dk.
    b_dw = tl.zeros([BT, BK], dtype=tl.float32)
    b_dq = tl.zeros([BT, BK], dtype=tl.float32)
    b_dk = tl.zeros([BT, BK], dtype=tl.float32)
    b_end = tl.zeros([BK], dtype=tl.float32)
    for i_v in range(V // BV):
        o_v = i_v * BV + tl.arange(0, BV)
        o_tv = i_p * BT * V + o_t[:, None] * V + o_v[None, :]
        o_kv = i_p * K * V + o_k[:, None] * V + o_v[None, :]
        b_h = tl.load(h + o_kv)
        b_dh = tl.load(dh + o_kv)
        b_dv = tl.load(dv + o_tv)
        b_do = tl.load(do + o_tv)
        b_vn = tl.load(v_new + o_tv)
        b_dw = tl.dot(b_dv, tl.trans(b_h), b_dw)
        b_dq = tl.dot(b_do, tl.trans(b_h), b_dq)
        b_dk = tl.dot(b_vn, tl.trans(b_dh), b_dk)
        b_end += tl.sum(b_h.to(tl.float32) * b_dh.to(tl.float32), 1)
    b_dw = tl.dot(tl.trans(b_A), (-b_dw).to(TYPE)) * b_b[:, None]
    b_end *= tl.math.exp2(b_last)

    b_mq0 = tl.load(dAqk + i_p * BT * BT + o_tj)
    b_mk0 = tl.load(dAkk + i_p * BT * BT + o_tj)
    b_mq1 = b_mq0
    b_mk1 = b_mk0
    if PARTS == 2:
        b_mq1 = tl.load(dAqk + NS.to(tl.int64) * BT + i_p * BT * BT + o_tj)
        b_mk1 = tl.load(dAkk + NS.to(tl.int64) * BT + i_p * BT * BT + o_tj)

    b_e = tl.math.exp2(b_g)
    b_q = b_q.to(tl.float32) * b_rq[:, None]
    b_k = b_k.to(tl.float32) * b_rk[:, None]
    b_dk *= tl.math.exp2(b_last[None, :] - b_g)
    b_dg = b_k * b_dk
    b_end += tl.sum(b_dg, 0)
    b_dw *= b_e
    b_dq *= b_e
    # b_dw has beta once; the gradient of beta has none.
    b_kdw = b_k * b_dw
    b_db = tl.sum(b_kdw, 1) / tl.where(b_b > 0.0, b_b, 1.0)
    b_dg = b_kdw - b_dg + b_q * b_dq + tl.where((o_t == BT - 1)[:, None], b_end[None, :], 0.0)
    # P's diagonal has no decay: exact, and no part of the gate's gradient.
    b_dk += b_dw + b_d * b_q
    b_dq += b_d * b_k

    # Through P and A: the same rounded factors for rows and columns.
    b_ref = b_g
    for i_b in tl.static_range(BT // BC):
        b_middle = b_m0 if i_b == 0 else b_m1
        b_ref = tl.where((o_t // BC == i_b)[:, None], b_middle[None, :], b_ref)
    b_left = tl.math.exp2(b_g - b_ref)
    b_lq = (b_q * b_left).to(PAIR)
    b_lk = (b_k * b_left * b_b[:, None]).to(PAIR)
    b_aq = tl.zeros([BT, BK], dtype=tl.float32)
    b_ak = tl.zeros([BT, BK], dtype=tl.float32)
    for i_b in tl.static_range(BT // BC):
        m_b = (o_t // BC == i_b)[:, None]
        b_middle = b_m0 if i_b == 0 else b_m1
        b_r = tl.where((o_t < (i_b + 1) * BC)[:, None], tl.math.exp2(b_middle[None, :] - b_g), 0.0)
        b_kr = (b_k * b_r).to(PAIR)
        b_yq = tl.dot(b_mq0, b_kr)
        b_yk = tl.dot(b_mk0, b_kr)
        if PARTS == 2:
            b_yq = tl.dot(b_mq1, b_kr, b_yq)
            b_yk = tl.dot(b_mk1, b_kr, b_yk)
        b_aq = tl.where(m_b, b_yq, b_aq)
        b_ak = tl.where(m_b, b_yk, b_ak)
    b_dg += b_lq.to(tl.float32) * b_aq + b_lk.to(tl.float32) * b_ak
    b_dq += b_aq * b_left
    tl.store(dq + i_p * BT * K + o_tk, b_dq * scale)
    b_ak *= b_left
    b_db += tl.sum(b_ak * b_k, 1)
    tl.store(db_part + (1 + i_k) * NS.to(tl.int64) + i_p * BT + o_t, b_db)
    b_dk += b_ak * b_b[:, None]
    # Columns after the rows' results are stored: fewer tiles are held at once.
    for i_b in tl.static_range(BT // BC):
        m_b = (o_t // BC == i_b)[:, None]
        b_middle = b_m0 if i_b == 0 else b_m1
        b_r = tl.where((o_t < (i_b + 1) * BC)[:, None], tl.math.exp2(b_middle[None, :] - b_g), 0.0)
        b_mlq = tl.where(m_b, b_lq, 0.0)
        b_mlk = tl.where(m_b, b_lk, 0.0)
        b_x = tl.dot(tl.trans(b_mq0), b_mlq)
        b_x = tl.dot(tl.trans(b_mk0), b_mlk, b_x)
        if PARTS == 2:
            b_x = tl.dot(tl.trans(b_mq1), b_mlq, b_x)
            b_x = tl.dot(tl.trans(b_mk1), b_mlk, b_x)
        b_dk += b_x * b_r
        b_dg -= b_x * (b_k * b_r).to(PAIR).to(tl.float32)
    tl.store(dk + i_p * BT * K + o_tk, b_dk)

    b_dg = running_sums(b_dg, BT, WIDE, True)
    b_a = tl.exp(b_a)
    b_f = b_f.to(tl.float32) + b_bias[None, :]
    b_sig = tl.sigmoid(b_a * b_f)
    b_dg = tl.where(m_t[:, None], b_dg * (b_a * lower_bound) * (b_sig * (1.0 - b_sig)), 0.0)
    tl.store(part + i_p * K + o_k, tl.sum(b_dg, 0))
    tl.store(part + (NS // BT).to(tl.int64) * K + i_p * K + o_k, tl.sum(b_dg * b_f, 0))
    m_y = (m_t & (i_s < 0))[:, None]
    m_s = (i_s >= 0)[:, None]
    i_s = tl.maximum(i_s, 0) * H + i_h
    tl.store(df_out + i_r[:, None] * K + o_k[None, :], b_dg.to(df_out.dtype.element_ty), mask=m_y)
    tl.store(df_copy + i_s[:, None] * K + o_k[None, :], b_dg, mask=m_s)


@triton.jit(do_not_specialize=["first"])
def chunk_backward_norms(
    q,
    k,
    packed_row,
    copy_slot,
    row,
    dq,
    dk,
    db_part,
    dq_out,
    dk_out,
    db_out,
    dq_copy,
    dk_copy,
    db_copy,
    NS,
    first,
    H: tl.constexpr,
    K: tl.constexpr,
    BT: tl.constexpr,
    BS: tl.constexpr,
    ND: tl.constexpr,
):
    """Gradients of the raw q, k and beta of ``BS`` rows of one (chunk, head): through the norms and the sigmoid."""
    NB: tl.constexpr = BT // BS
    pid = first + tl.program_id(0)
    i_p = (pid // NB).to(tl.int64)
    i_h = (pid // NB) % H
    o_t = (pid % NB) * BS + tl.arange(0, BS)
    o_k = tl.arange(0, K)
    o_tk = o_t[:, None] * K + o_k[None, :]
    i_y = tl.load(packed_row + (i_p // H) * BT + o_t)
    i_s = tl.load(copy_slot + (i_p // H) * BT + o_t)
    m_t = (i_y >= 0)[:, None]
    m_y = (i_y >= 0) & (i_s < 0)
    m_s = i_s >= 0
    i_r = tl.maximum(i_y, 0) * H + i_h
    i_s = tl.maximum(i_s, 0) * H + i_h

    b_r = tl.load(row + NS + i_p * BT + o_t)[:, None]
    b_x = tl.load(q + i_r[:, None] * K + o_k[None, :], mask=m_t, other=0.0).to(tl.float32) * b_r
    b_d = tl.load(dq + i_p * BT * K + o_tk)
    b_d = b_r * (b_d - b_x * tl.sum(b_d * b_x, 1)[:, None])
    tl.store(dq_out + i_r[:, None] * K + o_k[None, :], b_d.to(dq_out.dtype.element_ty), mask=m_y[:, None])
    tl.store(dq_copy + i_s[:, None] * K + o_k[None, :], b_d, mask=m_s[:, None])

    b_r = tl.load(row + 2 * NS.to(tl.int64) + i_p * BT + o_t)[:, None]
    b_x = tl.load(k + i_r[:, None] * K + o_k[None, :], mask=m_t, other=0.0).to(tl.float32) * b_r
    b_d = tl.load(dk + i_p * BT * K + o_tk)
    b_d = b_r * (b_d - b_x * tl.sum(b_d * b_x, 1)[:, None])
    tl.store(dk_out + i_r[:, None] * K + o_k[None, :], b_d.to(dk_out.dtype.element_ty), mask=m_y[:, None])
    tl.store(dk_copy + i_s[:, None] * K + o_k[None, :], b_d, mask=m_s[:, None])

    b_b = tl.load(row + i_p * BT + o_t)
    b_db = tl.load(db_part + i_p * BT + o_t)
    for i_d in range(1, ND):
        b_db += tl.load(db_part + i_d * NS.to(tl.int64) + i_p * BT + o_t)
    b_db *= b_b * (1.0 - b_b)
    tl.store(db_out + i_r, b_db.to(db_out.dtype.element_ty), mask=m_y)
    tl.store(db_copy + i_s, b_db, mask=m_s)
