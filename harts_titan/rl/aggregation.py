"""Per-position coefficients that turn a sum over one call into its share of the step's loss.

Letters: S semantic positions, N trajectories.
"""

from __future__ import annotations

import torch
from torch import Tensor

from harts_titan.rl.config import AGGREGATIONS, ObjectiveConfig
from harts_titan.rl.positions import PositionBatch, StepTotals


def position_coefficients(positions: PositionBatch, totals: StepTotals, config: ObjectiveConfig) -> Tensor:
    """Return the factor of each position's term in the step's loss; 0 where not trained.

    The loss of a call is ``sum_s coefficient_s * term_s``, and the sum over all calls of a step is the loss of the
    expanded batch. A step without any trained position gives 0 everywhere instead of 0/0.

    Args:
        positions: Positions of the call, already ``masked()``.
        totals: Denominators of the whole step.
        config: Settings with ``aggregation`` resolved.

    Returns:
        float64 (S,).

    Raises:
        ValueError: If ``aggregation`` is unknown.
    """
    trained_S = positions.mask_S
    weight_S = trained_S.to(torch.float64) if positions.weight_S is None else positions.weight_S.to(torch.float64)
    if config.aggregation == "token_mean":
        return weight_S * _inverse(totals.weighted_tokens)
    per_sequence = _inverse(totals.trained_trajectories)
    if config.aggregation == "sequence_mean_token_mean":
        weight_N = positions.sum_per_trajectory(weight_S)
        # A trajectory without trained positions has weight 0 and no numerator either; any divisor but 0 will do.
        weight_N = torch.where(weight_N > 0, weight_N, 1.0)
        return weight_S / weight_N[positions.trajectory_S] * per_sequence
    if config.aggregation == "sequence_mean_token_sum":
        return weight_S * per_sequence
    if config.aggregation == "sequence_mean_token_sum_norm":
        return weight_S * per_sequence * _inverse(config.sequence_norm_tokens)
    raise ValueError(f"rl.aggregation is {config.aggregation!r}; it must be one of {AGGREGATIONS}")


def _inverse(denominator: float) -> float:
    return 1.0 / denominator if denominator > 0 else 0.0
