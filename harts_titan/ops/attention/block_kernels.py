"""Compiled host loops that list the tiles of an ancestor mask, from segments: O(listed tiles + segments).

Letters: T own rows, X external rows, Y = X + T path rows, V segments, B stretches of external rows; Q blocks of own
rows, N blocks of path rows.
"""

from __future__ import annotations

from typing import Any

import numba

# No reference counts: the kernels allocate nothing. The option is not public (and unknown to numba's stubs): numba is
# pinned below the next version that has not been tried.
_options: dict[str, Any] = {"cache": True, "nogil": True, "_nrt": False}
kernel = numba.njit(**_options)


@kernel
def external_stretches(tin_Y, tout_Y, num_external_rows, first_B):
    """Write the first rows of stretches with consecutive ``tin`` and one ``tout``; return their number."""
    count = 0
    for row in range(num_external_rows):
        if row == 0 or tin_Y[row] != tin_Y[row - 1] + 1 or tout_Y[row] != tout_Y[row - 1]:
            first_B[count] = row
            count += 1
    return count


@kernel
def join_segments(order_V, parent_V, length_V, row_V, attach_V, top_V, above_V, hang_V):
    """Stretch of ancestor rows ending at each segment: its first row, the segment above, the row its root hangs on.

    A segment that lies right behind its parent continues the parent's stretch, so a chain is walked in one step.
    """
    for i in range(order_V.size):
        v = order_V[i]
        p = parent_V[v]
        if p >= 0 and row_V[p] + length_V[p] == row_V[v]:
            # The rows just before are the parent's, so it came before in this order.
            top_V[v], above_V[v], hang_V[v] = top_V[p], above_V[p], hang_V[p]
        else:
            top_V[v], above_V[v], hang_V[v] = row_V[v], p, attach_V[v]


@kernel
def _cover(begin, end, kv_block, covered_N):
    """Add twice the rows of [begin, end), which a whole piece sees, to the key blocks they lie in."""
    first, last = begin // kv_block, (end - 1) // kv_block
    if first == last:
        covered_N[first] += 2 * (end - begin)
        return
    covered_N[first] += 2 * ((first + 1) * kv_block - begin)
    for j in range(first + 1, last):
        covered_N[j] += 2 * kv_block
    covered_N[last] += 2 * (end - last * kv_block)


@kernel
def list_blocks(
    order_V,
    length_V,
    row_V,
    top_V,
    above_V,
    hang_V,
    tin_Y,
    tout_Y,
    first_B,
    num_external_rows,
    q_block,
    kv_block,
    covered_N,
    by_query,
    by_key,
    partial_count_Q,
    partial_QN,
    full_count_Q,
    full_QN,
    partial_count_N,
    partial_NQ,
    full_count_N,
    full_NQ,
):
    """List partly and wholly visible key blocks of every query block (``by_query``) and the transpose (``by_key``).

    A piece is the part of one segment inside a query block. Its ancestors are whole stretches of rows, visible to all
    of it; inside its own segment the rows up to its first one are, later ones only in part. A key block is wholly
    visible iff every piece sees all its rows. Lists are ascending. Counts must be zero on entry by key; ``order_V``
    are the segments by row; ``first_B`` ends with X.
    """
    X = num_external_rows
    T = tin_Y.size - X
    covered_N[:] = 0
    at = 0
    for i in range(-(-T // q_block)):
        row, stop = i * q_block, min((i + 1) * q_block, T)
        pieces, lowest, highest = 0, covered_N.size, -1
        while row < stop:
            while at < order_V.size and row_V[order_V[at]] + length_V[order_V[at]] <= row:
                at += 1
            v = order_V[at]
            end = min(row_V[v] + length_V[v], stop)
            pieces += 1
            highest = max(highest, (X + end - 1) // kv_block)
            # Rows behind the first of the piece are seen by its later rows only: an odd number is never a whole block.
            if end > row + 1:
                for j in range((X + row + 1) // kv_block, (X + end - 1) // kv_block + 1):
                    covered_N[j] |= 1
            begin, until = top_V[v], row + 1
            while True:
                _cover(X + begin, X + until, kv_block, covered_N)
                lowest = min(lowest, (X + begin) // kv_block)
                highest = max(highest, (X + until - 1) // kv_block)
                if above_V[v] < 0:
                    break
                v = above_V[v]
                begin, until = top_V[v], row_V[v] + length_V[v]
            if hang_V[v] >= 0:
                number = tin_Y[hang_V[v]]
                for b in range(first_B.size - 1):
                    first = first_B[b]
                    if tin_Y[first] <= number < tout_Y[first]:
                        last = min(first_B[b + 1], first + number - tin_Y[first] + 1)
                        _cover(first, last, kv_block, covered_N)
                        lowest = min(lowest, first // kv_block)
                        highest = max(highest, (last - 1) // kv_block)
            row = end
        # Kernels skip the bounds check in full blocks, so an incomplete block of queries or keys is never one.
        whole = 2 * pieces * kv_block if (i + 1) * q_block <= T else -1
        partial, full = 0, 0
        for j in range(lowest, highest + 1):
            covered = covered_N[j]
            if covered == 0:
                continue
            covered_N[j] = 0
            if covered == whole:
                if by_query:
                    full_QN[i, full] = j
                if by_key:
                    full_NQ[j, full_count_N[j]] = i
                    full_count_N[j] += 1
                full += 1
            else:
                if by_query:
                    partial_QN[i, partial] = j
                if by_key:
                    partial_NQ[j, partial_count_N[j]] = i
                    partial_count_N[j] += 1
                partial += 1
        if by_query:
            partial_count_Q[i], full_count_Q[i] = partial, full


@kernel
def visible_runs(row_V, length_V, tin_Y, tout_Y, num_external_rows, begin_B, ptr_B1, run_R2):
    """Runs of own rows that may see a row of each stretch of keys: those with numbers in its first row's interval.

    Segments come by row. A run ends where rows are not adjacent, and where the stretch itself begins, so that readers
    of a tile deeper in the stretch can start behind it. With no room in ``run_R2`` only counts them: ``ptr_B1[b + 1]``.
    """
    for b in range(begin_B.size):
        first = begin_B[b]
        count, end = 0, -1
        for v in range(row_V.size):
            row = row_V[v]
            number = tin_Y[num_external_rows + row]
            if not tin_Y[first] <= number < tout_Y[first]:
                continue
            if row != end or num_external_rows + row == first:
                if run_R2.size:
                    run_R2[ptr_B1[b] + count, 0] = row
                count += 1
            end = row + length_V[v]
            if run_R2.size:
                run_R2[ptr_B1[b] + count - 1, 1] = end
        if not run_R2.size:
            ptr_B1[b + 1] = count
