"""Sharing windows: producers, hand-over and states, proven by validate and executed symbolically."""

from dataclasses import replace

import numpy as np
import pytest
from plan_execution import execute
from tree_oracle import compact_size, flat, random_sequences
from window_placement import drawn

from harts_titan.tree import PlanCost, StepPlan, plan_step
from harts_titan.tree.work import Placement

COST = PlanCost(3, 2, 7, 1, 5, 4, row_alignment=4, shared_row_bytes=10, handed_state_bytes=1000)


def planned(sequences, rng, style="full", **options):
    tokens, offsets = flat(sequences)
    options = {"windows": True, "cost": COST, "max_window_slots": 4} | options
    if options["windows"]:
        options["planner"] = drawn(sequences, rng, style, **options)
    plan = plan_step(tokens, offsets, **options)
    plan.validate(tokens, offsets)
    return plan


@pytest.mark.parametrize("style", ("full", "depth", "ragged"))
@pytest.mark.parametrize("mode", ("compact", "nodewise", "depthwise"))
@pytest.mark.parametrize("seed", range(40))
def test_random_windows(seed, mode, style):
    rng = np.random.default_rng(seed)
    chunk = 1 + seed % 8
    sequences = random_sequences(rng, int(rng.integers(6, 30)), chunk=chunk)
    longest = max(map(len, sequences))
    plan = planned(
        sequences, rng, style, capacity=longest + int(rng.integers(0, 3 * chunk)), chunk_size=chunk,
        num_taps=int(rng.integers(1, 6)), dp_degree=1 + seed % 3, mode=mode,
    )  # fmt: skip
    execute(plan, sequences)
    stats = plan.stats
    assert stats.compact_tokens == sum(
        compact_size([sequences[x] for x in c.trajectory_N.tolist()]) for c in plan.consumers()
    )
    assert stats.executed_rows == stats.residual_tokens + stats.producer_tokens <= stats.compact_tokens
    assert stats.num_producers == len(plan.producers())


def test_windows_find_something_to_share():
    """The random tests above must not pass for want of producers."""
    producers = states = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        chunk = 1 + seed % 8
        sequences = random_sequences(rng, 25, chunk=chunk)
        plan = planned(sequences, rng, capacity=max(map(len, sequences)), chunk_size=chunk)
        producers += plan.stats.num_producers
        states += plan.stats.handed_states
    assert producers > 40 and states > 40


@pytest.mark.parametrize("mode", ("compact", "nodewise", "depthwise"))
@pytest.mark.parametrize("chunk", (1, 2, 3, 4, 8))
def test_attach_points_at_every_offset(chunk, mode):
    # A trunk, and trajectories that leave it after every number of tokens; each branch occurs in two consumers.
    trunk = np.arange(3 * chunk + 2)
    sequences = []
    for i in range(1, len(trunk) + 1):
        sequences += [np.concatenate([trunk[:i], [100 + k], trunk[: i % 3]]) for k in range(2)]
    rng = np.random.default_rng(chunk)
    plan = planned(sequences, rng, capacity=len(trunk) + 8, chunk_size=chunk, mode=mode, max_window_slots=50)
    execute(plan, sequences)
    items = plan.items
    roots = (items["segment_parent_G"] == -1) & (items["segment_start_G"] > 0)
    assert set((items["segment_start_G"][roots] % chunk).tolist()) == set(range(chunk))


def by_hand(sequences, slot, shared, *, chunk=4, mode="compact", **options):
    """Plan with one replica, one window and the given slots and shared prefixes by trajectory."""

    def place(sorted_step):
        order = sorted_step.order_N
        ptr = options.get("ptr", [0, max(slot) + 1])
        zeros = np.zeros(len(order), np.int64)
        return Placement(zeros, np.array(slot)[order], np.array(ptr), np.array(shared)[order])

    tokens, offsets = flat(sequences)
    plan = plan_step(
        tokens, offsets, capacity=options.get("capacity", 100), chunk_size=chunk, mode=mode, windows=True,
        planner=place, cost=options.get("cost"),
    )  # fmt: skip
    plan.validate(tokens, offsets)
    execute(plan, sequences)
    return plan


TWO = ([[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 8], [1, 2, 9]], [0, 1, 0], [6, 6, 2])


def test_states_of_a_small_window():
    plan = by_hand(*TWO)
    items = plan.items
    assert items["item_rows_I"].tolist() == [2, 1, 6]
    # Both consumers attach at 6 and replay [4, 6) from the state at 4; the branch at 2 starts from zero.
    assert items["state_position_E"].tolist() == [4] and items["taken_state_A"].tolist() == [0, 0]
    first, second = plan.consumers()
    assert first.external_row_X.tolist() == [0, 1, 2, 3, 4, 5] == second.external_row_X.tolist()
    assert first.multiplicity_X.tolist() == [2, 2, 1, 1, 1, 1]
    assert first.state_row_E.tolist() == [3] and first.export_E.tolist() == [0]
    assert plan.producer(0, 0).call.export_boundary_E.tolist() == [1]
    assert plan.events.tolist() == [[0, 0], [1, 0], [2, 0], [1, 1], [2, 1], [3, 0]]


@pytest.mark.parametrize("mode", ("nodewise", "depthwise"))
def test_restarting_modes_cut_the_producer_where_consumers_attach(mode):
    plan = by_hand(*TWO, mode=mode)
    call = plan.producer(0, 0).call.arrays()
    assert call["seg_start_V"].tolist() == [0, 2] and call["seg_length_V"].tolist() == [2, 4]
    assert plan.items["state_position_E"].tolist() == [2, 6]


def test_a_prefix_that_ends_where_an_earlier_branch_goes_on():
    # In sorted order the prefix [1, 2] of the last trajectory follows [1, 2, 3, 3], which it begins.
    sequences = [[1, 2, 3, 3, 5], [1, 2, 3, 3, 6], [1, 2, 7], [1, 2, 8]]
    plan = by_hand(sequences, [0, 1, 0, 1], [4, 4, 2, 2])
    assert plan.stats.producer_tokens == 4 and plan.stats.residual_tokens == 4


def test_consumer_wholly_in_the_producer():
    sequences = [[1, 2, 3], [1, 2], [1, 2, 3, 4], [1, 2, 3]]
    plan = by_hand(sequences, [0, 0, 1, 1], [3, 2, 3, 3])
    covered = plan.consumer(0, 0)
    assert covered.calls[0].num_rows == 0 and covered.calls[0].num_positions == 5
    assert plan.stats.rounds_mean == 1 and plan.items["item_rounds_I"].tolist() == [0, 1, 1]


def test_a_replica_without_producer_in_a_window():
    plan = by_hand([[1, 2], [1, 3], [5], [6]], [0, 1, 2, 3], [1, 1, 0, 0], ptr=[0, 2, 4])
    assert plan.producer(0, 1) is None and plan.producer(0, 0) is not None
    assert plan.consumer(0, 2).producer == -1 and plan.consumer(0, 0).producer == 0
    assert (0, 1) not in {tuple(event) for event in plan.events.tolist()}


def test_placement_faults_are_named():
    sequences, slot, _ = TWO
    with pytest.raises(ValueError, match="shared prefixes are not closed"):
        by_hand([*sequences, [1, 2, 3, 4, 10]], [*slot, 1], [6, 6, 2, 3])
    with pytest.raises(ValueError, match="a producer saves rows"):
        by_hand([[1, 2, 3], [4]], [0, 1], [3, 0])
    with pytest.raises(ValueError, match="producers fit the capacity"):
        both = [[i, i, i, k] for i in range(4) for k in range(2)]
        by_hand(both, [2 * k + i // 2 for i in range(4) for k in range(2)], [3] * 8, capacity=8)
    with pytest.raises(ValueError, match="consumers fit the capacity"):
        by_hand([[1, 1], [2, 2]], [0, 0], [0, 0], capacity=3)


@pytest.mark.parametrize("windows", (False, True))
@pytest.mark.parametrize("replicas", ((), (1,), (2, 0)))
def test_rows_of_some_replicas(replicas, windows):
    rng = np.random.default_rng(7)
    sequences = random_sequences(rng, 40, chunk=4)
    options = {"capacity": max(map(len, sequences)), "chunk_size": 4, "dp_degree": 3, "windows": windows}
    plan = planned(sequences, np.random.default_rng(1), replicas=replicas, **options)
    everything = planned(sequences, np.random.default_rng(1), **options)
    assert plan.replicas == tuple(sorted(replicas))
    assert plan.stats == replace(everything.stats, seconds=plan.stats.seconds)
    for name, array in everything.items.items():
        assert np.array_equal(array, plan.items[name])
    for d in range(3):
        if d in replicas:
            assert plan.consumer(d, 0).calls[0].num_positions == everything.consumer(d, 0).calls[0].num_positions
            continue
        for ask in (plan.consumer, plan.producer):
            with pytest.raises(ValueError, match="not laid out; plan_step was given replicas"):
                ask(d, 0)


@pytest.mark.parametrize("windows", (False, True))
def test_storage_carries_everything(tmp_path, windows):
    rng = np.random.default_rng(3)
    sequences = random_sequences(rng, 40, chunk=4)
    plan = planned(sequences, rng, capacity=max(map(len, sequences)), chunk_size=4, dp_degree=2, windows=windows)
    plan.save(tmp_path / "plan.pt")
    loaded = StepPlan.load(tmp_path / "plan.pt")
    loaded.validate(*flat(sequences))
    execute(loaded, sequences)
    assert replace(loaded, tensordict=plan.tensordict) == plan
    assert set(loaded.tensordict.keys(True, True)) == set(plan.tensordict.keys(True, True))
    plan.to("cpu").validate(*flat(sequences))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "expanded"}, "mode 'expanded' shares nothing"),
        ({"planner": "l1"}, "planner 'l1' plans no windows"),
        ({"planner": "best"}, "planner is 'best'"),
        ({"max_window_slots": -1}, "max_window_slots is -1"),
        ({"max_live_producers": 0}, "max_live_producers is 0"),
        ({"replicas": (1,)}, r"replicas is \(1,\)"),
    ],
)
def test_refusals(options, message):
    tokens, offsets = flat([[1, 2], [1, 3]])
    with pytest.raises(ValueError, match=message):
        plan_step(tokens, offsets, **({"capacity": 4, "chunk_size": 4, "windows": True} | options))


def test_no_such_producer():
    plan = by_hand(*TWO)
    with pytest.raises(ValueError, match="no producer"):
        plan.producer(0, 1)


def test_interface_memory_counts_rows_and_states():
    plan = by_hand(*TWO, cost=COST)
    assert plan.stats.interface_bytes == 6 * 10 + 1 * 1000
    assert plan.stats.alignment_tokens == (4 - 2) + (4 - 1) + (8 - 6)
