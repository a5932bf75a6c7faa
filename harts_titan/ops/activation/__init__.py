"""Element-wise gates: SwiGLU and the head-wise sigmoid gate of full attention."""

from harts_titan.ops.activation.op import head_gate, swiglu

__all__ = ["head_gate", "swiglu"]
