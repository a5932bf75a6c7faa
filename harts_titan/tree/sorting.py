"""Lexicographic order of a step's trajectories and the prefixes that neighbours share (HARTS A.1).

Shapes: S token positions of the step, N trajectories.
"""

from __future__ import annotations

from itertools import pairwise

import numba
import numpy as np


def sort_trajectories(tokens: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the lexicographic order of the trajectories and the common prefix of neighbours (HARTS A.1).

    A trajectory that is a prefix of another one comes first; equal trajectories keep their order.

    Args:
        tokens: int32 (S,) non-negative token ids, trajectories one after another.
        offsets: int64 (N+1,) trajectory ``x`` is ``tokens[offsets[x]:offsets[x+1]]``.

    Returns:
        order_N: int64, ``order_N[i]`` is the trajectory at sorted place ``i``.
        lcp_N: int64 tokens, length of the longest common prefix of places ``i-1`` and ``i``; ``lcp_N[0]`` is 0.

    Time: O(N log N) memory comparisons of at most one trajectory each.
    """
    tokens = np.ascontiguousarray(tokens, dtype=np.int32)
    offsets = np.ascontiguousarray(offsets, dtype=np.int64)
    # Big-endian words make bytewise comparison (memcmp) equal to comparison of token ids, and make a prefix smaller.
    big_endian = tokens.astype(">u4")
    keys = [big_endian[lo:hi].tobytes() for lo, hi in pairwise(offsets.tolist())]
    order_N = np.array(sorted(range(len(keys)), key=keys.__getitem__), dtype=np.int64)
    return order_N, neighbour_lcp(tokens, offsets, order_N)


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


@numba.njit(cache=True)
def _neighbour_lcp(tokens, offsets, order_N):
    lcp_N = np.zeros(order_N.shape[0], np.int64)
    for i in range(1, order_N.shape[0]):
        a, b = offsets[order_N[i - 1]], offsets[order_N[i]]
        limit = min(offsets[order_N[i - 1] + 1] - a, offsets[order_N[i] + 1] - b)
        n = 0
        while n < limit and tokens[a + n] == tokens[b + n]:
            n += 1
        lcp_N[i] = n
    return lcp_N
