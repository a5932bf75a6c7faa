"""Small Ling models and rollout batches for tests of harts_titan.models."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from harts_titan.models.common import router_losses
from harts_titan.models.common.tree_inputs import TreeInputs
from harts_titan.models.ling import FLAVOURS, Ling, LingArgs
from harts_titan.tree import plan_step

CHUNK = 16


def small_args(**changes) -> LingArgs:
    return replace(FLAVOURS["debug"], vocab_size=64, **changes)


def build(args: LingArgs, dtype: torch.dtype = torch.float64, seed: int = 0) -> Ling:
    torch.manual_seed(seed)
    with torch.device("meta"):
        model = Ling(args)
    model = model.to_empty(device="cpu").to(dtype)
    model.init_weights()
    # Distinguishable experts and biases that change choices.
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("gate.weight", "norm.weight")):
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(noise.to(parameter.dtype), alpha=0.3)
        for bias in model.expert_biases():
            bias.add_(torch.randn(bias.shape, generator=generator), alpha=0.1)
    return model


def rollouts(seed: int = 0, vocab_size: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """Forks inside and on chunk boundaries, a prefix, a duplicate, a second root, a one-token trajectory."""
    rng = np.random.default_rng(seed)

    def fresh(length: int) -> list[int]:
        return rng.integers(0, vocab_size, length).tolist()

    trunk = fresh(37)
    made = [trunk[:k] + fresh(n) for k, n in ((37, 5), (37, 9), (20, 13), (20, 1), (32, 19), (5, 30), (0, 11))]
    made += [trunk, list(made[0]), made[1][:41] + fresh(4), fresh(1)]
    order = rng.permutation(len(made))
    offsets = np.cumsum([0] + [len(made[i]) for i in order]).astype(np.int64)
    return np.concatenate([made[i] for i in order]).astype(np.int32), offsets


def calls_of(tokens, offsets, mode: str, **options):
    plan = plan_step(tokens, offsets, capacity=4096, chunk_size=CHUNK, mode=mode, **options)
    return plan.consumer(0, 0).calls


@dataclass
class Result:
    logprob_S: torch.Tensor
    entropy_S: torch.Tensor
    loss: float
    losses: dict[str, float]
    counts_LE: torch.Tensor
    grads: dict[str, torch.Tensor]
    rows: list[int]
    """Rows that went through each layer, recomputations included."""


def count_rows(rows: list[int], layer: int):
    def hook(module, args):
        rows[layer] += args[0].shape[0]

    return hook


def run(model: Ling, tokens, offsets, mode: str, **options) -> Result:
    """Forward and backward of a loss that weighs every position, entropy and router loss differently."""
    model.zero_grad(set_to_none=True)
    layouts = calls_of(tokens, offsets, mode, **options)
    calls = [TreeInputs.from_layout(layout) for layout in layouts]
    size, positions = len(tokens), len(tokens)
    with torch.no_grad():
        counts = [router_losses.expert_counts(model(call).router, call.multiplicity_T) for call in calls]
    counts_LE = torch.stack(counts).sum(dim=0)
    rows = [0] * len(model.layers)
    hooks = [layer.register_forward_pre_hook(count_rows(rows, i)) for i, layer in enumerate(model.layers.values())]
    trained_LE = torch.zeros_like(counts_LE)
    logprob_S, entropy_S = None, None
    losses = {"z": 0.0, "consumer": 0.0, "trajectory": 0.0}
    total = 0.0
    for layout, call in zip(layouts, calls):
        output = model(call)
        if logprob_S is None:
            logprob_S, entropy_S = (torch.zeros(size, dtype=output.logprob_S.dtype) for _ in range(2))
        weight_S = torch.sin(layout.source_position_S.double()).to(output.logprob_S.dtype)
        entropy = output.entropy_T[call.row_of_position_S]
        loss = (weight_S * output.logprob_S).sum() / size + (weight_S * entropy).sum() / size
        terms = {
            "z": router_losses.z_loss(output.router, call.multiplicity_T, num_positions=positions),
            "consumer": router_losses.load_balancing_loss(
                output.router, call.multiplicity_T, num_positions=positions, counts_LE=counts_LE
            ),
            "trajectory": router_losses.trajectory_load_balancing_loss(
                output.router, call.statistics, num_positions=positions
            ),
        }
        for name, term in terms.items():
            losses[name] += term.item()
            loss = loss + 0.1 * term
        loss.backward()
        trained_LE += router_losses.expert_counts(output.router, call.multiplicity_T)
        total += loss.item()
        logprob_S[layout.source_position_S] = output.logprob_S.detach()
        entropy_S[layout.source_position_S] = entropy.detach()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    for hook in hooks:
        hook.remove()
    assert torch.equal(trained_LE, counts_LE), "training routed differently from the pass without gradients"
    return Result(logprob_S, entropy_S, total, losses, trained_LE, grads, rows)
