"""A model and its optimizer from a configuration, without torchtitan's trainer: data parallel over all ranks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.train_spec import get_train_spec
from torchtitan.tools.utils import device_type, set_default_dtype

from harts_titan.models.train_specs import hugging_face_format, model_args_of
from harts_titan.parallel.checkpoint import load_checkpoint


def data_parallel_dims() -> ParallelDims:
    """Return degrees of parallelism that shard over the default process group, or over one rank if there is none."""
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    return ParallelDims(dp_replicate=1, dp_shard=world, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=world)


def default_device() -> torch.device:
    """Return the process's current GPU, or the CPU where there is none."""
    return torch.device(device_type, torch.cuda.current_device()) if device_type == "cuda" else torch.device("cpu")


def build_model(
    config: Any, dims: ParallelDims, device: torch.device, *, hf_dir: str = "", checkpoint: str = ""
) -> Any:
    """Build, shard and fill the model of a configuration.

    Args:
        config: merged ``JobConfig``.
        dims: degrees of parallelism.
        device: where the weights go.
        hf_dir: Hugging Face folder that gives sizes and weights; "" = ``model.flavor``, filled from ``debug.seed``.
        checkpoint: folder of a training checkpoint that gives the weights.

    Returns:
        The model in training mode.

    Raises:
        ValueError: If a folder or the configuration does not fit the model.
    """
    spec = get_train_spec(config.model.name)
    if hf_dir:
        model_args = hugging_face_format(config.model.name).read_args(Path(hf_dir) / "config.json")
    else:
        model_args = copy.deepcopy(model_args_of(config))
    model_args.update_from_config(config)
    if config.debug.seed is not None:
        torch.manual_seed(config.debug.seed)
    with torch.device("meta"), set_default_dtype(getattr(torch, config.training.dtype)):
        model: Any = spec.model_cls(model_args)
    model = spec.parallelize_fn(model, dims, config)
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    model.train()
    if hf_dir:
        hugging_face_format(config.model.name).load(model, model_args, hf_dir)
    if checkpoint:
        load_checkpoint(model, checkpoint)
    return model


def build_optimizers(model: Any, config: Any, dims: ParallelDims) -> tuple[Any, Any]:
    """Return torchtitan's optimizers and learning-rate schedulers of a configuration.

    Args:
        model: from :func:`build_model`.
        config: merged ``JobConfig``.
        dims: degrees of parallelism.
    """
    spec = get_train_spec(config.model.name)
    optimizers = spec.build_optimizers_fn([model], config.optimizer, dims)
    return optimizers, spec.build_lr_schedulers_fn(optimizers, config.lr_scheduler, config.training.steps)
