"""The prefix forest of one consumer, as maximal fork-free segments (HARTS 3.3).

Shapes: V segments, N trajectories (of this consumer).
"""

from __future__ import annotations

from dataclasses import dataclass

import numba
import numpy as np


@dataclass(frozen=True)
class Forest:
    """Segments in depth-first order, children with the largest subtree first; parents come before children.

    A segment ends where the paths of its trajectories part, or where the last of them ends. A trajectory that ends
    inside a segment does not cut it.

    Attributes:
        parent_V: int64 segment above, -1 at a root.
        start_V: int64 absolute position of the first token.
        length_V: int64 tokens, > 0.
        source_V: int64 trajectory (index into the ``N`` given to ``build_forest``) that contains the whole segment.
        depth_V: int64 segments above; 0 at a root.
        end_segment_N: int64 segment that holds the last token of each trajectory; -1 where none of the segments does
            (a trajectory that lies wholly in a producer).
        end_position_N: int64 length of each trajectory, tokens.
    """

    parent_V: np.ndarray
    start_V: np.ndarray
    length_V: np.ndarray
    source_V: np.ndarray
    depth_V: np.ndarray
    end_segment_N: np.ndarray
    end_position_N: np.ndarray

    @property
    def num_segments(self) -> int:
        """Number of segments."""
        return int(self.parent_V.shape[0])

    @property
    def num_tokens(self) -> int:
        """Number of distinct prefixes: compact rows."""
        return int(self.length_V.sum())


def build_forest(length_N: np.ndarray, lcp_N: np.ndarray) -> Forest:
    """Build the segment forest of trajectories in lexicographic order (HARTS 3.3).

    Args:
        length_N: int64 tokens of each trajectory, in sorted order.
        lcp_N: int64 common prefix with the trajectory before; entry 0 is ignored (taken as 0).

    Returns:
        The forest; its trajectory indices are places in the sorted order given.

    Raises:
        ValueError: If the arrays differ in size, a length is not positive, or an LCP exceeds what the lengths allow.

    Time: O(N) for the stack of open segments, O(V log V) to order children by subtree size.
    """
    length_N = np.ascontiguousarray(length_N, dtype=np.int64)
    lcp_N = np.array(lcp_N, dtype=np.int64)
    if length_N.ndim != 1 or length_N.shape != lcp_N.shape:
        raise ValueError(f"length_N {length_N.shape} and lcp_N {lcp_N.shape} must be 1-D and equal in size")
    if length_N.size and length_N.min() <= 0:
        raise ValueError(f"trajectory {int(length_N.argmin())} has no tokens; every trajectory needs at least one")
    if lcp_N.size:
        lcp_N[0] = 0
        bad = (lcp_N[1:] > np.minimum(length_N[1:], length_N[:-1])) | (lcp_N[1:] < 0)
        # The shorter of two neighbours may end at the common prefix only if it comes first (or both are equal).
        bad |= (lcp_N[1:] == length_N[1:]) & (length_N[:-1] > length_N[1:])
        if bad.any():
            i = int(bad.argmax()) + 1
            raise ValueError(
                f"lcp_N[{i}] = {lcp_N[i]} does not fit sorted neighbours of {length_N[i - 1]} and {length_N[i]} tokens"
            )
    end, parent, source, at_N = open_trie(length_N, lcp_N)
    edge = end - np.where(parent >= 0, end[parent], 0)
    bottom_up = np.argsort(-end, kind="stable")
    size = _subtree_sum(parent, edge, bottom_up)
    by_size = np.argsort(-size, kind="stable")
    parent_V, start_V, length_V, source_V, depth_V, end_segment_N = _merge_chains(end, parent, source, at_N, by_size)
    return Forest(parent_V, start_V, length_V, source_V, depth_V, end_segment_N, length_N)


@numba.njit(cache=True)
def open_trie(length_N, lcp_N):
    """Path-compressed trie with a node at every fork and every trajectory end; node 0 is the empty prefix."""
    capacity = 2 * length_N.shape[0] + 1
    end, parent, source = np.zeros(capacity, np.int64), np.full(capacity, -1), np.full(capacity, -1)
    stack, at_N = np.zeros(capacity, np.int64), np.zeros(length_N.shape[0], np.int64)
    top, n = 0, 1
    for i in range(length_N.shape[0]):
        shared, last = lcp_N[i], -1
        while end[stack[top]] > shared:
            last = stack[top]
            top -= 1
        if end[stack[top]] < shared:
            # The paths part inside the edge above `last`: cut that edge.
            end[n], parent[n], source[n] = shared, stack[top], source[last]
            parent[last] = n
            top += 1
            stack[top] = n
            n += 1
        if length_N[i] > shared:
            end[n], parent[n], source[n] = length_N[i], stack[top], i
            top += 1
            stack[top] = n
            n += 1
        at_N[i] = stack[top]
    return end[:n].copy(), parent[:n].copy(), source[:n].copy(), at_N


@numba.njit(cache=True)
def _subtree_sum(parent, value, bottom_up):
    total = value.copy()
    for v in bottom_up:
        if parent[v] >= 0:
            total[parent[v]] += total[v]
    return total


@numba.njit(cache=True)
def _merge_chains(end, parent, source, at_N, by_size):
    """Drop nodes with exactly one child (only a trajectory ends there) and number the rest depth first."""
    n = end.shape[0]
    first, following, num_children = np.full(n, -1), np.full(n, -1), np.zeros(n, np.int64)
    for v in by_size:
        p = parent[v]
        if p >= 0:
            # Prepending in falling size leaves the smallest child first, so the largest is pushed last, popped first.
            following[v] = first[p]
            first[p] = v
            num_children[p] += 1
    preorder, stack, top, count = np.empty(n, np.int64), np.empty(n, np.int64), 0, 0
    stack[0] = 0
    while top >= 0:
        v = stack[top]
        top -= 1
        preorder[count] = v
        count += 1
        child = first[v]
        while child >= 0:
            top += 1
            stack[top] = child
            child = following[child]
    new_id, above = np.full(n, -1), np.full(n, -1)
    num_segments = 0
    for v in preorder[1:]:
        p = parent[v]
        above[v] = p if p == 0 or num_children[p] != 1 else above[p]
        if num_children[v] != 1:
            new_id[v] = num_segments
            num_segments += 1
    parent_V, start_V = np.empty(num_segments, np.int64), np.empty(num_segments, np.int64)
    length_V, source_V = np.empty(num_segments, np.int64), np.empty(num_segments, np.int64)
    depth_V = np.zeros(num_segments, np.int64)
    lowest = np.empty(n, np.int64)
    for k in range(n - 1, 0, -1):
        v = preorder[k]
        lowest[v] = new_id[v] if new_id[v] >= 0 else lowest[first[v]]
    for v in preorder[1:]:
        s = new_id[v]
        if s < 0:
            continue
        parent_V[s] = new_id[above[v]]
        start_V[s] = end[above[v]]
        length_V[s] = end[v] - end[above[v]]
        source_V[s] = source[v]
        if parent_V[s] >= 0:
            depth_V[s] = depth_V[parent_V[s]] + 1
    end_segment_N = np.empty(at_N.shape[0], np.int64)
    for i in range(at_N.shape[0]):
        end_segment_N[i] = lowest[at_N[i]]
    return parent_V, start_V, length_V, source_V, depth_V, end_segment_N
