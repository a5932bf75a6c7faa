"""Public entries of the rotary embedding.

Letters: T rows, H heads, K width of a query and key head, P rotated dimension, V width of a value head.
"""

from __future__ import annotations

from torch import Tensor

from harts_titan.ops.backend import AUTO, choose
from harts_titan.ops.rope.reference import rope_keys_values_reference, rope_queries_reference


def rope_queries(q_THK: Tensor, cos: Tensor, sin: Tensor, *, backend: str = AUTO) -> Tensor:
    """Rotate the last P columns of each query head; the others stay.

    Args:
        q_THK: Queries; interleaved pairs in the last P columns.
        cos: (T, P/2) cosines of the rows' angles, at least float32.
        sin: (T, P/2).
        backend: "auto", "triton" or "reference".

    Returns:
        (T, H, K) in the dtype of ``q_THK``.

    Raises:
        ValueError: If shapes disagree or a forced backend cannot run.
    """
    _check(q_THK, cos, sin, q_THK.shape[-1])
    if choose("rope", backend, device=q_THK.device, dtype=q_THK.dtype) == "triton":
        # Triton is optional: CPU installations do not have it.
        from harts_titan.ops.rope.triton_op import rope_queries_triton

        return rope_queries_triton(q_THK, cos, sin)
    return rope_queries_reference(q_THK, cos, sin)


def rope_keys_values(
    kv_THX: Tensor, k_rope_TP: Tensor, cos: Tensor, sin: Tensor, *, nope_dim: int, backend: str = AUTO
) -> tuple[Tensor, Tensor]:
    """Assemble keys from each head's unrotated columns and the one rotary key of all heads, and cut off the values.

    Args:
        kv_THX: Per head ``nope_dim`` key columns, then V value columns.
        k_rope_TP: Shared rotary key, before rotation; interleaved pairs.
        cos: (T, P/2) cosines of the rows' angles, at least float32.
        sin: (T, P/2).
        nope_dim: Key columns that are not rotated.
        backend: "auto", "triton" or "reference".

    Returns:
        Keys (T, H, nope_dim + P) and values (T, H, V), in the dtype of ``kv_THX``.

    Raises:
        ValueError: If shapes disagree or a forced backend cannot run.
    """
    _check(kv_THX, cos, sin, k_rope_TP.shape[-1])
    if k_rope_TP.shape != (kv_THX.shape[0], 2 * cos.shape[1]) or not 0 < nope_dim < kv_THX.shape[2]:
        raise ValueError(
            f"k_rope must be ({kv_THX.shape[0]}, {2 * cos.shape[1]}) and nope_dim in (0, {kv_THX.shape[2]}); got "
            f"{tuple(k_rope_TP.shape)}, {nope_dim}"
        )
    if choose("rope", backend, device=kv_THX.device, dtype=kv_THX.dtype) == "triton":
        from harts_titan.ops.rope.triton_op import rope_keys_values_triton

        return rope_keys_values_triton(kv_THX, k_rope_TP, cos, sin, nope_dim)
    return rope_keys_values_reference(kv_THX, k_rope_TP, cos, sin, nope_dim)


def _check(x_THK: Tensor, cos: Tensor, sin: Tensor, width: int) -> None:
    if x_THK.dim() != 3 or cos.dim() != 2 or cos.shape != sin.shape or cos.shape[0] != x_THK.shape[0]:
        raise ValueError(
            f"x must be (T, H, K) and cos, sin (T, P/2); got {tuple(x_THK.shape)}, {tuple(cos.shape)}, "
            f"{tuple(sin.shape)}"
        )
    if 2 * cos.shape[1] > width:
        raise ValueError(f"cos has {cos.shape[1]} angles, the rotated columns are {width} at most")
