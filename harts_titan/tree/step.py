"""The planner of one training step: sort, both levels, rounds, layouts (HARTS 3.2 to 3.4, 4.1)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from harts_titan.tree.call_layout import CallLayout
from harts_titan.tree.cost import LARGEST, PlanCost
from harts_titan.tree.events import stage_events
from harts_titan.tree.handover import hand_over
from harts_titan.tree.items import WorkItem, expanded_item, plan_items
from harts_titan.tree.layout import MODES, RESTARTING, build_layout, expanded_forests, plan_forest_rounds
from harts_titan.tree.nodes import NodeStarts, check_node_start
from harts_titan.tree.partition import Partition, partition_step
from harts_titan.tree.placement import alone, place_step
from harts_titan.tree.plan import StepPlan, nested
from harts_titan.tree.sorted_step import SortedStep
from harts_titan.tree.stats import plan_statistics
from harts_titan.tree.tables import pack_items
from harts_titan.tree.work import Placement, measure

PLANNERS = ("harts", "l1")


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
    windows: bool = False,
    max_window_slots: int = 6,
    max_live_producers: int = 2,
    planner: str | Callable[[SortedStep], Placement] = "harts",
    cost: PlanCost | None = None,
    replicas: Sequence[int] | None = None,
    node_start: np.ndarray | None = None,
    sort: Callable[[np.ndarray, np.ndarray], SortedStep] = SortedStep.from_tokens,
) -> StepPlan:
    """Plan one training step: which trajectories run together, what is shared, and how each model call is laid out.

    Without windows the same placement serves every mode, so that modes differ in execution only.

    Args:
        tokens: int32 (S,) token ids of the step's trajectories, one after another.
        offsets: int64 (N+1,) trajectory ``x`` is ``tokens[offsets[x]:offsets[x+1]]``.
        capacity: compact rows a consumer (microbatch) or a producer may have.
        chunk_size: tokens in a linear-attention chunk.
        num_taps: width of the short convolution.
        dp_degree: data-parallel replicas; every one gets the same number of consumers.
        mode: ``compact``, ``nodewise``, ``depthwise`` or ``expanded``.
        call_capacity: mode ``expanded`` only: rows at which a call is closed (default ``capacity``). A trajectory
            longer than this gets a call of its own.
        reverse: mode ``expanded`` only: pack the trajectories of a consumer in reverse order.
        windows: True to compute prefixes that microbatches of a sharing window have in common once, in producers.
        max_window_slots: slots a window may have, 0 for any number.
        max_live_producers: producers a replica may hold for backward at once.
        planner: ``harts`` (both levels), ``l1`` (prefix compression only, without windows), or a function that places
            the sorted step, named in the plan by its ``__name__``: a baseline to compare with.
        cost: cost coefficients; default: rows only.
        replicas: replicas whose rows are laid out, default all. Everything else is planned for all of them.
        node_start: int64 (M,) ascending positions in ``tokens`` where a node of the rollout tree begins: an action or
            an observation that was appended at once. Trajectory starts are implied. Modes ``nodewise`` and
            ``depthwise`` cut segments in front of a row that any trajectory of the microbatch (or of the producer)
            names; without it their nodes are the segments. Modes ``compact`` and ``expanded`` do not use it.
        sort: returns the sorted step of checked ``tokens`` and ``offsets``: for a caller that needs it as well.

    Returns:
        The plan, on the CPU: a function of the arguments only, but for ``stats.seconds``.

    Raises:
        ValueError: If an argument is out of range, a trajectory is empty or longer than ``capacity``, there are fewer
            trajectories than replicas, or ``node_start`` is no ascending list of positions.
    """
    clock = _Clock()
    tokens, offsets = _check_batch(tokens, offsets)
    node_start = None if node_start is None else check_node_start(node_start, tokens.size)
    call_capacity = _check_mode(
        mode, capacity=capacity, chunk_size=chunk_size, num_taps=num_taps, call_capacity=call_capacity, reverse=reverse
    )
    _check_windows(windows, mode, planner, max_window_slots, max_live_producers)
    chosen = tuple(range(dp_degree)) if replicas is None else tuple(sorted({int(d) for d in replicas}))
    if chosen and not 0 <= chosen[0] <= chosen[-1] < dp_degree:
        raise ValueError(f"replicas is {chosen}; must lie in [0, {dp_degree})")
    cost = PlanCost() if cost is None else cost

    step = sort(tokens, offsets)
    clock.stop("sort")
    partition, placement = _both_levels(
        step,
        planner,
        clock,
        windows=windows,
        capacity=capacity,
        dp_degree=dp_degree,
        cost=cost,
        max_window_slots=max_window_slots,
        chunk_size=chunk_size,
    )
    nodes = NodeStarts.from_flat(node_start, offsets) if node_start is not None and mode in RESTARTING else None
    work = _plan_work(step, placement, dp_degree=dp_degree, chunk_size=chunk_size, mode=mode, nodes=nodes)
    exists_WD = np.array([producer is not None for producer in work.producers]).reshape(-1, dp_degree)
    has_producer_W = exists_WD.sum(axis=1) > 0
    events_V2 = stage_events(
        placement.window_ptr_W1, has_producer_W, in_flight=1, max_live_producers=max_live_producers
    )
    storage: dict[str, Any] = {
        "placement": {
            name: _by_trajectory(step, getattr(placement, name)) for name in ("replica_N", "slot_N", "shared_N")
        }
        | {"window_ptr_W1": placement.window_ptr_W1},
        "items": pack_items(work.items),
        "events_V2": events_V2,
    }
    clock.stop("rounds")
    packing = _Packing(tokens, offsets, chunk_size, num_taps, mode, call_capacity, reverse)
    for d in chosen:
        storage |= packing.replica(work, placement, d, dp_degree)
    tensordict = nested(storage)
    clock.stop("layout")
    return StepPlan(
        mode=mode,
        chunk_size=chunk_size,
        capacity=capacity,
        call_capacity=call_capacity,
        num_taps=num_taps,
        dp_degree=dp_degree,
        num_slots=placement.num_slots,
        planner=planner.__name__ if callable(planner) else planner,
        windows=windows,
        max_window_slots=max_window_slots if windows else 1,
        max_live_producers=max_live_producers if windows else 0,
        replicas=chosen,
        cost=cost,
        stats=plan_statistics(
            step,
            partition,
            placement,
            work.items,
            events_V2,
            cost=cost,
            dp_degree=dp_degree,
            num_calls=packing.num_calls(work.items),
            mode=mode,
            windows=windows,
            seconds=clock.seconds,
        ),
        tensordict=tensordict,
    )


def partition_of(step: SortedStep, placement: Placement, dp_degree: int, *, method: str) -> Partition:
    """Return the microbatches of a placement, in the order ``slot * dp_degree + replica``."""
    rows_JD = measure(step, placement, dp_degree).complete_JD
    group_N = placement.slot_N * dp_degree + placement.replica_N
    return Partition(group_N, rows_JD.reshape(-1), np.arange(rows_JD.size).reshape(rows_JD.shape), method)


def _both_levels(
    step: SortedStep,
    planner: str | Callable[[SortedStep], Placement],
    clock: _Clock,
    *,
    windows: bool,
    capacity: int,
    dp_degree: int,
    cost: PlanCost,
    max_window_slots: int,
    chunk_size: int,
) -> tuple[Partition, Placement]:
    if callable(planner):
        placement = planner(step)
        if not windows and (placement.num_windows != placement.num_slots or placement.shared_N.any()):
            raise ValueError(
                f"planner {planner.__name__!r} placed microbatches in sharing windows; set windows to True"
            )
        partition = partition_of(step, placement, dp_degree, method=planner.__name__)
        clock.stop("l1")
    else:
        partition = partition_step(step, capacity=capacity, dp_degree=dp_degree)
        clock.stop("l1")
        if windows:
            placement = place_step(
                step,
                partition,
                capacity=capacity,
                dp_degree=dp_degree,
                cost=cost,
                max_window_slots=max_window_slots,
                chunk_size=chunk_size,
            )
        else:
            placement = alone(partition)
    clock.stop("l2")
    return partition, placement


@dataclass(frozen=True)
class _Work:
    """Work items of a step: consumers by slot and replica, producers by window and replica."""

    consumers: list[WorkItem]
    producers: list[WorkItem | None]

    @property
    def items(self) -> list[WorkItem]:
        return self.consumers + [producer for producer in self.producers if producer is not None]


def _plan_work(
    step: SortedStep, placement: Placement, *, dp_degree: int, chunk_size: int, mode: str, nodes: NodeStarts | None
) -> _Work:
    if mode != "expanded":
        return _Work(*plan_items(step, placement, dp_degree=dp_degree, chunk_size=chunk_size, mode=mode, nodes=nodes))
    length_N = _by_trajectory(step, step.length_N)
    key_N = _by_trajectory(step, placement.slot_N * dp_degree + placement.replica_N)
    members = np.split(
        np.argsort(key_N, kind="stable"),
        np.cumsum(np.bincount(key_N, minlength=placement.num_slots * dp_degree))[:-1],
    )
    consumers = [
        expanded_item(k, x, length_N[x], chunk_size=chunk_size, dp_degree=dp_degree) for k, x in enumerate(members)
    ]
    return _Work(consumers, [None] * (placement.num_windows * dp_degree))


def _by_trajectory(step: SortedStep, values_N: np.ndarray) -> np.ndarray:
    out = np.empty_like(values_N)
    out[step.order_N] = values_N
    return out


@dataclass(frozen=True)
class _Packing:
    """Lays the rows of work items out."""

    tokens: np.ndarray
    offsets: np.ndarray
    chunk_size: int
    num_taps: int
    mode: str
    call_capacity: int
    reverse: bool

    def replica(self, work: _Work, placement: Placement, replica: int, dp_degree: int) -> dict[str, Any]:
        """Return the storage of a replica's consumers and producers."""
        out: dict[str, Any] = {}
        for w in range(placement.num_windows):
            producer, made = work.producers[w * dp_degree + replica], None
            if producer is not None:
                handed = (producer.state_segment_E, producer.state_position_E)
                made = self._arrays(producer, handed_E=handed)
                out[f"producer_{w * dp_degree + replica}"] = {
                    "trajectory_N": producer.trajectory_N,
                    "prefix_N": producer.forest.end_position_N,
                    "call": self._layout(made),
                }
            for slot in range(placement.window_ptr_W1[w], placement.window_ptr_W1[w + 1]):
                k = slot * dp_degree + replica
                out[f"consumer_{k}"] = self._consumer(work.consumers[k], producer, made)
        return out

    def _consumer(
        self, item: WorkItem, producer: WorkItem | None, made: dict[str, np.ndarray] | None
    ) -> dict[str, Any]:
        entry: dict[str, Any] = {"trajectory_N": item.trajectory_N}
        if self.mode == "expanded":
            calls = [self._expanded(item, places, forest) for places, forest in self._expanded_calls(item)]
        elif producer is None or made is None or not item.shared_N.any():
            calls = [self._layout(self._arrays(item))]
        else:
            handed, attachment = hand_over(item, producer, made, chunk_size=self.chunk_size)
            calls = [self._layout(self._arrays(item, attachment=attachment), handed.export_E.shape[0])]
            entry["hand_over"] = dict(vars(handed))
        return entry | {"calls": {str(i): call for i, call in enumerate(calls)}}

    def _layout(self, arrays: dict[str, np.ndarray], num_external_states: int = 0) -> CallLayout:
        return CallLayout.from_arrays(
            arrays,
            chunk_size=self.chunk_size,
            num_external_states=num_external_states,
            restarts_chunks=self.mode in RESTARTING,
        )

    def _arrays(self, item: WorkItem, **options: Any) -> dict[str, np.ndarray]:
        return build_layout(
            item.forest,
            item.rounds,
            self.tokens,
            self.offsets,
            item.trajectory_N,
            chunk_size=self.chunk_size,
            num_taps=self.num_taps,
            restart_chunks=self.mode in RESTARTING,
            **options,
        )

    def _expanded_calls(self, item: WorkItem) -> list[Any]:
        length_N = item.forest.end_position_N
        return list(expanded_forests(length_N, call_capacity=self.call_capacity, reverse=self.reverse))

    def _expanded(self, item: WorkItem, places: np.ndarray, forest: Any) -> CallLayout:
        arrays = build_layout(
            forest,
            plan_forest_rounds(forest, chunk_size=self.chunk_size, mode=self.mode),
            self.tokens,
            self.offsets,
            item.trajectory_N[places],
            chunk_size=self.chunk_size,
            num_taps=self.num_taps,
        )
        return self._layout(arrays)

    def num_calls(self, items: list[WorkItem]) -> int:
        """Return the model calls of all items, laid out or not."""
        return sum(len(self._expanded_calls(item)) for item in items) if self.mode == "expanded" else len(items)


class _Clock:
    """Adds the time since the last stop to a phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def stop(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] = now - self._last
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


def _check_mode(
    mode: str, *, capacity: int, chunk_size: int, num_taps: int, call_capacity: int | None, reverse: bool
) -> int:
    """Return the rows at which an expanded call is closed."""
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}; must be one of {MODES}")
    if chunk_size < 1 or num_taps < 1:
        raise ValueError(f"chunk_size ({chunk_size}) and num_taps ({num_taps}) must be at least 1")
    if max(chunk_size, capacity) > LARGEST:
        raise ValueError(f"chunk_size ({chunk_size}) and capacity ({capacity}) must be at most {LARGEST}")
    if mode != "expanded" and (reverse or call_capacity is not None):
        raise ValueError(f"call_capacity and reverse apply to mode 'expanded' only; mode is {mode!r}")
    call_capacity = capacity if call_capacity is None else call_capacity
    if call_capacity < 1:
        raise ValueError(f"call_capacity is {call_capacity}, must be at least 1")
    return call_capacity


def _check_windows(
    windows: bool,
    mode: str,
    planner: str | Callable[[SortedStep], Placement],
    max_window_slots: int,
    max_live_producers: int,
) -> None:
    if not callable(planner) and planner not in PLANNERS:
        raise ValueError(f"planner is {planner!r}; must be one of {PLANNERS} or a function")
    if max_window_slots < 0 or max_live_producers < 1:
        raise ValueError(
            f"max_window_slots is {max_window_slots}, must be at least 0 (0: any number); max_live_producers is "
            f"{max_live_producers}, must be at least 1"
        )
    if windows and (mode == "expanded" or planner == "l1"):
        raise ValueError(
            "windows share prefixes between microbatches: mode 'expanded' shares nothing and planner 'l1' plans no "
            f"windows (mode is {mode!r}, planner {planner!r}); set windows to False"
        )
