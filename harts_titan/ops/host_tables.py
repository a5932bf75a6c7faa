"""Index tables: integers of a plan read on the host, and their copies on a device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch._dynamo.decorators import mark_unbacked


def as_int64(values: Tensor | Sequence[int]) -> np.ndarray:
    """Return integers as a flat int64 host array; waits for the device if they are on one."""
    array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    return array.astype(np.int64).reshape(-1)


def to_device(array: np.ndarray, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Copy a host array to ``device`` as ``dtype`` without waiting for the work queued there.

    On the CPU the result may share the array's memory.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(array)).to(dtype)
    if device.type == "cuda":
        # A copy from pageable memory would wait for everything before it on the stream.
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def any_length(table: Tensor) -> Tensor:
    """Return ``table``, marked such that torch.compile makes no graph of its own where it has no entry or one.

    For tables that a custom op reads and whose length nothing in a compiled layer depends on.
    """
    if table.stride() != (1,):
        # NumPy gives arrays without entries other strides.
        table = table.clone(memory_format=torch.contiguous_format)
    mark_unbacked(table, 0)
    return table
