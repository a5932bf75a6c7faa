"""validate must refuse step plans with windows that are wrong: every field of their storage, settings and figures."""

import dataclasses
from dataclasses import replace

import numpy as np
import pytest
import torch
from tree_oracle import flat
from window_placement import common_prefix, draw_placement

from harts_titan.tree import CallLayout, PlanCost, plan_step
from harts_titan.tree.work import Placement

CHUNK = 3
COST = PlanCost(3, 2, 7, 1, 5, 4, row_alignment=4, shared_row_bytes=10, handed_state_bytes=1000)
CAPACITY = 32


def sample():
    """Return token lists with their replica and slot: producers of several sequences, and consumers that fork."""
    left, right = [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 9, 9, 9, 9, 9]
    placed = []
    for j in range(2):
        placed += [
            ([*left, 10 + j, 50, 51, 52], 0, j),
            ([*left, 10 + j, 50, 53], 0, j),
            ([*right, 20 + j, 60], 0, j),
            ([*left[:6], 30 + j], 0, j),
            ([1, 40 + j, 40, 40], 0, j),
            ([9, 8, 7, 6, 5, j, j, j, j, j], 1, j),
            ([9, 8, 7, 6, 5, j, j, j, 4], 1, j),
        ]
    # In the second window one replica shares nothing, a consumer lies wholly in its producer.
    placed += [([2, 2, 3, 3, 3, 1], 1, 2), ([2, 2, 3, 3, 3, 1, 7], 1, 3), ([2, 2, 3], 1, 2)]
    placed += [([5, 5, 1], 0, 2), ([5, 5, 1], 0, 2), ([6, 5, 1, 1, 1], 0, 3)]
    return placed


SEQUENCES = [sequence for sequence, _, _ in sample()]
TOKENS, OFFSETS = flat(SEQUENCES)


def by_hand(sorted_step):
    replica, slot = (np.array([place[i] for place in sample()])[sorted_step.order_N] for i in (1, 2))
    start = Placement(replica, slot, np.arange(5), np.zeros_like(slot))
    options = {"capacity": CAPACITY, "max_window_slots": 2, "style": "full", "ptr": (0, 2, 4)}
    return draw_placement(SEQUENCES, sorted_step, start, np.random.default_rng(0), **options)


@pytest.fixture(scope="module", params=("compact", "nodewise", "depthwise"))
def plan(request):
    options = {"capacity": CAPACITY, "chunk_size": CHUNK, "dp_degree": 2, "cost": COST, "mode": request.param}
    made = plan_step(
        TOKENS, OFFSETS, planner=by_hand, windows=True, max_window_slots=2, max_live_producers=1, **options
    )
    made.validate(TOKENS, OFFSETS)
    assert made.num_slots == 4 and made.num_windows == 2 and made.stats.num_producers == 3
    assert made.stats.handed_states > 3 and made.producer(0, 0).call.num_sequences > 1
    return made


def variants(array, entries=range(10**6)):
    """Yield copies of an array with one entry changed or swapped with the one before, and one entry short or long."""
    for i in range(array.size):
        if i not in entries:
            continue
        for delta in (1, -1):
            changed = array.copy()
            changed.reshape(-1)[i] = ~changed.reshape(-1)[i] if array.dtype == bool else changed.reshape(-1)[i] + delta
            yield f"entry {i} {delta:+d}", changed
        if i and array.reshape(-1)[i] != array.reshape(-1)[i - 1]:
            changed = array.copy()
            changed.reshape(-1)[[i, i - 1]] = changed.reshape(-1)[[i - 1, i]]
            yield f"swap {i}", changed
    if array.shape[0]:
        yield "last entry dropped", array[:-1].copy()
        yield "last entry twice", np.concatenate([array, array[-1:]])


def damaged(plan, key, array):
    storage = plan.tensordict.clone()
    storage[key] = torch.from_numpy(array) if isinstance(array, np.ndarray) else array
    return replace(plan, tensordict=storage)


def is_caught(plan):
    try:
        plan.validate(TOKENS, OFFSETS)
    except ValueError as error:
        assert "invariant '" in str(error)
        return True
    return False


def means_the_same(plan, key, array):
    """True if the damage only names another trajectory with the same path."""
    depth = {"segment_trajectory_G": "segment", "sequence_trajectory_Q": "sequence", "state_trajectory_E": "state"}
    if key[-1] not in depth:
        return False
    items, old = plan.items, plan.items[key[-1]]
    ends = {
        "segment": items["segment_start_G"] + items["segment_length_G"],
        "sequence": items["sequence_end_Q"],
        "state": items["state_position_E"],
    }[depth[key[-1]]]
    if old.shape != array.shape or array.min() < 0 or array.max() >= len(SEQUENCES):
        return False
    return all(common_prefix(SEQUENCES[x], SEQUENCES[y]) >= end for x, y, end in zip(old, array, ends, strict=True))


@pytest.mark.parametrize("group", ("placement", "items", "events_V2"))
def test_every_damaged_entry_of_the_plan_is_caught(plan, group):
    survivors, tried = [], 0
    inner = plan.tensordict[group]
    keys = [(group,)] if isinstance(inner, torch.Tensor) else [(group, name) for name in inner.keys()]  # noqa: SIM118
    for key in keys:
        array = plan.tensordict[key].numpy()
        for how, changed in variants(array):
            tried += 1
            if not is_caught(damaged(plan, key, changed)) and not means_the_same(plan, key, changed):
                survivors.append(f"{key} {how}")
    assert tried > 50 and not survivors, survivors[:20]


def attached(plan):
    return next(c for c in plan.consumers() if c.producer >= 0 and c.export_E.numel() and c.calls[0].num_rows)


def test_every_damaged_entry_of_the_hand_over_is_caught(plan):
    consumer = attached(plan)
    name = f"consumer_{consumer.slot * plan.dp_degree + consumer.replica}"
    survivors = []
    for field in ("external_row_X", "multiplicity_X", "state_row_E", "export_E"):
        for how, changed in variants(getattr(consumer, field).numpy()):
            if not is_caught(damaged(plan, (name, "hand_over", field), changed)):
                survivors.append(f"{field} {how}")
    for field in ("trajectory_N", "prefix_N"):
        for how, changed in variants(plan.tensordict[f"producer_{consumer.producer}", field].numpy()):
            if not is_caught(damaged(plan, (f"producer_{consumer.producer}", field), changed)):
                survivors.append(f"producer {field} {how}")
    assert not survivors, survivors


@pytest.mark.parametrize("of", ("producer", "consumer"))
def test_damaged_rows_are_caught(plan, of):
    consumer = attached(plan)
    number = consumer.slot * plan.dp_degree + consumer.replica
    key = (f"producer_{consumer.producer}", "call") if of == "producer" else (f"consumer_{number}", "calls", "0")
    call = plan.tensordict[key]
    arrays, survivors = call.arrays(), []
    plain = {name: getattr(call, name) for name in ("chunk_size", "num_external_states", "restarts_chunks")}
    assert not is_caught(damaged(plan, key, CallLayout.from_arrays(arrays, **plain)))
    rng = np.random.default_rng(0)
    for name, array in arrays.items():
        entries = set(rng.integers(0, max(1, array.size), 6).tolist())
        for how, changed in variants(array, entries):
            layout = CallLayout.from_arrays(arrays | {name: changed}, **plain)
            if not is_caught(damaged(plan, key, layout)):
                survivors.append(f"{name} {how}")
    assert not survivors, survivors
    for name, value in (
        ("num_external_states", call.num_external_states + 1),
        ("restarts_chunks", not call.restarts_chunks),
    ):
        assert is_caught(damaged(plan, key, CallLayout.from_arrays(arrays, **plain | {name: value})))


def test_missing_and_foreign_storage_is_caught(plan):
    for k in [name for name in plan.tensordict.keys() if "_" in name and name != "events_V2"]:  # noqa: SIM118
        storage = plan.tensordict.clone(recurse=False)
        del storage[k]
        with pytest.raises((ValueError, KeyError)):
            replace(plan, tensordict=storage).validate(TOKENS, OFFSETS)
    consumer = attached(plan)
    storage = plan.tensordict.clone()
    del storage[f"consumer_{consumer.slot * plan.dp_degree + consumer.replica}", "hand_over"]
    assert is_caught(replace(plan, tensordict=storage))
    assert is_caught(replace(plan, replicas=(0,))) and is_caught(replace(plan, replicas=(0, 0)))


def test_every_wrong_setting_is_caught(plan):
    largest = int(max(plan.items["item_rows_I"].max(), max(c.external_row_X.numel() for c in plan.consumers())))
    wrong = {
        "mode": ("nodewise", "depthwise", "compact", "expanded"),
        "chunk_size": (CHUNK + 1, 1),
        "capacity": (largest - 1,),
        "num_taps": (1, 5),
        "dp_degree": (1, 3),
        "num_slots": (plan.num_slots - 1, plan.num_slots + 1),
        "windows": (False,),
        "max_window_slots": (int(np.diff(plan.window_ptr_W1).max()) - 1,),
        "max_live_producers": (-1,),
    }
    for name, values in wrong.items():
        for value in values:
            if value != getattr(plan, name) and not (name == "max_window_slots" and value == 0):
                assert is_caught(replace(plan, **{name: value})), f"{name} {value}"


def test_every_wrong_figure_is_caught(plan):
    # What level 1 found cannot be recomputed from a plan with windows.
    unknown = {"seconds", "l1_method", "l1_tokens", "l1_slots", "l1_balance"}
    for field in dataclasses.fields(plan.stats):
        if field.name in unknown:
            continue
        value = getattr(plan.stats, field.name)
        other = value[:-1] if isinstance(value, tuple) else value + 1
        assert is_caught(replace(plan, stats=replace(plan.stats, **{field.name: other}))), field.name


def test_other_tokens_are_caught(plan):
    for x in range(len(SEQUENCES)):
        tokens = TOKENS.copy()
        tokens[OFFSETS[x]] += 7
        with pytest.raises(ValueError, match="invariant"):
            plan.validate(tokens, OFFSETS)
