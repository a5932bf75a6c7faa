"""Forward and backward of one optimizer step: every microbatch of this replica, slot after slot.

One batch from here down: :meth:`StepRunner.run` -> ``model(inputs)`` -> ``harts_titan.ops``. The engine above plans the
step and owns the optimizer; nothing here knows of either.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from harts_titan.data import RolloutBatch
from harts_titan.models.common.router_losses import (
    balance,
    expert_counts,
    load_balancing_loss,
    probability_mass,
    trajectory_load_balancing_loss,
    z_loss,
)
from harts_titan.models.common.tree_inputs import TreeInputs
from harts_titan.ops import OpsBackends
from harts_titan.parallel.fsdp import set_last_backward
from harts_titan.rl import Metric, Objective, PositionBatch, StepTotals, merge_metrics
from harts_titan.tree import CallLayout, StepPlan


@dataclass(frozen=True)
class Step:
    """One optimizer step's trajectories, ready to run."""

    batch: RolloutBatch
    plan: StepPlan
    positions: PositionBatch
    """Of the whole step, label-aligned, on the CPU."""
    totals: StepTotals
    plan_wait_seconds: float = 0.0
    """Time that planning kept the training process from anything else."""


@dataclass
class StepResult:
    """What the microbatches of one step gave on this rank."""

    logprob_S: Tensor = field(default_factory=lambda: torch.empty(0))
    """Log-probs of all positions of the step, label-aligned, on the CPU; 0 where another rank computed them."""
    loss_S: Tensor = field(default_factory=lambda: torch.empty(0))
    """float64. Each position's share of the objective, label-aligned, on the CPU; 0 where nothing is trained."""
    metrics: dict[str, Metric] = field(default_factory=dict)
    counts_LE: Tensor | None = None
    """int64 assignments per MoE layer and expert, weighted by multiplicity; None without MoE layers."""


@dataclass
class _Consumer:
    """A microbatch while its calls run, and what its load-balancing loss needs of all of them."""

    calls: tuple[CallLayout, ...]
    positions: int
    counts_LE: Tensor | None = None
    """Assignments of all calls, where a gradient needs them before the first call's backward pass."""
    late: tuple[Tensor, Tensor, int] | None = None
    """Assignments and probability mass so far and experts per position, where the loss is only reported."""


CallObserver = Callable[[CallLayout, Any], None]


@dataclass
class _Launched:
    """What the microbatches of a step have left on the device; nothing of it has been waited for."""

    layouts: list[CallLayout]
    logprobs: list[Tensor] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    metrics: list[dict[str, Metric]] = field(default_factory=list)
    counts_LE: Tensor | None = None


class StepRunner:
    """Runs the microbatches of one replica.

    Args:
        model: its ``forward(TreeInputs)`` returns log-probs, entropies and router outputs.
        objective: what is optimised.
        moe: section ``[moe]``.
        backends: implementations of the ops.
        device: of the model.
        dp_rank: this replica.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        *,
        moe: Any,
        backends: OpsBackends,
        device: torch.device,
        dp_rank: int,
    ) -> None:
        self.model = model
        self.objective = objective
        self.moe = moe
        self.backends = backends
        self.device = device
        self.dp_rank = dp_rank

    def run(self, step: Step, *, backward: bool, observer: CallObserver | None = None) -> StepResult:
        """Run this replica's microbatches of a step, slot after slot; with ``backward`` gradients accumulate.

        Args:
            step: from :meth:`harts_titan.engine.Engine.prepare`.
            backward: also compute the objective and its gradients.
            observer: called with every call's layout and model output (for comparisons and tests).
        """
        launched = self.launch(step, backward=backward, observer=observer)
        size = step.totals.positions
        return StepResult(
            _in_step_order(launched.layouts, launched.logprobs, size),
            _in_step_order(launched.layouts, launched.losses, size),
            merge_metrics(launched.metrics),
            launched.counts_LE,
        )

    def launch(self, step: Step, *, backward: bool, observer: CallObserver | None = None) -> _Launched:
        """Queue a step's microbatches; the host waits for the device nowhere in here. Arguments as :meth:`run`."""
        consumers = [step.plan.consumer(self.dp_rank, slot).calls for slot in range(step.plan.num_slots)]
        launched = _Launched([layout for calls in consumers for layout in calls])
        with contextlib.nullcontext() if backward else torch.no_grad():
            for calls in consumers:
                consumer = _Consumer(calls, sum(call.num_positions for call in calls))
                if backward:
                    consumer.counts_LE = self._counts_before_backward(consumer)
                for layout in calls:
                    with record_function("harts::inputs"):
                        inputs = TreeInputs.from_layout(layout, self.device, self.backends)
                    if backward:
                        set_last_backward(self.model, len(launched.logprobs) == len(launched.layouts) - 1)
                    with record_function("harts::forward"):
                        output = self.model(inputs)
                    launched.logprobs.append(output.logprob_S.detach())
                    if backward:
                        self._backward(step, consumer, layout, inputs, output, launched)
                    if observer is not None:
                        observer(layout, output)
                if consumer.late is not None:
                    launched.metrics.append(self._late_balance(step, consumer, *consumer.late))
        return launched

    def _backward(
        self,
        step: Step,
        consumer: _Consumer,
        layout: CallLayout,
        inputs: TreeInputs,
        output: Any,
        launched: _Launched,
    ) -> None:
        with record_function("harts::objective"):
            positions = step.positions.take(layout.source_position_S, layout.position_offset_N1)
            positions = positions.to(self.device, non_blocking=True)
            entropy_S = output.entropy_T[inputs.row_of_position_S]
            if not self.objective.needs_entropy:
                entropy_S = entropy_S.detach()
            objective = self.objective(output.logprob_S, entropy_S, positions, step.totals)
            loss, metrics = objective.loss, dict(objective.metrics)
            if output.router:
                counts_LE = expert_counts(output.router, inputs.multiplicity_T)
                launched.counts_LE = counts_LE if launched.counts_LE is None else launched.counts_LE + counts_LE
                z, balance_loss = self._router_losses(step, consumer, inputs, output.router)
                loss = loss + self.moe.z_loss_coef * z + self.moe.load_balance_coef * balance_loss
                metrics["router/z_loss"] = figure("sum", z, layout.num_positions)
                if consumer.counts_LE is not None or self._one_call_suffices(consumer):
                    metrics["router/load_balance_loss"] = figure("sum", balance_loss, layout.num_positions)
                else:
                    mass_LE = probability_mass(output.router, inputs.multiplicity_T).detach()
                    if consumer.late is not None:
                        counts_LE, mass_LE = consumer.late[0] + counts_LE, consumer.late[1] + mass_LE
                    consumer.late = (counts_LE, mass_LE, output.router[0].topk_TA.shape[1])
        with record_function("harts::backward"):
            loss.backward()
        launched.metrics.append(metrics)
        launched.losses.append(objective.loss_S)

    def _router_losses(self, step: Step, consumer: _Consumer, inputs: TreeInputs, router: Any) -> tuple[Tensor, Tensor]:
        """Return this call's share of the step's z-loss and load-balancing loss (HARTS 3.5).

        Both are means over the positions of the whole step, so microbatches weigh ``S_mb / S_step``.
        """
        step_positions = step.totals.positions
        z = z_loss(router, inputs.multiplicity_T, num_positions=step_positions)
        if self.moe.load_balance_scope == "trajectory":
            return z, trajectory_load_balancing_loss(router, inputs.statistics, num_positions=step_positions)
        whole = load_balancing_loss(
            router, inputs.multiplicity_T, num_positions=consumer.positions, counts_LE=consumer.counts_LE
        )
        return z, whole * (consumer.positions / step_positions)

    def _late_balance(
        self, step: Step, consumer: _Consumer, counts_LE: Tensor, mass_LE: Tensor, top_k: int
    ) -> dict[str, Metric]:
        loss = balance(counts_LE, mass_LE, top_k=top_k, num_positions=consumer.positions)
        share = loss * (consumer.positions / step.totals.positions)
        return {"router/load_balance_loss": figure("sum", share, consumer.positions)}

    def _counts_before_backward(self, consumer: _Consumer) -> Tensor | None:
        """Return the assignment counts of a consumer that runs in several calls, None where nothing needs them.

        Load balancing multiplies counts and probabilities of the whole consumer, so the counts must be known before
        the first call's backward pass.
        """
        if self._one_call_suffices(consumer) or self.moe.load_balance_coef == 0:
            return None
        total_LE: Tensor | None = None
        with torch.no_grad(), record_function("harts::expert_counts"):
            for layout in consumer.calls:
                inputs = TreeInputs.from_layout(layout, self.device, self.backends)
                router = self.model(inputs).router
                if not router:
                    return None
                counts_LE = expert_counts(router, inputs.multiplicity_T)
                total_LE = counts_LE if total_LE is None else total_LE + counts_LE
        return total_LE

    def _one_call_suffices(self, consumer: _Consumer) -> bool:
        """Whether a call knows enough to compute its share of the load-balancing loss."""
        return len(consumer.calls) == 1 or self.moe.load_balance_scope == "trajectory"


def _in_step_order(layouts: list[CallLayout], values: list[Tensor], size: int) -> Tensor:
    """Return the calls' per-position values as one CPU tensor in the step's order, 0 where no call had the position."""
    if not values:
        return torch.zeros(size)
    out = torch.zeros(size, dtype=values[0].dtype)
    out[torch.cat([layout.source_position_S for layout in layouts])] = torch.cat(values).cpu()
    return out


def figure(kind: str, value: Tensor | float, count: int = 1) -> Metric:
    """Return a metric from one number; see :class:`harts_titan.rl.Metric` for the kinds."""
    value = value.detach() if isinstance(value, Tensor) else torch.tensor(value)
    return Metric(kind, value.to(torch.float64), torch.tensor(count))
