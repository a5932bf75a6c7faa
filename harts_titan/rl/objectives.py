"""The policy terms of the built-in objectives, each a function of per-position log-probs and metadata.

All of them see masked inputs (see ``register_objective``), so no untrained entry reaches an ``exp``. Formulas with
their sources, and the test of each, are in docs/objectives.md.

Letters: S semantic positions, N trajectories.
"""

from __future__ import annotations

import torch
from torch import Tensor

from harts_titan.rl.config import ObjectiveConfig
from harts_titan.rl.metrics import Metric
from harts_titan.rl.positions import PositionBatch
from harts_titan.rl.registry import PolicyTerm, register_objective


@register_objective("sft")
def sft(logprob_S: Tensor, positions: PositionBatch, config: ObjectiveConfig) -> PolicyTerm:
    """Cross-entropy of the labels: ``-logprob``, nats."""
    return PolicyTerm(-logprob_S)


@register_objective("reinforce", needs=("advantage",), aggregation="sequence_mean_token_sum", advantage="reward")
def reinforce(logprob_S: Tensor, positions: PositionBatch, config: ObjectiveConfig) -> PolicyTerm:
    """Score-function term ``-advantage * logprob`` (Williams 1992); summed over a trajectory by default."""
    advantage_S = _required(positions.advantage_S, "advantage")
    return PolicyTerm(-advantage_S.to(logprob_S.dtype) * logprob_S)


@register_objective("ppo_clip", needs=("advantage", "old_logprob"), advantage="given", clip=(0.2, 0.2))
def ppo_clip(logprob_S: Tensor, positions: PositionBatch, config: ObjectiveConfig) -> PolicyTerm:
    """Clipped surrogate on token ratios (Schulman et al. 2017), mean over tokens by default."""
    return _clipped_surrogate(_log_ratio(logprob_S, positions), positions, config)


@register_objective(
    "grpo",
    needs=("advantage", "old_logprob"),
    aggregation="sequence_mean_token_mean",
    advantage="group_relative",
    clip=(0.2, 0.2),
)
def grpo(logprob_S: Tensor, positions: PositionBatch, config: ObjectiveConfig) -> PolicyTerm:
    """Clipped surrogate with group-relative advantages, mean over each trajectory, then over trajectories."""
    return _clipped_surrogate(_log_ratio(logprob_S, positions), positions, config)


@register_objective("dapo", needs=("advantage", "old_logprob"), advantage="group_relative", clip=(0.2, 0.28))
def dapo(logprob_S: Tensor, positions: PositionBatch, config: ObjectiveConfig) -> PolicyTerm:
    """Clipped surrogate with a wider upper clip and a mean over all tokens (Yu et al. 2025)."""
    return _clipped_surrogate(_log_ratio(logprob_S, positions), positions, config)


@register_objective(
    "gspo",
    needs=("advantage", "old_logprob"),
    aggregation="sequence_mean_token_mean",
    advantage="group_relative",
    clip=(3e-4, 4e-4),
)
def gspo(logprob_S: Tensor, positions: PositionBatch, config: ObjectiveConfig) -> PolicyTerm:
    """Clipped surrogate on the trajectory's ratio ``exp(mean log ratio over trained tokens)`` (Zheng et al. 2025).

    Every position of a trajectory carries the same ratio. The mean is not weighted. Where advantages or weights differ
    inside a trajectory the gradient is still the derivative of the loss, not that of GSPO-token.
    """
    log_ratio_S = _log_ratio(logprob_S, positions).to(torch.float64)
    count_N = positions.sum_per_trajectory(positions.mask_S.to(torch.float64))
    mean_N = positions.sum_per_trajectory(log_ratio_S) / count_N.clamp(min=1.0)
    sequence_S = torch.where(positions.mask_S, mean_N[positions.trajectory_S], 0.0)
    return _clipped_surrogate(sequence_S.to(logprob_S.dtype), positions, config)


def _log_ratio(logprob_S: Tensor, positions: PositionBatch) -> Tensor:
    old_logprob_S = _required(positions.old_logprob_S, "old_logprob")
    return logprob_S - old_logprob_S.to(logprob_S.dtype)


def _clipped_surrogate(log_ratio_S: Tensor, positions: PositionBatch, config: ObjectiveConfig) -> PolicyTerm:
    """Return ``-min(r A, clip(r) A)``, bounded by the dual clip, with the metrics of the ratio.

    Positions whose clip is active are constants, so their ratio is never exponentiated inside the graph: a ratio that
    overflows on the clipped side gives neither an infinite loss nor ``0 * inf = nan`` in the gradient.
    """
    advantage_S = _required(positions.advantage_S, "advantage").to(log_ratio_S.dtype)
    ratio_S = log_ratio_S.detach().exp()
    bound_S = torch.ones_like(ratio_S)
    # A position without advantage has no loss and no gradient, whatever its ratio.
    constant_S = advantage_S == 0
    clipped: list[tuple[str, float, Tensor]] = []
    if config.clip_low > 0:
        low = 1.0 - config.clip_low
        clipped.append(("clip_fraction_low", low, (advantage_S < 0) & (ratio_S < low)))
    if config.clip_high > 0:
        high = 1.0 + config.clip_high
        clipped.append(("clip_fraction_high", high, (advantage_S > 0) & (ratio_S > high)))
    if config.dual_clip > 0:
        clipped.append(("clip_fraction_dual", config.dual_clip, (advantage_S < 0) & (ratio_S > config.dual_clip)))
    for _, bound, is_clipped_S in clipped:
        bound_S = torch.where(is_clipped_S, bound, bound_S)
        constant_S = constant_S | is_clipped_S
    effective_S = torch.where(constant_S, bound_S, torch.where(constant_S, 0.0, log_ratio_S).exp())
    trained_S = positions.mask_S
    metrics = {
        "ratio_mean": Metric.over("mean", ratio_S, trained_S),
        "ratio_max": Metric.over("max", ratio_S, trained_S),
        "ratio_min": Metric.over("min", ratio_S, trained_S),
    }
    metrics |= {name: Metric.over("mean", is_clipped_S, trained_S) for name, _, is_clipped_S in clipped}
    return PolicyTerm(-advantage_S * effective_S, metrics)


def _required(value_S: Tensor | None, name: str) -> Tensor:
    # Objective.__call__ has checked the declared needs; a None here means a term that reads what it did not declare.
    assert value_S is not None, f"the objective reads {name} without declaring it in needs"
    return value_S
