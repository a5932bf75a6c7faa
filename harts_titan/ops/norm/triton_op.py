"""RMS norms on CUDA, with deterministic gradients.

Letters: N rows, D normalised dimension.
"""

from __future__ import annotations

import contextlib

import torch
import triton
from torch import Tensor

from harts_titan.ops.norm.kernels import norm_backward, norm_forward, scale_gradient

FORWARD = {"TILE": 4096, "num_warps": 2}
GATED_FORWARD = {"TILE": 2048, "num_warps": 4}
BACKWARD = {"TILE": 2048, "BT": 64, "num_warps": 4, "STAGES": 3, "EARLY": 1}
NARROW_BACKWARD = {"TILE": 1024, "BT": 128, "num_warps": 2, "STAGES": 4, "EARLY": 1}
GATED_BACKWARD = {"TILE": 2048, "BT": 512, "num_warps": 8, "STAGES": 3, "EARLY": 1}
"""Pinned launch configurations: elements of a tile (whole rows), rows of a backward program, tiles on their way
there, whether the kernel after it is launched early.
Narrow rows are up to ``_NARROW`` elements; gated ones are the many rows of heads."""
SUM = {"BN": 512, "BM": 8, "num_warps": 8}
"""Rows of a step and columns of a program of the sum over programs."""
_NARROW = 1024


def rms_norm_triton(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """See :func:`harts_titan.ops.norm.rms_norm`; rows with a stride are read in place."""
    return _norm(x, None, weight_D, eps)


def gated_rms_norm_triton(x: Tensor, gate: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """See :func:`harts_titan.ops.norm.gated_rms_norm`."""
    return _norm(x, gate, weight_D, eps)


def _device_of(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    # Triton launches on the current device, which need not be the tensors'.
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def _has_dependent_launches(x: Tensor) -> bool:
    """Compute capability 9 and later have them, the interpreter does not."""
    return x.is_cuda and torch.cuda.get_device_capability(x.device)[0] >= 9


def _rows(x: Tensor) -> Tensor:
    """(N, D) with elements of a row side by side; a view if the strides allow one."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


def _blocks(config: dict[str, int], width: int) -> dict[str, int]:
    """Rows and columns of a tile, and compiler options."""
    columns = triton.next_power_of_2(width)
    rows = max(1, config["TILE"] // columns)
    options = {name: value for name, value in config.items() if name != "TILE"}
    if "BT" in options:
        options["BT"] = triton.cdiv(options["BT"], rows) * rows
    return {"BR": rows, "BD": columns, **options}


def launch_forward(
    x: Tensor, gate: Tensor | None, weight: Tensor, y: Tensor, eps: float, config: dict[str, int]
) -> None:
    """Fill contiguous ``y`` from rows; ``config`` as ``FORWARD``."""
    N, D = x.shape
    options = _blocks(config, D)
    other = x if gate is None else gate
    with _device_of(x):
        norm_forward[(triton.cdiv(N, options["BR"]),)](
            x, other, weight, y, N, D, x.stride(0), other.stride(0), eps, GATED=gate is not None, **options
        )


def launch_backward(
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor,
    dy: Tensor,
    dx: Tensor,
    dgate: Tensor | None,
    eps: float,
    config: dict[str, int],
) -> Tensor:
    """Fill contiguous ``dx`` and ``dgate`` and return the gradient of the scale; ``config`` as ``BACKWARD``."""
    N, D = x.shape
    options = _blocks(config, D)
    early = options["EARLY"] = options.get("EARLY", 0) if _has_dependent_launches(x) else 0
    num_blocks = triton.cdiv(N, options["BT"])
    dw = x.new_empty((num_blocks, D), dtype=torch.float32)
    other = x if gate is None else gate
    with _device_of(x):
        norm_backward[(num_blocks,)](
            x,
            other,
            weight,
            dy,
            dx,
            dx if dgate is None else dgate,
            dw,
            N,
            D,
            x.stride(0),
            other.stride(0),
            eps,
            GATED=gate is not None,
            **options,
        )
        scale = weight.new_empty(weight.shape)
        scale_gradient[(triton.cdiv(D, SUM["BM"]),)](
            dw, scale, num_blocks, D, EARLY=early, **SUM, **({"launch_pdl": True} if early else {})
        )
    return scale


def backward_config(width: int, gated: bool) -> dict[str, int]:
    """Pinned configuration for rows of ``width`` elements."""
    if gated:
        return GATED_BACKWARD
    return NARROW_BACKWARD if width <= _NARROW else BACKWARD


@torch.library.custom_op(
    "harts_titan::rms_norm", mutates_args=(), schema="(Tensor x, Tensor? gate, Tensor weight, float eps) -> Tensor"
)
def _norm(x, gate, weight, eps):
    y = torch.empty(x.shape, dtype=x.dtype if gate is None else gate.dtype, device=x.device)
    if y.numel():
        config = FORWARD if gate is None else GATED_FORWARD
        launch_forward(_rows(x), None if gate is None else _rows(gate), weight.contiguous(), y, eps, config)
    return y


@_norm.register_fake
def _(x, gate, weight, eps):
    return torch.empty(x.shape, dtype=x.dtype if gate is None else gate.dtype, device=x.device)


@torch.library.custom_op(
    "harts_titan::rms_norm_backward",
    mutates_args=(),
    schema="(Tensor x, Tensor? gate, Tensor weight, Tensor dy, float eps) -> (Tensor, Tensor, Tensor)",
)
def _norm_backward(x, gate, weight, dy, eps):
    dx, dgate, dw = _gradients_like(x, gate, weight)
    if x.numel() == 0:
        return dx, dgate, dw.zero_()
    dw = launch_backward(
        _rows(x),
        None if gate is None else _rows(gate),
        weight.contiguous(),
        dy.contiguous(),
        dx,
        None if gate is None else dgate,
        eps,
        backward_config(x.shape[-1], gate is not None),
    )
    return dx, dgate, dw


@_norm_backward.register_fake
def _(x, gate, weight, dy, eps):
    return _gradients_like(x, gate, weight)


def _gradients_like(x: Tensor, gate: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    shape, dtype = ((0,), x.dtype) if gate is None else (gate.shape, gate.dtype)
    return x.new_empty(x.shape), x.new_empty(shape, dtype=dtype), weight.new_empty(weight.shape)


def _save(ctx, inputs, output):
    x, gate, weight, ctx.eps = inputs
    ctx.gated = gate is not None
    ctx.save_for_backward(x, weight, *([gate] if ctx.gated else []))


def _differentiate(ctx, dy):
    x, weight, *gate = ctx.saved_tensors
    dx, dgate, dw = _norm_backward(x, gate[0] if ctx.gated else None, weight, dy, ctx.eps)
    return dx, dgate if ctx.gated else None, dw, None


_norm.register_autograd(_differentiate, setup_context=_save)
