"""Settings of the objective: section ``[rl]`` of a training configuration.

Every field is a plain ``str``, ``float`` or ``int`` so that TOML and the command line can hold it. The empty string and
``-1.0`` stand for "the objective's own default"; ``0.0`` switches a numeric feature off.
"""

# No `from __future__ import annotations`: torchtitan's ConfigManager reads the real types of a section's fields.
import math
from dataclasses import dataclass

AGGREGATIONS = (
    "token_mean",
    "sequence_mean_token_mean",
    "sequence_mean_token_sum",
    "sequence_mean_token_sum_norm",
)
ADVANTAGES = ("given", "group_relative", "group_mean", "reward")
KL_ESTIMATORS = ("k1", "k2", "k3")
MISSING_OLD_LOGPROBS = ("compute", "error")
OBJECTIVE_DEFAULT = -1.0


@dataclass(frozen=True)
class ObjectiveConfig:
    """What is optimised, and how per-position terms become one number.

    Raises:
        ValueError: If a value lies outside its range; the message names the field as ``rl.<field>``.
    """

    objective: str = "sft"
    """Registered name: sft, reinforce, grpo, ppo_clip, dapo, gspo, or one registered by ``register_objective``."""

    aggregation: str = ""
    """How positions are averaged: token_mean | sequence_mean_token_mean | sequence_mean_token_sum |
    sequence_mean_token_sum_norm. "" = the objective's default. Denominators are those of the whole step."""

    sequence_norm_tokens: float = 0.0
    """Tokens. The constant that divides every trajectory's sum under sequence_mean_token_sum_norm; 0 = not used."""

    clip_low: float = OBJECTIVE_DEFAULT
    """Dimensionless. Ratios below ``1 - clip_low`` are clipped where the advantage is negative.
    -1 = the objective's default, 0 = this side is not clipped."""

    clip_high: float = OBJECTIVE_DEFAULT
    """Dimensionless. Ratios above ``1 + clip_high`` are clipped where the advantage is positive.
    -1 = the objective's default, 0 = this side is not clipped."""

    dual_clip: float = 0.0
    """Dimensionless, > 1. Upper bound of the ratio where the advantage is negative (dual-clip PPO); 0 = off."""

    kl_coef: float = 0.0
    """Per nat. Weight of the KL divergence to the reference policy, a term of the loss; 0 = off. Needs
    ``ref_logprobs``. Rewards are never changed by it."""

    kl_estimator: str = "k3"
    """Estimator of the KL to the reference: k1 | k2 | k3. See docs/objectives.md for what their gradients estimate."""

    entropy_coef: float = 0.0
    """Per nat. Weight of the entropy bonus, which is subtracted from the loss; 0 = off."""

    advantage: str = ""
    """Source of advantages: given (column ``advantages``) | group_relative (reward minus the group's mean, over the
    group's standard deviation) | group_mean (no division) | reward. "" = the objective's default."""

    advantage_eps: float = 1e-6
    """Unit of the reward. Added to the group's standard deviation under group_relative."""

    tis_cap: float = 0.0
    """Dimensionless. Truncated importance sampling: the policy term of a position is multiplied by
    ``min(exp(old - sampler), tis_cap)``; 0 = off. Needs the sampler's ``logprobs``."""

    missing_old_logprobs: str = "compute"
    """When a batch holds no ``old_logprobs`` and the objective needs them: compute (a forward-only pass before the
    batch's first update) | error."""

    epochs: int = 1
    """Passes over each batch of rollouts."""

    mini_batches: int = 1
    """Optimizer steps per epoch. Each mini-batch is a step of its own, with its own denominators."""

    def __post_init__(self) -> None:
        if not self.objective:
            raise ValueError("rl.objective is empty; name a registered objective, e.g. 'grpo'")
        _one_of("aggregation", self.aggregation, ("", *AGGREGATIONS))
        _one_of("advantage", self.advantage, ("", *ADVANTAGES))
        _one_of("kl_estimator", self.kl_estimator, KL_ESTIMATORS)
        _one_of("missing_old_logprobs", self.missing_old_logprobs, MISSING_OLD_LOGPROBS)
        for name in ("kl_coef", "entropy_coef", "tis_cap", "sequence_norm_tokens"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0.0):
                raise ValueError(f"rl.{name} is {value}; it must be finite and >= 0 (0 = off)")
        if not (math.isfinite(self.advantage_eps) and self.advantage_eps > 0.0):
            raise ValueError(f"rl.advantage_eps is {self.advantage_eps}; it must be finite and > 0")
        if self.clip_low != OBJECTIVE_DEFAULT and not 0.0 <= self.clip_low < 1.0:
            raise ValueError(f"rl.clip_low is {self.clip_low}; it must lie in [0, 1), or be -1 for the default")
        if self.clip_high != OBJECTIVE_DEFAULT and not (math.isfinite(self.clip_high) and self.clip_high >= 0.0):
            raise ValueError(f"rl.clip_high is {self.clip_high}; it must be finite and >= 0, or -1 for the default")
        if self.dual_clip != 0.0 and not (math.isfinite(self.dual_clip) and self.dual_clip > 1.0):
            raise ValueError(f"rl.dual_clip is {self.dual_clip}; it must be > 1, or 0 for off")
        for name in ("epochs", "mini_batches"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"rl.{name} is {value}; it must be an integer >= 1")
        # With the aggregation left to the objective, the same check is made again once it is resolved.
        check_sequence_norm(self)


def check_sequence_norm(config: ObjectiveConfig) -> None:
    """Check that ``sequence_norm_tokens`` is set exactly when the aggregation uses it.

    Args:
        config: Settings; an empty ``aggregation`` is only refused together with a set constant once resolved.

    Raises:
        ValueError: If the constant is missing, or set where nothing reads it.
    """
    uses_constant = config.aggregation == "sequence_mean_token_sum_norm"
    if uses_constant and config.sequence_norm_tokens == 0.0:
        raise ValueError(
            "rl.aggregation = 'sequence_mean_token_sum_norm' divides by rl.sequence_norm_tokens, which is 0; "
            "set it to a number of tokens, e.g. the longest response allowed"
        )
    if config.aggregation and not uses_constant and config.sequence_norm_tokens != 0.0:
        raise ValueError(
            f"rl.sequence_norm_tokens is {config.sequence_norm_tokens}, but rl.aggregation = {config.aggregation!r} "
            "does not read it; set it to 0 or use 'sequence_mean_token_sum_norm'"
        )


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        shown = ", ".join(repr(choice) for choice in allowed)
        raise ValueError(f"rl.{name} is {value!r}; it must be one of {shown}")
