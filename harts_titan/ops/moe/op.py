"""Public ops of the mixture of experts: score, choose, route, move, compute, combine.

Letters: T rows, A experts per row, R = T * A routed rows (sorted by expert), E experts, D model dimension, F expert
hidden dimension.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from harts_titan.ops.backend import AUTO, choose
from harts_titan.ops.dtypes import wide_dtype
from harts_titan.ops.grouped_mm import runs_grouped
from harts_titan.ops.moe.reference import Combine, Dispatch, routes_reference, select_experts


class Routes(NamedTuple):
    """Where the routed rows of one layer go."""

    order_R: Tensor
    """int64 flat (row, slot) index ``t * A + a`` of each routed row, in expert order, inside an expert in row order."""
    place_TA: Tensor
    """int64 routed row of each (row, slot): the inverse of ``order_R``."""
    counts_E: Tensor
    """int64 routed rows of each expert."""


def router_logits(x_TD: Tensor, weight_ED: Tensor, *, backend: str = AUTO) -> Tensor:
    """Scores before the sigmoid, ``x @ weight^T``, in at least float32.

    bfloat16 rows and weights have exact products, so the kernel form needs no float32 copies: forward sums them in
    float32; backward splits the float32 gradient into three bfloat16 matrices whose sum it is.

    Args:
        x_TD: Hidden rows.
        weight_ED: The router's weight.
        backend: "auto", "triton" or "reference"; other dtypes than bfloat16 take the plain product either way.
    """
    if x_TD.dtype == weight_ED.dtype == torch.bfloat16 and _kernels(x_TD, backend):
        from harts_titan.ops.moe import triton_op

        return triton_op.router_logits(x_TD, weight_ED)
    wide = wide_dtype(x_TD.dtype)
    return F.linear(x_TD.to(wide), weight_ED.to(wide))


def choose_experts(
    logits_TE: Tensor,
    bias_E: Tensor,
    previous_TA: Tensor | None = None,
    *,
    num_groups: int,
    top_groups: int,
    top_k: int,
    route_scale: float,
    backend: str = AUTO,
) -> tuple[Tensor, Tensor]:
    """Choose each row's experts on ``sigmoid(logits) + bias`` and weigh them by their scores alone.

    Args:
        logits_TE: At least float32.
        bias_E: float32 selection bias.
        previous_TA: int64 choices to repeat; in a compiled layer all -1 to choose anew. None: choose.
        num_groups: Consecutive experts form a group, scored by the sum of its two best.
        top_groups: Groups that stay eligible.
        top_k: A.
        route_scale: Factor of the weights.
        backend: "auto", "triton" or "reference".

    Returns:
        int64 (T, A) experts, best first, ties to the lower index; and the weights
        ``score / (sum of chosen scores + 1e-20) * route_scale``, in the dtype of the logits and differentiable in them.

    Raises:
        ValueError: If the eligible groups hold fewer than ``top_k`` experts.
    """
    num_experts = logits_TE.shape[1]
    if top_groups * (num_experts // num_groups) < top_k:
        raise ValueError(
            f"{top_groups} of {num_groups} groups of {num_experts} experts hold fewer than top_k = {top_k} experts"
        )
    powers_of_two = num_experts & (num_experts - 1) == 0 and num_groups & (num_groups - 1) == 0
    if logits_TE.dtype == torch.float32 and powers_of_two and _kernels(logits_TE, backend):
        from harts_titan.ops.moe import triton_op

        return triton_op.choose_experts(logits_TE, bias_E, previous_TA, num_groups, top_groups, top_k, route_scale)
    score_TE = torch.sigmoid(logits_TE)
    topk_TA = previous_TA
    # A compiled layer has one graph for a first execution (all -1) and its recomputation (none).
    if topk_TA is None or torch.compiler.is_compiling():
        with torch.no_grad():
            new_TA = select_experts(score_TE + bias_E, num_groups=num_groups, top_groups=top_groups, top_k=top_k)
        topk_TA = new_TA if topk_TA is None else torch.where(topk_TA < 0, new_TA, topk_TA)
    chosen_TA = score_TE.gather(1, topk_TA)
    return topk_TA, chosen_TA / (chosen_TA.sum(dim=1, keepdim=True) + 1e-20) * route_scale


def build_routes(topk_TA: Tensor, num_experts: int, *, backend: str = AUTO) -> Routes:
    """Sort the assignments by expert without waiting for the device.

    Args:
        topk_TA: int64 chosen experts, in [0, E).
        num_experts: E.
        backend: "auto", "triton" (counting sort) or "reference".
    """
    # The choice does not depend on the rows' dtype, which is not known here.
    if choose("moe", backend, device=topk_TA.device, dtype=torch.float32) == "triton":
        from harts_titan.ops.moe import triton_op

        return Routes(*triton_op.expert_routes(topk_TA, num_experts))
    return Routes(*routes_reference(topk_TA, num_experts))


def dispatch(x_TD: Tensor, routes: Routes, *, backend: str = AUTO) -> Tensor:
    """Copy each row to its A experts: (R, D), sorted by expert. Differentiable in ``x_TD``.

    Args:
        x_TD: Rows.
        routes: From :func:`build_routes`.
        backend: "auto", "triton" or "reference".
    """
    if _kernels(x_TD, backend):
        from harts_titan.ops.moe import triton_op

        return triton_op.dispatch_rows(x_TD, routes.place_TA)
    return Dispatch.apply(x_TD, routes.order_R, routes.place_TA)


def combine(
    y_RD: Tensor, weight_TA: Tensor, routes: Routes, base_TD: Tensor | None = None, *, backend: str = AUTO
) -> Tensor:
    """Sum each row's expert outputs with its weights, and add ``base``: (T, D).

    Args:
        y_RD: Expert outputs, sorted by expert.
        weight_TA: At least float32; the sum runs in its dtype, in slot order.
        routes: From :func:`build_routes`.
        base_TD: Rows added to the sum, such as the shared expert's; the kernel adds them before it rounds.
        backend: "auto", "triton" or "reference".

    Returns:
        In the dtype of ``y``; differentiable in ``y``, ``weight`` and ``base``.
    """
    if _kernels(y_RD, backend):
        from harts_titan.ops.moe import triton_op

        return triton_op.combine_rows(y_RD, weight_TA, routes.place_TA, base_TD)
    total_TD = Combine.apply(y_RD, weight_TA, routes.order_R, routes.place_TA)
    return total_TD if base_TD is None else total_TD + base_TD


def expert_mlp(
    x_RD: Tensor,
    weights: tuple[Tensor, Tensor, Tensor],
    counts_E: Tensor,
    *,
    limit: float = 0.0,
    backend: str = AUTO,
    grouped_backend: str = AUTO,
) -> Tensor | None:
    """Each expert's SwiGLU on its rows as one op, or None where only separate products can run.

    Args:
        x_RD: Rows sorted by expert.
        weights: w1 (E, F, D), w2 (E, D, F) and w3 (E, F, D), same dtype: ``w2(silu(w1 x) * (w3 x))``.
        counts_E: Integer rows of each expert.
        limit: Clamp of :func:`harts_titan.models.common.feed_forward.swiglu`; 0 for none.
        backend: Of this op: "auto", "triton" or "reference" (always None).
        grouped_backend: Of the products: "auto", "grouped_mm" or "loop" (always None).

    Returns:
        (R, D), differentiable in rows and weights.
    """
    w1, w2, w3 = weights
    if x_RD.shape[0] == 0 or not _kernels(x_RD, backend):
        return None
    if not all(runs_grouped(x_RD, w, backend=grouped_backend) for w in (w1.transpose(1, 2), w2.transpose(1, 2))):
        return None
    from harts_titan.ops.moe import triton_op

    return triton_op.expert_mlp(x_RD, w1, w2, w3, counts_E.cumsum(0).to(torch.int32), limit)[0]


def _kernels(x: Tensor, backend: str) -> bool:
    return choose("moe", backend, device=x.device, dtype=x.dtype) == "triton"
