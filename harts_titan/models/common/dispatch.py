"""Move rows to their experts and back, deterministically in both directions.

The backward of ``index_select`` adds with atomics on CUDA, in an order that changes from run to run. Every routed row
has exactly one source and one destination, so both directions can be written as gathers plus a sum over the A slots of
a row in slot order, at least in float32.

Letters: T rows, A experts per row, R = T * A routed rows (sorted by expert), E experts, D model dimension.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from harts_titan.ops.dtypes import wide_dtype


class Routes(NamedTuple):
    """Where the routed rows of one layer go."""

    order_R: Tensor
    """int64 flat (row, slot) index ``t * A + a`` of each routed row, in expert order, inside an expert in row order."""
    place_TA: Tensor
    """int64 routed row of each (row, slot): the inverse of ``order_R``."""
    counts_E: Tensor
    """int64 routed rows of each expert."""


def build_routes(topk_TA: Tensor, num_experts: int) -> Routes:
    """Sort the assignments by expert without waiting for the device.

    Args:
        topk_TA: int64 chosen experts, in [0, E).
        num_experts: E.
    """
    flat_R = topk_TA.reshape(-1)
    sorted_R, order_R = torch.sort(flat_R, stable=True)
    place_R = torch.empty_like(order_R)
    place_R[order_R] = torch.arange(order_R.numel(), device=order_R.device)
    experts_E = torch.arange(num_experts, device=flat_R.device)
    ends_E = torch.searchsorted(sorted_R, experts_E, right=True)
    return Routes(order_R, place_R.view_as(topk_TA), torch.diff(ends_E, prepend=ends_E.new_zeros(1)))


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, order_R: Tensor, place_TA: Tensor) -> Tensor:
        ctx.save_for_backward(place_TA)
        return x_TD.index_select(0, order_R // place_TA.shape[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (place_TA,) = ctx.saved_tensors
        (dout_RD,) = grads
        total_TD = dout_RD.new_zeros(place_TA.shape[0], dout_RD.shape[1], dtype=wide_dtype(dout_RD.dtype))
        for place_T in place_TA.unbind(1):
            total_TD += dout_RD.index_select(0, place_T)
        return total_TD.to(dout_RD.dtype), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, weight_TA: Tensor, order_R: Tensor, place_TA: Tensor) -> Tensor:
        ctx.save_for_backward(y_RD, weight_TA, order_R, place_TA)
        total_TD = y_RD.new_zeros(place_TA.shape[0], y_RD.shape[1], dtype=weight_TA.dtype)
        for place_T, weight_T in zip(place_TA.unbind(1), weight_TA.unbind(1), strict=True):
            total_TD += y_RD.index_select(0, place_T) * weight_T[:, None]
        return total_TD.to(y_RD.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        y_RD, weight_TA, order_R, place_TA = ctx.saved_tensors
        (dout_TD,) = grads
        weight_R = weight_TA.reshape(-1).index_select(0, order_R)
        dy_RD = (dout_TD.index_select(0, order_R // place_TA.shape[1]) * weight_R[:, None]).to(y_RD.dtype)
        wide_TD = dout_TD.to(weight_TA.dtype)
        dweight = [(wide_TD * y_RD.index_select(0, place_T)).sum(dim=1) for place_T in place_TA.unbind(1)]
        return dy_RD, torch.stack(dweight, dim=1), None, None


def dispatch(x_TD: Tensor, routes: Routes) -> Tensor:
    """Copy each row to its A experts: (R, D), sorted by expert. Differentiable in ``x_TD``."""
    return _Dispatch.apply(x_TD, routes.order_R, routes.place_TA)


def combine(y_RD: Tensor, weight_TA: Tensor, routes: Routes) -> Tensor:
    """Sum each row's expert outputs with its weights: (T, D). Differentiable in ``y_RD`` and ``weight_TA``.

    Args:
        y_RD: Expert outputs, sorted by expert.
        weight_TA: At least float32; the sum runs in its dtype, in slot order.
        routes: From :func:`build_routes`.
    """
    return _Combine.apply(y_RD, weight_TA, routes.order_R, routes.place_TA)
