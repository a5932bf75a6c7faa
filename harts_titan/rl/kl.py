"""Estimators of the KL divergence between two policies from log-probs of sampled tokens (Schulman 2020)."""

from __future__ import annotations

import torch
from torch import Tensor

from harts_titan.rl.config import KL_ESTIMATORS


def kl_estimate(logprob_S: Tensor, other_logprob_S: Tensor, *, estimator: str) -> Tensor:
    """Estimate KL(policy || other) per position, for labels sampled from ``policy``.

    With ``d = logprob - other``: k1 is ``d``, k2 is ``d**2 / 2``, k3 is ``exp(-d) - 1 + d``. The gradient is the
    derivative of that value. As a loss term k1 has gradient ``grad logprob``, whose expectation under the policy is 0,
    so k1 does not pull towards the reference; k2's gradient ``d * grad logprob`` is the unbiased one of the reverse KL;
    k3's, ``(1 - exp(-d)) * grad logprob``, agrees with it to first order in d and is biased beyond.

    Args:
        logprob_S: Log-probs of the policy, nats. Differentiable.
        other_logprob_S: Log-probs of the other policy, nats.
        estimator: k1 | k2 | k3.

    Returns:
        Same shape as ``logprob_S``.

    Raises:
        ValueError: If the estimator is unknown.
    """
    difference_S = logprob_S - other_logprob_S
    if estimator == "k1":
        return difference_S
    if estimator == "k2":
        return 0.5 * difference_S.square()
    if estimator == "k3":
        # expm1 keeps the estimate non-negative and exact where the policies almost agree.
        return torch.expm1(-difference_S) + difference_S
    raise ValueError(f"rl.kl_estimator is {estimator!r}; it must be one of {KL_ESTIMATORS}")
