"""Rotary embedding on CUDA, with deterministic gradients.

Letters: T rows, H heads, K width of a query and key head, P rotated dimension, V width of a value head.
"""

from __future__ import annotations

import contextlib

import torch
import triton
from torch import Tensor

from harts_titan.ops.rope.kernels import rope_keys_values_backward, rope_keys_values_forward, rope_queries_kernel

QUERIES = {"BR": 16, "num_warps": 4}
KEYS_FORWARD = {"BR": 8, "num_warps": 4}
KEYS_BACKWARD = {"BT": 1, "num_warps": 4}
"""Pinned launch configurations: (row, head) pairs or rows of a program."""


def rope_queries_triton(q_THK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See :func:`harts_titan.ops.rope.rope_queries`."""
    return _rope_queries(q_THK, cos, sin, False)


def rope_keys_values_triton(
    kv_THX: Tensor, k_rope_TP: Tensor, cos: Tensor, sin: Tensor, nope_dim: int
) -> tuple[Tensor, Tensor]:
    """See :func:`harts_titan.ops.rope.rope_keys_values`; the values are a copy."""
    return _rope_keys_values(kv_THX, k_rope_TP, cos, sin, nope_dim)


def _device_of(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    # Triton launches on the current device, which need not be the tensors'.
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def launch_queries(x: Tensor, cos: Tensor, sin: Tensor, y: Tensor, inverse: bool, config: dict[str, int]) -> None:
    """Fill ``y`` from contiguous inputs; ``config`` as ``QUERIES``."""
    (T, H, K), P = x.shape, 2 * cos.shape[1]
    nope = K - P
    with _device_of(x):
        rope_queries_kernel[(triton.cdiv(T * H, config["BR"]),)](
            x,
            cos,
            sin,
            y,
            T * H,
            H,
            NOPE=nope,
            P=P,
            INVERSE=inverse,
            BN=triton.next_power_of_2(max(nope, 1)),
            BP=triton.next_power_of_2(P),
            **config,
        )


def launch_keys(
    kv: Tensor, k_rope: Tensor, cos: Tensor, sin: Tensor, k: Tensor, v: Tensor, config: dict[str, int]
) -> None:
    """Fill ``k`` and ``v`` from contiguous inputs (rows of ``k_rope`` may have a stride); as ``KEYS_FORWARD``."""
    T, H, V = v.shape
    P = k_rope.shape[1]
    nope = k.shape[2] - P
    with _device_of(kv):
        rope_keys_values_forward[(triton.cdiv(T * H, config["BR"]),)](
            kv,
            k_rope,
            cos,
            sin,
            k,
            v,
            T * H,
            H,
            k_rope.stride(0),
            NOPE=nope,
            P=P,
            V=V,
            BN=triton.next_power_of_2(nope),
            BP=triton.next_power_of_2(P),
            BV=triton.next_power_of_2(V),
            **config,
        )


def launch_keys_backward(
    dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, dkv: Tensor, dk_rope: Tensor, config: dict[str, int]
) -> None:
    """Fill ``dkv`` and ``dk_rope`` from contiguous inputs; ``config`` as ``KEYS_BACKWARD``."""
    T, H, V = dv.shape
    P = dk_rope.shape[1]
    nope = dk.shape[2] - P
    with _device_of(dk):
        rope_keys_values_backward[(triton.cdiv(T, config["BT"]),)](
            dk,
            dv,
            cos,
            sin,
            dkv,
            dk_rope,
            T,
            H=H,
            NOPE=nope,
            P=P,
            V=V,
            BH=triton.next_power_of_2(H),
            BN=triton.next_power_of_2(nope),
            BP=triton.next_power_of_2(P),
            BV=triton.next_power_of_2(V),
            **config,
        )


@torch.library.custom_op(
    "harts_titan::rope_queries",
    mutates_args=(),
    schema="(Tensor q, Tensor cos, Tensor sin, bool inverse) -> Tensor",
)
def _rope_queries(q, cos, sin, inverse):
    y = q.new_empty(q.shape)
    if y.numel():
        launch_queries(q.contiguous(), cos.contiguous(), sin.contiguous(), y, inverse, QUERIES)
    return y


@_rope_queries.register_fake
def _(q, cos, sin, inverse):
    return q.new_empty(q.shape)


def _save_queries(ctx, inputs, output):
    _, cos, sin, ctx.inverse = inputs
    ctx.save_for_backward(cos, sin)


def _differentiate_queries(ctx, dy):
    return _rope_queries(dy, *ctx.saved_tensors, not ctx.inverse), None, None, None


_rope_queries.register_autograd(_differentiate_queries, setup_context=_save_queries)


@torch.library.custom_op(
    "harts_titan::rope_keys_values",
    mutates_args=(),
    schema="(Tensor kv, Tensor k_rope, Tensor cos, Tensor sin, int nope_dim) -> (Tensor, Tensor)",
)
def _rope_keys_values(kv, k_rope, cos, sin, nope_dim):
    k, v = _keys_values_like(kv, k_rope, nope_dim)
    if kv.numel():
        k_rope = k_rope if k_rope.stride(1) == 1 else k_rope.contiguous()
        launch_keys(kv.contiguous(), k_rope, cos.contiguous(), sin.contiguous(), k, v, KEYS_FORWARD)
    return k, v


@_rope_keys_values.register_fake
def _(kv, k_rope, cos, sin, nope_dim):
    return _keys_values_like(kv, k_rope, nope_dim)


def _keys_values_like(kv: Tensor, k_rope: Tensor, nope_dim: int) -> tuple[Tensor, Tensor]:
    T, H, X = kv.shape
    return kv.new_empty((T, H, nope_dim + k_rope.shape[1])), kv.new_empty((T, H, X - nope_dim))


@torch.library.custom_op(
    "harts_titan::rope_keys_values_backward",
    mutates_args=(),
    schema="(Tensor dk, Tensor dv, Tensor cos, Tensor sin) -> (Tensor, Tensor)",
)
def _rope_keys_values_backward(dk, dv, cos, sin):
    dkv, dk_rope = _gradients_like(dk, dv, cos)
    if dkv.numel():
        launch_keys_backward(
            dk.contiguous(), dv.contiguous(), cos.contiguous(), sin.contiguous(), dkv, dk_rope, KEYS_BACKWARD
        )
    return dkv, dk_rope


@_rope_keys_values_backward.register_fake
def _(dk, dv, cos, sin):
    return _gradients_like(dk, dv, cos)


def _gradients_like(dk: Tensor, dv: Tensor, cos: Tensor) -> tuple[Tensor, Tensor]:
    (T, H, K), P = dk.shape, 2 * cos.shape[1]
    return dk.new_empty((T, H, K - P + dv.shape[2])), dk.new_empty((T, P))


def _save_keys(ctx, inputs, output):
    _, _, cos, sin, _ = inputs
    ctx.save_for_backward(cos, sin)


def _differentiate_keys(ctx, dk, dv):
    return (*_rope_keys_values_backward(dk, dv, *ctx.saved_tensors), None, None, None)


_rope_keys_values.register_autograd(_differentiate_keys, setup_context=_save_keys)
