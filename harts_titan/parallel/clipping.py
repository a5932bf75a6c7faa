"""Clipping of gradients that may be sharded, in two halves: the caller reads the norm in between.

The caller checks the norm on the host anyway, so the factor may be a number there: small gradients are then not scaled
at all. A factor on the device is a float32 tensor beside 16-bit gradients, for which torch has no vectorised kernel.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return the 2-norm of all gradients together.

    Args:
        parameters: those without a gradient are left out.

    Returns:
        Scalar on the gradients' device, in their widest dtype; the same on every rank. A collective if they are
        sharded.
    """
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], foreach=True)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Multiply all gradients by ``max_norm / (norm + 1e-6)``, in place, where that is below 1. Waits for the device.

    Products are rounded to a gradient's dtype, the factor is not.

    Args:
        parameters: those without a gradient are left out.
        norm: finite, from :func:`gradient_norm`.
        max_norm: what the norm becomes at most.
    """
    factor = float(max_norm / (norm + 1e-6))
    if factor >= 1.0:
        return
    for parameter in parameters:
        if parameter.grad is not None:
            local = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            local.mul_(factor)
