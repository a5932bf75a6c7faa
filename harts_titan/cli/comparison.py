"""Run the same step shared, expanded and expanded again, and measure every difference (``harts-verify``).

Letters: S positions of the step, T rows of a call, D model dimension, W vocabulary, A experts per row.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from harts_titan.engine import Engine, Step
from harts_titan.models.common.tree_inputs import TreeInputs
from harts_titan.models.ling.attention import KDACore
from harts_titan.tree import CallLayout

MAX_DEPTH = 5
"""Hand-over depths are reported for 0..MAX_DEPTH, deeper ones under MAX_DEPTH."""

_POSITIONS_PER_CHUNK = 2048


@dataclass
class Recorded:
    """What one execution of a step gave, per position of the step (original order)."""

    mode: str
    loss: float = 0.0
    z_loss: float = 0.0
    load_balance_loss: float = 0.0
    counts_LE: Tensor | None = None
    logprob_S: Tensor = field(default_factory=lambda: torch.empty(0))
    entropy_S: Tensor = field(default_factory=lambda: torch.empty(0))
    hidden_SD: list[Tensor] = field(default_factory=list)
    """Final normalised rows, one tensor per call."""
    call_S: Tensor = field(default_factory=lambda: torch.empty(0))
    row_S: Tensor = field(default_factory=lambda: torch.empty(0))
    """Call and own row of each position."""
    topk_LSA: list[Tensor] = field(default_factory=list)
    """Sorted experts of each position, one tensor per MoE layer."""
    depth_S: Tensor = field(default_factory=lambda: torch.empty(0))
    grads: dict[str, Tensor] = field(default_factory=dict)
    rows_executed: dict[str, int] = field(default_factory=dict)
    cores: list[list[tuple[Tensor, ...]]] = field(default_factory=list)
    """Per call and linear-attention layer: q, k, v, f, b and the output, rows of the call."""
    layouts: list[CallLayout] = field(default_factory=list)


@contextmanager
def _captured(model: Any, record: Recorded, *, cores: bool) -> Iterator[None]:
    """Record the head's input rows and, if asked, the inputs and outputs of every linear-attention core."""
    handles = [
        model.output.register_forward_pre_hook(lambda _, args: record.hidden_SD.append(args[0].detach().cpu()))
    ]
    if cores:

        def keep(_: Any, args: tuple[Any, ...], output: Tensor) -> None:
            record.cores[-1].append(tuple(t.detach() for t in (*args[:5], output)))

        model.register_forward_pre_hook(lambda *_: None)
        handles.append(model.register_forward_pre_hook(lambda *_: record.cores.append([])))
        handles += [m.register_forward_hook(keep) for m in model.modules() if isinstance(m, KDACore)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def execute(engine: Engine, step: Step, *, cores: bool = False) -> Recorded:
    """Run forward and backward of a step and record what is compared; gradients are taken and cleared.

    Args:
        engine: the engine, one replica.
        step: planned in any mode.
        cores: keep the inputs and outputs of the linear-attention cores.
    """
    model = engine.model
    size = step.totals.positions
    record = Recorded(step.plan.mode)
    record.call_S = torch.zeros(size, dtype=torch.int64)
    record.row_S = torch.zeros(size, dtype=torch.int64)
    record.depth_S = torch.zeros(size, dtype=torch.int64)

    def observe(layout: CallLayout, output: Any) -> None:
        source, row = layout.source_position_S, layout.row_of_position_S
        record.call_S[source] = len(record.layouts)
        record.row_S[source] = row
        record.depth_S[source] = layout.seg_depth_V[layout.segment_T[row]]
        record.layouts.append(layout)
        entropy_T = output.entropy_T.detach().cpu()
        if not len(record.entropy_S):
            record.entropy_S = entropy_T.new_zeros(size)
        record.entropy_S[source] = entropy_T[row]
        for i, routed in enumerate(output.router):
            topk_TA = routed.topk_TA.cpu().sort(dim=1).values.to(torch.int16)
            if len(record.topk_LSA) <= i:
                record.topk_LSA.append(topk_TA.new_zeros(size, topk_TA.shape[1]))
            record.topk_LSA[i][source] = topk_TA[row]

    model.zero_grad(set_to_none=True)
    model.reset_rows_executed()
    # Only the calls of the step itself are recorded, not the count pass of a consumer that runs in several calls.
    with _captured(model, record, cores=cores):
        result = engine.run(step, backward=True, observer=observe)
    record.hidden_SD = record.hidden_SD[-len(record.layouts) :] if False else record.hidden_SD
    record.rows_executed = model.rows_executed()
    record.logprob_S = result.logprob_S
    record.counts_LE = None if result.counts_LE is None else result.counts_LE.cpu()
    for name in ("z_loss", "load_balance_loss"):
        metric = result.metrics.get(f"router/{name}")
        setattr(record, name, 0.0 if metric is None else metric.result())
    record.loss = result.metrics["loss"].result()
    record.grads = {
        name: torch.zeros_like(p) if p.grad is None else p.grad.detach().clone()
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    model.zero_grad(set_to_none=True)
    return record
