"""The segment-level plan of all work items of a step, packed into flat arrays.

Shapes: I items, G segments, Q sequences, E states handed over by producers, A states taken by consumers, all of the
whole step; the entries of item ``i`` are ``[ptr[i], ptr[i+1])``.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from harts_titan.tree.items import WorkItem

TABLES = {
    "item_kind_I": "0 consumer, 1 producer",
    "item_replica_I": "data-parallel rank",
    "item_index_I": "slot of a consumer, window of a producer",
    "item_rounds_I": "packed linear-attention calls, one after another; 0 where the item has no rows",
    "item_rows_I": "rows the item executes",
    "segment_ptr_I1": "segments of each item",
    "sequence_ptr_I1": "sequences of each item",
    "state_ptr_I1": "states each producer hands over",
    "taken_ptr_I1": "external states of each consumer",
    "segment_parent_G": "segment of the item above, -1 at a root",
    "segment_start_G": "absolute position of the first token",
    "segment_length_G": "tokens",
    "segment_trajectory_G": "a trajectory (index in the step batch) whose path contains the segment",
    "segment_sequence_G": "sequence of the item that computes the segment",
    "segment_round_G": "its round",
    "segment_continues_G": "1 where the segment continues its parent's sequence",
    "segment_replay_G": "tokens processed again in front of the segment",
    "segment_state_G": "external state that a root starts from, -1 for none",
    "sequence_round_Q": "round",
    "sequence_trajectory_Q": "a trajectory whose path contains the sequence",
    "sequence_anchor_Q": "first position processed",
    "sequence_start_Q": "first position whose row is the sequence's own",
    "sequence_end_Q": "end",
    "state_sequence_E": "sequence of the producer that makes the state",
    "state_position_E": "tokens before the state",
    "state_trajectory_E": "a trajectory whose path contains them",
    "taken_state_A": "state of the consumer's producer that is the consumer's next external state",
}
"""Names and meanings of the packed arrays; all int64."""

_PER_ITEM: dict[str, Callable[[WorkItem], int]] = {
    "item_kind_I": lambda item: item.kind,
    "item_replica_I": lambda item: item.replica,
    "item_index_I": lambda item: item.index,
    "item_rounds_I": lambda item: item.rounds.num_rounds,
    "item_rows_I": lambda item: item.forest.num_tokens,
}
_PER_PART: dict[str, Callable[[WorkItem], np.ndarray]] = {
    "segment_parent_G": lambda item: item.forest.parent_V,
    "segment_start_G": lambda item: item.forest.start_V,
    "segment_length_G": lambda item: item.forest.length_V,
    "segment_trajectory_G": lambda item: item.trajectory_N[item.forest.source_V],
    "segment_sequence_G": lambda item: item.sequence_V,
    "segment_round_G": lambda item: item.rounds.round_of_segment,
    "segment_continues_G": lambda item: item.rounds.continues_parent,
    "segment_replay_G": lambda item: item.rounds.replay_tokens,
    "segment_state_G": lambda item: item.root_state_V,
    "sequence_round_Q": lambda item: item.rounds.round_of_segment[item.head_Q],
    "sequence_trajectory_Q": lambda item: item.trajectory_N[item.forest.source_V[item.tail_Q]],
    "sequence_anchor_Q": lambda item: item.forest.start_V[item.head_Q] - item.rounds.replay_tokens[item.head_Q],
    "sequence_start_Q": lambda item: item.forest.start_V[item.head_Q],
    "sequence_end_Q": lambda item: item.end_Q,
    "state_sequence_E": lambda item: item.sequence_V[item.state_segment_E],
    "state_position_E": lambda item: item.state_position_E,
    "state_trajectory_E": lambda item: item.trajectory_N[item.forest.source_V[item.state_segment_E]],
    "taken_state_A": lambda item: item.taken_E,
}
_COUNTED_BY = {
    "segment_ptr_I1": "segment_parent_G",
    "sequence_ptr_I1": "sequence_round_Q",
    "state_ptr_I1": "state_position_E",
    "taken_ptr_I1": "taken_state_A",
}


def pack_items(items: list[WorkItem]) -> dict[str, np.ndarray]:
    """Return the packed arrays named in ``TABLES``.

    Args:
        items: consumers in the order ``slot * dp_degree + replica``, then producers that exist in the order
            ``window * dp_degree + replica``.
    """
    parts = {name: [np.asarray(part(item), np.int64) for item in items] for name, part in _PER_PART.items()}
    out = {name: np.array([value(item) for item in items], np.int64) for name, value in _PER_ITEM.items()}
    for pointer, name in _COUNTED_BY.items():
        out[pointer] = np.concatenate([[0], np.cumsum([part.shape[0] for part in parts[name]])]).astype(np.int64)
    for name, arrays in parts.items():
        out[name] = np.concatenate(arrays)
    return {name: out[name] for name in TABLES}
