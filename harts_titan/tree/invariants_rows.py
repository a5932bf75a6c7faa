"""Proofs that laid-out rows are those of the placement, and that producers hand over what consumers need (HARTS 4.2).

Shares no code with the planner. Shapes: as in ``layout.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from harts_titan.tree.invariants import Arrays, ExternalRows, Nodes, ProducerCall, check_call, fail, require

if TYPE_CHECKING:
    from harts_titan.tree.call_layout import CallLayout
    from harts_titan.tree.plan import ConsumerPlan, ProducerPlan, StepPlan

_SAME = {
    "seg_parent_V": "segment_parent_G",
    "seg_start_V": "segment_start_G",
    "seg_length_V": "segment_length_G",
    "seg_sequence_V": "segment_sequence_G",
    "seg_round_V": "segment_round_G",
    "seg_continues_V": "segment_continues_G",
    "start_Q": "sequence_anchor_Q",
}


def check_rows(
    plan: StepPlan,
    producer_WD: np.ndarray,
    tokens: np.ndarray,
    offsets: np.ndarray,
    node_start: np.ndarray | None = None,
) -> None:
    """Prove the row layouts of the replicas that have them.

    Args:
        plan: the plan; placement and packed arrays are proven already.
        producer_WD: int64 rows of each producer, counted from the tokens.
        tokens: int32 (S,) token ids.
        offsets: int64 (N+1,) trajectory bounds.
        node_start: int64 flat positions where nodes of the rollout tree begin.

    Raises:
        ValueError: Naming the violated invariant.
    """
    degree, replicas = plan.dp_degree, plan.replicas
    if len(set(replicas)) != len(replicas) or not set(replicas) <= set(range(degree)):
        fail("replicas exist", "replicas", f"{replicas} of {degree}")
    wanted = {"placement", "items", "events_V2"}
    wanted |= {f"consumer_{j * degree + d}" for j in range(plan.num_slots) for d in replicas}
    wanted |= {f"producer_{w * degree + d}" for w, d in np.argwhere(producer_WD > 0).tolist() if d in replicas}
    if set(plan.tensordict.keys()) != wanted:
        fail("every item of a laid-out replica has rows", "storage", f"{set(plan.tensordict.keys()) ^ wanted}")
    packed = plan.items
    number = {
        key: i
        for i, key in enumerate(
            zip(*(packed[f"item_{name}_I"].tolist() for name in ("kind", "replica", "index")), strict=True)
        )
    }
    consumers = plan.consumers()
    for producer in plan.producers():
        k = producer.window * degree + producer.replica
        exports = [c.export_E.cpu().numpy() for c in consumers if c.producer == k]
        exported = np.concatenate([np.zeros(0, np.int64), *exports])
        _check_producer(plan, producer, exported, tokens, offsets, node_start)
        _check_tables(plan, packed, number[1, producer.replica, producer.window], producer.call.arrays())
    for consumer in consumers:
        _check_consumer(plan, consumer, tokens, offsets, node_start)
        if plan.mode != "expanded":
            item = number[0, consumer.replica, consumer.slot]
            _check_tables(plan, packed, item, consumer.calls[0].arrays())


def _check_settings(plan: StepPlan, layout: CallLayout, where: str) -> None:
    if layout.chunk_size != plan.chunk_size or layout.conv_tap_TW.shape[1] != plan.num_taps:
        fail("one chunk size and tap count in a plan", where, f"chunk size {layout.chunk_size}")
    if layout.restarts_chunks != (plan.mode in ("nodewise", "depthwise")):
        fail("a call restarts chunks as its mode does", where, f"restarts_chunks in mode {plan.mode}")


def _check_tables(plan: StepPlan, packed: Arrays, item: int, call: Arrays) -> None:
    for name, column in _SAME.items():
        kind = column.split("_")[0]
        lo, hi = packed[f"{kind}_ptr_I1"][item : item + 2]
        if not np.array_equal(call[name], packed[column][lo:hi]):
            fail("rows are those of the planned segments", f"item {item}", f"{name} is not {column}")


def _exported_row(call: Arrays, export: np.ndarray, chunk_size: int, where: str) -> np.ndarray:
    """Return the row after which each export of a call is taken."""
    size = min(call["export_sequence_E"].size, call["export_boundary_E"].size)
    require((export >= 0) & (export < size), "initial states exist", where, "export")
    sequence, bound = call["export_sequence_E"][export], call["cu_seqlens_Q1"]
    require((sequence >= 0) & (sequence < bound.size - 1), "initial states exist", where, "sequence of export")
    consumed = np.minimum(call["export_boundary_E"][export] * chunk_size, np.diff(bound)[sequence])
    packed = bound[sequence] + consumed - 1
    inside = (consumed > 0) & (packed >= 0) & (packed < call["packed_row_P"].size)
    require(inside, "exports lie inside their sequence", where, "export")
    return call["packed_row_P"][packed]


def _named(
    node_start: np.ndarray | None, offsets: np.ndarray, tokens: np.ndarray, shared: Mapping[int, int], index: np.ndarray
) -> Nodes | None:
    """Return where nodes begin in the first tokens of some trajectories, as positions of those listed in ``index``.

    Args:
        node_start: int64 flat positions, if any are named.
        offsets: int64 (N+1,) trajectory bounds.
        tokens: int32 (S,) token ids.
        shared: tokens that are looked at, by trajectory.
        index: int64 trajectories of a call; one begins with each of the others' first tokens.
    """
    if node_start is None:
        return None
    places, positions = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for x, depth in shared.items():
        begin = offsets[x]
        found = node_start[(node_start > begin) & (node_start < begin + depth)] - begin
        path = tokens[begin : begin + depth]
        same = (
            place
            for place, y in enumerate(index.tolist())
            if shared[y] >= depth and (x == y or np.array_equal(tokens[offsets[y] : offsets[y] + depth], path))
        )
        host = next(same, -1)
        if host < 0:
            fail("row prefix equals trajectory prefix", f"trajectory {x}", f"none begins with its first {depth} tokens")
        places.append(np.full(found.size, host))
        positions.append(found)
    return np.concatenate(places), np.concatenate(positions)


def _check_producer(
    plan: StepPlan,
    producer: ProducerPlan,
    export_H: np.ndarray,
    tokens: np.ndarray,
    offsets: np.ndarray,
    node_start: np.ndarray | None,
) -> None:
    where = f"producer of replica {producer.replica}, window {producer.window}"
    call, index = producer.call.arrays(), producer.trajectory_N.cpu().numpy()
    _check_settings(plan, producer.call, where)
    lo, hi = plan.window_ptr_W1[producer.window : producer.window + 2]
    placed = (plan.replica_N == producer.replica) & (plan.slot_N >= lo) & (plan.slot_N < hi)
    if not np.array_equal(call["trajectory_N"], index) or not np.isin(index, np.flatnonzero(placed)).all():
        fail("a producer serves its own window", where, f"trajectory_N {index[:8]}")
    if not np.array_equal(producer.prefix_N.cpu().numpy(), plan.shared_N[index]):
        fail("a producer computes the shared prefixes", where, "prefix_N is not shared_N")
    if producer.call.num_external_states or call["parent_Y"].size != call["token_T"].size:
        fail("a producer attaches to nothing", where, f"{producer.call.num_external_states} external states")
    made = ProducerCall(plan.shared_N[index], export_H, _exported_row(call, export_H, plan.chunk_size, where))
    served = {x: int(plan.shared_N[x]) for x in np.flatnonzero(placed & (plan.shared_N > 0)).tolist()}
    nodes = _named(node_start, offsets, tokens, served, index)
    check_call(call, tokens, offsets, chunk_size=plan.chunk_size, mode=plan.mode, where=where, made=made, nodes=nodes)


def _check_consumer(
    plan: StepPlan,
    consumer: ConsumerPlan,
    tokens: np.ndarray,
    offsets: np.ndarray,
    node_start: np.ndarray | None,
) -> None:
    where = f"replica {consumer.replica}, slot {consumer.slot}"
    members = np.flatnonzero((plan.replica_N == consumer.replica) & (plan.slot_N == consumer.slot))
    if not np.array_equal(np.sort(consumer.trajectory_N.cpu().numpy()), members):
        fail("every trajectory is in exactly one consumer", where, f"{consumer.trajectory_N.numel()} trajectories")
    calls = [call.arrays() for call in consumer.calls]
    ran = np.concatenate([call["trajectory_N"] for call in calls])
    if not np.array_equal(np.sort(ran), members):
        fail("calls cover the consumer's trajectories once", where, f"{ran.size} run, {members.size} are members")
    if plan.mode != "expanded" and len(calls) != 1:
        fail("calls cover the consumer's trajectories once", where, f"{len(calls)} calls")
    external = _handed_over(plan, consumer, members, where)
    for i, (call, layout) in enumerate(zip(calls, consumer.calls, strict=True)):
        at = f"{where}, call {i}"
        _check_settings(plan, layout, at)
        if layout.num_external_states != external.state_row_E.size:
            fail("initial states exist", at, f"{layout.num_external_states} external states")
        if plan.mode == "expanded" and call["token_T"].size > plan.call_capacity and call["trajectory_N"].size > 1:
            fail("calls fit call_capacity", at, f"{call['token_T'].size} rows, at most {plan.call_capacity}")
        whole = {x: int(offsets[x + 1] - offsets[x]) for x in call["trajectory_N"].tolist()}
        nodes = _named(node_start, offsets, tokens, whole, call["trajectory_N"])
        check_call(
            call,
            tokens,
            offsets,
            chunk_size=plan.chunk_size,
            mode=plan.mode,
            where=at,
            external=external,
            nodes=nodes,
        )
    multiplicity, num_external = consumer.multiplicity_X.cpu().numpy(), external.token_X.size
    used = np.bincount(calls[0]["row_of_position_S"], minlength=num_external)[:num_external]
    if multiplicity.shape != used.shape:
        fail("sizes agree", where, f"{multiplicity.size} multiplicities of {num_external} external rows")
    require(used > 0, "every row serves a position", where, "external row")
    require(multiplicity == used, "multiplicity counts the row's positions", where, "external row")


def _handed_over(plan: StepPlan, consumer: ConsumerPlan, members: np.ndarray, where: str) -> ExternalRows:
    """Return what the producer's call really hands over to a consumer, once it is proven to be what is needed."""
    none = np.zeros(0, np.int64)
    window = int(np.searchsorted(plan.window_ptr_W1, consumer.slot, "right")) - 1
    attached = consumer.producer >= 0
    if attached != bool(plan.shared_N[members].any()):
        fail("consumers with shared prefixes attach", where, f"producer {consumer.producer}")
    if not attached:
        return ExternalRows(none, none, none, none)
    producer = plan.producer(consumer.replica, window)
    if producer is None or consumer.producer != window * plan.dp_degree + consumer.replica:
        fail("consumers with shared prefixes attach", where, f"producer {consumer.producer}")
    call = producer.call.arrays()
    handed = (consumer.external_row_X, consumer.state_row_E, consumer.export_E)
    row, state, export = (tensor.cpu().numpy() for tensor in handed)
    require((row >= 0) & (row < call["token_T"].size), "external rows are the producer's", where, "external row")
    require(np.diff(row) > 0, "external rows are the producer's", where, "external row")
    parent = call["parent_Y"][row]
    require((parent < 0) | np.isin(parent, row), "ancestors are present", where, "external row")
    if state.shape != export.shape:
        fail("sizes agree", where, f"{state.size} rows of {export.size} handed-over states")
    made = _exported_row(call, export, plan.chunk_size, where)
    require((state >= 0) & (state < row.size), "external rows are the producer's", where, "handed-over state")
    require(row[state] == made, "an anchor is a state of the same path", where, "handed-over state")
    above = np.where(parent >= 0, np.searchsorted(row, parent), -1)
    return ExternalRows(call["token_T"][row], above, call["position_T"][row], state)
