"""torch.compile of decoder layers: one graph per kind of layer, shared by all layers of the kind."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch._dynamo.config as dynamo_config
import torch.fx.experimental._config as shape_config

logger = logging.getLogger(__name__)


def compile_layers(layers: dict[str, Any], *, num_kinds: int, backend: str) -> None:
    """Compile the ``rows`` method of every layer, in place; call it before sharding.

    Sizes of a call are symbols, so plans of any size share the graphs. What cannot be one graph is an error.

    Args:
        layers: Modules with a method ``rows`` and an attribute ``compiled_rows``.
        num_kinds: Layers that differ in more than their weights.
        backend: Of torch.compile, "inductor" for use.
    """
    # Graphs are kept per method, and all layers have the same one; beyond the limit a layer could not run.
    dynamo_config.recompile_limit = max(dynamo_config.recompile_limit, 2 * num_kinds)
    # By default sharded layers of different kinds would be taken for one.
    dynamo_config.skip_fsdp_guards = False
    # Two tables that happen to have one size in the first plan need not have it in the next.
    shape_config.use_duck_shape = False
    for layer in layers.values():
        layer.compiled_rows = torch.compile(layer.rows, fullgraph=True, dynamic=True, backend=backend)
    logger.info("%d layers of %d kinds are compiled with %s on first use", len(layers), num_kinds, backend)
