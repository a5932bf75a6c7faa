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
def _touch(block, amount, query_block, step_N, stamp_N, touched_N, count):
    """Add to the step at a key block; list the touched ones of this query block from the last to the first."""
    if stamp_N[block] != query_block:
        stamp_N[block] = query_block
        step_N[block] = 0
        at = count
        # Most come in falling order.
        while at > 0 and touched_N[at - 1] < block:
            touched_N[at] = touched_N[at - 1]
            at -= 1
        touched_N[at] = block
        count += 1
    step_N[block] += amount
    return count


@kernel
def _cover(begin, end, kv_block, weight, query_block, step_N, stamp_N, touched_N, count):
    """Add the rows of [begin, end), which a whole piece sees, to the key blocks they lie in."""
    first, last = begin // kv_block, (end - 1) // kv_block
    if first == last:
        rows = weight * (end - begin)
        count = _touch(first + 1, -rows, query_block, step_N, stamp_N, touched_N, count)
        return _touch(first, rows, query_block, step_N, stamp_N, touched_N, count)
    whole = weight * kv_block
    at_first, at_last = weight * ((first + 1) * kv_block - begin), weight * (end - last * kv_block)
    count = _touch(last + 1, -at_last, query_block, step_N, stamp_N, touched_N, count)
    count = _touch(last, at_last - whole, query_block, step_N, stamp_N, touched_N, count)
    count = _touch(first + 1, whole - at_first, query_block, step_N, stamp_N, touched_N, count)
    return _touch(first, at_first, query_block, step_N, stamp_N, touched_N, count)


@kernel
def _cover_external(number, tin_Y, tout_Y, first_B, kv_block, weight, query_block, step_N, stamp_N, touched_N, count):
    """The same for the external rows on the path of the one with depth-first number ``number``."""
    for b in range(first_B.size - 1):
        first = first_B[b]
        if tin_Y[first] <= number < tout_Y[first]:
            last = min(first_B[b + 1], first + number - tin_Y[first] + 1)
            count = _cover(first, last, kv_block, weight, query_block, step_N, stamp_N, touched_N, count)
    return count


@kernel
def _stretches(whole, step_N, touched_N, count, block_S, kind_S):
    """Stretches of key blocks of one kind (0 not visible, 1 partly, 2 wholly): first blocks and kinds; their number."""
    covered, kind, stretches = 0, 0, 0
    for i in range(count - 1, -1, -1):
        block = touched_N[i]
        covered += step_N[block]
        now = 0 if covered == 0 else 2 if covered == whole else 1
        if now != kind:
            block_S[stretches], kind_S[stretches] = block, now
            kind = now
            stretches += 1
    return stretches


@kernel
def _extend(count_Q, list_QN, i, begin, end):
    """Append begin, ..., end - 1 to list ``i``."""
    at = count_Q[i]
    for j in range(end - begin):
        list_QN[i, at + j] = begin + j
    count_Q[i] = at + end - begin


@kernel
def _turn(
    query_block,
    before_S,
    kind_before_S,
    num_before,
    block_S,
    kind_S,
    num_now,
    since_N,
    partial_count_N,
    partial_NQ,
    full_count_N,
    full_NQ,
):
    """Key blocks whose kind differs from that for the query block before: close their runs of query blocks."""
    b, n, block, kind, now = 0, 0, 0, 0, 0
    while b < num_before or n < num_now:
        end = block_S[n] if n < num_now else before_S[b]
        if b < num_before:
            end = min(end, before_S[b])
        if kind != now:
            for j in range(block, end):
                if kind == 1:
                    _extend(partial_count_N, partial_NQ, j, since_N[j], query_block)
                elif kind == 2:
                    _extend(full_count_N, full_NQ, j, since_N[j], query_block)
                since_N[j] = query_block
        block = end
        if b < num_before and before_S[b] == end:
            kind = kind_before_S[b]
            b += 1
        if n < num_now and block_S[n] == end:
            now = kind_S[n]
            n += 1


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
    work_8N,
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
    visible iff every piece sees all its rows. Both are the same in long stretches of key blocks, and for many query
    blocks in a row, so lists are written run by run. They are ascending. Counts must be zero on entry; ``order_V``
    are the segments by row; ``first_B`` ends with X; ``work_8N`` holds -1, two more numbers a row than key blocks.
    """
    X = num_external_rows
    T = tin_Y.size - X
    step_N, stamp_N, touched_N, since_N = work_8N[0], work_8N[1], work_8N[2], work_8N[3]
    before_S, kind_before_S, block_S, kind_S = work_8N[4], work_8N[5], work_8N[6], work_8N[7]
    # A block that rows behind the first of a piece see only in part has a number that no whole block has.
    weight = q_block + 1
    at, num_before = 0, 0
    for i in range(-(-T // q_block)):
        row, stop = i * q_block, min((i + 1) * q_block, T)
        pieces, count = 0, 0
        while row < stop:
            while at < order_V.size and row_V[order_V[at]] + length_V[order_V[at]] <= row:
                at += 1
            v = order_V[at]
            end = min(row_V[v] + length_V[v], stop)
            pieces += 1
            if end > row + 1:
                last = (X + end - 1) // kv_block
                count = _touch(last + 1, -1, i, step_N, stamp_N, touched_N, count)
                count = _touch((X + row + 1) // kv_block, 1, i, step_N, stamp_N, touched_N, count)
            begin, until = top_V[v], row + 1
            while True:
                count = _cover(X + begin, X + until, kv_block, weight, i, step_N, stamp_N, touched_N, count)
                if above_V[v] < 0:
                    break
                v = above_V[v]
                begin, until = top_V[v], row_V[v] + length_V[v]
            if hang_V[v] >= 0:
                number = tin_Y[hang_V[v]]
                count = _cover_external(
                    number, tin_Y, tout_Y, first_B, kv_block, weight, i, step_N, stamp_N, touched_N, count
                )
            row = end
        # Kernels skip the bounds check in full blocks, so an incomplete block of queries or keys is never one.
        whole = weight * pieces * kv_block if (i + 1) * q_block <= T else -1
        num_now = _stretches(whole, step_N, touched_N, count, block_S, kind_S)
        if by_query:
            for s in range(num_now - 1):
                if kind_S[s] == 1:
                    _extend(partial_count_Q, partial_QN, i, block_S[s], block_S[s + 1])
                elif kind_S[s] == 2:
                    _extend(full_count_Q, full_QN, i, block_S[s], block_S[s + 1])
        if by_key:
            _turn(
                i,
                before_S,
                kind_before_S,
                num_before,
                block_S,
                kind_S,
                num_now,
                since_N,
                partial_count_N,
                partial_NQ,
                full_count_N,
                full_NQ,
            )
            before_S, kind_before_S, block_S, kind_S = block_S, kind_S, before_S, kind_before_S
            num_before = num_now
    if by_key:
        _turn(
            -(-T // q_block),
            before_S,
            kind_before_S,
            num_before,
            block_S,
            kind_S,
            0,
            since_N,
            partial_count_N,
            partial_NQ,
            full_count_N,
            full_NQ,
        )


@kernel
def visible_runs(row_V, length_V, number_V, tin_Y, tout_Y, num_external_rows, begin_B, ptr_B1, run_R2):
    """Runs of own rows that may see a row of each stretch of keys: those with numbers in its first row's interval.

    Segments come by row, ``number_V`` are the depth-first numbers of their first rows. A run ends where rows are not
    adjacent, and where the stretch itself begins, so that readers of a tile deeper in the stretch can start behind it.
    With no room in ``run_R2`` only counts them: ``ptr_B1[b + 1]``.
    """
    for b in range(begin_B.size):
        first = begin_B[b]
        lowest, highest = tin_Y[first], tout_Y[first]
        count, end = 0, -1
        for v in range(row_V.size):
            if not lowest <= number_V[v] < highest:
                continue
            row = row_V[v]
            if row != end or num_external_rows + row == first:
                if run_R2.size:
                    run_R2[ptr_B1[b] + count, 0] = row
                count += 1
            end = row + length_V[v]
            if run_R2.size:
                run_R2[ptr_B1[b] + count - 1, 1] = end
        if not run_R2.size:
            ptr_B1[b + 1] = count


@kernel
def key_tiles(
    order_C, parent_C, row_C, rows_C, position_C, above_C, num_external_rows, list_ptr_C1, list_L, rows_N, at
):
    """Tile lists of the chains' paths, and the path rows of the tiles of their own rows; returns the tiles used.

    A chain's list begins with its parent's up to the fork, or with tiles from ``above_C`` on (of external rows). The
    tile that holds the fork is the chain's own, its first positions are the parent's rows. ``order_C`` has parents
    before children; ``at`` tiles of ``rows_N`` are in use, the others hold zeros.
    """
    block = rows_N.shape[1]
    for c in order_C:
        shared, left = position_C[c] // block, position_C[c] % block
        mine, theirs = list_ptr_C1[c], -1
        if parent_C[c] >= 0:
            theirs = list_ptr_C1[parent_C[c]]
        for i in range(shared):
            list_L[mine + i] = list_L[theirs + i] if theirs >= 0 else above_C[c] + i
        if left:
            fork = list_L[theirs + shared] if theirs >= 0 else above_C[c] + shared
            for i in range(left):
                rows_N[at, i] = rows_N[fork, i]
        for i in range(rows_C[c]):
            rows_N[at + (left + i) // block, (left + i) % block] = num_external_rows + row_C[c] + i
        tiles = (left + rows_C[c] + block - 1) // block
        for i in range(tiles):
            list_L[mine + shared + i] = at + i
        at += tiles
    return at
