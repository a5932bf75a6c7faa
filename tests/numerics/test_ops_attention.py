import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from harts_titan.ops.attention import TreeMask, block_tables, tree_attention
from harts_titan.ops.attention.reference import QUERY_TILE
from tests.numerics.ops_cases import TreeCase, random_case, relative

HEADS, KEY, VALUE, SCALE = 2, 6, 4, 0.37


def qkv(num_rows, dtype=torch.float64, seed=0, num_external_rows=0):
    g = torch.Generator().manual_seed(seed)
    shapes = ((num_rows - num_external_rows, HEADS, KEY), (num_rows, HEADS, KEY), (num_rows, HEADS, VALUE))
    return [torch.randn(*s, generator=g, dtype=torch.float64).to(dtype) for s in shapes]


def on_paths(q, k, v, case):
    """Ordinary causal attention, written out, on every root-to-leaf path; a row's value from its first leaf."""
    rows_out = {}
    for leaf in case.leaves:
        rows = case.rows(leaf)
        scores = torch.einsum("qhd,khd->hqk", q[rows], k[rows]) * SCALE
        causal = torch.arange(len(rows))[:, None] >= torch.arange(len(rows))
        weights = torch.where(causal, scores, -torch.inf).exp()
        out = torch.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdim=True), v[rows])
        for r, value in zip(rows.tolist(), out):
            rows_out.setdefault(r, value)
    return torch.stack([rows_out[r] for r in range(case.num_rows)])


@pytest.mark.parametrize("backend", ["dense", "path"])
@pytest.mark.parametrize("seed", range(5))
def test_forward_and_gradients_match_attention_on_each_path(seed, backend):
    case = random_case(seed, (4, 16, 16, 32, 64)[seed], 9)
    inputs = [x.requires_grad_() for x in qkv(case.num_rows)]
    o = tree_attention(*inputs, case.mask(), scale=SCALE, backend=backend)
    want = on_paths(*inputs, case)
    do = torch.randn(o.shape, dtype=torch.float64)
    assert relative(o, want) < 1e-12
    for a, b in zip(torch.autograd.grad(o, inputs, do), torch.autograd.grad(want, inputs, do)):
        assert relative(a, b) < 1e-11


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", range(4))
def test_path_rows_do_not_depend_on_other_branches(seed, dtype):
    case = random_case(50 + seed, 32, 10)
    inputs = qkv(case.num_rows, dtype)
    o = tree_attention(*inputs, case.mask(), scale=SCALE, backend="path")
    for leaf in case.leaves:
        rows = case.rows(leaf)
        alone = TreeCase([(-1, len(rows))], 32).mask()
        assert torch.equal(o[rows], tree_attention(*(x[rows] for x in inputs), alone, scale=SCALE, backend="path"))


@pytest.mark.parametrize("backend", ["dense", "path"])
def test_a_branch_cannot_touch_the_others(backend):
    case = random_case(7, 16, 9)
    inputs, rows = qkv(case.num_rows, torch.float32), case.own(case.leaves[0])
    others = torch.ones(case.num_rows, dtype=torch.bool)
    others[rows] = False
    changed = [x.clone() for x in inputs]
    for x in changed:
        x[rows] = 5.0
    before, after = (tree_attention(*x, case.mask(), scale=SCALE, backend=backend) for x in (inputs, changed))
    assert torch.equal(before[others], after[others])


def split(case, external_segments, own_order=None):
    """The case cut into a producer's rows and a consumer hanging on them: rows of the external segments first."""
    own = [v for v in range(len(case.segments)) if v not in external_segments]
    own.sort(key=lambda v: case.seg_row[v] if own_order is None else own_order[v])
    order = torch.cat([case.own(v) for v in sorted(external_segments)] + [case.own(v) for v in own])
    place = torch.empty(case.num_rows, dtype=torch.long)
    place[order] = torch.arange(case.num_rows)
    num_external = sum(case.segments[v][1] for v in external_segments)
    tin, tout = case.intervals()
    index = {v: i for i, v in enumerate(own)}
    parents = [case.segments[v][0] for v in own]
    mask = TreeMask.build(
        tin=tin[order],
        tout=tout[order],
        seg_parent=[index.get(p, -1) for p in parents],
        seg_start=[case.start[v] for v in own],
        seg_length=[case.segments[v][1] for v in own],
        seg_row=[int(place[case.seg_row[v]]) - num_external for v in own],
        seg_attach=[int(place[case.own(p)[-1]]) if p in external_segments else -1 for p in parents],
        num_external_rows=num_external,
    )
    return mask, order, num_external


@pytest.mark.parametrize("backend", ["dense", "path"])
def test_external_ancestors(backend):
    case = TreeCase([(-1, 40), (0, 9), (0, 20), (1, 17), (2, 33), (2, 1), (1, 2)], 16)
    mask, order, num_external = split(case, {0, 1, 2})
    q, k, v = (x.requires_grad_() for x in qkv(case.num_rows))
    o = tree_attention(q[order][num_external:], k[order], v[order], mask, scale=SCALE, backend=backend)
    want = on_paths(q, k, v, case)[order][num_external:]
    do = torch.randn(o.shape, dtype=torch.float64)
    assert relative(o, want) < 1e-12
    for a, b in zip(torch.autograd.grad(o, (q, k, v), do), torch.autograd.grad(want, (q, k, v), do)):
        assert relative(a, b) < 1e-11


def brute_force(mask, q_block, kv_block):
    tin, tout = mask.tin_Y.long(), mask.tout_Y.long()
    q = tin[mask.num_external_rows :, None]
    visible = (tin <= q) & (q < tout)
    num_q, num_kv = -(-visible.shape[0] // q_block), -(-visible.shape[1] // kv_block)
    partial, full = (torch.zeros(num_q, num_kv, dtype=torch.bool) for _ in range(2))
    for i in range(num_q):
        for j in range(num_kv):
            tile = visible[i * q_block : (i + 1) * q_block, j * kv_block : (j + 1) * kv_block]
            full[i, j] = tile.all() and tile.numel() == q_block * kv_block
            partial[i, j] = tile.any() and not full[i, j]
    return partial, full


def dense_of(count, indices):
    dense = torch.zeros(indices.shape[-2:], dtype=torch.bool)
    for i, n in enumerate(count[0, 0].tolist()):
        listed = indices[0, 0, i, :n]
        assert (listed.diff() > 0).all()
        dense[i, listed.long()] = True
    return dense


@pytest.mark.parametrize("blocks", [(8, 8), (16, 12), (5, 7), (128, 96)])
@pytest.mark.parametrize("seed", range(6))
def test_block_tables_equal_brute_force(seed, blocks):
    case = random_case(seed, (2, 4, 16, 16, 32, 64)[seed], 14)
    masks = [case.mask()]
    if len(case.segments) > 3:
        masks.append(split(case, set(case.path_segments(max(range(4), key=lambda v: len(case.path_segments(v))))))[0])
    for mask in masks:
        tables = block_tables(mask, *blocks)
        partial, full = brute_force(mask, *blocks)
        assert all(t.dtype == torch.int32 for t in tables)
        assert torch.equal(dense_of(*tables[0:2]), partial)
        assert torch.equal(dense_of(*tables[2:4]), full)
        assert torch.equal(dense_of(*tables[4:6]), partial.t())
        assert torch.equal(dense_of(*tables[6:8]), full.t())
        assert block_tables(mask, *blocks) is tables


@st.composite
def forests(draw):
    """A mask with rows in any order of segments: roots above, in the middle and at the end of external paths."""
    count = draw(st.integers(1, 9))
    parents = [-1] + [draw(st.integers(-1, i - 1)) for i in range(1, count)]
    lengths = [draw(st.integers(1, 40)) for _ in range(count)]
    external = {v for v in range(count) if draw(st.integers(0, 3)) == 0}
    external = {v for v in external if all(p in external for p in ancestors(parents, v))}
    case = TreeCase(list(zip(parents, lengths)), 8)
    mask, _, _ = split(case, external, draw(st.permutations(range(count))))
    return mask


def ancestors(parents, v):
    while parents[v] >= 0:
        v = parents[v]
        yield v


@given(forests(), st.integers(1, 24), st.integers(1, 24))
@settings(max_examples=60, deadline=None)
def test_block_tables_of_any_forest_equal_brute_force(mask, q_block, kv_block):
    tables = block_tables(mask, q_block, kv_block)
    partial, full = brute_force(mask, q_block, kv_block)
    for at, dense in enumerate((partial, full, partial.t(), full.t())):
        assert torch.equal(dense_of(*tables[2 * at : 2 * at + 2]), dense)


@pytest.mark.parametrize("blocks", [(4, 4), (3, 5), (8, 2), (16, 16)])
def test_block_tables_of_roots_inside_external_segments(blocks):
    # External: rows 0-9 of one path, then 5 more below row 9; own roots hang on row 4, on row 14, and on nothing.
    mask = TreeMask.build(
        tin=[*range(5), *range(12, 17), *range(17, 22), *range(5, 12), *range(22, 28), *range(28, 31)],
        tout=[28] * 15 + [12] * 7 + [28] * 6 + [31] * 3,
        seg_parent=[-1, -1, -1],
        seg_start=[5, 15, 0],
        seg_length=[7, 6, 3],
        seg_row=[0, 7, 13],
        seg_attach=[4, 14, -1],
        num_external_rows=15,
    )
    tables = block_tables(mask, *blocks)
    partial, full = brute_force(mask, *blocks)
    for at, dense in enumerate((partial, full, partial.t(), full.t())):
        assert torch.equal(dense_of(*tables[2 * at : 2 * at + 2]), dense)
    x = qkv(31, num_external_rows=15)
    dense, path = (tree_attention(*x, mask, scale=SCALE, backend=b) for b in ("dense", "path"))
    assert relative(path, dense) < 1e-12


def test_block_tables_of_many_rows_take_no_quadratic_memory():
    n = 110_592
    segments = {"seg_parent": [-1], "seg_start": [0], "seg_length": [n], "seg_row": [0]}
    mask = TreeMask.build(tin=range(n), tout=[n] * n, **segments)
    tables = block_tables(mask, 128, 128)
    assert int(tables.kv_num_blocks.sum()) == n // 128
    assert int(tables.full_kv_num_blocks.sum()) == n // 128 * (n // 128 - 1) // 2


def test_no_rows_and_no_queries():
    empty = TreeMask.build(tin=[], tout=[], seg_parent=[], seg_start=[], seg_length=[], seg_row=[])
    assert block_tables(empty, 128, 128).kv_indices.shape == (1, 1, 0, 0)
    covered = TreeMask.build(
        tin=[0, 1], tout=[2, 2], seg_parent=[], seg_start=[], seg_length=[], seg_row=[], num_external_rows=2
    )
    for mask, rows in ((empty, 0), (covered, 2)):
        inputs = [x.requires_grad_() for x in qkv(rows, num_external_rows=rows)]
        o = tree_attention(*inputs, mask, scale=SCALE)
        o.sum().backward()
        assert o.shape == (0, HEADS, VALUE)
        assert all(x.grad is not None and x.grad.abs().sum() == 0 for x in inputs)


def test_bfloat16_and_tile_sized_paths():
    for length in (1, QUERY_TILE - 1, QUERY_TILE, QUERY_TILE + 1):
        case = TreeCase([(-1, length)], 16)
        inputs = qkv(length, torch.bfloat16)
        o = tree_attention(*inputs, case.mask(), scale=SCALE)
        assert o.dtype == torch.bfloat16
        assert relative(o, on_paths(*(x.double() for x in inputs), case)) < 2**-7


def test_wrong_inputs_are_refused():
    mask, (q, k, v) = TreeCase([(-1, 5)], 4).mask(), qkv(5)
    with pytest.raises(ValueError, match="own rows"):
        tree_attention(q[:4], k, v, mask, scale=SCALE)
    with pytest.raises(ValueError, match="path rows"):
        tree_attention(q, k[:4], v[:4], mask, scale=SCALE)
    with pytest.raises(ValueError, match="no backward on the CPU"):
        tree_attention(*(x.float().requires_grad_() for x in (q, k, v)), mask, scale=SCALE, backend="flex")
    good = {"tin": [0, 1, 2], "tout": [3, 2, 3]}
    good |= {"seg_parent": [-1, 0, 0], "seg_start": [0, 1, 1], "seg_length": [1, 1, 1]}
    TreeMask.build(**good, seg_row=[0, 1, 2])
    for change, message in (
        ({"seg_row": [0, 1, 1]}, "cover"),
        ({"seg_start": [0, 1, 2]}, "parent ends"),
        ({"tout": [3, 1, 3]}, "sees itself"),
        ({"seg_start": [1, 2, 2]}, "seg_attach"),
        ({"tout": [3, 2]}, "one entry per path row"),
        ({"seg_attach": [0, -1, -1]}, "does not exist"),
    ):
        with pytest.raises(ValueError, match=message):
            TreeMask.build(**{"seg_row": [0, 1, 2], **good, **change})


@pytest.mark.slow
def test_flex_matches_dense():
    case = random_case(4, 64, 12)
    mask, _, num_external = split(case, {0})
    g = torch.Generator().manual_seed(0)
    shapes = ((case.num_rows - num_external, 2, 24), (case.num_rows, 2, 24), (case.num_rows, 2, 16))
    inputs = [torch.randn(*s, generator=g) for s in shapes]
    flex, dense = (tree_attention(*inputs, mask, scale=SCALE, backend=b) for b in ("flex", "dense"))
    assert relative(flex, dense) < 1e-5
