"""Triton kernels of KDA's state recurrence over packed tree sequences.

What fla's chunk kernels lack and a tree needs: the carried float32 state leaves at any chunk boundary (not a copy
rounded to the activation dtype), gradients of those exported states enter the reverse scan, a state pool feeds the
initial states, and every sum over several consumers runs in a fixed order.

Letters: ``P`` packed rows, ``Q`` packed sequences, ``H`` heads, ``K``/``V`` key/value width, ``NT`` chunks of all
sequences. Boundary ``c`` of sequence ``n`` (state after ``c`` full chunks, the last one after the last token) has
index ``chunk_offset[n] + n + c``. Bodies use fla's prefixes: ``i_`` index, ``o_`` offsets, ``m_`` mask, ``b_`` block.

One program owns a ``[K, BV]`` column block of one head's state, so nothing is shared between programs. The grid is
one-dimensional (y and z hold 65,535 programs only) and row offsets are 64-bit (2**31 elements are 1M rows at
16 x 128).
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["first_sequence"])
def state_scan_forward(
    kg,
    w,
    u,
    g,
    v_new,
    h,
    pool,
    init_row,
    export_row,
    cu_seqlens,
    chunk_offset,
    first_sequence,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BV: tl.constexpr,
    STORE_EXPORTS: tl.constexpr,
):
    """Run the state over the chunks of each sequence; write ``h`` (state before each chunk), ``v_new`` and exports."""
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    i_v = pid % NV
    i_h = (pid // NV) % H
    i_n = (first_sequence + pid // (NV * H)).to(tl.int64)
    bos = tl.load(cu_seqlens + i_n).to(tl.int64)
    T = (tl.load(cu_seqlens + i_n + 1).to(tl.int64) - bos).to(tl.int32)
    i_c0 = tl.load(chunk_offset + i_n).to(tl.int64)
    i_b0 = i_c0 + i_n
    o_k = tl.arange(0, K)
    o_v = i_v * BV + tl.arange(0, BV)
    m_v = o_v < V
    o_s = o_k[:, None] * V + o_v[None, :]
    b_s = tl.zeros([K, BV], dtype=tl.float32)
    i_s = tl.load(init_row + i_n).to(tl.int64)
    if i_s >= 0:
        b_s += tl.load(pool + (i_s * H + i_h) * K * V + o_s, mask=m_v[None, :], other=0.0)
    NT = (T + BT - 1) // BT
    for i_t in range(0, NT):
        if STORE_EXPORTS:
            i_e = tl.load(export_row + i_b0 + i_t).to(tl.int64)
            if i_e >= 0:
                # The register state, before rounding: a continuation from it equals the uninterrupted scan bit for bit.
                tl.store(pool + (i_e * H + i_h) * K * V + o_s, b_s, mask=m_v[None, :])
        b_h = b_s.to(h.dtype.element_ty)
        tl.store(h + ((i_c0 + i_t) * H + i_h) * K * V + o_s, b_h, mask=m_v[None, :])
        o_t = i_t * BT + tl.arange(0, BT)
        m_t = o_t < T
        o_r = (bos + o_t) * H + i_h
        b_w = tl.load(w + o_r[:, None] * K + o_k[None, :], mask=m_t[:, None], other=0.0)
        b_u = tl.load(u + o_r[:, None] * V + o_v[None, :], mask=m_t[:, None] & m_v[None, :], other=0.0)
        b_v = b_u - tl.dot(b_w, b_h.to(b_w.dtype))
        tl.store(
            v_new + o_r[:, None] * V + o_v[None, :],
            b_v.to(v_new.dtype.element_ty),
            mask=m_t[:, None] & m_v[None, :],
        )
        i_last = tl.minimum(i_t * BT + BT, T) - 1
        b_s *= tl.math.exp2(tl.load(g + ((bos + i_last) * H + i_h) * K + o_k))[:, None]
        b_k = tl.load(kg + o_r[None, :] * K + o_k[:, None], mask=m_t[None, :], other=0.0)
        b_s = tl.dot(b_k, b_v.to(b_k.dtype), b_s)
    if STORE_EXPORTS:
        i_e = tl.load(export_row + i_b0 + NT).to(tl.int64)
        if i_e >= 0:
            tl.store(pool + (i_e * H + i_h) * K * V + o_s, b_s, mask=m_v[None, :])


@triton.jit(do_not_specialize=["first_sequence"])
def state_scan_backward(
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
    cu_seqlens,
    chunk_offset,
    first_sequence,
    scale,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BV: tl.constexpr,
):
    """Run the state gradient backwards, adding the gradient of every exported state where the scan passes it.

    ``dinit[init_slot[n]]`` receives the gradient of sequence ``n``'s initial state; slot -1 has none.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    i_v = pid % NV
    i_h = (pid // NV) % H
    i_n = (first_sequence + pid // (NV * H)).to(tl.int64)
    bos = tl.load(cu_seqlens + i_n).to(tl.int64)
    T = (tl.load(cu_seqlens + i_n + 1).to(tl.int64) - bos).to(tl.int32)
    i_c0 = tl.load(chunk_offset + i_n).to(tl.int64)
    i_b0 = i_c0 + i_n
    o_k = tl.arange(0, K)
    o_v = i_v * BV + tl.arange(0, BV)
    m_v = o_v < V
    o_s = o_k[:, None] * V + o_v[None, :]
    NT = (T + BT - 1) // BT
    b_ds = tl.zeros([K, BV], dtype=tl.float32)
    i_e = tl.load(export_row + i_b0 + NT).to(tl.int64)
    if i_e >= 0:
        b_ds += tl.load(dpool + (i_e * H + i_h) * K * V + o_s, mask=m_v[None, :], other=0.0)
    for i_r in range(0, NT):
        i_t = NT - 1 - i_r
        tl.store(dh + ((i_c0 + i_t) * H + i_h) * K * V + o_s, b_ds.to(dh.dtype.element_ty), mask=m_v[None, :])
        o_t = i_t * BT + tl.arange(0, BT)
        m_t = o_t < T
        o_r = (bos + o_t) * H + i_h
        m_tv = m_t[:, None] & m_v[None, :]
        b_do = tl.load(do + o_r[:, None] * V + o_v[None, :], mask=m_tv, other=0.0)
        b_k = tl.load(kg + o_r[:, None] * K + o_k[None, :], mask=m_t[:, None], other=0.0)
        b_dv = tl.dot(b_k, b_ds.to(b_k.dtype))
        b_dv += tl.load(dv + o_r[:, None] * V + o_v[None, :], mask=m_tv, other=0.0)
        tl.store(dv_new + o_r[:, None] * V + o_v[None, :], b_dv.to(dv_new.dtype.element_ty), mask=m_tv)
        b_w = tl.load(w + o_r[None, :] * K + o_k[:, None], mask=m_t[None, :], other=0.0)
        b_q = tl.load(qg + o_r[None, :] * K + o_k[:, None], mask=m_t[None, :], other=0.0)
        i_last = tl.minimum(i_t * BT + BT, T) - 1
        b_ds *= tl.math.exp2(tl.load(g + ((bos + i_last) * H + i_h) * K + o_k))[:, None]
        b_ds += tl.dot(b_q, b_do.to(b_q.dtype)) * scale - tl.dot(b_w, b_dv.to(b_w.dtype))
        i_e = tl.load(export_row + i_b0 + i_t).to(tl.int64)
        if i_e >= 0:
            b_ds += tl.load(dpool + (i_e * H + i_h) * K * V + o_s, mask=m_v[None, :], other=0.0)
    i_d = tl.load(init_slot + i_n).to(tl.int64)
    if i_d >= 0:
        tl.store(dinit + (i_d * H + i_h) * K * V + o_s, b_ds, mask=m_v[None, :])


@triton.jit(do_not_specialize=["first_fan"])
def fan_in_states(dinit, dpool, fan_row, fan_ptr, fan_slot, first_fan, S: tl.constexpr, BS: tl.constexpr):
    """``dpool[fan_row[i]] += sum of dinit[fan_slot[p]]`` over the sequences that start there, in order."""
    NS: tl.constexpr = (S + BS - 1) // BS
    pid = tl.program_id(0)
    i_f = first_fan + pid // NS
    i_r = tl.load(fan_row + i_f).to(tl.int64)
    o_s = (pid % NS) * BS + tl.arange(0, BS)
    m_s = o_s < S
    b_a = tl.load(dpool + i_r * S + o_s, mask=m_s, other=0.0)
    for i_p in range(tl.load(fan_ptr + i_f), tl.load(fan_ptr + i_f + 1)):
        b_a += tl.load(dinit + tl.load(fan_slot + i_p).to(tl.int64) * S + o_s, mask=m_s, other=0.0)
    tl.store(dpool + i_r * S + o_s, b_a, mask=m_s)


@triton.jit
def fan_in_rows(source, target, copy_ptr, copy_row, D, BD: tl.constexpr):
    """``target[y] = sum of source[copy_row[p]]`` over the packed copies of path row ``y``, float32, in packed order."""
    ND = (D + BD - 1) // BD
    pid = tl.program_id(0)
    i_y = (pid // ND).to(tl.int64)
    o_d = (pid % ND) * BD + tl.arange(0, BD)
    m_d = o_d < D
    b_a = tl.zeros([BD], dtype=tl.float32)
    for i_p in range(tl.load(copy_ptr + i_y), tl.load(copy_ptr + i_y + 1)):
        i_r = tl.load(copy_row + i_p).to(tl.int64)
        b_a += tl.load(source + i_r * D + o_d, mask=m_d, other=0.0).to(tl.float32)
    tl.store(target + i_y * D + o_d, b_a.to(target.dtype.element_ty), mask=m_d)
