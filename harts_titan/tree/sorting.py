"""Lexicographic order of a step's trajectories and the prefixes that neighbours share (HARTS A.1).

Shapes: S token positions of the step, N trajectories.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numba
import numpy as np

_BLOCK = 64
"""Tokens compared at once; below this LLVM unrolls the block instead of vectorising it."""

_THREAD_TOKENS = 1 << 20
"""Tokens from which a second thread pays."""


def sort_trajectories(tokens: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the lexicographic order of the trajectories and the common prefix of neighbours (HARTS A.1).

    A trajectory that is a prefix of another one comes first; equal trajectories keep their order.

    Args:
        tokens: int32 (S,) non-negative token ids, trajectories one after another.
        offsets: int64 (N+1,) trajectory ``x`` is ``tokens[offsets[x]:offsets[x+1]]``.

    Returns:
        order_N: int64, ``order_N[i]`` is the trajectory at sorted place ``i``.
        lcp_N: int64 tokens, length of the longest common prefix of places ``i-1`` and ``i``; ``lcp_N[0]`` is 0.

    Time: O(L + N log N) on two threads, where L is the sum of ``lcp_N``. Memory: O(N).
    """
    tokens = np.ascontiguousarray(tokens, dtype=np.int32)
    offsets = np.ascontiguousarray(offsets, dtype=np.int64)
    num_trajectories = offsets.shape[0] - 1
    order_N, lcp_N = np.arange(num_trajectories), np.zeros(num_trajectories, np.int64)
    spare_N, spare_lcp_N = np.empty_like(order_N), np.empty_like(lcp_N)
    # Halves of about equal size in tokens, which is what takes time.
    middle = int(np.searchsorted(offsets, offsets[0] + (offsets[-1] - offsets[0]) // 2))
    if offsets[-1] - offsets[0] < _THREAD_TOKENS or not 0 < middle < num_trajectories:
        _sort(tokens, offsets, order_N, lcp_N, spare_N, spare_lcp_N, 0, num_trajectories)
        return order_N, lcp_N
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(_sort, tokens, offsets, order_N, lcp_N, spare_N, spare_lcp_N, 0, middle)
        _sort(tokens, offsets, order_N, lcp_N, spare_N, spare_lcp_N, middle, num_trajectories)
        first.result()
    _merge(tokens, offsets, order_N, lcp_N, spare_N, spare_lcp_N, 0, middle, num_trajectories)
    return spare_N, spare_lcp_N


def neighbour_lcp(tokens: np.ndarray, offsets: np.ndarray, order_N: np.ndarray) -> np.ndarray:
    """Return the longest common prefix of each trajectory with the one before it in ``order_N``.

    Args:
        tokens: int32 (S,) token ids.
        offsets: int64 (N+1,) trajectory bounds.
        order_N: int64 (M,) trajectory indices, any order and any subset.

    Returns:
        int64 (M,) tokens; entry 0 is 0.
    """
    return _neighbour_lcp(
        np.ascontiguousarray(tokens, dtype=np.int32),
        np.ascontiguousarray(offsets, dtype=np.int64),
        np.ascontiguousarray(order_N, dtype=np.int64),
    )


@numba.njit(cache=True, nogil=True)
def _common(tokens, first, second, known, limit):
    """Return how many of the first ``limit`` tokens at two places are equal, given that ``known`` are."""
    # Unsigned indices cannot be negative: without numba's test for that, blocks become vector instructions.
    a, b, n, stop = np.uint64(first), np.uint64(second), np.uint64(known), np.uint64(limit)
    block, one = np.uint64(_BLOCK), np.uint64(1)
    while n + block <= stop:
        different = np.int32(0)
        for i in range(_BLOCK):
            at = n + np.uint64(i)
            different |= tokens[a + at] ^ tokens[b + at]
        if different != 0:
            break
        n += block
    while n < stop and tokens[a + n] == tokens[b + n]:
        n += one
    return np.int64(n)


@numba.njit(cache=True, nogil=True)
def _neighbour_lcp(tokens, offsets, order_N):
    lcp_N = np.zeros(order_N.shape[0], np.int64)
    for i in range(1, order_N.shape[0]):
        x, y = order_N[i - 1], order_N[i]
        limit = min(offsets[x + 1] - offsets[x], offsets[y + 1] - offsets[y])
        lcp_N[i] = _common(tokens, offsets[x], offsets[y], 0, limit)
    return lcp_N


@numba.njit(cache=True, nogil=True)
def _sort(tokens, offsets, order_N, lcp_N, spare_N, spare_lcp_N, lo, hi):
    """Sort places ``[lo, hi)`` by merging runs of doubling width; the spare arrays are overwritten there."""
    width = 1
    while width < hi - lo:
        for begin in range(lo, hi, 2 * width):
            middle, end = min(begin + width, hi), min(begin + 2 * width, hi)
            _merge(tokens, offsets, order_N, lcp_N, spare_N, spare_lcp_N, begin, middle, end)
        order_N[lo:hi] = spare_N[lo:hi]
        lcp_N[lo:hi] = spare_lcp_N[lo:hi]
        width *= 2


@numba.njit(cache=True, nogil=True)
def _merge(tokens, offsets, order_N, lcp_N, out_N, out_lcp_N, lo, middle, hi):
    """Merge sorted runs ``[lo, middle)`` and ``[middle, hi)``; no token that a comparison found equal is read again.

    ``a`` and ``b`` are the tokens that the next trajectory of each run has in common with the last one merged. The
    larger of them belongs to the smaller trajectory; only where they are equal do tokens decide, from there on
    (LCP merge sort: Ng and Kakehi, "Merging string sequences by longest common prefixes", 2008).
    """
    i, j, a, b = lo, middle, 0, 0
    for k in range(lo, hi):
        first, n = j == hi or (i < middle and a > b), min(a, b)
        if i < middle and j < hi and a == b:
            x, y = order_N[i], order_N[j]
            length_x, length_y = offsets[x + 1] - offsets[x], offsets[y + 1] - offsets[y]
            n = _common(tokens, offsets[x], offsets[y], a, min(length_x, length_y))
            if n == min(length_x, length_y):
                first = length_x <= length_y
            else:
                first = tokens[offsets[x] + n] < tokens[offsets[y] + n]
        if first:
            out_N[k], out_lcp_N[k] = order_N[i], a
            i += 1
            a, b = lcp_N[i] if i < middle else 0, n
        else:
            out_N[k], out_lcp_N[k] = order_N[j], b
            j += 1
            a, b = n, lcp_N[j] if j < hi else 0
