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

from harts_titan.engine import Engine
from harts_titan.models.common.tree_inputs import TreeInputs
from harts_titan.ops.dtypes import wide_dtype
from harts_titan.step import Step
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
    hidden_TD: list[Tensor] = field(default_factory=list)
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
    """Record the head's input rows, the rows each layer executes and, if asked, every linear-attention core.

    Forward passes without gradients (the count pass of a consumer that runs in several calls) are not recorded.
    """

    def on_head(_: Any, args: tuple[Any, ...]) -> None:
        if torch.is_grad_enabled():
            record.hidden_TD.append(args[0].detach().cpu())
            record.cores.append([])

    def on_layer(name: str) -> Any:
        def count(_: Any, args: tuple[Any, ...]) -> None:
            if torch.is_grad_enabled():
                record.rows_executed[name] = record.rows_executed.get(name, 0) + args[0].shape[0]

        return count

    pending: list[tuple[Tensor, ...]] = []

    def on_core(_: Any, args: tuple[Any, ...], output: Tensor) -> None:
        if torch.is_grad_enabled():
            pending.append(tuple(t.detach() for t in (*args[:5], output)))

    def after_head(*_: Any) -> None:
        if torch.is_grad_enabled():
            record.cores[-1] = list(pending)
            pending.clear()

    handles = [model.output.register_forward_pre_hook(on_head), model.output.register_forward_hook(after_head)]
    handles += [layer.register_forward_pre_hook(on_layer(name)) for name, layer in model.layers.items()]
    if cores:
        handles += [core.register_forward_hook(on_core) for core in _cores(model)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _cores(model: Any) -> list[Any]:
    """Return the linear-attention cores of a model; none in a family without linear attention."""
    return model.linear_attention_cores() if hasattr(model, "linear_attention_cores") else []


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
    with _captured(model, record, cores=cores):
        result = engine.runner.run(step, backward=True, observer=observe)
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


def cores_bit_equal(engine: Engine, shared: Recorded, step_expanded: Step) -> tuple[bool, int]:
    """Whether the core gives every token the bits of an ordinary per-trajectory run with the same kernel (HARTS 2.2).

    The inputs that the cores of the shared run saw are copied to the expanded layout, where every trajectory is a
    sequence of its own, and the core runs again on them: differences in other layers cannot hide or cause one here.

    Returns:
        Whether all outputs are equal, and the number of output elements compared.
    """
    modules = _cores(engine.model)
    equal, compared = True, 0
    plan = step_expanded.plan
    for slot in range(plan.num_slots):
        for layout in plan.consumer(0, slot).calls:
            inputs = TreeInputs.from_layout(layout, engine.device, engine.backends)
            call = int(shared.call_S[layout.source_position_S[0]])
            # Expanded rows and positions are in bijection: row of the shared call for each expanded row.
            source_T = torch.empty(layout.num_rows, dtype=torch.int64)
            source_T[layout.row_of_position_S] = shared.row_S[layout.source_position_S]
            source_T = source_T.to(engine.device)
            for module, (*arguments, output) in zip(modules, shared.cores[call], strict=True):
                with torch.no_grad():
                    again = module(*(t[source_T] for t in arguments), inputs)
                equal &= torch.equal(again, output[source_T])
                compared += again.numel()
    return equal, compared


def routing_agrees(a: Recorded, b: Recorded, offsets: np.ndarray) -> Tensor:
    """Bool (S,): the position and all its ancestors chose the same experts in both runs, in every layer."""
    flip_S = torch.zeros(len(a.row_S), dtype=torch.bool)
    for left, right in zip(a.topk_LSA, b.topk_LSA, strict=True):
        flip_S |= (left != right).any(dim=1)
    flips = np.concatenate([[0], np.cumsum(flip_S.numpy())])
    start_S = np.repeat(offsets[:-1], np.diff(offsets))
    return torch.from_numpy(flips[1:] - flips[start_S] == 0)


def relative_difference(a: Tensor, b: Tensor) -> float:
    """``max|a - b| / max|b|``; 0 where both are zero, infinite where only ``b`` is."""
    difference, scale = float((a - b).abs().max()), float(b.abs().max())
    if difference == 0.0:
        return 0.0
    return difference / scale if scale > 0 else float("inf")


@dataclass
class LogitFigures:
    """Distances between two runs' output distributions, summed over positions."""

    cosine_error: float = 0.0
    """Sum of 1 - cosine."""
    positions: int = 0
    kl_by_depth: np.ndarray = field(default_factory=lambda: np.zeros(MAX_DEPTH + 1))
    nll_by_depth: np.ndarray = field(default_factory=lambda: np.zeros(MAX_DEPTH + 1))
    positions_by_depth: np.ndarray = field(default_factory=lambda: np.zeros(MAX_DEPTH + 1, dtype=np.int64))
    labelled_by_depth: np.ndarray = field(default_factory=lambda: np.zeros(MAX_DEPTH + 1, dtype=np.int64))

    def add(self, other: LogitFigures) -> None:
        """Add the figures of another step."""
        for name in vars(self):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def summary(self) -> dict[str, Any]:
        """Return means: token cosine, symmetric KL (nats) and absolute NLL difference (nats) by hand-over depth."""
        total = max(self.positions, 1)
        return {
            "mean_token_cosine": 1.0 - self.cosine_error / total,
            "mean_cosine_error": self.cosine_error / total,
            "mean_abs_nll_diff": float(self.nll_by_depth.sum()) / max(int(self.labelled_by_depth.sum()), 1),
            "mean_symmetric_kl": float(self.kl_by_depth.sum()) / total,
            "symmetric_kl_by_depth": (self.kl_by_depth / np.maximum(self.positions_by_depth, 1)).tolist(),
            "mean_abs_nll_diff_by_depth": (self.nll_by_depth / np.maximum(self.labelled_by_depth, 1)).tolist(),
            "positions_by_depth": self.positions_by_depth.tolist(),
        }


@torch.no_grad()
def compare_logits(engine: Engine, a: Recorded, b: Recorded, *, depth_S: Tensor, labelled_S: Tensor) -> LogitFigures:
    """Compare the output distributions of two runs position by position, a chunk of positions at a time.

    Args:
        engine: supplies the head's weight.
        a: a run.
        b: another run of the same step.
        depth_S: hand-over depth (forks above) of each position in the shared run.
        labelled_S: bool, positions with a label.
    """
    weight = engine.model.output.weight.detach()
    wide = wide_dtype(weight.dtype)
    figures = LogitFigures()
    depth_S = depth_S.clamp(max=MAX_DEPTH)
    for start in range(0, len(depth_S), _POSITIONS_PER_CHUNK):
        at = torch.arange(start, min(start + _POSITIONS_PER_CHUNK, len(depth_S)))
        left, right = (_logits(record, at, weight).to(wide) for record in (a, b))
        # Rounding may take a cosine above 1; an error is never negative.
        figures.cosine_error += float((1.0 - F.cosine_similarity(left, right, dim=1).double()).clamp(min=0.0).sum())
        left_log, right_log = left.log_softmax(dim=1), right.log_softmax(dim=1)
        symmetric = 0.5 * ((left_log.exp() - right_log.exp()) * (left_log - right_log)).sum(dim=1)
        depth, labelled = depth_S[at], labelled_S[at]
        kl = torch.zeros(MAX_DEPTH + 1, dtype=torch.float64)
        nll = torch.zeros_like(kl)
        kl.index_add_(0, depth, symmetric.double().cpu())
        difference = (a.logprob_S[at] - b.logprob_S[at]).abs().double()
        nll.index_add_(0, depth[labelled], difference[labelled])
        figures.kl_by_depth += kl.numpy()
        figures.nll_by_depth += nll.numpy()
        figures.positions_by_depth += np.bincount(depth, minlength=MAX_DEPTH + 1)
        figures.labelled_by_depth += np.bincount(depth[labelled], minlength=MAX_DEPTH + 1)
        figures.positions += len(at)
    return figures


def _logits(record: Recorded, at: Tensor, weight: Tensor) -> Tensor:
    calls, rows = record.call_S[at], record.row_S[at]
    hidden = torch.empty(len(at), weight.shape[1], dtype=weight.dtype)
    for call in calls.unique().tolist():
        chosen = calls == call
        hidden[chosen] = record.hidden_TD[call][rows[chosen]]
    return F.linear(hidden.to(weight.device), weight)
