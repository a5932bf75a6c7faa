"""Proofs that a step plan means what its trajectories say; shares no code with the planner (HARTS 3.2 to 4.3).

What is placed where, what is shared, what it costs and in which order it runs. Segments and states are proven in
``invariants_items.py``, rows in ``invariants_rows.py``. Shapes: N trajectories of the step batch, J slots, D replicas,
W sharing windows.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from harts_titan.tree.invariants import fail, require
from harts_titan.tree.invariants_items import check_items
from harts_titan.tree.invariants_rows import check_rows

if TYPE_CHECKING:
    from harts_titan.tree.plan import StepPlan


@dataclass(frozen=True)
class CountedWork:
    """Rows and pairs of each work item, counted from the token lists.

    Attributes:
        complete_JD: int64 distinct prefixes of each consumer.
        residual_JD: int64 those its producer does not compute.
        attended_JD: int64 (row, ancestor or itself) pairs of the residual rows.
        recomputed_JD: int64 pairs of HARTS A.2.
        producer_WD: int64 rows of each producer.
        producer_attended_WD: int64 pairs.
        producer_recomputed_WD: int64 pairs.
    """

    complete_JD: np.ndarray
    residual_JD: np.ndarray
    attended_JD: np.ndarray
    recomputed_JD: np.ndarray
    producer_WD: np.ndarray
    producer_attended_WD: np.ndarray
    producer_recomputed_WD: np.ndarray


def check_plan(plan: StepPlan, tokens: np.ndarray, offsets: np.ndarray, node_start: np.ndarray | None = None) -> None:
    """Prove every invariant of a step plan.

    Args:
        plan: the plan; rows of some replicas may not be laid out.
        tokens: int32 (S,) token ids of the step.
        offsets: int64 (N+1,) trajectory bounds.
        node_start: int64 (M,) flat positions where nodes of the rollout tree begin, if the plan was made with them.

    Raises:
        ValueError: Naming the violated invariant.
    """
    tokens, offsets = np.asarray(tokens), np.asarray(offsets, dtype=np.int64)
    if plan.mode not in ("nodewise", "depthwise"):
        node_start = None
    elif node_start is not None:
        # Unsigned positions less int64 offsets would be floats.
        node_start = np.asarray(node_start, dtype=np.int64)
    _check_placement(plan, np.diff(offsets))
    work = _count_work(plan, tokens, offsets)
    _check_work(plan, work)
    check_items(plan, work.residual_JD, work.producer_WD, tokens, offsets, node_start)
    limit = plan.max_live_producers if plan.windows else 0
    has_producer_W = work.producer_WD.sum(axis=1) > 0
    check_events(plan.events, plan.window_ptr_W1, has_producer_W, in_flight=1, max_live_producers=limit)
    check_rows(plan, work.producer_WD, tokens, offsets, node_start)
    _check_stats(plan, work, tokens, offsets)


def _check_placement(plan: StepPlan, length_N: np.ndarray) -> None:
    replica, slot, shared, ptr = plan.replica_N, plan.slot_N, plan.shared_N, plan.window_ptr_W1
    for name, values in (("replica_N", replica), ("slot_N", slot), ("shared_N", shared)):
        if values.shape != length_N.shape:
            fail("every trajectory is in exactly one consumer", "step", f"{name} has {values.shape} entries")
    require((replica >= 0) & (replica < plan.dp_degree), "replicas exist", "step", "trajectory")
    require((slot >= 0) & (slot < plan.num_slots), "every replica has the same slots", "step", "trajectory")
    require((shared >= 0) & (shared <= length_N), "a shared prefix is a prefix", "step", "trajectory")
    members = np.bincount(slot * plan.dp_degree + replica, minlength=plan.num_slots * plan.dp_degree)
    require(members > 0, "no consumer is empty", "step", "slot * dp_degree + replica =")
    if ptr.size < 2 or ptr[0] != 0 or ptr[-1] != plan.num_slots or (np.diff(ptr) < 1).any():
        fail("windows are consecutive slots", "step", f"window_ptr_W1 {ptr[:8]} over {plan.num_slots} slots")
    if plan.max_window_slots and np.diff(ptr).max() > plan.max_window_slots:
        fail("windows have at most max_window_slots", "step", f"one has {np.diff(ptr).max()} slots")
    if not plan.windows and (shared.any() or plan.max_window_slots != 1):
        fail("nothing is shared between microbatches without windows", "step", f"{shared.sum()} tokens")
    if plan.windows and plan.mode == "expanded":
        fail("nothing is shared between microbatches without windows", "step", "mode 'expanded' has no windows")


def neighbours(sequences: list[np.ndarray]) -> tuple[list[int], list[int]]:
    """Return the lexicographic order of token lists, and the tokens each shares with the one before it."""
    key = [np.asarray(s, dtype=">u4").tobytes() for s in sequences]
    order = sorted(range(len(key)), key=key.__getitem__)
    shared, before = [], np.zeros(0, np.int64)
    for i in order:
        now = sequences[i]
        n = min(now.size, before.size)
        differs = np.flatnonzero(now[:n] != before[:n])
        shared.append(int(differs[0]) if differs.size else n)
        before = now
    return order, shared


def _positions_below(depth: np.ndarray) -> int:
    """Return the pairs of rows [lo, hi) of a path with their ancestors and themselves, summed."""
    lo, hi = depth[:, 0], depth[:, 1]
    return int((hi * (hi + 1) // 2 - lo * (lo + 1) // 2).sum())


def _added_rows(sequences: list[np.ndarray], produced: list[int]) -> tuple[np.ndarray, int, np.ndarray]:
    """Return the rows [lo, hi) that each token list adds, in sorted order, the distinct prefixes, and the order."""
    order, lcp = neighbours(sequences)
    complete = sum(sequences[i].size - n for i, n in zip(order, lcp, strict=True))
    lo = [min(sequences[i].size, max(n, produced[i])) for i, n in zip(order, lcp, strict=True)]
    added = np.array([[a, sequences[i].size] for a, i in zip(lo, order, strict=True)], np.int64)
    return added.reshape(-1, 2), complete, np.array(order)


def _count_work(plan: StepPlan, tokens: np.ndarray, offsets: np.ndarray) -> CountedWork:
    replica, slot, shared, ptr = plan.replica_N, plan.slot_N, plan.shared_N, plan.window_ptr_W1
    consumers = np.zeros((4, plan.num_slots, plan.dp_degree), np.int64)
    producers = np.zeros((3, ptr.size - 1, plan.dp_degree), np.int64)
    path = [tokens[lo:hi] for lo, hi in pairwise(offsets)]
    for d in range(plan.dp_degree):
        for j in range(plan.num_slots):
            members = np.flatnonzero((replica == d) & (slot == j))
            added, complete, _ = _added_rows([path[x] for x in members], [int(shared[x]) for x in members])
            rows = added[:, 1] - added[:, 0]
            consumers[:, j, d] = complete, rows.sum(), _positions_below(added), (rows * added[:, 1]).sum()
        for w in range(ptr.size - 1):
            members = np.flatnonzero((replica == d) & (slot >= ptr[w]) & (slot < ptr[w + 1]))
            depth = shared[members]
            order, lcp = neighbours([path[x] for x in members])
            above, here = depth[order][:-1], depth[order][1:]
            both = np.array(lcp[1:], np.int64)
            closed = (np.minimum(both, above) <= here) & (np.minimum(both, here) <= above)
            require(closed, "shared prefixes are closed", f"replica {d}, window {w}", "neighbouring pair")
            # Work takes members in the order of the trajectories; those that share nothing add no rows.
            some = [i for i in order if depth[i] > 0]
            _, between = neighbours([path[members[i]] for i in some])
            added = np.array([[min(n, depth[i]), depth[i]] for n, i in zip(between, some, strict=True)], np.int64)
            added = added.reshape(-1, 2)
            rows = added[:, 1] - added[:, 0]
            producers[:, w, d] = rows.sum(), _positions_below(added), (rows * added[:, 1]).sum()
    return CountedWork(*consumers, *producers)


def _check_work(plan: StepPlan, work: CountedWork) -> None:
    for j, d in np.argwhere(work.complete_JD > plan.capacity):
        rows = work.complete_JD[j, d]
        fail("consumers fit the capacity", f"replica {d}, slot {j}", f"{rows} compact rows, at most {plan.capacity}")
    for w, d in np.argwhere(work.producer_WD > plan.capacity):
        rows = work.producer_WD[w, d]
        fail("producers fit the capacity", f"replica {d}, window {w}", f"{rows} rows, at most {plan.capacity}")
    hit_JD = work.complete_JD - work.residual_JD
    gain_WD = np.add.reduceat(hit_JD, plan.window_ptr_W1[:-1], axis=0) - work.producer_WD
    for w, d in np.argwhere((work.producer_WD > 0) & (gain_WD <= 0)):
        fail("a producer saves rows", f"replica {d}, window {w}", f"gain {gain_WD[w, d]}")


def check_events(
    events_V2: np.ndarray,
    window_ptr_W1: np.ndarray,
    has_producer_W: np.ndarray,
    *,
    in_flight: int,
    max_live_producers: int,
) -> None:
    """Prove that the events of a stage are its consumers in one-forward-one-backward order with producers around them.

    Args:
        events_V2: int64 kind (0 producer forward, 1 consumer forward, 2 consumer backward, 3 producer backward) and
            window or slot of each event.
        window_ptr_W1: int64 slots of window ``w`` are ``[window_ptr[w], window_ptr[w+1])``.
        has_producer_W: bool, True where any replica has a producer in the window.
        in_flight: microbatches between their forward and their backward.
        max_live_producers: producers between the start of their forward and the end of their backward.

    Raises:
        ValueError: Naming the violated invariant.
    """
    if events_V2.ndim != 2 or events_V2.shape[1] != 2 or not np.isin(events_V2[:, 0], (0, 1, 2, 3)).all():
        fail("events are (kind, index)", "event list", f"shape {events_V2.shape}")
    num_slots = int(window_ptr_W1[-1])
    window_J = np.repeat(np.arange(window_ptr_W1.size - 1), np.diff(window_ptr_W1))
    forwards = backwards = live = 0
    started: set[int] = set()
    ended: set[int] = set()
    for at, (kind, index) in enumerate(events_V2.tolist()):
        where = f"event {at}"
        if kind == 1:
            # A forward runs whenever another microbatch may be in flight.
            if index != forwards or index >= num_slots or forwards - backwards >= in_flight:
                fail("consumers run one forward, one backward", where, f"forward of slot {index}")
            window = int(window_J[index])
            if has_producer_W[window] and window not in started:
                fail("a producer runs before its consumers", where, f"slot {index} of window {window}")
            forwards += 1
        elif kind == 2:
            if index != backwards or forwards != min(backwards + in_flight, num_slots):
                fail("consumers run one forward, one backward", where, f"backward of slot {index}")
            backwards += 1
            window = int(window_J[index])
            if has_producer_W[window] and backwards == window_ptr_W1[window + 1]:
                follows = events_V2[at + 1].tolist() if at + 1 < events_V2.shape[0] else None
                if follows != [3, window]:
                    fail("a producer's backward follows its last consumer's", where, f"then {follows}")
        elif not 0 <= index < has_producer_W.size or not has_producer_W[index]:
            fail("producer events belong to windows with a producer", where, f"window {index}")
        elif kind == 0:
            if index in started:
                fail("every event happens once", where, f"forward of the producer of window {index}")
            started.add(index)
            live += 1
            if live > max_live_producers:
                fail("live producers stay within the limit", where, f"{live} live, at most {max_live_producers}")
        else:
            if index in ended or backwards != window_ptr_W1[index + 1]:
                fail("a producer's backward follows its last consumer's", where, f"window {index}")
            ended.add(index)
            live -= 1
    wanted = set(np.flatnonzero(has_producer_W).tolist())
    if (forwards, backwards) != (num_slots, num_slots) or started != wanted or ended != wanted:
        fail("every event happens once", "event list", f"{forwards} forwards, {backwards} backwards")


def _check_stats(plan: StepPlan, work: CountedWork, tokens: np.ndarray, offsets: np.ndarray) -> None:
    items, cost, stats = plan.items, plan.cost, plan.stats
    path = [tokens[lo:hi] for lo, hi in pairwise(offsets)]
    rows = np.concatenate([work.residual_JD, work.producer_WD])
    padded_JD = work.residual_JD + -work.residual_JD % cost.row_alignment
    padded_WD = work.producer_WD + -work.producer_WD % cost.row_alignment
    residual, producer = int(work.residual_JD.sum()), int(work.producer_WD.sum())
    rounds = items["item_rounds_I"][items["item_rows_I"] > 0]
    executed = tokens.size if plan.mode == "expanded" else residual + producer
    busy = rows[rows.max(axis=1) > 0]
    total_D = rows.sum(axis=0)
    phi = 0
    for row, pair, head, pairs_JD, pairs_WD in (
        (cost.forward_row, cost.forward_pair, cost.head_forward_row, work.attended_JD, work.producer_attended_WD),
        (
            cost.backward_row,
            cost.backward_pair,
            cost.head_backward_row,
            work.recomputed_JD,
            work.producer_recomputed_WD,
        ),
    ):
        phi += int((row * padded_JD + pair * pairs_JD + head * work.complete_JD).max(axis=1).sum())
        phi += int((row * padded_WD + pair * pairs_WD).max(axis=1).sum())
    is_producer = items["item_kind_I"] == 1
    states_WD = np.zeros_like(work.producer_WD)
    of_item = np.diff(items["state_ptr_I1"])[is_producer]
    states_WD[items["item_index_I"][is_producer], items["item_replica_I"][is_producer]] = of_item
    # Without a pipeline one producer is live at a time.
    interface = cost.shared_row_bytes * work.producer_WD + cost.handed_state_bytes * states_WD
    expected = {
        "original_tokens": tokens.size,
        "distinct_tokens": _added_rows(path, [0] * len(path))[1],
        "compact_tokens": int(work.complete_JD.sum()),
        "executed_rows": executed,
        "replay_tokens": int(items["segment_replay_G"].sum()),
        "rounds_max": int(rounds.max()),
        "rounds_mean": float(rounds.sum() / rounds.size),
        "num_segments": items["segment_start_G"].size,
        "num_consumers": plan.num_slots * plan.dp_degree,
        "num_slots": plan.num_slots,
        "compression": tokens.size / executed,
        "residual_tokens": residual,
        "producer_tokens": producer,
        "decoder_tokens": int(padded_JD.sum() + padded_WD.sum()),
        "alignment_tokens": int(padded_JD.sum() + padded_WD.sum()) - residual - producer,
        "balance": float(rows.sum() / (plan.dp_degree * rows.max(axis=1).sum())),
        "computation_balance": tuple((busy.mean(axis=1) / busy.max(axis=1)).tolist()),
        "step_balance": float(total_D.mean() / total_D.max()),
        "num_windows": plan.num_windows if plan.windows else 0,
        "num_producers": int((work.producer_WD > 0).sum()),
        "producer_rows_max": int(work.producer_WD.max()),
        "handed_states": items["state_position_E"].size,
        "phi": phi,
        "interface_bytes": int(interface.max()),
    }
    if plan.mode != "expanded":
        expected["num_calls"] = items["item_kind_I"].size
    elif len(plan.replicas) == plan.dp_degree:
        expected["num_calls"] = sum(len(consumer.calls) for consumer in plan.consumers())
    if not plan.windows:
        of_first_level = {"l1_tokens": "compact_tokens", "l1_slots": "num_slots", "l1_balance": "balance"}
        expected |= {name: expected[same] for name, same in of_first_level.items()}
    for name, value in expected.items():
        if getattr(stats, name) != value:
            fail("statistics are the plan's", f"stats.{name}", f"{getattr(stats, name)}, must be {value}")
