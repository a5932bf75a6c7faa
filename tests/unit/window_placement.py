"""A small planner of sharing windows for tests: drawn places and drawn, closed shared prefixes."""

from __future__ import annotations

import numpy as np

from harts_titan.tree import partition
from harts_titan.tree.placement import alone
from harts_titan.tree.work import Placement


def common_prefix(a, b) -> int:
    n = min(len(a), len(b))
    differs = np.flatnonzero(np.asarray(a[:n]) != np.asarray(b[:n]))
    return int(differs[0]) if differs.size else n


def compact(paths) -> int:
    return len({tuple(map(int, path[: i + 1])) for path in paths for i in range(len(path))})


def drawn(sequences, rng, style, *, capacity, dp_degree=1, max_window_slots=4, **_):
    """Return a planner function for ``plan_step``: level 1's microbatches in drawn windows."""

    def drawn_windows(step) -> Placement:
        start = alone(partition.partition_step(step, capacity=capacity, dp_degree=dp_degree))
        options = {"capacity": capacity, "max_window_slots": max_window_slots, "style": style}
        return draw_placement(sequences, step, start, rng, **options)

    return drawn_windows


def draw_placement(sequences, step, start: Placement, rng, *, capacity, max_window_slots, style, ptr=None) -> Placement:
    """Cut slots into drawn windows and let producers compute prefixes that consumers share.

    Args:
        sequences: token lists by trajectory of the step batch.
        step: the sorted step.
        start: a placement of whole consumers.
        rng: random generator.
        capacity: rows a producer may have.
        max_window_slots: slots a window may have.
        style: ``full`` (all that two consumers use), ``depth`` (up to a drawn depth) or ``ragged`` (drawn per path).
        ptr: window boundaries; drawn if not given.
    """
    ptr = [0] if ptr is None else list(ptr)
    while ptr[-1] < start.num_slots:
        ptr.append(min(start.num_slots, ptr[-1] + int(rng.integers(1, max_window_slots + 1))))
    path = [sequences[x] for x in step.order_N]
    shared = np.zeros(len(path), np.int64)
    window = np.searchsorted(ptr, start.slot_N, "right") - 1
    for w, d in {(int(w), int(d)) for w, d in zip(window, start.replica_N, strict=True)}:
        members = np.flatnonzero((window == w) & (start.replica_N == d))
        slot = start.slot_N[members]
        both = np.array([[common_prefix(path[x], path[y]) for y in members] for x in members])
        wanted = np.where(slot[:, None] != slot[None, :], both, 0).max(axis=1)
        while wanted.any():
            if style == "depth":
                wanted = np.minimum(wanted, rng.integers(0, wanted.max() + 1))
            elif style == "ragged":
                wanted = np.array([int(rng.integers(0, n + 1)) for n in wanted])
            # Closed: as deep as any member's prefix goes along this path.
            closed = np.minimum(both, wanted[None, :]).max(axis=1)
            rows = compact([path[x][:n] for x, n in zip(members, closed, strict=True)])
            hits = sum(
                compact([path[x][:n] for x, n, s in zip(members, closed, slot, strict=True) if s == j])
                for j in np.unique(slot)
            )
            if rows <= capacity and hits > rows:
                shared[members] = closed
                break
            wanted = wanted // 2
    return Placement(start.replica_N, start.slot_N, np.array(ptr, np.int64), shared)
