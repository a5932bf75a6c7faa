"""Build a model for one rank, without a process group."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn
from torchtitan.distributed import ParallelDims
from torchtitan.tools.utils import set_default_dtype

_Model = TypeVar("_Model", bound=nn.Module)


def single_rank_dims() -> ParallelDims:
    """Return degrees of parallelism that are all 1."""
    return ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=1)


def build_on_meta(build: Callable[[], _Model], dtype: torch.dtype) -> _Model:
    """Return what ``build`` makes, without memory, in ``dtype`` where the model does not choose its own."""
    with torch.device("meta"), set_default_dtype(dtype):
        return build()
