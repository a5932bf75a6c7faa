"""Apply recomputation, compilation and data parallelism to Ling, in that order."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn
from torchtitan.distributed import ParallelDims
from torchtitan.tools.utils import device_type

from harts_titan.models.ling.attention import KDACore
from harts_titan.models.ling.model import Ling
from harts_titan.parallel.compiling import compile_layers
from harts_titan.parallel.fsdp import shard_model, single_rank_mesh

logger = logging.getLogger(__name__)

_UNSUPPORTED = {
    "dp_replicate": "data_parallel_replicate_degree",
    "tp": "tensor_parallel_degree",
    "pp": "pipeline_parallel_degree",
    "ep": "expert_parallel_degree",
    "cp": "context_parallel_degree",
}


def parallelize_ling(model: nn.Module, parallel_dims: ParallelDims, job_config: Any) -> nn.Module:
    """Prepare a model (preferably on the meta device) for training, in place.

    A single rank is sharded over itself when it computes in another dtype than it stores, so that the optimizer always
    updates master weights of ``training.dtype``.

    Args:
        model: A :class:`Ling`.
        parallel_dims: Degrees of parallelism.
        job_config: The merged torchtitan config.

    Returns:
        The same model.

    Raises:
        ValueError: If the job asks for a kind of parallelism or recomputation that is not supported.
    """
    assert isinstance(model, Ling)
    for name, field in _UNSUPPORTED.items():
        degree = getattr(parallel_dims, name)
        if degree > 1:
            raise ValueError(
                f"parallelism.{field} = {degree} is not supported yet; use data parallelism "
                "(parallelism.data_parallel_shard_degree)"
            )
    mode = job_config.activation_checkpoint.mode
    if mode not in ("none", "full"):
        raise ValueError(f"activation_checkpoint.mode is {mode!r}; choose 'none' or 'full'")
    # Inside the model and not a wrapper: parameter names stay, and the plan is never saved as an activation.
    model.recompute_layers = mode == "full"
    if job_config.compile.enable:
        compile_layers(
            dict(model.layers.items()), num_kinds=len(model.layer_kinds()), backend=job_config.compile.backend
        )

    training = job_config.training
    param_dtype = getattr(torch, training.mixed_precision_param)
    if parallel_dims.dp_shard > 1 or param_dtype != _stored_dtype(model):
        mesh = parallel_dims.get_mesh("fsdp") if parallel_dims.dp_shard > 1 else single_rank_mesh(device_type)
        shard_model(
            model,
            mesh,
            param_dtype=param_dtype,
            reduce_dtype=getattr(torch, training.mixed_precision_reduce),
            wide_modules=(KDACore,),
            reshard_after_forward=job_config.parallelism.fsdp_reshard_after_forward,
        )
        logger.info("sharded over %d ranks, computing in %s", mesh.size(), param_dtype)
    return model


def _stored_dtype(model: Ling) -> torch.dtype:
    # The first parameter that is not kept wide on purpose.
    return next(p.dtype for name, p in model.named_parameters() if name.endswith("_norm.weight"))
