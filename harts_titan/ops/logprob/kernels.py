"""Triton kernels around the head's matrix products: one pass over logits forward, one backward.

Letters: T rows, S positions, W columns of the logits at hand (a block of the vocabulary), NB column tiles.

Logits are cut into tiles of BW columns on a grid that starts at the vocabulary's (or its shard's) first word, and tile
results are combined in tile order: neither the other rows nor the width of a block change a row's bits. There are no
atomics; every output has one writer.
"""

import triton
import triton.language as tl


@triton.jit
def tile_statistics(
    z, tile_max, tile_sum, tile_slope, T, W, z_stride, first_tile, NT, BT: tl.constexpr, BW: tl.constexpr
):
    """Per row and tile: ``m = max z``, ``sum exp(z - m)`` and ``sum exp(z - m) (z - m)``; outputs are (NB, T)."""
    pid = tl.program_id(0)
    i_w = pid % NT
    o_t = ((pid // NT) * BT + tl.arange(0, BT)).to(tl.int64)
    o_w = i_w * BW + tl.arange(0, BW)
    m_t = o_t < T
    m_w = o_w < W
    b_z = tl.load(z + o_t[:, None] * z_stride + o_w[None, :], mask=m_t[:, None] & m_w[None, :], other=float("-inf"))
    b_z = tl.where(m_t[:, None], b_z.to(tl.float32), 0.0)
    b_m = tl.max(b_z, 1)
    b_d = tl.where(m_w[None, :], b_z - b_m[:, None], 0.0)
    b_p = tl.where(m_w[None, :], tl.exp(b_d), 0.0)
    o_out = (first_tile + i_w).to(tl.int64) * T + o_t
    tl.store(tile_max + o_out, b_m, mask=m_t)
    tl.store(tile_sum + o_out, tl.sum(b_p, 1), mask=m_t)
    tl.store(tile_slope + o_out, tl.sum(b_p * b_d, 1), mask=m_t)


@triton.jit
def combine_tiles(tile_max, tile_sum, tile_slope, row_max, row_sum, row_slope, T, NB, BT: tl.constexpr):
    """The three statistics of whole rows, from those of their tiles, in tile order."""
    o_t = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    m_t = o_t < T
    b_m = tl.full([BT], float("-inf"), dtype=tl.float32)
    o_in = o_t
    for _ in range(NB):
        b_m = tl.maximum(b_m, tl.load(tile_max + o_in, mask=m_t, other=0.0))
        o_in += T
    b_s = tl.zeros([BT], dtype=tl.float32)
    b_u = tl.zeros([BT], dtype=tl.float32)
    o_in = o_t
    for _ in range(NB):
        b_d = tl.load(tile_max + o_in, mask=m_t, other=0.0) - b_m
        b_f = tl.exp(b_d)
        b_p = tl.load(tile_sum + o_in, mask=m_t, other=0.0)
        b_s += b_f * b_p
        b_u += b_f * (tl.load(tile_slope + o_in, mask=m_t, other=0.0) + b_d * b_p)
        o_in += T
    tl.store(row_max + o_t, b_m, mask=m_t)
    tl.store(row_sum + o_t, b_s, mask=m_t)
    tl.store(row_slope + o_t, b_u, mask=m_t)


@triton.jit
def gather_labels(z, row, label, out, S, W, z_stride, first_word, BS: tl.constexpr):
    """``out[s] = z[row[s], label[s] - first_word]`` for the positions whose label is among the W words at hand."""
    o_s = (tl.program_id(0) * BS + tl.arange(0, BS)).to(tl.int64)
    m_s = o_s < S
    b_w = tl.load(label + o_s, mask=m_s, other=-1).to(tl.int64) - first_word
    m_s = m_s & (b_w >= 0) & (b_w < W)
    b_t = tl.load(row + o_s, mask=m_s, other=0).to(tl.int64)
    b_z = tl.load(z + b_t * z_stride + b_w, mask=m_s, other=0.0)
    tl.store(out + o_s, b_z.to(tl.float32), mask=m_s)


@triton.jit
def segment_sums(value, index, begin, end, out, N, B: tl.constexpr):
    """``out[n] = sum of value[index[begin[n]:end[n]]]``, B at a time, in order."""
    i_n = tl.program_id(0).to(tl.int64)
    i_p = tl.load(begin + i_n)
    i_e = tl.load(end + i_n)
    b_a = tl.zeros([B], dtype=tl.float32)
    while i_p < i_e:
        o_p = i_p + tl.arange(0, B)
        m_p = o_p < i_e
        b_i = tl.load(index + o_p, mask=m_p, other=0)
        b_a += tl.load(value + b_i, mask=m_p, other=0.0)
        i_p += B
    tl.store(out + i_n, tl.sum(b_a, 0))


@triton.jit
def logit_gradients(
    z,
    dz,
    row_lse,
    row_entropy,
    row_gradient,
    dentropy,
    T,
    W,
    z_stride,
    dz_stride,
    NT,
    BT: tl.constexpr,
    BW: tl.constexpr,
):
    """``dz = -p (G + e (log p + entropy))``: the gradient without the labels' own terms. ``dz`` may be ``z``."""
    pid = tl.program_id(0)
    o_t = ((pid // NT) * BT + tl.arange(0, BT)).to(tl.int64)
    o_w = (pid % NT) * BW + tl.arange(0, BW)
    m_t = o_t < T
    m_tw = m_t[:, None] & (o_w < W)[None, :]
    b_lse = tl.load(row_lse + o_t, mask=m_t, other=0.0)
    b_h = tl.load(row_entropy + o_t, mask=m_t, other=0.0)
    b_g = tl.load(row_gradient + o_t, mask=m_t, other=0.0)
    b_e = tl.load(dentropy + o_t, mask=m_t, other=0.0)
    b_z = tl.load(z + o_t[:, None] * z_stride + o_w[None, :], mask=m_tw, other=0.0).to(tl.float32)
    b_l = b_z - b_lse[:, None]
    # G + e (l + h) = (G + e h) + e l: one product per element.
    b_d = -tl.exp(b_l) * ((b_g + b_e * b_h)[:, None] + b_e[:, None] * b_l)
    tl.store(dz + o_t[:, None] * dz_stride + o_w[None, :], b_d.to(dz.dtype.element_ty), mask=m_tw)


@triton.jit
def label_gradients(
    dz,
    key,
    index,
    group_end,
    group_gradient,
    label_logit,
    row_lse,
    row_entropy,
    row_gradient,
    dentropy,
    S,
    W,
    dz_stride,
    first_word,
    BS: tl.constexpr,
):
    """Overwrite the logits' gradients at labels with the whole sum; positions of one (row, label) have one writer."""
    o_s = (tl.program_id(0) * BS + tl.arange(0, BS)).to(tl.int64)
    m_s = o_s < S
    b_k = tl.load(key + o_s, mask=m_s, other=0)
    b_w = (b_k & 0xFFFFFFFF) - first_word
    m_s = m_s & (b_w >= 0) & (b_w < W) & (tl.load(group_end + o_s, mask=m_s, other=0) > o_s)
    b_t = b_k >> 32
    b_i = tl.load(index + o_s, mask=m_s, other=0)
    b_l = tl.load(label_logit + b_i, mask=m_s, other=0.0) - tl.load(row_lse + b_t, mask=m_s, other=0.0)
    b_g = tl.load(row_gradient + b_t, mask=m_s, other=0.0)
    b_e = tl.load(dentropy + b_t, mask=m_s, other=0.0)
    b_h = tl.load(row_entropy + b_t, mask=m_s, other=0.0)
    b_d = tl.load(group_gradient + o_s, mask=m_s, other=0.0) - tl.exp(b_l) * ((b_g + b_e * b_h) + b_e * b_l)
    tl.store(dz + b_t * dz_stride + b_w, b_d.to(dz.dtype.element_ty), mask=m_s)
