"""Triton kernels of the short convolution along tree paths: what both passes share, and the forward pass.

A program owns ``BT`` output rows and ``BD`` channels and walks down the rows, the values of the last taps in registers:
every input is read once, and in the backward pass the gradient of the tap sum never leaves the registers. What a row
reads is given by tables (``taps.ChainTables``), so the rows may be any tree:

* a *chain* is a run of rows each of which continues the path of the row before; its first row, the *head*, loads the
  taps of its own path;
* a gradient sum belongs to one chain and one path row. The sum of a path row that no other chain reads goes to ``dx``,
  the others to a float32 slot each, and ``conv_backward_join`` adds the slots of a row in table order.

Groups of ``U`` rows inside a chain, whose path rows are consecutive, are *plain*: their addresses are known without the
tables and all their loads are issued at once. In the backward pass some of their sums may need slots. Other groups read
``ANY`` rows of any chains at a time, and the taps of all heads among them. No atomics: repeats are bit-equal.

Taps are numbered 0 (oldest) to 3 (the row itself); a filter with ``W < 4`` taps has zero weights in front. Sums over
taps run in float32 in tap order by fused multiply-adds: a row's bits depend on its path alone.
"""

# ruff: noqa: RUF005  (Triton has no starred tuples)
# mypy: disable-error-code="assignment,var-annotated"
# (tuples that grow while a loop is unrolled)

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)
HEAD = tl.constexpr(1)
LAST = tl.constexpr(2)
"""Bits of ``ChainTables.kind_T``."""


@triton.jit
def channels(i_d, D: tl.constexpr, BD: tl.constexpr):
    """Channels of block ``i_d`` and their mask, which costs nothing where blocks are full."""
    o_d = i_d * BD + tl.arange(0, BD)
    if D % BD == 0:
        m_d = tl.full([BD], True, dtype=tl.int1)
    else:
        m_d = o_d < D
    return o_d, m_d


@triton.jit
def root_sigmoid(a):
    """Half of the instructions of ``tl.sigmoid``: no cases for subnormal numbers, no division."""
    return tl.rsqrt(1.0 + tl.exp2(a * -_LOG2_E))


@triton.jit
def _silu(a):
    r = root_sigmoid(a)
    return a * (r * r)


@triton.jit
def load_weight(weight, o_d, m_d, j: tl.constexpr, W: tl.constexpr):
    """Float32 weights of tap ``j``; zeros in front of a shorter filter."""
    if j + W < 4:
        b_w = (o_d * 0).to(tl.float32)
    else:
        b_w = tl.load(weight + o_d * W + (j + W - 4), mask=m_d, other=0.0).to(tl.float32)
    return b_w


@triton.jit
def load_tap(x, x_stride, tap, i_t, o_d, m_d, j: tl.constexpr):
    """Input of tap ``j`` of row ``i_t``; zero before the root."""
    i_x = tl.load(tap + i_t * 4 + j).to(tl.int64)
    return tl.load(x + i_x * x_stride + o_d, mask=m_d & (i_x >= 0), other=0.0).to(tl.float32)


@triton.jit
def load_any(x, x_stride, tap, kind, i_t, i_e, o_d, m_d, N: tl.constexpr):
    """Bits and inputs of ``N`` rows from ``i_t`` on, of any chains: the rows, then taps 0 to 2 of heads among them.

    All loads are on their way before the first is waited for. Rows from ``i_e`` on are zeros.
    """
    kinds = ()
    index = ()
    for u in tl.static_range(N):
        m_t = i_t + u < i_e
        kinds = kinds + (tl.load(kind + i_t + u, mask=m_t, other=0).to(tl.int32),)
        for j in tl.static_range(4):
            index = index + (tl.load(tap + (i_t + u) * 4 + j, mask=m_t, other=-1).to(tl.int64),)
    rows = ()
    taps = ()
    for u in tl.static_range(N):
        i_x = index[u * 4 + 3]
        rows = rows + (tl.load(x + i_x * x_stride + o_d, mask=m_d & (i_x >= 0), other=0.0),)
        for j in tl.static_range(3):
            i_x = index[u * 4 + j]
            m_x = m_d & (i_x >= 0) & ((kinds[u] & HEAD) != 0)
            taps = taps + (tl.load(x + i_x * x_stride + o_d, mask=m_x, other=0.0),)
    return kinds, rows, taps


@triton.jit
def tap_sum(x0, x1, x2, x3, w0, w1, w2, w3):
    """Products of the taps in their order, each sum by a fused multiply-add."""
    return tl.fma(x3, w3, tl.fma(x2, w2, tl.fma(x1, w1, x0 * w0)))


@triton.jit(do_not_specialize=["T"])
def conv_forward(
    x,
    weight,
    tap,
    kind,
    base,
    y,
    T,
    D: tl.constexpr,
    x_stride: tl.constexpr,
    W: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    U: tl.constexpr,
    ANY: tl.constexpr,
):
    """``y[t] = silu(sum_j x[tap[t, j]] * weight[:, j])``; ``base`` is the first path row of a plain group, else -1."""
    ND: tl.constexpr = (D + BD - 1) // BD
    pid = tl.program_id(0)
    i_b = (pid // ND).to(tl.int64) * BT
    i_e = tl.minimum(i_b + BT, T)
    o_d, m_d = channels(pid % ND, D, BD)
    w0 = load_weight(weight, o_d, m_d, 0, W)
    w1 = load_weight(weight, o_d, m_d, 1, W)
    w2 = load_weight(weight, o_d, m_d, 2, W)
    w3 = load_weight(weight, o_d, m_d, 3, W)
    x0 = load_tap(x, x_stride, tap, i_b, o_d, m_d, 0)
    x1 = load_tap(x, x_stride, tap, i_b, o_d, m_d, 1)
    x2 = load_tap(x, x_stride, tap, i_b, o_d, m_d, 2)
    NG = tl.cdiv(i_e - i_b, U).to(tl.int32)
    i_next = tl.load(base + i_b // U).to(tl.int64)
    for i_g in range(0, NG):
        i_t = i_b + i_g * U
        i_x = i_next
        # One group ahead: the branch must not wait for it.
        i_next = tl.load(base + i_t // U + 1).to(tl.int64)
        if i_x >= 0:
            p_x = x + i_x * x_stride + o_d
            p_y = y + i_t * D + o_d
            xs = ()
            for u in tl.static_range(U):
                xs = xs + (tl.load(p_x + u * x_stride, mask=m_d, other=0.0),)
            for u in tl.static_range(U):
                x3 = xs[u].to(tl.float32)
                a = tap_sum(x0, x1, x2, x3, w0, w1, w2, w3)
                tl.store(p_y + u * D, _silu(a).to(y.dtype.element_ty), mask=m_d)
                x0 = x1
                x1 = x2
                x2 = x3
        else:
            for i_u in range(0, tl.minimum(i_e - i_t, U).to(tl.int32), ANY):
                kinds, rows, taps = load_any(x, x_stride, tap, kind, i_t + i_u, i_e, o_d, m_d, ANY)
                for u in tl.static_range(ANY):
                    is_head = (kinds[u] & HEAD) != 0
                    x0 = tl.where(is_head, taps[u * 3].to(tl.float32), x0)
                    x1 = tl.where(is_head, taps[u * 3 + 1].to(tl.float32), x1)
                    x2 = tl.where(is_head, taps[u * 3 + 2].to(tl.float32), x2)
                    x3 = rows[u].to(tl.float32)
                    a = tap_sum(x0, x1, x2, x3, w0, w1, w2, w3)
                    i_r = i_t + i_u + u
                    tl.store(y + i_r * D + o_d, _silu(a).to(y.dtype.element_ty), mask=m_d & (i_r < i_e))
                    x0 = x1
                    x1 = x2
                    x2 = x3
