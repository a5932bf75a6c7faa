"""Index arrays of one model call, from a segment forest and its rounds (HARTS 3.3 and 3.4).

Path rows are numbered ``[0, X)`` for the rows of a producer's interface and ``[X, X+T)`` for own rows. Own rows are
laid out in the order in which the packed linear-attention sequences produce them, round after round, so no layer has
to permute them; every parent row comes before its children.

Shapes: T own rows, X external rows, Y = X+T path rows, S positions, N trajectories, V segments, Q sequences, P packed
rows, E exported states, R rounds, W short-convolution taps, J (trajectory, part) pairs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from harts_titan.tree import row_kernels as rk
from harts_titan.tree.forest import Forest
from harts_titan.tree.rounds import RoundPlan, plan_rounds

MODES = ("compact", "nodewise", "depthwise", "expanded")
RESTARTING = ("nodewise", "depthwise")
"""Modes whose chunk grid restarts at every segment, a node of the rollout tree: final states are handed over, nothing
is replayed."""


@dataclass(frozen=True)
class Attachment:
    """How a consumer hangs on a producer: the producer's interface rows, and where the consumer's roots attach.

    A root of the attached forest starts at absolute position ``position_X[attach_row_V[root]] + 1``.

    Attributes:
        parent_X: int64 previous row of the path, -1 at position 0; parents come before children.
        position_X: int64 absolute position of each row.
        state_row_E: int64 row after which each handed-over recurrent state was taken; a consumer needs the state in
            front of each root's last chunk boundary.
        attach_row_V: int64 row each root continues, -1 where a segment is no root or a root starts at position 0.
        end_row_N: int64 row of the last token of a trajectory that lies wholly in the producer, else -1.
    """

    parent_X: np.ndarray
    position_X: np.ndarray
    state_row_E: np.ndarray
    attach_row_V: np.ndarray
    end_row_N: np.ndarray


def detached(num_segments: int, num_trajectories: int) -> Attachment:
    """Return the attachment of a consumer without producer."""
    none = np.zeros(0, np.int64)
    return Attachment(none, none, none, np.full(num_segments, -1), np.full(num_trajectories, -1))


def plan_forest_rounds(forest: Forest, *, chunk_size: int, mode: str) -> RoundPlan:
    """Return the rounds of a forest under an execution mode.

    Args:
        forest: segments of the work item; where a root starts behind position 0, a producer hands its state over.
        chunk_size: tokens in a linear-attention chunk.
        mode: ``compact`` (fewest rounds, with replay), ``nodewise`` (a round per segment, no replay), ``depthwise`` (a
            round per depth of the tree, no replay) or ``expanded`` (one round of whole trajectories; the forest has
            only roots).

    Returns:
        The plan of ``plan_rounds`` for ``compact``, its trivial counterpart otherwise.

    Raises:
        ValueError: If ``mode`` is unknown, or ``expanded`` is asked of a forest with forks.
    """
    num_segments = forest.num_segments
    none = np.zeros(num_segments, np.int64)
    if mode == "compact":
        root_start_V = np.where(forest.parent_V < 0, forest.start_V, 0)
        return plan_rounds(forest.parent_V, forest.length_V, chunk_size, root_start_V)
    if mode == "nodewise":
        return RoundPlan(num_segments, np.arange(num_segments), np.zeros(num_segments, bool), none)
    if mode == "depthwise":
        # A parent is one segment higher, so every depth up to the largest has a segment.
        return RoundPlan(int(forest.depth_V.max(initial=-1)) + 1, forest.depth_V, np.zeros(num_segments, bool), none)
    if mode == "expanded":
        if (forest.parent_V >= 0).any():
            raise ValueError("mode 'expanded' takes whole trajectories, each a root of its own")
        return RoundPlan(min(1, num_segments), none, np.zeros(num_segments, bool), none)
    raise ValueError(f"mode is {mode!r}; must be one of {MODES}")


def build_layout(
    forest: Forest,
    rounds: RoundPlan,
    tokens: np.ndarray,
    offsets: np.ndarray,
    trajectory_N: np.ndarray,
    *,
    chunk_size: int,
    num_taps: int = 4,
    restart_chunks: bool = False,
    attachment: Attachment | None = None,
    handed_E: tuple[np.ndarray, np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """Return every array of a ``CallLayout``, by field name (HARTS 3.3, 3.4).

    Args:
        forest: segments; its trajectory indices count in ``trajectory_N``.
        rounds: rounds and continuations of the segments.
        tokens: int32 (S of the step,) token ids.
        offsets: int64 (trajectories of the step + 1,) bounds.
        trajectory_N: int64 indices of the call's trajectories in the step batch; fixes the order of positions.
        chunk_size: tokens in a linear-attention chunk.
        num_taps: width of the short convolution.
        restart_chunks: True if every sequence starts a chunk grid of its own at its first token
            (:data:`RESTARTING`), False if sequences start on the absolute chunk grid and replay.
        attachment: the producer hung on, if any.
        handed_E: states that a producer hands over, exported beside those its own sequences start from: int64 segment
            that makes each, and the tokens of its path before it.

    Returns:
        Arrays named like the fields of ``CallLayout``; int64, ``seg_continues_V`` bool.

    Raises:
        ValueError: If ``num_taps`` is not positive or a root needs a state that the producer does not hand over.
    """
    if num_taps < 1:
        raise ValueError(f"num_taps is {num_taps}, must be at least 1")
    hang = detached(forest.num_segments, len(trajectory_N)) if attachment is None else attachment
    tokens = np.ascontiguousarray(tokens, dtype=np.int32)
    trajectory_N = np.ascontiguousarray(trajectory_N, dtype=np.int64)
    num_external, num_rows = hang.parent_X.shape[0], forest.num_tokens

    sequence_V, head_Q, memory_order = number_sequences(forest, rounds)
    seg_row_V = np.zeros(forest.num_segments, np.int64)
    seg_row_V[memory_order] = np.cumsum(forest.length_V[memory_order]) - forest.length_V[memory_order]
    end_row_N = hang.end_row_N.copy()
    own = forest.end_segment_N >= 0
    last = forest.end_segment_N[own]
    end_row_N[own] = num_external + seg_row_V[last] + forest.end_position_N[own] - 1 - forest.start_V[last]
    position_offset_N1 = np.concatenate([np.zeros(1, np.int64), np.cumsum(forest.end_position_N)])

    replay = 0 if restart_chunks else int((forest.start_V[head_Q] % chunk_size).sum())
    arena = _Arena((10 + num_taps) * num_rows + 3 * num_external + 3 * int(position_offset_N1[-1]) + replay)
    out = _own_rows(forest, seg_row_V, tokens, offsets[trajectory_N], end_row_N - num_external, arena)
    out |= _path_rows(
        _find_chains(forest, hang, seg_row_V, memory_order),
        tokens,
        offsets[trajectory_N],
        end_row_N,
        position_offset_N1,
        arena,
    )
    (conv_tap_TW,) = arena.take(1, num_rows, num_taps)
    rk.convolution_taps(out["parent_Y"], num_external, conv_tap_TW)
    out |= {
        "conv_tap_TW": conv_tap_TW,
        "trajectory_N": trajectory_N,
        "position_offset_N1": position_offset_N1,
        "seg_parent_V": forest.parent_V,
        "seg_start_V": forest.start_V,
        "seg_length_V": forest.length_V,
        "seg_row_V": seg_row_V,
        "seg_depth_V": forest.depth_V,
        "seg_sequence_V": sequence_V,
        "seg_round_V": rounds.round_of_segment,
        "seg_continues_V": rounds.continues_parent,
        "seg_attach_V": hang.attach_row_V,
        "round_ptr_R1": np.searchsorted(rounds.round_of_segment[head_Q], np.arange(rounds.num_rounds + 1)),
    }
    out |= _pack(
        out, head_Q, hang.state_row_E, handed_E, chunk_size=chunk_size, restart_chunks=restart_chunks, arena=arena
    )
    return {name: _frozen(array) for name, array in out.items()}


class _Arena:
    """Hands out parts of one int64 allocation.

    The arrays of a call have a few MB each. On their own they get small pages, whose faults take longer than filling
    them does; one large allocation gets huge pages where the system allows.
    """

    def __init__(self, size: int) -> None:
        self._memory, self._used = np.empty(size, np.int64), 0

    def take(self, count: int, *shape: int) -> list[np.ndarray]:
        """Return ``count`` arrays of a shape, not initialised."""
        begin = self._used
        self._used += count * math.prod(shape)
        return list(self._memory[begin : self._used].reshape(count, *shape))


def _own_rows(
    forest: Forest,
    seg_row_V: np.ndarray,
    tokens: np.ndarray,
    first_N: np.ndarray,
    end_own_row_N: np.ndarray,
    arena: _Arena,
) -> dict[str, np.ndarray]:
    """Return the arrays of own rows, and of their parts: segments cut at trajectory ends."""
    token_T, position_T, segment_T, part_T, multiplicity_T = arena.take(5, forest.num_tokens)
    source_V = first_N[forest.source_V] + forest.start_V
    rk.own_rows(forest.start_V, forest.length_V, seg_row_V, tokens, source_V, token_T, position_T, segment_T)
    behind_end = end_own_row_N[forest.end_segment_N >= 0] + 1
    first_U1 = np.unique(np.concatenate([seg_row_V, behind_end, [forest.num_tokens]]))
    path_trajectory_J, path_part_J = rk.path_parts(
        forest.parent_V,
        _run_of(first_U1, seg_row_V),
        _run_of(first_U1, seg_row_V + forest.length_V - 1),
        forest.end_segment_N,
        _run_of(first_U1, end_own_row_N),
    )
    # All rows of a part lie on the same paths.
    count_U = np.bincount(path_part_J, minlength=first_U1.shape[0] - 1)
    rk.part_rows(first_U1, count_U, part_T, multiplicity_T)
    return {
        "token_T": token_T,
        "position_T": position_T,
        "multiplicity_T": multiplicity_T,
        "segment_T": segment_T,
        "part_T": part_T,
        "path_trajectory_J": path_trajectory_J,
        "path_part_J": path_part_J,
    }


def _run_of(first_U1: np.ndarray, row_M: np.ndarray) -> np.ndarray:
    """Return which of consecutive runs of rows holds each row; -1 for row -1."""
    return np.searchsorted(first_U1, row_M, "right") - 1


@dataclass(frozen=True)
class _Chains:
    """Runs of path rows in which every row continues the one before, and nothing else continues any but the last.

    Own chains are the segments; the rows of an interface are cut where paths part and where roots attach.

    Attributes:
        first_C1: first row of each chain, ascending, and the number of path rows.
        above_C: row in front of each chain's first, -1 at position 0.
        chain_above_C: chain whose last row that is, else -1.
    """

    first_C1: np.ndarray
    above_C: np.ndarray
    chain_above_C: np.ndarray


def _find_chains(forest: Forest, hang: Attachment, seg_row_V: np.ndarray, memory_order: np.ndarray) -> _Chains:
    num_external = hang.parent_X.shape[0]
    jump_X = np.flatnonzero(hang.parent_X != np.arange(-1, num_external - 1))
    # Row 0 begins a chain; what continues row -1 cuts in front of it.
    cut = np.concatenate([[0], jump_X, hang.parent_X[jump_X] + 1, hang.attach_row_V + 1])
    cut_X = np.unique(cut[cut < num_external])
    last_row_V = num_external + seg_row_V + forest.length_V - 1
    above_V = np.where(forest.parent_V >= 0, last_row_V[forest.parent_V], hang.attach_row_V)
    first_C1 = np.concatenate([cut_X, num_external + seg_row_V[memory_order], [num_external + forest.num_tokens]])
    above_C = np.concatenate([hang.parent_X[cut_X], above_V[memory_order]])
    return _Chains(first_C1, above_C, _run_of(first_C1, above_C))


def _path_rows(
    chains: _Chains,
    tokens: np.ndarray,
    first_N: np.ndarray,
    end_row_N: np.ndarray,
    position_offset_N1: np.ndarray,
    arena: _Arena,
) -> dict[str, np.ndarray]:
    """Return the arrays of path rows and of positions."""
    first_C1, above_C, chain_above_C = chains.first_C1, chains.above_C, chains.chain_above_C
    tin_C, size_C = rk.depth_first_intervals(chain_above_C, np.diff(first_C1))
    parent_Y, tin_Y, tout_Y = arena.take(3, int(first_C1[-1]))
    rk.path_rows(first_C1, above_C, tin_C, size_C, parent_Y, tin_Y, tout_Y)
    row_of_position_S, label_S, source_position_S = arena.take(3, int(position_offset_N1[-1]))
    rk.map_positions(
        first_C1, above_C, chain_above_C, end_row_N, _run_of(first_C1, end_row_N), position_offset_N1, tokens, first_N,
        row_of_position_S, label_S, source_position_S,
    )  # fmt: skip
    return {
        "parent_Y": parent_Y,
        "tin_Y": tin_Y,
        "tout_Y": tout_Y,
        "row_of_position_S": row_of_position_S,
        "label_S": label_S,
        "source_position_S": source_position_S,
    }


def _frozen(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array, dtype=bool if array.dtype == bool else np.int64)


def number_sequences(forest: Forest, rounds: RoundPlan) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the sequence of each segment, the head of each sequence, and the segments in memory order."""
    head_V = rk.sequence_heads(forest.parent_V, rounds.continues_parent)
    # Within a round, heads in depth-first order: a child that starts in its parent's round then follows its parent.
    head_Q = np.flatnonzero(~rounds.continues_parent)
    head_Q = head_Q[np.argsort(rounds.round_of_segment[head_Q], kind="stable")]
    rank = np.zeros(forest.num_segments, np.int64)
    rank[head_Q] = np.arange(head_Q.shape[0])
    sequence_V = rank[head_V]
    return sequence_V, head_Q, np.lexsort((forest.start_V, sequence_V))


def _pack(
    rows: dict[str, np.ndarray],
    head_Q: np.ndarray,
    state_row_E: np.ndarray,
    handed_E: tuple[np.ndarray, np.ndarray] | None,
    *,
    chunk_size: int,
    restart_chunks: bool,
    arena: _Arena,
) -> dict[str, np.ndarray]:
    """Lay the sequences out as packed rows with replay, and wire exported states to initial states."""
    num_external = rows["parent_Y"].shape[0] - rows["token_T"].shape[0]
    head_start_Q = rows["seg_start_V"][head_Q]
    start_Q = head_start_Q if restart_chunks else head_start_Q // chunk_size * chunk_size
    replay_Q = head_start_Q - start_Q
    own_Q = np.bincount(rows["seg_sequence_V"], rows["seg_length_V"], head_Q.shape[0]).astype(np.int64)
    cu_seqlens_Q1 = np.concatenate([np.zeros(1, np.int64), np.cumsum(own_Q + replay_Q)])
    first_row_Q = num_external + rows["seg_row_V"][head_Q]
    (packed_row_P,), (kept_T,) = arena.take(1, int(cu_seqlens_Q1[-1])), arena.take(1, rows["token_T"].shape[0])
    anchor_row_Q = rk.pack_sequences(
        rows["parent_Y"], first_row_Q, own_Q, replay_Q, cu_seqlens_Q1, packed_row_P, kept_T
    )

    init_state_Q = np.full(head_Q.shape[0], -1)
    handed = {int(row): e for e, row in enumerate(state_row_E)}
    for q in np.flatnonzero((anchor_row_Q >= 0) & (anchor_row_Q < num_external)):
        if int(anchor_row_Q[q]) not in handed:
            raise ValueError(
                f"sequence {q} starts at position {start_Q[q]} behind producer row {anchor_row_Q[q]}, whose state is "
                f"not handed over; add the row to state_row_E"
            )
        init_state_Q[q] = handed[int(anchor_row_Q[q])]
    needs = np.flatnonzero(anchor_row_Q >= num_external)
    made_by = rows["seg_sequence_V"][rows["segment_T"][anchor_row_Q[needs] - num_external]]
    position = start_Q[needs]
    if handed_E is not None:
        made_by = np.concatenate([made_by, rows["seg_sequence_V"][handed_E[0]]])
        position = np.concatenate([position, handed_E[1]])
    # Rounding up only matters with restart_chunks, where the state after a last, partial chunk is handed on.
    boundary = -(-(position - start_Q[made_by]) // chunk_size)
    pair, index = np.unique(np.stack([made_by, boundary], axis=1), axis=0, return_inverse=True)
    init_state_Q[needs] = len(state_row_E) + index.reshape(-1)[: needs.shape[0]]
    return {
        "packed_row_P": packed_row_P,
        "kept_T": kept_T,
        "cu_seqlens_Q1": cu_seqlens_Q1,
        "init_state_Q": init_state_Q,
        "replay_Q": replay_Q,
        "start_Q": start_Q,
        "export_sequence_E": pair[:, 0],
        "export_boundary_E": pair[:, 1],
    }


def expanded_forests(
    length_N: np.ndarray, *, call_capacity: int, reverse: bool = False
) -> Iterator[tuple[np.ndarray, Forest]]:
    """Yield calls of whole trajectories, each a root of its own: the baseline that shares nothing.

    Trajectories are taken in order (or in reverse) and a call is closed when the next one does not fit. A trajectory
    longer than ``call_capacity`` gets a call of its own.

    Args:
        length_N: int64 tokens of each trajectory.
        call_capacity: rows a call may have.
        reverse: True to take the last trajectory first.

    Yields:
        Places in ``length_N`` of the call's trajectories, and their forest.
    """
    places = np.arange(length_N.shape[0])
    if reverse:
        places = places[::-1]
    call: list[int] = []
    rows = 0
    for place in places.tolist():
        if call and rows + length_N[place] > call_capacity:
            yield _roots(np.array(call), length_N)
            call, rows = [], 0
        call.append(place)
        rows += int(length_N[place])
    if call:
        yield _roots(np.array(call), length_N)


def _roots(call: np.ndarray, length_N: np.ndarray) -> tuple[np.ndarray, Forest]:
    index, none = np.arange(call.shape[0]), np.zeros(call.shape[0], np.int64)
    length = length_N[call]
    return call, Forest(np.full(call.shape[0], -1), none, length, index, none, index, length)
