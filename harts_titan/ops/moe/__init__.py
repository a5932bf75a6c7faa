"""Mixture of experts: scores, choices, routes, row movement and the experts' feed-forward."""

from harts_titan.ops.moe.op import (
    Routes,
    build_routes,
    choose_experts,
    combine,
    dispatch,
    expert_mlp,
    router_logits,
)
from harts_titan.ops.moe.reference import select_experts

__all__ = [
    "Routes",
    "build_routes",
    "choose_experts",
    "combine",
    "dispatch",
    "expert_mlp",
    "router_logits",
    "select_experts",
]
