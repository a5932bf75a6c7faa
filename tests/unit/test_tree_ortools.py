"""The OR-Tools baseline: optimal microbatches of a shard, legal placements, shards, the message without OR-Tools."""

import itertools
import sys

import numpy as np
import pytest
from tree_oracle import compact_size, flat, random_sequences

from harts_titan.tree.ortools_model import Search, Shard, greedy_groups, solve_shard
from harts_titan.tree.ortools_partition import align_counts, ortools_partition
from harts_titan.tree.ortools_shards import first_fit_decreasing, shard_by_original_tokens, subtree_items
from harts_titan.tree.sorted_step import SortedStep
from harts_titan.tree.work import measure


def need_ortools():
    pytest.importorskip("ortools", reason="OR-Tools is not installed: pip install 'harts_titan[ortools]'")


def sorted_step(sequences):
    step = SortedStep.from_tokens(*flat(sequences))
    return step, [sequences[i] for i in step.order_N]


def partitions(n):
    """Every set partition of ``range(n)`` as restricted growth strings."""
    if n == 0:
        yield ()
        return
    for rest in partitions(n - 1):
        for group in range(max(rest, default=-1) + 2):
            yield (*rest, group)


def group_rows(sequences, groups):
    return [compact_size([s for s, g in zip(sequences, groups) if g == group]) for group in sorted(set(groups))]


def optimum(sequences, capacity):
    """Fewest compact rows over all partitions that fit, by number of microbatches."""
    best = {}
    for groups in partitions(len(sequences)):
        rows = group_rows(sequences, groups)
        if max(rows) <= capacity:
            best[len(rows)] = min(best.get(len(rows), sum(rows)), sum(rows))
    return best


def agentic_sequences(rng, count, *, system=30):
    """Histories of several tasks behind one system prompt: forks, prefixes and deep branches."""
    prompt = rng.integers(0, 3, system)
    return [np.concatenate([prompt, s]) for s in random_sequences(rng, count, chunk=8)]


@pytest.mark.parametrize("seed", range(12))
def test_shard_is_optimal_and_proven(seed):
    need_ortools()
    rng = np.random.default_rng(seed)
    draw = agentic_sequences if seed % 2 else (lambda rng, n: random_sequences(rng, n, chunk=6))
    step, ordered = sorted_step(draw(rng, int(rng.integers(1, 8))))
    # From barely more than the longest trajectory, where little shares a microbatch, to room for about half.
    capacity = int(step.length_N.max() * (1.0, 1.2, 1.7)[seed % 3])
    groups, report = solve_shard(step.length_N, step.lcp_N, capacity, Search(20.0, False, 1, 0))
    best = optimum(ordered, capacity)
    assert report.status == "OPTIMAL"
    assert report.rows == report.bound == min(best.values())
    rows = group_rows(ordered, groups.tolist())
    assert sum(rows) == report.rows <= report.start_rows and max(rows) <= capacity
    assert sorted(set(groups.tolist())) == list(range(report.num_microbatches))
    assert 0 <= report.first_seconds <= report.seconds


@pytest.mark.parametrize("seed", range(6))
def test_fixed_number_of_microbatches_is_optimal(seed):
    need_ortools()
    rng = np.random.default_rng(100 + seed)
    tails = random_sequences(rng, 6, chunk=6)
    # A last token of its own makes every trajectory a leaf, so that only leaves are to be divided.
    step, ordered = sorted_step([np.append(s, 10 + i) for i, s in enumerate(tails)])
    capacity = int(step.length_N.max() * 1.5)
    start, report = solve_shard(step.length_N, step.lcp_N, capacity, Search(20.0, False, 1, 0))
    split = start.copy()
    split[np.flatnonzero(start == np.bincount(start).argmax())[-1]] = report.num_microbatches
    assert np.bincount(split).min() > 0
    groups, fixed = solve_shard(step.length_N, step.lcp_N, capacity, Search(20.0, False, 1, 0), split)
    assert fixed.num_microbatches == report.num_microbatches + 1 == len(set(groups.tolist()))
    assert fixed.status == "OPTIMAL" and fixed.rows == optimum(ordered, capacity)[fixed.num_microbatches]


@pytest.mark.parametrize("first_feasible", [False, True])
@pytest.mark.parametrize("dp_degree", [1, 2, 3])
def test_placement_is_legal(dp_degree, first_feasible):
    need_ortools()
    for seed in range(4):
        rng = np.random.default_rng(seed)
        step, ordered = sorted_step(agentic_sequences(rng, 40))
        capacity = int(step.length_N.max() * 1.6)
        result = ortools_partition(
            step, capacity=capacity, dp_degree=dp_degree, seconds_per_shard=2.0, first_feasible=first_feasible
        )
        placement = result.placement
        work = measure(step, placement, dp_degree)
        assert work.complete_JD.min() > 0 and work.complete_JD.max() <= capacity
        assert work.complete_JD.shape == (placement.num_slots, dp_degree)
        assert (np.diff(work.complete_JD, axis=0) <= 0).all()
        assert placement.window_ptr_W1.tolist() == list(range(placement.num_slots + 1))
        assert not placement.shared_N.any()
        for d, j in itertools.product(range(dp_degree), range(placement.num_slots)):
            members = np.flatnonzero((placement.replica_N == d) & (placement.slot_N == j))
            assert compact_size([ordered[i] for i in members]) == work.complete_JD[j, d]
        assert len(result.shards) == dp_degree and set(result.statuses) <= {"OPTIMAL", "FEASIBLE"}
        assert not (first_feasible and result.aligned)
        assert all(report.num_microbatches == placement.num_slots for report in result.aligned)
        assert placement.num_slots == max(report.num_microbatches for report in result.shards)
        if not first_feasible:
            assert work.compact_tokens >= sum(report.bound for report in result.shards)


def test_first_feasible_stops_at_the_greedy_solution():
    need_ortools()
    step, _ = sorted_step(agentic_sequences(np.random.default_rng(3), 60))
    capacity = int(step.length_N.max() * 2)
    _, report = solve_shard(step.length_N, step.lcp_N, capacity, Search(20.0, True, 1, 0))
    assert report.rows <= report.start_rows
    _, full = solve_shard(step.length_N, step.lcp_N, capacity, Search(5.0, False, 1, 0))
    assert report.bound <= full.bound <= full.rows <= report.rows
    # The redundant bound on copies is one that the full search respects.
    shard = Shard.build(step.length_N, step.lcp_N)
    assert (shard.copies_bound(capacity) * shard.forest.length_V).sum() <= full.rows


def check_same_plans(*process_counts):
    step, _ = sorted_step(agentic_sequences(np.random.default_rng(5), 14))
    capacity = int(step.length_N.max() * 1.6)
    results = [
        ortools_partition(step, capacity=capacity, dp_degree=2, seconds_per_shard=40.0, processes=processes)
        for processes in process_counts
    ]
    # The order of solutions is deterministic; where a budget stops it is not.
    assert all(set(result.statuses) == {"OPTIMAL"} for result in results)
    first, second = (result.placement for result in results)
    assert np.array_equal(first.replica_N, second.replica_N) and np.array_equal(first.slot_N, second.slot_N)


def test_repeats_give_the_same_plan():
    need_ortools()
    check_same_plans(1, 1)


@pytest.mark.slow
def test_processes_give_the_same_plan():
    need_ortools()
    check_same_plans(1, 2)


@pytest.mark.parametrize("seed", range(8))
def test_greedy_start_is_a_partition_of_leaves(seed):
    step, ordered = sorted_step(agentic_sequences(np.random.default_rng(seed), 30))
    capacity = int(step.length_N.max() * 1.5)
    shard = Shard.build(step.length_N, step.lcp_N)
    leaves = [
        i for i, s in enumerate(ordered)
        if not any(len(t) > len(s) and (t[: len(s)] == s).all() for t in ordered) and
        not any((len(t) == len(s)) and (t == s).all() for t in ordered[i + 1 :])
    ]  # fmt: skip
    assert shard.place_L.tolist() == leaves
    for i, leaf in enumerate(shard.leaf_M):
        path = ordered[leaves[leaf]]
        assert (path[: len(ordered[i])] == ordered[i]).all()
    groups = greedy_groups(shard, capacity)
    rows = group_rows([ordered[i] for i in leaves], groups.tolist())
    assert shard.rows(groups).tolist() == rows and max(rows) <= capacity
    assert shard.microbatch_limit(sum(rows), capacity) >= len(rows)
    # Interior trajectories ride along without a row.
    assert sum(group_rows(ordered, groups[shard.leaf_M].tolist())) == sum(rows)


@pytest.mark.parametrize("first_feasible", [True, False])
@pytest.mark.parametrize("dp_degree", [1, 2])
def test_nothing_shared_fills_microbatches(dp_degree, first_feasible):
    # One run a trajectory costs no row more than one for all.
    need_ortools()
    step, _ = sorted_step([[i, 0] for i in range(9)])
    result = ortools_partition(
        step, capacity=64, dp_degree=dp_degree, seconds_per_shard=5.0, first_feasible=first_feasible
    )
    assert result.placement.num_slots == 1 and len(result.shards) == dp_degree
    shard = Shard.build(step.length_N, step.lcp_N)
    for capacity in range(2, 20):
        assert np.unique(greedy_groups(shard, capacity)).size == -(-9 // (capacity // 2))


@pytest.mark.parametrize("seed", range(8))
def test_greedy_start_is_within_the_limit(seed):
    rng = np.random.default_rng(seed)
    step, _ = sorted_step([rng.integers(0, 40, rng.integers(1, 12)) for _ in range(30)])
    shard = Shard.build(step.length_N, step.lcp_N)
    for capacity in range(int(step.length_N.max()), 80, 7):
        rows = shard.rows(greedy_groups(shard, capacity))
        assert rows.size <= shard.microbatch_limit(int(rows.sum()), capacity)


def test_items_are_largest_subtrees_within_the_limit():
    step, _ = sorted_step([[0, 1, 1], [0, 1, 2], [0, 2], [0, 2, 1], [0, 2, 2], [3]])
    assert subtree_items(step, step.original_tokens).tolist() == [0, 6]
    assert subtree_items(step, 8).tolist() == [0, 2, 5, 6]
    assert subtree_items(step, 7).tolist() == [0, 2, 3, 4, 5, 6]
    assert subtree_items(step, 0).tolist() == list(range(7))


def test_first_fit_decreasing():
    weights = np.array([2, 7, 5, 5, 1])
    # 7 to bin 0; 5 and 5 to bin 1; 2 and then 1 to bin 0, the first with room.
    assert first_fit_decreasing(weights, 10, 2).tolist() == [0, 0, 1, 1, 0]
    assert first_fit_decreasing(weights, 9, 2) is None


@pytest.mark.parametrize("items_per_replica", [1, 2, 5, 10**6])
def test_every_replica_has_a_shard_near_its_share(items_per_replica):
    for seed in range(5):
        step, _ = sorted_step(agentic_sequences(np.random.default_rng(seed), 60))
        replica = shard_by_original_tokens(step, 4, items_per_replica)
        load = np.bincount(replica, weights=step.length_N, minlength=4)
        bounds = subtree_items(step, -(-step.original_tokens // 4) // items_per_replica)
        largest = np.add.reduceat(step.length_N, bounds[:-1]).max()
        assert load.min() > 0 and load.max() <= step.original_tokens / 4 + largest + 1
    step, _ = sorted_step([[1] * 10, [2], [3]])
    assert sorted(shard_by_original_tokens(step, 3, items_per_replica).tolist()) == [0, 1, 2]


@pytest.mark.parametrize("seed", range(8))
def test_counts_are_aligned_at_the_least_increase(seed):
    rng = np.random.default_rng(seed)
    step, ordered = sorted_step(agentic_sequences(rng, 7, system=4))
    # Replica 0: three microbatches of one; replica 1: one of four, to be divided into three.
    replica = np.array([0, 0, 0, 1, 1, 1, 1])
    group = np.array([0, 1, 2, 0, 0, 0, 0])
    aligned_replica, aligned = align_counts(step, replica, group, 2)
    assert (aligned_replica == replica).all() and sorted(set(aligned[3:].tolist())) == [0, 1, 2]
    assert sum(group_rows(ordered[3:], aligned[3:].tolist())) == optimum(ordered[3:], 10**9)[3]


def test_a_replica_with_too_few_trajectories_receives_some():
    step, _ = sorted_step([[0], [1, 1, 1], [1, 1, 2], [1, 2], [1, 3]])
    replica, group = align_counts(step, np.array([0, 1, 1, 1, 1]), np.array([0, 0, 0, 0, 1]), 2)
    assert np.bincount(replica).tolist() == [2, 3]
    # [1, 2] leaves least behind: one row that the microbatch keeps for its siblings.
    assert replica.tolist() == [0, 1, 1, 0, 1]
    assert sorted(set(group[replica == 0].tolist())) == sorted(set(group[replica == 1].tolist())) == [0, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"capacity": 3}, r"capacity \(3\) is smaller than trajectory 1 \(4 tokens\)"),
        ({"dp_degree": 4}, "3 trajectories cannot fill 4 replicas: lower dp_degree"),
        ({"dp_degree": 2}, "3 trajectories cannot fill 2 replicas with 2 microbatches each"),
        ({"dp_degree": 0}, "dp_degree must be at least 1, got 0"),
        ({"seconds_per_shard": 0.0}, "seconds_per_shard must be positive, got 0.0"),
        ({"workers": 0}, "workers must be at least 1, got 0"),
        ({"processes": 0}, "processes must be at least 1, got 0"),
    ],
)
def test_refusals(arguments, message):
    need_ortools()
    step, _ = sorted_step([[3, 3, 3], [1, 1, 1, 1], [2, 2, 2, 2]])
    with pytest.raises(ValueError, match=message):
        ortools_partition(step, **({"capacity": 4, "dp_degree": 1, "seconds_per_shard": 5.0} | arguments))


def test_a_budget_that_ends_too_early_is_named_as_the_caller_calls_it():
    need_ortools()
    step, _ = sorted_step(agentic_sequences(np.random.default_rng(0), 200))
    arguments = {"capacity": int(step.length_N.max() * 3), "dp_degree": 1, "seconds_per_shard": 1e-6}
    with pytest.raises(ValueError, match=r"raise seconds_per_shard$"):
        ortools_partition(step, **arguments)
    with pytest.raises(ValueError, match=r"raise --ortools-seconds$"):
        ortools_partition(step, **arguments, budget_name="--ortools-seconds")


def test_message_without_ortools(monkeypatch):
    for name in list(sys.modules):
        if name == "ortools" or name.startswith("ortools."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ortools", None)
    step, _ = sorted_step([[1], [2]])
    with pytest.raises(ImportError, match=r"pip install 'harts_titan\[ortools\]'"):
        ortools_partition(step, capacity=2, dp_degree=1)
