"""Other versions of KDA's two largest kernels, timed by ``gpu_kda.py`` (section ``alternatives``)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from harts_titan.ops.kda.chunk_gradient_kernels import chunk_backward_keys
from harts_titan.ops.kda.chunk_kernels import chunk_forward
from harts_titan.ops.kda.configs import HOPPER, Config
from harts_titan.ops.kda.kernels import state_scan_backward, state_scan_forward


@triton.jit(do_not_specialize=["first"])
def keys(
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
    SUMS: tl.constexpr,
):
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
    g += i_p * BT * K
    b_b = tl.load(row + i_p * BT + o_t)
    b_rq = tl.load(row + NS + i_p * BT + o_t) * scale
    b_rk = tl.load(row + 2 * NS.to(tl.int64) + i_p * BT + o_t)
    b_d = tl.load(diagonal + i_p * BT + o_t)[:, None]
    b_last = tl.load(g + (BT - 1) * K + o_k)
    b_a = tl.load(A_log + i_h).to(tl.float32)
    b_bias = tl.load(dt_bias + i_h * K + o_k).to(tl.float32)
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

    if SUMS and not WIDE:
        b_up = tl.where(o_t[:, None] <= o_j[None, :], 1.0, 0.0).to(TYPE)
        b_p0 = b_dg.to(TYPE)
        b_dg -= b_p0.to(tl.float32)
        b_p1 = b_dg.to(TYPE)
        b_p2 = (b_dg - b_p1.to(tl.float32)).to(TYPE)
        b_dg = tl.dot(b_up, b_p0, tl.dot(b_up, b_p1, tl.dot(b_up, b_p2)))
    else:
        b_dg = tl.cumsum(b_dg, 0, reverse=True)
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
def gates(
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
    SUMS: tl.constexpr,
    WIDE: tl.constexpr,
):
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
    if SUMS and not WIDE:
        o_j = tl.arange(0, BT)
        b_l = tl.where(o_t[:, None] >= o_j[None, :], 1.0, 0.0).to(TYPE)
        b_p0 = b_f.to(TYPE)
        b_f -= b_p0.to(tl.float32)
        b_p1 = b_f.to(TYPE)
        b_p2 = (b_f - b_p1.to(tl.float32)).to(TYPE)
        b_g = tl.dot(b_l, b_p0, tl.dot(b_l, b_p1, tl.dot(b_l, b_p2)))
    else:
        b_g = tl.cumsum(b_f, 0)
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
def pairs_16(
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
    WIDE: tl.constexpr,
    SOLVE: tl.constexpr,
):
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
    b_rq = tl.load(row + NS + i_p * BT + o_t) * scale
    b_rk = tl.load(row + 2 * NS.to(tl.int64) + i_p * BT + o_t)
    m_t = i_y >= 0
    i_r = tl.maximum(i_y, 0) * H + i_h
    b_Aq = tl.zeros([BT, BT], dtype=tl.float32)
    b_Ak = tl.zeros([BT, BT], dtype=tl.float32)
    p_k = i_p * BT * K
    for i_k in range(K // BK):
        o_k = i_k * BK + tl.arange(0, BK)
        o_tk = o_t[:, None] * K + o_k[None, :]
        b_q = tl.load(q + i_r[:, None] * K + o_k[None, :], mask=m_t[:, None], other=0.0)
        b_k = tl.load(k + i_r[:, None] * K + o_k[None, :], mask=m_t[:, None], other=0.0)
        b_g = tl.load(g + p_k + o_tk)
        b_0 = tl.load(g + p_k + o_k)
        b_1 = tl.load(g + p_k + BC * K + o_k)
        b_2 = b_0
        b_3 = b_1
        if BT // BC == 4:
            b_2 = tl.load(g + p_k + 2 * BC * K + o_k)
            b_3 = tl.load(g + p_k + 3 * BC * K + o_k)
        b_q = b_q.to(tl.float32) * b_rq[:, None]
        b_k = b_k.to(tl.float32) * b_rk[:, None]
        b_ref = tl.where((o_t < BC)[:, None], b_0[None, :], b_1[None, :])
        if BT // BC == 4:
            b_ref = tl.where(
                (o_t < 2 * BC)[:, None], b_ref, tl.where((o_t < 3 * BC)[:, None], b_2[None, :], b_3[None, :])
            )
        b_left = tl.math.exp2(b_g - b_ref)
        b_lq = (b_q * b_left).to(PAIR)
        b_lk = (b_k * b_left).to(PAIR)
        for i_b in tl.static_range(BT // BC):
            b_first = b_0 if i_b == 0 else (b_1 if i_b == 1 else (b_2 if i_b == 2 else b_3))
            b_kr = b_k * tl.math.exp2(b_first[None, :] - b_g)
            b_kr = tl.trans(tl.where((o_t < (i_b + 1) * BC)[:, None], b_kr, 0.0).to(PAIR))
            m_b = (o_t // BC == i_b)[:, None]
            b_Aq = tl.dot(tl.where(m_b, b_lq, 0.0), b_kr, b_Aq)
            b_Ak = tl.dot(tl.where(m_b, b_lk, 0.0), b_kr, b_Ak)

    p_a = i_p * BT * BT
    o_tj = o_t[:, None] * BT + o_j[None, :]
    tl.store(Aqk + p_a + o_tj, tl.where(o_t[:, None] >= o_j[None, :], b_Aq, 0.0).to(TYPE))
    b_Ak = tl.where(o_t[:, None] > o_j[None, :], b_Ak * b_b[:, None], 0.0)
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
    for i_k in range(K // BK):
        o_k = i_k * BK + tl.arange(0, BK)
        o_tk = o_t[:, None] * K + o_k[None, :]
        b_k = tl.load(k + i_r[:, None] * K + o_k[None, :], mask=m_t[:, None], other=0.0).to(tl.float32)
        b_k *= b_rk[:, None] * tl.math.exp2(tl.load(g + p_k + o_tk))
        tl.store(w + p_k + o_tk, tl.dot(b_A, b_k.to(TYPE)).to(TYPE))


@triton.jit
def shifted_exp2(x, SHIFT: tl.constexpr, EXACT: tl.constexpr):
    if EXACT:
        # Adding the shift rounds a small x at the shift's last place.
        return tl.where(tl.abs(x) < 100.0, tl.math.exp2(x) * 2.0**SHIFT, tl.math.exp2(x + SHIFT))
    return tl.math.exp2(x + SHIFT)


@triton.jit(do_not_specialize=["first"])
def pairs_32(
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
    SHIFT: tl.constexpr = 112.0
    UNDO: tl.constexpr = 2.0**-112
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
def fused(
    q,
    k,
    v,
    f,
    b,
    A_log,
    dt_bias,
    packed_row,
    w,
    u,
    qg,
    kg,
    g,
    Aqk,
    Akk,
    row,
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
    BV: tl.constexpr,
    WIDE: tl.constexpr,
    SOLVE: tl.constexpr,
    SUMS: tl.constexpr,
):
    RCP_LN2: tl.constexpr = 1.4426950408889634
    SHIFT: tl.constexpr = 112.0
    UNDO: tl.constexpr = 2.0**-112
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
    b_a = tl.exp(tl.load(A_log + i_h).to(tl.float32))
    m_t = i_y >= 0
    i_r = tl.maximum(i_y, 0) * H + i_h
    b_b = tl.load(b + i_r, mask=m_t, other=0.0).to(tl.float32)
    b_sq = tl.zeros([BT], dtype=tl.float32)
    b_sk = tl.zeros([BT], dtype=tl.float32)
    for i_k in range(K // BK):
        o_n = i_r[:, None] * K + (i_k * BK + tl.arange(0, BK))[None, :]
        b_x = tl.load(q + o_n, mask=m_t[:, None], other=0.0).to(tl.float32)
        b_z = tl.load(k + o_n, mask=m_t[:, None], other=0.0).to(tl.float32)
        b_sq += tl.sum(b_x * b_x, 1)
        b_sk += tl.sum(b_z * b_z, 1)
    b_rq = 1.0 / tl.sqrt(b_sq + 1e-6)
    b_rk = 1.0 / tl.sqrt(b_sk + 1e-6)
    b_b = tl.where(m_t, tl.sigmoid(b_b), 0.0)
    tl.store(row + i_p * BT + o_t, b_b)
    tl.store(row + NS + i_p * BT + o_t, b_rq)
    tl.store(row + 2 * NS.to(tl.int64) + i_p * BT + o_t, b_rk)
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
        b_f = tl.load(f + i_r[:, None] * K + o_k[None, :], mask=m_t[:, None], other=0.0).to(tl.float32)
        b_f += tl.load(dt_bias + i_h * K + o_k).to(tl.float32)[None, :]
        b_f = tl.where(m_t[:, None], (lower_bound * RCP_LN2) * tl.sigmoid(b_a * b_f), 0.0)
        if SUMS and not WIDE:
            b_p0 = b_f.to(tl.bfloat16)
            b_f -= b_p0.to(tl.float32)
            b_p1 = b_f.to(tl.bfloat16)
            b_p2 = (b_f - b_p1.to(tl.float32)).to(tl.bfloat16)
            b_l = tl.where(o_t[:, None] >= o_j[None, :], 1.0, 0.0).to(tl.bfloat16)
            b_g = tl.dot(b_l, b_p0, tl.dot(b_l, b_p1, tl.dot(b_l, b_p2)))
        else:
            b_g = tl.cumsum(b_f, 0)
        tl.store(g + p_k + o_tk, b_g)
        b_0 = tl.sum(tl.where((o_t == 0)[:, None], b_g, 0.0), 0)
        b_1 = tl.sum(tl.where((o_t == BT - BC)[:, None], b_g, 0.0), 0)
        b_last = tl.sum(tl.where((o_t == BT - 1)[:, None], b_g, 0.0), 0)
        b_q = b_q.to(tl.float32) * b_rq[:, None]
        b_k = b_k.to(tl.float32) * b_rk[:, None]
        tl.store(qg + p_k + o_tk, (b_q * scale * tl.math.exp2(b_g)).to(TYPE))
        tl.store(kg + p_k + o_tk, (b_k * tl.math.exp2(b_last[None, :] - b_g)).to(TYPE))
        b_ref = tl.where((o_t < BC)[:, None], b_0[None, :], b_1[None, :])
        b_left = shifted_exp2(b_g - b_ref, SHIFT, WIDE)
        b_kr = tl.trans((b_k * shifted_exp2(b_ref - b_g, -SHIFT, WIDE)).to(PAIR))
        b_lq = (b_q * b_left).to(PAIR)
        b_lk = (b_k * b_left).to(PAIR)
        b_Aq = tl.dot(b_lq, b_kr, b_Aq)
        b_Ak = tl.dot(b_lk, b_kr, b_Ak)
        if BT > BC:
            b_kr = tl.trans((b_k * tl.math.exp2(b_1[None, :] - b_g)).to(PAIR))
            b_Bq = tl.dot(b_lq, b_kr, b_Bq)
            b_Bk = tl.dot(b_lk, b_kr, b_Bk)
    if BT > BC:
        m_b = o_t[:, None] // BC == o_j[None, :] // BC
        b_Aq = tl.where(m_b, b_Aq, b_Bq * UNDO)
        b_Ak = tl.where(m_b, b_Ak, b_Bk * UNDO)

    tl.debug_barrier()
    p_a = i_p * BT * BT
    o_tj = o_t[:, None] * BT + o_j[None, :]
    tl.store(Aqk + p_a + o_tj, tl.where(o_t[:, None] >= o_j[None, :], b_Aq * scale, 0.0).to(TYPE))
    b_Ak = tl.where(o_t[:, None] > o_j[None, :], b_Ak * b_b[:, None], 0.0)
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
    for i_k in range(K // BK):
        o_k = i_k * BK + tl.arange(0, BK)
        o_tk = o_t[:, None] * K + o_k[None, :]
        b_k = tl.load(k + i_r[:, None] * K + o_k[None, :], mask=m_t[:, None], other=0.0).to(tl.float32)
        b_k *= b_rk[:, None] * tl.math.exp2(tl.load(g + p_k + o_tk))
        tl.store(w + p_k + o_tk, tl.dot(b_A, b_k.to(TYPE)).to(TYPE))


@triton.jit(do_not_specialize=["first_sequence"])
def scan_forward(
    kg,
    w,
    u,
    g,
    v_new,
    h,
    pool,
    init_row,
    export_row,
    chunk_offset,
    first_sequence,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BV: tl.constexpr,
):
    """Run the state over the chunks of each sequence; write ``h`` (state before each chunk), ``v_new`` and exports."""
    NV: tl.constexpr = V // BV
    pid = tl.program_id(0)
    i_v = pid % NV
    i_h = (pid // NV) % H
    i_n = (first_sequence + pid // (NV * H)).to(tl.int64)
    i_c0 = tl.load(chunk_offset + i_n).to(tl.int64)
    NT = (tl.load(chunk_offset + i_n + 1).to(tl.int64) - i_c0).to(tl.int32)
    i_b0 = i_c0 + i_n
    o_k = tl.arange(0, K)
    o_t = tl.arange(0, BT)
    o_v = i_v * BV + tl.arange(0, BV)
    o_s = o_k[:, None] * V + o_v[None, :]
    o_tv = o_t[:, None] * V + o_v[None, :]
    b_s = tl.zeros([K, BV], dtype=tl.float32)
    i_s = tl.load(init_row + i_n).to(tl.int64)
    if i_s >= 0:
        b_s += tl.load(pool + (i_s * H + i_h) * K * V + o_s)
    i_e = tl.load(export_row + i_b0).to(tl.int64)
    for i_t in range(0, NT):
        i_p = (i_c0 + i_t) * H + i_h
        # Early: their latency would be the scan's.
        i_next = tl.load(export_row + i_b0 + i_t + 1).to(tl.int64)
        b_last = tl.load(g + i_p * BT * K + (BT - 1) * K + o_k)
        b_u = tl.load(u + i_p * BT * V + o_tv)
        if i_e >= 0:
            # The register state, before rounding: a continuation from it equals the uninterrupted scan bit for bit.
            tl.store(pool + (i_e * H + i_h) * K * V + o_s, b_s)
        b_h = b_s.to(h.dtype.element_ty)
        tl.store(h + i_p * K * V + o_s, b_h)
        b_w = tl.load(w + i_p * BT * K + o_t[:, None] * K + o_k[None, :])
        b_v = b_u - tl.dot(b_w, b_h)
        tl.store(v_new + i_p * BT * V + o_tv, b_v.to(v_new.dtype.element_ty))
        b_s *= tl.math.exp2(b_last)[:, None]
        b_k = tl.load(kg + i_p * BT * K + o_t[None, :] * K + o_k[:, None])
        b_s = tl.dot(b_k, b_v.to(b_k.dtype), b_s)
        i_e = i_next
    if i_e >= 0:
        tl.store(pool + (i_e * H + i_h) * K * V + o_s, b_s)


@triton.jit(do_not_specialize=["first_sequence"])
def scan_backward(
    qg,
    kg,
    w,
    g,
    do,
    dv,
    dv_new,
    dh,
    dpool,
    dinit,
    export_row,
    init_slot,
    chunk_offset,
    first_sequence,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BV: tl.constexpr,
):
    """Run the state gradient backwards, adding the gradient of every exported state where the scan passes it.

    ``dinit[init_slot[n]]`` receives the gradient of sequence ``n``'s initial state; slot -1 has none.
    """
    NV: tl.constexpr = V // BV
    pid = tl.program_id(0)
    i_v = pid % NV
    i_h = (pid // NV) % H
    i_n = (first_sequence + pid // (NV * H)).to(tl.int64)
    i_c0 = tl.load(chunk_offset + i_n).to(tl.int64)
    NT = (tl.load(chunk_offset + i_n + 1).to(tl.int64) - i_c0).to(tl.int32)
    i_b0 = i_c0 + i_n
    o_k = tl.arange(0, K)
    o_t = tl.arange(0, BT)
    o_v = i_v * BV + tl.arange(0, BV)
    o_s = o_k[:, None] * V + o_v[None, :]
    o_tv = o_t[:, None] * V + o_v[None, :]
    o_kt = o_t[None, :] * K + o_k[:, None]
    b_ds = tl.zeros([K, BV], dtype=tl.float32)
    i_e = tl.load(export_row + i_b0 + NT).to(tl.int64)
    if i_e >= 0:
        b_ds += tl.load(dpool + (i_e * H + i_h) * K * V + o_s)
    i_e = tl.load(export_row + i_b0 + tl.maximum(NT - 1, 0)).to(tl.int64)
    for i_r in range(0, NT):
        i_t = NT - 1 - i_r
        i_p = (i_c0 + i_t) * H + i_h
        # Early: their latency would be the scan's.
        i_next = tl.load(export_row + i_b0 + tl.maximum(i_t - 1, 0)).to(tl.int64)
        b_in = tl.load(dv + i_p * BT * V + o_tv)
        b_last = tl.load(g + i_p * BT * K + (BT - 1) * K + o_k)
        b_dh = b_ds.to(dh.dtype.element_ty)
        tl.store(dh + i_p * K * V + o_s, b_dh)
        b_do = tl.load(do + i_p * BT * V + o_tv)
        b_k = tl.load(kg + i_p * BT * K + o_t[:, None] * K + o_k[None, :])
        b_dv = b_in + tl.dot(b_k, b_dh)
        b_r = b_dv.to(dv_new.dtype.element_ty)
        tl.store(dv_new + i_p * BT * V + o_tv, b_r)
        b_w = tl.load(w + i_p * BT * K + o_kt)
        b_q = tl.load(qg + i_p * BT * K + o_kt)
        b_ds *= tl.math.exp2(b_last)[:, None]
        b_ds = tl.dot(b_q, b_do, b_ds)
        b_ds -= tl.dot(b_w, b_r)
        if i_e >= 0:
            b_ds += tl.load(dpool + (i_e * H + i_h) * K * V + o_s)
        i_e = i_next
    i_d = tl.load(init_slot + i_n).to(tl.int64)
    if i_d >= 0:
        tl.store(dinit + (i_d * H + i_h) * K * V + o_s, b_ds)


@triton.jit(do_not_specialize=["first_sequence"])
def scan_backward_ahead(
    qg,
    kg,
    w,
    g,
    do,
    dv,
    dv_new,
    dh,
    dpool,
    dinit,
    export_row,
    init_slot,
    chunk_offset,
    first_sequence,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BV: tl.constexpr,
):
    """Run the state gradient backwards, adding the gradient of every exported state where the scan passes it.

    ``dinit[init_slot[n]]`` receives the gradient of sequence ``n``'s initial state; slot -1 has none.
    """
    NV: tl.constexpr = V // BV
    pid = tl.program_id(0)
    i_v = pid % NV
    i_h = (pid // NV) % H
    i_n = (first_sequence + pid // (NV * H)).to(tl.int64)
    i_c0 = tl.load(chunk_offset + i_n).to(tl.int64)
    NT = (tl.load(chunk_offset + i_n + 1).to(tl.int64) - i_c0).to(tl.int32)
    i_b0 = i_c0 + i_n
    o_k = tl.arange(0, K)
    o_t = tl.arange(0, BT)
    o_v = i_v * BV + tl.arange(0, BV)
    o_s = o_k[:, None] * V + o_v[None, :]
    o_tv = o_t[:, None] * V + o_v[None, :]
    o_kt = o_t[None, :] * K + o_k[:, None]
    b_ds = tl.zeros([K, BV], dtype=tl.float32)
    i_e = tl.load(export_row + i_b0 + NT).to(tl.int64)
    if i_e >= 0:
        b_ds += tl.load(dpool + (i_e * H + i_h) * K * V + o_s)
    b_in = tl.load(dv + ((i_c0 + NT - 1) * H + i_h) * BT * V + o_tv)
    i_e = tl.load(export_row + i_b0 + tl.maximum(NT - 1, 0)).to(tl.int64)
    for i_r in range(0, NT):
        i_t = NT - 1 - i_r
        i_p = (i_c0 + i_t) * H + i_h
        # Early: their latency would be the scan's.
        i_next = tl.load(export_row + i_b0 + tl.maximum(i_t - 1, 0)).to(tl.int64)
        b_next = tl.load(dv + ((i_c0 + tl.maximum(i_t - 1, 0)) * H + i_h) * BT * V + o_tv)
        b_last = tl.load(g + i_p * BT * K + (BT - 1) * K + o_k)
        b_dh = b_ds.to(dh.dtype.element_ty)
        tl.store(dh + i_p * K * V + o_s, b_dh)
        b_do = tl.load(do + i_p * BT * V + o_tv)
        b_k = tl.load(kg + i_p * BT * K + o_t[:, None] * K + o_k[None, :])
        b_dv = b_in + tl.dot(b_k, b_dh)
        b_r = b_dv.to(dv_new.dtype.element_ty)
        tl.store(dv_new + i_p * BT * V + o_tv, b_r)
        b_w = tl.load(w + i_p * BT * K + o_kt)
        b_q = tl.load(qg + i_p * BT * K + o_kt)
        b_ds *= tl.math.exp2(b_last)[:, None]
        b_ds = tl.dot(b_q, b_do, b_ds)
        b_ds -= tl.dot(b_w, b_r)
        b_in = b_next
        if i_e >= 0:
            b_ds += tl.load(dpool + (i_e * H + i_h) * K * V + o_s)
        i_e = i_next
    i_d = tl.load(init_slot + i_n).to(tl.int64)
    if i_d >= 0:
        tl.store(dinit + (i_d * H + i_h) * K * V + o_s, b_ds)


class Split:
    """Stands for ``chunk_forward``: gates, norms and decayed rows first, pair products in a second kernel."""

    def __init__(self, pairs: Any, BC: int, gates: dict[str, int], sums: bool = True) -> None:
        self._pairs, self._BC, self._gates, self._sums = pairs, BC, gates, sums
        self.parts = {"gates": globals()["gates"], "pairs": pairs}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self._launch, grid[0])

    def _launch(self, programs: int, *args: Any, H: int, K: int, V: int, BT: int, BC: int, **options: Any) -> None:
        q, k, v, f, b, A_log, dt_bias, packed_row, w, u, qg, kg, g, Aqk, Akk, row, lower_bound, scale, NS, first = args
        BK = min(self._gates["BK"], K)
        self.parts["gates"][(programs * (K // BK),)](
            q, k, f, b, A_log, dt_bias, packed_row, qg, kg, g, row, lower_bound, scale, NS, first * (K // BK),
            H=H, K=K, BT=BT, SUMS=self._sums, WIDE=options["WIDE"], **(self._gates | {"BK": BK}),
        )  # fmt: skip
        if "BW" in options:
            options["BW"] = min(options["BW"], K)
        self.parts["pairs"][(programs,)](
            q, k, v, packed_row, w, u, g, Aqk, Akk, row, scale, NS, first,
            H=H, K=K, V=V, BT=BT, BC=self._BC, **options,
        )  # fmt: skip


class Blocks:
    """A kernel that takes another block size than the launches give."""

    def __init__(self, kernel: Any, BC: int) -> None:
        self._kernel, self._BC = kernel, BC

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> Any:
            return self._kernel[grid](*args, **(options | {"BC": self._BC}))

        return launch


def _keys(bv: int, stages: int, sums: bool, **more: Any) -> Config:
    return Config({"BK": 32, "BV": bv}, 4, stages, {"WIDE": False, "PARTS": 2, "BC": 32, "SUMS": sums, **more})


def _pairs(stages: int, bk: int = 32, bv: int = 64, **more: Any) -> Config:
    return Config({"BK": bk, "BV": bv}, 4, stages, {"WIDE": False, "SOLVE": "tf32", **more})


SMALL, HALF, WIDE, WHOLE = ({"BK": bk, "num_warps": w} for bk, w in ((32, 4), (64, 4), (64, 8), (128, 8)))
ALTERNATIVES: list[tuple[str, str, Any, Config]] = [
    ("pinned", "chunk_backward_keys", chunk_backward_keys, HOPPER["chunk_backward_keys"]),
    ("loads first", "chunk_backward_keys", keys, _keys(64, 3, True)),
    ("loads first, 2 stages", "chunk_backward_keys", keys, _keys(64, 2, True)),
    ("loads first, 32 values", "chunk_backward_keys", keys, _keys(32, 3, True)),
    ("loads first, all values at once", "chunk_backward_keys", keys, _keys(128, 1, True)),
    ("loads first, cumsum", "chunk_backward_keys", keys, _keys(64, 3, False)),
    ("loads first, 168 registers", "chunk_backward_keys", keys, _keys(64, 2, True, maxnreg=168)),
    ("pinned", "chunk_forward", chunk_forward, HOPPER["chunk_forward"]),
    ("split, blocks of 32", "chunk_forward", Split(pairs_32, 32, SMALL), _pairs(2, BW=32)),
    ("split, blocks of 32, wide W", "chunk_forward", Split(pairs_32, 32, WIDE), _pairs(2, 32, 128, BW=128)),
    ("split, blocks of 32, 64-wide W", "chunk_forward", Split(pairs_32, 32, HALF), _pairs(3, 32, 128, BW=64)),
    ("split, blocks of 32, wide", "chunk_forward", Split(pairs_32, 32, WHOLE), _pairs(2, 64, 64, BW=64)),
    (
        "split, blocks of 32, 1 stage",
        "chunk_forward",
        Split(pairs_32, 32, WHOLE | {"maxnreg": 128}),
        _pairs(1, 64, 128, BW=128),
    ),
    ("split, blocks of 16", "chunk_forward", Split(pairs_16, 16, WIDE), _pairs(2)),
    ("split, blocks of 16, 168 registers", "chunk_forward", Split(pairs_16, 16, WIDE), _pairs(2, maxnreg=168)),
    ("split, blocks of 16, cumsum", "chunk_forward", Split(pairs_16, 16, SMALL, False), _pairs(2)),
    ("one kernel, blocks of 32", "chunk_forward", Blocks(fused, 32), _pairs(2, SUMS=True)),
    ("pinned", "state_scan_forward", state_scan_forward, HOPPER["state_scan_forward"]),
    ("loads early", "state_scan_forward", scan_forward, Config({"BV": 32}, 4, 3)),
    ("loads early, 16 values", "state_scan_forward", scan_forward, Config({"BV": 16}, 4, 3)),
    ("loads early, 4 stages", "state_scan_forward", scan_forward, Config({"BV": 32}, 4, 4)),
    ("pinned", "state_scan_backward", state_scan_backward, HOPPER["state_scan_backward"]),
    ("loads early", "state_scan_backward", scan_backward, Config({"BV": 32}, 4, 3)),
    ("loads early, 2 stages", "state_scan_backward", scan_backward, Config({"BV": 32}, 4, 2)),
    ("loads early, 16 values", "state_scan_backward", scan_backward, Config({"BV": 16}, 4, 3)),
    ("loads a chunk ahead", "state_scan_backward", scan_backward_ahead, Config({"BV": 32}, 4, 3)),
]
"""Label, name in ``launches``, what stands for it there, configuration."""
