"""Level 2 against sets of prefixes: search, producers and levels on small steps, and figures on a generated one."""

import itertools

import numpy as np
import pytest
from tree_oracle import flat, random_sequences

from harts_titan.tree.cell_packing import cut_cells, pack_cells
from harts_titan.tree.cost import PlanCost
from harts_titan.tree.levelling import deepen, fit_producer, producer_rows, shared_depths, window_levels
from harts_titan.tree.partition import partition_step
from harts_titan.tree.placement import alone, place_step, window_sizes
from harts_titan.tree.placement_search import Moves, search_cells
from harts_titan.tree.sorted_step import SortedStep
from harts_titan.tree.trie_sets import rows_needed, set_cost
from harts_titan.tree.work import measure

ATTENTION = PlanCost(forward_row=50, forward_pair=3, backward_row=110, backward_pair=7, head_forward_row=11)


def prefixes(path, depth=None):
    return {tuple(path[: i + 1]) for i in range(len(path) if depth is None else depth)}


def drawn(seed, count=40, chunk=4):
    sequences = [list(map(int, s)) for s in random_sequences(np.random.default_rng(seed), count, chunk=chunk)]
    step = SortedStep.from_tokens(*flat(sequences))
    return [sequences[x] for x in step.order_N], step


@pytest.mark.parametrize("seed", range(30))
def test_shared_depths_are_the_rows_of_two_consumers(seed):
    paths, step = drawn(seed)
    rng = np.random.default_rng(seed)
    place = np.sort(rng.choice(len(paths), 25, replace=False))
    label = rng.integers(0, 3, 25)
    depth = shared_depths(place, label, step.minimum_LN)
    users = {}
    for x, k in zip(place, label):
        for row in prefixes(paths[x]):
            users.setdefault(row, set()).add(k)
    shared = {row for row, of in users.items() if len(of) > 1}
    for x, n in zip(place, depth):
        assert prefixes(paths[x], n) == prefixes(paths[x]) & shared
    assert producer_rows(place, depth, step.minimum_LN) == len(shared)


@pytest.mark.parametrize("seed", range(30))
def test_a_producer_too_large_keeps_the_prefixes_of_most_consumers(seed):
    paths, step = drawn(seed, chunk=6)
    rng = np.random.default_rng(seed)
    place = np.sort(rng.choice(len(paths), 30, replace=False))
    label = rng.integers(0, 5, 30)
    users = {}
    for x, k in zip(place, label):
        for row in prefixes(paths[x]):
            users.setdefault(row, set()).add(k)
    depth = shared_depths(place, label, step.minimum_LN)
    whole = producer_rows(place, depth, step.minimum_LN)
    for capacity in {0, 1, whole // 3, whole // 2, max(0, whole - 1), whole, whole + 5}:
        cut = depth.copy()
        fit_producer(place, label, cut, 5, capacity, step.minimum_LN)
        kept = set().union(*(prefixes(paths[x], n) for x, n in zip(place, cut)))
        assert len(kept) == producer_rows(place, cut, step.minimum_LN) == min(capacity, whole)
        for x, n in zip(place, cut):
            # Closed: a trajectory's entry is the deepest of its rows that is kept.
            assert prefixes(paths[x], n) == prefixes(paths[x]) & kept
        fewest = min((len(users[row]) for row in kept), default=5)
        assert fewest >= 2
        # Every row that more consumers use than the least used of those kept is kept, too.
        assert all(row in kept for row, of in users.items() if len(of) > fewest)


@pytest.mark.parametrize("seed", range(40))
def test_levels_are_reachable_and_no_worse_than_without(seed):
    rng = np.random.default_rng(seed)
    replicas, slots = int(rng.integers(1, 9)), int(rng.integers(1, 7))
    consumer = np.sort(rng.uniform(1, 100, (replicas, slots)), axis=1)[:, ::-1].copy()
    producer = rng.uniform(0, 60, replicas) * (rng.random(replicas) < 0.8)
    room = np.where(producer > 0, rng.uniform(0, 40, replicas), 0)
    level = window_levels(consumer, producer, room)
    taken = np.maximum(0, consumer - level).sum(axis=1)
    assert (taken <= room + 1e-9).all()
    before = consumer.max(axis=0).sum() + producer.max()
    after = np.minimum(consumer, level).max(axis=0).sum() + (producer + taken).max()
    assert after <= before + 1e-9
    # No replica can do with less than its own total.
    assert after >= (consumer.sum(axis=1) + producer).max() - 1e-9


def test_levels_reach_the_bound_where_one_replica_has_all_the_rest():
    consumer = np.array([[30.0, 20.0], [20.0, 10.0]])
    level = window_levels(consumer, np.array([10.0, 30.0]), np.array([100.0, 100.0]))
    taken = np.maximum(0, consumer - level).sum(axis=1)
    cost = np.minimum(consumer, level).max(axis=0).sum() + (np.array([10.0, 30.0]) + taken).max()
    assert cost == pytest.approx(60.0, rel=0.01)


@pytest.mark.parametrize("grid", [1, 4])
@pytest.mark.parametrize("pair", [0.0, 0.3])
@pytest.mark.parametrize("seed", range(15))
def test_taking_rows_over_keeps_the_union_and_the_closure(seed, pair, grid):
    paths, step = drawn(seed, chunk=8)
    rng = np.random.default_rng(seed)
    place = np.sort(rng.choice(len(paths), 30, replace=False))
    label = rng.integers(0, 3, 30)
    before = shared_depths(place, label, step.minimum_LN)
    depth = before.copy()
    budget = float(rng.uniform(0, 60))
    deepen(place, label, 1, depth, budget, step.length_N, step.minimum_LN, pair, grid)
    assert (depth >= before).all() and (depth[label != 1] == before[label != 1]).all()
    had = set().union(*(prefixes(paths[x], n) for x, n in zip(place, before)))
    has = set().union(*(prefixes(paths[x], n) for x, n in zip(place, depth)))
    for x, n in zip(place, depth):
        assert prefixes(paths[x], n) == prefixes(paths[x]) & has
    cost = sum(1 + pair * len(row) for row in has - had)
    assert cost <= budget + 1e-9
    rest = set().union(*(prefixes(paths[x]) for x, k in zip(place, label) if k == 1)) - has
    if grid == 1 and pair == 0 and rest:
        assert budget - cost < 1


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_search_keeps_capacity_and_accounts_exactly(seed, whole):
    paths, step = drawn(seed, count=60, chunk=6)
    capacity = 2 * int(step.length_N.max())
    partition = partition_step(step, capacity=capacity, dp_degree=2)
    consumers = np.full(2, partition.num_groups // 2)
    cell, label = partition.group_N % 2, partition.group_N // 2
    before = [set_cost(m, m.size, step.length_N, step.minimum_LN, 0.1) for m in members(cell, 2)]
    moves = Moves(3000, whole=whole, weight=4.0, last_weight=4.0, complete_weight=0.1, seed=seed)
    cost = search_cells(cell, label, consumers, step.length_N, step.minimum_LN, float(capacity), 0.1, moves)
    expected = [
        sum(1 + 0.1 * len(row) for row in set().union(*(prefixes(paths[x]) for x in m))) for m in members(cell, 2)
    ]
    assert cost == pytest.approx(expected)
    balance = lambda c: sum(c) + 4 * sum((c - np.mean(c)) ** 2 / np.mean(c))  # noqa: E731
    if whole:
        # Without heat and with no other term, the objective never grows (up to the moving target of the balance).
        assert balance(np.array(cost)) <= balance(np.array(before)) * 1.02
    for c in range(2):
        for k in range(consumers[c]):
            rows = set().union(*(prefixes(paths[x]) for x in np.flatnonzero((cell == c) & (label == k))), set())
            assert 0 < len(rows) <= capacity


@pytest.mark.parametrize("num_cells", [1, 2, 5])
@pytest.mark.parametrize("seed", range(10))
def test_cells_are_cut_as_well_as_any_cuts(seed, num_cells):
    paths, step = drawn(seed, count=14, chunk=5)
    consumers = np.arange(1, num_cells + 1)
    cell = cut_cells(step.length_N, step.lcp_N, consumers, 3.0)
    total = step.distinct_tokens + (num_cells - 1) * step.lcp_N.mean()
    target = total * consumers / consumers.sum()

    def value(bounds):
        rows = np.array([len(set().union(*map(prefixes, paths[a:b]))) for a, b in itertools.pairwise(bounds)])
        cuts = sum(step.lcp_N[b] for b in bounds[1:-1])
        return cuts + 3.0 * ((rows - target) ** 2 / target).sum(), (abs(rows / target - 1) <= 0.4).all()

    every = [(0, *cuts, len(paths)) for cuts in itertools.combinations(range(1, len(paths)), num_cells - 1)]
    within = [v for v, banded in map(value, every) if banded]
    found, _ = value((0, *(np.flatnonzero(np.diff(cell)) + 1), len(paths)))
    assert cell[0] == 0 and (np.diff(cell) >= 0).all() and set(cell) == set(range(num_cells))
    if within:
        assert found == pytest.approx(min(within))


@pytest.mark.parametrize("seed", range(12))
def test_packing_fits_every_consumer_or_says_how_much_is_too_much(seed):
    paths, step = drawn(seed, count=60, chunk=6)
    consumers = np.array([3, 2, 4])
    everything = len(set().union(*map(prefixes, paths)))
    for capacity in (int(step.length_N.max()), everything // 5, everything // 2):
        cell = cut_cells(step.length_N, step.lcp_N, consumers, 5.0)
        if (np.bincount(cell, minlength=3) < consumers).any():
            continue
        label, over = pack_cells(
            cell,
            consumers,
            step.length_N,
            step.minimum_LN,
            capacity=float(capacity),
            pair=0.0,
            trials=300,
            weight=3.0,
            hopeless=1.0,
            seed=seed,
        )
        sizes = [
            len(set().union(*(prefixes(paths[x]) for x in np.flatnonzero((cell == c) & (label == k)))))
            for c in range(3)
            for k in range(consumers[c])
        ]
        assert min(sizes) > 0
        assert over == sum(max(0, rows - capacity) for rows in sizes)


@pytest.mark.parametrize("seed", range(40))
def test_rows_needed_is_a_lower_bound_and_exact_where_everything_fits(seed):
    paths, step = drawn(seed, count=7, chunk=3)
    n = len(paths)
    scratch = np.zeros(n + 2), np.zeros(n + 2)
    longest, everything = int(step.length_N.max()), len(set().union(*map(prefixes, paths)))
    for capacity in range(longest, everything + 2):
        need = rows_needed(np.arange(n), n, float(capacity), step.length_N, step.minimum_LN, *scratch)
        best = min(
            sum(rows)
            for groups in set_partitions(list(range(n)))
            if max(rows := [len(set().union(*(prefixes(paths[x]) for x in g))) for g in groups]) <= capacity
        )
        assert everything <= need <= best
        if capacity >= everything:
            assert need == everything


def set_partitions(items):
    if not items:
        yield []
        return
    for rest in set_partitions(items[1:]):
        yield [[items[0]], *rest]
        for i, group in enumerate(rest):
            yield [*rest[:i], [items[0], *group], *rest[i + 1 :]]


def members(cell, count):
    return [np.flatnonzero(cell == c) for c in range(count)]


@pytest.mark.parametrize("cost", [PlanCost(), ATTENTION], ids=["rows", "attention"])
@pytest.mark.parametrize("dp_degree, max_window_slots", [(1, 6), (2, 2), (3, 3), (2, 0)])
@pytest.mark.parametrize("seed", range(4))
def test_a_placement_is_complete_closed_and_within_capacity(seed, dp_degree, max_window_slots, cost):
    paths, step = drawn(seed, count=70, chunk=6)
    capacity = int(1.5 * step.length_N.max())
    partition = partition_step(step, capacity=capacity, dp_degree=dp_degree)
    options = {"capacity": capacity, "dp_degree": dp_degree, "cost": cost, "chunk_size": 4}
    placement = place_step(step, partition, max_window_slots=max_window_slots, **options)
    again = place_step(step, partition, max_window_slots=max_window_slots, **options)
    for name, value in vars(placement).items():
        assert np.array_equal(value, getattr(again, name)), name
    assert placement.num_slots * dp_degree == partition.num_groups
    sizes = np.diff(placement.window_ptr_W1)
    assert sizes.max() <= (max_window_slots or placement.num_slots) and sizes.min() > 0
    window = placement.window_J[placement.slot_N]
    work = measure(step, placement, dp_degree)
    for d in range(dp_degree):
        for w in range(placement.num_windows):
            cell = np.flatnonzero((placement.replica_N == d) & (window == w))
            produced = set().union(*(prefixes(paths[x], placement.shared_N[x]) for x in cell), set())
            assert len(produced) == work.producer_WD[w, d] <= capacity
            hit = 0
            for j in range(placement.window_ptr_W1[w], placement.window_ptr_W1[w + 1]):
                consumer = cell[placement.slot_N[cell] == j]
                rows = set().union(*(prefixes(paths[x]) for x in consumer))
                assert 0 < len(rows) == work.complete_JD[j, d] <= capacity
                assert len(rows - produced) == work.residual_JD[j, d]
                hit += len(rows & produced)
            for x in cell:
                assert prefixes(paths[x], placement.shared_N[x]) == prefixes(paths[x]) & produced
            assert not produced or hit > len(produced)
    assert work.score(cost) <= measure(step, alone(partition), dp_degree).score(cost)


def test_window_sizes():
    assert window_sizes(16, 6).tolist() == [6, 5, 5]
    assert window_sizes(16, 0).tolist() == [16]
    assert window_sizes(1, 6).tolist() == [1]
    assert window_sizes(7, 2).tolist() == [2, 2, 2, 1]


def test_nothing_shared_means_no_producer():
    sequences = [[k, *range(100, 100 + k % 3 + 1)] for k in range(12)]
    step = SortedStep.from_tokens(*flat(sequences))
    partition = partition_step(step, capacity=9, dp_degree=2)
    placement = place_step(step, partition, capacity=9, dp_degree=2, cost=PlanCost())
    assert not placement.shared_N.any()
