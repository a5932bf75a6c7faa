"""Triton kernels of the short convolution's backward pass; ``kernels.py`` explains chains, slots and groups."""

# ruff: noqa: RUF005  (Triton has no starred tuples)
# mypy: disable-error-code="assignment,var-annotated"
# (tuples that grow while a loop is unrolled)

import triton
import triton.language as tl

from harts_titan.ops.short_conv.kernels import (
    HEAD,
    LAST,
    channels,
    load_any,
    load_tap,
    load_weight,
    root_sigmoid,
    tap_sum,
)


@triton.jit
def _emit(dx, slots, target, i_t, j: tl.constexpr, b_d, D, o_d, m_d, OWNED):
    """Store the finished sum of tap ``j`` of row ``i_t``: a row of ``dx``, a slot (-2 - slot), or nothing (-1)."""
    if OWNED:
        i_o = tl.load(target + i_t * 4 + j).to(tl.int64)
        if i_o >= 0:
            tl.store(dx + i_o * D + o_d, b_d.to(dx.dtype.element_ty), mask=m_d)
        if i_o < -1:
            tl.store(slots + (-2 - i_o) * D + o_d, b_d, mask=m_d)


@triton.jit
def _put(dx, slots, goal, b_d, D, o_d, m_d):
    """:func:`_emit` of a goal that is known, without branches."""
    i_o = goal.to(tl.int64)
    tl.store(dx + i_o * D + o_d, b_d.to(dx.dtype.element_ty), mask=m_d & (i_o >= 0))
    tl.store(slots + (-2 - i_o) * D + o_d, b_d, mask=m_d & (i_o < -1))


@triton.jit
def _load_goals(target, i_t, i_e, N: tl.constexpr):
    """Where the sums go that ``N`` rows finish."""
    goals = ()
    for u in tl.static_range(N):
        goals = goals + (tl.load(target + (i_t + u) * 4, mask=i_t + u < i_e, other=-1),)
    return goals


@triton.jit
def _load_gradients(dy, i_t, i_e, D, o_d, m_d, N: tl.constexpr):
    rows = ()
    for u in tl.static_range(N):
        rows = rows + (tl.load(dy + (i_t + u) * D + o_d, mask=m_d & (i_t + u < i_e), other=0.0),)
    return rows


@triton.jit
def _silu_gradient(a, g):
    # Fused by hand: the compiler might do so in one place and not in another, and a row's bits would depend on which.
    r = root_sigmoid(a)
    return g * (r * r * tl.fma(a, tl.fma(r * -1.0, r, 1.0), 1.0))


@triton.jit
def _row(x0, x1, x2, x3, dy, w0, w1, w2, w3, d0, d1, d2, dw0, dw1, dw2, dw3):
    """Walk over one row: the sum it finishes, the sums of the next three taps, the sums of the weight gradient."""
    g = _silu_gradient(tap_sum(x0, x1, x2, x3, w0, w1, w2, w3), dy)
    return (
        tl.fma(g, w0, d0),
        tl.fma(g, w1, d1),
        tl.fma(g, w2, d2),
        g * w3,
        tl.fma(g, x0, dw0),
        tl.fma(g, x1, dw1),
        tl.fma(g, x2, dw2),
        tl.fma(g, x3, dw3),
    )


@triton.jit
def _first(i_x):
    """First path row of a group, see ``base`` of :func:`conv_backward`."""
    return tl.where(i_x >= 0, i_x, -2 - i_x)


@triton.jit
def _rows(x, i_t, stride: tl.constexpr, o_d, m_d, m_more, N: tl.constexpr):
    """``N`` rows from ``i_t`` on, or three of them."""
    p_x = x + i_t * stride + o_d
    rows = ()
    for u in tl.static_range(N):
        rows = rows + (tl.load(p_x + u * stride, mask=m_d if u < 3 else m_d & m_more),)
    return rows


@triton.jit(do_not_specialize=["T"])
def conv_backward(
    x,
    weight,
    tap,
    kind,
    base,
    target,
    dy,
    dx,
    slots,
    dw,
    T,
    D: tl.constexpr,
    x_stride: tl.constexpr,
    W: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    U: tl.constexpr,
    ANY: tl.constexpr,
):
    """Gradient of the inputs, and each row block's share (W, D) of the weight gradient.

    A block's sums also need the rows after it that read its rows: up to three more rows of its last chain are computed
    again. ``base`` is the first path row of a plain group whose finished sums go to consecutive rows of ``dx``; minus
    two minus it if they go anywhere; -1 for any other group.
    """
    ND: tl.constexpr = (D + BD - 1) // BD
    # The last rows first: they are the deepest, and short segments take longest.
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    i_n = (pid // ND).to(tl.int64)
    i_b = i_n * BT
    i_e = tl.minimum(i_b + BT, T)
    o_d, m_d = channels(pid % ND, D, BD)
    w0 = load_weight(weight, o_d, m_d, 0, W)
    w1 = load_weight(weight, o_d, m_d, 1, W)
    w2 = load_weight(weight, o_d, m_d, 2, W)
    w3 = load_weight(weight, o_d, m_d, 3, W)
    x0 = load_tap(x, x_stride, tap, i_b, o_d, m_d, 0)
    x1 = load_tap(x, x_stride, tap, i_b, o_d, m_d, 1)
    x2 = load_tap(x, x_stride, tap, i_b, o_d, m_d, 2)
    # Gradient sums of the taps in x0, x1, x2.
    d0 = tl.zeros([BD], dtype=tl.float32)
    d1 = tl.zeros([BD], dtype=tl.float32)
    d2 = tl.zeros([BD], dtype=tl.float32)
    dw0 = tl.zeros([BD], dtype=tl.float32)
    dw1 = tl.zeros([BD], dtype=tl.float32)
    dw2 = tl.zeros([BD], dtype=tl.float32)
    dw3 = tl.zeros([BD], dtype=tl.float32)
    # Sums of earlier rows belong to the block before, those of a head's taps to the block of the head.
    i_own = tl.where((tl.load(kind + i_b) & HEAD) != 0, i_b - 3, i_b)
    NG = tl.cdiv(i_e - i_b, U).to(tl.int32)
    i_last = (T + U - 1) // U
    i_next = tl.load(base + i_b // U).to(tl.int64)
    i_after = tl.load(base + tl.minimum(i_b // U + 1, i_last)).to(tl.int64)
    nx = _rows(x, _first(i_next), x_stride, o_d, m_d & (i_next != -1), True, U)
    ng = _rows(dy, i_b, D, o_d, m_d & (i_next != -1), True, U)
    for i_g in range(0, NG):
        i_t = i_b + i_g * U
        i_x = i_next
        # A group ahead, of the rows after the block only those that are computed again.
        i_next = i_after
        i_after = tl.load(base + tl.minimum(i_t // U + 2, i_last)).to(tl.int64)
        xs = nx
        gs = ng
        nx = _rows(x, _first(i_next), x_stride, o_d, m_d & (i_next != -1), i_g + 1 < NG, U)
        ng = _rows(dy, i_t + U, D, o_d, m_d & (i_next != -1), i_g + 1 < NG, U)
        if i_x >= 0:
            p_d = dx + (i_x - 3) * D + o_d
            for u in tl.static_range(U):
                x3 = xs[u].to(tl.float32)
                done, d0, d1, d2, dw0, dw1, dw2, dw3 = _row(
                    x0, x1, x2, x3, gs[u].to(tl.float32), w0, w1, w2, w3, d0, d1, d2, dw0, dw1, dw2, dw3
                )
                x0 = x1
                x1 = x2
                x2 = x3
                if u < 3:
                    tl.store(p_d + u * D, done.to(dx.dtype.element_ty), mask=m_d & (i_t + u - 3 >= i_own))
                else:
                    tl.store(p_d + u * D, done.to(dx.dtype.element_ty), mask=m_d)
        elif i_x < -1:
            goals = _load_goals(target, i_t, i_e, U)
            for u in tl.static_range(U):
                x3 = xs[u].to(tl.float32)
                done, d0, d1, d2, dw0, dw1, dw2, dw3 = _row(
                    x0, x1, x2, x3, gs[u].to(tl.float32), w0, w1, w2, w3, d0, d1, d2, dw0, dw1, dw2, dw3
                )
                x0 = x1
                x1 = x2
                x2 = x3
                if u < 3:
                    _put(dx, slots, goals[u], done, D, o_d, m_d & (i_t + u - 3 >= i_own))
                else:
                    _put(dx, slots, goals[u], done, D, o_d, m_d)
        else:
            for i_u in range(0, tl.minimum(i_e - i_t, U).to(tl.int32), ANY):
                kinds, rows, taps = load_any(x, x_stride, tap, kind, i_t + i_u, i_e, o_d, m_d, ANY)
                ds = _load_gradients(dy, i_t + i_u, i_e, D, o_d, m_d, ANY)
                goals = _load_goals(target, i_t + i_u, i_e, ANY)
                for u in tl.static_range(ANY):
                    i_r = i_t + i_u + u
                    if (kinds[u] & HEAD) != 0:
                        x0 = taps[u * 3].to(tl.float32)
                        x1 = taps[u * 3 + 1].to(tl.float32)
                        x2 = taps[u * 3 + 2].to(tl.float32)
                        d0 = tl.zeros([BD], dtype=tl.float32)
                        d1 = tl.zeros([BD], dtype=tl.float32)
                        d2 = tl.zeros([BD], dtype=tl.float32)
                        i_own = i_b - 3
                    x3 = rows[u].to(tl.float32)
                    done, d0, d1, d2, dw0, dw1, dw2, dw3 = _row(
                        x0, x1, x2, x3, ds[u].to(tl.float32), w0, w1, w2, w3, d0, d1, d2, dw0, dw1, dw2, dw3
                    )
                    x0 = x1
                    x1 = x2
                    x2 = x3
                    _put(dx, slots, goals[u], done, D, o_d, m_d & (i_r - 3 >= i_own))
                    if (kinds[u] & LAST) != 0:
                        _emit(dx, slots, target, i_r, 1, d0, D, o_d, m_d, i_r - 2 >= i_own)
                        _emit(dx, slots, target, i_r, 2, d1, D, o_d, m_d, i_r - 1 >= i_own)
                        _emit(dx, slots, target, i_r, 3, d2, D, o_d, m_d, i_r >= i_own)
    p_w = dw + i_n * W * D + o_d
    tl.store(p_w + (W - 1) * D, dw3, mask=m_d)
    if W > 1:
        tl.store(p_w + (W - 2) * D, dw2, mask=m_d)
    if W > 2:
        tl.store(p_w + (W - 3) * D, dw1, mask=m_d)
    if W > 3:
        tl.store(p_w, dw0, mask=m_d)
    # The rows after the block that read its last rows.
    if i_next >= 0:
        p_d = dx + (i_next - 3) * D + o_d
        for u in tl.static_range(3):
            x3 = nx[u].to(tl.float32)
            g = _silu_gradient(tap_sum(x0, x1, x2, x3, w0, w1, w2, w3), ng[u].to(tl.float32))
            d0 = tl.fma(g, w0, d0)
            tl.store(p_d + u * D, d0.to(dx.dtype.element_ty), mask=m_d & (i_e + u - 3 >= i_own))
            d0 = tl.fma(g, w1, d1)
            d1 = tl.fma(g, w2, d2)
            d2 = g * w3
            x0 = x1
            x1 = x2
            x2 = x3
    else:
        i_open = (tl.load(kind + i_e - 1) & LAST) == 0
        for i_u in range(0, 3):
            if i_open:
                i_r = i_e + i_u
                x3 = load_tap(x, x_stride, tap, i_r, o_d, m_d, 3)
                b_g = tl.load(dy + i_r * D + o_d, mask=m_d, other=0.0).to(tl.float32)
                g = _silu_gradient(tap_sum(x0, x1, x2, x3, w0, w1, w2, w3), b_g)
                d0 = tl.fma(g, w0, d0)
                _emit(dx, slots, target, i_r, 0, d0, D, o_d, m_d, i_r - 3 >= i_own)
                d0 = tl.fma(g, w1, d1)
                d1 = tl.fma(g, w2, d2)
                d2 = g * w3
                i_open = (tl.load(kind + i_r) & LAST) == 0
                if i_open == 0:
                    # Taps 2 and 3 of the chain's last row may lie in the block only while less than three rows were
                    # computed again.
                    _emit(dx, slots, target, i_r, 1, d0, D, o_d, m_d, (i_r - 2 >= i_own) & (i_r - 2 < i_e))
                    _emit(dx, slots, target, i_r, 2, d1, D, o_d, m_d, (i_r - 1 >= i_own) & (i_r - 1 < i_e))
                x0 = x1
                x1 = x2
                x2 = x3


@triton.jit
def conv_backward_join(slots, row, ptr, dx, D: tl.constexpr, BD: tl.constexpr):
    """``dx[row[i]] = sum of slots[ptr[i] : ptr[i + 1]]`` in order; zero for rows that nobody reads."""
    ND: tl.constexpr = (D + BD - 1) // BD
    pid = tl.program_id(0)
    i_j = pid // ND
    o_d, m_d = channels(pid % ND, D, BD)
    b_a = tl.zeros([BD], dtype=tl.float32)
    for i_s in range(tl.load(ptr + i_j), tl.load(ptr + i_j + 1)):
        b_a += tl.load(slots + tl.cast(i_s, tl.int64) * D + o_d, mask=m_d, other=0.0)
    i_y = tl.load(row + i_j).to(tl.int64)
    tl.store(dx + i_y * D + o_d, b_a.to(dx.dtype.element_ty), mask=m_d)
