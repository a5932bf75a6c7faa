"""A training step's trajectories in lexicographic order, with constant-time common prefixes (HARTS A.1).

Shapes: N trajectories by sorted place, L levels of the range-minimum table.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numba
import numpy as np

from harts_titan.tree.compiled import kernel
from harts_titan.tree.sorting import sort_trajectories


@dataclass(frozen=True)
class SortedStep:
    """What the planners know of a step: lengths and common prefixes, no tokens.

    Attributes:
        order_N: int64 trajectory (index in the step batch) at each sorted place.
        length_N: int64 tokens of the trajectory at each place, > 0.
        lcp_N: int64 tokens that a place has in common with the place before; entry 0 is 0.
        minimum_LN: int64 table of range minima of ``lcp_N``: entry ``[k, i]`` is the minimum over
            ``lcp_N[i : i + 2**k]``. Read it through :func:`common_prefix`.
    """

    order_N: np.ndarray
    length_N: np.ndarray
    lcp_N: np.ndarray
    minimum_LN: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        for name in ("order_N", "length_N", "lcp_N"):
            object.__setattr__(self, name, np.ascontiguousarray(getattr(self, name), dtype=np.int64))
        object.__setattr__(self, "minimum_LN", _range_minima(self.lcp_N))

    @classmethod
    def from_tokens(cls, tokens: np.ndarray, offsets: np.ndarray) -> SortedStep:
        """Sort trajectories.

        Args:
            tokens: int32 (S,) token ids, trajectories one after another.
            offsets: int64 (N+1,) trajectory bounds.
        """
        order_N, lcp_N = sort_trajectories(tokens, offsets)
        return cls(order_N, np.diff(offsets)[order_N], lcp_N)

    def select(self, places: np.ndarray) -> SortedStep:
        """Return the step of some of its trajectories.

        Args:
            places: int64 (M,) sorted places, ascending.
        """
        places = np.ascontiguousarray(places, dtype=np.int64)
        return SortedStep(self.order_N[places], self.length_N[places], _common_prefixes(self.minimum_LN, places))

    @property
    def num_trajectories(self) -> int:
        """Trajectories of the step."""
        return int(self.length_N.shape[0])

    @property
    def original_tokens(self) -> int:
        """Token positions of the step."""
        return int(self.length_N.sum())

    @property
    def distinct_tokens(self) -> int:
        """Distinct prefixes of the whole step: ``G`` of HARTS A.1."""
        return int((self.length_N - self.lcp_N).sum())


def _range_minima(lcp_N: np.ndarray) -> np.ndarray:
    levels = max(1, int(lcp_N.shape[0]).bit_length())
    minimum_LN = np.zeros((levels, lcp_N.shape[0]), np.int64)
    minimum_LN[0] = lcp_N
    for k in range(1, levels):
        half = 1 << (k - 1)
        below = minimum_LN[k - 1]
        size = lcp_N.shape[0] - 2 * half + 1
        if size > 0:
            minimum_LN[k, :size] = np.minimum(below[:size], below[half : half + size])
    return minimum_LN


@numba.njit(cache=True, inline="always")
def _log2(n):
    """Return the integer part of the binary logarithm of ``n >= 1``."""
    k = 0
    while n > 1:
        n >>= 1
        k += 1
    return k


@kernel
def common_prefix(minimum_LN, i, j):
    """Return the tokens that sorted places ``i < j`` have in common (compiled; for use in compiled loops).

    Args:
        minimum_LN: ``SortedStep.minimum_LN``.
        i: smaller place.
        j: larger place.
    """
    k = _log2(j - i)
    return min(minimum_LN[k, i + 1], minimum_LN[k, j - (1 << k) + 1])


@numba.njit(cache=True)
def _common_prefixes(minimum_LN, places):
    """Return the tokens that each of some ascending places has in common with the one before; 0 for the first."""
    out = np.zeros(places.shape[0], np.int64)
    for i in range(1, places.shape[0]):
        out[i] = common_prefix(minimum_LN, places[i - 1], places[i])
    return out
