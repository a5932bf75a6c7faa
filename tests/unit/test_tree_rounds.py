"""plan_rounds against brute force, at scale, and its refusals."""

import time
from itertools import product

import numpy as np
import pytest
from tree_oracle import brute_force, forest_shapes, plan_error

from harts_titan.tree import plan_rounds


def check(parent, length, chunk, root_start):
    plan = plan_rounds(parent, length, chunk, root_start)
    fields = (plan.num_rounds, plan.round_of_segment, plan.continues_parent, plan.replay_tokens)
    code = plan_error(parent, length, chunk, root_start, *fields)
    case = f"parent {parent.tolist()} length {length.tolist()} chunk {chunk} root_start {root_start.tolist()}"
    assert code == 0, f"error {code}: {case}: {plan}"
    got = plan.num_rounds, int(plan.replay_tokens.sum())
    assert got == brute_force(parent, length, chunk, root_start), case


def test_shape_counts():
    # Forests of n nodes are rooted trees of n + 1 nodes.
    assert [len(forest_shapes(n)) for n in range(1, 8)] == [1, 2, 4, 9, 20, 48, 115]


@pytest.mark.parametrize("num_segments", range(1, 8))
def test_every_forest_and_every_length_at_chunk_two(num_segments):
    # With chunk 2, lengths 1..3 give every (entry offset, exit offset, crosses a boundary) there is.
    zero = np.zeros(num_segments, np.int64)
    for parent in forest_shapes(num_segments):
        parent = np.array(parent)
        for length in product((1, 2, 3), repeat=num_segments):
            check(parent, np.array(length), 2, zero)


@pytest.mark.parametrize("num_segments", range(1, 5))
def test_every_forest_and_every_length_at_chunk_three(num_segments):
    zero = np.zeros(num_segments, np.int64)
    for parent in forest_shapes(num_segments):
        parent = np.array(parent)
        for length in product(range(1, 6), repeat=num_segments):
            check(parent, np.array(length), 3, zero)


@pytest.mark.parametrize("chunk", (2, 3, 4))
def test_every_forest_with_drawn_lengths_and_starts(chunk):
    rng = np.random.default_rng(chunk)
    for num_segments in range(1, 8):
        for parent in forest_shapes(num_segments):
            parent = np.array(parent)
            for draw in range(12):
                length = rng.integers(1, 2 * chunk + 2, num_segments)
                if draw % 3 == 1:
                    length = rng.integers(1, 3, num_segments)
                if draw % 3 == 2:
                    length = chunk * rng.integers(1, 3, num_segments)
                root_start = np.where(parent < 0, rng.integers(0, 3 * chunk, num_segments) * (draw % 2), 0)
                check(parent, length, chunk, root_start)


def test_branches_at_every_offset_of_a_chunk_need_two_rounds():
    # One trunk of two chunks; a fork at every position of both.
    chunk, parent, length = 4, [-1], [1]
    trunk = 0
    for _ in range(2 * chunk):
        parent += [trunk, trunk]
        length += [1, 1]
        trunk = len(parent) - 1
    parent, length = np.array(parent), np.array(length)
    plan = plan_rounds(parent, length, chunk)
    assert plan.num_rounds == 2
    check_fields = (plan.round_of_segment, plan.continues_parent, plan.replay_tokens)
    assert plan_error(parent, length, chunk, np.zeros_like(parent), 2, *check_fields) == 0


def deep_forest(rng, n):
    """A long spine with hanging combs: depth and width at once."""
    parent = np.empty(n, np.int64)
    parent[0] = -1
    for v in range(1, n):
        parent[v] = v - 1 if rng.random() < 0.7 else rng.integers(max(0, v - 50), v)
    return parent


@pytest.mark.parametrize("shape", ("wide", "deep", "comb", "random"))
def test_hundred_thousand_segments_in_a_fifth_of_a_second(shape):
    n, rng = 100_000, np.random.default_rng(0)
    parent = {
        "wide": lambda: np.where(np.arange(n) == 0, -1, 0),
        "deep": lambda: np.arange(n) - 1,
        "comb": lambda: deep_forest(rng, n),
        "random": lambda: np.array([-1] + [int(rng.integers(0, v)) for v in range(1, n)]),
    }[shape]()
    length = rng.integers(1, 200, n)
    plan_rounds(parent[:5], length[:5], 64)
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        plan = plan_rounds(parent, length, 64)
        seconds.append(time.perf_counter() - begin)
    assert min(seconds) < 0.2, seconds
    zero = np.zeros_like(parent)
    fields = (plan.num_rounds, plan.round_of_segment, plan.continues_parent, plan.replay_tokens)
    assert plan_error(parent, length, 64, zero, *fields) == 0


def test_empty_forest():
    plan = plan_rounds(np.zeros(0, np.int64), np.zeros(0, np.int64), 4)
    assert plan.num_rounds == 0 and plan.round_of_segment.size == 0


@pytest.mark.parametrize(
    ("parent", "length", "chunk", "root_start", "message"),
    [
        ([1, -1], [1, 1], 4, None, r"parent\[0\] is 1"),
        ([-1, -2], [1, 1], 4, None, r"parent\[1\] is -2"),
        ([-1, 1], [1, 1], 4, None, r"parent\[1\] is 1"),
        ([-1, 0], [1, 0], 4, None, r"length\[1\] is 0"),
        ([-1, 0], [1], 4, None, "equal 1-D sizes"),
        ([-1], [1], 0, None, "chunk_size is 0"),
        ([-1, 0], [1, 1], 4, [0, 3], r"root_start\[1\] is 3"),
        ([-1], [1], 4, [-1], r"root_start\[0\] is -1"),
    ],
)
def test_refusals(parent, length, chunk, root_start, message):
    start = None if root_start is None else np.array(root_start)
    with pytest.raises(ValueError, match=message):
        plan_rounds(np.array(parent), np.array(length), chunk, start)
