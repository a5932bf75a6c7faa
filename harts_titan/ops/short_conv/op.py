"""Public entry of the short convolution along tree paths."""

from __future__ import annotations

from torch import Tensor

from harts_titan.ops.backend import AUTO, choose
from harts_titan.ops.short_conv.reference import tree_short_conv_reference


def tree_short_conv(x_YD: Tensor, weight_DW: Tensor, conv_tap_TW: Tensor, *, backend: str = AUTO) -> Tensor:
    """``silu(sum_j x[tap_j] * w[:, j])`` per own row: the previous tokens of the path, never memory neighbours.

    Args:
        x_YD: Projected inputs of the path rows (external rows first).
        weight_DW: Depthwise weights in correlation order; the last tap is the current token. No bias.
        conv_tap_TW: int64 (T, num_taps) path rows, oldest first; -1 reads zero (before the root).
        backend: "auto", "triton" or "reference".

    Returns:
        (T, D) in the dtype of ``x``; accumulated in float32 (float64 for float64 inputs).

    Raises:
        ValueError: If shapes disagree or a forced backend cannot run.
    """
    if x_YD.dim() != 2 or weight_DW.dim() != 2 or weight_DW.shape[0] != x_YD.shape[1]:
        raise ValueError(f"x must be (rows, D) and weight (D, taps); got {tuple(x_YD.shape)}, {tuple(weight_DW.shape)}")
    if conv_tap_TW.dim() != 2 or conv_tap_TW.shape[1] != weight_DW.shape[1]:
        raise ValueError(
            f"conv_tap has shape {tuple(conv_tap_TW.shape)}, the weight {weight_DW.shape[1]} taps; plan the call with "
            f"num_taps = {weight_DW.shape[1]}"
        )
    name = choose("short_conv", backend, device=x_YD.device, dtype=x_YD.dtype)
    if name == "triton":
        # Triton is optional: CPU installations do not have it.
        from harts_titan.ops.short_conv.triton_op import tree_short_conv_triton

        return tree_short_conv_triton(x_YD, weight_DW, conv_tap_TW)
    return tree_short_conv_reference(x_YD, weight_DW, conv_tap_TW)
