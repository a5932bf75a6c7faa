"""The whole model against the naive float64 Ling: log-probs, entropies, gradients, router losses, expert counts."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from harts_titan.models.ling import Ling, load_hf, save_hf
from harts_titan.ops import OpsBackends
from tests.forests import random_forest, unpack
from tests.numerics.harness import (
    DENSE,
    FIVE_LAYERS,
    SMALL,
    build_model,
    compare,
    execute,
    execute_oracle,
    model_args,
    plan_forest,
)
from tests.oracle import ling as oracle

CONFIGS = {"small": SMALL, "dense": DENSE, "five_layers": FIVE_LAYERS}
MODES = ("compact", "nodewise", "depthwise", "expanded")


def check(got, want):
    differences = compare(got, want)
    assert differences.logprob <= 1e-10, differences
    assert differences.entropy <= 1e-10, differences
    assert differences.gradient <= 1e-9, differences
    assert differences.router_loss <= 1e-10, differences
    assert differences.counts_equal, differences
    for ours, theirs in zip(got.topk_LSA, want.topk_LSA, strict=True):
        assert torch.equal(ours, theirs)
    return differences


@pytest.mark.parametrize(
    ("name", "seed", "chunk_size", "capacity", "decay"),
    [
        ("small", 0, 4, 10_000, 0.01),
        ("small", 1, 8, 60, 0.01),  # several consumers
        ("small", 2, 4, 10_000, None),  # the fast decay of a plain initialisation
        ("dense", 3, 4, 10_000, 0.01),
        ("five_layers", 5, 4, 40, 0.01),
        ("five_layers", 6, 8, 10_000, 0.01),
        ("small", 40, 32, 10_000, 0.01),  # a chunk of several sub-blocks, and several query tiles
        ("dense", 43, 32, 10_000, 4.5),  # decay so strong that a chunk spans exp(-144)
    ],
)
def test_all_modes_equal_the_oracle(name, seed, chunk_size, capacity, decay):
    config = CONFIGS[name]
    weights = oracle.random_weights(config, seed, decay=decay)
    model = build_model(config, weights)
    # Chunk 32 is for its own shapes; the oracle walks every token, so the trajectories stay below three chunks.
    size = {"num_trajectories": 5, "max_length": 80} if chunk_size == 32 else {}
    forest = random_forest(seed, chunk_size=chunk_size, **size)
    plans = {mode: plan_forest(*forest, chunk_size=chunk_size, capacity=capacity, mode=mode) for mode in MODES}
    assert plans["compact"].stats.executed_rows < plans["compact"].stats.original_tokens
    groups = [consumer.trajectory_N.tolist() for consumer in plans["compact"].consumers()]
    assert (len(groups) > 1) == (capacity < 10_000)
    want = execute_oracle(config, weights, unpack(*forest), groups)
    for plan in plans.values():
        check(execute(model, plan), want)
    # The baseline packed differently: half the rows per call, trajectories reversed.
    longest = max(len(t) for t in unpack(*forest))
    repacked = plan_forest(
        *forest, chunk_size=chunk_size, capacity=capacity, mode="expanded", call_capacity=longest, reverse=True
    )
    assert repacked.stats.num_calls > len(groups)
    check(execute(model, repacked), want)


def test_every_pytorch_backend_equals_the_oracle():
    weights = oracle.random_weights(SMALL, 7, decay=0.01)
    model = build_model(SMALL, weights)
    forest = random_forest(7, chunk_size=4, num_trajectories=6)
    plan = plan_forest(*forest)
    want = execute_oracle(SMALL, weights, unpack(*forest), [list(range(6))])
    for backends in (OpsBackends(kda="recurrent"), OpsBackends(attention="dense"), OpsBackends(grouped_mm="loop")):
        check(execute(model, plan, backends=backends), want)


def test_clamps_expert_bias_and_lower_bound_matter():
    """What the comparison is to prove must not be inert at these sizes."""
    weights = oracle.random_weights(FIVE_LAYERS, 0, decay=0.01)
    tokens = [3, 17, 4, 4, 29, 11, 0, 8]
    reference = oracle.forward(tokens, weights, FIVE_LAYERS)
    for change in (
        {"expert_swiglu_limit_list": None},
        {"share_expert_swiglu_limit_list": None},
        {"kda_lower_bound": -4.0},
        {"rope_theta": 1e4},
        {"topk_group": 4},
    ):
        other = oracle.forward(tokens, weights, {**FIVE_LAYERS, **change})
        assert float((other.logits_LW - reference.logits_LW).abs().max()) > 1e-6, change
    unbiased = {n: torch.zeros_like(w) if n.endswith("expert_bias") else w for n, w in weights.items()}
    assert oracle.forward(tokens, unbiased, FIVE_LAYERS).topk != reference.topk


def test_recomputed_layers_give_the_same_bits():
    weights = oracle.random_weights(SMALL, 11, decay=0.01)
    model = build_model(SMALL, weights)
    plan = plan_forest(*random_forest(11, chunk_size=4))
    want = execute(model, plan)
    model.recompute_layers = True
    got = execute(model, plan)
    assert torch.equal(got.logprob_S, want.logprob_S)
    assert torch.equal(got.counts_LE, want.counts_LE)
    for name, gradient in want.gradients.items():
        assert torch.equal(got.gradients[name], gradient), name


def test_a_checkpoint_in_the_published_format_round_trips(tmp_path):
    config = {**FIVE_LAYERS, "architectures": ["BailingMoeV3ForCausalLM"], "model_type": "bailing_hybrid"}
    weights = oracle.random_weights(config, 12, decay=0.01)
    published, written = tmp_path / "published", tmp_path / "written"
    published.mkdir()
    (published / "config.json").write_text(json.dumps(config))
    # Some published files keep A_log in the broadcast shape of the recurrence.
    stored = {n: w.reshape(1, 1, -1, 1) if n.endswith("1.attention.A_log") else w for n, w in weights.items()}
    stored = {n: (w.float() if n.endswith("expert_bias") else w).contiguous() for n, w in stored.items()}
    names = sorted(stored)
    half = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, members in half.items():
        save_file({n: stored[n] for n in members}, published / file, metadata={"format": "pt"})
    index = {"weight_map": {n: file for file, members in half.items() for n in members}}
    (published / "model.safetensors.index.json").write_text(json.dumps(index))

    args = model_args(published)
    model = Ling(args).double()
    load_hf(model, args, published)
    plan = plan_forest(*random_forest(12, chunk_size=4, num_trajectories=4))
    direct = execute(build_model(config, weights), plan)
    assert torch.equal(execute(model, plan).logprob_S, direct.logprob_S)

    save_hf(model, args, written, max_shard_bytes=50_000)
    files = sorted(written.glob("*.safetensors"))
    assert len(files) > 2
    found = {}
    for file in files:
        with safe_open(file, framework="pt") as content:
            found |= {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
    assert found.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(found[name].double(), tensor), name
    weight_map = json.loads((written / "model.safetensors.index.json").read_text())["weight_map"]
    assert weight_map.keys() == weights.keys()
    described = json.loads((written / "config.json").read_text())
    assert {key: described[key] for key in config} == config
    again = Ling(model_args(written)).double()
    load_hf(again, args, written)
    assert torch.equal(execute(again, plan).logprob_S, direct.logprob_S)
