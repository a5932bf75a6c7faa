"""How a consumer's rows hang on its producer's: external rows, attach points, states handed over (HARTS 4.1, 4.2).

Shapes: N trajectories of the consumer, X external rows, E states handed to the consumer, V segments of the consumer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from harts_titan.tree import row_kernels as rk
from harts_titan.tree.items import WorkItem
from harts_titan.tree.layout import Attachment
from harts_titan.tree.nodes import locate


@dataclass(frozen=True)
class HandOver:
    """Which rows and states of its producer a consumer uses.

    Attributes:
        external_row_X: int64 producer row that is the consumer's path row ``x``, ascending; rows that only other
            consumers use are left out.
        multiplicity_X: int64 trajectories of this consumer whose path contains the row.
        state_row_E: int64 external row after which each state is taken.
        export_E: int64 export of the producer's call that is the consumer's external state ``e``.
    """

    external_row_X: np.ndarray
    multiplicity_X: np.ndarray
    state_row_E: np.ndarray
    export_E: np.ndarray


def hand_over(
    consumer: WorkItem, producer: WorkItem, call: Mapping[str, np.ndarray], *, chunk_size: int
) -> tuple[HandOver, Attachment]:
    """Attach a consumer to the laid-out rows of its producer.

    Args:
        consumer: with hosts and states filled in.
        producer: its producer.
        call: arrays of the producer's layout.
        chunk_size: tokens in a linear-attention chunk.

    Returns:
        What is handed over, and the attachment to lay the consumer out with.
    """
    num_rows = call["token_T"].shape[0]
    shared = np.flatnonzero(consumer.shared_N > 0)
    end_row_N = np.full(consumer.shared_N.shape[0], -1)
    end_row_N[shared] = _row_at(producer, call, consumer.host_N[shared], consumer.shared_N[shared] - 1)
    passing = rk.count_passing(call["parent_Y"], end_row_N[shared])
    external_row_X = np.flatnonzero(passing)
    # The last entry answers for row -1: none.
    external = np.full(num_rows + 1, -1)
    external[external_row_X] = np.arange(external_row_X.shape[0])

    forest = consumer.forest
    roots = np.flatnonzero((forest.parent_V < 0) & (forest.start_V > 0))
    attach_row_V = np.full(forest.num_segments, -1)
    attach_row_V[roots] = external[end_row_N[forest.source_V[roots]]]
    segment, position = producer.state_segment_E[consumer.taken_E], producer.state_position_E[consumer.taken_E]
    state_row_E = external[call["seg_row_V"][segment] + position - 1 - call["seg_start_V"][segment]]
    handed = HandOver(
        external_row_X=external_row_X,
        multiplicity_X=passing[external_row_X],
        state_row_E=state_row_E,
        export_E=_exports(producer, call, chunk_size=chunk_size)[consumer.taken_E],
    )
    attachment = Attachment(
        parent_X=external[call["parent_Y"][external_row_X]],
        position_X=call["position_T"][external_row_X],
        state_row_E=state_row_E,
        attach_row_V=attach_row_V,
        end_row_N=np.where(forest.end_segment_N < 0, external[end_row_N], -1),
    )
    return handed, attachment


def _row_at(
    producer: WorkItem, call: Mapping[str, np.ndarray], trajectory_M: np.ndarray, position_M: np.ndarray
) -> np.ndarray:
    segment = locate(producer.forest, trajectory_M, position_M)
    return call["seg_row_V"][segment] + position_M - call["seg_start_V"][segment]


def _exports(producer: WorkItem, call: Mapping[str, np.ndarray], *, chunk_size: int) -> np.ndarray:
    """Return the export of the producer's call that is each state it hands over."""
    sequence = producer.sequence_V[producer.state_segment_E]
    boundary = -(-(producer.state_position_E - call["start_Q"][sequence]) // chunk_size)
    wide = 1 + int(max(boundary.max(initial=0), call["export_boundary_E"].max(initial=0)))
    # Exports are in order of sequence and boundary.
    return np.searchsorted(call["export_sequence_E"] * wide + call["export_boundary_E"], sequence * wide + boundary)
