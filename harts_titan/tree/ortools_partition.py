"""The OR-Tools baseline: shards by first-fit decreasing, then a CP-SAT prefix partition in each (HARTS 5.3).

The paper names the three stages and no more: original-token first-fit-decreasing shards, a prefix partition inside
each data-parallel replica, aligned microbatch counts. Where it is silent, the choice here is the one that serves the
baseline best; each docstring says which. Needs the optional extra ``ortools``.

Shapes: N trajectories by sorted place, D replicas, M trajectories of one shard.
"""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from tqdm import tqdm

from harts_titan.tree.ortools_import import import_cp_model
from harts_titan.tree.ortools_model import Search, Shard, ShardReport, greedy_groups, solve_shard
from harts_titan.tree.ortools_shards import shard_by_original_tokens
from harts_titan.tree.sorted_step import SortedStep, common_prefix
from harts_titan.tree.work import Placement, measure

# Items per replica that sharding tries: few share most, many balance best.
GRANULARITIES = tuple(range(1, 13))
SEED = 0


@dataclass(frozen=True)
class OrtoolsResult:
    """A plan of the baseline and how it was found.

    Attributes:
        placement: where trajectories run; sharing windows are off.
        seconds: the whole call.
        sharding_seconds: its part before the first search.
        items_per_replica: fineness of the items that first-fit decreasing placed.
        shards: report of each replica's first search, any number of microbatches.
        aligned: reports of the second searches, with the aligned number; a replica has none where the first solution
            was asked for, where the first search proved it optimal at this number, or where a split left a microbatch
            without a leaf of the trie.
    """

    placement: Placement
    seconds: float
    sharding_seconds: float
    items_per_replica: int
    shards: tuple[ShardReport, ...]
    aligned: tuple[ShardReport, ...]

    @property
    def statuses(self) -> tuple[str, ...]:
        """CP-SAT's status of each shard."""
        return tuple(shard.status for shard in self.shards)


def ortools_partition(
    step: SortedStep,
    *,
    capacity: int,
    dp_degree: int,
    seconds_per_shard: float = 300.0,
    first_feasible: bool = False,
    workers: int = 1,
    processes: int = 1,
    progress: bool = False,
    budget_name: str = "seconds_per_shard",
) -> OrtoolsResult:
    """Plan a step as the paper's OR-Tools baseline does (HARTS 5.3).

    1. Shards. First-fit decreasing on original tokens gives every trajectory a replica; see
       :func:`~harts_titan.tree.ortools_shards.shard_by_original_tokens`. Not in the paper: what its items are. Single
       trajectories would part from their siblings, so here items are subtrees of the step. Of ``GRANULARITIES`` the
       one is taken whose greedy plan has the fewest rows on the slowest replica, summed over slots: compression and
       balance in one figure.
    2. Microbatches. CP-SAT partitions each shard by :func:`~harts_titan.tree.ortools_model.build_model`, starting from
       a greedy solution.
    3. Aligned counts. Replicas with fewer microbatches than the others split some: see :func:`align_counts`. Not in
       the paper: half of the budget is kept for a second search of each shard from there, with the number fixed.

    A replica's microbatches are numbered by falling rows, so that slots hold microbatches of similar size.

    Args:
        step: sorted trajectories.
        capacity: compact rows a microbatch may have.
        dp_degree: number of replicas.
        seconds_per_shard: budget of each shard's two searches; each ends earlier only if it proves its solution
            optimal.
        first_feasible: stop each shard at its first solution, and split only to align counts.
        workers: solver threads of one shard. With 1 the search itself is deterministic, and so is the result wherever
            the budget does not end it; a budget in seconds depends on the machine.
        processes: shards solved at the same time.
        progress: show a progress bar over shards.
        budget_name: setting that gives ``seconds_per_shard``, for messages.

    Raises:
        ImportError: If OR-Tools is not installed.
        ValueError: If a trajectory is longer than ``capacity``, there are too few trajectories, an argument is out of
            range, or a budget ends before the first solution.
    """
    import_cp_model()
    begin = time.perf_counter()
    _check(step, capacity, dp_degree, seconds_per_shard, workers, processes)
    items_per_replica, replica_N = _best_shards(step, capacity, dp_degree)
    sharding_seconds = time.perf_counter() - begin
    members = [np.flatnonzero(replica_N == d) for d in range(dp_degree)]
    problems = [(step.length_N[m], _lcp_of(step, m), capacity) for m in members]
    seconds = seconds_per_shard if first_feasible else seconds_per_shard / 2
    search = Search(seconds, first_feasible, workers, SEED, budget_name)
    found = _solve([(*problem, search) for problem in problems], processes, progress)
    group_N = np.zeros(step.num_trajectories, np.int64)
    for m, (group_M, _) in zip(members, found):
        group_N[m] = group_M
    replica_N, group_N = align_counts(step, replica_N, group_N, dp_degree)
    again = [] if first_feasible else _improvable(step, replica_N, group_N, [report for _, report in found])
    aligned = _solve(
        [(step.length_N[m], _lcp_of(step, m), capacity, search, group_N[m]) for m in again], processes, progress
    )
    for m, (group_M, report) in zip(again, aligned):
        if report.rows < report.start_rows:
            group_N[m] = group_M
    return OrtoolsResult(
        placement=_place(step, replica_N, group_N, dp_degree),
        seconds=time.perf_counter() - begin,
        sharding_seconds=sharding_seconds,
        items_per_replica=items_per_replica,
        shards=tuple(report for _, report in found),
        aligned=tuple(report for _, report in aligned),
    )


def _improvable(
    step: SortedStep, replica_N: np.ndarray, group_N: np.ndarray, reports: list[ShardReport]
) -> list[np.ndarray]:
    """Sorted places of the replicas whose aligned microbatches a second search may improve, one array each."""
    members = []
    for d, report in enumerate(reports):
        m = np.flatnonzero(replica_N == d)
        count = int(group_N[m].max()) + 1
        place_L = Shard.build(step.length_N[m], _lcp_of(step, m)).place_L
        # A part of a split may hold no leaf; the model places leaves only and cannot start from it.
        if np.unique(group_N[m][place_L]).size == count and (report.status, report.num_microbatches) != (
            "OPTIMAL",
            count,
        ):
            members.append(m)
    return members


def _check(
    step: SortedStep, capacity: int, dp_degree: int, seconds_per_shard: float, workers: int, processes: int
) -> None:
    for name, value in (("dp_degree", dp_degree), ("workers", workers), ("processes", processes)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if not seconds_per_shard > 0:
        raise ValueError(f"seconds_per_shard must be positive, got {seconds_per_shard}")
    if step.num_trajectories < dp_degree:
        raise ValueError(f"{step.num_trajectories} trajectories cannot fill {dp_degree} replicas: lower dp_degree")
    longest = int(step.length_N.argmax())
    if step.length_N[longest] > capacity:
        name, length = step.order_N[longest], step.length_N[longest]
        raise ValueError(f"capacity ({capacity}) is smaller than trajectory {name} ({length} tokens)")


def _lcp_of(step: SortedStep, places: np.ndarray) -> np.ndarray:
    """Common prefixes of neighbours within a subset of the sorted places, itself sorted: int64, entry 0 is 0."""
    return np.array([0, *(common_prefix(step.minimum_LN, a, b) for a, b in pairwise(places))], dtype=np.int64)


def _best_shards(step: SortedStep, capacity: int, dp_degree: int) -> tuple[int, np.ndarray]:
    found: list[tuple[int, int, np.ndarray]] = []
    for items_per_replica in GRANULARITIES:
        replica_N = shard_by_original_tokens(step, dp_degree, items_per_replica)
        group_N = np.zeros(step.num_trajectories, np.int64)
        for d in range(dp_degree):
            members = np.flatnonzero(replica_N == d)
            shard = Shard.build(step.length_N[members], _lcp_of(step, members))
            group_N[members] = greedy_groups(shard, capacity)[shard.leaf_M]
        placement = _place(step, *align_counts(step, replica_N, group_N, dp_degree), dp_degree)
        slowest = int(measure(step, placement, dp_degree).complete_JD.max(axis=1).sum())
        found.append((slowest, items_per_replica, replica_N))
    _, items_per_replica, replica_N = min(found, key=lambda candidate: candidate[:2])
    return items_per_replica, replica_N


def _solve(problems: list[tuple], processes: int, progress: bool) -> list[tuple[np.ndarray, ShardReport]]:
    if not problems:
        return []
    with tqdm(total=len(problems), desc="ortools", unit="shard", disable=not progress) as bar:
        if processes == 1:
            results = []
            for problem in problems:
                results.append(solve_shard(*problem))
                bar.update()
            return results
        # A fresh interpreter per process: a fork would copy locks that the caller's threads hold.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(min(processes, len(problems)), mp_context=context) as pool:
            futures: list[Future] = [pool.submit(solve_shard, *problem) for problem in problems]
            for future in futures:
                future.add_done_callback(lambda _: bar.update())
            return [future.result() for future in futures]


def _groups(replica_N: np.ndarray, group_N: np.ndarray) -> list[np.ndarray]:
    """Sorted places of every microbatch of every replica, replica after replica."""
    order = np.lexsort((np.arange(replica_N.shape[0]), group_N, replica_N))
    changes = np.flatnonzero(np.diff(replica_N[order]) | np.diff(group_N[order])) + 1
    return np.split(order, changes)


def _rows(step: SortedStep, places: np.ndarray) -> int:
    return int(step.length_N[places].sum() - _lcp_of(step, places).sum())


def align_counts(
    step: SortedStep, replica_N: np.ndarray, group_N: np.ndarray, dp_degree: int
) -> tuple[np.ndarray, np.ndarray]:
    """Give every replica as many microbatches as the one with most, at the least increase of compact rows.

    Dividing a microbatch repeats the rows that both parts need, which is at least its smallest common prefix of
    neighbours in sorted order, and exactly that for a cut there. So a replica is short of microbatches by the cuts of
    smallest common prefix over all of its microbatches; among equal ones the cut comes first that leaves the smallest
    largest part. A replica with fewer trajectories than microbatches needed first receives some: those whose removal
    from the replica with most trajectories gives the least increase.

    Args:
        step: sorted trajectories.
        replica_N: int64 replica of each.
        group_N: int64 microbatch of each, numbered within its replica.
        dp_degree: number of replicas.

    Returns:
        int64 (N,) replica, and int64 (N,) microbatch numbered within its replica from 0 without gaps.

    Raises:
        ValueError: If the step has fewer trajectories than microbatches needed.
    """
    groups: list[list[np.ndarray]] = [[] for _ in range(dp_degree)]
    for places in _groups(replica_N, group_N):
        groups[int(replica_N[places[0]])].append(places)
    count = max(len(mine) for mine in groups)
    if step.num_trajectories < count * dp_degree:
        raise ValueError(
            f"{step.num_trajectories} trajectories cannot fill {dp_degree} replicas with {count} microbatches each: "
            "lower dp_degree or raise capacity"
        )
    for mine in groups:
        while sum(places.size for places in mine) < count:
            mine.append(_take_cheapest(step, max(groups, key=lambda other: sum(places.size for places in other))))
    for mine in groups:
        while len(mine) < count:
            _split_cheapest(step, mine)
    replica_N, group_N = np.empty_like(replica_N), np.empty_like(group_N)
    for d, mine in enumerate(groups):
        for g, places in enumerate(mine):
            replica_N[places], group_N[places] = d, g
    return replica_N, group_N


def _take_cheapest(step: SortedStep, groups: list[np.ndarray]) -> np.ndarray:
    """Remove the trajectory that leaves most rows behind least from a microbatch of two or more; return its place."""
    candidates = []
    for g, places in enumerate(groups):
        if places.size > 1:
            lcp = np.append(_lcp_of(step, places), 0)
            shared = np.maximum(lcp[:-1], lcp[1:])
            candidates.append((int(shared.min()), g, int(shared.argmin())))
    _, g, at = min(candidates)
    taken = groups[g][at : at + 1]
    groups[g] = np.delete(groups[g], at)
    return taken


def _split_cheapest(step: SortedStep, groups: list[np.ndarray]) -> None:
    candidates = []
    for g, places in enumerate(groups):
        if places.size < 2:
            continue
        lcp = _lcp_of(step, places)
        least = int(lcp[1:].min())
        own = np.cumsum(step.length_N[places] - lcp)
        for at in (np.flatnonzero(lcp[1:] == least) + 1).tolist():
            before = int(own[at - 1])
            candidates.append((least, max(before, int(own[-1]) - before + least), g, at))
    _, _, g, at = min(candidates)
    groups.append(groups[g][at:])
    groups[g] = groups[g][:at]


def _place(step: SortedStep, replica_N: np.ndarray, group_N: np.ndarray, dp_degree: int) -> Placement:
    slot_N, num_slots = np.empty_like(group_N), 0
    for d in range(dp_degree):
        mine = [places for places in _groups(replica_N, group_N) if replica_N[places[0]] == d]
        mine.sort(key=lambda places: (-_rows(step, places), int(places[0])))
        num_slots = len(mine)
        for j, places in enumerate(mine):
            slot_N[places] = j
    return Placement(replica_N, slot_N, np.arange(num_slots + 1), np.zeros_like(slot_N))
