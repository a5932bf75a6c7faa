"""Matrix product of rows sorted by expert with each expert's weight.

Letters: R routed rows, E experts, D model dim, F expert hidden dim.
"""

from __future__ import annotations

import functools
import logging

import torch
from torch import Tensor

from harts_titan.ops.backend import AUTO, choose
from harts_titan.ops.untraced import UntracedOp

logger = logging.getLogger(__name__)

_ALIGNMENT_BYTES = 16


def grouped_mm(x_RD: Tensor, weight_EDF: Tensor, counts_E: Tensor, *, backend: str = AUTO) -> Tensor:
    """Multiply each expert's rows with its weight: row r of expert e gives ``x[r] @ weight[e]``.

    Args:
        x_RD: Rows sorted by expert.
        weight_EDF: Expert weights, same dtype.
        counts_E: Integer rows of each expert, on the device of ``x``; sums to R. Zeros are legal.
        backend: "auto", "grouped_mm" (``torch._grouped_mm``; bfloat16, float16, float32) or "loop" (any dtype; reads
            the counts on the host).

    Returns:
        (R, F) in the dtype of ``x``. Differentiable in ``x`` and ``weight``.

    Raises:
        ValueError: If shapes or dtypes disagree, or the forced backend cannot run.
    """
    if x_RD.dim() != 2 or weight_EDF.dim() != 3 or x_RD.shape[1] != weight_EDF.shape[1]:
        raise ValueError(f"x must be (R, D), weight (E, D, F); got {tuple(x_RD.shape)}, {tuple(weight_EDF.shape)}")
    if counts_E.shape != weight_EDF.shape[:1] or counts_E.is_floating_point():
        raise ValueError(f"counts must be {weight_EDF.shape[0]} integers; got {counts_E.dtype} {tuple(counts_E.shape)}")
    if x_RD.dtype != weight_EDF.dtype:
        raise ValueError(f"x is {x_RD.dtype}, weight {weight_EDF.dtype}; cast one of them")
    grouped = runs_grouped(x_RD, weight_EDF, backend=backend)
    # PyTorch's own shape function knows bfloat16 only.
    if torch.compiler.is_compiling() and not (grouped and x_RD.dtype == torch.bfloat16):
        return _UNTRACED(None, (x_RD, weight_EDF, counts_E))
    if x_RD.shape[0] == 0:
        # No rows, still a graph: every rank must see a (zero) gradient of the weight.
        return x_RD @ weight_EDF.sum(0)
    if grouped:
        offsets = counts_E.cumsum(0).to(torch.int32)
        return torch._grouped_mm(x_RD.contiguous(), weight_EDF, offs=offsets)
    return _grouped_mm_loop(x_RD, weight_EDF, counts_E)


def runs_grouped(x_RD: Tensor, weight_EDF: Tensor, *, backend: str = AUTO) -> bool:
    """Whether :func:`grouped_mm` of these tensors is one ``torch._grouped_mm``; otherwise it is a loop over experts.

    Raises:
        ValueError: If the forced backend cannot run.
    """
    if choose("grouped_mm", backend, device=x_RD.device, dtype=x_RD.dtype) != "grouped_mm":
        return False
    misaligned = _misalignment(x_RD, weight_EDF)
    if misaligned is not None and x_RD.shape[0]:
        if backend != AUTO:
            raise ValueError(f"backend 'grouped_mm' cannot run: {misaligned}; use backend 'loop'")
        _warn_misaligned(misaligned)
    return misaligned is None


def _grouped_mm_loop(x_RD: Tensor, weight_EDF: Tensor, counts_E: Tensor) -> Tensor:
    counts = counts_E.tolist()
    if sum(counts) != x_RD.shape[0]:
        raise ValueError(f"counts sum to {sum(counts)}, x has {x_RD.shape[0]} rows")
    pieces = [rows @ weight for rows, weight in zip(x_RD.split(counts), weight_EDF.unbind(0))]
    return torch.cat(pieces)


def _misalignment(x_RD: Tensor, weight_EDF: Tensor) -> str | None:
    # Forward needs aligned rows of x and weight, backward also of the output gradient (F) and of weight^T (D or F).
    size = x_RD.element_size()
    for label, dim in (("D", weight_EDF.shape[1]), ("F", weight_EDF.shape[2])):
        if dim * size % _ALIGNMENT_BYTES:
            return f"{label} = {dim} {x_RD.dtype} elements are {dim * size} bytes, not a multiple of {_ALIGNMENT_BYTES}"
    return None


@functools.cache
def _warn_misaligned(reason: str) -> None:
    logger.warning("grouped_mm runs one product per expert (slower, reads the counts on the host): %s", reason)


def _untraced(_: None, x_RD: Tensor, weight_EDF: Tensor, counts_E: Tensor, __: float) -> Tensor:
    return grouped_mm(x_RD, weight_EDF, counts_E)


_UNTRACED = UntracedOp("grouped_mm", _untraced, shape=lambda tensors: (tensors[0].shape[0], tensors[1].shape[2]))
