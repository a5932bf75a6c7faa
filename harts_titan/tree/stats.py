"""Sizes and times of a step plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harts_titan.tree.cost import PlanCost
from harts_titan.tree.events import largest_live_bytes
from harts_titan.tree.items import WorkItem
from harts_titan.tree.partition import Partition
from harts_titan.tree.sorted_step import SortedStep
from harts_titan.tree.work import Placement, measure


@dataclass(frozen=True)
class PlanStats:
    """Sizes and times of a plan.

    Figures from ``l1_tokens`` to ``interface_bytes`` are of the placement: rows shared as planned, in every mode.

    Attributes:
        original_tokens: positions of the step.
        distinct_tokens: distinct prefixes of the whole step: the least any sharing could compute.
        compact_tokens: distinct prefixes summed over consumers: their complete rows.
        executed_rows: rows that token-local layers compute: residual rows of consumers and rows of producers, or
            ``original_tokens`` in mode ``expanded``.
        replay_tokens: rows that linear attention computes again, not in ``executed_rows``.
        rounds_max: largest number of rounds of a work item.
        rounds_mean: mean number of rounds of the work items that have rows.
        num_segments: segments of all work items.
        num_consumers: microbatches over all replicas.
        num_slots: microbatches of a replica.
        num_calls: model calls over all replicas, producers included.
        compression: ``original_tokens / executed_rows``; exactly 1 in mode ``expanded``.
        seconds: planning time by phase: ``sort`` (checks of the input and common prefixes included), ``l1``, ``l2``,
            ``rounds`` (forests, rounds, states and events of every item), ``layout`` (rows of the replicas asked for).
        l1_method: search that found the microbatches.
        l1_tokens: compact rows after level 1.
        l1_balance: mean over largest rows of the slots after level 1.
        l1_slots: slots after level 1.
        decoder_tokens: rows that decoder layers execute: the three below.
        residual_tokens: rows of consumers.
        producer_tokens: rows of producers.
        alignment_tokens: padding of the items' rows to the alignment.
        balance: executed rows over those of the slowest replica in every slot and window: ``eta`` of HARTS 5.3.
        computation_balance: mean over largest rows of each slot, then of each window with a producer.
        step_balance: mean over largest of the replicas' executed rows.
        num_windows: sharing windows, 0 where windows are off.
        num_producers: producers with rows.
        producer_rows_max: rows of the largest producer.
        handed_states: boundary states that producers hand over.
        phi: synchronised cost of the step (HARTS Eq. 2).
        interface_bytes: the most that live producers of one replica keep for their consumers, without a pipeline.
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
    l1_method: str
    l1_tokens: int
    l1_balance: float
    l1_slots: int
    decoder_tokens: int
    residual_tokens: int
    producer_tokens: int
    alignment_tokens: int
    balance: float
    computation_balance: tuple[float, ...]
    step_balance: float
    num_windows: int
    num_producers: int
    producer_rows_max: int
    handed_states: int
    phi: int
    interface_bytes: int

    @property
    def l1_compression(self) -> float:
        """Positions over compact rows after level 1."""
        return self.original_tokens / self.l1_tokens

    @property
    def decoder_compression(self) -> float:
        """Positions over the rows that decoder layers execute."""
        return self.original_tokens / self.decoder_tokens

    @property
    def whole_step_compression(self) -> float:
        """Positions over distinct prefixes of the step: the most any sharing could reach."""
        return self.original_tokens / self.distinct_tokens


def plan_statistics(
    step: SortedStep,
    partition: Partition,
    placement: Placement,
    items: Sequence[WorkItem],
    events_V2: np.ndarray,
    *,
    cost: PlanCost,
    dp_degree: int,
    num_calls: int,
    mode: str,
    windows: bool,
    seconds: dict[str, float],
) -> PlanStats:
    """Return the figures of a plan.

    Args:
        step: sorted trajectories.
        partition: what level 1 found.
        placement: what is executed.
        items: all work items.
        events_V2: events without a pipeline.
        cost: coefficients of ``phi`` and of the interface memory.
        dp_degree: number of replicas.
        num_calls: model calls of all items.
        mode: execution mode.
        windows: True if prefixes may be shared across microbatches.
        seconds: planning time by phase.
    """
    work = measure(step, placement, dp_degree)
    rows_SD = partition.rows_K[partition.group_SD]
    rounds = [item.rounds.num_rounds for item in items if item.forest.num_segments]
    states_WD = np.zeros_like(work.producer_WD)
    for item in items:
        if item.state_position_E.size:
            states_WD[item.index, item.replica] = item.state_position_E.size
    residual, producer = int(work.residual_JD.sum()), int(work.producer_WD.sum())
    executed = step.original_tokens if mode == "expanded" else residual + producer
    decoder = work.decoder_tokens(cost)
    interface_WD = cost.shared_row_bytes * work.producer_WD + cost.handed_state_bytes * states_WD
    return PlanStats(
        original_tokens=step.original_tokens,
        distinct_tokens=step.distinct_tokens,
        compact_tokens=work.compact_tokens,
        executed_rows=executed,
        replay_tokens=sum(int(item.rounds.replay_tokens.sum()) for item in items),
        rounds_max=max(rounds),
        rounds_mean=sum(rounds) / len(rounds),
        num_segments=sum(item.forest.num_segments for item in items),
        num_consumers=placement.num_slots * dp_degree,
        num_slots=placement.num_slots,
        num_calls=num_calls,
        compression=step.original_tokens / executed,
        seconds=seconds,
        l1_method=partition.method,
        l1_tokens=int(partition.rows_K.sum()),
        l1_balance=float(rows_SD.sum() / (dp_degree * rows_SD.max(axis=1).sum())),
        l1_slots=partition.group_SD.shape[0],
        decoder_tokens=decoder,
        residual_tokens=residual,
        producer_tokens=producer,
        alignment_tokens=decoder - residual - producer,
        balance=work.balance(),
        computation_balance=tuple(work.computation_balance().tolist()),
        step_balance=work.step_balance(),
        num_windows=placement.num_windows if windows else 0,
        num_producers=int(np.count_nonzero(work.producer_WD)),
        producer_rows_max=int(work.producer_WD.max(initial=0)),
        handed_states=int(states_WD.sum()),
        phi=work.phi(cost),
        interface_bytes=largest_live_bytes(events_V2, interface_WD),
    )
