"""Sorting, common prefixes, segment forests and the contiguous partition against naive definitions."""

import itertools

import numpy as np
import pytest
from tree_oracle import Trie, compact_size, contiguous_optimum, flat, random_sequences

from harts_titan.tree import build_forest, contiguous_partition, neighbour_lcp, sort_trajectories


def forest_of(sequences):
    tokens, offsets = flat(sequences)
    order, lcp = sort_trajectories(tokens, offsets)
    ordered = [sequences[i] for i in order]
    return ordered, lcp, build_forest(np.array([len(s) for s in ordered]), lcp)


def naive_lcp(a, b):
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


@pytest.mark.parametrize("seed", range(20))
def test_order_is_lexicographic_and_stable(seed):
    rng = np.random.default_rng(seed)
    sequences = random_sequences(rng, 40, chunk=4)
    # Ids above 255 and 65,535: bytes must compare like integers.
    scale = (1, 200, 70_000)[seed % 3]
    sequences = [s * scale for s in sequences]
    tokens, offsets = flat(sequences)
    order, lcp = sort_trajectories(tokens, offsets)
    assert order.tolist() == sorted(range(len(sequences)), key=lambda i: (tuple(sequences[i]), i))
    expected = [0] + [naive_lcp(sequences[a], sequences[b]) for a, b in itertools.pairwise(order)]
    assert lcp.tolist() == expected
    shuffled = rng.permutation(len(sequences))
    expected = [0] + [naive_lcp(sequences[a], sequences[b]) for a, b in itertools.pairwise(shuffled)]
    assert neighbour_lcp(tokens, offsets, shuffled).tolist() == expected


@pytest.mark.parametrize("seed", range(60))
def test_forest_equals_naive_trie(seed):
    rng = np.random.default_rng(seed)
    sequences, _, forest = forest_of(random_sequences(rng, int(rng.integers(1, 25)), chunk=5))
    trie = Trie(sequences)
    assert forest.num_tokens == len(trie) == compact_size(sequences)
    got = set()
    for v in range(forest.num_segments):
        path = trie.path[forest.source_V[v]]
        got.add(tuple(path[forest.start_V[v] : forest.start_V[v] + forest.length_V[v]]))
    assert got == trie.segments() and len(got) == forest.num_segments
    for n, path in enumerate(trie.path):
        v, end = forest.end_segment_N[n], forest.end_position_N[n]
        assert end == len(path) and forest.start_V[v] < end <= forest.start_V[v] + forest.length_V[v]
        assert trie.path[forest.source_V[v]][end - 1] == path[-1]
    below = forest.length_V.copy()
    for v in range(forest.num_segments - 1, -1, -1):
        if forest.parent_V[v] >= 0:
            below[forest.parent_V[v]] += below[v]
    depth = [0] * forest.num_segments
    last_child = {}
    for v, p in enumerate(forest.parent_V.tolist()):
        assert p < v
        if p >= 0:
            depth[v] = depth[p] + 1
            assert forest.start_V[v] == forest.start_V[p] + forest.length_V[p]
        # Depth-first numbering: the segment before is the parent or lies below the previous sibling.
        u = v - 1
        while u >= 0 and u != p:
            if forest.parent_V[u] == p:
                assert last_child[p] == u
                break
            u = forest.parent_V[u]
        if p in last_child:
            assert below[last_child[p]] >= below[v], "largest subtree first"
        last_child[p] = v
    assert forest.depth_V.tolist() == depth


def test_prefixes_and_duplicates_do_not_cut():
    _, _, forest = forest_of([[1, 2, 3, 4], [1, 2], [1, 2], [1, 2, 3, 4], [1]])
    assert forest.num_segments == 1 and forest.length_V.tolist() == [4]
    assert forest.end_position_N.tolist() == [1, 2, 2, 4, 4] and forest.end_segment_N.tolist() == [0] * 5


def test_roots_and_one_token_segments():
    _, _, forest = forest_of([[5], [1, 2], [1, 3], [1, 4, 4]])
    assert forest.parent_V.tolist() == [-1, 0, 0, 0, -1]
    assert forest.length_V.tolist() == [1, 2, 1, 1, 1]


@pytest.mark.parametrize(
    ("length", "lcp", "message"),
    [
        ([3, 0], [0, 0], "trajectory 1 has no tokens"),
        ([3, 2], [0], "equal in size"),
        ([3, 2], [0, 3], r"lcp_N\[1\] = 3"),
        ([3, 2], [0, 2], r"lcp_N\[1\] = 2"),
    ],
)
def test_forest_refusals(length, lcp, message):
    with pytest.raises(ValueError, match=message):
        build_forest(np.array(length), np.array(lcp))


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("dp_degree", (1, 2, 3))
def test_partition_is_the_contiguous_optimum(seed, dp_degree):
    rng = np.random.default_rng(1000 + seed)
    sequences = random_sequences(rng, int(rng.integers(3, 10)), chunk=4, vocabulary=2)
    ordered, lcp, _ = forest_of(sequences)
    length = np.array([len(s) for s in ordered])
    n = len(ordered)
    capacity = int(length.max() + rng.integers(0, 12))
    sizes = [[compact_size(ordered[lo:hi]) if hi > lo else 0 for hi in range(n + 1)] for lo in range(n + 1)]
    best = contiguous_optimum(sizes, n, capacity, dp_degree)
    if best is None:
        with pytest.raises(ValueError, match="no contiguous partition"):
            contiguous_partition(length, lcp, capacity, dp_degree)
        return
    partition = contiguous_partition(length, lcp, capacity, dp_degree)
    bound = partition.bound_K1.tolist()
    assert bound[0] == 0 and bound[-1] == n and partition.num_groups % dp_degree == 0
    assert partition.rows_K.tolist() == [sizes[lo][hi] for lo, hi in itertools.pairwise(bound)]
    assert partition.rows_K.max() <= capacity and partition.rows_K.min() > 0
    assert partition.rows_K.sum() == best
    assert sorted(partition.group_SD.reshape(-1).tolist()) == list(range(partition.num_groups))
    rows = partition.rows_K[partition.group_SD]
    assert (rows[:-1].min(axis=1) >= rows[1:].max(axis=1)).all(), "slots take groups in falling size"
    assert partition.objective == (rows.sum(), rows.max(axis=1).sum(), rows.sum(axis=0).max())


def test_partition_prefers_equal_slots_among_equal_totals():
    # No sharing at all: every count costs the same, so the sum of slot maxima decides. Any split of four into two
    # groups on two replicas leaves a maximum of at least 7; four groups in two slots reach 6 + 1.
    partition = contiguous_partition(np.array([6, 6, 1, 1]), np.zeros(4, np.int64), 100, 2)
    assert partition.objective[:2] == (14, 7)
    assert sorted(partition.rows_K[partition.group_SD].sum(axis=0).tolist()) == [7, 7]


def test_heavier_groups_go_to_the_replica_with_less_work():
    partition = contiguous_partition(np.array([9, 8, 3, 1]), np.zeros(4, np.int64), 9, 2)
    assert partition.rows_K[partition.group_SD].tolist() == [[9, 8], [1, 3]]


@pytest.mark.parametrize(
    ("length", "capacity", "dp_degree", "message"),
    [
        ([3, 9], 8, 1, r"trajectory 41 has 9 tokens, more than capacity 8"),
        ([3, 3], 8, 3, r"2 trajectories cannot give each of 3 replicas one"),
        ([3, 3], 0, 1, "must be at least 1"),
        ([3, 3], 8, 0, "must be at least 1"),
        ([5, 5, 5], 8, 2, "no contiguous partition"),
    ],
)
def test_partition_refusals(length, capacity, dp_degree, message):
    with pytest.raises(ValueError, match=message):
        contiguous_partition(
            np.array(length), np.zeros(len(length), np.int64), capacity, dp_degree, index_N=np.array([7, 41, 3])
        )
