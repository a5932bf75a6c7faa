"""Public entries of the gates."""

from __future__ import annotations

from torch import Tensor

from harts_titan.ops.activation.reference import head_gate_reference, swiglu_reference
from harts_titan.ops.backend import AUTO, choose


def swiglu(gate: Tensor, up: Tensor, limit: float = 0.0, *, backend: str = AUTO) -> Tensor:
    """``silu(gate) * up``, with ``silu(gate).clamp(max=limit) * up.clamp(-limit, limit)`` if ``limit`` is not 0.

    Args:
        gate: (..., F).
        up: Of the shape and dtype of ``gate``.
        limit: Bound, 0 for none.
        backend: "auto", "triton" (float32 inside, rounded once) or "reference" (rounds after every step).

    Returns:
        (..., F) in the dtype of ``gate``.

    Raises:
        ValueError: If shapes or dtypes disagree or a forced backend cannot run.
    """
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"gate and up must agree; got {tuple(gate.shape)} {gate.dtype} and {tuple(up.shape)} {up.dtype}"
        )
    if choose("activation", backend, device=gate.device, dtype=gate.dtype) == "triton":
        # Triton is optional: CPU installations do not have it.
        from harts_titan.ops.activation.triton_op import swiglu_triton

        return swiglu_triton(gate, up, limit)
    return swiglu_reference(gate, up, limit)


def head_gate(o_THV: Tensor, gate_TH: Tensor, *, backend: str = AUTO) -> Tensor:
    """``o * sigmoid(gate)`` with one gate per row and head, in at least float32.

    Args:
        o_THV: Outputs of the heads.
        gate_TH: Before the sigmoid.
        backend: "auto", "triton" or "reference".

    Returns:
        (T, H, V) in the dtype of ``gate_TH``.

    Raises:
        ValueError: If shapes disagree or a forced backend cannot run.
    """
    if o_THV.dim() != 3 or gate_TH.shape != o_THV.shape[:2]:
        raise ValueError(f"o must be (T, H, V) and gate (T, H); got {tuple(o_THV.shape)}, {tuple(gate_TH.shape)}")
    if choose("activation", backend, device=o_THV.device, dtype=o_THV.dtype) == "triton":
        from harts_titan.ops.activation.triton_op import head_gate_triton

        return head_gate_triton(o_THV, gate_TH)
    return head_gate_reference(o_THV, gate_TH)
