"""One shard of the OR-Tools baseline: a CP-SAT model that partitions it into microbatches (HARTS 5.3).

Only leaves of the shard's trie need a microbatch of their own choice: a trajectory that another one continues is
computed wherever that one is, at no further row.

Shapes: M trajectories of the shard by sorted place, L leaves among them, V segments of the trie of the leaves (unary
chains collapsed), B microbatches that a solution may use.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from harts_titan.tree.forest import Forest, build_forest
from harts_titan.tree.ortools_import import import_cp_model


@dataclass(frozen=True)
class ShardReport:
    """How the search inside one shard ended.

    Attributes:
        status: CP-SAT's word: ``OPTIMAL``, or ``FEASIBLE`` where time was up or the first solution was asked for.
        rows: compact rows of the solution.
        bound: proven lower bound of the compact rows.
        start_rows: compact rows of the solution that the search starts from.
        num_microbatches: microbatches used.
        seconds: model building and search.
        first_seconds: seconds until the first solution, model building included.
    """

    status: str
    rows: int
    bound: int
    start_rows: int
    num_microbatches: int
    seconds: float
    first_seconds: float


@dataclass(frozen=True)
class Search:
    """How CP-SAT searches a shard.

    Attributes:
        seconds: budget of the search.
        first_feasible: stop at the first solution.
        workers: solver threads.
        seed: random seed of the solver.
        budget_name: setting that gives the budget, for messages.
    """

    seconds: float
    first_feasible: bool
    workers: int
    seed: int
    budget_name: str = "seconds_per_shard"


@dataclass(frozen=True)
class Shard:
    """Trajectories of one replica as the model sees them.

    Attributes:
        place_L: int64 trajectory that each leaf is.
        leaf_M: int64 leaf that computes each trajectory: the next one in sorted order that none continues.
        length_L: int64 tokens of each leaf.
        lcp_L: int64 tokens in common with the leaf before; entry 0 is 0.
        forest: trie of the leaves.
        paths: segments of each leaf, root first.
    """

    place_L: np.ndarray
    leaf_M: np.ndarray
    length_L: np.ndarray
    lcp_L: np.ndarray
    forest: Forest
    paths: tuple[np.ndarray, ...]

    @classmethod
    def build(cls, length_M: np.ndarray, lcp_M: np.ndarray) -> Shard:
        """Build the model's view of trajectories in sorted order.

        Args:
            length_M: int64 tokens.
            lcp_M: int64 tokens in common with the trajectory before; entry 0 is 0.
        """
        is_leaf_M = np.append(lcp_M[1:] < length_M[:-1], True)
        leaf_M = np.cumsum(is_leaf_M) - is_leaf_M
        place_L = np.flatnonzero(is_leaf_M)
        first_L = np.concatenate([[0], place_L[:-1] + 1])
        length_L, lcp_L = length_M[place_L], np.minimum.reduceat(lcp_M, first_L)
        forest = build_forest(length_L, lcp_L)
        paths = []
        for v in forest.end_segment_N.tolist():
            path = []
            while v >= 0:
                path.append(v)
                v = int(forest.parent_V[v])
            paths.append(np.array(path[::-1]))
        return cls(place_L, leaf_M, length_L, lcp_L, forest, tuple(paths))

    @property
    def num_leaves(self) -> int:
        """Leaves of the trie."""
        return int(self.length_L.shape[0])

    def rows(self, group_L: np.ndarray) -> np.ndarray:
        """Return the compact rows of each microbatch: int64."""
        has_BV = np.zeros((int(group_L.max()) + 1, self.forest.num_segments), bool)
        for leaf, path in enumerate(self.paths):
            has_BV[group_L[leaf], path] = True
        return has_BV @ self.forest.length_V

    def copies_bound(self, capacity: int) -> np.ndarray:
        """Return a lower bound of the microbatches that each segment is in: int64 (V,) (project derivation).

        A segment ending at depth ``end`` leaves ``capacity - end`` rows for what is below it; its last token counts
        as one of them. A segment is also in at least as many microbatches as any of its children.
        """
        forest = self.forest
        below_V, copies_V = forest.length_V.copy(), np.ones(forest.num_segments, np.int64)
        for v in range(forest.num_segments - 1, -1, -1):
            length, end = int(forest.length_V[v]), int(forest.start_V[v] + forest.length_V[v])
            copies_V[v] = max(copies_V[v], -(-(int(below_V[v]) - length + 1) // (capacity - end + 1)))
            parent = int(forest.parent_V[v])
            if parent >= 0:
                below_V[parent] += below_V[v]
                copies_V[parent] = max(copies_V[parent], copies_V[v])
        return copies_V

    def microbatch_limit(self, rows: int, capacity: int) -> int:
        """Return how many microbatches a solution of at most ``rows`` rows can need.

        Two microbatches of an optimal solution that fit in one can be merged without a further row, so any two have
        more than ``capacity`` rows together. Where all leaves share one root, every microbatch repeats the root, and
        the bound of the remaining segments leaves room for so many repetitions only.
        """
        limit = min(self.num_leaves, 2 * rows // capacity + 1)
        if int((self.forest.parent_V < 0).sum()) == 1:
            rest = int((self.copies_bound(capacity) * self.forest.length_V)[1:].sum())
            limit = min(limit, (rows - rest) // int(self.forest.length_V[0]))
        return limit


def greedy_groups(shard: Shard, capacity: int) -> np.ndarray:
    """Return the best of several greedy partitions: int64 (L,) microbatch of each leaf, numbered by first use.

    The cheapest contiguous partition of the sorted order; and leaves in sorted order or longest first, each put where
    the most rows are shared or where it fills a microbatch most (the two rules of HARTS A.1).
    """
    candidates = [_contiguous(shard, capacity)]
    for order in (np.arange(shard.num_leaves), np.argsort(-shard.length_L, kind="stable")):
        candidates.extend(_insertion(shard, capacity, order, most_shared) for most_shared in (True, False))
    # Of equal ones the fewest microbatches: more than `microbatch_limit` are no start for the model.
    best = min(candidates, key=lambda group_L: (int(shard.rows(group_L).sum()), np.unique(group_L).size))
    return number_by_first_use(best)


def number_by_first_use(group_L: np.ndarray) -> np.ndarray:
    """Return the same partition with groups numbered in the order in which they appear."""
    _, first, inverse = np.unique(group_L, return_index=True, return_inverse=True)
    rank = np.empty(first.shape[0], np.int64)
    rank[np.argsort(first)] = np.arange(first.shape[0])
    return rank[inverse]


def _contiguous(shard: Shard, capacity: int) -> np.ndarray:
    """Cheapest partition into runs of the sorted order, and of equally cheap ones the one with the fewest runs."""
    length, lcp, n = shard.length_L.tolist(), shard.lcp_L.tolist(), shard.num_leaves
    best, start = [(0, 0)] * (n + 1), [0] * (n + 1)
    for end in range(1, n + 1):
        rows = length[end - 1]
        best[end], start[end] = (best[end - 1][0] + rows, best[end - 1][1] + 1), end - 1
        for first in range(end - 2, -1, -1):
            rows += length[first] - lcp[first + 1]
            if rows > capacity:
                break
            candidate = (best[first][0] + rows, best[first][1] + 1)
            if candidate < best[end]:
                best[end], start[end] = candidate, first
    group_L, end = np.zeros(n, np.int64), n
    while end > 0:
        group_L[start[end] : end] = start[end]
        end = start[end]
    return group_L


def _insertion(shard: Shard, capacity: int, order: np.ndarray, most_shared: bool) -> np.ndarray:
    length_V = shard.forest.length_V
    has_BV, rows_B = np.zeros((0, shard.forest.num_segments), bool), np.zeros(0, np.int64)
    group_L = np.zeros(shard.num_leaves, np.int64)
    for leaf in order.tolist():
        path = shard.paths[leaf]
        added_B = ~has_BV[:, path] @ length_V[path]
        fits = np.flatnonzero(rows_B + added_B <= capacity)
        if fits.size == 0:
            has_BV = np.vstack([has_BV, np.zeros((1, has_BV.shape[1]), bool)])
            rows_B, target, added = np.append(rows_B, 0), rows_B.shape[0], int(length_V[path].sum())
        else:
            key = -added_B[fits] if most_shared else (rows_B + added_B)[fits]
            target = int(fits[np.argmax(key)])
            added = int(added_B[target])
        has_BV[target, path] = True
        rows_B[target] += added
        group_L[leaf] = target
    return group_L


def build_model(shard: Shard, capacity: int, hint_L: np.ndarray, exactly: int | None = None) -> tuple[Any, list[dict]]:
    """Build the CP-SAT model of a shard, with a solution to start from.

    A Boolean per segment and microbatch says that the segment's rows are computed there. A segment needs its parent;
    the segment that a leaf ends with is in exactly one microbatch; rows fit the capacity. Microbatches are
    interchangeable, so the used ones come first and leaf ``l`` is in one of the first ``l + 1``. The bound of
    :meth:`Shard.copies_bound` is a redundant constraint, which the solver does not find by itself.

    Args:
        shard: trajectories.
        capacity: rows of a microbatch.
        hint_L: int64 microbatch of each leaf in a feasible solution, numbered by first use.
        exactly: microbatches to use, as many as the hint's; default any number.

    Returns:
        The model, and its Booleans by segment and microbatch: a list (V) of dicts from microbatch to variable.
    """
    model = import_cp_model().CpModel()
    forest = shard.forest
    num_bins = exactly or shard.microbatch_limit(int(shard.rows(hint_L).sum()), capacity)
    last_V = np.zeros(forest.num_segments, np.int64)
    hint_VB = np.zeros((forest.num_segments, num_bins), bool)
    for leaf, path in enumerate(shard.paths):
        last_V[path] = np.maximum(last_V[path], leaf)
        hint_VB[path, hint_L[leaf]] = True
    in_VB = [
        {b: model.new_bool_var(f"in_{v}_{b}") for b in range(min(num_bins, int(last_V[v]) + 1))}
        for v in range(forest.num_segments)
    ]
    used_B = [model.new_bool_var(f"used_{b}") for b in range(num_bins)]
    for v, bins in enumerate(in_VB):
        parent = int(forest.parent_V[v])
        for b, variable in bins.items():
            model.add_implication(variable, used_B[b] if parent < 0 else in_VB[parent][b])
            model.add_hint(variable, bool(hint_VB[v, b]))
    for v in forest.end_segment_N.tolist():
        model.add_exactly_one(in_VB[v].values())
    for v, copies in enumerate(shard.copies_bound(capacity).tolist()):
        if copies > 1:
            model.add(sum(in_VB[v].values()) >= copies)
    for b, used in enumerate(used_B):
        rows = sum(int(forest.length_V[v]) * bins[b] for v, bins in enumerate(in_VB) if b in bins)
        model.add(rows <= capacity * used)
        model.add_hint(used, bool(hint_VB[:, b].any()))
    for before, after in pairwise(used_B):
        model.add_implication(after, before)
    if exactly:
        model.add(used_B[-1] == 1)
        for b in range(num_bins):
            model.add_at_least_one(in_VB[v][b] for v in forest.end_segment_N.tolist() if b in in_VB[v])
    model.minimize(sum(int(forest.length_V[v]) * x for v, bins in enumerate(in_VB) for x in bins.values()))
    return model, in_VB


def _first_solution_clock(cp_model: Any, begin: float) -> Any:
    """Return a solution callback whose ``seconds`` become those from ``begin`` to the first solution."""

    def on_solution_callback(self) -> None:
        if self.seconds < 0:
            self.seconds = time.perf_counter() - begin

    # The base class belongs to the optional package, so the class is made where that is at hand.
    members = {"seconds": -1.0, "on_solution_callback": on_solution_callback}
    return type("FirstSolution", (cp_model.CpSolverSolutionCallback,), members)()


def solve_shard(
    length_M: np.ndarray, lcp_M: np.ndarray, capacity: int, search: Search, split_M: np.ndarray | None = None
) -> tuple[np.ndarray, ShardReport]:
    """Partition one shard into microbatches of few compact rows.

    Args:
        length_M: int64 tokens of the shard's trajectories, in sorted order.
        lcp_M: int64 tokens in common with the trajectory before; entry 0 is 0.
        capacity: rows of a microbatch, at least the longest trajectory.
        search: budget and settings.
        split_M: int64 microbatch of each trajectory in a solution to start from, numbered from 0 without gaps; the
            result then has as many microbatches. Each must hold a leaf. Default: a greedy solution, any number.

    Returns:
        int64 (M,) microbatch of each trajectory, from 0 without gaps; and the :class:`ShardReport`.

    Raises:
        ValueError: If the budget ends before the first solution.
    """
    cp_model = import_cp_model()
    begin = time.perf_counter()
    shard = Shard.build(length_M, lcp_M)
    if split_M is None:
        hint_L = greedy_groups(shard, capacity)
        model, in_VB = build_model(shard, capacity, hint_L)
    else:
        hint_L = number_by_first_use(split_M[shard.place_L])
        model, in_VB = build_model(shard, capacity, hint_L, int(split_M.max()) + 1)
    built = time.perf_counter() - begin

    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = search.seconds
    solver.parameters.num_workers = search.workers
    solver.parameters.random_seed = search.seed
    # One thread takes turns between CP-SAT's strategies (local search included) in a fixed order.
    solver.parameters.interleave_search = search.workers == 1
    solver.parameters.stop_after_first_solution = search.first_feasible
    first = _first_solution_clock(cp_model, begin)
    status = solver.solve(model, first)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise ValueError(
            f"CP-SAT found no partition of {length_M.shape[0]} trajectories in {search.seconds} s "
            f"({solver.status_name(status)}; the model took {built:.1f} s to build): raise {search.budget_name}"
        )
    group_L = np.zeros(shard.num_leaves, np.int64)
    for leaf, v in enumerate(shard.forest.end_segment_N.tolist()):
        group_L[leaf] = next(b for b, x in in_VB[v].items() if solver.boolean_value(x))
    group_L = number_by_first_use(group_L)
    rows_B = shard.rows(group_L)
    report = ShardReport(
        status=solver.status_name(status),
        rows=int(rows_B.sum()),
        bound=int(np.ceil(solver.best_objective_bound - 1e-6)),
        start_rows=int(shard.rows(hint_L).sum()),
        num_microbatches=int(rows_B.shape[0]),
        seconds=time.perf_counter() - begin,
        first_seconds=first.seconds,
    )
    return group_L[shard.leaf_M], report
