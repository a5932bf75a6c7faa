"""Gates in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from harts_titan.ops.dtypes import wide_dtype


def swiglu_reference(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """See :func:`harts_titan.ops.activation.swiglu`."""
    activated = F.silu(gate)
    if limit == 0.0:
        return activated * up
    return activated.clamp(max=limit) * up.clamp(-limit, limit)


def head_gate_reference(o_THV: Tensor, gate_TH: Tensor) -> Tensor:
    """See :func:`harts_titan.ops.activation.head_gate`."""
    wide_TH = torch.sigmoid(gate_TH.to(wide_dtype(gate_TH.dtype)))
    return (o_THV * wide_TH[:, :, None]).to(gate_TH.dtype)
