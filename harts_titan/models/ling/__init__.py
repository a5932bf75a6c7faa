"""Ling-3.0 (``BailingMoeV3ForCausalLM``): sizes, model, checkpoints and registration with torchtitan.

Letters: T compact rows, S semantic positions, D model dimension, H heads, K and V key and value head dimensions,
E experts, A experts per row, W vocabulary (convolution taps in ``conv_tap_TW``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torchtitan.components.lr_scheduler import build_lr_schedulers
from torchtitan.components.optimizer import build_optimizers
from torchtitan.protocols import train_spec
from torchtitan.protocols.train_spec import TrainSpec

from harts_titan.models.ling.config import FLAVOURS, LingArgs, active_parameter_count, parameter_count
from harts_titan.models.ling.hf import load_hf, save_hf
from harts_titan.models.ling.hf_config import from_hf_config, to_hf_config
from harts_titan.models.ling.model import Ling, LingOutput
from harts_titan.models.ling.parallelize import parallelize_ling
from harts_titan.models.ling.state_dict_adapter import LingStateDictAdapter

__all__ = [
    "FLAVOURS",
    "Ling",
    "LingArgs",
    "LingOutput",
    "LingStateDictAdapter",
    "active_parameter_count",
    "from_hf_config",
    "load_hf",
    "make_train_spec",
    "parallelize_ling",
    "parameter_count",
    "register",
    "save_hf",
    "to_hf_config",
]

NAME = "ling"


def _no_loss(job_config: Any, **kwargs: Any) -> Callable[..., Any]:
    """Build the loss torchtitan asks for; objectives are computed from log-probabilities instead."""

    def refuse(*args: Any) -> Any:
        raise RuntimeError("harts_titan computes its objective from log-probabilities; there is no logits loss")

    return refuse


def make_train_spec(build_dataloader_fn: Callable[..., Any], **overrides: Any) -> TrainSpec:
    """Describe Ling to torchtitan.

    Args:
        build_dataloader_fn: Builds the loader of training steps; it lives above the models.
        **overrides: Other fields of ``TrainSpec``, such as ``build_metrics_processor_fn``.
    """
    fields: dict[str, Any] = {
        "model_cls": Ling,
        # Copies: torchtitan writes job settings into them.
        "model_args": {name: replace(args) for name, args in FLAVOURS.items()},
        "parallelize_fn": parallelize_ling,
        "pipelining_fn": None,
        "build_optimizers_fn": build_optimizers,
        "build_lr_schedulers_fn": build_lr_schedulers,
        "build_dataloader_fn": build_dataloader_fn,
        "build_tokenizer_fn": None,
        "build_loss_fn": _no_loss,
        "state_dict_adapter": LingStateDictAdapter,
    }
    return TrainSpec(**(fields | overrides))


def register(build_dataloader_fn: Callable[..., Any], **overrides: Any) -> TrainSpec:
    """Register Ling under the name ``ling``; a second call returns the first registration.

    Args:
        build_dataloader_fn: See :func:`make_train_spec`.
        **overrides: See :func:`make_train_spec`.
    """
    known = train_spec._extra_train_specs
    if NAME not in known:
        train_spec.register_train_spec(NAME, make_train_spec(build_dataloader_fn, **overrides))
    return known[NAME]
