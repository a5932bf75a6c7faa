"""Sizes and times of a step plan."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PlanStats:
    """Sizes and times of a plan.

    Attributes:
        original_tokens: positions of the step.
        distinct_tokens: distinct prefixes of the whole step: the least any sharing could compute.
        compact_tokens: distinct prefixes summed over consumers.
        executed_rows: rows that token-local layers compute: ``compact_tokens``, or ``original_tokens`` in mode
            ``expanded``.
        replay_tokens: rows that linear attention computes again, not in ``executed_rows``.
        rounds_max: largest number of rounds of a call.
        rounds_mean: mean number of rounds of a call.
        num_segments: segments of all calls.
        num_consumers: microbatches over all replicas.
        num_slots: microbatches of a replica.
        num_calls: model calls over all replicas.
        compression: ``original_tokens / executed_rows``; exactly 1 in mode ``expanded``.
        seconds: planning time by phase.
    """

    original_tokens: int
    distinct_tokens: int
    compact_tokens: int
    executed_rows: int
    replay_tokens: int
    rounds_max: int
    rounds_mean: float
    num_segments: int
    num_consumers: int
    num_slots: int
    num_calls: int
    compression: float
    seconds: dict[str, float]
