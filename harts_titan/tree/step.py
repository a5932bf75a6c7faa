"""The planner of one training step: sort, partition, rounds, layouts (HARTS 3.2 to 3.4)."""

from __future__ import annotations

import time
from collections import defaultdict

import numpy as np

from harts_titan.tree.forest import Forest, build_forest
from harts_titan.tree.layout import MODES, build_layout, expanded_forests, plan_forest_rounds
from harts_titan.tree.partition import Partition, contiguous_partition
from harts_titan.tree.plan import CallLayout, StepPlan, assemble
from harts_titan.tree.sorting import sort_trajectories
from harts_titan.tree.stats import PlanStats


def plan_step(
    tokens: np.ndarray,
    offsets: np.ndarray,
    *,
    capacity: int,
    chunk_size: int,
    num_taps: int = 4,
    dp_degree: int = 1,
    mode: str = "compact",
    call_capacity: int | None = None,
    reverse: bool = False,
) -> StepPlan:
    """Plan one training step: which trajectories run together, and how each model call is laid out.

    The same partition serves every mode, so that modes differ in execution only.

    Args:
        tokens: int32 (S,) token ids of the step's trajectories, one after another.
        offsets: int64 (N+1,) trajectory ``x`` is ``tokens[offsets[x]:offsets[x+1]]``.
        capacity: compact rows a consumer (microbatch) may have.
        chunk_size: tokens in a linear-attention chunk.
        num_taps: width of the short convolution.
        dp_degree: data-parallel replicas; every one gets the same number of consumers.
        mode: ``compact``, ``nodewise`` or ``expanded``.
        call_capacity: mode ``expanded`` only: rows at which a call is closed (default ``capacity``). A trajectory
            longer than this gets a call of its own.
        reverse: mode ``expanded`` only: pack the trajectories of a consumer in reverse order.

    Returns:
        The plan, on the CPU.

    Raises:
        ValueError: If an argument is out of range, a trajectory is empty or longer than ``capacity``, or there are
            fewer trajectories than replicas.
    """
    tokens, offsets = _check_batch(tokens, offsets)
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}; must be one of {MODES}")
    if chunk_size < 1 or num_taps < 1:
        raise ValueError(f"chunk_size ({chunk_size}) and num_taps ({num_taps}) must be at least 1")
    if mode != "expanded" and (reverse or call_capacity is not None):
        raise ValueError(f"call_capacity and reverse apply to mode 'expanded' only; mode is {mode!r}")
    call_capacity = capacity if call_capacity is None else call_capacity
    if call_capacity < 1:
        raise ValueError(f"call_capacity is {call_capacity}, must be at least 1")

    clock = _Clock()
    order_N, lcp_N = sort_trajectories(tokens, offsets)
    length_N = np.diff(offsets)
    clock.stop("sort")
    partition = contiguous_partition(length_N[order_N], lcp_N, capacity, dp_degree, index_N=order_N)
    clock.stop("partition")
    consumers, rounds_per_call = [], []
    for group in partition.group_SD.reshape(-1):
        lo, hi = partition.bound_K1[group], partition.bound_K1[group + 1]
        trajectory_N = np.sort(order_N[lo:hi])
        calls = []
        if mode == "expanded":
            work = list(expanded_forests(length_N[trajectory_N], call_capacity=call_capacity, reverse=reverse))
        else:
            forest = _in_batch_order(build_forest(length_N[order_N[lo:hi]], lcp_N[lo:hi]), order_N[lo:hi])
            work = [(np.arange(hi - lo), forest)]
        for places, forest in work:
            rounds = plan_forest_rounds(forest, chunk_size=chunk_size, mode=mode)
            clock.stop("rounds")
            rounds_per_call.append(rounds.num_rounds)
            arrays = build_layout(
                forest,
                rounds,
                tokens,
                offsets,
                trajectory_N[places],
                chunk_size=chunk_size,
                num_taps=num_taps,
                restart_chunks=mode == "nodewise",
            )
            calls.append(CallLayout.from_arrays(arrays, chunk_size=chunk_size))
            clock.stop("layout")
        consumers.append((trajectory_N, calls))
    storage = assemble(consumers)
    clock.stop("layout")
    return StepPlan(
        mode=mode,
        chunk_size=chunk_size,
        capacity=capacity,
        call_capacity=call_capacity,
        num_taps=num_taps,
        dp_degree=dp_degree,
        num_slots=partition.group_SD.shape[0],
        stats=_statistics(consumers, rounds_per_call, partition, int((length_N[order_N] - lcp_N).sum()), clock.seconds),
        tensordict=storage,
    )


class _Clock:
    """Adds the time since the last stop to a phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._last = time.perf_counter()

    def stop(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] += now - self._last
        self._last = now


def _check_batch(tokens: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    tokens, offsets = np.asarray(tokens), np.ascontiguousarray(offsets, dtype=np.int64)
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(f"tokens is {tokens.dtype} {tokens.shape}; must be a 1-D integer array")
    if offsets.ndim != 1 or offsets.size < 2 or offsets[0] != 0 or offsets[-1] != tokens.size:
        raise ValueError(
            f"offsets must run from 0 to the number of tokens ({tokens.size}) over at least one trajectory"
        )
    length_N = np.diff(offsets)
    if length_N.min() < 1:
        raise ValueError(f"trajectory {int(length_N.argmin())} has {length_N.min()} tokens; every trajectory needs one")
    if tokens.min() < 0 or tokens.max() > np.iinfo(np.int32).max:
        raise ValueError(
            f"token ids span [{tokens.min()}, {tokens.max()}]; must be non-negative int32 (remove padding)"
        )
    return np.ascontiguousarray(tokens, dtype=np.int32), offsets


def _in_batch_order(forest: Forest, order: np.ndarray) -> Forest:
    """Rename the trajectories of a forest from places in the sorted order to ranks in the step batch's order."""
    rank = np.empty(order.shape[0], np.int64)
    by_index = np.argsort(order)
    rank[by_index] = np.arange(order.shape[0])
    return Forest(
        parent_V=forest.parent_V,
        start_V=forest.start_V,
        length_V=forest.length_V,
        source_V=rank[forest.source_V],
        depth_V=forest.depth_V,
        end_segment_N=forest.end_segment_N[by_index],
        end_position_N=forest.end_position_N[by_index],
    )


def _statistics(
    consumers: list[tuple[np.ndarray, list[CallLayout]]],
    rounds_per_call: list[int],
    partition: Partition,
    distinct_tokens: int,
    seconds: dict[str, float],
) -> PlanStats:
    calls = [call for _, of_consumer in consumers for call in of_consumer]
    original = sum(call.num_positions for call in calls)
    executed = sum(call.num_rows for call in calls)
    return PlanStats(
        original_tokens=original,
        distinct_tokens=distinct_tokens,
        compact_tokens=int(partition.rows_K.sum()),
        executed_rows=executed,
        replay_tokens=sum(call.packed_row_P.shape[0] - call.num_rows for call in calls),
        rounds_max=max(rounds_per_call),
        rounds_mean=sum(rounds_per_call) / len(rounds_per_call),
        num_segments=sum(call.num_segments for call in calls),
        num_consumers=len(consumers),
        num_slots=partition.group_SD.shape[0],
        num_calls=len(calls),
        compression=original / executed,
        seconds=dict(seconds),
    )
