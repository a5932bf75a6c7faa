"""Short convolution along tree paths on CUDA, with deterministic gradients.

HARTS 3.4 (bounded local operators): the convolution reads the true previous tokens of the path, never the neighbour in
memory.
Letters: T own rows, Y path rows (external first), D channels, W here is the number of taps.
"""

from __future__ import annotations

import contextlib

import torch
import triton
from torch import Tensor

from harts_titan.ops.short_conv.kernels import conv_backward_input, conv_backward_sum, conv_forward
from harts_titan.ops.short_conv.taps import TapReaders, tap_readers

_BLOCK_ROWS = 32
_BLOCK_CHANNELS = 128
_INPUT_BLOCK_CHANNELS = 1024


def tree_short_conv_triton(
    x_YD: Tensor, weight_DW: Tensor, conv_tap_TW: Tensor, readers: TapReaders | None = None
) -> Tensor:
    """Convolve every own row with the previous tokens of its path and apply SiLU.

    Args:
        x_YD: float16, bfloat16 or float32 inputs of the path rows; a slice along D is read in place.
        weight_DW: Taps per channel, oldest first (``conv1d.weight`` without its middle dimension).
        conv_tap_TW: int (T, taps) path row of every tap, the last one the row itself, -1 before the root.
        readers: ``tap_readers(conv_tap_TW, Y)``, to share its sort between convolutions; built when needed otherwise.

    Returns:
        silu(sum_j x[tap_j] * weight_j), (T, D) in x's dtype; sums in float32.

    Raises:
        ValueError: If shapes or dtypes do not fit.

    Memory: the backward pass holds a float32 (T, D) and float32 (T / 32, D, taps) buffer.
    """
    if x_YD.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"x_YD must be float16, bfloat16 or float32 for the triton backend, got {x_YD.dtype}")
    if x_YD.ndim != 2 or weight_DW.shape != (x_YD.shape[1], conv_tap_TW.shape[1]):
        raise ValueError(
            f"weight_DW has shape {tuple(weight_DW.shape)}, needed (channels of x_YD, taps of conv_tap_TW) = "
            f"({x_YD.shape[-1]}, {conv_tap_TW.shape[1]})"
        )
    return _conv_forward(x_YD, weight_DW, conv_tap_TW, [] if readers is None else list(readers))


def _device_of(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    # Triton launches on the current device, which need not be the tensors'.
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def _rows_in_place(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def _blocks(num_channels: int) -> tuple[int, int]:
    return _BLOCK_ROWS, min(_BLOCK_CHANNELS, triton.next_power_of_2(num_channels))


@torch.library.custom_op(
    "harts_titan::tree_short_conv",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor tap, Tensor[] readers) -> Tensor",
)
def _conv_forward(x, weight, tap, readers):
    (T, W), D = tap.shape, x.shape[1]
    y = x.new_empty((T, D))
    BT, BD = _blocks(D)
    if y.numel():
        x = _rows_in_place(x)
        with _device_of(x):
            conv_forward[(triton.cdiv(T, BT) * triton.cdiv(D, BD),)](
                x, weight.contiguous(), tap.contiguous(), y, T, D, x.stride(0), W=W, BT=BT, BD=BD, num_warps=4
            )
    return y


@_conv_forward.register_fake
def _(x, weight, tap, readers):
    return x.new_empty((tap.shape[0], x.shape[1]))


@torch.library.custom_op(
    "harts_titan::tree_short_conv_backward",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor tap, Tensor dy, Tensor[] readers) -> (Tensor, Tensor)",
)
def _conv_backward(x, weight, tap, dy, readers):
    (T, W), (Y, D) = tap.shape, x.shape
    dx = x.new_empty((Y, D))
    if T == 0 or D == 0:
        return dx.zero_(), torch.zeros_like(weight, memory_format=torch.contiguous_format)
    BT, BD = _blocks(D)
    num_blocks = triton.cdiv(T, BT)
    x, weight_c, tap = _rows_in_place(x), weight.contiguous(), tap.contiguous()
    da = x.new_empty((T, D), dtype=torch.float32)
    dw = x.new_empty((num_blocks, D, W), dtype=torch.float32)
    with _device_of(x):
        conv_backward_sum[(num_blocks * triton.cdiv(D, BD),)](
            x, weight_c, tap, dy.contiguous(), da, dw, T, D, x.stride(0), W=W, BT=BT, BD=BD, num_warps=4
        )
        table = TapReaders(*readers) if readers else tap_readers(tap, Y)
        BD = min(_INPUT_BLOCK_CHANNELS, triton.next_power_of_2(D))
        conv_backward_input[(Y * triton.cdiv(D, BD),)](da, weight_c, *table, dx, D, W=W, BD=BD, num_warps=4)
    return dx, dw.sum(0).to(weight.dtype)


@_conv_backward.register_fake
def _(x, weight, tap, dy, readers):
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _save(ctx, inputs, output):
    x, weight, tap, readers = inputs
    ctx.save_for_backward(x, weight, tap, *readers)


def _differentiate(ctx, dy):
    x, weight, tap, *readers = ctx.saved_tensors
    return (*_conv_backward(x, weight, tap, dy, readers), None, [None] * len(readers))


_conv_forward.register_autograd(_differentiate, setup_context=_save)
