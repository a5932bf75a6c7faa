"""Short convolution along tree paths on CUDA, with deterministic gradients.

HARTS 3.4 (bounded local operators): the convolution reads the true previous tokens of the path, never the neighbour in
memory.
Letters: T output rows, Y path rows (external first), D channels, W here is the number of taps.
"""

from __future__ import annotations

import contextlib

import torch
import triton
from torch import Tensor

from harts_titan.ops.row_sums import row_sums
from harts_titan.ops.short_conv.gradient_kernels import conv_backward, conv_backward_join
from harts_titan.ops.short_conv.kernels import conv_forward
from harts_titan.ops.short_conv.taps import GROUP_ROWS, KERNEL_TAPS, ChainTables, chain_tables

FORWARD = {"BT": 64, "BD": 512, "num_warps": 4, "ANY": 4}
# Fewer registers spill on the path of rare groups, and cost all others a quarter.
BACKWARD = {"BT": 128, "BD": 128, "num_warps": 2, "ANY": 4, "maxnreg": 104}
"""Pinned launch configurations: rows and channels of a program, rows of any chains that are read at once."""
JOIN = {"BD": 512, "num_warps": 4}


def tree_short_conv_triton(
    x_YD: Tensor, weight_DW: Tensor, conv_tap_TW: Tensor, tables: ChainTables | None = None
) -> Tensor:
    """Convolve every row of a tap table and apply SiLU.

    Args:
        x_YD: float16, bfloat16 or float32 inputs of the path rows; a slice along D is read in place.
        weight_DW: Taps per channel, oldest first (``conv1d.weight`` without its middle dimension); at most four.
        conv_tap_TW: int (T, taps) path row of every tap, the last one the row itself, -1 before the root.
        tables: ``chain_tables(conv_tap_TW, Y)``, to share them between convolutions; built otherwise, on the host.

    Returns:
        silu(sum_j x[tap_j] * weight_j), (T, D) in x's dtype; sums in float32.

    Raises:
        ValueError: If shapes or dtypes do not fit.

    Memory: the backward pass holds float32 (T / 128, taps, D) and (slots, D) buffers; there is a slot for every path
    row and chain that read it together, where more than one chain does.
    """
    if x_YD.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"x_YD must be float16, bfloat16 or float32 for the triton backend, got {x_YD.dtype}")
    if x_YD.ndim != 2 or weight_DW.shape != (x_YD.shape[1], conv_tap_TW.shape[1]):
        raise ValueError(
            f"weight_DW has shape {tuple(weight_DW.shape)}, needed (channels of x_YD, taps of conv_tap_TW) = "
            f"({x_YD.shape[-1]}, {conv_tap_TW.shape[1]})"
        )
    if weight_DW.shape[1] > KERNEL_TAPS:
        raise ValueError(
            f"the triton backend has 1 to {KERNEL_TAPS} taps, weight_DW {weight_DW.shape[1]}; use the reference backend"
        )
    return _conv_forward(x_YD, weight_DW, conv_tap_TW, [] if tables is None else list(tables))


def _device_of(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    # Triton launches on the current device, which need not be the tensors'.
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def _rows_in_place(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def launch_forward(x: Tensor, weight: Tensor, tables: ChainTables, y: Tensor, config: dict[str, int]) -> None:
    """Fill ``y``; ``weight`` is contiguous, ``config`` as ``FORWARD``."""
    T, D = y.shape
    options = _fit(config, D)
    grid = (triton.cdiv(T, options["BT"]) * triton.cdiv(D, options["BD"]),)
    with _device_of(x):
        conv_forward[grid](
            x,
            weight,
            tables.tap_T4,
            tables.kind_T,
            tables.forward_G,
            y,
            T,
            D,
            x.stride(0),
            W=weight.shape[1],
            U=GROUP_ROWS,
            **options,
        )


def launch_backward(
    x: Tensor, weight: Tensor, tables: ChainTables, dy: Tensor, dx: Tensor, config: dict[str, int]
) -> Tensor:
    """Fill ``dx`` and return the weight gradient (D, W); ``config`` as ``BACKWARD``."""
    (T, D), W = dy.shape, weight.shape[1]
    options = _fit(config, D)
    num_blocks = triton.cdiv(T, options["BT"])
    slots = dx.new_empty((tables.slot_S.shape[0], D), dtype=torch.float32)
    dw = dx.new_empty((num_blocks, W, D), dtype=torch.float32)
    with _device_of(x):
        conv_backward[(num_blocks * triton.cdiv(D, options["BD"]),)](
            x,
            weight,
            tables.tap_T4,
            tables.kind_T,
            tables.backward_G,
            tables.target_T4,
            dy,
            dx,
            slots,
            dw,
            T,
            D,
            x.stride(0),
            W=W,
            U=GROUP_ROWS,
            **options,
        )
    launch_join(slots, tables, dx, JOIN)
    return row_sums(dw, weight.dtype)


def launch_join(slots: Tensor, tables: ChainTables, dx: Tensor, config: dict[str, int]) -> None:
    """Fill the rows of ``dx`` that have float32 (slots, D) sums of several chains."""
    D, num_joined = dx.shape[1], tables.join_row_J.shape[0]
    options = _fit(config, D)
    if num_joined:
        with _device_of(dx):
            conv_backward_join[(num_joined * triton.cdiv(D, options["BD"]),)](
                slots, tables.join_row_J, tables.join_ptr_J1, dx, D, **options
            )


def _fit(config: dict[str, int], num_channels: int) -> dict[str, int]:
    return {**config, "BD": min(config["BD"], triton.next_power_of_2(num_channels))}


@torch.library.custom_op(
    "harts_titan::tree_short_conv",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor tap, Tensor[] tables) -> Tensor",
)
def _conv_forward(x, weight, tap, tables):
    y = x.new_empty((tap.shape[0], x.shape[1]))
    if y.numel():
        table = ChainTables(*tables) if tables else chain_tables(tap, x.shape[0])
        launch_forward(_rows_in_place(x), weight.contiguous(), table, y, FORWARD)
    return y


@_conv_forward.register_fake
def _(x, weight, tap, tables):
    return x.new_empty((tap.shape[0], x.shape[1]))


@torch.library.custom_op(
    "harts_titan::tree_short_conv_backward",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor tap, Tensor dy, Tensor[] tables) -> (Tensor, Tensor)",
)
def _conv_backward(x, weight, tap, dy, tables):
    dx = x.new_empty(x.shape)
    if dy.numel() == 0:
        return dx.zero_(), torch.zeros_like(weight, memory_format=torch.contiguous_format)
    table = ChainTables(*tables) if tables else chain_tables(tap, x.shape[0])
    return dx, launch_backward(_rows_in_place(x), weight.contiguous(), table, dy.contiguous(), dx, BACKWARD)


@_conv_backward.register_fake
def _(x, weight, tap, dy, tables):
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _save(ctx, inputs, output):
    x, weight, tap, tables = inputs
    ctx.save_for_backward(x, weight, tap, *tables)


def _differentiate(ctx, dy):
    x, weight, tap, *tables = ctx.saved_tensors
    return (*_conv_backward(x, weight, tap, dy, tables), None, [None] * len(tables))


_conv_forward.register_autograd(_differentiate, setup_context=_save)
