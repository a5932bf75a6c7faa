"""Compiled loops over rows behind ``layout.py``; all arrays int64, shapes as there.

Every loop relies on one property of the layout: a row's parent has a smaller index.
"""

from __future__ import annotations

import numba
import numpy as np

IGNORED_LABEL = -100
"""Label of a position that predicts nothing; ``ops.logprob`` reads it and states the same number."""


@numba.njit(cache=True)
def sequence_heads(parent_V, continues_V):
    """Return the first segment of each segment's sequence."""
    head_V = np.arange(parent_V.shape[0])
    for v in range(parent_V.shape[0]):
        if continues_V[v]:
            head_V[v] = head_V[parent_V[v]]
    return head_V


@numba.njit(cache=True)
def own_rows(parent_V, start_V, length_V, seg_row_V, memory_order, attach_row_V, parent_X, tokens, first_of_source_V):
    """Fill token, position and segment of own rows, and the parent of every path row."""
    num_external, num_rows = parent_X.shape[0], length_V.sum()
    token_T, position_T = np.empty(num_rows, np.int64), np.empty(num_rows, np.int64)
    segment_T = np.empty(num_rows, np.int64)
    parent_Y = np.empty(num_external + num_rows, np.int64)
    parent_Y[:num_external] = parent_X
    for v in memory_order:
        row, p = seg_row_V[v], parent_V[v]
        for i in range(length_V[v]):
            token_T[row + i] = tokens[first_of_source_V[v] + start_V[v] + i]
            position_T[row + i] = start_V[v] + i
            segment_T[row + i] = v
            parent_Y[num_external + row + i] = num_external + row + i - 1
        parent_Y[num_external + row] = attach_row_V[v] if p < 0 else num_external + seg_row_V[p] + length_V[p] - 1
    return token_T, position_T, segment_T, parent_Y


@numba.njit(cache=True)
def convolution_taps(parent_Y, num_external, num_taps):
    """Return the last ``num_taps`` path rows of each own row, oldest first, -1 before the root."""
    tap_TW = np.full((parent_Y.shape[0] - num_external, num_taps), -1)
    for t in range(tap_TW.shape[0]):
        row, j = num_external + t, num_taps - 1
        while row >= 0 and j >= 0:
            tap_TW[t, j] = row
            row = parent_Y[row]
            j -= 1
    return tap_TW


@numba.njit(cache=True)
def map_positions(parent_Y, end_row_N, position_offset_N1, tokens, first_N):
    """Return path row, next token (IGNORED_LABEL at a trajectory's end) and step-batch position of each position."""
    num_positions = position_offset_N1[-1]
    row_S, label_S = np.empty(num_positions, np.int64), np.empty(num_positions, np.int64)
    source_S = np.empty(num_positions, np.int64)
    for n in range(end_row_N.shape[0]):
        lo, hi = position_offset_N1[n], position_offset_N1[n + 1]
        row = end_row_N[n]
        for s in range(hi - 1, lo - 1, -1):
            row_S[s] = row
            row = parent_Y[row]
            source_S[s] = first_N[n] + s - lo
            label_S[s] = tokens[source_S[s] + 1] if s < hi - 1 else IGNORED_LABEL
    return row_S, label_S, source_S


@numba.njit(cache=True)
def count_passing(parent_Y, end_row_N):
    """Return the number of trajectories whose path contains each row."""
    count_Y = np.zeros(parent_Y.shape[0], np.int64)
    for n in range(end_row_N.shape[0]):
        count_Y[end_row_N[n]] += 1
    for y in range(parent_Y.shape[0] - 1, -1, -1):
        if parent_Y[y] >= 0:
            count_Y[parent_Y[y]] += count_Y[y]
    return count_Y


def depth_first_intervals(parent_Y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the half-open depth-first interval of each row's subtree, largest subtree visited first.

    Row ``k`` is an ancestor of (or equal to) ``q`` iff ``tin[k] <= tin[q] < tout[k]``. Visiting large subtrees first
    keeps long paths contiguous, which leaves attention tiles full.
    """
    size_Y, head = _subtree_sizes(parent_Y)
    head = head[np.argsort(-size_Y[head], kind="stable")]
    tin_Y = _number_depth_first(parent_Y, size_Y, head)
    return tin_Y, tin_Y + size_Y


@numba.njit(cache=True)
def _subtree_sizes(parent_Y):
    """Return rows below each row (itself included), and the rows that are not their parent's only child."""
    n = parent_Y.shape[0]
    size_Y, num_children = np.ones(n, np.int64), np.zeros(n, np.int64)
    for y in range(n - 1, -1, -1):
        if parent_Y[y] >= 0:
            size_Y[parent_Y[y]] += size_Y[y]
            num_children[parent_Y[y]] += 1
    head, count = np.empty(n, np.int64), 0
    for y in range(n):
        if parent_Y[y] < 0 or num_children[parent_Y[y]] > 1:
            head[count] = y
            count += 1
    return size_Y, head[:count].copy()


@numba.njit(cache=True)
def _number_depth_first(parent_Y, size_Y, head):
    n = parent_Y.shape[0]
    only = np.full(n, -1)
    for y in range(n):
        p = parent_Y[y]
        if p >= 0 and size_Y[p] == size_Y[y] + 1:
            only[p] = y
    tin_Y, cursor_Y, next_root = np.empty(n, np.int64), np.empty(n, np.int64), 0
    # A row above has a strictly larger subtree, so falling size visits parents first.
    for h in head:
        p = parent_Y[h]
        if p < 0:
            tin_Y[h] = next_root
            next_root += size_Y[h]
        else:
            tin_Y[h] = cursor_Y[p]
            cursor_Y[p] += size_Y[h]
        y = h
        while only[y] >= 0:
            tin_Y[only[y]] = tin_Y[y] + 1
            y = only[y]
        cursor_Y[y] = tin_Y[y] + 1
    return tin_Y


@numba.njit(cache=True)
def cut_parts(parent_V, length_V, seg_row_V, memory_order, end_segment_N, end_own_row_N):
    """Cut segments at trajectory ends; return the part of each own row, and the parts of each trajectory's path."""
    num_rows, num_trajectories = length_V.sum(), end_segment_N.shape[0]
    cut = np.zeros(num_rows + 1, np.bool_)
    for v in memory_order:
        cut[seg_row_V[v]] = True
    for n in range(num_trajectories):
        if end_segment_N[n] >= 0:
            cut[end_own_row_N[n] + 1] = True
    part_T = np.cumsum(cut[:num_rows]) - 1
    total = 0
    for n in range(num_trajectories):
        v, last = end_segment_N[n], end_own_row_N[n]
        while v >= 0:
            total += part_T[last] - part_T[seg_row_V[v]] + 1
            v = parent_V[v]
            if v >= 0:
                last = seg_row_V[v] + length_V[v] - 1
    path_trajectory_J, path_part_J, j = np.empty(total, np.int64), np.empty(total, np.int64), total
    for n in range(num_trajectories - 1, -1, -1):
        # Filled from the back, so that each trajectory's parts come out in path order.
        v, last = end_segment_N[n], end_own_row_N[n]
        while v >= 0:
            for part in range(part_T[last], part_T[seg_row_V[v]] - 1, -1):
                j -= 1
                path_trajectory_J[j], path_part_J[j] = n, part
            v = parent_V[v]
            if v >= 0:
                last = seg_row_V[v] + length_V[v] - 1
    return part_T, path_trajectory_J, path_part_J


@numba.njit(cache=True)
def pack_sequences(parent_Y, first_row_Q, own_Q, replay_Q, cu_seqlens_Q1):
    """Return the path row of each packed row, the packed row of each own row, and the row before each sequence."""
    packed_row_P = np.empty(cu_seqlens_Q1[-1], np.int64)
    kept_T, anchor_row_Q = np.empty(own_Q.sum(), np.int64), np.empty(own_Q.shape[0], np.int64)
    t = 0
    for q in range(own_Q.shape[0]):
        begin = cu_seqlens_Q1[q] + replay_Q[q]
        for i in range(own_Q[q]):
            packed_row_P[begin + i] = first_row_Q[q] + i
            kept_T[t] = begin + i
            t += 1
        row = parent_Y[first_row_Q[q]]
        for i in range(replay_Q[q]):
            packed_row_P[begin - 1 - i] = row
            row = parent_Y[row]
        anchor_row_Q[q] = row
    return packed_row_P, kept_T, anchor_row_Q
