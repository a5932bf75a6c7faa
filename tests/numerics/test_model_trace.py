"""Ten optimizer steps through the engine, shared and expanded: the same losses, gradient norms, weights and biases."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from harts_titan.data import RolloutBatch
from harts_titan.engine import Engine
from harts_titan.job_config import Data, Moe, Ops, Tree
from harts_titan.rl import ObjectiveConfig
from tests.forests import random_forest
from tests.numerics.harness import SMALL, build_model
from tests.oracle import ling as oracle

OPTIMIZER_STEPS = 10


def batch_of(seed: int) -> RolloutBatch:
    """A random forest as rollouts: two groups, random rewards, a random half of the tokens trained."""
    tokens, offsets = random_forest(seed, chunk_size=4, num_trajectories=8, min_length=2)
    rng = np.random.default_rng(seed)
    mask = rng.random(len(tokens)) < 0.6
    mask[offsets[:-1]] = False
    number = len(offsets) - 1
    return RolloutBatch(
        tokens=tokens,
        offsets=offsets,
        loss_mask=mask,
        reward=rng.random(number),
        group_id=np.arange(number) % 2,
        ref_logprobs=np.where(mask, -rng.random(len(tokens)) * 4, 0.0),
    )


def trace(mode: str, rl: ObjectiveConfig, scope: str) -> tuple[list[dict[str, float]], Any]:
    model = build_model(SMALL, oracle.random_weights(SMALL, 0, decay=0.01))
    config = SimpleNamespace(
        # Small enough for several microbatches a step; in expanded mode each of them takes several calls.
        tree=Tree(mode=mode, max_tokens=40, chunk_size=4, validate=True),
        data=Data(),
        rl=rl,
        moe=Moe(z_loss_coef=1e-2, load_balance_coef=1e-1, load_balance_scope=scope, expert_bias_rate=1e-2),
        ops=Ops(),
        training=SimpleNamespace(max_norm=1.0, mixed_precision_param="float32"),
        # Read for the cost of plans.
        model=SimpleNamespace(name="ling", flavor="debug"),
        parallelism=SimpleNamespace(tensor_parallel_degree=1),
        activation_checkpoint=SimpleNamespace(mode="none"),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    engine = Engine(model, config, device="cpu", optimizers=optimizer)
    return [engine.update(batch_of(seed)) for seed in range(OPTIMIZER_STEPS // rl.epochs)], model


@pytest.mark.parametrize(
    ("rl", "scope"),
    [
        (ObjectiveConfig(objective="sft"), "consumer"),
        (ObjectiveConfig(objective="grpo", epochs=2, kl_coef=0.1, entropy_coef=0.01), "trajectory"),
    ],
    ids=["sft", "grpo"],
)
def test_ten_optimizer_steps_leave_the_same_trace(rl, scope):
    shared, shared_model = trace("compact", rl, scope)
    alone, alone_model = trace("expanded", rl, scope)
    assert len(shared) * rl.epochs == OPTIMIZER_STEPS
    worst = 0.0
    for ours, theirs in zip(shared, alone, strict=True):
        assert ours["tokens/original"] == theirs["tokens/original"]
        assert ours["tokens/executed"] < theirs["tokens/executed"]
        for name in ("loss", "grad_norm", "router/z_loss", "router/load_balance_loss"):
            worst = max(worst, abs(ours[name] - theirs[name]))
            assert abs(ours[name] - theirs[name]) <= 1e-9, (name, ours[name], theirs[name])
        # Updates that change nothing would agree as well.
        assert theirs["grad_norm"] > 1e-3
    print(f"largest difference of the traces: {worst:.2e}")  # pytest -rP
    start = build_model(SMALL, oracle.random_weights(SMALL, 0, decay=0.01))
    for (name, ours), theirs, first in zip(
        shared_model.named_parameters(), alone_model.parameters(), start.parameters(), strict=True
    ):
        moved = float((theirs - first).detach().abs().max())
        assert moved > 1e-3, name
        assert float((ours - theirs).detach().abs().max()) <= 1e-7 * moved, name
    for ours, theirs in zip(shared_model.expert_biases(), alone_model.expert_biases(), strict=True):
        assert torch.equal(ours, theirs)
