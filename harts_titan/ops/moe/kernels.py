"""Triton kernels of the mixture of experts: choice, routes, moving rows, gated activation.

Letters: T rows, A experts per row, R = T * A routed rows, E experts, G expert groups, D model dim, F expert hidden dim;
EP and AP are E and A rounded up to powers of two.

Every output element has one writer, and sums run over the slots of a row in slot order or over the columns of a row in
a fixed tree: no atomics, no dependence on other rows. Only integer counts cross rows.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def _sigmoid(x, LIBDEVICE: tl.constexpr):
    # The bits of torch.sigmoid on CUDA; the interpreter has no libdevice.
    if LIBDEVICE:
        return tl.div_rn(1.0, 1.0 + libdevice.exp(-x))
    return tl.div_rn(1.0, 1.0 + tl.exp(-x))


@triton.jit
def choose_forward(
    logits,
    bias,
    previous,
    topk,
    weight,
    T,
    scale,
    E: tl.constexpr,
    G: tl.constexpr,
    TG: tl.constexpr,
    A: tl.constexpr,
    AP: tl.constexpr,
    BT: tl.constexpr,
    HAS_PREVIOUS: tl.constexpr,
    LIBDEVICE: tl.constexpr,
):
    """Best A experts by biased score inside the best TG groups, and their normalised scores; ties to lower indices."""
    o_t = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    o_e = tl.arange(0, E)
    o_a = tl.arange(0, AP)
    m_t = o_t < T
    b_x = tl.load(logits + o_t[:, None] * E + o_e[None, :], mask=m_t[:, None], other=0.0).to(tl.float32)
    b_p = _sigmoid(b_x, LIBDEVICE)
    b_s = b_p + tl.load(bias + o_e).to(tl.float32)[None, :]
    if TG < G:
        b_g = tl.reshape(b_s, [BT, G, E // G])
        b_m, b_i = tl.max(b_g, 2, return_indices=True, return_indices_tie_break_left=True)
        if E // G > 1:
            o_z = tl.arange(0, E // G)
            b_r = tl.where(o_z[None, None, :] == b_i[:, :, None], float("-inf"), b_g)
            b_m += tl.max(b_r, 2)
        o_g = tl.arange(0, G)
        b_o = tl.expand_dims(b_m, 1)
        b_c = tl.expand_dims(b_m, 2)
        m_lower = o_g[None, None, :] < o_g[None, :, None]
        b_rank = tl.sum(((b_o > b_c) | ((b_o == b_c) & m_lower)).to(tl.int32), 2)
        b_s = tl.reshape(tl.where((b_rank < TG)[:, :, None], b_g, float("-inf")), [BT, E])
    b_chosen = tl.zeros([BT, AP], dtype=tl.float32)
    b_total = tl.zeros([BT], dtype=tl.float32)
    b_index = tl.zeros([BT, AP], dtype=tl.int64)
    for a in tl.static_range(A):
        _, b_i = tl.max(b_s, 1, return_indices=True, return_indices_tie_break_left=True)
        b_s = tl.where(o_e[None, :] == b_i[:, None], float("-inf"), b_s)
        b_e = b_i.to(tl.int64)
        if HAS_PREVIOUS:
            b_old = tl.load(previous + o_t * A + a, mask=m_t, other=0)
            b_e = tl.where(b_old < 0, b_e, b_old)
        b_v = tl.sum(tl.where(o_e[None, :] == b_e[:, None], b_p, 0.0), 1)
        b_total += b_v
        b_chosen = tl.where(o_a[None, :] == a, b_v[:, None], b_chosen)
        b_index = tl.where(o_a[None, :] == a, b_e[:, None], b_index)
    b_w = tl.div_rn(b_chosen, tl.broadcast_to((b_total + 1e-20)[:, None], [BT, AP])) * scale
    m_a = m_t[:, None] & (o_a < A)[None, :]
    tl.store(topk + o_t[:, None] * A + o_a[None, :], b_index, mask=m_a)
    tl.store(weight + o_t[:, None] * A + o_a[None, :], b_w, mask=m_a)


@triton.jit
def choose_backward(
    logits,
    topk,
    dweight,
    dlogits,
    T,
    scale,
    E: tl.constexpr,
    A: tl.constexpr,
    BT: tl.constexpr,
    LIBDEVICE: tl.constexpr,
):
    """``ds_a = scale (dw_a - sum_b dw_b s_b / total) / total`` through the sigmoid; zero for the experts not chosen."""
    o_t = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    o_e = tl.arange(0, E)
    m_t = o_t < T
    b_x = tl.load(logits + o_t[:, None] * E + o_e[None, :], mask=m_t[:, None], other=0.0).to(tl.float32)
    b_p = _sigmoid(b_x, LIBDEVICE)
    b_total = tl.zeros([BT], dtype=tl.float32)
    b_inner = tl.zeros([BT], dtype=tl.float32)
    b_d = tl.zeros([BT, E], dtype=tl.float32)
    b_m = tl.zeros([BT, E], dtype=tl.int32)
    for a in tl.static_range(A):
        b_e = tl.load(topk + o_t * A + a, mask=m_t, other=0)
        b_w = tl.load(dweight + o_t * A + a, mask=m_t, other=0.0).to(tl.float32)
        m_e = o_e[None, :] == b_e[:, None]
        b_v = tl.sum(tl.where(m_e, b_p, 0.0), 1)
        b_total += b_v
        b_inner += b_w * b_v
        b_d = tl.where(m_e, b_w[:, None], b_d)
        b_m = tl.where(m_e, 1, b_m)
    b_total += 1e-20
    b_d = scale * (b_d - (b_inner / b_total)[:, None]) / b_total[:, None]
    b_d = tl.where(b_m > 0, b_d * b_p * (1.0 - b_p), 0.0)
    tl.store(dlogits + o_t[:, None] * E + o_e[None, :], b_d, mask=m_t[:, None])


@triton.jit
def route_counts(topk, block_count, R, NB, E, EP: tl.constexpr, BR: tl.constexpr):
    """Assignments of each expert in each block of BR (row, slot) pairs: (E, NB)."""
    i_b = tl.program_id(0)
    o_r = (i_b * BR + tl.arange(0, BR)).to(tl.int64)
    o_e = tl.arange(0, EP)
    b_e = tl.load(topk + o_r, mask=o_r < R, other=-1).to(tl.int32)
    b_n = tl.sum((b_e[:, None] == o_e[None, :]).to(tl.int32), 0)
    tl.store(block_count + o_e.to(tl.int64) * NB + i_b, b_n, mask=o_e < E)


@triton.jit
def route_scan(block_count, count, NB, B: tl.constexpr):
    """Assignments of one expert before each block, in place, and in all."""
    i_e = tl.program_id(0).to(tl.int64)
    b_before = tl.zeros([1], dtype=tl.int32)
    o_b = tl.arange(0, B)
    for _ in range(0, NB, B):
        m_b = o_b < NB
        b_n = tl.load(block_count + i_e * NB + o_b, mask=m_b, other=0)
        tl.store(block_count + i_e * NB + o_b, b_before + tl.cumsum(b_n, 0) - b_n, mask=m_b)
        b_before += tl.sum(b_n, 0)
        o_b += B
    tl.store(count + i_e + tl.arange(0, 1), b_before.to(tl.int64))


@triton.jit
def route_places(topk, before, count, place, order, R, NB, E, EP: tl.constexpr, BR: tl.constexpr):
    """Routed row of every (row, slot) pair and its inverse: by expert, then in the order of the pairs."""
    i_b = tl.program_id(0)
    o_i = tl.arange(0, BR)
    o_r = (i_b * BR + o_i).to(tl.int64)
    m_r = o_r < R
    b_e = tl.load(topk + o_r, mask=m_r, other=-1).to(tl.int32)
    o_e = tl.arange(0, EP)
    # Fewer than 2^31 routed rows: counts and places fit in 32 bits.
    b_n = tl.load(count + o_e, mask=o_e < E, other=0).to(tl.int32)
    b_place = tl.sum(tl.where(o_e[None, :] < b_e[:, None], b_n[None, :], 0), 1)
    b_place += tl.load(before + b_e.to(tl.int64) * NB + i_b, mask=m_r, other=0)
    b_all = tl.load(topk + i_b.to(tl.int64) * BR + o_i, mask=m_r, other=-1).to(tl.int32)
    b_place += tl.sum(((b_all[None, :] == b_e[:, None]) & (o_i[None, :] < o_i[:, None])).to(tl.int32), 1)
    b_place = b_place.to(tl.int64)
    tl.store(place + o_r, b_place, mask=m_r)
    tl.store(order + b_place, o_r, mask=m_r)


@triton.jit
def scatter_rows(x, place, out, D, x_stride, A: tl.constexpr, BD: tl.constexpr):
    """``out[place[t, a]] = x[t]``: every row is read once and written A times."""
    ND = (D + BD - 1) // BD
    pid = tl.program_id(0)
    i_t = (pid // ND).to(tl.int64)
    o_d = (pid % ND) * BD + tl.arange(0, BD)
    m_d = o_d < D
    b_x = tl.load(x + i_t * x_stride + o_d, mask=m_d, other=0.0)
    for a in tl.static_range(A):
        tl.store(out + tl.load(place + i_t * A + a) * D + o_d, b_x, mask=m_d)


@triton.jit
def sum_rows(
    y, place, weight, base, out, D, A: tl.constexpr, BD: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BASE: tl.constexpr
):
    """``out[t] = sum_a weight[t, a] y[place[t, a]] (+ base[t])``, in slot order, in float32."""
    ND = (D + BD - 1) // BD
    pid = tl.program_id(0)
    i_t = (pid // ND).to(tl.int64)
    o_d = (pid % ND) * BD + tl.arange(0, BD)
    m_d = o_d < D
    b_o = tl.zeros([BD], dtype=tl.float32)
    for a in tl.static_range(A):
        b_y = tl.load(y + tl.load(place + i_t * A + a) * D + o_d, mask=m_d, other=0.0).to(tl.float32)
        if HAS_WEIGHT:
            b_y *= tl.load(weight + i_t * A + a).to(tl.float32)
        b_o += b_y
    if HAS_BASE:
        b_o += tl.load(base + i_t * D + o_d, mask=m_d, other=0.0).to(tl.float32)
    tl.store(out + i_t * D + o_d, b_o.to(out.dtype.element_ty), mask=m_d)


@triton.jit
def combine_backward(
    dout, y, place, weight, dy, dweight, D, A: tl.constexpr, AP: tl.constexpr, BD: tl.constexpr, ND: tl.constexpr
):
    """``dy[place[t, a]] = weight[t, a] dout[t]`` and ``dweight[t, a] = <dout[t], y[place[t, a]]>``."""
    i_t = tl.program_id(0).to(tl.int64)
    o_a = tl.arange(0, AP)
    m_a = o_a < A
    b_p = tl.load(place + i_t * A + o_a, mask=m_a, other=0)
    b_w = tl.load(weight + i_t * A + o_a, mask=m_a, other=0.0).to(tl.float32)
    b_dw = tl.zeros([AP], dtype=tl.float32)
    for i_d in tl.static_range(ND):
        o_d = i_d * BD + tl.arange(0, BD)
        m_d = o_d < D
        m_ad = m_a[:, None] & m_d[None, :]
        b_g = tl.load(dout + i_t * D + o_d, mask=m_d, other=0.0).to(tl.float32)
        p_y = b_p[:, None] * D + o_d[None, :]
        b_dw += tl.sum(tl.load(y + p_y, mask=m_ad, other=0.0).to(tl.float32) * b_g[None, :], 1)
        tl.store(dy + p_y, (b_w[:, None] * b_g[None, :]).to(dy.dtype.element_ty), mask=m_ad)
    tl.store(dweight + i_t * A + o_a, b_dw.to(dweight.dtype.element_ty), mask=m_a)


@triton.jit
def activation_forward(gate, up, out, N, limit, HAS_LIMIT: tl.constexpr, B: tl.constexpr):
    """``silu(gate) up``, clamped if asked for; flat."""
    o_n = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    m_n = o_n < N
    b_g = tl.load(gate + o_n, mask=m_n, other=0.0).to(tl.float32)
    b_u = tl.load(up + o_n, mask=m_n, other=0.0).to(tl.float32)
    b_a = b_g * tl.sigmoid(b_g)
    if HAS_LIMIT:
        b_a = tl.minimum(b_a, limit)
        b_u = tl.minimum(tl.maximum(b_u, -limit), limit)
    tl.store(out + o_n, (b_a * b_u).to(out.dtype.element_ty), mask=m_n)


@triton.jit
def activation_backward(gate, up, da, dh, out, N, F, limit, HAS_LIMIT: tl.constexpr, B: tl.constexpr):
    """Gradients of gate and up as the halves of one (R, 2 F) tensor, and the activation itself again."""
    o_n = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    m_n = o_n < N
    b_g = tl.load(gate + o_n, mask=m_n, other=0.0).to(tl.float32)
    b_u = tl.load(up + o_n, mask=m_n, other=0.0).to(tl.float32)
    b_d = tl.load(da + o_n, mask=m_n, other=0.0).to(tl.float32)
    b_s = tl.sigmoid(b_g)
    b_a = b_g * b_s
    b_dg = b_s * (1.0 + b_g * (1.0 - b_s))
    b_du = tl.full([B], 1.0, dtype=tl.float32)
    if HAS_LIMIT:
        b_dg = tl.where(b_a <= limit, b_dg, 0.0)
        b_du = tl.where((b_u >= -limit) & (b_u <= limit), 1.0, 0.0)
        b_a = tl.minimum(b_a, limit)
        b_u = tl.minimum(tl.maximum(b_u, -limit), limit)
    p_h = dh + o_n + (o_n // F) * F
    tl.store(p_h, (b_d * b_u * b_dg).to(dh.dtype.element_ty), mask=m_n)
    tl.store(p_h + F, (b_d * b_a * b_du).to(dh.dtype.element_ty), mask=m_n)
    tl.store(out + o_n, (b_a * b_u).to(out.dtype.element_ty), mask=m_n)


@triton.jit
def split_parts(x, parts, N, E, B: tl.constexpr):
    """A float32 matrix (T, E) as three of 16 bits side by side, (T, 3 E): their sum has all 24 bits."""
    o_n = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    m_n = o_n < N
    b_x = tl.load(x + o_n, mask=m_n, other=0.0)
    p = parts + o_n + (o_n // E) * 2 * E
    for i in tl.static_range(3):
        b_h = b_x.to(parts.dtype.element_ty)
        tl.store(p + i * E, b_h, mask=m_n)
        b_x -= b_h.to(tl.float32)
