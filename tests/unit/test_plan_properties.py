"""Properties of step plans over drawn inputs, and degenerate inputs."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from plan_execution import execute
from test_plan_mutants import variants
from tree_oracle import compact_size, flat
from window_placement import drawn

from harts_titan.tree import MODES, PlanCost, plan_step

SETTINGS = settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))


@st.composite
def steps(draw):
    """A chunk size and trajectories that grow from earlier ones at drawn places, with duplicates and prefixes."""
    chunk = draw(st.integers(1, 8))
    sequences: list[list[int]] = []
    for _ in range(draw(st.integers(2, 16))):
        base = sequences[draw(st.integers(0, len(sequences) - 1))] if sequences else []
        cut = draw(st.integers(0, len(base)))
        tail = draw(st.lists(st.integers(0, 2), min_size=0 if cut else 1, max_size=chunk + 2))
        sequences.append(base[:cut] + tail)
    return chunk, sequences


def settings_of(draw, sequences, chunk, mode):
    longest = max(map(len, sequences))
    return {
        # Often as tight as it can be.
        "capacity": longest + draw(st.sampled_from((0, 0, 1, chunk, 4 * longest))),
        "chunk_size": chunk,
        "dp_degree": draw(st.integers(1, min(3, len(sequences)))),
        "num_taps": draw(st.integers(1, 5)),
        "mode": mode,
        "cost": PlanCost(2, 3, 5, 7, 11, 13, row_alignment=draw(st.integers(1, 9))),
    }


def planned(tokens, offsets, **options):
    """Plan, or give the example up: a few trajectories may fit no number of microbatches that replicas can share."""
    try:
        return plan_step(tokens, offsets, **options)
    except ValueError as error:
        assume("into a multiple of" not in str(error))
        raise


@SETTINGS
@given(
    steps(),
    st.sampled_from(("compact", "nodewise", "depthwise")),
    st.sampled_from(("full", "depth", "ragged")),
    st.data(),
)
def test_plans_with_windows_are_proven(step, mode, style, data):
    chunk, sequences = step
    options = settings_of(data.draw, sequences, chunk, mode)
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    planner = drawn(sequences, rng, style, **options)
    tokens, offsets = flat(sequences)
    plan = planned(tokens, offsets, windows=True, planner=planner, **options)
    plan.validate(tokens, offsets)
    execute(plan, sequences)
    assert plan.stats.original_tokens == len(tokens) and plan.stats.distinct_tokens == compact_size(sequences)


@settings(SETTINGS, max_examples=60)
@given(steps(), st.sampled_from(("compact", "nodewise", "depthwise")), st.data())
def test_plans_of_both_levels_are_proven(step, mode, data):
    chunk, sequences = step
    options = settings_of(data.draw, sequences, chunk, mode)
    tokens, offsets = flat(sequences)
    plan = planned(tokens, offsets, windows=True, max_window_slots=data.draw(st.integers(0, 4)), **options)
    plan.validate(tokens, offsets)
    execute(plan, sequences)
    assert plan.num_slots == plan.stats.l1_slots


@SETTINGS
@given(steps(), st.sampled_from(MODES), st.data())
def test_plans_without_windows_are_proven(step, mode, data):
    chunk, sequences = step
    options = settings_of(data.draw, sequences, chunk, mode)
    tokens, offsets = flat(sequences)
    plan = planned(tokens, offsets, **options)
    plan.validate(tokens, offsets)
    assert plan.stats.num_windows == plan.stats.producer_tokens == plan.stats.interface_bytes == 0
    assert plan.stats.residual_tokens == plan.stats.compact_tokens == plan.stats.l1_tokens


@SETTINGS
@given(steps(), st.sampled_from(("compact", "nodewise", "depthwise")), st.data())
def test_drawn_damage_is_refused(step, mode, data):
    """Whatever entry of placement, items or events is changed: refused by name, or the plan still executes right."""
    chunk, sequences = step
    options = settings_of(data.draw, sequences, chunk, mode)
    planner = drawn(sequences, np.random.default_rng(data.draw(st.integers(0, 1000))), "full", **options)
    tokens, offsets = flat(sequences)
    plan = planned(tokens, offsets, windows=True, planner=planner, **options)
    names = [key for key in plan.tensordict.keys(True, True) if isinstance(key, tuple) or key == "events_V2"]
    names = [key for key in names if key[0] in ("placement", "items") or key == "events_V2"]
    key = data.draw(st.sampled_from(sorted(names, key=str)))
    array = plan.tensordict[key].numpy()
    assume(array.size)
    changed = list(variants(array, {data.draw(st.integers(0, array.size - 1))}))
    _, other = changed[data.draw(st.integers(0, len(changed) - 1))]
    plan.validate(tokens, offsets)
    storage = plan.tensordict.clone()
    storage[key] = torch.from_numpy(other)
    damaged = replace(plan, tensordict=storage)
    try:
        damaged.validate(tokens, offsets)
    except ValueError as error:
        assert "invariant '" in str(error)
    else:
        assert "trajectory" in key[-1] or key == "events_V2", key
        execute(damaged, sequences)


@pytest.mark.parametrize("windows", (False, True))
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("sequences", "dp_degree", "capacity"),
    [
        ([[3]], 1, 1),
        ([[1, 2, 3, 4, 5]], 1, 5),
        ([[1, 2, 3]] * 7, 1, 3),
        ([[1, 2, 3]] * 8, 4, 3),
        ([[1, 2, 3]] * 9, 4, 3),
        ([[i, i, i] for i in range(9)], 2, 7),
        ([[i, i, i] for i in range(4)], 4, 3),
        ([[1, 2, 3, 4], [1, 2, 3], [1, 2], [1]], 2, 4),
    ],
    ids=("one_token", "one", "equal", "equal_replicas", "equal_odd", "nothing_shared", "one_each", "nested"),
)
def test_degenerate_inputs(sequences, dp_degree, capacity, mode, windows):
    if windows and mode == "expanded":
        pytest.skip("refused by name, see test_tree_windows")
    options = {"capacity": capacity, "dp_degree": dp_degree, "chunk_size": 2, "mode": mode, "windows": windows}
    tokens, offsets = flat(sequences)
    if windows:
        planner = drawn(sequences, np.random.default_rng(0), "full", **options)
        drawn_plan = plan_step(tokens, offsets, planner=planner, **options)
        drawn_plan.validate(tokens, offsets)
        execute(drawn_plan, sequences)
    plan = plan_step(tokens, offsets, **options)
    plan.validate(tokens, offsets)
    assert plan.stats.num_consumers % dp_degree == 0 and plan.stats.original_tokens == len(tokens)
    if mode != "expanded":
        execute(plan, sequences)


@pytest.mark.parametrize("windows", (False, True))
def test_a_trajectory_of_the_capacity_and_one_longer(windows):
    for length, fits in ((16, True), (17, False)):
        sequences = [[1] * length, [1, 2], [1, 3]]
        options = {"capacity": 16, "chunk_size": 4, "windows": windows}
        tokens, offsets = flat(sequences)
        if fits:
            plan_step(tokens, offsets, **options).validate(tokens, offsets)
        else:
            with pytest.raises(ValueError, match="trajectory 0 has 17 tokens, more than capacity 16"):
                plan_step(tokens, offsets, **options)


def test_fewer_trajectories_than_replicas_are_refused():
    with pytest.raises(ValueError, match="2 trajectories cannot give each of 3 replicas one"):
        plan_step(*flat([[1, 2], [1, 3]]), capacity=8, chunk_size=4, dp_degree=3)


@pytest.mark.parametrize("windows", (False, True))
def test_plans_are_deterministic(windows):
    rng = np.random.default_rng(11)
    sequences = [rng.integers(0, 2, rng.integers(1, 12)) for _ in range(30)]
    tokens, offsets = flat(sequences)
    first, second = (
        plan_step(
            tokens, offsets, capacity=14, chunk_size=4, dp_degree=2, windows=windows,
        )
        for _ in range(2)
    )  # fmt: skip
    assert first.stats == replace(second.stats, seconds=first.stats.seconds)
    for key in first.tensordict.keys(True, True):
        left, right = first.tensordict[key], second.tensordict[key]
        if not isinstance(left, torch.Tensor):
            left, right = left.arrays(), right.arrays()
            assert all(np.array_equal(left[name], right[name]) for name in left), key
            continue
        assert torch.equal(left, right), key
