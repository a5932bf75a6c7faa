"""Router losses, expert counts and bias updates, weighted so that they equal those of the expanded batch.

Every function takes the router outputs of one model call. A consumer that is executed in several calls (expanded mode)
passes the position count of the whole set and, for load balancing, the assignment counts of the whole set: the
results of its calls then add up to the consumer's loss exactly. Losses are summed over MoE layers.

Letters: T compact rows, N trajectories, J parts, A experts per row, E experts; S = positions of the consumer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from harts_titan.models.common.moe import RouterOutput
from harts_titan.models.common.tree_statistics import TreeStatistics


def _part_counts(routed: RouterOutput, statistics: TreeStatistics) -> Tensor:
    """int64 (J, E): rows of each part that chose each expert."""
    num_experts = routed.logits_TE.shape[1]
    cell_R = (statistics.part_T[:, None] * num_experts + routed.topk_TA).reshape(-1)
    counts = cell_R.new_zeros(statistics.num_parts * num_experts)
    # Integer additions are exact in any order.
    return counts.index_add_(0, cell_R, torch.ones_like(cell_R)).view(statistics.num_parts, num_experts)


def _probabilities(routed: RouterOutput) -> Tensor:
    score_TE = torch.sigmoid(routed.logits_TE)
    return score_TE / score_TE.sum(dim=1, keepdim=True)


def expert_counts(router: Sequence[RouterOutput], multiplicity_T: Tensor, *, num_experts: int = 0) -> Tensor:
    """Assignments of every expert over the expanded positions.

    Args:
        router: Outputs of the MoE layers, in layer order.
        multiplicity_T: int64 positions that share each row.
        num_experts: Only read if there is no MoE layer.

    Returns:
        int64 (number of MoE layers, E); each row sums to A times the positions of the call.
    """
    if not router:
        return torch.zeros(0, num_experts, dtype=torch.int64, device=multiplicity_T.device)
    counts = []
    for routed in router:
        top_k, num_experts = routed.topk_TA.shape[1], routed.logits_TE.shape[1]
        weight_R = multiplicity_T.repeat_interleave(top_k, output_size=routed.topk_TA.numel())
        # Integer additions are exact in any order.
        counts.append(weight_R.new_zeros(num_experts).index_add_(0, routed.topk_TA.reshape(-1), weight_R))
    return torch.stack(counts)


def z_loss(router: Sequence[RouterOutput], multiplicity_T: Tensor, *, num_positions: int) -> Tensor:
    """Mean over positions of ``logsumexp(router logits)^2``.

    Args:
        router: Outputs of the MoE layers.
        multiplicity_T: int64 positions that share each row.
        num_positions: S of the consumer.

    Returns:
        Scalar, at least float32; 0 without MoE layers.
    """
    if not router:
        return torch.zeros((), device=multiplicity_T.device)
    total = router[0].logits_TE.new_zeros(())
    for routed in router:
        square_T = torch.logsumexp(routed.logits_TE, dim=1).square()
        total = total + (square_T * multiplicity_T).sum()
    return total / num_positions


def load_balancing_loss(
    router: Sequence[RouterOutput],
    multiplicity_T: Tensor,
    *,
    num_positions: int,
    counts_LE: Tensor | None = None,
) -> Tensor:
    """Load-balancing loss of a consumer: ``E / (A * S) * sum_e count_e * P_e``.

    ``count_e`` are the consumer's assignments and ``P_e`` is the mean over its positions of ``score_e / sum(score)``.

    Args:
        router: Outputs of the MoE layers of one call.
        multiplicity_T: int64 positions that share each row.
        num_positions: S of the consumer.
        counts_LE: int64 assignments of the whole consumer (:func:`expert_counts` summed over its calls). Default: this
            call is the whole consumer.

    Returns:
        Scalar, at least float32: this call's share of the consumer's loss; 0 without MoE layers.
    """
    if not router:
        return torch.zeros((), device=multiplicity_T.device)
    if counts_LE is None:
        counts_LE = expert_counts(router, multiplicity_T)
    mass_LE = probability_mass(router, multiplicity_T)
    return balance(counts_LE, mass_LE, top_k=router[0].topk_TA.shape[1], num_positions=num_positions)


def probability_mass(router: Sequence[RouterOutput], multiplicity_T: Tensor) -> Tensor:
    """Sum of ``score_e / sum(score)`` over the expanded positions of one call.

    Args:
        router: Outputs of the MoE layers, at least one.
        multiplicity_T: int64 positions that share each row.

    Returns:
        (number of MoE layers, E), at least float32, differentiable. Sums over the calls of a consumer are its own.
    """
    return torch.stack([(_probabilities(routed) * multiplicity_T[:, None]).sum(dim=0) for routed in router])


def balance(counts_LE: Tensor, mass_LE: Tensor, *, top_k: int, num_positions: int) -> Tensor:
    """Combine assignment counts and probability mass into the load-balancing loss, summed over layers.

    Args:
        counts_LE: int64 assignments of the whole consumer.
        mass_LE: Probability mass of the whole consumer, or of one of its calls for that call's share.
        top_k: A.
        num_positions: S of the consumer.
    """
    scale = counts_LE.shape[1] / (top_k * num_positions**2)
    return scale * (counts_LE.to(mass_LE.dtype) * mass_LE).sum()


def trajectory_load_balancing_loss(
    router: Sequence[RouterOutput], statistics: TreeStatistics, *, num_positions: int
) -> Tensor:
    """Load-balancing loss of each trajectory, averaged with weights length / S.

    Counts and probabilities of a trajectory are sums along its path, so shared rows are visited once. Trajectories are
    never split over calls, so the shares of several calls add up without further information.

    Args:
        router: Outputs of the MoE layers of one call.
        statistics: Tables of the same call.
        num_positions: S of the consumer.

    Returns:
        Scalar, at least float32; 0 without MoE layers.

    Memory: O(J E + N E) beyond the router outputs; no per-position tensor.
    """
    if not router:
        return torch.zeros((), device=statistics.multiplicity_T.device)
    total = router[0].logits_TE.new_zeros(())
    for routed in router:
        mass_JE = statistics.part_sums(_probabilities(routed))
        with torch.no_grad():
            count_NE = statistics.trajectory_sums(_part_counts(routed, statistics))
            # d loss / d mass: the same for every row of a part.
            slope_NE = count_NE.to(mass_JE.dtype) / statistics.length_N[:, None].to(mass_JE.dtype)
            slope_JE = statistics.sums_over_trajectories(slope_NE)
        scale = routed.logits_TE.shape[1] / (routed.topk_TA.shape[1] * num_positions)
        total = total + scale * (slope_JE * mass_JE).sum()
    return total


@torch.no_grad()
def update_expert_bias(biases: Sequence[Tensor], counts_LE: Tensor, *, rate: float) -> None:
    """Move every expert's bias by ``rate * sign(mean count - count)``, in place.

    Counts stay integers until the sign, so the update is the same whatever the number of calls or replicas.

    Args:
        biases: float32 (E,) buffer of each MoE layer.
        counts_LE: int64 assignments of the whole step, all consumers and replicas.
        rate: Step; 0 changes nothing.

    Raises:
        ValueError: If the counts are not int64 or do not match the layers.
    """
    if counts_LE.dtype != torch.int64 or counts_LE.shape[0] != len(biases):
        raise ValueError(
            f"expert counts are {counts_LE.dtype} of {counts_LE.shape[0]} layers; int64 of {len(biases)} is needed"
        )
    for bias_E, count_E in zip(biases, counts_LE, strict=True):
        direction_E = torch.sign(count_E.sum() - count_E * count_E.numel())
        bias_E.add_(direction_E.to(bias_E.dtype), alpha=rate)
