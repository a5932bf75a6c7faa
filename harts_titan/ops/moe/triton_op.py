"""The mixture of experts on CUDA: custom ops around the kernels and ``torch._grouped_mm``.

Letters: T rows, A experts per row, R = T * A routed rows, E experts, D model dim, F expert hidden dim.

No op waits for the device, adds with atomics, or lets a row depend on another one. Rows move from where they lie in row
order (read or written once) to their A places, so that the smaller side is touched once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from harts_titan.ops.moe.launches import (
    activate,
    activate_backward,
    choose,
    choose_gradient,
    combine_gradients,
    gather_sums,
    scatter,
    sort_by_expert,
    split_float32,
)


def _wide_product(left: Tensor, right: Tensor) -> Tensor:
    """``left @ right`` of 16-bit matrices in float32."""
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    # The CPU runs these ops in tests only and has no mixed product.
    return left.float() @ right.float()


@torch.library.custom_op("harts_titan::router_logits", mutates_args=(), schema="(Tensor x, Tensor weight) -> Tensor")
def router_logits(x, weight):
    """``x @ weight^T`` (T, E) in float32 from bfloat16: exact products, float32 sums."""
    return _wide_product(x, weight.t())


@router_logits.register_fake
def _(x, weight):
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=torch.float32)


@torch.library.custom_op(
    "harts_titan::router_logits_backward",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor dlogits, bool need_x) -> (Tensor, Tensor)",
)
def _router_logits_backward(x, weight, dlogits, need_x):
    (T, E), D = dlogits.shape, x.shape[1]
    # A float32 factor is the sum of three bfloat16 ones; their products with bfloat16 are exact.
    parts = x.new_empty((T, 3 * E))
    split_float32(dlogits, parts)
    dx = parts @ weight.repeat(3, 1) if need_x else x.new_empty((0, D))
    return dx, _wide_product(parts.t(), x).view(3, E, D).sum(0).to(weight.dtype)


@_router_logits_backward.register_fake
def _(x, weight, dlogits, need_x):
    return x.new_empty(x.shape if need_x else (0, x.shape[1])), weight.new_empty(weight.shape)


def _save_inputs(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _differentiate_router(ctx, dlogits):
    x, weight = ctx.saved_tensors
    need_x, need_weight = ctx.needs_input_grad
    dx, dweight = _router_logits_backward(x, weight, dlogits, need_x)
    return dx if need_x else None, dweight if need_weight else None


router_logits.register_autograd(_differentiate_router, setup_context=_save_inputs)


@torch.library.custom_op(
    "harts_titan::choose_experts",
    mutates_args=(),
    schema="(Tensor logits, Tensor bias, Tensor? previous, int num_groups, int top_groups, int top_k, float scale) "
    "-> (Tensor, Tensor)",
)
def choose_experts(logits, bias, previous, num_groups, top_groups, top_k, scale):
    """Chosen experts (T, A) int64 and combination weights (T, A) float32; E and the groups are powers of two."""
    T = logits.shape[0]
    topk = torch.empty((T, top_k), dtype=torch.int64, device=logits.device)
    weight = torch.empty((T, top_k), dtype=torch.float32, device=logits.device)
    choose(logits, bias, previous, topk, weight, num_groups=num_groups, top_groups=top_groups, scale=scale)
    return topk, weight


@choose_experts.register_fake
def _(logits, bias, previous, num_groups, top_groups, top_k, scale):
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape, dtype=torch.int64), logits.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op(
    "harts_titan::choose_experts_backward",
    mutates_args=(),
    schema="(Tensor logits, Tensor topk, Tensor dweight, float scale) -> Tensor",
)
def _choose_experts_backward(logits, topk, dweight, scale):
    dlogits = logits.new_empty(logits.shape)
    choose_gradient(logits, topk, dweight, dlogits, scale=scale)
    return dlogits


@_choose_experts_backward.register_fake
def _(logits, topk, dweight, scale):
    return logits.new_empty(logits.shape)


def _save_choice(ctx, inputs, output):
    ctx.save_for_backward(inputs[0], output[0])
    ctx.scale = inputs[6]


def _differentiate_choice(ctx, _dtopk, dweight):
    dlogits = _choose_experts_backward(*ctx.saved_tensors, dweight, ctx.scale)
    return dlogits, None, None, None, None, None, None


choose_experts.register_autograd(_differentiate_choice, setup_context=_save_choice)


@torch.library.custom_op(
    "harts_titan::expert_routes", mutates_args=(), schema="(Tensor topk, int num_experts) -> (Tensor, Tensor, Tensor)"
)
def expert_routes(topk, num_experts):
    """``Routes``: stable counting sort of the (row, slot) pairs by expert."""
    topk = topk.contiguous()
    order, place = topk.new_empty((topk.numel(),)), topk.new_empty(topk.shape)
    count = topk.new_zeros((num_experts,))
    sort_by_expert(topk, order, place, count)
    return order, place, count


@expert_routes.register_fake
def _(topk, num_experts):
    return topk.new_empty((topk.numel(),)), topk.new_empty(topk.shape), topk.new_empty((num_experts,))


@torch.library.custom_op("harts_titan::dispatch_rows", mutates_args=(), schema="(Tensor x, Tensor place) -> Tensor")
def dispatch_rows(x, place):
    """Each row at its A places: (R, D)."""
    return scatter(x, place)


@dispatch_rows.register_fake
def _(x, place):
    return x.new_empty((place.numel(), x.shape[1]))


@torch.library.custom_op("harts_titan::gather_rows", mutates_args=(), schema="(Tensor y, Tensor place) -> Tensor")
def _gather_rows(y, place):
    return gather_sums(y, place.contiguous(), None, None)


@_gather_rows.register_fake
def _(y, place):
    return y.new_empty((place.shape[0], y.shape[1]))


def _save_place(ctx, inputs, output):
    ctx.save_for_backward(inputs[1])


def _differentiate_dispatch(ctx, dout):
    return _gather_rows(dout, *ctx.saved_tensors), None


dispatch_rows.register_autograd(_differentiate_dispatch, setup_context=_save_place)


@torch.library.custom_op(
    "harts_titan::combine_rows",
    mutates_args=(),
    schema="(Tensor y, Tensor weight, Tensor place, Tensor? base) -> Tensor",
)
def combine_rows(y, weight, place, base):
    """Weighted sum of each row's A expert outputs, plus the row of ``base``: (T, D)."""
    return gather_sums(y, place.contiguous(), weight, base)


@combine_rows.register_fake
def _(y, weight, place, base):
    return y.new_empty((place.shape[0], y.shape[1]))


@torch.library.custom_op(
    "harts_titan::combine_rows_backward",
    mutates_args=(),
    schema="(Tensor dout, Tensor y, Tensor weight, Tensor place) -> (Tensor, Tensor)",
)
def _combine_rows_backward(dout, y, weight, place):
    dy, dweight = y.new_empty(y.shape), weight.new_empty(weight.shape)
    if place.shape[0] == 0 or y.shape[1] == 0:
        return dy, dweight.zero_()
    combine_gradients(dout, y, weight, place, dy, dweight)
    return dy, dweight


@_combine_rows_backward.register_fake
def _(dout, y, weight, place):
    return y.new_empty(y.shape), weight.new_empty(weight.shape)


def _save_combine(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:3])


def _differentiate_combine(ctx, dout):
    dy, dweight = _combine_rows_backward(dout, *ctx.saved_tensors)
    return dy, dweight, None, dout if ctx.needs_input_grad[3] else None


combine_rows.register_autograd(_differentiate_combine, setup_context=_save_combine)


@torch.library.custom_op(
    "harts_titan::expert_mlp",
    mutates_args=(),
    schema="(Tensor x, Tensor w1, Tensor w2, Tensor w3, Tensor offsets, float limit) -> (Tensor, Tensor, Tensor)",
)
def expert_mlp(x, w1, w2, w3, offsets, limit):
    """Each expert's SwiGLU on its rows (R, D); also what backward reads, gate and up (R, F).

    ``offsets`` is int32: where each expert's rows end. R is positive, and rows are multiples of 16 bytes.
    """
    x = x.contiguous()
    gate = torch._grouped_mm(x, w1.transpose(1, 2), offs=offsets)
    up = torch._grouped_mm(x, w3.transpose(1, 2), offs=offsets)
    return torch._grouped_mm(activate(gate, up, limit), w2.transpose(1, 2), offs=offsets), gate, up


@expert_mlp.register_fake
def _(x, w1, w2, w3, offsets, limit):
    (R, D), F = x.shape, w1.shape[1]
    return x.new_empty((R, D)), x.new_empty((R, F)), x.new_empty((R, F))


@torch.library.custom_op(
    "harts_titan::expert_mlp_backward",
    mutates_args=(),
    schema="(Tensor dy, Tensor x, Tensor w1, Tensor w2, Tensor w3, Tensor offsets, Tensor gate, Tensor up, "
    "float limit) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _expert_mlp_backward(dy, x, w1, w2, w3, offsets, gate, up, limit):
    dy, x, F = dy.contiguous(), x.contiguous(), w1.shape[1]
    dh, a = activate_backward(gate, up, torch._grouped_mm(dy, w2, offs=offsets), limit)
    dw2 = torch._grouped_mm(dy.t(), a, offs=offsets)
    # One product over both halves: two would be added up in another pass over (R, D), ten times the weights' copy.
    dx = torch._grouped_mm(dh, torch.cat([w1, w3], dim=1), offs=offsets)
    dw1, dw3 = (torch._grouped_mm(half.t(), x, offs=offsets) for half in (dh[:, :F], dh[:, F:]))
    return dx, dw1, dw2, dw3


@_expert_mlp_backward.register_fake
def _(dy, x, w1, w2, w3, offsets, gate, up, limit):
    return x.new_empty(x.shape), w1.new_empty(w1.shape), w2.new_empty(w2.shape), w3.new_empty(w3.shape)


def _save_experts(ctx, inputs, output):
    *tensors, ctx.limit = inputs
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.set_materialize_grads(False)


def _differentiate_experts(ctx, dy, _dgate, _dup):
    if dy is None:
        return None, None, None, None, None, None
    return *_expert_mlp_backward(dy, *ctx.saved_tensors, ctx.limit), None, None


expert_mlp.register_autograd(_differentiate_experts, setup_context=_save_experts)
