"""RMS norms, alone and followed by a sigmoid gate."""

from harts_titan.ops.norm.op import gated_rms_norm, rms_norm

__all__ = ["gated_rms_norm", "rms_norm"]
