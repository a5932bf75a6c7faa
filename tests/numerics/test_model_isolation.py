"""Changing one branch changes nothing outside it: to the bit in every op and in a dense model, and no gradient leaks.

Gates decay slowly here. With the fast decay of a random initialisation a leaked state hides under rounding.

Letters: T own rows, S positions, H heads, K and V key and value head dimensions, D width, W convolution taps.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from harts_titan.models.common.tree_inputs import TreeInputs
from harts_titan.ops.attention import tree_attention
from harts_titan.ops.kda import kda
from harts_titan.ops.short_conv import tree_short_conv
from harts_titan.tree import CallLayout
from tests.forests import pack, random_forest, unpack
from tests.numerics.harness import DENSE, SMALL, build_model, plan_forest
from tests.oracle import ling as oracle

FORKED_VOCAB = 24  # forests use ids below it, changed branches ids from it on
SEEDS = range(12)
DTYPES = (torch.float64, torch.float32)


def layout_of(seed: int, *, mode: str = "compact", chunk_size: int = 4) -> CallLayout:
    forest = random_forest(seed, chunk_size=chunk_size, vocab_size=FORKED_VOCAB)
    (consumer,) = plan_forest(*forest, chunk_size=chunk_size, mode=mode).consumers()
    (layout,) = consumer.calls
    return layout


def branches(layout: CallLayout) -> list[Tensor]:
    """For each segment that is not the whole forest: which rows lie in it or below it."""
    heads = layout.seg_row_V
    below = [(layout.tin_Y >= layout.tin_Y[h]) & (layout.tin_Y < layout.tout_Y[h]) for h in heads.tolist()]
    return [inside_T for inside_T in below if not inside_T.all()]


def op_inputs(num_rows: int, seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return {"q": draw(num_rows, 2, 8), "k": draw(num_rows, 2, 8), "v": draw(num_rows, 2, 8)} | {
        "f": 0.1 * draw(num_rows, 2, 8),
        "b": draw(num_rows, 2),
        # A whole number of vector registers: in a ragged tail the CPU's exp rounds differently, at any row.
        "x": draw(num_rows, 32),
    }


def run_ops(layout: CallLayout, rows: dict[str, Tensor], attention: str = "path") -> dict[str, Tensor]:
    inputs = TreeInputs.from_layout(layout)
    dtype = rows["q"].dtype
    # log decay of about -0.01 a token
    slow = torch.full((2, 8), math.log(0.002 / 0.998), dtype=dtype)
    o, _ = kda(*(rows[n] for n in ("q", "k", "v", "f", "b")), torch.zeros(2, dtype=dtype), slow, inputs.kda)
    taps = torch.linspace(-1.0, 1.0, 128, dtype=dtype).reshape(32, 4)
    attended = tree_attention(rows["q"], rows["k"], rows["v"], inputs.attention, scale=8**-0.5, backend=attention)
    return {"kda": o, "conv": tree_short_conv(rows["x"], taps, inputs.conv_taps), "attention": attended}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["compact", "nodewise", "depthwise"])
def test_ops_give_rows_outside_a_changed_branch_the_same_bits(mode, dtype):
    changed_rows = 0
    for seed in SEEDS:
        layout = layout_of(seed, mode=mode)
        rows = op_inputs(layout.num_rows, seed, dtype)
        before = run_ops(layout, rows)
        for number, inside_T in enumerate(branches(layout)):
            other = op_inputs(layout.num_rows, 1000 + number, dtype)
            mixed = {n: torch.where(inside_T.view(-1, *[1] * (x.dim() - 1)), other[n], x) for n, x in rows.items()}
            after = run_ops(layout, mixed)
            for name in before:
                assert torch.equal(after[name][~inside_T], before[name][~inside_T]), (seed, name)
                changed = (after[name][inside_T] != before[name][inside_T]).flatten(1).any(1)
                assert changed.all(), (seed, name)
            changed_rows += int(inside_T.sum())
    assert changed_rows > 100


@pytest.mark.parametrize("dtype", DTYPES)
def test_ops_give_what_is_left_the_same_bits_when_a_branch_is_removed(dtype):
    """Removing trajectories moves rows, merges segments and changes rounds: still no bit of the others may change."""
    for seed in SEEDS:
        tokens, offsets = random_forest(seed, chunk_size=4, vocab_size=FORKED_VOCAB)
        trajectories = unpack(tokens, offsets)
        whole = layout_of(seed)
        rows = op_inputs(whole.num_rows, seed, dtype)
        before = run_ops(whole, rows)
        row_of = dict(zip(whole.source_position_S.tolist(), whole.row_of_position_S.tolist()))
        for removed in range(len(trajectories)):
            kept = [n for n in range(len(trajectories)) if n != removed]
            (consumer,) = plan_forest(*pack([trajectories[n] for n in kept])).consumers()
            (part,) = consumer.calls
            # Row of the whole forest that each row of the smaller one is.
            source_T = torch.empty(part.num_rows, dtype=torch.int64)
            begin = part.position_offset_N1.tolist()
            for local, n in enumerate(part.trajectory_N.tolist()):
                whole_rows = [row_of[int(offsets[kept[n]]) + i] for i in range(begin[local + 1] - begin[local])]
                source_T[part.row_of_position_S[begin[local] : begin[local + 1]]] = torch.tensor(whole_rows)
            after = run_ops(part, {name: x[source_T] for name, x in rows.items()})
            for name in before:
                assert torch.equal(after[name], before[name][source_T]), (seed, removed, name)


@pytest.mark.parametrize("mode", ["compact", "nodewise", "depthwise"])
def test_ops_leak_no_gradient_into_a_branch(mode):
    for seed in SEEDS:
        layout = layout_of(seed, mode=mode)
        rows = {n: x.requires_grad_() for n, x in op_inputs(layout.num_rows, seed, torch.float64).items()}
        outputs = run_ops(layout, rows)
        for inside_T in branches(layout)[:4]:
            loss = sum((o[~inside_T] * o[~inside_T]).sum() for o in outputs.values())
            for gradient in torch.autograd.grad(loss, list(rows.values()), retain_graph=True):
                assert not gradient[inside_T].any(), seed
                assert gradient[~inside_T].any(), seed


def with_changed_branch(layout: CallLayout, inside_T: Tensor) -> CallLayout:
    """The same tree with other tokens in a branch: ids that occur nowhere else."""
    changed = layout.clone()
    changed.token_T = torch.where(inside_T, layout.token_T + FORKED_VOCAB, layout.token_T)
    changed.label_S = layout.label_S.clone()
    for begin, end in zip(layout.position_offset_N1[:-1].tolist(), layout.position_offset_N1[1:].tolist()):
        changed.label_S[begin : end - 1] = changed.token_T[layout.row_of_position_S[begin + 1 : end]]
    return changed


# Experts see other row counts, so with them rounding is only bounded, in float64; the dense model is exact.
@pytest.mark.parametrize(
    ("config", "dtype"),
    [(DENSE, torch.float64), (DENSE, torch.float32), (SMALL, torch.float64)],
    ids=["dense-float64", "dense-float32", "moe-float64"],
)
def test_model_rows_outside_a_changed_branch_stay(config, dtype):
    model = build_model(config, oracle.random_weights(config, 3, decay=0.01), dtype)
    dense = config is DENSE
    with torch.no_grad():
        for seed in SEEDS:
            layout = layout_of(seed)
            before = model(TreeInputs.from_layout(layout), return_logits=True)
            for inside_T in branches(layout)[:6]:
                after = model(TreeInputs.from_layout(with_changed_branch(layout, inside_T)), return_logits=True)
                logits, reference = after.logits_TW[~inside_T], before.logits_TW[~inside_T]
                if dense:
                    assert torch.equal(logits, reference), seed
                    assert torch.equal(after.entropy_T[~inside_T], before.entropy_T[~inside_T]), seed
                else:
                    assert float((logits - reference).abs().max()) <= 1e-12, seed
                    difference = (after.entropy_T - before.entropy_T)[~inside_T]
                    assert float(difference.abs().max()) <= 1e-12, seed
                assert (after.logits_TW[inside_T] != before.logits_TW[inside_T]).any(1).all(), seed


@pytest.mark.parametrize("config", [DENSE, SMALL], ids=["dense", "moe"])
def test_model_trajectories_are_those_of_a_replanned_batch(config):
    """The same through the planner: a batch in which one trajectory's own tokens are replaced is planned again."""
    model = build_model(config, oracle.random_weights(config, 3, decay=0.01))
    for seed in SEEDS[:6]:
        tokens, offsets = random_forest(seed, chunk_size=4, vocab_size=FORKED_VOCAB)
        layout = layout_of(seed)
        alone_S = layout.multiplicity_T[layout.row_of_position_S] == 1
        alone_S = alone_S[torch.argsort(layout.source_position_S)]
        for n in range(len(offsets) - 1):
            own = np.zeros(len(tokens), dtype=bool)
            own[offsets[n] : offsets[n + 1]] = alone_S[offsets[n] : offsets[n + 1]].numpy()
            if not own.any():
                continue
            changed = np.where(own, tokens + FORKED_VOCAB, tokens).astype(np.int32)
            logprobs = []
            for batch in (tokens, changed):
                (consumer,) = plan_forest(batch, offsets).consumers()
                (call,) = consumer.calls
                with torch.no_grad():
                    out = model(TreeInputs.from_layout(call))
                logprob_S = torch.empty_like(out.logprob_S)
                logprob_S[call.source_position_S] = out.logprob_S
                logprobs.append(logprob_S)
            others = torch.ones(len(tokens), dtype=torch.bool)
            others[offsets[n] : offsets[n + 1]] = False
            if others.any():
                assert float((logprobs[1] - logprobs[0])[others].abs().max()) <= 1e-12, (seed, n)


@pytest.mark.parametrize("mode", ["compact", "nodewise", "depthwise"])
@pytest.mark.parametrize("config", [DENSE, SMALL], ids=["dense", "moe"])
def test_model_leaks_no_gradient_into_a_branch(config, mode):
    model = build_model(config, oracle.random_weights(config, 3, decay=0.01))
    checked = 0
    for seed in SEEDS:
        layout = layout_of(seed, mode=mode)
        inside_T = branches(layout)[seed % len(branches(layout))]
        changed = with_changed_branch(layout, inside_T)
        out = model(TreeInputs.from_layout(changed))
        # The loss of every trajectory that does not enter the branch.
        enters_S = torch.zeros_like(changed.label_S, dtype=torch.bool)
        for begin, end in zip(changed.position_offset_N1[:-1].tolist(), changed.position_offset_N1[1:].tolist()):
            enters_S[begin:end] = inside_T[changed.row_of_position_S[begin:end]].any()
        trained_S = ~enters_S & (changed.label_S >= 0)
        if not trained_S.any():
            continue
        (gradient,) = torch.autograd.grad(out.logprob_S[trained_S].sum(), [model.tok_embeddings.weight])
        only_inside = torch.unique(changed.token_T[inside_T])
        assert not gradient[only_inside].any(), seed
        assert gradient.any(), seed
        checked += 1
    assert checked >= 8
