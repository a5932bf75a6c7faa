"""Kimi Delta Attention over packed sequences with exported chunk-boundary states (HARTS 3.4)."""

from harts_titan.ops.kda.op import kda, prepare_kda
from harts_titan.ops.kda.sequences import PackedSequences, ReplayFanIn, StateFanIn

__all__ = ["PackedSequences", "ReplayFanIn", "StateFanIn", "kda", "prepare_kda"]
