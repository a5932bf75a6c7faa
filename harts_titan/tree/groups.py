"""Microbatches as sorted linked lists of trajectories, with cheapest insertion (HARTS A.1).

Shapes: M leaves (trajectories that are no prefix of a later one) by sorted place, K group numbers, B buckets of free
capacity.

A trajectory that is a prefix of another one costs nothing beside it, so the searches place leaves only; the other
trajectories follow the leaf they are a prefix of. Within a group sorted by place, a leaf ``x`` between ``p`` and ``q``
costs ``|x| - max(LCP(p,x), LCP(x,q))``: the paper's ``|x| - LCP(p,x) - LCP(x,q) + LCP(p,q)``, as the last term is the
smaller of the two before it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from harts_titan.tree.compiled import kernel
from harts_titan.tree.draws import draw
from harts_titan.tree.sorted_step import SortedStep, common_prefix

_NUM_BUCKETS = 64
# Leaves on either side that are looked at for a group that shares much; beyond, only free capacity counts.
_REACH = 48

# Columns of Groups.leaf_M6.
LENGTH, LCP, GROUP, PREV, NEXT, SHARED = range(6)
# Columns of Groups.group_K8.
HEAD, ROWS, SIZE, MARK, BUCKET, BEFORE, AFTER, UNUSED = range(8)
# Entries of Groups.scalar_7.
CAPACITY, BUCKET_ROWS, COMMON, USED, STAMP, SQUARES, SHIFT = range(7)


class Groups(NamedTuple):
    """Working state of a search, changed in place. Arrays are int64; the two large ones int32, for the cache.

    Attributes:
        leaf_M6: int32, of each leaf: tokens, common prefix with the leaf before, group (-1 while it has none), leaf
            before and leaf after in the group (-1 none), common prefix with the leaf before in the group (0 if none).
        group_K8: int32, of each group: first leaf (-1 while unused), compact rows, leaves, last insertion that looked
            at it, bucket of free capacity, group before and group after in the bucket's list, and an entry of the
            stack of unused groups, whose top is entry ``K - used - 1``.
        bucket_B: first group of each bucket.
        minimum_LM: range minima of the common prefixes, see :class:`SortedStep`.
        scalar_7: capacity, rows of a bucket, tokens common to all leaves, used groups, insertions so far, sum of the
            squares of the groups' rows, each divided by ``2**shift`` before, shift.
        random_1: uint64 state of the random numbers.
    """

    leaf_M6: np.ndarray
    group_K8: np.ndarray
    bucket_B: np.ndarray
    minimum_LM: np.ndarray
    scalar_7: np.ndarray
    random_1: np.ndarray


def leaves(step: SortedStep, group_N: np.ndarray | None = None) -> tuple[np.ndarray, SortedStep]:
    """Return the trajectories that a search has to place: those that are no prefix of the one after them.

    Args:
        step: trajectories in lexicographic order.
        group_N: int64 groups 0..K-1 that shall not become empty: the last trajectory of one that consists of such
            prefixes alone is a leaf, too. None for no such groups.

    Returns:
        leaf_N: int64 leaf that each place belongs to: itself, or the first leaf after it, which it is a prefix of.
        leaves: the leaves as a step of their own; ``order_N`` holds their places in ``step``.
    """
    last_N = np.append(step.lcp_N[1:] < step.length_N[:-1], True)
    if group_N is not None:
        last_K = np.zeros(int(group_N.max()) + 1, np.int64)
        last_K[group_N] = np.arange(group_N.size)
        represented_K = np.bincount(group_N, last_N, last_K.size) > 0
        last_N[last_K[~represented_K]] = True
    place_M = np.flatnonzero(last_N)
    lcp_M = np.minimum.reduceat(step.lcp_N, np.append(0, place_M[:-1] + 1))
    return np.cumsum(last_N) - last_N, SortedStep(place_M, step.length_N[place_M], lcp_M)


def empty_groups(leaves: SortedStep, *, capacity: int, seed: int = 0) -> Groups:
    """Return a state in which no leaf has a group.

    Args:
        leaves: trajectories of which none is a prefix of another, each at most ``capacity`` tokens.
        capacity: compact rows a group may have.
        seed: of the random numbers.
    """
    m = leaves.num_trajectories
    common = int(leaves.lcp_N[1:].min()) if m > 1 else int(leaves.length_N[0])
    shift = max(0, capacity.bit_length() - 15)
    leaf_M6, group_K8 = np.zeros((m, 6), np.int32), np.zeros((m, 8), np.int32)
    leaf_M6[:, LENGTH], leaf_M6[:, LCP] = leaves.length_N, leaves.lcp_N
    leaf_M6[:, GROUP : NEXT + 1] = -1
    group_K8[:, HEAD] = -1
    group_K8[:, UNUSED] = np.arange(m)[::-1]
    return Groups(
        leaf_M6=leaf_M6,
        group_K8=group_K8,
        bucket_B=np.full(_NUM_BUCKETS, -1, np.int64),
        minimum_LM=leaves.minimum_LN,
        scalar_7=np.array([capacity, -(-capacity // _NUM_BUCKETS), common, 0, 0, 0, shift], np.int64),
        random_1=np.array([seed], np.uint64),
    )


@kernel
def fill(groups, group_M, last_K):
    """Place every leaf of an empty state in the given group; groups are numbered 0..K-1 without gaps."""
    last_K[:] = -1
    for x in range(group_M.shape[0]):
        g = group_M[x]
        p = last_K[g]
        insert(groups, x, g, p, common_prefix(groups.minimum_LM, p, x) if p >= 0 else 0, 0)
        last_K[g] = x
    # Groups were opened in order of appearance; the stack of unused ones must hold exactly the others.
    unused = 0
    for g in range(last_K.shape[0] - 1, -1, -1):
        if groups.group_K8[g, SIZE] == 0:
            groups.group_K8[unused, UNUSED] = g
            unused += 1


@kernel
def unused_group(groups):
    """Return the group to open next; it opens with the first leaf that is inserted."""
    return groups.group_K8[groups.group_K8.shape[0] - groups.scalar_7[USED] - 1, UNUSED]


@kernel
def _enter_bucket(groups, g, b):
    after = groups.bucket_B[b]
    groups.group_K8[g, BUCKET] = b
    groups.bucket_B[b] = g
    groups.group_K8[g, BEFORE] = -1
    groups.group_K8[g, AFTER] = after
    if after >= 0:
        groups.group_K8[after, BEFORE] = g


@kernel
def _leave_bucket(groups, g):
    before, after = groups.group_K8[g, BEFORE], groups.group_K8[g, AFTER]
    if before >= 0:
        groups.group_K8[before, AFTER] = after
    else:
        groups.bucket_B[groups.group_K8[g, BUCKET]] = after
    if after >= 0:
        groups.group_K8[after, BEFORE] = before


@kernel
def _set_rows(groups, g, rows):
    """Change the rows of a used group."""
    scalar_7, group_K8 = groups.scalar_7, groups.group_K8
    old, new = group_K8[g, ROWS] >> scalar_7[SHIFT], rows >> scalar_7[SHIFT]
    scalar_7[SQUARES] += new * new - old * old
    group_K8[g, ROWS] = rows
    b = min((scalar_7[CAPACITY] - rows) // scalar_7[BUCKET_ROWS], _NUM_BUCKETS - 1)
    if b != group_K8[g, BUCKET]:
        _leave_bucket(groups, g)
        _enter_bucket(groups, g, b)


@kernel
def insert(groups, x, g, p, left, right):
    """Put leaf ``x`` after leaf ``p`` (-1: first) of group ``g`` and return the rows it costs.

    ``left`` and ``right`` are its common prefixes with its neighbours there, 0 for an absent one.
    """
    if p >= 0:
        q = groups.leaf_M6[p, NEXT]
        groups.leaf_M6[p, NEXT] = x
    else:
        q = groups.group_K8[g, HEAD]
        groups.group_K8[g, HEAD] = x
    groups.leaf_M6[x, PREV] = p
    groups.leaf_M6[x, NEXT] = q
    groups.leaf_M6[x, SHARED] = left
    if q >= 0:
        groups.leaf_M6[q, PREV] = x
        groups.leaf_M6[q, SHARED] = right
    cost = groups.leaf_M6[x, LENGTH] - max(left, right)
    groups.leaf_M6[x, GROUP] = g
    groups.group_K8[g, SIZE] += 1
    if groups.group_K8[g, SIZE] == 1:
        groups.scalar_7[USED] += 1
        _enter_bucket(groups, g, _NUM_BUCKETS - 1)
    _set_rows(groups, g, groups.group_K8[g, ROWS] + cost)
    return cost


@kernel
def remove(groups, x):
    """Take leaf ``x`` out of its group and return the rows saved."""
    g, p, q = groups.leaf_M6[x, GROUP], groups.leaf_M6[x, PREV], groups.leaf_M6[x, NEXT]
    left = groups.leaf_M6[x, SHARED]
    right = groups.leaf_M6[q, SHARED] if q >= 0 else 0
    if p >= 0:
        groups.leaf_M6[p, NEXT] = q
    else:
        groups.group_K8[g, HEAD] = q
    if q >= 0:
        groups.leaf_M6[q, PREV] = p
        groups.leaf_M6[q, SHARED] = min(left, right)
    groups.leaf_M6[x, GROUP] = -1
    groups.group_K8[g, SIZE] -= 1
    cost = groups.leaf_M6[x, LENGTH] - max(left, right)
    _set_rows(groups, g, groups.group_K8[g, ROWS] - cost)
    if groups.group_K8[g, SIZE] == 0:
        _leave_bucket(groups, g)
        groups.scalar_7[USED] -= 1
        groups.group_K8[groups.group_K8.shape[0] - groups.scalar_7[USED] - 1, UNUSED] = g
    return cost


@kernel
def cheapest(groups, x, tightest, skip):
    """Find a group for leaf ``x``.

    The leaves around ``x`` are visited in order of decreasing common prefix, so the first feasible group shares the
    most; among equals the fullest is taken. Beyond the reach, and where only the prefix common to all leaves is
    shared, groups differ by free capacity alone and the buckets give the fullest that still fits.

    Args:
        groups: the state.
        x: leaf without a group.
        tightest: choose by most rows after insertion, not by most shared tokens.
        skip: chance in 1/1024 that a feasible group is passed over.

    Returns:
        (group, leaf before, left, right) as :func:`insert` takes them; group -1 if none fits.
    """
    leaf_M6, capacity, common = groups.leaf_M6, groups.scalar_7[CAPACITY], groups.scalar_7[COMMON]
    groups.scalar_7[STAMP] += 1
    stamp, m = groups.scalar_7[STAMP], leaf_M6.shape[0]
    length = groups.leaf_M6[x, LENGTH]
    i, j = x - 1, x + 1
    left = leaf_M6[x, LCP] if i >= 0 else -1
    right = leaf_M6[j, LCP] if j < m else -1
    best, best_shared, best_rows, best_leaf = -1, -1, -1, -1
    for _ in range(_REACH):
        shared = max(left, right)
        if shared <= common or (shared < best_shared and not tightest):
            break
        if left >= right:
            y = i
            i -= 1
            left = min(left, leaf_M6[y, LCP]) if i >= 0 else -1
        else:
            y = j
            j += 1
            right = min(right, leaf_M6[j, LCP]) if j < m else -1
        g = groups.leaf_M6[y, GROUP]
        if g < 0 or groups.group_K8[g, MARK] == stamp:
            continue
        groups.group_K8[g, MARK] = stamp
        rows = groups.group_K8[g, ROWS] + length - shared
        if rows > best_rows and rows <= capacity and (skip == 0 or draw(groups.random_1, 1024) >= skip):
            best, best_shared, best_rows, best_leaf = g, shared, rows, y
    if best < 0 or tightest:
        level = max(left, right, 0)
        g = _fullest(groups, length - level, best_rows - length + level, skip)
        if g >= 0:
            p, before, after = _neighbours(groups, x, g)
            if groups.group_K8[g, ROWS] + length - max(before, after) <= capacity:
                return g, p, before, after
    if best < 0:
        return -1, -1, 0, 0
    if best_leaf < x:
        q = groups.leaf_M6[best_leaf, NEXT]
        return best, best_leaf, best_shared, groups.leaf_M6[q, SHARED] if q >= 0 else 0
    p = groups.leaf_M6[best_leaf, PREV]
    return best, p, groups.leaf_M6[best_leaf, SHARED], best_shared


@kernel
def _fullest(groups, need, more_than, skip):
    """Return the group with most rows, above ``more_than``, that has ``need`` rows free; -1 if there is none."""
    most = groups.scalar_7[CAPACITY] - need
    for b in range(max(need, 0) // groups.scalar_7[BUCKET_ROWS], _NUM_BUCKETS):
        best, best_rows = -1, more_than
        g = groups.bucket_B[b]
        while g >= 0:
            rows = groups.group_K8[g, ROWS]
            if best_rows < rows <= most and (skip == 0 or draw(groups.random_1, 1024) >= skip):
                best, best_rows = g, rows
            g = groups.group_K8[g, AFTER]
        if best >= 0:
            return best
    return -1


@kernel
def _neighbours(groups, x, g):
    """Return (leaf before, common prefix with it, common prefix with the leaf after) of ``x`` in group ``g``."""
    p, q = -1, groups.group_K8[g, HEAD]
    while 0 <= q < x:
        p, q = q, groups.leaf_M6[q, NEXT]
    left = common_prefix(groups.minimum_LM, p, x) if p >= 0 else 0
    right = common_prefix(groups.minimum_LM, x, q) if q >= 0 else 0
    return p, left, right


@kernel
def settle(groups, x, tightest, skip):
    """Put leaf ``x`` into the group :func:`cheapest` finds, else into an unused one; return the rows it costs."""
    g, p, left, right = cheapest(groups, x, tightest, skip)
    if g < 0:
        g = unused_group(groups)
    return insert(groups, x, g, p, left, right)


@kernel
def take_out(groups, x, removed_M5, n):
    """Remove leaf ``x``, note in row ``n`` where it was, and return the rows saved."""
    after = groups.leaf_M6[x, NEXT]
    removed_M5[n, 0] = x
    removed_M5[n, 1] = groups.leaf_M6[x, GROUP]
    removed_M5[n, 2] = groups.leaf_M6[x, PREV]
    removed_M5[n, 3] = groups.leaf_M6[x, SHARED]
    removed_M5[n, 4] = groups.leaf_M6[after, SHARED] if after >= 0 else 0
    return remove(groups, x)


@kernel
def put_back(groups, removed_M5, n):
    """Undo ``n`` calls of :func:`take_out`, once what was inserted since has been removed in reverse order."""
    for i in range(n - 1, -1, -1):
        insert(groups, removed_M5[i, 0], removed_M5[i, 1], removed_M5[i, 2], removed_M5[i, 3], removed_M5[i, 4])
