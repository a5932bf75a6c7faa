"""Matrix products of PyTorch on the host, for a tool that cannot run those of the libraries."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor


def _product(left: Tensor, right: Tensor) -> Tensor:
    """``left @ right`` in float32 on the CPU."""
    return torch.from_numpy(np.matmul(_array(left), _array(right)))


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().float().numpy()


def _mm(left: Tensor, right: Tensor, dtype: torch.dtype | None = None, *, out: Tensor | None = None) -> Tensor:
    value = _product(left, right)
    return value.to(left.device, dtype or left.dtype) if out is None else out.copy_(value)


def _addmm(  # Names as in the schema.
    self: Tensor,
    mat1: Tensor,
    mat2: Tensor,
    out_dtype: torch.dtype | None = None,
    *,
    beta: float = 1,
    alpha: float = 1,
    out: Tensor | None = None,
) -> Tensor:
    value = beta * self.detach().cpu().float() + alpha * _product(mat1, mat2)
    return value.to(self.device, out_dtype or mat1.dtype) if out is None else out.copy_(value)


def _grouped_mm(
    self: Tensor,
    mat2: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Rows in groups times a matrix each, or columns in groups times rows in groups."""
    assert offs is not None and bias is None and self.dim() == 2, "no such product in harts_titan"
    ends = offs.tolist()
    groups = list(enumerate(zip([0, *ends[:-1]], ends, strict=True)))
    if mat2.dim() == 3:
        value = torch.zeros(self.shape[0], mat2.shape[2])
        for group, (a, b) in groups:
            value[a:b] = _product(self[a:b], mat2[group])
    else:
        value = torch.stack([_product(self[:, a:b], mat2[a:b]) for _, (a, b) in groups])
    return value.to(self.device, out_dtype or self.dtype)


PRODUCTS: dict[str, Callable[..., Tensor]] = {
    **dict.fromkeys(("mm", "mm.out", "mm.dtype", "mm.dtype_out"), _mm),
    **dict.fromkeys(("addmm", "addmm.out", "addmm.dtype", "addmm.dtype_out"), _addmm),
    "_grouped_mm": _grouped_mm,
}


@contextlib.contextmanager
def on_host(key: str = "CUDA") -> Iterator[None]:
    """Replace the matrix products of the device whose dispatch key is ``key``, in all threads."""
    with warnings.catch_warnings():
        # That a kernel is registered over another one is the purpose.
        warnings.simplefilter("ignore")
        library = torch.library.Library("aten", "IMPL")
        for name, function in PRODUCTS.items():
            library.impl(name, function, key)
    try:
        yield
    finally:
        library._destroy()
