"""Expert matrix products over rows sorted by expert."""

from harts_titan.ops.grouped_mm.op import grouped_mm, runs_grouped

__all__ = ["grouped_mm", "runs_grouped"]
