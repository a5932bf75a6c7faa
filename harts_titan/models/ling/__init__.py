"""Ling-3.0 (``BailingMoeV3ForCausalLM``): sizes, model, checkpoints and its description for torchtitan.

Letters: T compact rows, S semantic positions, D model dimension, H heads, K and V key and value head dimensions,
E experts, A experts per row, W vocabulary (convolution taps in ``conv_tap_TW``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torchtitan.components.lr_scheduler import build_lr_schedulers
from torchtitan.components.optimizer import build_optimizers
from torchtitan.protocols.train_spec import TrainSpec

from harts_titan.models.common.no_loss import build_no_loss
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
    "save_hf",
    "to_hf_config",
]

NAME = "ling"


def make_train_spec(build_dataloader_fn: Callable[..., Any]) -> TrainSpec:
    """Describe Ling to torchtitan.

    Args:
        build_dataloader_fn: Builds the loader of training steps from the rollouts.
    """
    return TrainSpec(
        model_cls=Ling,
        # Copies: torchtitan writes job settings into them.
        model_args={name: replace(args) for name, args in FLAVOURS.items()},
        parallelize_fn=parallelize_ling,
        pipelining_fn=None,
        build_optimizers_fn=build_optimizers,
        build_lr_schedulers_fn=build_lr_schedulers,
        build_dataloader_fn=build_dataloader_fn,
        build_tokenizer_fn=None,
        build_loss_fn=build_no_loss,
        state_dict_adapter=LingStateDictAdapter,
    )
