"""Plain PyTorch forms of the mixture-of-experts ops: any device, any dtype, deterministic.

The backward of ``index_select`` adds with atomics on CUDA, in an order that changes from run to run. Every routed row
has exactly one source and one destination, so both directions can be written as gathers plus a sum over the A slots of
a row in slot order, at least in float32.

Letters: T rows, A experts per row, R = T * A routed rows (sorted by expert), E experts, G groups of Z experts, D model
dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from harts_titan.ops.dtypes import wide_dtype


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


def routes_reference(topk_TA: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Order, place and counts of ``Routes`` by a stable sort, without waiting for the device."""
    flat_R = topk_TA.reshape(-1)
    sorted_R, order_R = torch.sort(flat_R, stable=True)
    place_R = torch.empty_like(order_R)
    place_R[order_R] = torch.arange(order_R.numel(), device=order_R.device)
    experts_E = torch.arange(num_experts, device=flat_R.device)
    ends_E = torch.searchsorted(sorted_R, experts_E, right=True)
    return order_R, place_R.view_as(topk_TA), torch.diff(ends_E, prepend=ends_E.new_zeros(1))


class Dispatch(torch.autograd.Function):
    """Rows at their experts' places."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, order_R: Tensor, place_TA: Tensor) -> Tensor:
        """Gather (R, D)."""
        ctx.save_for_backward(place_TA)
        return x_TD.index_select(0, order_R // place_TA.shape[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Sum over slots."""
        (place_TA,) = ctx.saved_tensors
        (dout_RD,) = grads
        total_TD = dout_RD.new_zeros(place_TA.shape[0], dout_RD.shape[1], dtype=wide_dtype(dout_RD.dtype))
        for place_T in place_TA.unbind(1):
            total_TD += dout_RD.index_select(0, place_T)
        return total_TD.to(dout_RD.dtype), None, None


class Combine(torch.autograd.Function):
    """Weighted sum of each row's expert outputs."""

    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, weight_TA: Tensor, order_R: Tensor, place_TA: Tensor) -> Tensor:
        """Sum over slots in the dtype of the weights."""
        ctx.save_for_backward(y_RD, weight_TA, order_R, place_TA)
        total_TD = y_RD.new_zeros(place_TA.shape[0], y_RD.shape[1], dtype=weight_TA.dtype)
        for place_T, weight_T in zip(place_TA.unbind(1), weight_TA.unbind(1), strict=True):
            total_TD += y_RD.index_select(0, place_T) * weight_T[:, None]
        return total_TD.to(y_RD.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Gather rows; one dot product per (row, slot)."""
        y_RD, weight_TA, order_R, place_TA = ctx.saved_tensors
        (dout_TD,) = grads
        weight_R = weight_TA.reshape(-1).index_select(0, order_R)
        dy_RD = (dout_TD.index_select(0, order_R // place_TA.shape[1]) * weight_R[:, None]).to(y_RD.dtype)
        wide_TD = dout_TD.to(weight_TA.dtype)
        dweight = [(wide_TD * y_RD.index_select(0, place_T)).sum(dim=1) for place_T in place_TA.unbind(1)]
        return dy_RD, torch.stack(dweight, dim=1), None, None
