"""Nodes of the rollout tree: segments cut where an action or an observation begins (HARTS 5.4).

A segment ends where paths part. The tree that a rollout engine builds has a node for every message that was appended at
once, so several nodes may lie on a path without a fork. Modes that run linear attention node by node take these nodes
where the workload names them; other modes have no use for them.

Shapes: N trajectories, V segments, M named positions, P nodes (pieces of segments), C rows of a forest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numba
import numpy as np

from harts_titan.tree.forest import Forest


def check_node_start(node_start: np.ndarray, num_tokens: int) -> np.ndarray:
    """Return the flat positions where nodes begin as int64, checked.

    Args:
        node_start: (M,) integers.
        num_tokens: tokens of all trajectories together.

    Raises:
        ValueError: If they are no integers, lie outside of the tokens or do not increase.
    """
    array = np.asarray(node_start)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"node_start is {array.dtype} {array.shape}; must be a 1-D integer array of token positions")
    bad = (array < 0) | (array >= num_tokens)
    if bad.any():
        i = int(bad.argmax())
        raise ValueError(f"node_start[{i}] is {array[i]}; must be a position of the {num_tokens} tokens")
    falls = array[1:] <= array[:-1]
    if falls.any():
        i = int(falls.argmax()) + 1
        raise ValueError(f"node_start[{i}] is {array[i]} after {array[i - 1]}; positions must increase")
    return array.astype(np.int64)


@dataclass(frozen=True)
class NodeStarts:
    """Where nodes begin, by trajectory of the step batch.

    Attributes:
        position_M: int64 position in its trajectory, ascending within each.
        ptr_N1: int64 entries of trajectory ``x`` are ``[ptr[x], ptr[x+1])``.
    """

    position_M: np.ndarray
    ptr_N1: np.ndarray

    @classmethod
    def from_flat(cls, node_start: np.ndarray, offsets: np.ndarray) -> NodeStarts:
        """Sort flat positions by trajectory.

        Args:
            node_start: int64 (M,) ascending positions in the step's tokens.
            offsets: int64 (N+1,) trajectory bounds.
        """
        ptr_N1 = np.searchsorted(node_start, offsets)
        return cls(node_start - np.repeat(offsets[:-1], np.diff(ptr_N1)), ptr_N1)

    def of(self, trajectory_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the named positions of some trajectories: index into ``trajectory_N`` and position, both int64."""
        first, count = self.ptr_N1[trajectory_N], np.diff(self.ptr_N1)[trajectory_N]
        entry = np.arange(count.sum()) + np.repeat(first - np.cumsum(count) + count, count)
        return np.repeat(np.arange(trajectory_N.shape[0]), count), self.position_M[entry]


def cut_segments(forest: Forest, trajectory_M: np.ndarray, position_M: np.ndarray) -> Forest:
    """Cut segments so that one ends in front of each given position of a trajectory's path.

    A row is shared by all trajectories that pass it, so it begins a piece if any of them names it.

    Args:
        forest: segments in depth-first order.
        trajectory_M: int64 trajectories of the forest, in any order and as often as there are positions to give.
        position_M: int64 positions behind the start of the trajectory's root, up to its end.

    Returns:
        The forest with pieces in place of the cut segments, in depth-first order; ``depth_V`` counts segments above.

    Time: O(C + V + M), and a step for each pair of a trajectory and a segment of its path if positions are in order.
    """
    segment_M = locate(forest, trajectory_M, position_M - 1)
    cuts = position_M < forest.start_V[segment_M] + forest.length_V[segment_M]
    # Forest rows: segment after segment. A piece begins at a segment's first row and at every cut.
    row_V = np.cumsum(forest.length_V) - forest.length_V
    begins = np.zeros(forest.num_tokens, bool)
    begins[row_V] = True
    begins[(row_V - forest.start_V)[segment_M[cuts]] + position_M[cuts]] = True
    row_P = np.flatnonzero(begins)
    whole_P = np.searchsorted(row_V, row_P, "right") - 1
    first_V = np.searchsorted(row_P, row_V)
    last_V = np.append(first_V[1:], row_P.shape[0]) - 1
    above_P = forest.parent_V[whole_P]
    parent_P = np.where(first_V[whole_P] < np.arange(row_P.shape[0]), np.arange(-1, row_P.shape[0] - 1), -1)
    heads = first_V[above_P[first_V] >= 0]
    parent_P[heads] = last_V[above_P[heads]]
    ends = forest.end_segment_N >= 0
    last = forest.end_segment_N[ends]
    end_row = row_V[last] + forest.end_position_N[ends] - 1 - forest.start_V[last]
    end_segment_N = np.full_like(forest.end_segment_N, -1)
    end_segment_N[ends] = np.searchsorted(row_P, end_row, "right") - 1
    return Forest(
        parent_V=parent_P,
        start_V=forest.start_V[whole_P] + row_P - row_V[whole_P],
        length_V=np.diff(np.append(row_P, forest.num_tokens)),
        source_V=forest.source_V[whole_P],
        depth_V=_depths(parent_P),
        end_segment_N=end_segment_N,
        end_position_N=forest.end_position_N,
    )


def locate(forest: Forest, trajectory_M: np.ndarray, position_M: np.ndarray) -> np.ndarray:
    """Return the segment that holds a position of a trajectory's path; the root segment for negative positions.

    Args:
        forest: segments.
        trajectory_M: int64 trajectories of the forest.
        position_M: int64 positions before their ends.
    """
    return _locate(forest.parent_V, forest.start_V, forest.end_segment_N, trajectory_M, position_M)


@numba.njit(cache=True)
def _locate(parent_V, start_V, end_segment_N, trajectory_M, position_M):
    out = np.empty(trajectory_M.shape[0], np.int64)
    v = -1
    for m in range(out.shape[0] - 1, -1, -1):
        last = m + 1 == out.shape[0] or trajectory_M[m] != trajectory_M[m + 1]
        if last or position_M[m] > position_M[m + 1]:
            v = end_segment_N[trajectory_M[m]]
        # Else further up the same path.
        while parent_V[v] >= 0 and start_V[v] > position_M[m]:
            v = parent_V[v]
        out[m] = v
    return out


@numba.njit(cache=True)
def _depths(parent_V):
    depth_V = np.zeros(parent_V.shape[0], np.int64)
    for v in range(parent_V.shape[0]):
        if parent_V[v] >= 0:
            depth_V[v] = depth_V[parent_V[v]] + 1
    return depth_V
