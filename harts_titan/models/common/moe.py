"""Mixture of experts with sigmoid scores, group-limited deterministic top-k and no dropping.

Letters: T rows, A experts per row, R = T * A routed rows, E experts, G expert groups of Z experts, D model dimension,
F expert hidden dimension.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harts_titan.models.common.dispatch import build_routes, combine, dispatch
from harts_titan.models.common.dtypes import WideModule
from harts_titan.models.common.feed_forward import FeedForward, swiglu
from harts_titan.ops.dtypes import wide_dtype
from harts_titan.ops.grouped_mm import grouped_mm


class RouterOutput(NamedTuple):
    """Router logits and choices of one MoE layer; a named tuple so that sharding hooks see its tensors."""

    logits_TE: Tensor
    """At least float32; differentiable."""
    topk_TA: Tensor
    """int64 chosen experts, best biased score first."""


def select_experts(biased_TE: Tensor, *, num_groups: int, top_groups: int, top_k: int) -> Tensor:
    """Choose experts inside the best groups; ties go to the lower index, so the choice never depends on the kernel.

    Args:
        biased_TE: Score plus selection bias.
        num_groups: G; consecutive experts form a group. A group's score is the sum of its two best biased scores.
        top_groups: Groups that stay eligible.
        top_k: A.

    Returns:
        int64 (T, A), best first.
    """
    if top_groups < num_groups:
        grouped_TGZ = biased_TE.unflatten(1, (num_groups, -1))
        group_TG = grouped_TGZ.topk(min(2, grouped_TGZ.shape[2]), dim=2).values.sum(dim=2)
        best = torch.sort(group_TG, dim=1, descending=True, stable=True).indices[:, :top_groups]
        eligible_TG = torch.zeros_like(group_TG, dtype=torch.bool).scatter_(1, best, True)
        biased_TE = grouped_TGZ.masked_fill(~eligible_TG[:, :, None], float("-inf")).flatten(1)
    return torch.sort(biased_TE, dim=1, descending=True, stable=True).indices[:, :top_k]


class Router(WideModule):
    """Scores the experts. ``expert_bias`` steers the choice only, never the weights, and stays float32."""

    fixed_float32 = ("expert_bias",)
    expert_bias: Tensor

    def __init__(
        self, dim: int, num_experts: int, *, top_k: int, num_groups: int, top_groups: int, route_scale: float
    ) -> None:
        super().__init__()
        self.top_k, self.num_groups, self.top_groups, self.route_scale = top_k, num_groups, top_groups, route_scale
        self.gate = nn.Linear(dim, num_experts, bias=False)
        self.register_buffer("expert_bias", torch.zeros(num_experts, dtype=torch.float32))

    def forward(self, x_TD: Tensor, topk_TA: Tensor | None = None) -> tuple[RouterOutput, Tensor]:
        """Route each row.

        Args:
            x_TD: Normalised hidden rows.
            topk_TA: Choices of the first execution when this is a recomputation, which must never re-route. A compiled
                layer has one graph for both: it always gets a tensor, -1 in the first execution.

        Returns:
            The logits and choices, and the combination weights (T, A) in at least float32:
            ``score / (sum of chosen scores + 1e-20) * route_scale``, without the bias.
        """
        wide = wide_dtype(x_TD.dtype)
        logits_TE = F.linear(x_TD.to(wide), self.gate.weight.to(wide))
        score_TE = torch.sigmoid(logits_TE)
        if topk_TA is None or torch.compiler.is_compiling():
            with torch.no_grad():
                chosen_TA = select_experts(
                    score_TE + self.expert_bias,
                    num_groups=self.num_groups,
                    top_groups=self.top_groups,
                    top_k=self.top_k,
                )
            topk_TA = chosen_TA if topk_TA is None else torch.where(topk_TA < 0, chosen_TA, topk_TA)
        chosen_TA = score_TE.gather(1, topk_TA)
        weight_TA = chosen_TA / (chosen_TA.sum(dim=1, keepdim=True) + 1e-20) * self.route_scale
        return RouterOutput(logits_TE, topk_TA), weight_TA


class GroupedExperts(nn.Module):
    """All experts of a layer as three 3-D parameters, in the orientation of the published checkpoints."""

    def __init__(self, dim: int, hidden_dim: int, num_experts: int, *, limit: float = 0.0) -> None:
        super().__init__()
        self.limit = limit
        self.w1 = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))
        self.w2 = nn.Parameter(torch.empty(num_experts, dim, hidden_dim))
        self.w3 = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))

    def forward(self, x_RD: Tensor, counts_E: Tensor, *, backend: str = "auto") -> Tensor:
        """Return (R, D): each expert's SwiGLU on its rows; zero rows are legal."""
        gate_RF = grouped_mm(x_RD, self.w1.transpose(1, 2), counts_E, backend=backend)
        up_RF = grouped_mm(x_RD, self.w3.transpose(1, 2), counts_E, backend=backend)
        return grouped_mm(swiglu(gate_RF, up_RF, self.limit), self.w2.transpose(1, 2), counts_E, backend=backend)


class MoE(nn.Module):
    """Routed experts plus a shared expert; every routed row is computed, none is dropped."""

    def __init__(
        self,
        router: Router,
        experts: GroupedExperts,
        shared_experts: FeedForward | None,
    ) -> None:
        super().__init__()
        self.router = router
        self.experts = experts
        self.shared_experts = shared_experts

    def forward(
        self, x_TD: Tensor, topk_TA: Tensor | None = None, *, backend: str = "auto"
    ) -> tuple[Tensor, RouterOutput]:
        """Run the experts.

        Args:
            x_TD: Normalised hidden rows.
            topk_TA: Choices to repeat, see :meth:`Router.forward`.
            backend: Of the grouped GEMM.

        Returns:
            (T, D) in the dtype of ``x_TD``, and what the router decided.
        """
        routed, weight_TA = self.router(x_TD, topk_TA)
        routes = build_routes(routed.topk_TA, routed.logits_TE.shape[1])
        y_RD = self.experts(dispatch(x_TD, routes), routes.counts_E, backend=backend)
        y_TD = combine(y_RD, weight_TA, routes)
        if self.shared_experts is not None:
            y_TD = y_TD + self.shared_experts(x_TD)
        return y_TD, routed
