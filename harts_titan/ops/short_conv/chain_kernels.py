"""Compiled host loops that cut a tap table into chains, see ``taps.ChainTables``: O(T + Y).

Letters: T output rows, Y path rows, W here is the number of taps, J joined path rows, G groups of rows.
"""

from __future__ import annotations

from typing import Any

import numba

# No reference counts: the kernels allocate nothing. The option is not public (and unknown to numba's stubs): numba is
# pinned below the next version that has not been tried.
_options: dict[str, Any] = {"cache": True, "nogil": True, "_nrt": False}
kernel = numba.njit(**_options)


@kernel
def mark_chains(tap_TW, tap_T4, kind_T, count_Y, head_bit, last_bit):
    """Fill the dense table and the kinds, and count the gradient sums of every path row; 1 if a tap is not a row."""
    T, W = tap_TW.shape
    Y = count_Y.size
    for t in range(T):
        head = t == 0
        for j in range(4 - W):
            tap_T4[t, j] = -1
        for j in range(W):
            row = tap_TW[t, j]
            if row < -1 or row >= Y:
                return 1
            tap_T4[t, 4 - W + j] = row
            if t > 0 and j < W - 1 and row != tap_TW[t - 1, j + 1]:
                head = True
        if tap_T4[t, 3] < 0:
            return 1
        kind_T[t] = 0
        if head:
            kind_T[t] = head_bit
            if t > 0:
                kind_T[t - 1] |= last_bit
            for j in range(3):
                if tap_T4[t, j] >= 0:
                    count_Y[tap_T4[t, j]] += 1
        count_Y[tap_T4[t, 3]] += 1
    if T > 0:
        kind_T[T - 1] |= last_bit
    return 0


@kernel
def number_slots(count_Y, row_J, ptr_J1, slot_Y):
    """List the path rows without one sum of their own, their slots, and the first slot of each; return how many.

    ``slot_Y`` is -1 for the other rows.
    """
    joined, slots = 0, 0
    for y in range(count_Y.size):
        slot_Y[y] = -1
        if count_Y[y] != 1:
            row_J[joined] = y
            ptr_J1[joined] = slots
            slot_Y[y] = slots
            slots += count_Y[y]
            joined += 1
    ptr_J1[joined] = slots
    return joined


@kernel
def _goal(row, slot_Y):
    """Where the next sum of a path row goes."""
    if row < 0:
        return -1
    slot = slot_Y[row]
    if slot < 0:
        return row
    slot_Y[row] = slot + 1
    return -2 - slot


@kernel
def find_targets(tap_T4, kind_T, slot_Y, target_T4, head_bit):
    """Where the sum of every (row, tap) goes; slots are taken in the order of the chains, taps of a head first."""
    g0, g1, g2, g3 = -1, -1, -1, -1
    for t in range(kind_T.size):
        if kind_T[t] & head_bit:
            g1 = _goal(tap_T4[t, 0], slot_Y)
            g2 = _goal(tap_T4[t, 1], slot_Y)
            g3 = _goal(tap_T4[t, 2], slot_Y)
        g0, g1, g2, g3 = g1, g2, g3, _goal(tap_T4[t, 3], slot_Y)
        target_T4[t, 0] = g0
        target_T4[t, 1] = g1
        target_T4[t, 2] = g2
        target_T4[t, 3] = g3


@kernel
def find_plain_groups(tap_T4, kind_T, target_T4, group_rows, head_bit, forward_G, backward_G):
    """First path rows of groups without a head whose path rows are consecutive, else -1.

    In the backward pass they also end no chain; where the sums they finish do not belong to consecutive rows of
    ``dx``, it is -2 minus the first path row.
    """
    for g in range(forward_G.size):
        begin = g * group_rows
        forward_G[g], backward_G[g] = -1, -1
        if begin + group_rows > kind_T.size:
            continue
        first = tap_T4[begin, 3]
        forward, inside, direct = True, True, first >= 3
        for u in range(group_rows):
            t = begin + u
            forward &= kind_T[t] & head_bit == 0 and tap_T4[t, 3] == first + u
            inside &= kind_T[t] == 0
            direct &= target_T4[t, 0] == first + u - 3
        if forward:
            forward_G[g] = first
            if inside:
                backward_G[g] = first if direct else -2 - first
