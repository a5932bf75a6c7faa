"""One layer, or the head, of Ling as a model of its own: a pipeline stage of that one part."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from harts_titan.models.ling.config import LingArgs
from harts_titan.models.ling.model import Ling
from harts_titan.models.ling.parallelize import parallelize_ling
from harts_titan.parallel.single import build_on_meta, single_rank_dims

HEAD = "head"
KINDS = ("kda_dense", "kda_moe", "mla_dense", "mla_moe", HEAD)


def layer_kinds(args: LingArgs) -> dict[str, int]:
    """Return the first layer (0-based) of each kind that the model has."""
    kinds: dict[str, int] = {}
    for layer in range(args.n_layers):
        kind = f"{'mla' if args.is_mla(layer) else 'kda'}_{'moe' if args.is_moe(layer) else 'dense'}"
        kinds.setdefault(kind, layer)
    return kinds


def build_stage(args: LingArgs, kind: str, config: Any, device: torch.device) -> Ling:
    """Build one kind of layer, or the final norm and head, as training runs it, without recomputation and sharding.

    Args:
        args: the architecture.
        kind: a key of :func:`layer_kinds`, or :data:`HEAD`.
        config: merged ``JobConfig``; weights are stored in ``training.mixed_precision_param``, what layers compute in.
        device: where it goes.

    Returns:
        A model whose call takes the rows of the stage before: ``model(inputs, hidden_TD)``.

    Raises:
        ValueError: If the model has no such part.
    """
    kinds = layer_kinds(args)
    if kind != HEAD and kind not in kinds:
        raise ValueError(f"the model has no layer '{kind}'; it has {', '.join([*kinds, HEAD])}")
    config = copy.deepcopy(config)
    config.training.dtype = config.training.mixed_precision_param
    config.activation_checkpoint.mode = "none"
    model = build_on_meta(lambda: Ling(args), getattr(torch, config.training.dtype))
    model.tok_embeddings = None
    if kind == HEAD:
        model.layers = nn.ModuleDict()
    else:
        name = str(kinds[kind])
        model.layers = nn.ModuleDict({name: model.layers[name]})
        model.norm = model.output = None
        parallelize_ling(model, single_rank_dims(), config)
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_weights()
    return model.train()
