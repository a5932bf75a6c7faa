"""Ancestor attention through compiled ``flex_attention`` with block tables made from the segment structure.

Letters: T own rows, Y path rows, H heads, K query-key dim, V value dim.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from harts_titan.ops.attention.mask import TreeMask, block_tables

BLOCK = 128


@functools.cache
def _compiled(dynamic: bool) -> Callable[..., Tensor]:
    return torch.compile(flex_attention, dynamic=dynamic)


def block_mask(mask: TreeMask) -> BlockMask:
    """``BlockMask`` of a tree mask, 128 x 128 blocks."""
    tables = block_tables(mask, BLOCK, BLOCK)
    tin_Y, tout_Y, offset = mask.tin_Y, mask.tout_Y, mask.num_external_rows

    def visible(batch: Tensor, head: Tensor, q_row: Tensor, kv_row: Tensor) -> Tensor:
        number = tin_Y[q_row + offset]
        return (tin_Y[kv_row] <= number) & (number < tout_Y[kv_row])

    return BlockMask.from_kv_blocks(
        tables.kv_num_blocks,
        tables.kv_indices,
        tables.full_kv_num_blocks,
        tables.full_kv_indices,
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=visible,
        seq_lengths=(mask.num_rows, mask.num_path_rows),
    )


def tree_attention_flex(q_THK: Tensor, k_YHK: Tensor, v_YHV: Tensor, mask: TreeMask, scale: float) -> Tensor:
    """See :func:`harts_titan.ops.attention.tree_attention`.

    Raises:
        ValueError: If a gradient is needed on the CPU, where flex_attention has no backward.
    """
    on_cpu = q_THK.device.type == "cpu"
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q_THK, k_YHK, v_YHV))
    if needs_grad and on_cpu:
        raise ValueError("backend 'flex' has no backward on the CPU; use attention backend 'path'")
    q, k, v = (x.transpose(0, 1)[None] for x in (q_THK, k_YHK, v_YHV))
    # Row and block counts differ in every call and must not recompile; but the CPU code generator emits invalid C++ for
    # some symbolic sizes (torch 2.13), and on the CPU flex serves tests only.
    o_1HTV = _compiled(not on_cpu)(q, k, v, block_mask=block_mask(mask), scale=scale)
    return o_1HTV[0].transpose(0, 1)
