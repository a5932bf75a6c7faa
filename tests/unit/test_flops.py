"""The formula of operations against what torch counts, in every mode; pairs against the definition."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace

import numpy as np
import pytest
from flop_cases import counted, tile_pairs, unseen
from ling_cases import CHUNK, calls_of, rollouts, small_args

from harts_titan.models.ling import FLAVOURS
from harts_titan.models.ling.cost import (
    RowOperations,
    head_operations,
    layer_operations,
    ling_plan_cost,
    row_operations,
)
from harts_titan.models.ling.flops import (
    CallWork,
    count_flops,
    expanded_work,
    ling_flops,
    work_of_calls,
    work_of_plan,
)
from harts_titan.ops.kda.reference import GROUP_ROWS
from harts_titan.tree import MODES, plan_step

REPLAYED = CHUNK // 2


def forked() -> tuple[np.ndarray, np.ndarray]:
    """Two trajectories of whole groups of chunks that part inside a chunk, one group before their ends."""
    rng = np.random.default_rng(0)
    trunk = rng.integers(0, 64, GROUP_ROWS + REPLAYED)
    made = [np.concatenate([trunk, [n], rng.integers(0, 64, GROUP_ROWS - REPLAYED - 1)]) for n in range(2)]
    return np.concatenate(made).astype(np.int32), np.arange(3) * 2 * GROUP_ROWS


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("mode", ["compact", "expanded"])
def test_operations_of_a_tree_are_those_torch_counts(mode, recompute):
    """Equal as integers, with the pairs of whole tiles for the causal ones and the corrections of ``flop_cases``."""
    args = small_args()
    calls = calls_of(*forked(), mode)
    work = work_of_calls(calls)
    saved = (GROUP_ROWS + REPLAYED) * (mode == "compact")
    assert work.rows == 4 * GROUP_ROWS - saved
    assert work.packed_rows - work.rows == REPLAYED * (mode == "compact")
    read = replace(work, pairs=tile_pairs(calls))
    one = row_operations(args, chunk_size=CHUNK)
    forward = count_flops(read, one, recompute=recompute, backward=False).executed
    both = count_flops(read, one, recompute=recompute).executed
    seen = counted(args, calls, recompute=recompute)
    added = unseen(args, read, recompute=recompute)
    assert (seen[0] + added[0], seen[1] + added[1]) == (forward, both - forward)


@pytest.mark.parametrize("mode", ["nodewise", "depthwise"])
def test_operations_of_named_nodes_are_those_torch_counts(mode):
    """Nodes of whole groups of chunks, two on one path: restarting the grid there costs no operation."""
    rng = np.random.default_rng(0)
    trunk = rng.integers(0, 64, 2 * GROUP_ROWS)
    made = [np.concatenate([trunk, [n], rng.integers(0, 64, GROUP_ROWS - 1)]) for n in range(2)]
    tokens, offsets = np.concatenate(made).astype(np.int32), np.arange(3) * 3 * GROUP_ROWS
    args = small_args()
    calls = calls_of(tokens, offsets, mode, node_start=np.array([GROUP_ROWS]))
    assert [call.num_segments for call in calls] == [4]
    work = work_of_calls(calls)
    assert work.rows == work.packed_rows == 4 * GROUP_ROWS
    read = replace(work, pairs=tile_pairs(calls))
    one = row_operations(args, chunk_size=CHUNK)
    forward = count_flops(read, one, recompute=False, backward=False).executed
    both = count_flops(read, one, recompute=False).executed
    seen, added = counted(args, calls, recompute=False), unseen(args, read, recompute=False)
    assert (seen[0] + added[0], seen[1] + added[1]) == (forward, both - forward)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_work_is_that_of_the_definition(mode, named):
    tokens, offsets = rollouts(3)
    paths = [tuple(tokens[lo:hi].tolist()) for lo, hi in itertools.pairwise(offsets)]
    prefixes = {path[: i + 1] for path in paths for i in range(len(path))}
    calls = calls_of(tokens, offsets, mode, node_start=np.arange(0, len(tokens), 5) if named else None)
    work = work_of_calls(calls)
    whole = [path[: i + 1] for path in paths for i in range(len(path))]
    rows = whole if mode == "expanded" else prefixes
    assert work.rows == work.head_rows == len(rows)
    assert work.pairs == sum(map(len, rows))
    assert work.packed_rows == len(rows) + sum(int(call.replay_Q.sum()) for call in calls)
    # Pairs of the mask that attention really uses.
    seen = 0
    for call in calls:
        tin, tout = call.tin_Y.numpy(), call.tout_Y.numpy()
        seen += int(((tin <= tin[:, None]) & (tin[:, None] < tout)).sum())
    assert work.pairs == seen


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("recompute", [False, True])
def test_plans_and_benchmarks_count_alike(flavour, recompute):
    args = FLAVOURS[flavour]
    cost = ling_plan_cost(args, chunk_size=64, recompute=recompute, element_bytes=2)
    work = CallWork(rows=1000, packed_rows=1000, pairs=70_000, head_rows=1300)
    one = row_operations(args, chunk_size=64)
    forward = 1000 * cost.forward_row + 70_000 * cost.forward_pair + 1300 * cost.head_forward_row
    backward = 1000 * cost.backward_row + 70_000 * cost.backward_pair + 1300 * cost.head_backward_row
    assert count_flops(work, one, recompute=recompute, backward=False).executed == forward
    assert count_flops(work, one, recompute=recompute).executed == forward + backward
    layers = [layer_operations(args, layer, chunk_size=64) for layer in range(args.n_layers)]
    for field in fields(RowOperations):
        assert getattr(one, field.name) == sum(getattr(x, field.name) for x in [*layers, head_operations(args)])


def test_parts_and_totals():
    args = small_args()
    work = CallWork(rows=10, packed_rows=14, pairs=55, head_rows=10)
    one = row_operations(args, chunk_size=CHUNK)
    flops = count_flops(work, one, recompute=True)
    assert flops.replay["core"] == 4 * one.core * (1 + 2 + 1 + 1) and sum(flops.replay.values()) == flops.replay["core"]
    assert flops.recompute["products"] == 10 * one.products and flops.recompute["head"] == 10 * one.head
    assert flops.recompute["query_key"] == 2 * 55 * one.query_key and flops.recompute["value"] == 55 * one.value
    assert flops.model == 3 * sum(flops.forward.values())
    report = flops.report()
    assert report["executed"] == report["model"] + report["replay_total"] + report["recompute_total"]
    assert count_flops(work, one, recompute=True, passes=3).executed == 3 * flops.executed
    twice = flops + flops
    assert (twice.model, twice.executed) == (2 * flops.model, 2 * flops.executed)
    # Of forward passes alone nothing is done again but the replayed rows.
    alone = count_flops(work, one, recompute=True, backward=False)
    assert alone.executed == sum(flops.forward.values()) + 4 * one.core


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dp_degree", [1, 2])
def test_a_plan_is_counted_without_its_rows(mode, dp_degree, named):
    tokens, offsets = rollouts(2)
    options = {"capacity": 90, "chunk_size": CHUNK, "dp_degree": dp_degree, "mode": mode}
    options["node_start"] = np.arange(0, len(tokens), 5) if named else None
    laid_out = plan_step(tokens, offsets, **options)
    calls = [call for consumer in laid_out.consumers() for call in consumer.calls]
    plan = plan_step(tokens, offsets, **options, replicas=())
    assert work_of_plan(plan) == work_of_calls(calls)
    args = small_args()
    planned, expanded = ling_flops(args, plan, offsets, recompute=True)
    one = row_operations(args, chunk_size=CHUNK)
    assert planned == count_flops(work_of_calls(calls), one, recompute=True)
    assert (planned == expanded) == (mode == "expanded")
    assert planned.model <= expanded.model
    assert expanded_work(offsets).pairs == sum(n * (n + 1) // 2 for n in np.diff(offsets).tolist())


@pytest.mark.parametrize("mode", ["compact", "depthwise"])
def test_windows_move_rows_and_keep_the_head(mode):
    """Consumers and producers together: fewer rows, the head still on complete layouts."""
    trunk = np.arange(60)
    made = [np.concatenate([trunk, [n], np.arange(20)]) for n in range(8)]
    tokens, offsets = np.concatenate(made).astype(np.int32), np.arange(9) * 81
    options = {"capacity": 120, "chunk_size": CHUNK, "mode": mode}
    plan = plan_step(tokens, offsets, **options, windows=True, max_window_slots=0)
    assert plan.stats.num_producers > 0
    work = work_of_plan(plan)
    consumers = work_of_calls([consumer.calls[0] for consumer in plan.consumers()])
    producers = work_of_calls([producer.call for producer in plan.producers()])
    assert replace(work, head_rows=0) == replace(consumers + producers, head_rows=0)
    assert work.head_rows == consumers.head_rows == plan.stats.compact_tokens > work.rows
