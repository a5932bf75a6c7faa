"""Read and write parameters that may be sharded, without ever holding more than one of them in full."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local_box(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return this rank's part of a tensor (a view that can be written) and its offset in the whole."""
    if not isinstance(tensor, DTensor):
        return tensor, (0,) * tensor.ndim
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    local = tensor.to_local()
    assert local.shape == torch.Size(shape), (local.shape, shape)
    return local, tuple(offset)


@torch.no_grad()
def copy_from_full_(tensor: Tensor, full: Tensor) -> None:
    """Copy this rank's part of ``full`` into ``tensor``, converting the dtype.

    Raises:
        ValueError: If the shapes differ.
    """
    if tensor.shape != full.shape:
        raise ValueError(f"shape is {tuple(full.shape)}; {tuple(tensor.shape)} is needed")
    local, offset = local_box(tensor)
    local.copy_(full[tuple(slice(start, start + size) for start, size in zip(offset, local.shape, strict=True))])


@torch.no_grad()
def copy_row_from_full_(tensor: Tensor, index: int, full: Tensor) -> None:
    """Copy this rank's part of ``full`` into ``tensor[index]``; does nothing if another rank owns that row.

    Raises:
        ValueError: If the shapes differ.
    """
    if tensor.shape[1:] != full.shape:
        raise ValueError(f"shape is {tuple(full.shape)}; {tuple(tensor.shape[1:])} is needed")
    local, offset = local_box(tensor)
    row = index - offset[0]
    if not 0 <= row < local.shape[0]:
        return
    rest = zip(offset[1:], local.shape[1:], strict=True)
    local[row].copy_(full[tuple(slice(start, start + size) for start, size in rest)])


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the whole tensor on every rank; a collective if it is sharded."""
    detached = tensor.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached
