"""fa4's tables, autograd and custom ops without flash-attn-4: its two entry points are replaced by dense PyTorch that
looks at nothing but what the kernel would be given."""

import dataclasses
import re
import sys
import threading
import types

import numpy as np
import pytest
import torch
import torch._dynamo.testing

from harts_titan.models.common.tree_inputs import tree_mask
from harts_titan.ops.attention.reference import tree_attention_dense
from tests.numerics import kernel_checks as checks


class _BlockSparse:
    def __init__(self, mask_count, mask_index, full_count, full_index, block_size):
        self.partial, self.full, self.block_size = (mask_count, mask_index), (full_count, full_index), block_size


def _visible(blocks, aux, rows, columns, transposed):
    """What the kernel computes: whole full tiles, the element mask in partial ones, nothing elsewhere."""
    if transposed:
        (words,) = aux
        assert words.dtype == torch.int64
        tin = words >> 32
        tout = tin + (words & 0x7FFFFFFF)
    else:
        tin, tout = aux
    number = tin[columns - rows :, None]
    element = (tin <= number) & (number < tout)
    visible = torch.zeros(rows, columns, dtype=torch.bool)
    q_size, kv_size = blocks.block_size
    for (count, index), tile in ((blocks.partial, element), (blocks.full, torch.ones_like(element))):
        assert count.dtype == index.dtype == torch.int32 and count.shape == index.shape[:3]
        for i in range(count.shape[2]):
            listed = index[0, 0, i, : count[0, 0, i]].tolist()
            assert listed == sorted(set(listed))
            for j in listed:
                q, kv = (j, i) if transposed else (i, j)
                where = slice(q * q_size, (q + 1) * q_size), slice(kv * kv_size, (kv + 1) * kv_size)
                visible[where] = tile[where]
    return visible


def _scores(q, k, visible, scale):
    scores = torch.einsum("qhk,yhk->hqy", q[0].double(), k[0].double()) * scale
    return scores.masked_fill(~visible, -torch.inf)


@dataclasses.dataclass
class _Params:
    num_block: int
    cluster_shape_mn: tuple[int, int] = (1, 1)


class _Scheduler:
    """Programs in rising order, as the package has them."""

    Params = _Params

    def __init__(self, num_block, at, cluster=(1, 1)):
        self.params, self.at = _Params(num_block, cluster), at

    def get_current_work(self, *, loc=None, ip=None):
        return _Work((self.at, 0, 0, 0), True)


class _Work:
    def __init__(self, tile_idx, is_valid_tile):
        self.tile_idx, self.is_valid_tile = tile_idx, is_valid_tile


def _order(cluster=(1, 1)):
    return [_Scheduler(5, i, cluster).get_current_work().tile_idx[0] for i in range(5)]


def _forward(q, k, v, *, softmax_scale, mask_mod, aux_tensors, block_sparse_tensors, return_lse):
    assert _order() == [4, 3, 2, 1, 0]
    scores = _scores(q, k, _visible(block_sparse_tensors, aux_tensors, q.shape[1], k.shape[1], False), softmax_scale)
    out = torch.einsum("hqy,yhv->qhv", scores.softmax(-1), v[0].double()).to(v.dtype)
    return out[None], scores.logsumexp(-1).float()[None], None, None, None


def _backward(q, k, v, out, dout, lse, softmax_scale, *, mask_mod, aux_tensors, block_sparse_tensors):
    assert _order() == [0, 1, 2, 3, 4]
    visible = _visible(block_sparse_tensors, aux_tensors, q.shape[1], k.shape[1], True)
    weights = (_scores(q, k, visible, softmax_scale) - lse[0][..., None].double()).exp()
    dv = torch.einsum("hqy,qhv->yhv", weights, dout[0].double())
    dweights = torch.einsum("qhv,yhv->hqy", dout[0].double(), v[0].double())
    dscores = weights * (dweights - (dout[0] * out[0]).double().sum(-1).T[..., None]) * softmax_scale
    dq = torch.einsum("hqy,yhk->qhk", dscores, k[0].double())
    dk = torch.einsum("hqy,qhk->yhk", dscores, q[0].double())
    return dq.to(q.dtype)[None], dk.to(k.dtype)[None], dv.to(v.dtype)[None]


@pytest.fixture(scope="module")
def fa4():
    """The module with its optional packages replaced, on a pretended compute capability 9.0."""
    patch = pytest.MonkeyPatch()
    cute = types.SimpleNamespace(jit=lambda f: f)
    modules = {
        "cutlass": types.SimpleNamespace(cute=cute, Int32=int, min=min),
        "cutlass.cute": cute,
        "flash_attn": types.ModuleType("flash_attn"),
        "flash_attn.cute": types.SimpleNamespace(
            utils=None,
            tile_scheduler=types.SimpleNamespace(SingleTileScheduler=_Scheduler, WorkTileInfo=_Work),
        ),
        "flash_attn.cute.block_sparsity": types.SimpleNamespace(BlockSparseTensorsTorch=_BlockSparse),
        "flash_attn.cute.interface": types.SimpleNamespace(_flash_attn_fwd=_forward, _flash_attn_bwd=_backward),
    }
    loaded = sys.modules.pop("harts_titan.ops.attention.fa4", None)
    if loaded is not None:
        pytest.skip("the real flash-attn-4 backend is loaded in this process")
    for name, module in modules.items():
        patch.setitem(sys.modules, name, module)
    patch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    patch.setattr(torch.cuda, "device", lambda _: torch.autograd.profiler.record_function("device"))
    import harts_titan.ops.attention.fa4 as module

    yield module
    patch.undo()
    del sys.modules["harts_titan.ops.attention.fa4"], sys.modules["harts_titan.ops.attention.fa4_package"]


@pytest.mark.parametrize("key_dim", [192, 64])
@pytest.mark.parametrize("seed", range(3))
def test_tables_give_dense_attention(fa4, seed, key_dim):
    layout = checks.layout_of(checks.random_segments(np.random.default_rng(seed), 64, 12), 64)
    setting = checks.Setting("cpu", torch.float16, num_heads=2, key_dim=key_dim, value_dim=32)
    for mask in (
        tree_mask(layout, "cpu"),
        checks.mask_depth_first(layout, "cpu")[0],
        checks.mask_attached(layout, "cpu"),
    ):
        result = checks.check_attention(mask, setting, fa4.tree_attention_fa4)
        assert result["dq"][0] < 1e-3


def test_full_tiles_are_used(fa4):
    layout = checks.layout_of([(-1, 700), (0, 300), (0, 200)], 64)
    mask = tree_mask(layout, "cpu")
    tables = fa4.prepare_tables(mask, 192)
    assert tables.sizes == ((128, 128), (128, 96))
    forward, backward = tables.views(mask)
    assert forward[2].sum() > forward[0].sum()
    assert backward[2].sum() > 0


def test_tables_are_built_once(fa4):
    mask = tree_mask(checks.layout_of([(-1, 70), (0, 30), (0, 20)], 64), "cpu")
    assert fa4.prepare_tables(mask, 192) is fa4.prepare_tables(mask, 192)
    assert fa4.prepare_tables(mask, 64).sizes.backward == (128, 128)


def test_compiles_without_breaks(fa4):
    """Tables prepared before the call; rows and blocks change without another graph."""
    setting = checks.Setting("cpu", torch.float16, num_heads=2, key_dim=64, value_dim=32)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(fa4.tree_attention_fa4, fullgraph=True, dynamic=True, backend=counter)
    graphs = []
    for segments in ([(-1, 400), (0, 290), (0, 300)], [(-1, 500), (0, 300), (0, 700)]):
        mask = tree_mask(checks.layout_of(segments, 64), "cpu")
        fa4.prepare_tables(mask, 64)
        x = checks.attention_inputs(mask, setting)
        ours, theirs = (f(*x, mask, 0.125) for f in (compiled, tree_attention_dense))
        torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-3)
        torch.autograd.grad(ours.sum(), x)
        graphs.append(counter.frame_count)
    assert graphs[1] == graphs[0]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda q, k, v: (q[:-1], k, v), "num_external_rows"),
        (lambda q, k, v: (q.float(), k.float(), v.float()), "bfloat16"),
        (lambda q, k, v: (q, k[..., :32], v), "do not fit"),
    ],
)
def test_refuses(fa4, change, word):
    mask = tree_mask(checks.layout_of([(-1, 70), (0, 30), (0, 20)], 64), "cpu")
    x = checks.attention_inputs(mask, checks.Setting("cpu", torch.float16, key_dim=64, value_dim=32))
    with pytest.raises(ValueError, match=word):
        fa4.tree_attention_fa4(*change(*(t.detach() for t in x)), mask, 0.1)


def test_other_devices_are_refused(fa4):
    assert fa4.tile_sizes(192, (10, 0)).backward[1] == 256
    with pytest.raises(ValueError, match="flex"):
        fa4.tile_sizes(128, (8, 0))
    with pytest.raises(ValueError, match="192"):
        fa4.tile_sizes(256, (9, 0))


@pytest.fixture
def package(fa4):
    return sys.modules["harts_titan.ops.attention.fa4_package"]


def test_order_is_restored_after_an_error(package):
    with pytest.raises(KeyError), package.last_queries_first():
        assert _order() == [4, 3, 2, 1, 0]
        raise KeyError
    assert _order() == [0, 1, 2, 3, 4]


def test_programs_in_clusters_keep_their_order(package):
    with package.last_queries_first():
        assert _order(cluster=(2, 1)) == [0, 1, 2, 3, 4]


def test_order_with_several_threads(package):
    """Swaps that overlap would leave the reversed order behind, or reverse it twice."""
    inside, leave, orders = threading.Event(), threading.Event(), []

    def first():
        with package.last_queries_first():
            inside.set()
            leave.wait(10)

    def second():
        with package.last_queries_first():
            orders.append(_order())

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    threads[0].start()
    inside.wait(10)
    threads[1].start()
    threads[1].join(0.2)
    leave.set()
    for thread in threads:
        thread.join(10)
    assert orders == [[4, 3, 2, 1, 0]] and _order() == [0, 1, 2, 3, 4]


class _OtherArguments(_Scheduler):
    def get_current_work(self, at, *, loc=None, ip=None):
        raise NotImplementedError


class _OtherParams(_Scheduler):
    Params = types.SimpleNamespace


@pytest.mark.parametrize(
    ("scheduler", "words"),
    [
        (_OtherArguments, "takes \\('self', 'at', 'loc', 'ip'\\)"),
        (_OtherParams, "no cluster_shape_mn, num_block"),
        (None, "does not exist"),
    ],
)
def test_other_schedulers_are_left_alone(package, monkeypatch, scheduler, words):
    monkeypatch.setattr(package.tile_scheduler, "SingleTileScheduler", scheduler)
    problem = package.order_problem()
    assert re.search(words, problem)
    monkeypatch.setattr(package, "_FITS", problem is None)
    before = vars(scheduler or object).get("get_current_work")
    with package.last_queries_first():
        assert vars(scheduler or object).get("get_current_work") is before


def test_other_entry_points_are_an_import_error(package, monkeypatch):
    monkeypatch.setattr(package, "_USED", {lambda q, *, mask_mod: None: ("mask_mod", "aux_tensors")})
    with pytest.raises(ImportError, match=f"takes no aux_tensors; .*{package.WRITTEN_FOR}"):
        package.check_entry_points()
    monkeypatch.setattr(package, "_USED", {})
    monkeypatch.setattr(package, "_flash_attn_bwd", _forward)
    with pytest.raises(ImportError, match="begins with"):
        package.check_entry_points()
