"""Launches of the kernels of the mixture of experts; letters as in ``triton_op.py``. Zero rows launch nothing."""

from __future__ import annotations

import contextlib

import torch
import triton
from torch import Tensor

from harts_titan.ops.moe.kernels import (
    activation_backward,
    activation_forward,
    choose_backward,
    choose_forward,
    combine_backward,
    route_counts,
    route_places,
    route_scan,
    scatter_rows,
    split_parts,
    sum_rows,
)

_ROUTE_BLOCK = 64
_SCAN_BLOCK = 1024
_CHOOSE_ROWS, _CHOOSE_WARPS = 4, 4
_COLUMNS, _COLUMN_WARPS = 512, 2
"""Columns of one program of the row movers; 16 bytes a thread and access in 16-bit dtypes with 2 warps."""
_COMBINE_COLUMNS, _COMBINE_WARPS = 512, 4
_FLAT, _FLAT_WARPS = 2048, 4


def _device_of(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    # Triton launches on the current device, which need not be the tensors'.
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def split_float32(values_TE: Tensor, parts: Tensor) -> None:
    """Write each float32 row as three rows of ``parts`` (T, 3 E) in bfloat16 that add up to it."""
    T, E = values_TE.shape
    if parts.numel():
        with _device_of(values_TE):
            split_parts[(triton.cdiv(T * E, _FLAT),)](
                values_TE.float().contiguous(), parts, T * E, E, B=_FLAT, num_warps=_FLAT_WARPS
            )


def choose(
    logits: Tensor,
    bias: Tensor,
    previous: Tensor | None,
    topk: Tensor,
    weight: Tensor,
    *,
    num_groups: int,
    top_groups: int,
    scale: float,
) -> None:
    """Fill ``topk`` (T, A) and ``weight`` (T, A); entries of ``previous`` that are not -1 are repeated."""
    (T, E), top_k = logits.shape, topk.shape[1]
    if T:
        with _device_of(logits):
            choose_forward[(triton.cdiv(T, _CHOOSE_ROWS),)](
                logits.contiguous(),
                bias,
                topk if previous is None else previous.contiguous(),
                topk,
                weight,
                T,
                scale,
                E=E,
                G=num_groups,
                TG=top_groups,
                A=top_k,
                AP=triton.next_power_of_2(top_k),
                BT=_CHOOSE_ROWS,
                HAS_PREVIOUS=previous is not None,
                LIBDEVICE=logits.is_cuda,
                num_warps=_CHOOSE_WARPS,
            )


def choose_gradient(logits: Tensor, topk: Tensor, dweight: Tensor, dlogits: Tensor, *, scale: float) -> None:
    """Fill ``dlogits`` (T, E) from the gradient of the weights (T, A)."""
    T, E = logits.shape
    if T:
        with _device_of(logits):
            choose_backward[(triton.cdiv(T, _CHOOSE_ROWS),)](
                logits.contiguous(),
                topk,
                dweight.contiguous(),
                dlogits,
                T,
                scale,
                E=E,
                A=topk.shape[1],
                BT=_CHOOSE_ROWS,
                LIBDEVICE=logits.is_cuda,
                num_warps=_CHOOSE_WARPS,
            )


def sort_by_expert(topk: Tensor, order: Tensor, place: Tensor, count: Tensor) -> None:
    """Fill the fields of ``Routes``; ``count`` (E,) holds zeros before."""
    R, num_experts = topk.numel(), count.numel()
    if R:
        num_blocks = triton.cdiv(R, _ROUTE_BLOCK)
        shape = {"EP": triton.next_power_of_2(num_experts), "BR": _ROUTE_BLOCK, "num_warps": 4}
        block_count = topk.new_empty((num_experts, num_blocks), dtype=torch.int32)
        with _device_of(topk):
            route_counts[(num_blocks,)](topk, block_count, R, num_blocks, num_experts, **shape)
            route_scan[(num_experts,)](block_count, count, num_blocks, B=_SCAN_BLOCK, num_warps=4)
            route_places[(num_blocks,)](topk, block_count, count, place, order, R, num_blocks, num_experts, **shape)


def _columns(num_columns: int) -> tuple[int, int]:
    block = min(_COLUMNS, triton.next_power_of_2(num_columns))
    return block, triton.cdiv(num_columns, block)


def scatter(x: Tensor, place: Tensor) -> Tensor:
    """Return each row (T, D) at its A places: (R, D)."""
    (T, A), D = place.shape, x.shape[1]
    out = x.new_empty((T * A, D))
    if out.numel():
        x = x if x.stride(1) == 1 else x.contiguous()
        block, num = _columns(D)
        with _device_of(x):
            scatter_rows[(T * num,)](x, place.contiguous(), out, D, x.stride(0), A=A, BD=block, num_warps=_COLUMN_WARPS)
    return out


def gather_sums(y: Tensor, place: Tensor, weight: Tensor | None, base: Tensor | None) -> Tensor:
    """Return the sum of each row's A places (R, D), weighted or plain, plus its row of ``base``: (T, D)."""
    (T, A), D = place.shape, y.shape[1]
    out = y.new_empty((T, D))
    if out.numel():
        block, num = _columns(D)
        with _device_of(y):
            sum_rows[(T * num,)](
                y.contiguous(),
                place,
                place if weight is None else weight.contiguous(),
                y if base is None else base.contiguous(),
                out,
                D,
                A=A,
                BD=block,
                HAS_WEIGHT=weight is not None,
                HAS_BASE=base is not None,
                num_warps=_COLUMN_WARPS,
            )
    return out


def combine_gradients(dout: Tensor, y: Tensor, weight: Tensor, place: Tensor, dy: Tensor, dweight: Tensor) -> None:
    """Fill the gradients of expert outputs (R, D) and weights (T, A); T and D are positive."""
    (T, A), D = place.shape, y.shape[1]
    block = min(_COMBINE_COLUMNS, triton.next_power_of_2(D))
    with _device_of(y):
        combine_backward[(T,)](
            dout.contiguous(),
            y.contiguous(),
            place.contiguous(),
            weight.contiguous(),
            dy,
            dweight,
            D,
            A=A,
            AP=triton.next_power_of_2(A),
            BD=block,
            ND=triton.cdiv(D, block),
            num_warps=_COMBINE_WARPS,
        )


def activate(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """Return the activation of gate and up (R, F)."""
    out = gate.new_empty(gate.shape)
    if out.numel():
        with _device_of(gate):
            activation_forward[(triton.cdiv(out.numel(), _FLAT),)](
                gate, up, out, out.numel(), limit, HAS_LIMIT=limit != 0.0, B=_FLAT, num_warps=_FLAT_WARPS
            )
    return out


def activate_backward(gate: Tensor, up: Tensor, da: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up side by side (R, 2 F), and the activation."""
    (R, F), out = gate.shape, gate.new_empty(gate.shape)
    dh = gate.new_empty((R, 2 * F))
    if out.numel():
        with _device_of(gate):
            activation_backward[(triton.cdiv(R * F, _FLAT),)](
                gate, up, da, dh, out, R * F, F, limit, HAS_LIMIT=limit != 0.0, B=_FLAT, num_warps=_FLAT_WARPS
            )
    return dh, out
