"""What one execution of a layer leaves for its own recomputation."""

from __future__ import annotations

from torch import Tensor


class LayerRun:
    """Created for each execution of a layer and handed to its recomputation.

    Recomputation must not route again (a near-tie could flip, and shapes with it) and must not count rows twice. A
    plain object: recomputation and sharding hooks leave it alone.
    """

    __slots__ = ("counted", "topk_TA")

    def __init__(self) -> None:
        self.topk_TA: Tensor | None = None
        self.counted = False

    def count_once(self) -> bool:
        """Return True the first time, False in recomputations."""
        first = not self.counted
        self.counted = True
        return first
