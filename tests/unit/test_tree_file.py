"""Stored trees: tokens drawn for them have exactly their prefixes; what is no tree is refused."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harts_titan.data.tree_file import StoredTree, check_tree, read_tree, tokens_from_tree, tree_of, write_tree
from harts_titan.tree import plan_step, sort_trajectories
from tests.forests import random_forest

DATA = Path(__file__).resolve().parents[2] / "benchmarks" / "data"


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(2, 9))
def test_tokens_have_exactly_the_prefixes(seed, count, vocab_size):
    tree = tree_of(*random_forest(seed, chunk_size=4, vocab_size=vocab_size, num_trajectories=count))
    vocabulary = len(tree.length_N) + 1
    tokens, offsets = tokens_from_tree(tree.length_N, tree.lcp_N, vocabulary, seed=seed)
    assert tokens.dtype == np.int32 and tokens.min() >= 0 and tokens.max() < vocabulary
    found = tree_of(tokens, offsets)
    assert np.array_equal(found.length_N, tree.length_N) and np.array_equal(found.lcp_N, tree.lcp_N)
    again, _ = tokens_from_tree(tree.length_N, tree.lcp_N, vocabulary, seed=seed)
    assert np.array_equal(again, tokens)


def test_other_seeds_draw_other_tokens():
    length, lcp = np.array([50, 60]), np.array([0, 20])
    assert not np.array_equal(tokens_from_tree(length, lcp, 1000)[0], tokens_from_tree(length, lcp, 1000, seed=1)[0])


@pytest.mark.parametrize(
    ("name", "trajectories", "tokens", "rows"),
    [("treestep_65536", 12, 361_200, 65_096), ("stepwise_65536", 23, 481_376, 64_891)],
)
def test_stored_trees_are_one_microbatch(name, trajectories, tokens, rows):
    tree = read_tree(DATA / f"{name}.npz")
    length, lcp = tree.length_N, tree.lcp_N
    assert (len(length), int(length.sum()), int((length - lcp).sum())) == (trajectories, tokens, rows)
    plan = plan_step(*tokens_from_tree(length, lcp, 157_184), capacity=65_536, chunk_size=64, replicas=())
    assert plan.num_slots == 1 and plan.stats.compact_tokens == rows


def test_files_round_trip(tmp_path):
    for nodes in (None, np.zeros(0, np.int64), np.array([1, 3, 7], np.int32)):
        write_tree(tmp_path / "tree.npz", StoredTree(np.array([3, 5], np.int32), np.array([0, 3], np.int32), nodes))
        tree = read_tree(tmp_path / "tree.npz")
        assert tree.length_N.tolist() == [3, 5] and tree.lcp_N.tolist() == [0, 3]
        assert tree.length_N.dtype == tree.lcp_N.dtype == np.int64
        assert (tree.node_start is None) == (nodes is None)
        if nodes is not None:
            assert tree.node_start.tolist() == nodes.tolist() and tree.node_start.dtype == np.int64
            assert tree.first(1).node_start.tolist() == nodes[nodes < 3].tolist()
    assert tree.first(1).length_N.tolist() == [3]


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.integers(2, 20))
def test_nodes_move_with_their_trajectories(seed, count):
    tokens, offsets = random_forest(seed, chunk_size=4, vocab_size=3, num_trajectories=count)
    begins = np.random.default_rng(seed).random(len(tokens)) < 0.2
    tree = tree_of(tokens, offsets, np.flatnonzero(begins))
    bounds = np.concatenate([[0], np.cumsum(tree.length_N)])
    order, _ = sort_trajectories(tokens, offsets)
    for n, lo, hi in zip(order, bounds, bounds[1:]):
        found = tree.node_start[(tree.node_start >= lo) & (tree.node_start < hi)] - lo
        assert found.tolist() == np.flatnonzero(begins[offsets[n] : offsets[n + 1]]).tolist()
    assert tree.node_start.size == begins.sum()


@pytest.mark.parametrize(
    ("length", "lcp", "message"),
    [
        ([], [], "no trajectories"),
        ([3], [1], r"trajectory 0 of 3 tokens cannot share 1 with one of 0 before it"),
        ([3, 4], [0, 4], r"trajectory 1 of 4 tokens cannot share 4 with one of 3"),
        ([4, 3], [0, 3], r"trajectory 1 of 3 tokens cannot share 3 with one of 4 before it in lexicographic order"),
        ([4, 0], [0, 0], "trajectory 1 of 0 tokens"),
        ([4, 4], [0, -1], "cannot share -1"),
        ([4, 4], [0], r"lcp is int64 \(1,\); both must be 1-D integer arrays of one size"),
        ([4.0], [0], "length is float64"),
    ],
)
def test_what_is_no_tree_is_refused(tmp_path, length, lcp, message):
    with pytest.raises(ValueError, match=message):
        check_tree(np.array(length, None if length else np.int64), np.array(lcp, np.int64))
    np.savez(tmp_path / "tree.npz", length=np.array(length, None if length else np.int64), lcp=np.array(lcp, np.int64))
    with pytest.raises(ValueError, match=f"tree.npz: no usable tree file: .*{message}"):
        read_tree(tmp_path / "tree.npz")


def test_unreadable_files_and_small_vocabularies_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        read_tree(tmp_path / "absent.npz")
    (tmp_path / "text.npz").write_text("text")
    with pytest.raises(ValueError, match=r"text.npz: no usable tree file"):
        read_tree(tmp_path / "text.npz")
    for nodes, message in (
        (np.array([0, 9]), r"node_start\[1\] is 9; must be a position of the 9 tokens"),
        (np.array([-1]), r"node_start\[0\] is -1"),
        (np.array([2, 2]), r"node_start\[1\] is 2 after 2; positions must increase"),
        (np.array([1.0]), r"node_start is float64 \(1,\)"),
    ):
        np.savez(tmp_path / "nodes.npz", length=np.array([4, 5]), lcp=np.array([0, 2]), node_start=nodes)
        with pytest.raises(ValueError, match=f"nodes.npz: no usable tree file: {message}"):
            read_tree(tmp_path / "nodes.npz")
    np.savez(tmp_path / "step.npz", tokens=np.arange(3), offsets=np.array([0, 3]))
    with pytest.raises(ValueError, match="lacks length and lcp; a tree file has length and lcp"):
        read_tree(tmp_path / "step.npz")
    with pytest.raises(ValueError, match="a vocabulary of 2 ids is too small for 2 trajectories"):
        tokens_from_tree(np.array([3, 3]), np.array([0, 1]), 2)
