"""Public entry of the short convolution along tree paths."""

from __future__ import annotations

import torch
from torch import Tensor

from harts_titan.ops.backend import AUTO, choose
from harts_titan.ops.short_conv.reference import tree_short_conv_reference
from harts_titan.ops.short_conv.taps import ConvTaps


def tree_short_conv(x_YD: Tensor, weight_DW: Tensor, taps: ConvTaps | Tensor, *, backend: str = AUTO) -> Tensor:
    """``silu(sum_j x[tap_j] * w[:, j])`` per own row: the previous tokens of the path, never memory neighbours.

    Args:
        x_YD: Projected inputs of the path rows (external rows first).
        weight_DW: Depthwise weights in correlation order; the last tap is the current token. No bias.
        taps: Table of the call, or only its int64 (T, num_taps) path rows, oldest first; -1 reads zero (before the
            root). Of a bare tensor on a GPU every kernel launch builds its tables on the host, waiting for the device.
        backend: "auto", "triton" or "reference".

    Returns:
        (T, D) in the dtype of ``x``, row t the convolution of the path that row t of the table describes; accumulated
        in float32 (float64 for float64 inputs). The rows of :meth:`ConvTaps.packed` come in packed order, replay rows
        included; gradients of the copies of a row are added in a fixed order.

    Raises:
        ValueError: If shapes disagree or a forced backend cannot run.
    """
    conv_tap_TW = taps.conv_tap_TW if isinstance(taps, ConvTaps) else taps
    if x_YD.dim() != 2 or weight_DW.dim() != 2 or weight_DW.shape[0] != x_YD.shape[1]:
        raise ValueError(f"x must be (rows, D) and weight (D, taps); got {tuple(x_YD.shape)}, {tuple(weight_DW.shape)}")
    if conv_tap_TW.dim() != 2 or conv_tap_TW.shape[1] != weight_DW.shape[1]:
        raise ValueError(
            f"conv_tap has shape {tuple(conv_tap_TW.shape)}, the weight {weight_DW.shape[1]} taps; plan the call with "
            f"num_taps = {weight_DW.shape[1]}"
        )
    if isinstance(taps, ConvTaps) and taps.num_path_rows != x_YD.shape[0]:
        raise ValueError(f"x has {x_YD.shape[0]} rows, the taps are those of {taps.num_path_rows} path rows")
    name = choose("short_conv", backend, device=x_YD.device, dtype=x_YD.dtype)
    if name == "triton":
        # Triton is optional: CPU installations do not have it.
        from harts_titan.ops.short_conv.triton_op import tree_short_conv_triton

        return tree_short_conv_triton(x_YD, weight_DW, conv_tap_TW, taps.tables if isinstance(taps, ConvTaps) else None)
    return tree_short_conv_reference(x_YD, weight_DW, conv_tap_TW)


def prepare_short_conv(taps: ConvTaps, *, dtype: torch.dtype, backend: str = AUTO) -> None:
    """Build what :func:`tree_short_conv` will read besides the table, once per call of a plan.

    A compiled region finds it then; outside of one the op would build it on first use.

    Args:
        taps: Table of the call, on the inputs' device.
        dtype: Dtype of the inputs.
        backend: As for the op.
    """
    name = choose("short_conv", backend, device=taps.conv_tap_TW.device, dtype=dtype)
    if name == "triton":
        _ = taps.tables
