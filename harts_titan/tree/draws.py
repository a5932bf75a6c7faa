"""Random numbers of the planner's searches: the same on every machine."""

from __future__ import annotations

import numpy as np

from harts_titan.tree.compiled import kernel


@kernel
def draw(random_1, n):
    """Return a random integer in ``[0, n)``, ``n < 2**31``: a fixed linear congruential generator (Knuth's MMIX).

    The state, uint64 (1,), is unsigned because the overflow of a signed product is undefined in compiled code.
    """
    state = random_1[0] * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
    random_1[0] = state
    return np.int64(((state >> np.uint64(33)) * np.uint64(n)) >> np.uint64(31))
