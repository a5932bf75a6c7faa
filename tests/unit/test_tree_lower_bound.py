"""The lower bound of level 1 against every partition of small steps, and by hand."""

import numpy as np
import pytest
from tree_oracle import compact_size, flat, random_sequences

from harts_titan.tree import plan_step
from harts_titan.tree.lower_bound import lower_bound
from harts_titan.tree.sorted_step import SortedStep


def partitions(items):
    """Every division of a list into non-empty groups."""
    if not items:
        yield []
        return
    for rest in partitions(items[1:]):
        for i in range(len(rest)):
            yield [*rest[:i], [items[0], *rest[i]], *rest[i + 1 :]]
        yield [[items[0]], *rest]


def least_rows(sequences, capacity, dp_degree):
    best = None
    for groups in partitions(list(range(len(sequences)))):
        if len(groups) % dp_degree:
            continue
        rows = [compact_size([list(sequences[x]) for x in group]) for group in groups]
        if max(rows) <= capacity and (best is None or sum(rows) < best):
            best = sum(rows)
    return best


def bound(sequences, capacity, dp_degree):
    return lower_bound(SortedStep.from_tokens(*flat(sequences)), capacity=capacity, dp_degree=dp_degree)


@pytest.mark.parametrize("seed", range(60))
def test_no_partition_is_below_the_bound(seed):
    rng = np.random.default_rng(seed)
    sequences = random_sequences(rng, int(rng.integers(2, 8)), chunk=4)
    longest = max(map(len, sequences))
    distinct = len({tuple(x[: p + 1]) for x in sequences for p in range(len(x))})
    for capacity in sorted({longest, longest + 1, longest + 3, 2 * longest, distinct}):
        for dp_degree in (1, 2, 3):
            least = least_rows(sequences, capacity, dp_degree) if len(sequences) >= dp_degree else None
            if least is not None and capacity >= longest:
                assert distinct <= bound(sequences, capacity, dp_degree) <= least, (capacity, dp_degree)


@pytest.mark.parametrize(
    ("sequences", "capacity", "dp_degree", "expected"),
    [
        ([[1, 2, 3]], 3, 1, 3),
        ([[1, 2], [3, 4]], 2, 1, 4),
        # Two tokens above four single ones: a microbatch of 4 rows takes two of them.
        ([[0, 0, x] for x in range(4)], 4, 1, 8),
        ([[0, 0, x] for x in range(4)], 3, 1, 12),
        # Every replica needs the common prefix, though one microbatch would do.
        ([[0, 0, x] for x in range(4)], 6, 4, 12),
        ([[7, 7]] * 5, 2, 5, 10),
        # Only what every trajectory begins with is in every microbatch.
        ([[7, 7], [7] * 5], 5, 2, 7),
        # Two roots: no prefix is common to all.
        ([[0, 0], [1, 1]], 4, 2, 4),
    ],
)
def test_bound_by_hand(sequences, capacity, dp_degree, expected):
    assert bound(sequences, capacity, dp_degree) == expected == least_rows(sequences, capacity, dp_degree)


@pytest.mark.parametrize("seed", range(5))
def test_plans_are_not_below_the_bound(seed):
    sequences = random_sequences(np.random.default_rng(seed), 40, chunk=4)
    capacity = 2 * max(map(len, sequences))
    plan = plan_step(*flat(sequences), capacity=capacity, chunk_size=4, dp_degree=2, replicas=())
    assert bound(sequences, capacity, 2) <= plan.stats.l1_tokens


def test_refusals():
    with pytest.raises(ValueError, match=r"capacity \(1\)"):
        bound([[1, 2]], 1, 1)
    with pytest.raises(ValueError, match="dp_degree is 0"):
        bound([[1, 2]], 2, 0)
