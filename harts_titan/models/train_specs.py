"""Model specs known to the trainer, the engine and the commands.

Importing this module registers them with torchtitan. A model outside this package registers itself in a module named by
``experimental.custom_import`` (see docs/extending.md).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torchtitan.protocols.train_spec import get_train_spec, register_train_spec

from harts_titan.data import RolloutLoader, build_loader
from harts_titan.data.source import dataset_from_config
from harts_titan.models import ling
from harts_titan.models.ling.cost import ling_plan_cost
from harts_titan.tree.cost import PlanCost

logger = logging.getLogger(__name__)


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


class PlanCostFormula(Protocol):
    """Cost coefficients of a model from its args; :func:`plan_cost` fills in ``source`` and ``row_alignment``."""

    def __call__(self, args: Any, *, chunk_size: int, recompute: bool, element_bytes: int) -> PlanCost:
        """Return the coefficients; see :func:`plan_cost` for the arguments."""


_PLAN_COSTS: dict[str, PlanCostFormula] = {}


def register_plan_cost(name: str, formula: PlanCostFormula) -> None:
    """Tell what rows and attended pairs of the model spec ``name`` cost, for the planner.

    Raises:
        ValueError: If it is known already.
    """
    if name in _PLAN_COSTS:
        raise ValueError(f"the plan cost of model '{name}' is already registered")
    _PLAN_COSTS[name] = formula


def plan_cost(
    name: str,
    flavor: str,
    *,
    tensor_parallel_degree: int = 1,
    recompute: bool = True,
    chunk_size: int = 64,
    element_bytes: int = 2,
) -> PlanCost:
    """Return the planner's cost coefficients of a registered model, in floating-point operations (HARTS A.2).

    Costs and bytes are those of a whole replica: tensor parallelism divides all of them alike.

    Args:
        name: model spec, ``model.name``.
        flavor: size of the model, ``model.flavor``.
        tensor_parallel_degree: ranks of one replica; rows are aligned to 8 for each.
        recompute: layers run forward again in the backward pass (``activation_checkpoint.mode = "full"``).
        chunk_size: tokens in a chunk of the linear-attention kernel.
        element_bytes: of the dtype layers compute in.

    Raises:
        ValueError: If the model or its size is unknown, it has not said what its rows cost, or a degree is below 1.
    """
    _check_plan_cost(name)
    return _cost_of_args(
        name,
        args_of_flavor(name, flavor),
        size=flavor,
        tensor_parallel_degree=tensor_parallel_degree,
        recompute=recompute,
        chunk_size=chunk_size,
        element_bytes=element_bytes,
    )


def plan_cost_of(job_config: Any, model_args: Any = None) -> PlanCost:
    """Return the planner's cost coefficients of a job: those of ``tree.cost_file``, or of the model's sizes.

    Args:
        job_config: merged ``JobConfig``.
        model_args: sizes of the model where ``model.flavor`` does not give them (a Hugging Face folder).

    Raises:
        ValueError: If the file is unusable or was made for other parallelism, or the model or its size is unknown.
    """
    degree = job_config.parallelism.tensor_parallel_degree
    if path := job_config.tree.cost_file:
        cost = PlanCost.load(path)
        if cost.row_alignment != 8 * degree:
            raise ValueError(
                f"tree.cost_file '{path}' aligns rows to {cost.row_alignment}, the job to {8 * degree} "
                f"(8 x parallelism.tensor_parallel_degree); calibrate with the job's configuration"
            )
        return cost
    if job_config.model.name not in _PLAN_COSTS:
        logger.warning(
            "model.name = '%s' has not said what its rows cost (register_plan_cost): the planner counts rows only, "
            "which balances attention and the LM head badly; calibrate it and set tree.cost_file",
            job_config.model.name,
        )
        return PlanCost(row_alignment=8 * degree)
    return cost_of_sizes(job_config, model_args)


def cost_of_sizes(job_config: Any, model_args: Any = None) -> PlanCost:
    """Return the cost coefficients that follow from the sizes of a job's model; arguments as :func:`plan_cost_of`.

    Raises:
        ValueError: As :func:`plan_cost`.
    """
    return _cost_of_args(
        job_config.model.name,
        model_args_of(job_config) if model_args is None else model_args,
        size=job_config.model.flavor if model_args is None else "of given sizes",
        tensor_parallel_degree=job_config.parallelism.tensor_parallel_degree,
        recompute=job_config.activation_checkpoint.mode == "full",
        chunk_size=job_config.tree.chunk_size,
        element_bytes=getattr(torch, job_config.training.mixed_precision_param).itemsize,
    )


def _cost_of_args(
    name: str,
    args: Any,
    *,
    size: str,
    tensor_parallel_degree: int,
    recompute: bool,
    chunk_size: int,
    element_bytes: int,
) -> PlanCost:
    if tensor_parallel_degree < 1 or chunk_size < 1 or element_bytes < 1:
        raise ValueError(
            f"tensor_parallel_degree ({tensor_parallel_degree}), chunk_size ({chunk_size}) and element_bytes "
            f"({element_bytes}) must be at least 1"
        )
    _check_plan_cost(name)
    cost = _PLAN_COSTS[name](args, chunk_size=chunk_size, recompute=recompute, element_bytes=element_bytes)
    source = f"{name} {size}: operations at chunk size {chunk_size}, {'with' if recompute else 'no'} recomputation"
    return replace(cost, row_alignment=8 * tensor_parallel_degree, source=source)


def _check_plan_cost(name: str) -> None:
    if name not in _PLAN_COSTS:
        raise ValueError(
            f"model.name = '{name}' has not said what its rows cost (register_plan_cost); those that have: "
            f"{list(_PLAN_COSTS)}"
        )


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
    return args_of_flavor(job_config.model.name, job_config.model.flavor)


def args_of_flavor(name: str, flavor: str) -> Any:
    """Return the registered sizes of the model spec ``name``.

    Raises:
        ValueError: If there is no such model or size.
    """
    flavours = get_train_spec(name).model_args
    if flavor not in flavours:
        raise ValueError(f"model.flavor = '{flavor}' is unknown; choose one of {list(flavours)}")
    return flavours[flavor]


register_train_spec(ling.NAME, ling.make_train_spec(build_dataloader))
register_hugging_face(ling.NAME, HuggingFaceFormat(ling.from_hf_config, ling.load_hf, ling.save_hf))
register_plan_cost(ling.NAME, ling_plan_cost)
