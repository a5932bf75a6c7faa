"""Triton kernels of the short convolution along tree paths.

Every row gathers its taps from the true previous tokens of its path, so no kernel knows about segments. Gradients are
sums over the rows that read a row, taken in a fixed order (no atomics): ``dx`` over an inverse tap table, the weight
gradient over row blocks. ``tap`` is (T, W), oldest tap first, -1 before the root.

Sums over taps run in float32 in tap order, whatever else is in the call: a row's bits depend on its path alone.
"""

import triton
import triton.language as tl


@triton.jit
def conv_forward(x, weight, tap, y, T, D, x_stride, W: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr):
    """``y[t] = silu(sum_j x[tap[t, j]] * weight[:, j])``."""
    ND = (D + BD - 1) // BD
    pid = tl.program_id(0)
    o_t = ((pid // ND) * BT + tl.arange(0, BT)).to(tl.int64)
    o_d = (pid % ND) * BD + tl.arange(0, BD)
    m_t = o_t < T
    m_d = o_d < D
    b_a = tl.zeros([BT, BD], dtype=tl.float32)
    for j in tl.static_range(W):
        i_x = tl.load(tap + o_t * W + j, mask=m_t, other=-1).to(tl.int64)
        b_w = tl.load(weight + o_d * W + j, mask=m_d, other=0.0).to(tl.float32)
        m_x = (i_x >= 0)[:, None] & m_d[None, :]
        b_x = tl.load(x + i_x[:, None] * x_stride + o_d[None, :], mask=m_x, other=0.0).to(tl.float32)
        b_a += b_x * b_w[None, :]
    b_y = b_a * tl.sigmoid(b_a)
    tl.store(y + o_t[:, None] * D + o_d[None, :], b_y.to(y.dtype.element_ty), mask=m_t[:, None] & m_d[None, :])


@triton.jit
def conv_backward_sum(x, weight, tap, dy, da, dw, T, D, x_stride, W: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr):
    """Gradient ``da`` of the tap sum (silu undone), and each row block's share of the weight gradient."""
    ND = (D + BD - 1) // BD
    pid = tl.program_id(0)
    i_t = (pid // ND).to(tl.int64)
    o_t = i_t * BT + tl.arange(0, BT)
    o_d = (pid % ND) * BD + tl.arange(0, BD)
    m_t = o_t < T
    m_d = o_d < D
    m_td = m_t[:, None] & m_d[None, :]
    b_a = tl.zeros([BT, BD], dtype=tl.float32)
    for j in tl.static_range(W):
        i_x = tl.load(tap + o_t * W + j, mask=m_t, other=-1).to(tl.int64)
        b_w = tl.load(weight + o_d * W + j, mask=m_d, other=0.0).to(tl.float32)
        m_x = (i_x >= 0)[:, None] & m_d[None, :]
        b_x = tl.load(x + i_x[:, None] * x_stride + o_d[None, :], mask=m_x, other=0.0).to(tl.float32)
        b_a += b_x * b_w[None, :]
    b_s = tl.sigmoid(b_a)
    b_g = tl.load(dy + o_t[:, None] * D + o_d[None, :], mask=m_td, other=0.0).to(tl.float32)
    b_g = b_g * (b_s * (1.0 + b_a * (1.0 - b_s)))
    tl.store(da + o_t[:, None] * D + o_d[None, :], b_g, mask=m_td)
    for j in tl.static_range(W):
        i_x = tl.load(tap + o_t * W + j, mask=m_t, other=-1).to(tl.int64)
        m_x = (i_x >= 0)[:, None] & m_d[None, :]
        b_x = tl.load(x + i_x[:, None] * x_stride + o_d[None, :], mask=m_x, other=0.0).to(tl.float32)
        tl.store(dw + (i_t * D + o_d) * W + j, tl.sum(b_g * b_x, 0), mask=m_d)


@triton.jit
def conv_backward_input(da, weight, reader_ptr, reader_row, reader_tap, dx, D, W: tl.constexpr, BD: tl.constexpr):
    """``dx[y] = sum of da[reader] * weight[:, tap]`` over the rows that read path row ``y``, in table order."""
    ND = (D + BD - 1) // BD
    pid = tl.program_id(0)
    i_y = (pid // ND).to(tl.int64)
    o_d = (pid % ND) * BD + tl.arange(0, BD)
    m_d = o_d < D
    b_a = tl.zeros([BD], dtype=tl.float32)
    for i_p in range(tl.load(reader_ptr + i_y), tl.load(reader_ptr + i_y + 1)):
        i_t = tl.load(reader_row + i_p).to(tl.int64)
        j = tl.load(reader_tap + i_p)
        b_g = tl.load(da + i_t * D + o_d, mask=m_d, other=0.0)
        b_a += b_g * tl.load(weight + o_d * W + j, mask=m_d, other=0.0).to(tl.float32)
    tl.store(dx + i_y * D + o_d, b_a.to(dx.dtype.element_ty), mask=m_d)
