"""Proofs that a call means what its trajectories say; shares no code with the planner (HARTS 3.2 to 3.4).

Every check states a property from its definition and tests it on all rows, positions or sequences. Shapes: as in
``layout.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

import numba
import numpy as np

Arrays = Mapping[str, np.ndarray]
Nodes = tuple[np.ndarray, np.ndarray]
"""Where nodes of the rollout tree begin: places in ``trajectory_N`` and positions, both int64."""


@dataclass(frozen=True)
class ExternalRows:
    """What a producer really hands over: the truth an attached call is checked against.

    Attributes:
        token_X: int64 token id of each interface row.
        parent_X: int64 previous row of the path, -1 at position 0.
        position_X: int64 absolute position.
        state_row_E: int64 row after which each handed-over state was taken.
    """

    token_X: np.ndarray
    parent_X: np.ndarray
    position_X: np.ndarray
    state_row_E: np.ndarray


@dataclass(frozen=True)
class ProducerCall:
    """What the call of a producer may do that the call of a consumer may not.

    Attributes:
        prefix_N: int64 tokens of each trajectory that the call computes.
        export_H: int64 exports that consumers take.
        cut_row_H: int64 rows after which a state is handed over: where chunk grids restart a segment ends there.
    """

    prefix_N: np.ndarray
    export_H: np.ndarray
    cut_row_H: np.ndarray


_NO_ROWS = ExternalRows(*(np.zeros(0, np.int64) for _ in range(4)))


def fail(invariant: str, where: str, detail: str) -> NoReturn:
    """Refuse a plan.

    Raises:
        ValueError: Naming the invariant and the place.
    """
    raise ValueError(f"invariant '{invariant}' violated at {where}: {detail}")


def require(ok: np.ndarray, invariant: str, where: str, what: str) -> None:
    """Refuse a plan, naming the first false entry of a 1-D condition.

    Raises:
        ValueError: If an entry is false.
    """
    if not np.all(ok):
        fail(invariant, where, f"{what} {int(np.argmin(ok))} ({int((~ok).sum())} in all)")


def check_call(
    call: Arrays,
    tokens: np.ndarray,
    offsets: np.ndarray,
    *,
    chunk_size: int,
    mode: str,
    where: str = "call",
    external: ExternalRows | None = None,
    made: ProducerCall | None = None,
    nodes: Nodes | None = None,
) -> None:
    """Prove that the layout of one call is exact.

    Args:
        call: arrays by ``CallLayout`` field name.
        tokens: int32 (S,) token ids of the step.
        offsets: int64 (N+1,) trajectory bounds.
        chunk_size: tokens in a linear-attention chunk.
        mode: ``compact``, ``nodewise``, ``depthwise`` or ``expanded``.
        where: name of the call in messages.
        external: the producer's interface rows, if the call attaches to one.
        made: set for the call of a producer.
        nodes: what the workload names, if it does, with every trajectory that passes the call's rows; used where
            chunk grids restart.

    Raises:
        ValueError: Naming the violated invariant.
    """
    producer = _NO_ROWS if external is None else external
    tokens, offsets = np.asarray(tokens), np.asarray(offsets, dtype=np.int64)
    _check_sizes(call, producer, where)
    _check_parents(call, producer, where)
    _check_positions(call, tokens, offsets, producer, made, where)
    _check_sharing(call, producer, mode, where)
    _check_taps(call, where)
    _check_intervals(call, where)
    _check_segments(call, mode, made, nodes, where)
    _check_parts(call, where)
    _check_packing(call, chunk_size, mode, where)
    _check_states(call, chunk_size, mode, producer, made, where)


def _check_sizes(call: Arrays, producer: ExternalRows, where: str) -> None:
    sizes: dict[str, int] = {"X": len(producer.token_X)}
    for name, array in call.items():
        *_, suffix = name.split("_")
        letter, extra = suffix[0], int(suffix.endswith("1"))
        size = array.shape[0] - extra
        if sizes.setdefault(letter, size) != size:
            fail("sizes agree", where, f"{name} has {size} entries, others of its kind {sizes[letter]}")
    if sizes["Y"] != sizes["X"] + sizes["T"]:
        fail("sizes agree", where, f"{sizes['Y']} path rows, but {sizes['X']} external and {sizes['T']} own rows")


def _check_parents(call: Arrays, producer: ExternalRows, where: str) -> None:
    parent, x = call["parent_Y"], len(producer.token_X)
    require((parent >= -1) & (parent < np.arange(parent.size)), "a parent precedes its row", where, "path row")
    require(parent[:x] == producer.parent_X, "external rows are the producer's", where, "external row")
    position = np.concatenate([producer.position_X, call["position_T"]])
    expected = np.where(parent >= 0, position[parent] + 1, 0) if position.size else position
    require(position == expected, "a position is its parent's plus one", where, "path row")


def _check_positions(
    call: Arrays,
    tokens: np.ndarray,
    offsets: np.ndarray,
    producer: ExternalRows,
    made: ProducerCall | None,
    where: str,
) -> None:
    """Every position is mapped once, to a row whose whole token prefix is the position's."""
    index, bound = call["trajectory_N"], call["position_offset_N1"]
    if index.size == 0 or index.min() < 0 or index.max() >= offsets.size - 1 or np.unique(index).size != index.size:
        fail("trajectories are distinct and exist", where, f"trajectory_N {index[:8]}")
    length = np.diff(offsets)[index] if made is None else made.prefix_N
    if length.shape != index.shape or (length > np.diff(offsets)[index]).any() or (length < 1).any():
        fail("a producer computes prefixes", where, f"prefix_N {length[:8]}")
    if bound[0] != 0 or not np.array_equal(np.diff(bound), length):
        fail("every position is mapped once", where, "position_offset_N1 does not follow the trajectories' lengths")
    local = np.arange(bound[-1]) - np.repeat(bound[:-1], length)
    source = np.repeat(offsets[index], length) + local
    row, parent = call["row_of_position_S"], call["parent_Y"]
    if row.size != source.size:
        fail("every position is mapped once", where, f"{row.size} positions mapped, {source.size} exist")
    require(call["source_position_S"] == source, "source positions are the step batch's", where, "position")
    require((row >= 0) & (row < parent.size), "every position is mapped once", where, "position")
    path_token = np.concatenate([producer.token_X, call["token_T"]])
    require(path_token[row] == tokens[source], "row prefix equals trajectory prefix", where, "token of position")
    before = np.concatenate([np.full(1, -1), row[:-1]])
    before[bound[:-1]] = -1
    # The parent of each position's row is the row of the position before: by induction the walk from the row to the
    # root visits exactly the trajectory's tokens.
    require(parent[row] == before, "row prefix equals trajectory prefix", where, "parent walk at position")
    last = np.zeros(row.size, bool)
    last[bound[1:] - 1] = True
    label = np.where(last, -100, tokens[np.minimum(source + 1, tokens.size - 1)])
    require(call["label_S"] == label, "label is the next token of the trajectory", where, "position")


def _check_sharing(call: Arrays, producer: ExternalRows, mode: str, where: str) -> None:
    x, num_rows = len(producer.token_X), call["token_T"].size
    used = np.bincount(call["row_of_position_S"], minlength=x + num_rows)
    require(call["multiplicity_T"] == used[x:], "multiplicity counts the row's positions", where, "own row")
    if call["multiplicity_T"].sum() + used[:x].sum() != call["row_of_position_S"].size:
        fail("multiplicities sum to positions", where, "sums differ")
    require(call["multiplicity_T"] > 0, "every row serves a position", where, "own row")
    if mode == "expanded":
        require(call["multiplicity_T"] == 1, "an expanded call shares nothing", where, "own row")
        return
    # Rows with different parents have different prefixes by induction, so siblings with equal tokens are the only
    # possible duplicates.
    token = np.concatenate([producer.token_X, call["token_T"]])
    # Token ids are int32, so parent and token fit one integer.
    pair = np.sort((call["parent_Y"] + 1) * 2**31 + token)
    if (np.diff(pair) == 0).any():
        fail("distinct rows have distinct prefixes", where, "two rows have one parent and one token")


def _check_taps(call: Arrays, where: str) -> None:
    """Compare taps with the positions before one position of each row, not with parents."""
    row, taps = call["row_of_position_S"], call["conv_tap_TW"]
    x, bound = call["parent_Y"].size - call["token_T"].size, call["position_offset_N1"]
    local = np.arange(row.size) - np.repeat(bound[:-1], np.diff(bound))
    some = np.zeros(call["parent_Y"].size, np.int64)
    some[row] = np.arange(row.size)
    some = some[x:]
    for back in range(taps.shape[1]):
        expected = np.where(local[some] >= back, row[np.maximum(some - back, 0)], -1)
        ok = taps[:, taps.shape[1] - 1 - back] == expected
        require(ok, "taps are the true path predecessors", where, f"tap {back} back of own row")


@numba.njit(cache=True)
def _rows_below(parent_Y):
    below = np.ones(parent_Y.shape[0], np.int64)
    for y in range(parent_Y.shape[0] - 1, -1, -1):
        if parent_Y[y] >= 0:
            below[parent_Y[y]] += below[y]
    return below


def _check_intervals(call: Arrays, where: str) -> None:
    tin, tout, parent = call["tin_Y"], call["tout_Y"], call["parent_Y"]
    name = "tin/tout are the ancestor relation"
    if not np.array_equal(np.sort(tin), np.arange(tin.size)):
        fail(name, where, "tin_Y is not a permutation")
    # Nested intervals contain all descendants; a width equal to their number leaves no room for any other row.
    require(tout - tin == _rows_below(parent), name, where, "width at path row")
    child = np.flatnonzero(parent >= 0)
    above = parent[child]
    require((tin[above] < tin[child]) & (tout[child] <= tout[above]), name, where, "nesting at child")


def _check_segments(call: Arrays, mode: str, made: ProducerCall | None, nodes: Nodes | None, where: str) -> None:
    name = "segments are the maximal fork-free paths"
    parent, length, row = call["seg_parent_V"], call["seg_length_V"], call["seg_row_V"]
    num_rows, x = call["token_T"].size, call["parent_Y"].size - call["token_T"].size
    if num_rows == 0:
        return
    require((length > 0) & (row >= 0) & (row + length <= num_rows), name, where, "bounds of segment")
    require((parent >= -1) & (parent < np.arange(parent.size)), name, where, "order of segment")
    if length.sum() != num_rows:
        fail(name, where, f"segments have {length.sum()} tokens, the call {num_rows} rows")
    offset = np.arange(num_rows) - np.repeat(np.cumsum(length) - length, length)
    rows = np.repeat(row, length) + offset
    segment = np.repeat(np.arange(parent.size), length)
    require(call["segment_T"][rows] == segment, name, where, "row in segment order")
    position = call["seg_start_V"][segment] + offset
    require(call["position_T"][rows] == position, name, where, "position in segment order")
    inner = offset > 0
    require(call["parent_Y"][x + rows[inner]] == x + rows[inner] - 1, name, where, "inner row in segment order")
    above = np.where(parent >= 0, x + row[parent] + length[parent] - 1, call["seg_attach_V"])
    require(call["parent_Y"][x + row] == above, name, where, "parent row of segment")
    require((parent < 0) | (call["seg_attach_V"] == -1), name, where, "attachment of segment")
    require((call["seg_attach_V"] >= -1) & (call["seg_attach_V"] < x), name, where, "attachment of segment")
    depth = np.where(parent >= 0, call["seg_depth_V"][parent] + 1, 0)
    require(call["seg_depth_V"] == depth, "depth counts the segments above", where, "segment")
    if mode != "expanded":
        children = np.bincount(parent[parent >= 0], minlength=parent.size)
        cut = made.cut_row_H if made is not None and mode != "compact" else np.zeros(0, np.int64)
        begun = _named_rows(call, nodes) if nodes is not None and mode != "compact" else np.zeros(0, np.int64)
        require(np.isin(begun, row), "a node begins where the workload says so", where, "named position")
        alone = np.append(children, 0)[parent] == 1
        behind_cut = np.isin(row, begun) | np.isin(row[parent] + length[parent] - 1, cut)
        require(~alone | behind_cut, name, where, "only child: segment")


def _named_rows(call: Arrays, nodes: Nodes) -> np.ndarray:
    """Return the own rows that begin a node."""
    row = call["row_of_position_S"][call["position_offset_N1"][nodes[0]] + nodes[1]]
    x = call["parent_Y"].size - call["token_T"].size
    return row[row >= x] - x


def _check_parts(call: Arrays, where: str) -> None:
    name = "a trajectory consists of exactly its parts"
    x = call["parent_Y"].size - call["token_T"].size
    row, part = call["row_of_position_S"], call["part_T"]
    if part.size and (part[0] != 0 or not np.isin(np.diff(part), (0, 1)).all()):
        fail(name, where, "parts are not runs of rows")
    inside = (np.diff(part) == 1) | (np.diff(call["segment_T"]) == 0)
    require(inside, "a part lies in one segment", where, "own row")
    trajectory = np.repeat(np.arange(call["trajectory_N"].size), np.diff(call["position_offset_N1"]))
    own = row >= x
    pair = np.stack([trajectory[own], part[row[own] - x]], axis=1)
    enters = (
        np.flatnonzero(np.append(True, (pair[1:] != pair[:-1]).any(axis=1))) if pair.size else np.zeros(0, np.int64)
    )
    have = np.stack([call["path_trajectory_J"], call["path_part_J"]], axis=1)
    if not np.array_equal(have, pair[enters]):
        fail(name, where, "the (trajectory, part) pairs are not those of the map, in path order")
    # A part that a trajectory enters must be walked to its end.
    rows = np.diff(np.append(enters, pair.shape[0]))
    require(np.bincount(part, minlength=1)[have[:, 1]] == rows, name, where, "partly covered pair")


def _check_packing(call: Arrays, chunk_size: int, mode: str, where: str) -> None:
    bound, packed, kept = call["cu_seqlens_Q1"], call["packed_row_P"], call["kept_T"]
    num_rows, x, parent = call["token_T"].size, call["parent_Y"].size - call["token_T"].size, call["parent_Y"]
    replay, start, sequence = call["replay_Q"], call["start_Q"], call["seg_sequence_V"]
    if bound[0] != 0 or bound[-1] != packed.size or (np.diff(bound) <= replay).any() or (replay < 0).any():
        fail("packed sequences tile the packed rows", where, "cu_seqlens_Q1 and replay_Q")
    if num_rows == 0:
        return
    require(np.diff(kept) > 0, "kept rows increase", where, "own row")
    is_kept = np.arange(packed.size) - np.repeat(bound[:-1], np.diff(bound)) >= np.repeat(replay, np.diff(bound))
    if not np.array_equal(kept, np.flatnonzero(is_kept)):
        fail("replay rows are exactly [anchor, start)", where, "kept_T is not every row but the replayed ones")
    require(packed[kept] == x + np.arange(num_rows), "packed order is memory order", where, "own row")
    inner = np.ones(packed.size, bool)
    inner[bound[:-1]] = False
    inner = np.flatnonzero(inner)
    require(parent[packed[inner]] == packed[inner - 1], "a sequence is a path", where, "inner packed row")
    position = np.where(packed >= x, call["position_T"][np.maximum(packed - x, 0)], -1)
    head = position[bound[:-1] + replay]
    anchor = head - head % chunk_size if mode == "compact" else head
    require(start == anchor, "replay rows are exactly [anchor, start)", where, "start of sequence")
    require(replay == head - anchor, "replay rows are exactly [anchor, start)", where, "replay of sequence")

    ptr = call["round_ptr_R1"]
    if ptr[0] != 0 or ptr[-1] != replay.size or (np.diff(ptr) < 1).any():
        fail("rounds are contiguous", where, f"round_ptr_R1 {ptr[:8]} over {replay.size} sequences")
    sequence_T = np.repeat(np.arange(replay.size), np.diff(bound) - replay)
    first = call["seg_row_V"]
    same = (sequence >= 0) & (sequence < replay.size)
    require(same, "segments run in their sequence and round", where, "segment")
    require(sequence_T == sequence[call["segment_T"]], "segments run in their sequence and round", where, "own row")
    round_Q = np.repeat(np.arange(ptr.size - 1), np.diff(ptr))
    require(call["seg_round_V"] == round_Q[sequence], "segments run in their sequence and round", where, "segment")
    continues = kept[first] > (bound[:-1] + replay)[sequence]
    require(call["seg_continues_V"] == continues, "segments run in their sequence and round", where, "continuation of")
    if mode != "compact":
        require(~continues, f"a {mode} sequence is one segment", where, "segment")
    if mode == "depthwise":
        require(call["seg_round_V"] == call["seg_depth_V"], "a round is a depth of the tree", where, "segment")
    rounds = {"expanded": 1, "nodewise": first.size}.get(mode, ptr.size - 1)
    if ptr.size - 1 != rounds:
        fail("rounds are contiguous", where, f"{ptr.size - 1} rounds in mode {mode}, must be {rounds}")


def _check_states(
    call: Arrays, chunk_size: int, mode: str, producer: ExternalRows, made: ProducerCall | None, where: str
) -> None:
    bound, packed, start = call["cu_seqlens_Q1"], call["packed_row_P"], call["start_Q"]
    init, source, boundary = call["init_state_Q"], call["export_sequence_E"], call["export_boundary_E"]
    if init.size == 0:
        return
    handed = len(producer.state_row_E)
    require((init >= -1) & (init < handed + source.size), "initial states exist", where, "sequence")
    require((init == -1) == (start == 0), "the zero state starts at position 0 only", where, "sequence")
    length = np.diff(bound)
    if source.size and (source.min() < 0 or source.max() >= length.size):
        fail("initial states exist", where, "export_sequence_E is out of range")
    last = -(-length[source] // chunk_size)
    require((boundary >= 1) & (boundary <= last), "exports lie inside their sequence", where, "export")
    if np.unique(np.stack([source, boundary], axis=1), axis=0).shape[0] != source.size:
        fail("each state is exported once", where, "two exports are equal")
    used = init - handed if made is None else np.concatenate([init - handed, made.export_H])
    if not np.isin(np.arange(source.size), used).all():
        fail("each exported state is used", where, "an export starts no sequence")
    if not np.isin(np.arange(handed), init).all():
        fail("each handed-over state is used", where, "an external state starts no sequence")
    consumed = boundary * chunk_size
    if mode == "compact":
        require(consumed <= length[source], "exports lie on the chunk grid", where, "export")
    consumed = np.minimum(consumed, length[source])
    row_before = call["parent_Y"][packed[bound[:-1]]]
    ready = init >= handed
    export, reader = init[ready] - handed, np.flatnonzero(ready)
    ptr = call["round_ptr_R1"]
    round_Q = np.repeat(np.arange(ptr.size - 1), np.diff(ptr))
    require(round_Q[source[export]] < round_Q[reader], "an anchor is made in an earlier round", where, "reader")
    same = start[source[export]] + consumed[export] == start[reader]
    require(same, "an anchor is at the right position", where, "reader")
    tail = packed[bound[source] + consumed - 1][export]
    require(tail == row_before[reader], "an anchor is a state of the same path", where, "reader")
    outside = np.flatnonzero((init >= 0) & (init < handed))
    require(
        np.asarray(producer.state_row_E)[init[outside]] == row_before[outside],
        "an anchor is a state of the same path",
        where,
        "reader of a producer's state",
    )
