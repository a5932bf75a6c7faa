"""Gates on CUDA.

Letters: N rows, F columns.
"""

from __future__ import annotations

import contextlib

import torch
import triton
from torch import Tensor

from harts_titan.ops.activation.kernels import head_gate_backward, head_gate_forward, swiglu_backward, swiglu_forward

SWIGLU_FORWARD = {"TILE": 1024, "BF": 512, "num_warps": 4}
SWIGLU_BACKWARD = {"TILE": 1024, "BF": 512, "num_warps": 4}
HEAD_GATE_FORWARD = {"TILE": 2048, "num_warps": 4}
HEAD_GATE_BACKWARD = {"TILE": 2048, "num_warps": 4}
"""Pinned launch configurations: elements of a program's tile, its columns at most."""


def swiglu_triton(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """See :func:`harts_titan.ops.activation.swiglu`; rows with a stride are read in place."""
    return _swiglu(gate, up, float(limit))


def head_gate_triton(o_THV: Tensor, gate_TH: Tensor) -> Tensor:
    """See :func:`harts_titan.ops.activation.head_gate`."""
    return _head_gate(o_THV, gate_TH)


def _device_of(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    # Triton launches on the current device, which need not be the tensors'.
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def _rows(x: Tensor) -> Tensor:
    """(N, F) with elements of a row side by side; a view if the strides allow one."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


def _swiglu_options(config: dict[str, int], limit: float, num_rows: int, width: int) -> tuple[tuple[int], dict]:
    BF = min(config["BF"], triton.next_power_of_2(width))
    BR = max(1, config["TILE"] // BF)
    grid = (triton.cdiv(num_rows, BR) * triton.cdiv(width, BF),)
    return grid, {"CLAMPED": limit != 0.0, "BR": BR, "BF": BF, "num_warps": config["num_warps"]}


def launch_swiglu(gate: Tensor, up: Tensor, y: Tensor, limit: float, config: dict[str, int]) -> None:
    """Fill contiguous ``y`` from rows; ``config`` as ``SWIGLU_FORWARD``."""
    grid, options = _swiglu_options(config, limit, *gate.shape)
    with _device_of(gate):
        swiglu_forward[grid](gate, up, y, *gate.shape, gate.stride(0), up.stride(0), limit, **options)


def launch_swiglu_backward(
    gate: Tensor, up: Tensor, dy: Tensor, dgate: Tensor, dup: Tensor, limit: float, config: dict[str, int]
) -> None:
    """Fill contiguous ``dgate`` and ``dup``; ``config`` as ``SWIGLU_BACKWARD``."""
    grid, options = _swiglu_options(config, limit, *gate.shape)
    with _device_of(gate):
        swiglu_backward[grid](gate, up, dy, dgate, dup, *gate.shape, gate.stride(0), up.stride(0), limit, **options)


def launch_head_gate(o: Tensor, gate: Tensor, y: Tensor, config: dict[str, int]) -> None:
    """Fill contiguous ``y`` from contiguous inputs; ``config`` as ``HEAD_GATE_FORWARD``."""
    N, V = gate.numel(), o.shape[-1]
    BV = triton.next_power_of_2(V)
    BR = max(1, config["TILE"] // BV)
    with _device_of(o):
        head_gate_forward[(triton.cdiv(N, BR),)](o, gate, y, N, V, BR=BR, BV=BV, num_warps=config["num_warps"])


def launch_head_gate_backward(
    o: Tensor, gate: Tensor, dy: Tensor, d_o: Tensor, dgate: Tensor, config: dict[str, int]
) -> None:
    """Fill contiguous ``d_o`` and ``dgate``; ``config`` as ``HEAD_GATE_BACKWARD``."""
    N, V = gate.numel(), o.shape[-1]
    BV = triton.next_power_of_2(V)
    BR = max(1, config["TILE"] // BV)
    with _device_of(o):
        head_gate_backward[(triton.cdiv(N, BR),)](
            o, gate, dy, d_o, dgate, N, V, BR=BR, BV=BV, num_warps=config["num_warps"]
        )


@torch.library.custom_op(
    "harts_titan::swiglu", mutates_args=(), schema="(Tensor gate, Tensor up, float limit) -> Tensor"
)
def _swiglu(gate, up, limit):
    y = gate.new_empty(gate.shape)
    if y.numel():
        launch_swiglu(_rows(gate), _rows(up), y, limit, SWIGLU_FORWARD)
    return y


@_swiglu.register_fake
def _(gate, up, limit):
    return gate.new_empty(gate.shape)


@torch.library.custom_op(
    "harts_titan::swiglu_backward",
    mutates_args=(),
    schema="(Tensor gate, Tensor up, Tensor dy, float limit) -> (Tensor, Tensor)",
)
def _swiglu_backward(gate, up, dy, limit):
    dgate, dup = gate.new_empty(gate.shape), up.new_empty(up.shape)
    if dgate.numel():
        launch_swiglu_backward(_rows(gate), _rows(up), dy.contiguous(), dgate, dup, limit, SWIGLU_BACKWARD)
    return dgate, dup


@_swiglu_backward.register_fake
def _(gate, up, dy, limit):
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


def _save_swiglu(ctx, inputs, output):
    gate, up, ctx.limit = inputs
    ctx.save_for_backward(gate, up)


def _differentiate_swiglu(ctx, dy):
    return (*_swiglu_backward(*ctx.saved_tensors, dy, ctx.limit), None)


_swiglu.register_autograd(_differentiate_swiglu, setup_context=_save_swiglu)


@torch.library.custom_op("harts_titan::head_gate", mutates_args=(), schema="(Tensor o, Tensor gate) -> Tensor")
def _head_gate(o, gate):
    y = gate.new_empty(o.shape)
    if y.numel():
        launch_head_gate(o.contiguous(), gate.contiguous(), y, HEAD_GATE_FORWARD)
    return y


@_head_gate.register_fake
def _(o, gate):
    return gate.new_empty(o.shape)


@torch.library.custom_op(
    "harts_titan::head_gate_backward",
    mutates_args=(),
    schema="(Tensor o, Tensor gate, Tensor dy) -> (Tensor, Tensor)",
)
def _head_gate_backward(o, gate, dy):
    d_o, dgate = o.new_empty(o.shape), gate.new_empty(gate.shape)
    if d_o.numel():
        launch_head_gate_backward(o.contiguous(), gate.contiguous(), dy.contiguous(), d_o, dgate, HEAD_GATE_BACKWARD)
    return d_o, dgate if d_o.numel() else dgate.zero_()


@_head_gate_backward.register_fake
def _(o, gate, dy):
    return o.new_empty(o.shape), gate.new_empty(gate.shape)


def _save_head_gate(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _differentiate_head_gate(ctx, dy):
    return _head_gate_backward(*ctx.saved_tensors, dy)


_head_gate.register_autograd(_differentiate_head_gate, setup_context=_save_head_gate)
