"""Attention kernels under Triton's interpreter; ``test_triton_attention.py`` runs this as a process of its own."""

from __future__ import annotations

import sys

import numpy as np
import torch
import torch._dynamo.testing

import tests.numerics.kernel_checks as checks
import tests.numerics.triton_interpreter  # noqa: F401
from harts_titan.models.common.tree_inputs import tree_mask
from harts_titan.ops.attention import TreeMask, triton_op
from harts_titan.ops.attention.triton_op import Launch, prepare_tables, tree_attention_triton
from tests.numerics.interpreted_run import run_cases

HALF = checks.Setting("cpu", torch.float16, num_heads=2, key_dim=48, value_dim=32, chunk_size=16)
SINGLE = checks.Setting("cpu", torch.float32, num_heads=1, key_dim=16, value_dim=32, chunk_size=16)
SCALE = 0.2


def alone(length: int) -> TreeMask:
    """The mask of one trajectory."""
    segments = {"seg_parent": [-1], "seg_start": [0], "seg_length": [length], "seg_row": [0]}
    return TreeMask.build(tin=range(length), tout=[length] * length, **segments)


def same_bits(mask: TreeMask, layout, setting: checks.Setting, every: int = 1) -> None:
    """Outputs and gradients of q of trajectories, against their runs alone; and a second run."""
    x = checks.attention_inputs(mask, setting, seed=3)
    o = tree_attention_triton(*x, mask, SCALE)
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(2)).to(o.dtype)
    grads = torch.autograd.grad(o, x, do)
    again = torch.autograd.grad(tree_attention_triton(*x, mask, SCALE), x, do)
    assert all(torch.equal(a, b) for a, b in zip(grads, again)), "gradients differ between two runs"
    for rows in map(torch.from_numpy, checks.trajectories_of(layout)[::every]):
        single = [t.detach()[rows].requires_grad_() for t in x]
        o_alone = tree_attention_triton(*single, alone(len(rows)), SCALE)
        assert torch.equal(o_alone, o[rows]), "a trajectory alone gives other outputs"
        (dq,) = torch.autograd.grad(o_alone, single[:1], do[rows])
        assert torch.equal(dq, grads[0][rows]), "a trajectory alone gives another gradient of q"


def trees() -> dict[str, object]:
    result: dict[str, object] = {}
    for name, setting, count in (("float16", HALF, 7), ("float32", SINGLE, 6)):
        layout = checks.layout_of(checks.random_segments(np.random.default_rng(count), 16, count), 16)
        with checks.filled_allocations():
            result[name] = checks.check_attention(tree_mask(layout, "cpu"), setting, tree_attention_triton)
            same_bits(tree_mask(layout, "cpu"), layout, setting)
    return result


def forks_at_every_offset() -> dict[str, object]:
    """A trunk of 20 rows with a branch of two rows after each; tiles have 16."""
    segments, trunk = [(-1, 1)], 0
    for _ in range(19):
        segments += [(trunk, 2), (trunk, 1)]
        trunk = len(segments) - 1
    layout = checks.layout_of(segments, 16)
    checks.check_attention(tree_mask(layout, "cpu"), SINGLE, tree_attention_triton)
    same_bits(tree_mask(layout, "cpu"), layout, SINGLE, every=3)
    return {}


def other_orders() -> dict[str, object]:
    """Depth-first rows; external rows; descendants stored before their ancestors."""
    layout = checks.layout_of([(-1, 35), (0, 9), (0, 20), (1, 17), (2, 33), (2, 1), (1, 2)], 16)
    result: dict[str, object] = {}
    masks = {
        "depth_first": checks.mask_depth_first(layout, "cpu")[0],
        "attached": checks.mask_attached(layout, "cpu"),
        "backwards": TreeMask.build(
            tin=[*range(20, 29), *range(20)],
            tout=[29] * 9 + [29] * 20,
            seg_parent=[1, -1],
            seg_start=[20, 0],
            seg_length=[9, 20],
            seg_row=[0, 9],
        ),
        "two_producers": attached_twice(),
    }
    for name, mask in masks.items():
        with checks.filled_allocations():
            result[name] = checks.check_attention(mask, HALF, tree_attention_triton)
    return result


def attached_twice() -> TreeMask:
    """External rows of two segments; roots in the middle and at the end of them, and one that hangs nowhere."""
    return TreeMask.build(
        # External: rows 0-9 of one path, then 5 more below row 9; own roots hang on row 4, on row 14, and on nothing.
        tin=[*range(5), *range(12, 17), *range(17, 22), *range(5, 12), *range(22, 28), *range(28, 31)],
        tout=[28] * 10 + [28] * 5 + [12] * 7 + [28] * 6 + [31] * 3,
        seg_parent=[-1, -1, -1],
        seg_start=[5, 15, 0],
        seg_length=[7, 6, 3],
        seg_row=[0, 7, 13],
        seg_attach=[4, 14, -1],
        num_external_rows=15,
    )


def nothing_to_do() -> dict[str, object]:
    covered = TreeMask.build(
        tin=[0, 1], tout=[2, 2], seg_parent=[], seg_start=[], seg_length=[], seg_row=[], num_external_rows=2
    )
    x = checks.attention_inputs(covered, SINGLE)
    o = tree_attention_triton(*x, covered, SCALE)
    assert o.shape == (0, 1, 32)
    assert all((g == 0).all() for g in torch.autograd.grad(o.sum(), x))
    return {}


def views_in_place() -> dict[str, object]:
    """Slices of fused projections are read where they lie."""
    mask = alone(21)
    fused = torch.randn(21, 2, 16 + 16 + 32, requires_grad=True)
    q, k, v = fused.split((16, 16, 32), dim=2)
    o = tree_attention_triton(q, k, v, mask, SCALE)
    packed = tree_attention_triton(*(t.contiguous() for t in (q, k, v)), mask, SCALE)
    assert torch.equal(o, packed)
    assert torch.equal(*(torch.autograd.grad(t.square().sum(), fused, retain_graph=True)[0] for t in (o, packed)))
    return {}


def compiled() -> dict[str, object]:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    run = torch.compile(tree_attention_triton, fullgraph=True, dynamic=True, backend=counter)
    graphs = []
    for segments in ([(-1, 40), (0, 29), (0, 30)], [(-1, 50), (0, 30), (0, 7), (1, 5), (1, 4)]):
        mask = tree_mask(checks.layout_of(segments, 16), "cpu")
        prepare_tables(mask, torch.float32)
        x = checks.attention_inputs(mask, SINGLE)
        ours, theirs = (f(*x, mask, SCALE) for f in (run, tree_attention_triton))
        assert torch.equal(ours, theirs)
        torch.autograd.grad(ours.sum(), x)
        graphs.append(counter.frame_count)
    assert graphs[0] == graphs[1], graphs
    return {"graphs": graphs}


def unseen_rows_stay_unseen() -> dict[str, object]:
    """Tiles that a path fills in part are padded with row 0: whatever is there must not reach others."""
    layout = checks.layout_of([(-1, 20), (-1, 20)], 16)
    mask = tree_mask(layout, "cpu")
    first, second = checks.trajectories_of(layout)
    if first[0] != 0:
        first, second = second, first
    for setting in (HALF, SINGLE):
        x = [t.detach() for t in checks.attention_inputs(mask, setting)]
        for t in x:
            t[first] = float("nan")
        x = [t.requires_grad_() for t in x]
        o = tree_attention_triton(*x, mask, SCALE)
        for result in (o.detach(), *torch.autograd.grad(o, x, torch.ones_like(o))):
            assert result[second].isfinite().all() and result[first[0]].isnan().any()
    return {}


def refuses() -> dict[str, object]:
    mask = alone(5)
    for key, value, dtype, scale, word in (
        (24, 32, torch.float32, SCALE, "powers of two"),
        (16, 32, torch.float64, SCALE, "float32"),
        (16, 32, torch.float32, -SCALE, "positive"),
    ):
        x = checks.attention_inputs(mask, checks.Setting("cpu", dtype, num_heads=1, key_dim=key, value_dim=value))
        try:
            tree_attention_triton(*x, mask, scale)
        except ValueError as error:
            assert word in str(error), error
        else:
            raise AssertionError(f"K = {key}, V = {value}, {dtype}, scale {scale} was accepted")
    config = triton_op.CONFIGURATION
    for launch in (Launch(64, 64, 4, 1), Launch(128, 128, 4, 1)):
        try:
            config._replace(query_gradient=launch).check()
        except ValueError as error:
            assert "query tiles" in str(error), error
        else:
            raise AssertionError(f"{launch} does not fit the lists of {config.forward}")
    return {}


CASES = (
    trees,
    forks_at_every_offset,
    other_orders,
    nothing_to_do,
    views_in_place,
    compiled,
    unseen_rows_stay_unseen,
    refuses,
)


if __name__ == "__main__":
    run_cases(CASES, sys.argv[1], sys.argv[2:])
