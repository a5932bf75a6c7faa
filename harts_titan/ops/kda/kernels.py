"""Triton kernels of KDA's state recurrence over packed tree sequences.

What a tree needs beyond a scan: the carried float32 state leaves at any chunk boundary (not a copy rounded to the
activation dtype), gradients of those exported states enter the reverse scan, a state pool feeds the initial states, and
every sum over several consumers runs in a fixed order.

Letters: ``Q`` packed sequences, ``H`` heads, ``K``/``V`` key/value width, ``BT`` rows of a chunk. Rows come as tiles,
``[C, H, BT, width]`` over the chunks of all sequences (``chunk_kernels.py``). Boundary ``c`` of sequence ``n`` (state
after ``c`` full chunks, the last one after the last token) has index ``chunk_offset[n] + n + c``. Names: ``i_`` index,
``o_`` offsets, ``m_`` mask, ``b_`` block.

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
        # Before the first product, not where they are used: a scan would wait for them in every chunk.
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
    # Every sequence has a row, so a last chunk.
    b_in = tl.load(dv + ((i_c0 + NT - 1) * H + i_h) * BT * V + o_tv)
    i_e = tl.load(export_row + i_b0 + NT - 1).to(tl.int64)
    for i_r in range(0, NT):
        i_t = NT - 1 - i_r
        i_p = (i_c0 + i_t) * H + i_h
        # Before the first product and a chunk ahead: a scan would wait for them in every chunk.
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
def fan_in_copies(
    dq_copy,
    dk_copy,
    dv_copy,
    df_copy,
    db_copy,
    dq,
    dk,
    dv,
    df,
    db,
    shared_row,
    shared_ptr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
):
    """Gradient of a path row that several packed rows read, or none: float32 sums in packed order, rounded once."""
    pid = tl.program_id(0)
    i_h = pid % H
    i_f = pid // H
    i_y = tl.load(shared_row + i_f).to(tl.int64) * H + i_h
    o_k = tl.arange(0, K)
    o_v = tl.arange(0, V)
    b_q = tl.zeros([K], dtype=tl.float32)
    b_k = tl.zeros([K], dtype=tl.float32)
    b_f = tl.zeros([K], dtype=tl.float32)
    b_v = tl.zeros([V], dtype=tl.float32)
    b_b = 0.0
    for i_m in range(tl.load(shared_ptr + i_f), tl.load(shared_ptr + i_f + 1)):
        i_s = i_m * H + i_h
        b_q += tl.load(dq_copy + i_s * K + o_k)
        b_k += tl.load(dk_copy + i_s * K + o_k)
        b_f += tl.load(df_copy + i_s * K + o_k)
        b_v += tl.load(dv_copy + i_s * V + o_v)
        b_b += tl.load(db_copy + i_s)
    tl.store(dq + i_y * K + o_k, b_q.to(dq.dtype.element_ty))
    tl.store(dk + i_y * K + o_k, b_k.to(dk.dtype.element_ty))
    tl.store(df + i_y * K + o_k, b_f.to(df.dtype.element_ty))
    tl.store(dv + i_y * V + o_v, b_v.to(dv.dtype.element_ty))
    tl.store(db + i_y, b_b)
