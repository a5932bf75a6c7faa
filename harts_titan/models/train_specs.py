"""Model specs known to the trainer, the engine and the commands.

Importing this module registers them with torchtitan. A model outside this package registers itself in a module named by
``experimental.custom_import`` (see docs/extending.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torchtitan.protocols.train_spec import get_train_spec, register_train_spec

from harts_titan.data import RolloutLoader, build_loader
from harts_titan.data.source import dataset_from_config
from harts_titan.models import ling


@dataclass(frozen=True)
class HuggingFaceFormat:
    """How a model family reads and writes Hugging Face folders."""

    read_args: Callable[[str | Path], Any]
    """``config.json`` (path) -> model args."""
    load: Callable[[nn.Module, Any, str | Path], None]
    """Fill a model (model, args, folder) from a folder of safetensors."""
    save: Callable[[nn.Module, Any, str | Path], None] | None = None
    """Write a model (model, args, folder) to a folder; None = it cannot."""


_HUGGING_FACE: dict[str, HuggingFaceFormat] = {}


def register_hugging_face(name: str, hugging_face: HuggingFaceFormat) -> None:
    """Tell how the model spec ``name`` reads Hugging Face folders.

    Raises:
        ValueError: If it is known already.
    """
    if name in _HUGGING_FACE:
        raise ValueError(f"the Hugging Face format of model '{name}' is already registered")
    _HUGGING_FACE[name] = hugging_face


def hugging_face_format(name: str) -> HuggingFaceFormat:
    """Return how the model spec ``name`` reads Hugging Face folders.

    Raises:
        ValueError: If the spec has not said so.
    """
    if name not in _HUGGING_FACE:
        raise ValueError(
            f"model.name = '{name}' cannot read Hugging Face folders; those that can: {list(_HUGGING_FACE)}"
        )
    return _HUGGING_FACE[name]


def build_dataloader(dp_world_size: int, dp_rank: int, tokenizer: Any, job_config: Any) -> RolloutLoader:
    """Build the loader of training steps that torchtitan's trainer asks for; every rank loads whole steps.

    Raises:
        ValueError: If the model size is unknown or the rollouts are unusable.
    """
    dataset = dataset_from_config(
        job_config, vocab_size=model_args_of(job_config).vocab_size, min_trajectories=dp_world_size
    )
    return build_loader(dataset, num_workers=job_config.data.num_workers)


def model_args_of(job_config: Any) -> Any:
    """Return the registered sizes that ``model.name`` and ``model.flavor`` choose.

    Raises:
        ValueError: If there is no such model or size.
    """
    flavours = get_train_spec(job_config.model.name).model_args
    if job_config.model.flavor not in flavours:
        raise ValueError(f"model.flavor = '{job_config.model.flavor}' is unknown; choose one of {list(flavours)}")
    return flavours[job_config.model.flavor]


register_train_spec(ling.NAME, ling.make_train_spec(build_dataloader))
register_hugging_face(ling.NAME, HuggingFaceFormat(ling.from_hf_config, ling.load_hf, ling.save_hf))
