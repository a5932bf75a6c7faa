"""Ling on plan rows: shared equals expanded, recomputation, precision, determinism, refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from ling_cases import build, calls_of, rollouts, run, small_args

from harts_titan.models.common.tree_inputs import TreeInputs
from harts_titan.models.ling import FLAVOURS, Ling
from harts_titan.ops.backend import OpsBackends


def relative_difference(got: dict, expected: dict) -> float:
    assert set(got) == set(expected)
    return max(((got[n] - expected[n]).abs().max() / expected[n].abs().max()).item() for n in got)


ARGS = {
    "debug": small_args(),
    "dense": small_args(n_dense_layers=4),
    "direct query, incomplete group": small_args(n_layers=5, layer_group_size=3, q_lora_rank=0),
    "clamped": small_args(expert_swiglu_limits=(0.0, 0.01, 0.0, 0.02), shared_swiglu_limits=(0.0, 0.0, 0.01, 0.02)),
    "no shared expert": small_args(shared_inter_dim=0),
}


@pytest.mark.parametrize("name", ARGS)
def test_shared_rows_equal_expanded_trajectories(name):
    model = build(ARGS[name])
    tokens, offsets = rollouts(1)
    expected = run(model, tokens, offsets, "expanded", call_capacity=100, reverse=True)
    for mode in ("compact", "nodewise", "depthwise"):
        got = run(model, tokens, offsets, mode)
        torch.testing.assert_close(got.logprob_S, expected.logprob_S, rtol=0, atol=1e-10)
        torch.testing.assert_close(got.entropy_S, expected.entropy_S, rtol=0, atol=1e-10)
        assert got.loss == pytest.approx(expected.loss, abs=1e-10)
        assert got.losses == pytest.approx(expected.losses, abs=1e-10)
        assert torch.equal(got.counts_LE, expected.counts_LE)
        assert relative_difference(got.grads, expected.grads) < 1e-9
        assert got.rows == [got.rows[0]] * len(model.layers) and got.rows[0] < len(tokens)
    assert expected.rows == [len(tokens)] * len(model.layers)
    assert all(g.abs().max() > 0 for g in expected.grads.values())


@pytest.mark.parametrize("seed", range(2, 6))
def test_shared_rows_equal_expanded_trajectories_on_other_batches(seed):
    model = build(ARGS["debug"], seed=seed)
    tokens, offsets = rollouts(seed)
    expected = run(model, tokens, offsets, "expanded")
    got = run(model, tokens, offsets, "compact")
    torch.testing.assert_close(got.logprob_S, expected.logprob_S, rtol=0, atol=1e-10)
    assert relative_difference(got.grads, expected.grads) < 1e-9
    assert torch.equal(got.counts_LE, expected.counts_LE)


def test_float32():
    model = build(ARGS["debug"], torch.float32)
    tokens, offsets = rollouts(1)
    expected, got = run(model, tokens, offsets, "expanded"), run(model, tokens, offsets, "compact")
    assert got.logprob_S.dtype == torch.float32
    torch.testing.assert_close(got.logprob_S, expected.logprob_S, rtol=0, atol=1e-5)
    assert torch.equal(got.counts_LE, expected.counts_LE)


def test_bfloat16_keeps_decay_and_bias_in_float32():
    model = build(ARGS["debug"]).to(torch.bfloat16)
    kept = {n for n, t in model.state_dict().items() if t.dtype != torch.bfloat16}
    assert kept == {n for n in model.state_dict() if n.endswith(("A_log", "dt_bias", "expert_bias"))}
    assert all(model.state_dict()[n].dtype == torch.float32 for n in kept)
    tokens, offsets = rollouts(1)
    got = run(model, tokens, offsets, "compact")
    assert got.logprob_S.dtype == torch.float32
    wide = run(build(ARGS["debug"]), tokens, offsets, "compact")
    assert (got.logprob_S - wide.logprob_S).abs().mean() < 0.05
    assert all(torch.isfinite(g).all() for g in got.grads.values())


def test_built_in_bfloat16_equals_cast_to_bfloat16():
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = Ling(small_args())
    finally:
        torch.set_default_dtype(torch.float32)
    expected = build(small_args()).to(torch.bfloat16)
    assert {n: t.dtype for n, t in model.state_dict().items()} == {n: t.dtype for n, t in expected.state_dict().items()}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_recomputation_changes_nothing_and_counts_experts_once(dtype):
    model = build(ARGS["debug"]).to(dtype)
    tokens, offsets = rollouts(1)
    expected = run(model, tokens, offsets, "compact")
    model.recompute_layers = True
    got = run(model, tokens, offsets, "compact")
    assert torch.equal(got.logprob_S, expected.logprob_S)
    assert all(torch.equal(got.grads[n], expected.grads[n]) for n in expected.grads)
    assert torch.equal(got.counts_LE, expected.counts_LE)
    assert got.rows == [2 * rows for rows in expected.rows], "every layer runs once more, experts are counted once"


def test_recomputation_never_routes_again(monkeypatch):
    model = build(ARGS["debug"])
    model.recompute_layers = True
    (layout,) = calls_of(*rollouts(1), "compact")
    inputs = TreeInputs.from_layout(layout)
    output = model(inputs)
    # A kernel that would choose differently the second time.
    monkeypatch.setattr("harts_titan.ops.moe.op.select_experts", lambda *a, **k: pytest.fail("routed again"))
    output.logprob_S.sum().backward()


def test_recomputation_keeps_no_layer_activations():
    tokens, offsets = rollouts(1)
    (layout,) = calls_of(tokens, offsets, "compact")
    inputs = TreeInputs.from_layout(layout)
    model = build(ARGS["debug"], torch.float32)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def saved_elements() -> int:
        sizes: dict[int, int] = {}

        def pack(tensor):
            if tensor.untyped_storage().data_ptr() not in parameters:
                sizes[tensor.untyped_storage().data_ptr()] = tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            keep = model(inputs)
        del keep
        return sum(sizes.values())

    without = saved_elements()
    model.recompute_layers = True
    assert saved_elements() < without / 5


def test_forward_without_gradients_is_bit_equal_to_training():
    model = build(ARGS["debug"], torch.float32)
    (layout,) = calls_of(*rollouts(1), "compact")
    inputs = TreeInputs.from_layout(layout)
    training = model(inputs)
    model.recompute_layers = True
    with torch.no_grad():
        quiet = model(inputs)
    assert torch.equal(training.logprob_S.detach(), quiet.logprob_S)
    assert torch.equal(training.entropy_T.detach(), quiet.entropy_T)


def test_logits_on_request_agree_with_the_log_probs():
    model = build(ARGS["debug"])
    (layout,) = calls_of(*rollouts(1), "compact")
    inputs = TreeInputs.from_layout(layout)
    with torch.no_grad():
        output = model(inputs, return_logits=True)
    assert model(inputs).logits_TW is None
    logp_TW = output.logits_TW.log_softmax(dim=1)
    labelled = inputs.label_S >= 0
    picked = logp_TW[inputs.row_of_position_S[labelled], inputs.label_S[labelled]]
    torch.testing.assert_close(output.logprob_S[labelled], picked, rtol=0, atol=1e-12)
    assert (output.logprob_S[~labelled] == 0).all()
    torch.testing.assert_close(output.entropy_T, -(logp_TW.exp() * logp_TW).sum(dim=1), rtol=0, atol=1e-12)


def test_no_gradient_reaches_other_branches():
    model = build(ARGS["debug"])
    tokens, offsets = rollouts(1)
    (layout,) = calls_of(tokens, offsets, "compact")
    inputs = TreeInputs.from_layout(layout)
    hidden = []
    model.tok_embeddings.register_forward_hook(lambda m, a, out: (hidden.append(out), out.retain_grad())[0])
    output = model(inputs)
    bounds = layout.position_offset_N1
    for n in range(layout.num_trajectories):
        (gradient,) = torch.autograd.grad(output.logprob_S[bounds[n] : bounds[n + 1]].sum(), hidden, retain_graph=True)
        own = torch.zeros(layout.num_rows, dtype=torch.bool)
        own[layout.row_of_position_S[bounds[n] : bounds[n + 1]]] = True
        assert not gradient[~own].any()


def test_initial_weights_depend_on_the_seed_only():
    first, again, other = build(small_args()), build(small_args()), build(small_args(), seed=1)
    state, repeated = first.state_dict(), again.state_dict()
    assert all(torch.equal(state[n], repeated[n]) for n in state)
    assert not torch.equal(state["output.weight"], other.state_dict()["output.weight"])
    # The same numbers, whatever else the model holds.
    deeper = build(small_args(n_layers=8)).state_dict()
    assert torch.equal(deeper["layers.0.attention.q_proj.weight"], state["layers.0.attention.q_proj.weight"])
    core = first.layers["0"].attention.core
    amplitude_H = core.A_log.exp()
    assert (amplitude_H >= 1).all() and (amplitude_H <= 16).all()
    decay_HK = 5 * torch.sigmoid(amplitude_H[:, None] * core.dt_bias.view(2, 16))
    assert decay_HK.min() > 0.9e-3 and decay_HK.max() < 0.51


def test_refusals():
    model = build(small_args(max_position=40))
    (layout,) = calls_of(*rollouts(1), "compact")
    with pytest.raises(ValueError, match="max_position_embeddings"):
        model(TreeInputs.from_layout(layout))
    with pytest.raises(ValueError, match="cannot run"):
        build(small_args())(TreeInputs.from_layout(layout, backends=OpsBackends(kda="triton")))
    inputs = TreeInputs.from_layout(layout)
    inputs.num_external_rows = 3
    with pytest.raises(ValueError, match="producer"):
        build(small_args())(inputs)


def test_pipeline_stages_have_missing_parts():
    model = build(small_args())
    (layout,) = calls_of(*rollouts(1), "compact")
    inputs = TreeInputs.from_layout(layout)
    whole = model(inputs)
    first, last = build(small_args()), build(small_args())
    first.norm = first.output = last.tok_embeddings = None
    del first.layers["2"], first.layers["3"], last.layers["0"], last.layers["1"]
    middle = first(inputs)
    assert middle.logprob_S is None
    output = last(inputs, middle.hidden_TD)
    assert torch.equal(output.logprob_S, whole.logprob_S)
    assert len(middle.router) + len(output.router) == len(whole.router)


def test_flavours_are_not_shared_between_jobs():
    from harts_titan.models.ling import make_train_spec

    spec = make_train_spec(lambda **kwargs: None)
    spec.model_args["debug"].vocab_size = 7
    assert FLAVOURS["debug"].vocab_size == 4096
    assert set(spec.model_args) == set(FLAVOURS)
    assert replace(FLAVOURS["debug"]) == FLAVOURS["debug"]
