"""validate must refuse plans that are wrong: every entry of every field corrupted, and named planner faults."""

from dataclasses import replace

import numpy as np
import pytest
from tree_oracle import flat, random_sequences

from harts_titan.tree import MODES, RoundPlan, check_call, layout, plan_step, row_kernels, sorted_step

CHUNK = 3


def sample(seed=1, count=14):
    return flat(random_sequences(np.random.default_rng(seed), count, chunk=CHUNK))


def variants(array):
    """Yield copies of an array with one entry changed, or two neighbours swapped."""
    for i in range(array.size):
        for delta in (1, -1):
            changed = array.copy()
            entry = changed.reshape(-1)
            entry[i] = ~entry[i] if array.dtype == bool else entry[i] + delta
            yield f"entry {i} {delta:+d}", changed
        if i and array.reshape(-1)[i] != array.reshape(-1)[i - 1]:
            changed = array.copy()
            entry = changed.reshape(-1)
            entry[i], entry[i - 1] = entry[i - 1], entry[i]
            yield f"swap {i}", changed
    yield "last entry dropped", array[:-1]


@pytest.mark.parametrize("mode", MODES)
def test_every_corrupted_entry_is_caught(mode):
    tokens, offsets = sample()
    plan = plan_step(tokens, offsets, capacity=1000, chunk_size=CHUNK, mode=mode)
    call = plan.consumer(0, 0).calls[0].arrays()
    check_call(call, tokens, offsets, chunk_size=CHUNK, mode=mode)
    survivors, tried = [], 0
    for name, array in call.items():
        for how, changed in variants(array):
            if changed.shape == array.shape and np.array_equal(changed, array):
                continue
            if array.size == 0:
                continue
            tried += 1
            try:
                check_call({**call, name: changed}, tokens, offsets, chunk_size=CHUNK, mode=mode)
            except ValueError as error:
                assert "invariant '" in str(error)
            else:
                survivors.append(f"{name} {how}")
    assert tried > 1000 and not survivors, survivors[:20]


def off_by_one(delta):
    def sort(tokens, offsets):
        order, lcp = original(tokens, offsets)
        length = np.diff(offsets)[order]
        # Only where the result still looks like sorted input to the forest builder.
        room = (lcp > 0) & (lcp + delta < length) & (lcp + delta < np.roll(length, 1))
        room[0] = False
        return order, np.where(room, lcp + delta, lcp)

    original = sorted_step.sort_trajectories
    return sort


@pytest.mark.parametrize("mode", ("compact", "nodewise"))
@pytest.mark.parametrize(
    ("delta", "invariant"), [(1, "row prefix equals trajectory prefix"), (-1, "distinct rows have distinct prefixes")]
)
def test_lcp_off_by_one(monkeypatch, mode, delta, invariant):
    tokens, offsets = sample(count=20)
    monkeypatch.setattr(sorted_step, "sort_trajectories", off_by_one(delta))
    plan = plan_step(tokens, offsets, capacity=1000, chunk_size=CHUNK, mode=mode)
    with pytest.raises(ValueError, match=invariant):
        check_call(plan.consumer(0, 0).calls[0].arrays(), tokens, offsets, chunk_size=CHUNK, mode=mode)
    # The whole plan is refused before its rows are looked at.
    with pytest.raises(ValueError, match="items compute all their rows"):
        plan.validate(tokens, offsets)


def all_in_one_round(parent, length, chunk_size, root_start=None):
    plan = layout_plan_rounds(parent, length, chunk_size, root_start)
    return RoundPlan(1, np.zeros_like(plan.round_of_segment), plan.continues_parent, plan.replay_tokens)


layout_plan_rounds = layout.plan_rounds


def test_state_read_before_it_is_made(monkeypatch):
    tokens, offsets = flat([[0] * 9 + [1], [0] * 4 + [2]])
    monkeypatch.setattr(layout, "plan_rounds", all_in_one_round)
    plan = plan_step(tokens, offsets, capacity=100, chunk_size=CHUNK)
    with pytest.raises(ValueError, match="an anchor is made in an earlier round"):
        plan.validate(tokens, offsets)


def test_convolution_reads_the_memory_neighbour(monkeypatch):
    def neighbours(parent_Y, num_external, tap_TW):
        row = np.arange(num_external, parent_Y.size)
        tap_TW[:] = np.stack([np.maximum(row - back, -1) for back in range(tap_TW.shape[1] - 1, -1, -1)], axis=1)

    tokens, offsets = flat([[0] * 9 + [1], [0] * 4 + [2]])
    monkeypatch.setattr(row_kernels, "convolution_taps", neighbours)
    plan = plan_step(tokens, offsets, capacity=100, chunk_size=CHUNK)
    with pytest.raises(ValueError, match="taps are the true path predecessors"):
        plan.validate(tokens, offsets)


def with_consumer(plan, k, **changes):
    storage = plan.tensordict.clone(recurse=False)
    entry = storage[f"consumer_{k}"].clone(recurse=False)
    entry.update(changes)
    storage[f"consumer_{k}"] = entry
    return replace(plan, tensordict=storage)


def test_step_faults():
    tokens, offsets = sample(seed=4, count=30)
    plan = plan_step(tokens, offsets, capacity=30, chunk_size=CHUNK, dp_degree=2)
    plan.validate(tokens, offsets)
    assert plan.num_slots > 1
    largest = max(call.num_rows for consumer in plan.consumers() for call in consumer.calls)
    replace(plan, capacity=largest).validate(tokens, offsets)
    first = plan.consumer(0, 0).trajectory_N
    faults = {
        "consumers fit the capacity": replace(plan, capacity=largest - 1),
        "every trajectory is in exactly one consumer": with_consumer(plan, 1, trajectory_N=first),
        "calls cover the consumer's trajectories once": with_consumer(
            plan, 1, calls=plan.tensordict["consumer_0", "calls"]
        ),
        "every replica has the same slots": replace(plan, num_slots=plan.num_slots - 1),
        "replay rows are exactly": replace(plan, chunk_size=CHUNK + 1),
        "one chunk size and tap count in a plan": replace(plan, num_taps=plan.num_taps + 1),
    }
    for invariant, wrong in faults.items():
        with pytest.raises(ValueError, match=invariant):
            wrong.validate(tokens, offsets)
    other = tokens.copy()
    other[offsets[3]] += 1
    with pytest.raises(ValueError, match="invariant"):
        plan.validate(other, offsets)


def test_expanded_step_faults():
    tokens, offsets = sample(seed=4, count=30)
    plan = plan_step(tokens, offsets, capacity=60, chunk_size=CHUNK, mode="expanded")
    plan.validate(tokens, offsets)
    with pytest.raises(ValueError, match="consumers fit the capacity"):
        replace(plan, capacity=10).validate(tokens, offsets)
    with pytest.raises(ValueError, match="calls fit call_capacity"):
        replace(plan, call_capacity=5).validate(tokens, offsets)
    # A compact call is not an expanded one.
    compact = plan_step(tokens, offsets, capacity=60, chunk_size=CHUNK)
    with pytest.raises(ValueError, match="items compute all their rows"):
        replace(compact, mode="expanded").validate(tokens, offsets)
    call = compact.consumer(0, 0).calls[0].arrays()
    with pytest.raises(ValueError, match="an expanded call shares nothing"):
        check_call(call, tokens, offsets, chunk_size=CHUNK, mode="expanded")
