"""Nodes of the rollout tree in modes nodewise and depthwise: the cuts are those of the definition, and are proven."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from ling_cases import build, run, small_args
from plan_execution import execute
from tree_oracle import flat, random_sequences
from window_placement import drawn

from harts_titan.data import RolloutBatch
from harts_titan.tree import StepPlan, check_call, plan_step
from harts_titan.tree.nodes import NodeStarts

RESTARTING = ("nodewise", "depthwise")


def nodes_of(sequences, starts):
    """Return the prefixes that end with the first token of a node, and how many nodes lie above each.

    Args:
        sequences: token lists of one microbatch.
        starts: positions that each names.
    """
    children: dict[tuple, set] = {}
    for s in sequences:
        for i in range(len(s)):
            children.setdefault(tuple(s[:i]), set()).add(s[i])
    named = {tuple(s[: p + 1]) for s, positions in zip(sequences, starts) for p in positions}
    paths = {tuple(s[: i + 1]) for s in sequences for i in range(len(s))}
    begins = {p for p in paths if len(p) == 1 or len(children[p[:-1]]) > 1 or p in named}
    return {p: sum(p[: i + 1] in begins for i in range(len(p) - 1)) for p in begins}


def planned_nodes(call, tokens, offsets):
    """Return the same of a call's segments."""
    found = {}
    bounds, rows = call.position_offset_N1.tolist(), call.row_of_position_S.numpy()
    segment = {row: v for v, row in enumerate(call.seg_row_V.tolist())}
    for n, x in enumerate(call.trajectory_N.tolist()):
        path = tuple(tokens[offsets[x] : offsets[x + 1]].tolist())
        for i, row in enumerate(rows[bounds[n] : bounds[n + 1]].tolist()):
            if row in segment:
                found[path[: i + 1]] = int(call.seg_depth_V[segment[row]])
    return found


def check(sequences, starts, **options):
    """Plan in both modes and compare every microbatch with the definition; return the plans."""
    tokens, offsets = flat(sequences)
    flat_starts = np.array([o + p for o, positions in zip(offsets, starts) for p in sorted(positions)], np.int64)
    plans = []
    for mode in RESTARTING:
        plan = plan_step(tokens, offsets, mode=mode, node_start=flat_starts, **options)
        plan.validate(tokens, offsets, flat_starts)
        for consumer in plan.consumers():
            (call,) = consumer.calls
            members = consumer.trajectory_N.tolist()
            want = nodes_of([list(map(int, sequences[x])) for x in members], [starts[x] for x in members])
            assert planned_nodes(call, tokens, offsets) == want
            assert call.num_segments == call.num_sequences == len(want) and call.restarts_chunks
            assert call.num_rounds == (len(want) if mode == "nodewise" else 1 + max(want.values()))
            assert call.packed_row_P.shape[0] == call.num_rows
        plans.append(plan)
    return plans


@pytest.mark.parametrize("seed", range(25))
def test_nodes_are_those_of_the_definition(seed):
    rng = np.random.default_rng(seed)
    sequences = random_sequences(rng, int(rng.integers(1, 14)), chunk=4)
    share = rng.choice([0.0, 0.1, 0.5, 1.0])
    starts = [np.flatnonzero(rng.random(len(s)) < share).tolist() for s in sequences]
    check(sequences, starts, capacity=max(map(len, sequences)) + 20, chunk_size=4)


@pytest.mark.parametrize("chunk", [1, 4])
def test_forks_and_cuts_at_every_offset(chunk):
    length = 2 * chunk + 3
    base = list(range(length))
    for fork in range(length):
        sequences = [base, [*base[:fork], 90, 91, 92], base[: fork + 1]]
        for cut in range(length):
            for named in range(2):
                starts = [[cut] if named == i and cut < len(s) else [] for i, s in enumerate(sequences)]
                check(sequences, starts, capacity=100, chunk_size=chunk)


def test_a_row_that_one_trajectory_names_is_cut_for_all():
    sequences = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 7], [8, 9, 10]]
    (plan, by_depth) = check(sequences, [[2], [], [0, 1]], capacity=50, chunk_size=4)
    call = plan.consumer(0, 0).calls[0]
    assert sorted(call.seg_length_V.tolist()) == [1, 1, 1, 2, 2, 3]
    assert call.num_rounds == 6 and by_depth.consumer(0, 0).calls[0].num_rounds == 3


def test_another_microbatch_cuts_nothing():
    sequences = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 7]]
    (plan, _) = check(sequences, [[2], []], capacity=6, chunk_size=4)
    assert sorted(consumer.calls[0].num_segments for consumer in plan.consumers()) == [1, 2]


@pytest.mark.parametrize("mode", ["compact", "expanded"])
def test_other_modes_do_not_use_them(mode):
    sequences = random_sequences(np.random.default_rng(4), 12, chunk=4)
    tokens, offsets = flat(sequences)
    options = {"capacity": 60, "chunk_size": 4, "mode": mode}
    plain, named = (plan_step(tokens, offsets, node_start=n, **options) for n in (None, np.arange(len(tokens))))
    for a, b in zip(plain.consumers(), named.consumers(), strict=True):
        for one, other in zip(a.calls, b.calls, strict=True):
            arrays = other.arrays()
            assert all(np.array_equal(array, arrays[name]) for name, array in one.arrays().items())
    assert all(np.array_equal(array, named.items[name]) for name, array in plain.items.items())
    named.validate(tokens, offsets, np.arange(len(tokens)))


@st.composite
def named_steps(draw):
    """Trajectories that grow from earlier ones, and positions that each of them names."""
    chunk = draw(st.integers(1, 6))
    sequences: list[list[int]] = []
    for _ in range(draw(st.integers(1, 12))):
        base = sequences[draw(st.integers(0, len(sequences) - 1))] if sequences else []
        cut = draw(st.integers(0, len(base)))
        tail = draw(st.lists(st.integers(0, 2), min_size=0 if cut else 1, max_size=chunk + 2))
        sequences.append(base[:cut] + tail)
    size = sum(map(len, sequences))
    return chunk, sequences, np.array(sorted(draw(st.sets(st.integers(0, size - 1)))), np.int64)


@settings(max_examples=80, deadline=None)
@given(named_steps(), st.sampled_from(RESTARTING), st.booleans(), st.data())
def test_plans_are_proven_and_run(step, mode, windows, data):
    chunk, sequences, node_start = step
    tokens, offsets = flat(sequences)
    longest = max(map(len, sequences))
    options = {"capacity": longest + data.draw(st.integers(0, 9)), "chunk_size": chunk, "mode": mode, "num_taps": 3}
    options["dp_degree"] = data.draw(st.integers(1, min(2, len(sequences))))
    more = {}
    if windows:
        rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
        more = {"windows": True, "planner": drawn(sequences, rng, "ragged", **options)}
    try:
        plan = plan_step(tokens, offsets, node_start=node_start, **options, **more)
    except ValueError as error:
        assume("into a multiple of" not in str(error))
        raise
    plan.validate(tokens, offsets, node_start)
    execute(plan, sequences)


@pytest.mark.parametrize("mode", RESTARTING)
@pytest.mark.parametrize("windows", [False, True])
def test_other_nodes_than_the_plans_are_refused(mode, windows):
    """A cut that nobody names and a name without a cut both break the proof."""
    trunk = list(range(30))
    sequences = [[*trunk, 40 + n, 60, 61, 62, 63] for n in range(6)]
    tokens, offsets = flat(sequences)
    options = {"capacity": 45, "chunk_size": 4, "mode": mode, "windows": windows, "max_window_slots": 0}
    with_node = offsets[:-1] + 7
    after_fork = np.sort(np.append(with_node, offsets[2] + 32))
    plan = plan_step(tokens, offsets, node_start=after_fork, **options)
    assert (plan.stats.num_producers > 0) == windows
    plan.validate(tokens, offsets, after_fork)
    # Every trajectory names the row at 7: one of them is enough.
    plan.validate(tokens, offsets, np.delete(after_fork, 0))
    with pytest.raises(ValueError, match="invariant 'segments are the maximal fork-free paths' violated"):
        plan.validate(tokens, offsets, with_node)
    with pytest.raises(ValueError, match="invariant 'segments are the maximal fork-free paths' violated"):
        plan.validate(tokens, offsets)
    for extra in (offsets[1] + 12, offsets[3] + 33):
        with pytest.raises(ValueError, match="invariant 'a node begins where the workload says so' violated"):
            plan.validate(tokens, offsets, np.sort(np.append(after_fork, extra)))


@pytest.mark.parametrize("mode", RESTARTING)
@pytest.mark.parametrize("dtype", [np.uint64, np.uint8, np.int16, list])
def test_positions_of_any_integer_type_are_proven(mode, dtype):
    """What plan_step takes, validate takes: unsigned positions less int64 offsets are floats to NumPy."""
    trunk = list(range(30))
    tokens, offsets = flat([[*trunk, 40 + n, 60, 61, 62, 63] for n in range(6)])
    named = np.append(offsets[:-1] + 7, offsets[-2] + 32)
    given = named.tolist() if dtype is list else named.astype(dtype)
    options = {"capacity": 45, "chunk_size": 4, "mode": mode, "windows": True, "max_window_slots": 0}
    plan = plan_step(tokens, offsets, node_start=given, **options)
    expected = plan_step(tokens, offsets, node_start=named, **options)
    assert plan.stats.num_producers > 0
    assert all(np.array_equal(array, plan.items[name]) for name, array in expected.items.items())
    plan.validate(tokens, offsets, given)
    with pytest.raises(ValueError, match="invariant 'segments are the maximal fork-free paths' violated"):
        plan.validate(tokens, offsets, given[:-1])


@pytest.mark.parametrize("mode", RESTARTING)
def test_rows_alone_are_proven(mode):
    tokens, offsets = flat([[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7, 8, 9]])
    plan = plan_step(tokens, offsets, capacity=20, chunk_size=2, mode=mode, node_start=np.array([2, 8, 11]))
    (call,) = plan.consumer(0, 0).calls

    def prove(places, positions):
        named = np.array(places), np.array(positions)
        check_call(call.arrays(), tokens, offsets, chunk_size=2, mode=mode, nodes=named)

    prove([0, 1, 1], [2, 2, 5])
    prove([0, 1], [2, 5])
    prove([0, 1, 1], [2, 4, 5])
    with pytest.raises(ValueError, match="'segments are the maximal fork-free paths' violated at call: only child"):
        prove([0], [2])
    with pytest.raises(ValueError, match="'a node begins where the workload says so' violated at call: named position"):
        prove([0, 1, 1, 0], [2, 2, 5, 1])


def test_plans_with_nodes_are_saved(tmp_path):
    sequences = random_sequences(np.random.default_rng(5), 12, chunk=4)
    tokens, offsets = flat(sequences)
    nodes = np.arange(0, len(tokens), 3)
    plan = plan_step(tokens, offsets, capacity=60, chunk_size=4, mode="depthwise", node_start=nodes)
    plan.save(tmp_path / "plan.pt")
    StepPlan.load(tmp_path / "plan.pt").validate(tokens, offsets, nodes)


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([3, 2], r"node_start\[1\] is 2 after 3; positions must increase"),
        ([2, 2], r"node_start\[1\] is 2 after 2"),
        ([0, 9], r"node_start\[1\] is 9; must be a position of the 9 tokens"),
        ([-1, 3], r"node_start\[0\] is -1; must be a position"),
        ([1.0], r"node_start is float64 \(1,\); must be a 1-D integer array"),
        ([[1]], r"node_start is int64 \(1, 1\)"),
        ([True], "node_start is bool"),
    ],
)
@pytest.mark.parametrize("mode", ["nodewise", "compact"])
def test_bad_positions_are_refused(nodes, message, mode):
    tokens, offsets = flat([[1, 2, 3, 4], [1, 2, 3, 5, 6]])
    with pytest.raises(ValueError, match=message):
        plan_step(tokens, offsets, capacity=9, chunk_size=4, mode=mode, node_start=np.array(nodes))
    mask = np.isin(np.arange(9), offsets[:-1], invert=True)
    with pytest.raises(ValueError, match=message):
        RolloutBatch(tokens=tokens, offsets=offsets, loss_mask=mask, node_start=np.array(nodes))


def test_a_batch_keeps_them_with_their_trajectories():
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, 9, n) for n in (4, 2, 7, 3)]
    tokens, offsets = flat(sequences)
    begins = rng.random(len(tokens)) < 0.5
    mask = np.isin(np.arange(len(tokens)), offsets[:-1], invert=True)
    batch = RolloutBatch(tokens=tokens, offsets=offsets, loss_mask=mask, node_start=np.flatnonzero(begins))
    assert batch.node_start.dtype == np.int64
    for chosen in ([2, 0], [1, 1, 3], [0, 1, 2, 3]):
        part = batch.select(chosen)
        parts = [begins[offsets[n] : offsets[n + 1]] for n in chosen]
        assert part.node_start.tolist() == np.flatnonzero(np.concatenate(parts)).tolist()
    joined = RolloutBatch.concat([batch.select([2]), batch.select([0, 1])])
    assert joined.node_start.tolist() == batch.select([2, 0, 1]).node_start.tolist()
    plain = RolloutBatch(tokens=tokens, offsets=offsets, loss_mask=mask)
    assert plain.select([1]).node_start is None and RolloutBatch.concat([plain, plain]).node_start is None
    with pytest.raises(ValueError, match="node_start is present in"):
        RolloutBatch.concat([batch, plain])


def test_positions_by_trajectory():
    offsets = np.array([0, 4, 9, 11])
    nodes = NodeStarts.from_flat(np.array([0, 3, 4, 8, 10]), offsets)
    index, position = nodes.of(np.array([2, 0]))
    assert index.tolist() == [0, 1, 1] and position.tolist() == [1, 0, 3]
    assert [array.tolist() for array in nodes.of(np.array([], np.int64))] == [[], []]
    none = NodeStarts.from_flat(np.zeros(0, np.int64), offsets)
    assert none.of(np.array([0, 1, 2]))[0].size == 0


@pytest.mark.parametrize("seed", range(2))
def test_execution_equals_trajectories_alone(seed):
    """Float64, forward and backward, against every trajectory on its own; nodes of one token and across chunks."""
    model = build(small_args())
    rng = np.random.default_rng(seed)
    # One-token nodes, forks inside chunks, a node that ends a chunk, a trajectory inside another, two roots.
    trunk = rng.integers(0, 64, 40).tolist()
    sequences = [trunk[:k] + rng.integers(0, 64, n).tolist() for k, n in ((40, 9), (33, 20), (16, 3), (40, 1), (0, 18))]
    tokens, offsets = flat([*sequences, trunk[:20]])
    nodes = np.flatnonzero(rng.random(len(tokens)) < 0.08)
    nodes = np.unique(np.concatenate([nodes, [5, 6, 7, 16, 32], [offsets[1] + 35]]))
    expected = run(model, tokens, offsets, "expanded", reverse=True)
    for mode in RESTARTING:
        plan = plan_step(tokens, offsets, capacity=4096, chunk_size=16, mode=mode, node_start=nodes)
        assert plan.stats.num_segments > 12
        got = run(model, tokens, offsets, mode, node_start=nodes)
        torch.testing.assert_close(got.logprob_S, expected.logprob_S, rtol=0, atol=1e-10)
        torch.testing.assert_close(got.entropy_S, expected.entropy_S, rtol=0, atol=1e-10)
        assert got.loss == pytest.approx(expected.loss, abs=1e-10)
        assert torch.equal(got.counts_LE, expected.counts_LE)
        for name, gradient in expected.grads.items():
            assert (got.grads[name] - gradient).abs().max() <= 1e-9 * gradient.abs().max(), name
        assert got.rows == [
            len({tuple(tokens[lo : i + 1]) for lo, hi in pairwise(offsets) for i in range(lo, hi)})
        ] * len(model.layers)
