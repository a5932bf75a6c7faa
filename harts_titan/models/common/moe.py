"""Mixture of experts with sigmoid scores, group-limited deterministic top-k and no dropping.

Letters: T rows, A experts per row, R = T * A routed rows, E experts, G expert groups of Z experts, D model dimension,
F expert hidden dimension.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from harts_titan.models.common.dtypes import WideModule
from harts_titan.models.common.feed_forward import FeedForward, swiglu
from harts_titan.ops.grouped_mm import grouped_mm
from harts_titan.ops.moe import build_routes, choose_experts, combine, dispatch, expert_mlp, router_logits


class RouterOutput(NamedTuple):
    """Router logits and choices of one MoE layer; a named tuple so that sharding hooks see its tensors."""

    logits_TE: Tensor
    """At least float32; differentiable."""
    topk_TA: Tensor
    """int64 chosen experts, best biased score first."""


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
        logits_TE = router_logits(x_TD, self.gate.weight)
        topk_TA, weight_TA = choose_experts(
            logits_TE,
            self.expert_bias,
            topk_TA,
            num_groups=self.num_groups,
            top_groups=self.top_groups,
            top_k=self.top_k,
            route_scale=self.route_scale,
        )
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
        weights = (self.w1, self.w2, self.w3)
        y_RD = expert_mlp(x_RD, weights, counts_E, limit=self.limit, grouped_backend=backend)
        if y_RD is not None:
            return y_RD
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
        shared_TD = self.shared_experts(x_TD) if self.shared_experts is not None else None
        return combine(y_RD, weight_TA, routes, shared_TD), routed
