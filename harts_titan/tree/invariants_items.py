"""Proofs that the packed segments, sequences and states of a plan are those of its trajectories (HARTS 3.3, 3.4, 4.1).

Shares no code with the planner. Shapes: as in ``tables.py``; V segments and Q sequences of one item.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from harts_titan.tree.invariants import fail, require

if TYPE_CHECKING:
    from harts_titan.tree.plan import StepPlan

_POINTER = {name: f"{name}_ptr_I1" for name in ("segment", "sequence", "state", "taken")}


@dataclass(frozen=True)
class _Step:
    """Trajectories and settings that every item is checked against."""

    tokens: np.ndarray
    offsets: np.ndarray
    shared_N: np.ndarray
    chunk_size: int
    mode: str
    node_start: np.ndarray | None

    def path(self, x: int, end: int) -> np.ndarray:
        return self.tokens[self.offsets[x] : self.offsets[x] + end]

    def agree(self, x: int, y: int, end: int) -> bool:
        return x == y or np.array_equal(self.path(x, end), self.path(y, end))

    def named(self, x: int, begin: int, end: int) -> set[int]:
        """Return the positions between two bounds, both left out, where nodes begin."""
        if self.node_start is None:
            return set()
        position = self.node_start - self.offsets[x]
        return set(position[(position > begin) & (position < end)].tolist())


@dataclass(frozen=True)
class _Item:
    """One work item: its slices of the packed arrays, and the paths it is to compute."""

    where: str
    kind: int
    rows: int
    rounds: int
    members: frozenset[int]
    begin: Mapping[int, int]
    limit: Mapping[int, int]
    part: Mapping[str, np.ndarray]


def check_items(
    plan: StepPlan,
    residual_JD: np.ndarray,
    producer_WD: np.ndarray,
    tokens: np.ndarray,
    offsets: np.ndarray,
    node_start: np.ndarray | None = None,
) -> None:
    """Prove the packed arrays of every work item.

    Args:
        plan: the plan; its placement is proven already.
        residual_JD: int64 rows of each consumer, counted from the tokens.
        producer_WD: int64 rows of each producer.
        tokens: int32 (S,) token ids.
        offsets: int64 (N+1,) trajectory bounds.
        node_start: int64 flat positions where nodes of the rollout tree begin.

    Raises:
        ValueError: Naming the violated invariant.
    """
    step = _Step(tokens, offsets, plan.shared_N, plan.chunk_size, plan.mode, node_start)
    items = _unpack(plan, residual_JD, producer_WD, offsets)
    producers = {(item.part["item_index_I"][0], item.part["item_replica_I"][0]): item for item in items if item.kind}
    taken: dict[str, set[int]] = {item.where: set() for item in producers.values()}
    for item in items:
        producer = None
        if item.kind == 0:
            window = int(np.searchsorted(plan.window_ptr_W1, item.part["item_index_I"][0], "right")) - 1
            producer = producers.get((window, item.part["item_replica_I"][0]))
        _check_sequences(step, item)
        if step.mode == "expanded":
            _check_expanded(step, item)
        else:
            _check_forest(step, item)
        _check_rounds(step, item)
        _check_roots(step, item, producer)
        _check_handed(step, item)
        if producer is not None:
            taken[producer.where] |= set(item.part["taken_state_A"].tolist())
    for item in producers.values():
        if taken[item.where] != set(range(item.part["state_position_E"].size)):
            fail("each handed-over state is used", item.where, f"consumers take {len(taken[item.where])}")


def _unpack(plan: StepPlan, residual_JD: np.ndarray, producer_WD: np.ndarray, offsets: np.ndarray) -> list[_Item]:
    packed, length = plan.items, np.diff(offsets)
    wanted = [(0, d, j) for j in range(plan.num_slots) for d in range(plan.dp_degree)]
    wanted += [(1, int(d), int(w)) for w, d in np.argwhere(producer_WD > 0)]
    for name, array in packed.items():
        if name.startswith("item_") and array.shape != (len(wanted),):
            fail("items are all consumers, then all producers", name, f"{array.shape} entries, {len(wanted)} exist")
    have = list(zip(*(packed[f"item_{name}_I"].tolist() for name in ("kind", "replica", "index")), strict=True))
    if have != wanted:
        fail("items are all consumers, then all producers", "items", f"{len(have)} listed, {len(wanted)} exist")
    for group, pointer in _POINTER.items():
        ptr = packed[pointer]
        if ptr.shape != (len(have) + 1,) or ptr[0] != 0 or (np.diff(ptr) < 0).any():
            fail("pointers tile the packed arrays", pointer, f"{ptr[:8]} for {len(have)} items")
        for name, array in packed.items():
            if name.startswith(f"{group}_") and not name.endswith(("_I", "_I1")) and array.shape != (ptr[-1],):
                fail("pointers tile the packed arrays", name, f"{array.shape} entries, {ptr[-1]} pointed at")
    out = []
    for i, (kind, d, index) in enumerate(have):
        slots = (index, index + 1) if kind == 0 else plan.window_ptr_W1[index : index + 2].tolist()
        inside = (plan.replica_N == d) & (plan.slot_N >= slots[0]) & (plan.slot_N < slots[1])
        members = [x for x in np.flatnonzero(inside).tolist() if kind == 0 or plan.shared_N[x] > 0]
        rows = residual_JD[index, d] if kind == 0 else producer_WD[index, d]
        if plan.mode == "expanded":
            rows = length[members].sum()
        part = {name: array[i : i + 1] for name, array in packed.items() if name.endswith("_I")}
        for group, pointer in _POINTER.items():
            lo, hi = packed[pointer][i : i + 2]
            part |= {name: packed[name][lo:hi] for name in packed if name.startswith(f"{group}_") and "ptr" not in name}
        where = f"{'producer' if kind else 'consumer'} of replica {d}, {'window' if kind else 'slot'} {index}"
        if int(packed["item_rows_I"][i]) != rows:
            fail("items compute all their rows", where, f"item_rows_I is {packed['item_rows_I'][i]}, must be {rows}")
        begin = {x: 0 if kind else int(plan.shared_N[x]) for x in members}
        limit = {x: int(plan.shared_N[x] if kind else length[x]) for x in members}
        rounds = int(packed["item_rounds_I"][i])
        out.append(_Item(where, kind, int(rows), rounds, frozenset(members), begin, limit, part))
    return out


def _check_sequences(step: _Step, item: _Item) -> None:
    """Sequences are chains of segments, and their columns follow from them."""
    part, name = item.part, "sequences are chains of segments"
    parent, start, length = (part[f"segment_{key}_G"] for key in ("parent", "start", "length"))
    sequence, rounds, continues = (part[f"segment_{key}_G"] for key in ("sequence", "round", "continues"))
    num, where = part["sequence_round_Q"].size, item.where
    require((parent >= -1) & (parent < np.arange(parent.size)), "a parent precedes its segment", where, "segment")
    require((continues == 0) | (continues == 1), name, where, "continuation of segment")
    require((sequence >= 0) & (sequence < num), name, where, "segment")
    follows = continues == 1
    require(~follows | (parent >= 0), name, where, "root")
    same = (sequence == sequence[parent]) & (rounds == rounds[parent]) if parent.size else follows
    require(~follows | same, name, where, "segment")
    if np.unique(parent[follows]).size != follows.sum():
        fail(name, where, "a segment is continued twice")
    if not np.array_equal(np.sort(sequence[~follows]), np.arange(num)):
        fail(name, where, f"{(~follows).sum()} heads of {num} sequences")
    tail = ~np.isin(np.arange(parent.size), parent[follows])
    head = np.flatnonzero(~follows)[np.argsort(sequence[~follows])]
    last = np.flatnonzero(tail)[np.argsort(sequence[tail])]
    require(part["sequence_round_Q"] == rounds[head], name, where, "round of sequence")
    require(np.diff(part["sequence_round_Q"]) >= 0, "sequences are numbered round after round", where, "sequence")
    require(part["sequence_start_Q"] == start[head], name, where, "start of sequence")
    require(part["sequence_end_Q"] == (start + length)[last], name, where, "end of sequence")
    anchor = start[head] - part["segment_replay_G"][head]
    require(part["sequence_anchor_Q"] == anchor, name, where, "anchor of sequence")
    for q, v in enumerate(last.tolist()):
        x, end = int(part["sequence_trajectory_Q"][q]), int(part["sequence_end_Q"][q])
        y = int(part["segment_trajectory_G"][v])
        if x not in item.members or end > item.limit[x] or y not in item.members or not step.agree(x, y, end):
            fail("a sequence lies on the path of its trajectory", where, f"sequence {q}, trajectory {x}")


def _check_expanded(step: _Step, item: _Item) -> None:
    part = item.part
    if not np.array_equal(np.sort(part["segment_trajectory_G"]), sorted(item.members)):
        fail("an expanded call shares nothing", item.where, "segments are not the trajectories")
    whole = np.diff(step.offsets)[part["segment_trajectory_G"]]
    ok = (part["segment_parent_G"] == -1) & (part["segment_start_G"] == 0) & (part["segment_length_G"] == whole)
    require(ok, "an expanded call shares nothing", item.where, "segment")


def _check_forest(step: _Step, item: _Item) -> None:
    """Segments lie on paths of the item and are disjoint; as many rows as the item has: they are all of them."""
    part, where = item.part, item.where
    parent, start, length = (part[f"segment_{key}_G"].tolist() for key in ("parent", "start", "length"))
    trajectory = part["segment_trajectory_G"].tolist()
    seen: dict[tuple[int, bytes | int], int] = {}
    for v, x in enumerate(trajectory):
        if x not in item.members or length[v] < 1 or start[v] + length[v] > item.limit[x]:
            fail("a segment lies on the path of its trajectory", where, f"segment {v}, trajectory {x}")
        p = parent[v]
        if p >= 0:
            if start[v] != start[p] + length[p] or not step.agree(x, trajectory[p], start[v]):
                fail("a segment continues its parent's path", where, f"segment {v}")
            key: tuple[int, bytes | int] = (p, int(step.path(x, start[v] + 1)[-1]))
        else:
            if start[v] != item.begin[x]:
                fail("roots start where the producer ends", where, f"segment {v} at {start[v]}")
            key = (-1, step.path(x, start[v] + 1).tobytes())
        if key in seen:
            fail("distinct rows have distinct prefixes", where, f"segment {v} begins like another one")
        seen[key] = v
    if sum(length) != item.rows:
        fail("items compute all their rows", where, f"segments have {sum(length)} tokens, the item {item.rows} rows")
    cuts = list(zip(part["state_trajectory_E"].tolist(), part["state_position_E"].tolist(), strict=True))
    begun = _begun(step, item, seen)
    children = np.bincount(part["segment_parent_G"] + 1, minlength=1)[1:].tolist()
    for v, p in enumerate(parent):
        if p < 0 or children[p] != 1 or v in begun:
            continue
        cut = any(at == start[v] and step.agree(x, trajectory[p], start[v]) for x, at in cuts)
        if step.mode == "compact" or not cut:
            fail("segments are the maximal fork-free paths", where, f"segment {p} has an only child")


def _begun(step: _Step, item: _Item, first: Mapping[tuple[int, bytes | int], int]) -> set[int]:
    """Return the segments that begin where a trajectory of the item says that a node does; all those places do.

    Args:
        step: what is checked against.
        item: a forest of all its rows.
        first: segment by segment above and first token, roots by the path up to their first token.
    """
    end = (item.part["segment_start_G"] + item.part["segment_length_G"]).tolist()
    begun: set[int] = set()
    for x in item.members:
        named = step.named(x, item.begin[x], item.limit[x])
        at = item.begin[x]
        key: tuple[int, bytes | int] = (-1, step.path(x, at + 1).tobytes())
        while named:
            v = first.get(key, -1)
            if v < 0 or min(named) < at:
                fail("a node begins where the workload says so", item.where, f"trajectory {x} at {min(named)}")
            if at in named:
                begun.add(v)
                named.remove(at)
            at = end[v]
            key = (v, int(step.path(x, at + 1)[-1]))
    return begun


def _check_rounds(step: _Step, item: _Item) -> None:
    """Every sequence starts on a state that an earlier round has made, and replays from there."""
    part, where = item.part, item.where
    parent, start, rounds = (part[f"segment_{key}_G"].tolist() for key in ("parent", "start", "round"))
    replay, continues = part["segment_replay_G"].tolist(), part["segment_continues_G"].tolist()
    if item.rounds != len(set(rounds)) or set(rounds) != set(range(item.rounds)):
        fail("rounds are contiguous", where, f"{len(set(rounds))} of {item.rounds} rounds run something")
    expected = {"expanded": min(1, len(rounds)), "nodewise": len(rounds)}.get(step.mode, item.rounds)
    if item.rounds != expected or (step.mode != "compact" and any(continues)):
        fail("rounds are contiguous", where, f"{item.rounds} rounds in mode {step.mode}, must be {expected}")
    if step.mode == "depthwise":
        depth: list[int] = []
        for v, p in enumerate(parent):
            depth.append(depth[p] + 1 if p >= 0 else 0)
            if rounds[v] != depth[v]:
                fail("a round is a depth of the tree", where, f"segment {v} at depth {depth[v]} in round {rounds[v]}")
    for v in range(len(parent)):
        wanted = start[v] % step.chunk_size if step.mode == "compact" and not continues[v] else 0
        if replay[v] != wanted:
            fail("replay rows are exactly [anchor, start)", where, f"segment {v} replays {replay[v]}, must {wanted}")
        anchor, u = start[v] - replay[v], parent[v]
        while u >= 0 and start[u] >= anchor:
            u = parent[u]
        # Without such a segment the state is the producer's or zero: ready before the first round.
        if not continues[v] and u >= 0 and rounds[u] >= rounds[v]:
            fail("an anchor is made in an earlier round", where, f"segment {v} at {anchor}")


def _check_roots(step: _Step, item: _Item, producer: _Item | None) -> None:
    """Roots start from the zero state or from the state of their path that the producer hands over."""
    part, where, name = item.part, item.where, "an anchor is a state of the same path"
    taken, state = part["taken_state_A"], part["segment_state_G"]
    handed = 0 if producer is None else producer.part["state_position_E"].size
    require((taken >= 0) & (taken < handed), "initial states exist", where, "external state")
    require(np.diff(taken) > 0, "each handed-over state is taken once", where, "external state")
    for v, (p, start, replay, e) in enumerate(
        zip(*(part[f"segment_{key}_G"].tolist() for key in ("parent", "start", "replay", "state")), strict=True)
    ):
        anchor = start - replay
        if p >= 0 or anchor == 0:
            if e != -1:
                fail("the zero state starts at position 0 only", where, f"segment {v} starts from state {e}")
            continue
        if not 0 <= e < taken.size or producer is None:
            fail("initial states exist", where, f"segment {v} starts from state {e}")
        s, x = int(taken[e]), int(part["segment_trajectory_G"][v])
        y = int(producer.part["state_trajectory_E"][s])
        if y not in producer.members or producer.part["state_position_E"][s] != anchor:
            fail(name, where, f"segment {v} at {anchor}, state {s} of the producer")
        if not step.agree(x, y, anchor):
            fail(name, where, f"segment {v}, state {s} of the producer")
    if set(range(taken.size)) - set(state.tolist()):
        fail("each handed-over state is used", where, "an external state starts no root")


def _check_handed(step: _Step, item: _Item) -> None:
    """Each state a producer hands over is made by its sequence, where the kernel can export it."""
    part, where = item.part, item.where
    sequence, position, trajectory = (part[f"state_{key}_E"].tolist() for key in ("sequence", "position", "trajectory"))
    if len(set(zip(sequence, position, strict=True))) != len(sequence) or (item.kind == 0 and sequence):
        fail("each state is exported once", where, f"{len(sequence)} states")
    for e, (q, at, x) in enumerate(zip(sequence, position, trajectory, strict=True)):
        if not 0 <= q < part["sequence_start_Q"].size or x not in item.members or not 0 < at <= item.limit[x]:
            fail("a state is made by its sequence", where, f"state {e}")
        anchor, start, end = (int(part[f"sequence_{key}_Q"][q]) for key in ("anchor", "start", "end"))
        if not start < at <= end or not step.agree(x, int(part["sequence_trajectory_Q"][q]), at):
            fail("a state is made by its sequence", where, f"state {e} at {at}, sequence [{start}, {end})")
        if (at - anchor) % step.chunk_size if step.mode == "compact" else at != end:
            fail("exports lie on the chunk grid", where, f"state {e} at {at}, sequence from {anchor}")
