"""Triton kernels of ancestor attention over index lists; no atomics, one fixed order of sums.

Forward and the gradient of q walk a path's key tiles from position 0; tiles lie on grids of absolute positions, so a
row's result has the bits of its trajectory run alone. Gradients of k and v walk the rows that see a tile of keys.

Letters: T own rows, Y path rows, H heads, K query-key width (KA + KB, powers of two; KB = 0: one part), V value width,
M rows of a query tile, N rows of a key tile, L rows of a listed key tile (a multiple of N).

Loops over a path's keys carry the rows of the tile they are at, and load those of the next tile while they work: as
the first load of a step they would keep Triton from fetching keys and values ahead.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e30)


@triton.jit
def _product(a, aa, b, bb, KB: tl.constexpr, PRECISION: tl.constexpr):
    """``a @ b^T`` over both parts of the width."""
    s = tl.dot(a, tl.trans(b), input_precision=PRECISION)
    if KB > 0:
        s = tl.dot(aa, tl.trans(bb), s, input_precision=PRECISION)
    return s


@triton.jit
def _rows(x, rows, valid, stride_row, base, FIRST: tl.constexpr, WIDTH: tl.constexpr, CHECKED: tl.constexpr):
    """Tile of ``x`` at int64 ``rows``: columns [FIRST, FIRST + WIDTH) of one head."""
    at = x + base + rows[:, None] * stride_row + (FIRST + tl.arange(0, WIDTH))[None, :]
    if CHECKED:
        return tl.load(at, mask=valid[:, None], other=0.0)
    return tl.load(at)


@triton.jit
def _query_tile(tiles, query_chain, query_first, chain_row, chain_rows, chain_position, chain_list, M: tl.constexpr):
    """Head, own rows, which of them exist, their positions, the tile's first position, end of its keys, its list."""
    pid = tl.program_id(0)
    tile = pid % tiles
    head = (pid // tiles).to(tl.int64)
    chain = tl.load(query_chain + tile)
    first = tl.load(query_first + tile)
    size = tl.load(chain_rows + chain)
    position = tl.load(chain_position + chain)
    offset = first + tl.arange(0, M)
    valid = (offset >= 0) & (offset < size)
    rows = tl.load(chain_row + chain).to(tl.int64) + offset
    end = position + tl.minimum(first + M, size)
    return head, rows, valid, position + offset, position + first, end, tl.load(chain_list + chain)


@triton.jit
def _number(list_at, j, last, N: tl.constexpr, L: tl.constexpr):
    """Listed tile that holds key tile ``j``; the last one for tiles behind the end."""
    return tl.load(list_at + tl.minimum(j * N // L, last)).to(tl.int64)


@triton.jit
def _key_rows(rows_N, number, j, N: tl.constexpr, L: tl.constexpr):
    """Path rows of key tile ``j``: N of the L of listed tile ``number``."""
    return tl.load(rows_N + number * L + j * N % L + tl.arange(0, N))


@triton.jit
def _attend(
    j, q, qq, peak, total, o, rows, position_M, end, k, v, stride_k, base_k, stride_v, base_v, scale,
    KA: tl.constexpr, KB: tl.constexpr, V: tl.constexpr, N: tl.constexpr,
    CHECKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax; ``scale`` is in base 2, ``peak`` before it."""
    position_N = j * N + tl.arange(0, N)
    valid = position_N < end
    rows = rows.to(tl.int64)
    key = _rows(k, rows, valid, stride_k, base_k, 0, KA, CHECKED)
    rest = key
    if KB > 0:
        rest = _rows(k, rows, valid, stride_k, base_k, KA, KB, CHECKED)
    s = _product(q, qq, key, rest, KB, PRECISION)
    visible = position_N[None, :] <= position_M[:, None]
    if CHECKED:
        s = tl.where(visible, s, LOWEST)
    peak_now = tl.maximum(peak, tl.max(s, 1))
    p = tl.math.exp2(s * scale - (peak_now * scale)[:, None])
    if CHECKED:
        # A tile above the rows of a query tile that begins inside a chain may hide every key of a row.
        p = tl.where(visible, p, 0.0)
    shrink = tl.math.exp2((peak - peak_now) * scale)
    total = total * shrink + tl.sum(p, 1)
    value = _rows(v, rows, valid, stride_v, base_v, 0, V, CHECKED)
    o = o * shrink[:, None]
    o = tl.dot(p.to(value.dtype), value, o, input_precision=PRECISION)
    return peak_now, total, o


@triton.jit
def attention_forward(
    q, k, v, o, lse,
    query_chain, query_first, chain_row, chain_rows, chain_position, chain_list, list_L, rows_N,
    scale, T, tiles, q_row, q_head, k_row, k_head, v_row, v_head,
    H: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr, V: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    L: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Output (T, H, V) and base-2 log-sum-exp (H, T)."""
    head, rows, valid, position, begin, end, first = _query_tile(
        tiles, query_chain, query_first, chain_row, chain_rows, chain_position, chain_list, M
    )
    query = _rows(q, rows, valid, q_row, head * q_head, 0, KA, True)
    rest = query
    if KB > 0:
        rest = _rows(q, rows, valid, q_row, head * q_head, KA, KB, True)
    peak = tl.full([M], LOWEST, dtype=tl.float32)
    total = tl.zeros([M], dtype=tl.float32)
    out = tl.zeros([M, V], dtype=tl.float32)
    scale_2 = scale * LOG2_E
    list_at = list_L + first
    last = tl.cdiv(end, L) - 1
    rows_j = _key_rows(rows_N, _number(list_at, 0, last, N, L), 0, N, L)
    number = _number(list_at, 1, last, N, L)
    # Whole tiles end at or above the tile's first position, which depends on the grid alone.
    whole = begin // N
    for j in range(0, whole):
        following = _key_rows(rows_N, number, j + 1, N, L)
        number = _number(list_at, j + 2, last, N, L)
        peak, total, out = _attend(
            j, query, rest, peak, total, out, rows_j, position, end, k, v, k_row, head * k_head, v_row, head * v_head,
            scale_2, KA, KB, V, N, False, PRECISION,
        )  # fmt: skip
        rows_j = following
    for j in range(whole, tl.cdiv(end, N)):
        following = _key_rows(rows_N, number, j + 1, N, L)
        number = _number(list_at, j + 2, last, N, L)
        peak, total, out = _attend(
            j, query, rest, peak, total, out, rows_j, position, end, k, v, k_row, head * k_head, v_row, head * v_head,
            scale_2, KA, KB, V, N, True, PRECISION,
        )  # fmt: skip
        rows_j = following
    total = tl.where(valid, total, 1.0)
    out = out / total[:, None]
    at = (rows * H + head)[:, None] * V + tl.arange(0, V)[None, :]
    tl.store(o + at, out.to(o.dtype.element_ty), mask=valid[:, None])
    tl.store(lse + head * T + rows, peak * scale_2 + tl.math.log2(total), mask=valid)


@triton.jit
def _query_gradient(
    j, q, qq, do, lse, delta, dq, dqq, rows, position_M, end, k, v, stride_k, base_k, stride_v, base_v, scale,
    KA: tl.constexpr, KB: tl.constexpr, V: tl.constexpr, N: tl.constexpr,
    CHECKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    position_N = j * N + tl.arange(0, N)
    valid = position_N < end
    rows = rows.to(tl.int64)
    key = _rows(k, rows, valid, stride_k, base_k, 0, KA, CHECKED)
    rest = key
    if KB > 0:
        rest = _rows(k, rows, valid, stride_k, base_k, KA, KB, CHECKED)
    p = tl.math.exp2(_product(q, qq, key, rest, KB, PRECISION) * scale - lse[:, None])
    if CHECKED:
        p = tl.where(position_N[None, :] <= position_M[:, None], p, 0.0)
    value = _rows(v, rows, valid, stride_v, base_v, 0, V, CHECKED)
    ds = p * (tl.dot(do, tl.trans(value), input_precision=PRECISION) - delta[:, None])
    ds = ds.to(key.dtype)
    dq = tl.dot(ds, key, dq, input_precision=PRECISION)
    if KB > 0:
        dqq = tl.dot(ds, rest, dqq, input_precision=PRECISION)
    return dq, dqq


@triton.jit
def attention_query_gradient(
    q, k, v, o, do, lse, delta, dq,
    query_chain, query_first, chain_row, chain_rows, chain_position, chain_list, list_L, rows_N,
    scale, T, tiles, q_row, q_head, k_row, k_head, v_row, v_head, do_row, do_head,
    H: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr, V: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    L: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradient of q (T, H, K), and ``delta = sum(do * o)`` (H, T) for the other kernel."""
    head, rows, valid, position, begin, end, first = _query_tile(
        tiles, query_chain, query_first, chain_row, chain_rows, chain_position, chain_list, M
    )
    query = _rows(q, rows, valid, q_row, head * q_head, 0, KA, True)
    rest = query
    if KB > 0:
        rest = _rows(q, rows, valid, q_row, head * q_head, KA, KB, True)
    dout = _rows(do, rows, valid, do_row, head * do_head, 0, V, True)
    out = _rows(o, rows, valid, H * V, head * V, 0, V, True)
    mean = tl.sum(dout.to(tl.float32) * out.to(tl.float32), 1)
    tl.store(delta + head * T + rows, mean, mask=valid)
    # Rows that are not the chain's see nothing: exp2(0 - large) = 0.
    peak = tl.load(lse + head * T + rows, mask=valid, other=-LOWEST)
    first_part = tl.zeros([M, KA], dtype=tl.float32)
    second_part = first_part
    if KB > 0:
        second_part = tl.zeros([M, KB], dtype=tl.float32)
    scale_2 = scale * LOG2_E
    list_at = list_L + first
    last = tl.cdiv(end, L) - 1
    rows_j = _key_rows(rows_N, _number(list_at, 0, last, N, L), 0, N, L)
    number = _number(list_at, 1, last, N, L)
    whole = begin // N
    for j in range(0, whole):
        following = _key_rows(rows_N, number, j + 1, N, L)
        number = _number(list_at, j + 2, last, N, L)
        first_part, second_part = _query_gradient(
            j, query, rest, dout, peak, mean, first_part, second_part, rows_j, position, end, k, v, k_row,
            head * k_head, v_row, head * v_head, scale_2, KA, KB, V, N, False, PRECISION,
        )  # fmt: skip
        rows_j = following
    for j in range(whole, tl.cdiv(end, N)):
        following = _key_rows(rows_N, number, j + 1, N, L)
        number = _number(list_at, j + 2, last, N, L)
        first_part, second_part = _query_gradient(
            j, query, rest, dout, peak, mean, first_part, second_part, rows_j, position, end, k, v, k_row,
            head * k_head, v_row, head * v_head, scale_2, KA, KB, V, N, True, PRECISION,
        )  # fmt: skip
        rows_j = following
    at = (rows * H + head)[:, None] * (KA + KB)
    column = tl.arange(0, KA)[None, :]
    tl.store(dq + at + column, (first_part * scale).to(dq.dtype.element_ty), mask=valid[:, None])
    if KB > 0:
        column = KA + tl.arange(0, KB)[None, :]
        tl.store(dq + at + column, (second_part * scale).to(dq.dtype.element_ty), mask=valid[:, None])


@triton.jit
def attention_key_gradients(
    q, k, v, do, lse, delta, dk, dv, tin,
    key_row, key_rows, key_runs, runs,
    scale, T, X, tiles, q_row, q_head, k_row, k_head, v_row, v_head, do_row, do_head,
    H: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr, V: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of keys (Y, H, K) and values (Y, H, V), from the own rows that see them, in row order."""
    pid = tl.program_id(0)
    tile = pid % tiles
    head = (pid // tiles).to(tl.int64)
    first = tl.load(key_row + tile)
    valid_N = tl.arange(0, N) < tl.load(key_rows + tile)
    rows_N = first.to(tl.int64) + tl.arange(0, N)
    key = _rows(k, rows_N, valid_N, k_row, head * k_head, 0, KA, True)
    rest = key
    if KB > 0:
        rest = _rows(k, rows_N, valid_N, k_row, head * k_head, KA, KB, True)
    value = _rows(v, rows_N, valid_N, v_row, head * v_head, 0, V, True)
    number_N = tl.load(tin + rows_N, mask=valid_N, other=2147483647)
    dkey = tl.zeros([N, KA], dtype=tl.float32)
    drest = dkey
    if KB > 0:
        drest = tl.zeros([N, KB], dtype=tl.float32)
    dvalue = tl.zeros([N, V], dtype=tl.float32)
    scale_2 = scale * LOG2_E
    for run in range(tl.load(key_runs + 2 * tile), tl.load(key_runs + 2 * tile + 1)):
        begin = tl.load(runs + 2 * run)
        end = tl.load(runs + 2 * run + 1)
        # Rows of the tile's own segment above it see none of its keys.
        begin = tl.where((begin <= first - X) & (first - X < end), first - X, begin)
        for i in range(begin, end, M):
            rows = i + tl.arange(0, M)
            valid = rows < end
            rows = rows.to(tl.int64)
            query = _rows(q, rows, valid, q_row, head * q_head, 0, KA, True)
            query_rest = query
            if KB > 0:
                query_rest = _rows(q, rows, valid, q_row, head * q_head, KA, KB, True)
            dout = _rows(do, rows, valid, do_row, head * do_head, 0, V, True)
            peak = tl.load(lse + head * T + rows, mask=valid, other=0.0)
            mean = tl.load(delta + head * T + rows, mask=valid, other=0.0)
            number = tl.load(tin + X + rows, mask=valid, other=-1)
            p = tl.math.exp2(_product(key, rest, query, query_rest, KB, PRECISION) * scale_2 - peak[None, :])
            p = tl.where(number_N[:, None] <= number[None, :], p, 0.0)
            dvalue = tl.dot(p.to(dout.dtype), dout, dvalue, input_precision=PRECISION)
            ds = p * (tl.dot(value, tl.trans(dout), input_precision=PRECISION) - mean[None, :])
            ds = ds.to(query.dtype)
            dkey = tl.dot(ds, query, dkey, input_precision=PRECISION)
            if KB > 0:
                drest = tl.dot(ds, query_rest, drest, input_precision=PRECISION)
    at = (rows_N * H + head)[:, None] * (KA + KB)
    column = tl.arange(0, KA)[None, :]
    tl.store(dk + at + column, (dkey * scale).to(dk.dtype.element_ty), mask=valid_N[:, None])
    if KB > 0:
        column = KA + tl.arange(0, KB)[None, :]
        tl.store(dk + at + column, (drest * scale).to(dk.dtype.element_ty), mask=valid_N[:, None])
    at = (rows_N * H + head)[:, None] * V + tl.arange(0, V)[None, :]
    tl.store(dv + at, dvalue.to(dv.dtype.element_ty), mask=valid_N[:, None])
