"""Compiled layers: one graph per kind over plans of any size, and the results of the layers uncompiled."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ling_cases import build, calls_of, rollouts, small_args

from harts_titan import _compat

_compat.install()

from torch._dynamo.utils import counters  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402

from harts_titan.models.common.tree_inputs import TreeInputs  # noqa: E402
from harts_titan.models.ling import Ling, parallelize_ling  # noqa: E402
from harts_titan.ops.untraced import UntracedOp, plan_handle  # noqa: E402
from harts_titan.parallel.compiling import compile_layers  # noqa: E402
from harts_titan.parallel.fsdp import set_last_backward  # noqa: E402

# One layer of each kind, and a second one of the first two.
ARGS = small_args(n_layers=4, layer_group_size=2, n_dense_layers=1)


@pytest.fixture(autouse=True)
def no_graphs_yet():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def shared_prefix(length: int, *rest: int) -> list[list[int]]:
    rng = np.random.default_rng(length)
    trunk = rng.integers(0, 64, length).tolist()
    return [trunk + rng.integers(0, 64, n).tolist() for n in rest]


# Name -> trajectories. One segment, one round and no exported state; one exported state; two roots; many of everything.
PLANS = {
    "one chain": shared_prefix(0, 50),
    "one fork": shared_prefix(33, 7, 20),
    "two short roots": shared_prefix(0, 3, 4),
    "two tokens": shared_prefix(0, 2),
    "many": None,
    "one token": shared_prefix(0, 1),
}


def inputs_of(name: str) -> TreeInputs:
    trajectories = PLANS[name]
    if trajectories is None:
        tokens, offsets = rollouts(1)
    else:
        tokens = np.concatenate(trajectories).astype(np.int32)
        offsets = np.cumsum([0] + [len(t) for t in trajectories])
    (layout,) = calls_of(tokens, offsets, "compact")
    return TreeInputs.from_layout(layout)


def training(model: Ling, name: str, between=lambda: None, keep: bool = False) -> dict[str, torch.Tensor]:
    """Outputs and gradients of one call; the inputs are not kept."""
    if not keep:
        model.zero_grad(set_to_none=True)
    set_last_backward(model, True)
    output = model(inputs_of(name))
    weight_S = torch.cos(torch.arange(len(output.logprob_S)))
    loss = (weight_S * output.logprob_S).sum() + output.entropy_T.sum()
    loss = loss + sum(routed.logits_TE.square().sum() for routed in output.router)
    between()
    loss.backward()
    grads = {n: getattr(p.grad, "_local_tensor", p.grad).clone() for n, p in model.named_parameters()}
    choices = {f"experts of {i}": routed.topk_TA for i, routed in enumerate(output.router)}
    return {"logprob": output.logprob_S.detach(), "entropy": output.entropy_T.detach(), **choices, **grads}


def assert_equal(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], name: str) -> None:
    different = [n for n in expected if not torch.equal(got[n], expected[n])]
    assert not different, (name, different)


def compiled(model: Ling, backend: str = "aot_eager") -> Ling:
    compile_layers(dict(model.layers.items()), num_kinds=len(model.layer_kinds()), backend=backend)
    return model


@pytest.mark.parametrize("recompute", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_one_graph_per_kind_of_layer_serves_every_plan(recompute):
    model = build(ARGS, torch.float32)
    model.recompute_layers = recompute
    expected = {name: training(model, name) for name in PLANS}
    with torch.no_grad():
        quiet = {name: model(inputs_of(name)).logprob_S for name in PLANS}
    assert len(model.layer_kinds()) == 3
    compiled(model)
    for name in PLANS:
        assert_equal(training(model, name), expected[name], name)
    # A second microbatch finds gradients.
    training(model, "many", keep=True)
    for name in PLANS:
        with torch.no_grad():
            output = model(inputs_of(name))
        assert torch.equal(output.logprob_S, quiet[name]) and not output.logprob_S.requires_grad
    # With gradients and without; fullgraph=True: a graph break would have been an error.
    assert counters["stats"]["unique_graphs"] == 3


@pytest.mark.slow
def test_a_compiled_recomputation_repeats_the_choice_of_experts():
    model = build(ARGS, torch.float32)
    expected = training(model, "many")
    compiled(model).recompute_layers = True

    def disturb() -> None:
        for bias in model.expert_biases():
            bias.copy_(torch.randn(bias.shape, generator=torch.Generator().manual_seed(3)))

    assert_equal(training(model, "many", disturb), expected, "biases changed between forward and recomputation")


@pytest.mark.slow
def test_clamped_layers_of_many_kinds_stay_below_the_limit_of_graphs():
    limits = tuple(0.01 * i for i in range(8))
    args = small_args(n_layers=8, layer_group_size=2, expert_swiglu_limits=limits, shared_swiglu_limits=limits)
    model = build(args, torch.float32)
    expected = training(model, "many")
    assert len(model.layer_kinds()) == 8
    assert_equal(training(compiled(model), "many"), expected, "eight kinds")


@pytest.mark.slow
def test_bfloat16():
    model = build(ARGS).to(torch.bfloat16)
    model.recompute_layers = True
    expected = training(model, "many")
    assert_equal(training(compiled(model), "many"), expected, "bfloat16")


@pytest.fixture
def single_rank(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "full"])
def test_sharded_layers(single_rank, mode):
    dims = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=1)

    def sharded(enable: bool) -> Ling:
        config = SimpleNamespace(
            training=SimpleNamespace(mixed_precision_param="bfloat16", mixed_precision_reduce="float32"),
            activation_checkpoint=SimpleNamespace(mode=mode),
            parallelism=SimpleNamespace(fsdp_reshard_after_forward="default"),
            compile=SimpleNamespace(enable=enable, backend="aot_eager"),
        )
        with torch.device("meta"):
            model = parallelize_ling(Ling(ARGS).to(torch.float32), dims, config)
        torch.manual_seed(0)
        model.to_empty(device="cpu")
        model.init_weights()
        return model

    plain, fast = sharded(False), sharded(True)
    for name in ("many", "one fork"):
        expected, got = training(plain, name), training(fast, name)
        assert all(g.dtype == torch.float32 for n, g in got.items() if "weight" in n or n.endswith("A_log"))
        assert_equal(got, expected, name)
    assert counters["stats"]["unique_graphs"] == 3


@pytest.mark.slow
def test_generated_code():
    model = build(small_args(n_layers=4, layer_group_size=2, n_dense_layers=0), torch.float32)
    expected = {name: training(model, name) for name in PLANS}
    compiled(model, "inductor")
    for name in PLANS:
        got = training(model, name)
        with torch.no_grad():
            assert torch.equal(model(inputs_of(name)).logprob_S, got["logprob"])
        for key, value in expected[name].items():
            if value.is_floating_point():
                # Fused steps keep intermediate values that single ones round.
                torch.testing.assert_close(got[key], value, rtol=1e-4, atol=1e-5 * value.abs().max().item() + 1e-7)
    assert counters["stats"]["unique_graphs"] == 2


def test_untraced_ops_refuse_a_second_use_of_a_name():
    double = UntracedOp("test double", lambda plan, x, factor: x * plan["factor"] * factor, shape=lambda x: x[0].shape)
    with pytest.raises(ValueError, match="exists already"):
        UntracedOp("test double", lambda plan, x, factor: x, shape=lambda x: x[0].shape)

    class Plan(dict):
        pass

    plan = Plan(factor=3.0)
    x = torch.ones(4, requires_grad=True)
    double(plan_handle(plan), [x], 2.0).sum().backward()
    assert torch.equal(x.grad, torch.full((4,), 6.0))
