"""plan_step: every mode proven by validate on random steps, named edge cases, storage, refusals."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tree_oracle import Trie, compact_size, flat, random_sequences

from harts_titan.ops.logprob import IGNORED_LABEL
from harts_titan.tree import MODES, StepPlan, plan_step
from harts_titan.tree.sorted_step import SortedStep


def plan_and_validate(sequences, **options):
    tokens, offsets = flat(sequences)
    plan = plan_step(tokens, offsets, **options)
    plan.validate(tokens, offsets)
    return plan


def oracle_check(sequences, plan):
    """Compare a compact plan with the plainest trie, row by row."""
    for consumer in plan.consumers():
        (call,) = (c.arrays() for c in consumer.calls)
        trie = Trie([sequences[x] for x in call["trajectory_N"]])
        node_of_row = np.zeros(len(call["token_T"]), np.int64)
        nodes = np.array([node for path in trie.path for node in path])
        node_of_row[call["row_of_position_S"]] = nodes
        assert len(np.unique(node_of_row)) == len(trie) == len(node_of_row)
        assert call["multiplicity_T"].tolist() == [trie.through[node] for node in node_of_row]
        ancestors = [set() for _ in range(len(trie) + 1)]
        for path in trie.path:
            for i, node in enumerate(path):
                ancestors[node] = set(path[: i + 1])
        tin, tout = call["tin_Y"], call["tout_Y"]
        visible = (tin[None, :] <= tin[:, None]) & (tin[:, None] < tout[None, :])
        for q, node in enumerate(node_of_row):
            assert set(node_of_row[visible[q]]) == ancestors[node]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(40))
def test_random_steps(seed, mode):
    rng = np.random.default_rng(seed)
    chunk = int(rng.integers(1, 9))
    sequences = random_sequences(rng, int(rng.integers(4, 40)), chunk=chunk)
    longest = max(map(len, sequences))
    plan = plan_and_validate(
        sequences,
        capacity=int(longest + rng.integers(longest, 12 * chunk + 2 * longest)),
        chunk_size=chunk,
        num_taps=int(rng.integers(1, 6)),
        dp_degree=1 + seed % 2,
        mode=mode,
    )
    stats = plan.stats
    assert stats.original_tokens == sum(map(len, sequences))
    assert stats.distinct_tokens == compact_size(sequences)
    assert stats.compact_tokens == sum(
        compact_size([sequences[x] for x in consumer.trajectory_N.tolist()]) for consumer in plan.consumers()
    )
    assert stats.executed_rows == (stats.original_tokens if mode == "expanded" else stats.compact_tokens)
    assert stats.compression == stats.original_tokens / stats.executed_rows
    assert set(stats.seconds) == {"sort", "l1", "l2", "rounds", "layout"}
    if mode == "compact":
        oracle_check(sequences, plan)


@st.composite
def trees(draw):
    """A chunk size and trajectories that grow from earlier ones at drawn places."""
    chunk = draw(st.integers(1, 6))
    sequences = []
    for _ in range(draw(st.integers(1, 14))):
        base = sequences[draw(st.integers(0, len(sequences) - 1))] if sequences else []
        cut = draw(st.integers(0, len(base)))
        tail = draw(st.lists(st.integers(0, 2), min_size=0 if cut else 1, max_size=2 * chunk + 1))
        sequences.append(base[:cut] + tail)
    return chunk, sequences


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(trees(), st.sampled_from(MODES))
def test_hypothesis_steps(tree, mode):
    chunk, sequences = tree
    plan = plan_and_validate(sequences, capacity=max(40, *map(len, sequences)), chunk_size=chunk, mode=mode)
    if mode == "compact":
        oracle_check(sequences, plan)


@pytest.mark.parametrize("chunk", (1, 2, 3, 8))
@pytest.mark.parametrize("mode", MODES)
def test_forks_at_every_offset(chunk, mode):
    trunk = np.arange(3 * chunk + 2)
    sequences = [trunk] + [np.concatenate([trunk[:i], [99], trunk[: i % 3]]) for i in range(1, len(trunk))]
    plan_and_validate(sequences, capacity=1000, chunk_size=chunk, mode=mode)


@pytest.mark.parametrize("mode", MODES)
def test_deep_tree_of_one_token_segments(mode):
    # Every position forks into a one-token branch: depth 40, pieces shorter than the convolution.
    sequences = [[0] * i + [1] for i in range(40)] + [[0] * 41]
    plan = plan_and_validate(sequences, capacity=1000, chunk_size=4, mode=mode)
    call = plan.consumer(0, 0).calls[0]
    if mode == "compact":
        assert int(call.seg_depth_V.max()) >= 6 and plan.stats.rounds_max == 2


@pytest.mark.parametrize("mode", MODES)
def test_duplicates_prefixes_and_one_token_trajectories(mode):
    sequences = [[7], [7], [7, 8, 9, 4], [7, 8, 9, 4], [7, 8], [5], [7, 8, 9, 4, 4]]
    plan = plan_and_validate(sequences, capacity=100, chunk_size=2, mode=mode)
    assert plan.stats.original_tokens == 18 and plan.stats.compact_tokens == 6


def test_five_thousand_one_token_branches():
    sequences = [[1, 2, i + 3] for i in range(5000)]
    plan = plan_and_validate(sequences, capacity=6000, chunk_size=2)
    assert plan.stats.rounds_max == 2 and plan.consumer(0, 0).calls[0].num_sequences == 5000


def test_label_example():
    plan = plan_and_validate([[7, 8, 9, 4]], capacity=4, chunk_size=64)
    # Plans and the log-prob op know nothing of each other, so both state the number.
    assert plan.consumer(0, 0).calls[0].label_S.tolist() == [8, 9, 4, IGNORED_LABEL]


def test_replay_spans_several_segments_and_states_are_shared():
    # Chunk 4; the segments [4,5) [5,6) [6,7) lie inside the second chunk, whose entry state serves all side branches.
    sequences = [[0, 0, 0, 0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 1, 2], [0, 0, 0, 0, 1, 1, 2], [0, 0, 0, 0, 1, 1, 1, 2]]
    plan = plan_and_validate(sequences, capacity=100, chunk_size=4)
    call = plan.consumer(0, 0).calls[0]
    assert call.num_rounds == 2 and call.export_sequence_E.tolist() == [0] and call.export_boundary_E.tolist() == [1]
    assert call.init_state_Q.tolist() == [-1, 0, 0, 0] and sorted(call.replay_Q.tolist()) == [0, 1, 2, 3]


def test_same_round_children_follow_their_parent():
    # A fork inside the first chunk: all branches start from the zero state in the one round.
    plan = plan_and_validate([[0, 1, 5, 5, 5, 5], [0, 1, 6], [0, 2, 2, 2, 2, 2, 2]], capacity=100, chunk_size=4)
    assert plan.stats.rounds_max == 1
    assert plan.stats.replay_tokens == 3


def test_expanded_packing():
    sequences = [[i] * n for i, n in enumerate((4, 3, 5, 9, 2))]
    options = {"capacity": 100, "chunk_size": 4, "mode": "expanded"}
    packed = [
        c.trajectory_N.tolist() for c in plan_and_validate(sequences, call_capacity=8, **options).consumer(0, 0).calls
    ]
    assert packed == [[0, 1], [2], [3], [4]]
    reverse = plan_and_validate(sequences, call_capacity=8, reverse=True, **options).consumer(0, 0)
    assert [c.trajectory_N.tolist() for c in reverse.calls] == [[4], [3], [2, 1], [0]]
    assert [c.trajectory_N.tolist() for c in plan_and_validate(sequences, **options).consumer(0, 0).calls] == [
        [0, 1, 2, 3, 4]
    ]


def test_modes_share_membership_and_sharing_is_on():
    rng = np.random.default_rng(3)
    sequences = random_sequences(rng, 60, chunk=8)
    plans = {mode: plan_and_validate(sequences, capacity=150, chunk_size=8, dp_degree=2, mode=mode) for mode in MODES}
    members = [[c.trajectory_N.tolist() for c in plan.consumers()] for plan in plans.values()]
    assert all(m == members[0] for m in members) and plans["compact"].num_slots > 1
    assert plans["compact"].stats.compact_tokens < plans["compact"].stats.original_tokens
    assert plans["compact"].stats.compression > 1.5 and plans["expanded"].stats.compression == 1


def same(a: StepPlan, b: StepPlan) -> bool:
    if (a.mode, a.capacity, a.num_slots, a.stats) != (b.mode, b.capacity, b.num_slots, b.stats):
        return False
    for x, y in zip(a.consumers(), b.consumers(), strict=True):
        if not torch.equal(x.trajectory_N, y.trajectory_N) or len(x.calls) != len(y.calls):
            return False
        for left, right in zip(x.calls, y.calls, strict=True):
            if left.chunk_size != right.chunk_size or left.num_external_states != right.num_external_states:
                return False
            if left.restarts_chunks != right.restarts_chunks:
                return False
            other = right.arrays()
            if any(v.dtype != other[k].dtype or not np.array_equal(v, other[k]) for k, v in left.arrays().items()):
                return False
    return True


@pytest.mark.parametrize("mode", MODES)
def test_save_and_load(tmp_path, mode):
    sequences = random_sequences(np.random.default_rng(5), 30, chunk=4)
    plan = plan_and_validate(sequences, capacity=100, chunk_size=4, dp_degree=2, mode=mode)
    plan.save(tmp_path / "plan.pt")
    loaded = StepPlan.load(tmp_path / "plan.pt")
    assert same(plan, loaded)
    loaded.validate(*flat(sequences))
    assert same(plan, plan.to("cpu"))
    assert all(c.restarts_chunks == (mode in ("nodewise", "depthwise")) for c in loaded.consumer(1, 0).calls)


def test_files_that_are_no_plan_are_refused(tmp_path):
    path = tmp_path / "other.pt"
    plan_and_validate([[1, 2], [1, 3]], capacity=8, chunk_size=4).save(path)
    whole = path.read_bytes()
    torch.save({"header": {"format": 0}, "flat": torch.zeros(0)}, path)
    with pytest.raises(ValueError, match=r"other.pt is a step plan of format 0; this version reads format \d"):
        StepPlan.load(path)
    others = [b"", b"text", whole[:200], whole[: len(whole) // 2]]
    for content in ({"header": None}, {"header": {}}, [1], torch.zeros(3), {"model": 1}):
        torch.save(content, path)
        others.append(path.read_bytes())
    for content in others:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"other.pt is no step plan of format"):
            StepPlan.load(path)
    with pytest.raises(FileNotFoundError):
        StepPlan.load(tmp_path / "absent.pt")


def test_deterministic():
    sequences = random_sequences(np.random.default_rng(6), 50, chunk=4)
    first, second = (plan_and_validate(sequences, capacity=100, chunk_size=4) for _ in range(2))
    for a, b in zip(first.consumers(), second.consumers(), strict=True):
        assert all(np.array_equal(v, b.calls[0].arrays()[k]) for k, v in a.calls[0].arrays().items())


@pytest.mark.parametrize(
    ("sequences", "options", "message"),
    [
        ([[1, 2], [3] * 9], {"capacity": 8}, "trajectory 1 has 9 tokens, more than capacity 8"),
        ([[1, 2]], {"dp_degree": 2}, "1 trajectories cannot give each of 2 replicas one"),
        ([[1, 2], []], {}, "trajectory 1 has 0 tokens"),
        ([[1, -1]], {}, "remove padding"),
        ([[1]], {"mode": "tree"}, "mode is 'tree'"),
        ([[1]], {"chunk_size": 0}, "chunk_size"),
        ([[1]], {"num_taps": 0}, "num_taps"),
        ([[1]], {"chunk_size": 2**63}, "chunk_size .* must be at most"),
        ([[1]], {"capacity": 2**63}, "capacity .* must be at most"),
        ([[1]], {"reverse": True}, "mode 'expanded' only"),
        ([[1]], {"call_capacity": 0, "mode": "expanded"}, "call_capacity is 0"),
    ],
)
def test_refusals(sequences, options, message):
    tokens, offsets = flat(sequences)
    with pytest.raises(ValueError, match=message):
        plan_step(tokens, offsets, **{"capacity": 100, "chunk_size": 4, **options})


@pytest.mark.parametrize(
    ("tokens", "offsets", "message"),
    [
        (np.zeros(3), [0, 3], "1-D integer"),
        (np.zeros(3, np.int32), [0, 2], "offsets must run from 0"),
        (np.zeros(3, np.int32), [1, 3], "offsets must run from 0"),
        (np.zeros(0, np.int32), [0], "offsets must run from 0"),
    ],
)
def test_malformed_batches(tokens, offsets, message):
    with pytest.raises(ValueError, match=message):
        plan_step(tokens, np.array(offsets), capacity=8, chunk_size=4)


def test_a_caller_may_sort():
    tokens, offsets = flat([[1, 2, 3], [1, 2, 4], [5]])
    kept = []

    def sort(tokens, offsets):
        kept.append(SortedStep.from_tokens(tokens, offsets))
        return kept[-1]

    options = {"capacity": 5, "chunk_size": 2}
    plan = plan_step(tokens, offsets, sort=sort, **options)
    assert len(kept) == 1 and kept[0].distinct_tokens == 5
    plan.validate(tokens, offsets)
    assert plan.slot_N.tolist() == plan_step(tokens, offsets, **options).slot_N.tolist()
    # What cannot be sorted is refused before.
    with pytest.raises(ValueError, match="trajectory 1 has 0 tokens"):
        plan_step(*flat([[1, 2], []]), sort=sort, **options)
    assert len(kept) == 1


def test_no_such_consumer():
    plan = plan_and_validate([[1], [2]], capacity=4, chunk_size=4, dp_degree=2)
    with pytest.raises(ValueError, match="no consumer"):
        plan.consumer(2, 0)


def test_only_the_plan_imports_torch():
    folder = Path(__file__).parents[2] / "harts_titan" / "tree"
    users = {p.name for p in folder.glob("*.py") if "import torch" in p.read_text() or "from torch" in p.read_text()}
    assert users == {"plan.py", "call_layout.py"}


def test_depthwise_runs_the_segments_of_nodewise_depth_by_depth():
    sequences = random_sequences(np.random.default_rng(8), 30, chunk=8)
    plans = {
        mode: plan_and_validate(sequences, capacity=1000, chunk_size=8, mode=mode) for mode in ("nodewise", "depthwise")
    }
    nodewise, depthwise = (plan.consumer(0, 0).calls[0] for plan in plans.values())
    for name in ("seg_parent_V", "seg_start_V", "seg_length_V", "seg_depth_V"):
        assert torch.equal(getattr(nodewise, name), getattr(depthwise, name))
    assert torch.equal(depthwise.seg_round_V, depthwise.seg_depth_V)
    assert depthwise.num_rounds == int(depthwise.seg_depth_V.max()) + 1 < depthwise.num_segments == nodewise.num_rounds
    assert depthwise.num_sequences == depthwise.num_segments and not depthwise.replay_Q.any()
    assert plans["depthwise"].stats.replay_tokens == 0
    # A sequence hands its final state to all its children: one export for each segment that has some.
    assert depthwise.export_sequence_E.shape[0] == torch.unique(depthwise.seg_parent_V).shape[0] - int(
        (depthwise.seg_parent_V < 0).any()
    )
    with pytest.raises(
        ValueError, match="call_capacity and reverse apply to mode 'expanded' only; mode is 'depthwise'"
    ):
        plan_step(*flat(sequences), capacity=1000, chunk_size=8, mode="depthwise", reverse=True)
