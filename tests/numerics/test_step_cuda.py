"""A step on a GPU: queued without waiting for the device, compiled or not."""

from __future__ import annotations

import pytest
import torch

from harts_titan.data.source import rollouts_from_config
from harts_titan.engine import Engine
from harts_titan.job_config import load_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# Head widths that every kernel takes.
ONE_CARD = [
    "--training.dtype",
    "bfloat16",
    "--training.mixed_precision_param",
    "bfloat16",
    "--activation_checkpoint.mode",
    "full",
    "--optimizer.implementation",
    "fused",
    "--tree.chunk_size",
    "64",
    "--tree.max_tokens",
    "1024",
    "--model.flavor",
    "tiny_4layer",
    "--moe.z_loss_coef",
    "0.001",
    "--moe.load_balance_coef",
    "0.001",
]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("objective", ["sft", "grpo"])
def test_the_host_never_waits_between_microbatches(tmp_path, compiled, objective):
    overrides = [*ONE_CARD, "--rl.objective", objective]
    if compiled:
        overrides += ["--compile.enable", "--compile.components", "model"]
    config = load_config("train_configs/ling_debug.toml", overrides)
    engine = Engine.from_config(config)
    batch = rollouts_from_config(config.data, vocab_size=engine.vocab_size, folder=tmp_path)
    # The first update compiles and allocates, and so may a new size of the second.
    first = engine.update(batch)
    (step,) = engine.prepare_update(batch)
    assert step.plan.num_slots > 1
    for _ in range(2):
        engine.runner.launch(step, backward=True)
        engine.optimizers.zero_grad()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        launched = engine.runner.launch(step, backward=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(launched.losses) == len(launched.layouts) > 1
    assert first["loss"] == first["loss"]
