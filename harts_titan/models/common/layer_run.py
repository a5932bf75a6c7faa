"""What one execution of a layer leaves for its own recomputation."""

from __future__ import annotations

from torch import Tensor


class LayerRun:
    """Created for each execution of a layer and handed to its recomputation.

    Recomputation must not route again: a near-tie could flip, and shapes with it. A plain object: recomputation and
    sharding hooks leave it alone.
    """

    __slots__ = ("topk_TA",)

    def __init__(self) -> None:
        self.topk_TA: Tensor | None = None
