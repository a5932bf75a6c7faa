"""Level 1 of the planner against brute force over set partitions, on small and degenerate steps."""

from __future__ import annotations

import numpy as np
import pytest
from tree_oracle import compact_size, flat, random_sequences

from harts_titan.tree.contiguous import contiguous_partition
from harts_titan.tree.lower_bound import lower_bound
from harts_titan.tree.partition import partition_step
from harts_titan.tree.sorted_step import SortedStep


def set_partitions(n):
    """Yield every partition of 0..n-1 as group numbers in order of first appearance."""

    def extend(group, used):
        if len(group) == n:
            yield tuple(group)
            return
        for g in range(used + 1):
            yield from extend([*group, g], max(used, g + 1))

    yield from extend([], 0)


def optimum(sequences, capacity, dp_degree):
    """Least total over all set partitions into a multiple of dp_degree groups of at most capacity; None if none."""
    n = len(sequences)
    sizes = {}
    best = None
    for group in set_partitions(n):
        if (max(group) + 1) % dp_degree:
            continue
        total = 0
        for g in range(max(group) + 1):
            members = tuple(i for i in range(n) if group[i] == g)
            if members not in sizes:
                sizes[members] = compact_size([sequences[i] for i in members])
            total += sizes[members] if sizes[members] <= capacity else 10**9
        if total < 10**9 and (best is None or total < best):
            best = total
    return best


def check(sequences, partition, capacity, dp_degree):
    """Assert that the partition is one, feasible, and says the truth about itself."""
    step = SortedStep.from_tokens(*flat(sequences))
    num_groups = partition.num_groups
    assert num_groups % dp_degree == 0 and partition.group_SD.shape == (num_groups // dp_degree, dp_degree)
    assert sorted(partition.group_SD.reshape(-1).tolist()) == list(range(num_groups))
    assert partition.group_N.dtype == np.int64 and sorted(set(partition.group_N.tolist())) == list(range(num_groups))
    for g in range(num_groups):
        members = step.order_N[partition.group_N == g]
        assert partition.rows_K[g] == compact_size([sequences[i] for i in members]) <= capacity
    rows_SD = partition.rows_K[partition.group_SD]
    assert partition.objective == (rows_SD.sum(), rows_SD.max(axis=1).sum(), rows_SD.sum(axis=0).max())


def plan(sequences, capacity, dp_degree):
    return partition_step(SortedStep.from_tokens(*flat(sequences)), capacity=capacity, dp_degree=dp_degree)


@pytest.mark.parametrize("seed", range(60))
def test_small_steps_reach_the_optimum_over_all_set_partitions(seed):
    rng = np.random.default_rng(seed)
    sequences = random_sequences(rng, int(rng.integers(1, 8)), chunk=6)
    dp_degree = int(rng.integers(1, min(4, len(sequences)) + 1))
    capacity = max(map(len, sequences)) + int(rng.integers(0, 12))
    best = optimum(sequences, capacity, dp_degree)
    step = SortedStep.from_tokens(*flat(sequences))
    if best is None:
        with pytest.raises(ValueError, match="no partition"):
            partition_step(step, capacity=capacity, dp_degree=dp_degree)
        return
    partition = partition_step(step, capacity=capacity, dp_degree=dp_degree)
    check(sequences, partition, capacity, dp_degree)
    assert partition.objective[0] == best
    assert lower_bound(step, capacity=capacity, dp_degree=dp_degree) <= best


def test_the_refusal_says_what_is_needed_and_what_to_change():
    # Two pairs fit together, five trajectories are as long as a microbatch: seven of them, or any number up to nine.
    sequences = [[n, n + 50] for n in (10, 11, 12, 13)] + [[n] * 4 for n in range(5)]
    assert plan(sequences, 4, 8).num_groups == 8
    for dp_degree, multiple in ((5, 10), (6, 12)):
        with pytest.raises(ValueError, match="no partition of 9 trajectories") as refused:
            plan(sequences, 4, dp_degree)
        message = str(refused.value)
        needed = (
            "at most 4 rows",
            f"multiple of dp_degree ({dp_degree})",
            "28 distinct tokens need at least 7",
            "came to 7",
            f"rounded up to {multiple} ",
        )
        assert all(part in message for part in needed), message
        assert "raise the capacity (tree.max_tokens in training), or change dp_degree" in message


@pytest.mark.parametrize("seed", range(12))
def test_larger_steps_are_feasible_and_no_worse_than_contiguous(seed):
    rng = np.random.default_rng(100 + seed)
    sequences = random_sequences(rng, int(rng.integers(30, 90)), chunk=16, vocabulary=4)
    dp_degree = int(rng.integers(1, 6))
    capacity = max(map(len, sequences)) + int(rng.integers(0, 60))
    step = SortedStep.from_tokens(*flat(sequences))
    partition = partition_step(step, capacity=capacity, dp_degree=dp_degree)
    check(sequences, partition, capacity, dp_degree)
    contiguous = contiguous_partition(step.length_N, step.lcp_N, capacity, dp_degree)
    assert partition.objective <= contiguous.objective
    assert lower_bound(step, capacity=capacity, dp_degree=dp_degree) <= partition.objective[0]


def test_search_beats_contiguous_and_greedy_groups():
    # Twelve tasks with own parts of 3..12 tokens beside a prompt of 11, in random order: room for 24 own tokens.
    rng = np.random.default_rng(5)
    sequences = []
    for task in range(12):
        prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10 + task]
        sequences += [[*prompt, int(n), *rng.integers(30, 99, int(n) - 1)] for n in rng.permutation(np.arange(3, 13))]
    step = SortedStep.from_tokens(*flat(sequences))
    partition = partition_step(step, capacity=35, dp_degree=4)
    check(sequences, partition, 35, 4)
    assert partition.method == "ruin and recreate"
    assert partition.objective[0] < 0.98 * contiguous_partition(step.length_N, step.lcp_N, 35, 4).objective[0]


def test_same_step_gives_the_same_partition():
    sequences = random_sequences(np.random.default_rng(7), 120, chunk=20, vocabulary=4)
    one, two = (plan(sequences, 150, 4) for _ in range(2))
    assert (one.group_N == two.group_N).all() and (one.group_SD == two.group_SD).all() and one.method == two.method


@pytest.mark.parametrize(
    ("sequences", "capacity", "dp_degree", "total"),
    [
        ([[1, 2, 3]], 3, 1, 3),
        ([[1, 2, 3]], 1000, 1, 3),
        ([[5] * 9] * 8, 9, 1, 9),
        ([[5] * 9] * 8, 9, 8, 72),
        ([[5] * 9] * 8, 9, 3, 27),
        ([[1], [1, 2], [1, 2, 3], [1, 2, 3, 4]], 4, 2, 5),
        ([[1, 2], [3, 4], [5, 6], [7, 8]], 4, 2, 8),
        ([[1, 2, 3, 4], [1, 2, 5], [9]], 6, 1, 6),
        ([[1, 2, 3, 4], [1, 2, 5], [9]], 5, 1, 6),
    ],
    ids=["one", "one-loose", "equal", "equal-alone", "equal-three", "prefixes", "nothing-shared", "fits", "exactly"],
)
def test_degenerate_steps(sequences, capacity, dp_degree, total):
    partition = plan(sequences, capacity, dp_degree)
    check(sequences, partition, capacity, dp_degree)
    assert partition.objective[0] == total


def test_counts_only_a_partition_out_of_order_reaches():
    # Two groups of at most 8 rows exist, but none that is contiguous.
    between = [[1] * 3, [2] * 6, [3] * 5]
    step = SortedStep.from_tokens(*flat(between))
    with pytest.raises(ValueError, match="no contiguous partition"):
        contiguous_partition(step.length_N, step.lcp_N, 8, 2)
    check(between, partition_step(step, capacity=8, dp_degree=2), 8, 2)


def test_refusals_name_what_is_wrong():
    step = SortedStep(np.array([4, 7]), np.array([5, 9]), np.array([0, 2]))
    with pytest.raises(ValueError, match="trajectory 7 has 9 tokens, more than capacity 8"):
        partition_step(step, capacity=8)
    with pytest.raises(ValueError, match="trajectory 3 has 9"):
        partition_step(step, capacity=8, index_N=np.array([2, 3]))
    with pytest.raises(ValueError, match="2 trajectories cannot give each of 3 replicas one"):
        partition_step(step, capacity=9, dp_degree=3)


@pytest.mark.parametrize("capacity", [40, 4000, 10**12])
def test_many_short_trajectories_without_sharing(capacity):
    sequences = [[k, *range(k % 7)] for k in range(400)]
    partition = plan(sequences, capacity, 8)
    check(sequences, partition, capacity, 8)
    assert partition.objective[0] == sum(map(len, sequences))
