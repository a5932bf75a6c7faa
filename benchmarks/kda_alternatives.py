"""Other versions of KDA's state scans, timed by ``gpu_kda.py`` (section ``alternatives``).

Same arithmetic in the same order as the pinned ones; what a chunk needs beside the operands of its first product is
loaded before that product, or a chunk ahead.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from harts_titan.ops.kda.configs import HOPPER, Config
from harts_titan.ops.kda.kernels import state_scan_backward, state_scan_forward


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


ALTERNATIVES: list[tuple[str, str, Any, Config]] = [
    ("pinned", "state_scan_forward", state_scan_forward, HOPPER["state_scan_forward"]),
    ("loads early", "state_scan_forward", scan_forward, HOPPER["state_scan_forward"]),
    ("pinned", "state_scan_backward", state_scan_backward, HOPPER["state_scan_backward"]),
    ("loads early", "state_scan_backward", scan_backward, HOPPER["state_scan_backward"]),
    ("loads a chunk ahead", "state_scan_backward", scan_backward_ahead, HOPPER["state_scan_backward"]),
]
"""Label, name in ``launches``, what stands for it there, configuration."""
PINNED = ("state_scan_forward: pinned", "state_scan_backward: pinned")
EARLY = ("state_scan_forward: loads early", "state_scan_backward: loads a chunk ahead")
"""The pair that the verdict is about."""
