"""The ops that read a plan, called with the inputs of a call; one node each in a compiled layer.

Letters: T compact rows, D channels, H heads, K key head dimension, V value head dimension, W convolution taps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from harts_titan.models.common.tree_inputs import TreeInputs
from harts_titan.ops.attention import tree_attention
from harts_titan.ops.backend import choose, is_traceable
from harts_titan.ops.kda import kda
from harts_titan.ops.short_conv import tree_short_conv
from harts_titan.ops.untraced import UntracedOp


def short_conv(x_TD: Tensor, weight_DW: Tensor, inputs: TreeInputs) -> Tensor:
    """Convolve every row with the previous tokens of its path, then SiLU: (T, D)."""
    if _untraced("short_conv", inputs.backends.short_conv, x_TD):
        return _SHORT_CONV(inputs.handle, (x_TD, weight_DW))
    return _short_conv(inputs, x_TD, weight_DW)


def linear_attention(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    f_THK: Tensor,
    b_TH: Tensor,
    A_log_H: Tensor,
    dt_bias_HK: Tensor,
    *,
    inputs: TreeInputs,
    lower_bound: float,
) -> Tensor:
    """Run KDA over the packed sequences of the call: (T, H, V). Arguments as :func:`harts_titan.ops.kda.kda`."""
    tensors = (q_THK, k_THK, v_THV, f_THK, b_TH, A_log_H, dt_bias_HK)
    if _untraced("kda", inputs.backends.kda, q_THK):
        return _KDA(inputs.handle, tensors, lower_bound)
    return _kda(inputs, *tensors, lower_bound)


def full_attention(q_THK: Tensor, k_THK: Tensor, v_THV: Tensor, inputs: TreeInputs, *, scale: float) -> Tensor:
    """Attend to ancestors and self: (T, H, V)."""
    if _untraced("attention", inputs.backends.attention, q_THK):
        return _ATTENTION(inputs.handle, (q_THK, k_THK, v_THV), scale)
    return _attention(inputs, q_THK, k_THK, v_THV, scale)


def _untraced(op: str, backend: str, x: Tensor) -> bool:
    return torch.compiler.is_compiling() and not is_traceable(op, choose(op, backend, device=x.device, dtype=x.dtype))


def _short_conv(inputs: TreeInputs, x_TD: Tensor, weight_DW: Tensor, _: float = 0.0) -> Tensor:
    return tree_short_conv(x_TD, weight_DW, inputs.conv_taps, backend=inputs.backends.short_conv)


def _kda(
    inputs: TreeInputs,
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    f_THK: Tensor,
    b_TH: Tensor,
    A_log_H: Tensor,
    dt_bias_HK: Tensor,
    lower_bound: float,
) -> Tensor:
    tensors = (q_THK, k_THK, v_THV, f_THK, b_TH, A_log_H, dt_bias_HK)
    return kda(*tensors, inputs.kda, lower_bound=lower_bound, backend=inputs.backends.kda)[0]


def _attention(inputs: TreeInputs, q_THK: Tensor, k_THK: Tensor, v_THV: Tensor, scale: float) -> Tensor:
    return tree_attention(q_THK, k_THK, v_THV, inputs.attention, scale=scale, backend=inputs.backends.attention)


_SHORT_CONV = UntracedOp("short_conv", _short_conv, shape=lambda tensors: tensors[0].shape)
_KDA = UntracedOp("kda", _kda, shape=lambda tensors: tensors[2].shape)
_ATTENTION = UntracedOp("attention", _attention, shape=lambda tensors: (*tensors[0].shape[:2], tensors[2].shape[2]))
