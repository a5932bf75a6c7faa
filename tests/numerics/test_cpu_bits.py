"""CPU backends give a row the same bits whatever else is in the call and however many threads the process has."""

import pytest
import torch

from harts_titan.ops.attention import tree_attention
from harts_titan.ops.kda import kda
from harts_titan.ops.short_conv import tree_short_conv
from tests.numerics.ops_cases import TreeCase, kda_inputs, packed, random_case, relative, taps_of


@pytest.fixture(params=[1, 2, 3, 4])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def one_thread(run):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    result = run()
    torch.set_num_threads(before)
    return result


# Head counts and dimensions that fill no SIMD vector, chunk sizes that are no multiple of four.
SHAPES = [(16, 1, 12, 12), (64, 1, 12, 5), (16, 3, 20, 20), (64, 3, 20, 16), (7, 3, 5, 9), (64, 16, 16, 16)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("chunk_size, heads, key, value", SHAPES)
def test_kda_rows_of_a_long_forest(chunk_size, heads, key, value, dtype, threads):
    # More chunks than one group holds, so that a trajectory's chunks lie at other places of a group in each packing.
    case = random_case(300 + chunk_size, chunk_size, 60)
    inputs = kda_inputs(case.num_rows, heads=heads, key=key, value=value, seed=heads, dtype=dtype)
    o, exported = kda(*inputs, case.compact())
    assert torch.get_num_threads() == threads
    o_single, exported_single = one_thread(lambda: kda(*inputs, case.compact()))
    assert torch.equal(o, o_single) and torch.equal(exported, exported_single)

    paths = [case.rows(v) for v in case.leaves]
    for order in (paths, paths[::-1]):
        rows = torch.cat(order)
        o_packed, _ = kda(*(x[rows] for x in inputs[:5]), *inputs[5:], packed([len(p) for p in order], chunk_size))
        assert torch.equal(o[rows], o_packed)
    for path in paths[:: max(len(paths) // 6, 1)]:
        path = path[: 1 + len(path) * 2 // 3]
        alone, _ = kda(*(x[path] for x in inputs[:5]), *inputs[5:], packed([len(path)], chunk_size))
        assert torch.equal(o[path], alone)


@pytest.mark.parametrize("lower_bound", [-0.01, -5.0, -10.0, -50.0, -1000.0])
def test_kda_of_any_lower_bound_matches_the_recurrence(lower_bound):
    """From one block of pairs for the whole chunk down to one block per row."""
    case = random_case(5, 72, 8)
    sequences = case.compact()
    inputs = kda_inputs(case.num_rows, heads=2, key=6, value=5, seed=3)
    results = []
    for backend in ("reference", "recurrent"):
        leaves = [x.clone().requires_grad_() for x in inputs]
        o, exported = kda(*leaves, sequences, lower_bound=lower_bound, backend=backend)
        loss = (o * torch.linspace(-1, 1, o.numel()).view_as(o)).sum() + exported.square().sum()
        results.append((o, exported, *torch.autograd.grad(loss, leaves)))
    assert sequences.num_exports
    for got, want in zip(*results):
        assert relative(got, want) < 1e-10


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [1, 5, 12, 640])
def test_short_convolution_of_any_number_of_rows(width, dtype, threads):
    g = torch.Generator().manual_seed(width)
    x, weight = torch.randn(331, width, generator=g, dtype=dtype), torch.randn(width, 4, generator=g, dtype=dtype)
    taps = taps_of(torch.arange(331) - 1, 4)
    whole = one_thread(lambda: tree_short_conv(x, weight, taps))
    for num_rows in [*range(1, 70), 200, 330, 331]:
        assert torch.equal(tree_short_conv(x[:num_rows], weight, taps[:num_rows]), whole[:num_rows]), num_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("heads, dim", [(1, 12), (3, 20), (2, 16)])
def test_attention_of_a_path_and_of_the_forest(heads, dim, dtype, threads):
    case = random_case(7, 16, 20)
    g = torch.Generator().manual_seed(heads)
    q, k, v = (torch.randn(case.num_rows, heads, dim, generator=g, dtype=dtype) for _ in range(3))
    o = tree_attention(q, k, v, case.mask(), scale=0.3, backend="path")
    assert torch.equal(o, one_thread(lambda: tree_attention(q, k, v, case.mask(), scale=0.3, backend="path")))
    for leaf in case.leaves:
        path = case.rows(leaf)
        single = TreeCase([(-1, len(path))], 16).mask()
        assert torch.equal(o[path], tree_attention(q[path], k[path], v[path], single, scale=0.3, backend="path"))
