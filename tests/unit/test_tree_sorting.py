"""sort_trajectories against Python's sort of tuples: order, common prefixes, blocks, threads, worst cases."""

import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tree_oracle import flat

from harts_titan.tree import neighbour_lcp, sort_trajectories, sorting


def naive_lcp(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def check(sequences):
    tokens, offsets = flat(sequences)
    before = tokens.copy()
    order, lcp = sort_trajectories(tokens, offsets)
    keys = [tuple(np.asarray(s).tolist()) for s in sequences]
    # Python's sort is stable, and a tuple sorts before its extensions.
    expected = sorted(range(len(keys)), key=keys.__getitem__)
    assert order.dtype == lcp.dtype == np.int64
    assert order.tolist() == expected
    common = [0] + [naive_lcp(keys[a], keys[b]) for a, b in itertools.pairwise(expected)]
    assert lcp.tolist() == common == neighbour_lcp(tokens, offsets, order).tolist()
    assert np.array_equal(tokens, before)


@pytest.fixture(params=["one thread", "two threads"], autouse=True)
def threads(request):
    """Run every test on both paths, whatever its size."""
    patch = pytest.MonkeyPatch()
    patch.setattr(sorting, "_THREAD_TOKENS", 0 if request.param == "two threads" else 1 << 62)
    yield
    patch.undo()


@st.composite
def sequences(draw):
    """Trajectories that extend, cut or repeat earlier ones; common prefixes reach past several blocks."""
    top = draw(st.sampled_from([1, 2, 300, np.iinfo(np.int32).max]))
    out = []
    for _ in range(draw(st.integers(1, 24))):
        base = out[draw(st.integers(0, len(out) - 1))] if out else []
        cut = draw(st.integers(0, len(base)))
        run = [draw(st.integers(0, top))] * draw(st.sampled_from([0, 0, 1, 63, 64, 65, 130]))
        tail = draw(st.lists(st.integers(0, top), max_size=5))
        out.append((base[:cut] + run + tail) or [draw(st.integers(0, top))])
    return out


@settings(max_examples=400, deadline=None)
@given(sequences())
def test_equals_python_sort(sequences):
    check(sequences)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=4), min_size=1, max_size=60))
def test_short_trajectories_with_many_ties(sequences):
    check(sequences)


@pytest.mark.parametrize("at", [0, 1, 62, 63, 64, 65, 127, 128, 199])
def test_difference_at_every_place_of_a_block(at):
    base = np.arange(200)
    larger = base.copy()
    larger[at] += 1
    check([larger, base, base[:at] if at else base, base[: at + 1], larger])


@pytest.mark.parametrize("bit", [0, 7, 8, 15, 16, 30])
def test_ids_compare_as_integers(bit):
    check([[5] * 70 + [1 << bit], [5] * 70 + [(1 << bit) - 1], [1 << bit], [(1 << bit) - 1], [2**31 - 1]])


@pytest.mark.parametrize(
    "sequences",
    [
        [[7]],
        [[2, 1, 0]],
        [[3], [1], [2], [1]],
        [[4, 4, 4]] * 9,
        [list(range(i, i + 90)) for i in range(20, 0, -1)],
        [[1] * n for n in range(200, 0, -3)],
        [[0] * n + [9] for n in range(150)],
    ],
    ids=["single", "single path", "one token", "equal", "no sharing", "prefix chain", "comb"],
)
def test_named_cases(sequences):
    check(sequences)


def test_trajectories_of_very_different_length():
    rng = np.random.default_rng(0)
    # The cut into halves by tokens falls into the long one, whether it comes first, last or between.
    long = rng.integers(0, 3, 5000)
    short = [rng.integers(0, 3, rng.integers(1, 9)) for _ in range(20)]
    for place in (0, 10, 20):
        check([*short[:place], long, *short[place:]])


@pytest.mark.parametrize("num_trajectories", [2, 3, 5, 64, 65, 1000])
def test_number_of_runs(num_trajectories):
    rng = np.random.default_rng(num_trajectories)
    check([rng.integers(0, 2, rng.integers(1, 12)) for _ in range(num_trajectories)])


def test_offsets_into_a_larger_array():
    tokens = np.array([9, 9, 3, 1, 3, 0, 9], np.int32)
    order, lcp = sort_trajectories(tokens, np.array([2, 4, 6]))
    assert order.tolist() == [1, 0] and lcp.tolist() == [0, 1]


def test_equal_and_nearly_equal_long_trajectories_are_not_quadratic():
    tokens = np.zeros((2000, 2000), np.int32)
    offsets = np.arange(2001) * 2000
    sort_trajectories(tokens[:2].reshape(-1), offsets[:3])
    started = time.process_time()
    order, lcp = sort_trajectories(tokens.reshape(-1), offsets)
    assert np.array_equal(order, np.arange(2000)) and (lcp[1:] == 2000).all()
    tokens[:, -1] = np.arange(2000)[::-1]
    order, lcp = sort_trajectories(tokens.reshape(-1), offsets)
    assert np.array_equal(order, np.arange(2000)[::-1]) and (lcp[1:] == 1999).all()
    # 4M tokens are read once or twice each: milliseconds. Comparing all pairs would read 4G of them.
    assert time.process_time() - started < 0.5


def test_nothing_of_the_size_of_the_tokens_is_copied():
    import tracemalloc

    tokens, offsets = np.zeros(4_000_000, np.int32), np.arange(401) * 10_000
    sort_trajectories(tokens, offsets)
    tracemalloc.start()
    sort_trajectories(tokens, offsets)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200_000
