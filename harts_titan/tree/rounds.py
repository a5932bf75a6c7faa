"""Minimum-call planning of chunkwise linear attention over a segment forest (HARTS 3.3).

A packed call runs independent sequences. A segment either continues its parent's sequence or starts a sequence of its
own: from the state at the last chunk boundary before it, replaying the tokens in between. A state made in one call can
start another sequence only in a later call, so calls come in rounds; this module finds the fewest.

Shapes: V segments.
"""

from __future__ import annotations

from dataclasses import dataclass

import numba
import numpy as np


@dataclass(frozen=True)
class RoundPlan:
    """Which segments run together, and which share a sequence.

    Attributes:
        num_rounds: packed calls needed; 0 for an empty forest.
        round_of_segment: int64 (V,) round of each segment, in [0, num_rounds).
        continues_parent: bool (V,) True where the segment continues its parent's sequence; at most one child each.
        replay_tokens: int64 (V,) tokens processed again in front of a segment that starts a sequence, else 0.
    """

    num_rounds: int
    round_of_segment: np.ndarray
    continues_parent: np.ndarray
    replay_tokens: np.ndarray


def plan_rounds(
    parent: np.ndarray, length: np.ndarray, chunk_size: int, root_start: np.ndarray | None = None
) -> RoundPlan:
    """Assign segments to the fewest rounds, with the fewest replayed tokens among such plans (HARTS 3.3).

    With ``a(p)`` the last chunk boundary at or before ``p`` and ``[s, e)`` the positions of segment ``v``:
    ``T_pre(v)`` is the number of rounds of v's subtree when the state at ``a(s)`` exists before the call, ``T_in(v)``
    when it is being made in the same call because ``v`` continues a sequence. A leaf needs 1. Otherwise
    ``T_in(v) = min_o max(T_in(o), 1 + max_{u != o} T_pre(u))`` over the child ``o`` that continues ``v``, and
    ``T_pre(v)`` is the same, unless ``v`` ends before the next chunk boundary: then every child starts from the state
    that ``v`` itself started from and ``T_pre(v) = max_u T_pre(u)``.

    Every segment with children is continued by one of them, which costs no round and replays least: the total is
    ``sum_v (children(v) - 1) * (e_v mod chunk_size)``, the minimum over all plans. Not in the paper: where several
    children may continue, the one with the longest path below it does, since the longest sequence of a round is the
    serial part of its call.

    Args:
        parent: int64 (V,) segment above, -1 at a root; parents come before children.
        length: int64 (V,) tokens of each segment, > 0.
        chunk_size: tokens in a chunk of the linear-attention kernel, > 0.
        root_start: int64 (V,) absolute position of each root's first token (0 elsewhere), for a consumer attached to
            a producer, which supplies the state at ``a(root_start)``. Default: all roots start at 0.

    Returns:
        The plan.

    Raises:
        ValueError: If sizes differ, a parent does not precede its child, or a length, chunk size or start is out of
            range.

    Time: O(V), no recursion.
    """
    parent = np.ascontiguousarray(parent, dtype=np.int64)
    length = np.ascontiguousarray(length, dtype=np.int64)
    start = np.zeros_like(parent) if root_start is None else np.ascontiguousarray(root_start, dtype=np.int64)
    if parent.ndim != 1 or parent.shape != length.shape or parent.shape != start.shape:
        raise ValueError(
            f"parent {parent.shape}, length {length.shape}, root_start {start.shape}: need equal 1-D sizes"
        )
    if chunk_size <= 0:
        raise ValueError(f"chunk_size is {chunk_size}, must be positive")
    if parent.size == 0:
        return RoundPlan(0, np.zeros(0, np.int64), np.zeros(0, bool), np.zeros(0, np.int64))
    bad = (parent < -1) | (parent >= np.arange(parent.size))
    if bad.any():
        v = int(bad.argmax())
        raise ValueError(f"parent[{v}] is {parent[v]}: must be -1 or a segment before {v}; order parents first")
    if length.min() <= 0:
        v = int(length.argmin())
        raise ValueError(f"length[{v}] is {length[v]}: a segment has at least one token")
    bad = (start < 0) | ((start != 0) & (parent >= 0))
    if bad.any():
        v = int(bad.argmax())
        raise ValueError(f"root_start[{v}] is {start[v]}: must be >= 0 at a root and 0 elsewhere")
    num_rounds, round_V, continues_V, replay_V = _plan(parent, length, int(chunk_size), start)
    return RoundPlan(int(num_rounds), round_V, continues_V, replay_V)


@numba.njit(cache=True)
def _plan(parent, length, chunk_size, root_start):
    n = parent.shape[0]
    start = np.empty(n, np.int64)
    for v in range(n):
        start[v] = root_start[v] if parent[v] < 0 else start[parent[v]] + length[parent[v]]
    # Over the children seen so far: largest and second largest T_pre; the child that attains the largest (the safe one
    # to continue) and its T_in; tokens of the longest path below and the child it goes through.
    most, second, safe_in = np.zeros(n, np.int64), np.zeros(n, np.int64), np.zeros(n, np.int64)
    safe, tall, height = np.full(n, -1), np.full(n, -1), np.zeros(n, np.int64)
    num_rounds = 0
    for v in range(n - 1, -1, -1):
        below = height[v]
        height[v] = below + length[v]
        if tall[v] < 0:
            t_pre, t_in = 1, 1
        else:
            t_in = max(safe_in[v], 1 + second[v]) if second[v] > 0 else safe_in[v]
            crosses = start[v] + length[v] >= start[v] // chunk_size * chunk_size + chunk_size
            t_pre = t_in if crosses else most[v]
        p = parent[v]
        if p < 0:
            num_rounds = max(num_rounds, t_pre)
            continue
        if height[v] >= height[p]:
            height[p], tall[p] = height[v], v
        if t_pre > most[p]:
            most[p], second[p] = t_pre, most[p]
            safe[p], safe_in[p] = v, t_in
        elif t_pre > second[p]:
            # Attained twice, the largest costs 1 + most >= T_in whichever of the two continues.
            second[p] = t_pre
    return num_rounds, *_recover(parent, length, chunk_size, start, num_rounds, most, safe, tall)


@numba.njit(cache=True)
def _recover(parent, length, chunk_size, start, num_rounds, most, safe, tall):
    n = parent.shape[0]
    round_V, continues_V, replay_V = np.zeros(n, np.int64), np.zeros(n, np.bool_), np.zeros(n, np.int64)
    # ready: the state at the segment's entry anchor exists before its round.
    ready, children_ready, chosen = np.ones(n, np.bool_), np.zeros(n, np.bool_), np.full(n, -1)
    for v in range(n):
        p = parent[v]
        if p >= 0 and chosen[p] == v:
            continues_V[v] = True
            round_V[v] = round_V[p]
            ready[v] = children_ready[p]
        else:
            if p >= 0:
                round_V[v] = round_V[p] if children_ready[p] else round_V[p] + 1
            replay_V[v] = start[v] % chunk_size
        anchor = start[v] // chunk_size * chunk_size
        children_ready[v] = ready[v] and start[v] + length[v] < anchor + chunk_size
        # Any child may continue unless a side child would then exceed the rounds left; only one can be that deep.
        tight = not children_ready[v] and most[v] >= num_rounds - round_V[v]
        chosen[v] = safe[v] if tight else tall[v]
    return round_V, continues_V, replay_V
