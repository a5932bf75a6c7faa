"""Public entry of full attention over a compact layout."""

from __future__ import annotations

import torch
from torch import Tensor

from harts_titan.ops.attention.flex import BLOCK, tree_attention_flex
from harts_titan.ops.attention.mask import TreeMask, block_tables
from harts_titan.ops.attention.reference import tree_attention_dense, tree_attention_path
from harts_titan.ops.backend import AUTO, choose


def tree_attention(
    q_THK: Tensor, k_YHK: Tensor, v_YHV: Tensor, mask: TreeMask, *, scale: float, backend: str = AUTO
) -> Tensor:
    """Softmax attention in which every row sees exactly its ancestors and itself (HARTS 2.2).

    Args:
        q_THK: Queries of the own rows.
        k_YHK: Keys of the path rows, external rows first.
        v_YHV: Values; V may differ from K.
        mask: Visibility, on the inputs' device.
        scale: Factor on the scores, for Ling ``K^-0.5``.
        backend: "auto", "fa4", "triton", "flex", "path" or "dense"; "triton" and, on the CPU, "path" give every
            trajectory the bits of its run alone, with deterministic gradients.

    Returns:
        (T, H, V) in the dtype of ``v``.

    Raises:
        ValueError: If shapes or devices disagree with ``mask``, or a forced backend cannot run.
    """
    rows, heads, key_dim = q_THK.shape
    if rows != mask.num_rows:
        raise ValueError(f"q has {rows} rows, the mask {mask.num_rows} own rows")
    if k_YHK.shape != (mask.num_path_rows, heads, key_dim) or v_YHV.shape[:2] != k_YHK.shape[:2]:
        raise ValueError(
            f"k has shape {tuple(k_YHK.shape)}, v {tuple(v_YHV.shape)}; expected ({mask.num_path_rows} path rows, "
            f"{heads} heads, {key_dim} or the value dim)"
        )
    if mask.device != q_THK.device:
        raise ValueError(f"mask is on {mask.device}, q on {q_THK.device}; use mask.to(device)")
    name = choose("attention", backend, device=q_THK.device, dtype=q_THK.dtype)
    if rows == 0:
        # No queries, still a graph: keys and values get zero gradients.
        return (q_THK * k_YHK.sum(0)).sum(-1, keepdim=True) * v_YHV.sum(0)
    if name == "fa4":
        # flash-attn-4 is optional: it exists for Hopper and newer only.
        from harts_titan.ops.attention.fa4 import tree_attention_fa4

        return tree_attention_fa4(q_THK, k_YHK, v_YHV, mask, scale)
    if name == "triton":
        # Triton is not installed everywhere.
        from harts_titan.ops.attention.triton_op import tree_attention_triton

        return tree_attention_triton(q_THK, k_YHK, v_YHV, mask, scale)
    implementation = {"flex": tree_attention_flex, "path": tree_attention_path, "dense": tree_attention_dense}[name]
    return implementation(q_THK, k_YHK, v_YHV, mask, scale)


def prepare_attention(mask: TreeMask, *, key_dim: int, dtype: torch.dtype, backend: str = AUTO) -> None:
    """Build what :func:`tree_attention` will read besides the mask, once per call of a plan.

    A compiled region finds it then; outside of one the op would build it on first use.

    Args:
        mask: Of the call, on the inputs' device.
        key_dim: Width of a query and key head.
        dtype: Dtype of the inputs.
        backend: As for the op.
    """
    name = choose("attention", backend, device=mask.device, dtype=dtype)
    if name == "fa4":
        # flash-attn-4 is optional: it exists for Hopper and newer only.
        from harts_titan.ops.attention.fa4 import prepare_tables

        prepare_tables(mask, key_dim)
    elif name == "triton":
        # Triton is not installed everywhere.
        from harts_titan.ops.attention.triton_op import prepare_tables as prepare_lists

        prepare_lists(mask, dtype)
    elif name == "flex":
        block_tables(mask, BLOCK, BLOCK)
