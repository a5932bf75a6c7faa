"""Public entries of the RMS norms."""

from __future__ import annotations

from torch import Tensor

from harts_titan.ops.backend import AUTO, choose
from harts_titan.ops.norm.reference import gated_rms_norm_reference, rms_norm_reference


def rms_norm(x: Tensor, weight_D: Tensor, eps: float, *, backend: str = AUTO) -> Tensor:
    """Normalise the last dimension by its root mean square and scale it, in at least float32.

    Args:
        x: (..., D) in any floating dtype.
        weight_D: (D,) scale.
        eps: Added to the mean square.
        backend: "auto", "triton" or "reference".

    Returns:
        (..., D) in the dtype of ``x``, rounded once.

    Raises:
        ValueError: If shapes disagree or a forced backend cannot run.
    """
    _check(x, weight_D)
    if choose("norm", backend, device=x.device, dtype=x.dtype) == "triton":
        # Triton is optional: CPU installations do not have it.
        from harts_titan.ops.norm.triton_op import rms_norm_triton

        return rms_norm_triton(x, weight_D, eps)
    return rms_norm_reference(x, weight_D, eps)


def gated_rms_norm(x: Tensor, gate: Tensor, weight_D: Tensor, eps: float, *, backend: str = AUTO) -> Tensor:
    """``rms_norm(x) * weight * sigmoid(gate)``, in at least float32.

    Args:
        x: (..., D) in any floating dtype.
        gate: Of the shape of ``x``, before the sigmoid.
        weight_D: (D,) scale.
        eps: Added to the mean square.
        backend: "auto", "triton" or "reference".

    Returns:
        (..., D) in the dtype of ``gate``, rounded once.

    Raises:
        ValueError: If shapes disagree or a forced backend cannot run.
    """
    _check(x, weight_D)
    if gate.shape != x.shape:
        raise ValueError(f"gate has shape {tuple(gate.shape)}, x {tuple(x.shape)}; they must be equal")
    if choose("norm", backend, device=x.device, dtype=x.dtype) == "triton":
        from harts_titan.ops.norm.triton_op import gated_rms_norm_triton

        return gated_rms_norm_triton(x, gate, weight_D, eps)
    return gated_rms_norm_reference(x, gate, weight_D, eps)


def _check(x: Tensor, weight_D: Tensor) -> None:
    if weight_D.dim() != 1 or x.dim() < 1 or x.shape[-1] != weight_D.shape[0]:
        raise ValueError(f"x must be (..., D) and weight (D,); got {tuple(x.shape)}, {tuple(weight_D.shape)}")
