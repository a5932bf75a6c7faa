"""A configured objective: what it needs of a batch, and its loss and metrics for one call.

Letters: S semantic positions, N trajectories.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

import harts_titan.rl.objectives  # noqa: F401  registers the built-in objectives
from harts_titan.ops.dtypes import wide_dtype
from harts_titan.rl.advantages import trajectory_advantages
from harts_titan.rl.aggregation import position_coefficients
from harts_titan.rl.config import OBJECTIVE_DEFAULT, ObjectiveConfig, check_sequence_norm
from harts_titan.rl.kl import kl_estimate
from harts_titan.rl.metrics import Metric
from harts_titan.rl.positions import PositionBatch, StepTotals
from harts_titan.rl.registry import ObjectiveSpec, objective_spec

# Input of an objective -> column of a rollout batch.
BATCH_FIELD = {
    "advantage": "advantages",
    "old_logprob": "old_logprobs",
    "ref_logprob": "ref_logprobs",
    "sampler_logprob": "logprobs",
}


@dataclass(frozen=True)
class ObjectiveOutput:
    """Loss and metrics of one call."""

    loss: Tensor
    """float64 scalar: this call's share of the step's loss. Shares add up over calls and ranks; nothing is left to
    divide. A data-parallel wrapper that averages gradients over ranks must be undone by its number of ranks."""

    loss_S: Tensor
    """float64 (S,), detached: each position's share of ``loss``. Tells which trajectory made a loss non-finite."""

    metrics: dict[str, Metric]
    """Partial figures; combine with ``merge_metrics`` and ``all_reduce_metrics``."""


@dataclass(frozen=True)
class Objective:
    """An objective with every default resolved. Build it with ``build_objective``."""

    spec: ObjectiveSpec
    """The registered policy term."""

    config: ObjectiveConfig
    """Settings without "objective's default" values: what is really used."""

    @property
    def name(self) -> str:
        """Registered name."""
        return self.spec.name

    @property
    def needs(self) -> frozenset[str]:
        """Inputs needed under this configuration, out of advantage, old_logprob, ref_logprob, sampler_logprob."""
        needs = set(self.spec.needs)
        if self.config.kl_coef > 0:
            needs.add("ref_logprob")
        if self.config.tis_cap > 0:
            needs |= {"sampler_logprob", "old_logprob"}
        return frozenset(needs)

    @property
    def needs_entropy(self) -> bool:
        """Whether the entropy must be given with its graph."""
        return self.config.entropy_coef > 0

    @property
    def computes_advantages(self) -> bool:
        """Whether advantages are derived from rewards instead of read from the batch."""
        return "advantage" in self.needs and self.config.advantage != "given"

    def must_compute_old_logprobs(self, available: Collection[str]) -> bool:
        """Whether a forward-only pass must supply the old log-probs before the batch's first update.

        Args:
            available: Names of the columns the batch has (``RolloutBatch`` fields that are not None).
        """
        return "old_logprob" in self.needs and "old_logprobs" not in available

    def check_inputs(self, available: Collection[str]) -> None:
        """Refuse a batch that lacks a column, before any compute.

        Rewards are checked where they are used, in ``advantages``.

        Args:
            available: Names of the columns the batch has (``RolloutBatch`` fields that are not None).

        Raises:
            ValueError: Naming the missing column and the setting that asks for it.
        """
        for need in sorted(self.needs):
            column = BATCH_FIELD[need]
            if column in available or (need == "advantage" and self.computes_advantages):
                continue
            if need == "old_logprob" and self.config.missing_old_logprobs == "compute":
                continue
            raise ValueError(f"the batch has no column {column!r}, which {self._reason(need)}")

    def advantages(
        self,
        reward_N: np.ndarray,
        group_id_N: np.ndarray | None = None,
        *,
        episode_ids: Sequence[str] | None = None,
        trained_N: np.ndarray | Sequence[int] | None = None,
        locations: Sequence[str] | None = None,
    ) -> np.ndarray | None:
        """Compute one advantage per trajectory of a whole batch, before it is cut into mini-batches.

        Args:
            reward_N: float64, NaN = missing.
            group_id_N: int64, -1 = none.
            episode_ids: Episode of each trajectory; rows of one episode count once. None = every row its own.
            trained_N: Trajectories with a trained position, as bool or ``StepTotals.trained_tokens_N``; others need no
                reward.
            locations: File and row of each trajectory, for messages.

        Returns:
            float64 (N,), or None if the objective needs none or reads them from the batch.

        Raises:
            ValueError: If a reward or group id that is needed is missing; the message names the episode.
        """
        if not self.computes_advantages:
            return None
        return trajectory_advantages(
            reward_N,
            group_id_N,
            method=self.config.advantage,
            eps=self.config.advantage_eps,
            episode_ids=episode_ids,
            trained_N=trained_N,
            locations=locations,
        )

    def __call__(
        self, logprob_S: Tensor, entropy_S: Tensor | None, positions: PositionBatch, totals: StepTotals
    ) -> ObjectiveOutput:
        """Compute the share of one call in the loss of the step.

        Args:
            logprob_S: float32/float64 log-probs of the labels, nats, original token order. Differentiable. Untrained
                entries may hold anything.
            entropy_S: Entropy at each position, nats; may be None if ``needs_entropy`` is false.
            positions: Metadata of the same positions, on the same device.
            totals: Denominators of the whole step.

        Returns:
            The loss and its metrics. Without a trained position the loss is exactly 0 and so is every gradient.

        Raises:
            ValueError: If an input the objective needs is None, or shapes differ.
        """
        self._check_call(logprob_S, entropy_S, positions)
        positions = positions.masked()
        trained_S = positions.mask_S
        coefficient_S = position_coefficients(positions, totals, self.config)
        # Log-probs of 16-bit type would make the ratio of unchanged weights differ from 1 by their rounding.
        logprob_S = torch.where(trained_S, logprob_S, 0.0).to(wide_dtype(logprob_S.dtype))
        term = self.spec.term(logprob_S, positions, self.config)
        policy_S = term.loss_S
        metrics = {"trained_tokens": Metric.over("sum", trained_S, trained_S), **term.metrics}
        if self.config.tis_cap > 0:
            tis_weight_S, tis_metrics = _truncated_weights(logprob_S, positions, self.config.tis_cap)
            policy_S = policy_S * tis_weight_S
            metrics |= tis_metrics
        policy_S = torch.where(trained_S, policy_S, 0.0)
        metrics["policy_loss"] = Metric.over("sum", coefficient_S * policy_S.detach(), trained_S)
        total_S = policy_S.to(torch.float64)
        if positions.ref_logprob_S is not None:
            ref_logprob_S = positions.ref_logprob_S.to(logprob_S.dtype)
            policy_logprob_S = logprob_S if self.config.kl_coef > 0 else logprob_S.detach()
            kl_S = kl_estimate(policy_logprob_S, ref_logprob_S, estimator=self.config.kl_estimator)
            metrics["kl_ref"] = Metric.over("mean", kl_S, trained_S)
            if self.config.kl_coef > 0:
                total_S = total_S + self.config.kl_coef * kl_S
        if entropy_S is not None:
            entropy_S = torch.where(trained_S, entropy_S, 0.0)
            metrics["entropy"] = Metric.over("mean", entropy_S, trained_S)
            if self.needs_entropy:
                total_S = total_S - self.config.entropy_coef * entropy_S
        loss_S = coefficient_S * total_S
        metrics["loss"] = Metric.over("sum", loss_S, trained_S)
        metrics |= _common_metrics(logprob_S.detach(), positions)
        return ObjectiveOutput(loss_S.sum(), loss_S.detach(), metrics)

    def _reason(self, need: str) -> str:
        if need == "ref_logprob" and self.config.kl_coef > 0:
            return f"rl.kl_coef = {self.config.kl_coef} needs; supply it or set rl.kl_coef = 0"
        if need in ("sampler_logprob", "old_logprob") and self.config.tis_cap > 0 and need not in self.spec.needs:
            return f"rl.tis_cap = {self.config.tis_cap} needs; supply it or set rl.tis_cap = 0"
        if need == "old_logprob":
            return f"rl.objective = {self.name!r} needs; supply it or set rl.missing_old_logprobs = 'compute'"
        if need == "advantage":
            return (
                f"rl.objective = {self.name!r} with rl.advantage = 'given' needs; supply it or derive advantages from "
                "rewards with rl.advantage = 'group_relative', 'group_mean' or 'reward'"
            )
        return f"rl.objective = {self.name!r} needs; supply it or choose another objective"

    def _check_call(self, logprob_S: Tensor, entropy_S: Tensor | None, positions: PositionBatch) -> None:
        shape = positions.mask_S.shape
        for name, value_S in (("logprob_S", logprob_S), ("entropy_S", entropy_S)):
            if value_S is not None and value_S.shape != shape:
                raise ValueError(f"{name} has shape {tuple(value_S.shape)}; the positions have {tuple(shape)}")
        for need in sorted(self.needs):
            if getattr(positions, f"{need}_S") is None:
                raise ValueError(f"positions.{need}_S is None, which {self._reason(need)}")
        if self.needs_entropy and entropy_S is None:
            raise ValueError(f"entropy_S is None, which rl.entropy_coef = {self.config.entropy_coef} needs")


def build_objective(config: ObjectiveConfig) -> Objective:
    """Look up ``config.objective`` and resolve its defaults.

    Args:
        config: Section ``[rl]``.

    Returns:
        The objective; ``objective.config`` shows the resolved settings.

    Raises:
        ValueError: If the name is unknown, or a setting is given that this objective would ignore.
    """
    spec = objective_spec(config.objective)
    if not spec.clipped:
        for name, off in (("clip_low", OBJECTIVE_DEFAULT), ("clip_high", OBJECTIVE_DEFAULT), ("dual_clip", 0.0)):
            if getattr(config, name) not in (off, 0.0):
                raise ValueError(
                    f"rl.{name} is {getattr(config, name)}, but rl.objective = {spec.name!r} clips no ratios; "
                    f"set it to {off} or choose another objective"
                )
    if "advantage" not in spec.needs:
        if config.advantage:
            raise ValueError(
                f"rl.advantage is {config.advantage!r}, but rl.objective = {spec.name!r} uses no advantages; "
                "set it to ''"
            )
        if config.tis_cap > 0:
            raise ValueError(
                f"rl.tis_cap is {config.tis_cap}, but rl.objective = {spec.name!r} is not a policy gradient: its "
                "targets are not corrected for the sampler; set it to 0"
            )
    resolved = replace(
        config,
        aggregation=config.aggregation or spec.aggregation,
        advantage=(config.advantage or spec.advantage) if "advantage" in spec.needs else "",
        clip_low=spec.clip_low if config.clip_low == OBJECTIVE_DEFAULT else config.clip_low,
        clip_high=spec.clip_high if config.clip_high == OBJECTIVE_DEFAULT else config.clip_high,
    )
    check_sequence_norm(resolved)
    return Objective(spec=spec, config=resolved)


def _truncated_weights(logprob_S: Tensor, positions: PositionBatch, cap: float) -> tuple[Tensor, dict[str, Metric]]:
    """Return ``min(exp(old - sampler), cap)`` per position, without gradient, and its metrics."""
    assert positions.old_logprob_S is not None and positions.sampler_logprob_S is not None
    weight_S = (positions.old_logprob_S.to(logprob_S.dtype) - positions.sampler_logprob_S.to(logprob_S.dtype)).exp()
    capped_S = weight_S.clamp(max=cap)
    return capped_S, {
        "tis_weight_mean": Metric.over("mean", capped_S, positions.mask_S),
        "tis_fraction_truncated": Metric.over("mean", weight_S > cap, positions.mask_S),
    }


def _common_metrics(logprob_S: Tensor, positions: PositionBatch) -> dict[str, Metric]:
    """Figures that any objective reports when the batch has the inputs: k3 estimates, nats."""
    metrics = {"nll": Metric.over("mean", -logprob_S, positions.mask_S)}
    old_logprob_S = None if positions.old_logprob_S is None else positions.old_logprob_S.to(logprob_S.dtype)
    if old_logprob_S is not None:
        # Labels were sampled from the old policy, so this estimates KL(old || current).
        kl_S = kl_estimate(old_logprob_S, logprob_S, estimator="k3")
        metrics["approx_kl"] = Metric.over("mean", kl_S, positions.mask_S)
        if positions.sampler_logprob_S is not None:
            kl_S = kl_estimate(positions.sampler_logprob_S.to(logprob_S.dtype), old_logprob_S, estimator="k3")
            metrics["sampler_kl"] = Metric.over("mean", kl_S, positions.mask_S)
    if positions.advantage_S is not None:
        metrics["advantage_mean"] = Metric.over("mean", positions.advantage_S, positions.mask_S)
    return metrics
