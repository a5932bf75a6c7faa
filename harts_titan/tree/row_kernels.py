"""Compiled loops over rows behind ``layout.py``; all arrays int64, shapes as there.

Rows come in runs, so every array is filled run by run: a segment's rows are contiguous, and so are those of the other
runs. Further shapes: C chains of path rows (``layout._Chains``), U parts (segments cut at trajectory ends).

Every loop relies on one property of the layout: a row's parent has a smaller index.
"""

from __future__ import annotations

import numba
import numpy as np

IGNORED_LABEL = -100
"""Label of a position that predicts nothing; ``ops.logprob`` reads it and states the same number."""


@numba.njit(cache=True, nogil=True)
def sequence_heads(parent_V, continues_V):
    """Return the first segment of each segment's sequence."""
    head_V = np.arange(parent_V.shape[0])
    for v in range(parent_V.shape[0]):
        if continues_V[v]:
            head_V[v] = head_V[parent_V[v]]
    return head_V


@numba.njit(cache=True, nogil=True)
def _count_up(out, first):
    """Fill with ``first, first + 1, ...``; the views callers pass have no negative index, so this is vectorised."""
    for i in range(out.shape[0]):
        out[i] = first + i


@numba.njit(cache=True, nogil=True)
def _widen(out, values):
    for i in range(out.shape[0]):
        out[i] = values[i]


@numba.njit(cache=True, nogil=True)
def own_rows(start_V, length_V, seg_row_V, tokens, source_V, token_T, position_T, segment_T):
    """Fill token, position and segment of own rows; ``source_V`` is where each segment's first token is."""
    for v in range(length_V.shape[0]):
        lo, hi = seg_row_V[v], seg_row_V[v] + length_V[v]
        _widen(token_T[lo:hi], tokens[source_V[v] : source_V[v] + hi - lo])
        _count_up(position_T[lo:hi], start_V[v])
        segment_T[lo:hi] = v


@numba.njit(cache=True, nogil=True)
def path_rows(first_C1, above_C, tin_C, size_C, parent_Y, tin_Y, tout_Y):
    """Fill parent and depth-first interval of path rows."""
    for c in range(above_C.shape[0]):
        lo, hi = first_C1[c], first_C1[c + 1]
        _count_up(parent_Y[lo:hi], lo - 1)
        parent_Y[lo] = above_C[c]
        _count_up(tin_Y[lo:hi], tin_C[c])
        # Each row leaves the interval where the whole chain does.
        tout_Y[lo:hi] = tin_C[c] + size_C[c]


@numba.njit(cache=True, nogil=True)
def convolution_taps(parent_Y, num_external, tap_TW):
    """Fill the last W path rows of each own row, oldest first, -1 before the root."""
    num_taps, adjacent = tap_TW.shape[1], 0
    for t in range(tap_TW.shape[0]):
        row = num_external + t
        # How many rows in front follow one another, as far as own rows tell.
        adjacent = adjacent + 1 if row > 0 and parent_Y[row] == row - 1 else 0
        if adjacent >= num_taps - 1:
            _count_up(tap_TW[t], row - num_taps + 1)
            continue
        for j in range(num_taps - 1, -1, -1):
            tap_TW[t, j] = row
            row = parent_Y[row] if row >= 0 else -1


@numba.njit(cache=True, nogil=True)
def map_positions(
    first_C1, above_C, chain_above_C, end_row_N, end_chain_N, offset_N1, tokens, first_N, row_S, label_S, source_S
):
    """Fill path row, next token (IGNORED_LABEL at a trajectory's end) and step-batch position of each position."""
    for n in range(end_row_N.shape[0]):
        lo, hi, source = offset_N1[n], offset_N1[n + 1], first_N[n]
        _count_up(source_S[lo:hi], source)
        _widen(label_S[lo : hi - 1], tokens[source + 1 : source + hi - lo])
        label_S[hi - 1] = IGNORED_LABEL
        # Chain after chain, from the trajectory's end upwards.
        row, c = end_row_N[n], end_chain_N[n]
        while hi > lo:
            begin = hi - 1 - (row - first_C1[c])
            _count_up(row_S[begin:hi], first_C1[c])
            hi, row, c = begin, above_C[c], chain_above_C[c]


@numba.njit(cache=True, nogil=True)
def count_passing(parent_Y, end_row_N):
    """Return the number of trajectories whose path contains each row."""
    count_Y = np.zeros(parent_Y.shape[0], np.int64)
    for n in range(end_row_N.shape[0]):
        count_Y[end_row_N[n]] += 1
    for y in range(parent_Y.shape[0] - 1, -1, -1):
        if parent_Y[y] >= 0:
            count_Y[parent_Y[y]] += count_Y[y]
    return count_Y


def depth_first_intervals(chain_above_C: np.ndarray, length_C: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the first depth-first number and the subtree's rows of each chain, largest subtree visited first.

    Row ``k`` is an ancestor of (or equal to) ``q`` iff ``tin[k] <= tin[q] < tout[k]``. Visiting large subtrees first
    keeps long paths contiguous, which leaves attention tiles full.
    """
    size_C = _subtree_sizes(chain_above_C, length_C)
    # A chain above has a strictly larger subtree, so falling size visits parents first.
    return _number_depth_first(chain_above_C, length_C, size_C, np.argsort(-size_C, kind="stable")), size_C


@numba.njit(cache=True, nogil=True)
def _subtree_sizes(chain_above_C, length_C):
    size_C = length_C.copy()
    for c in range(size_C.shape[0] - 1, -1, -1):
        if chain_above_C[c] >= 0:
            size_C[chain_above_C[c]] += size_C[c]
    return size_C


@numba.njit(cache=True, nogil=True)
def _number_depth_first(chain_above_C, length_C, size_C, by_size):
    tin_C, cursor_C, next_root = np.empty_like(size_C), np.empty_like(size_C), 0
    for c in by_size:
        p = chain_above_C[c]
        if p < 0:
            tin_C[c] = next_root
            next_root += size_C[c]
        else:
            tin_C[c] = cursor_C[p]
            cursor_C[p] += size_C[c]
        cursor_C[c] = tin_C[c] + length_C[c]
    return tin_C


@numba.njit(cache=True, nogil=True)
def path_parts(parent_V, first_part_V, last_part_V, end_segment_N, end_part_N):
    """Return the parts of each trajectory's path: trajectory and part of each pair."""
    num_trajectories, total = end_segment_N.shape[0], 0
    for n in range(num_trajectories):
        v, last = end_segment_N[n], end_part_N[n]
        while v >= 0:
            total += last - first_part_V[v] + 1
            v = parent_V[v]
            last = last_part_V[v]
    path_trajectory_J, path_part_J, j = np.empty(total, np.int64), np.empty(total, np.int64), total
    for n in range(num_trajectories - 1, -1, -1):
        # Filled from the back, so that each trajectory's parts come out in path order.
        v, last = end_segment_N[n], end_part_N[n]
        while v >= 0:
            for part in range(last, first_part_V[v] - 1, -1):
                j -= 1
                path_trajectory_J[j], path_part_J[j] = n, part
            v = parent_V[v]
            last = last_part_V[v]
    return path_trajectory_J, path_part_J


@numba.njit(cache=True, nogil=True)
def part_rows(first_U1, count_U, part_T, multiplicity_T):
    """Fill part and multiplicity of own rows."""
    for u in range(count_U.shape[0]):
        part_T[first_U1[u] : first_U1[u + 1]] = u
        multiplicity_T[first_U1[u] : first_U1[u + 1]] = count_U[u]


@numba.njit(cache=True, nogil=True)
def pack_sequences(parent_Y, first_row_Q, own_Q, replay_Q, cu_seqlens_Q1, packed_row_P, kept_T):
    """Fill path row of each packed row and packed row of each own row; return the row before each sequence."""
    anchor_row_Q, t = np.empty(own_Q.shape[0], np.int64), 0
    for q in range(own_Q.shape[0]):
        begin, own = cu_seqlens_Q1[q] + replay_Q[q], own_Q[q]
        _count_up(packed_row_P[begin : begin + own], first_row_Q[q])
        _count_up(kept_T[t : t + own], begin)
        t += own
        row = parent_Y[first_row_Q[q]]
        for i in range(replay_Q[q]):
            packed_row_P[begin - 1 - i] = row
            row = parent_Y[row]
        anchor_row_Q[q] = row
    return anchor_row_Q
