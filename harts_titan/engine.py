"""The update as a library call: a batch of rollouts in, one policy update out.

``Engine.update(batch)`` is the whole step: refuse bad input, plan, old log-probs if they are missing, epochs and
mini-batches, forward and backward of every microbatch, clipping, optimizer, expert bias, metrics. The trainer calls it
with what its loader delivers; an RL framework can own an engine and call it with what it holds in memory.

Reading order of one batch: :meth:`Engine.update` -> :mod:`harts_titan.preparation` (plan, positions, denominators) ->
:meth:`harts_titan.step.StepRunner.run` (microbatches) -> ``model(inputs)`` -> ``harts_titan.ops``. A batch that
:meth:`Engine.plan_ahead` was given before is planned by then: :mod:`harts_titan.planning`.
"""

from __future__ import annotations

import copy
import importlib
import logging
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.profiler import record_function

from harts_titan.data import RolloutBatch, apply_overlong, check_vocabulary, token_aligned
from harts_titan.models.building import build_model, build_optimizers, data_parallel_dims, default_device
from harts_titan.models.common.router_losses import update_expert_bias
from harts_titan.models.train_specs import hugging_face_format, plan_cost_of
from harts_titan.ops import OpsBackends
from harts_titan.parallel.clipping import clip_gradients, gradient_norm
from harts_titan.planning import StepPlanner
from harts_titan.preparation import MiniBatch, StepPreparation, columns_of
from harts_titan.rl import Metric, all_reduce_metrics, build_objective, metrics_on_host
from harts_titan.step import Step, StepResult, StepRunner, figure
from harts_titan.update_metrics import expert_load, means_over_steps, plan_figures

logger = logging.getLogger(__name__)


class NonFiniteError(RuntimeError):
    """The loss or the gradient norm is NaN or infinite; the message names the step and the episodes."""


class Engine:
    """Plans and runs updates of one model on this rank.

    Args:
        model: the (sharded) model; its ``forward(TreeInputs)`` returns log-probs, entropies and router outputs.
        config: merged ``JobConfig`` with the sections of :mod:`harts_titan.job_config`.
        device: device of the model.
        optimizers: torchtitan's container or any object with ``step`` and ``zero_grad``; None for forward-only use.
        lr_schedulers: stepped once per update, or None.
        dp_rank: this rank's replica.
        dp_degree: number of data-parallel replicas.
        dp_group: their process group, None for one replica.
    """

    def __init__(
        self,
        model: Any,
        config: Any,
        *,
        device: torch.device | str,
        optimizers: Any = None,
        lr_schedulers: Any = None,
        dp_rank: int = 0,
        dp_degree: int = 1,
        dp_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.model: Any = model
        self.config = config
        self.device = torch.device(device)
        self.optimizers = optimizers
        self.lr_schedulers = lr_schedulers
        self.dp_rank = dp_rank
        self.dp_degree = dp_degree
        self.dp_group = dp_group
        self.objective = build_objective(config.rl)
        self.plan_cost = plan_cost_of(config, model.model_args)
        """What plans are compared by: from ``tree.cost_file`` or the model's sizes."""
        self.backends = OpsBackends(**vars(config.ops))
        self.runner = StepRunner(
            model,
            self.objective,
            moe=config.moe,
            backends=self.backends,
            device=self.device,
            dp_rank=dp_rank,
        )
        self.preparation = StepPreparation(
            config,
            self.objective,
            plan_cost=self.plan_cost,
            vocab_size=self.vocab_size,
            num_taps=getattr(model.model_args, "num_taps", 1),
            dp_rank=dp_rank,
            dp_degree=dp_degree,
        )
        self.num_updates = 0
        """Updates so far: the step that messages name."""
        self._planner: StepPlanner | None = None
        # Batches that were given to plan_ahead: that of the coming update and the one after it.
        self._ahead: deque[tuple[RolloutBatch, list[MiniBatch]]] = deque(maxlen=2)

    @classmethod
    def from_config(
        cls, config: Any, *, hf_dir: str = "", checkpoint: str = "", dtype: str = "", with_optimizer: bool = True
    ) -> Engine:
        """Build model, optimizer and engine from a configuration, for use without the trainer.

        Joins the default process group if it is initialised (data parallel over all its ranks).

        Args:
            config: merged ``JobConfig``, from :func:`harts_titan.job_config.load_config`.
            hf_dir: Hugging Face folder that gives sizes (``config.json``) and weights; "" = ``model.flavor``, filled
                from ``debug.seed``.
            checkpoint: folder of a training checkpoint (``.../step-N``) that gives the weights.
            dtype: overrides ``training.dtype`` and turns mixed precision off ("float64" for verification).
            with_optimizer: build the optimizer and scheduler of the configuration.

        Raises:
            ValueError: If the folder or the configuration does not fit the model.
        """
        if config.experimental.custom_import:
            importlib.import_module(config.experimental.custom_import)
        if dtype:
            config = copy.deepcopy(config)
            config.training.dtype = config.training.mixed_precision_param = dtype
        dims = data_parallel_dims()
        device = default_device()
        model = build_model(config, dims, device, hf_dir=hf_dir, checkpoint=checkpoint)
        optimizers, schedulers = build_optimizers(model, config, dims) if with_optimizer else (None, None)
        distributed = dist.is_available() and dist.is_initialized()
        return cls(
            model,
            config,
            device=device,
            optimizers=optimizers,
            lr_schedulers=schedulers,
            dp_rank=dist.get_rank() if distributed else 0,
            dp_degree=dims.world_size,
            dp_group=dist.group.WORLD if distributed else None,
        )

    @property
    def vocab_size(self) -> int:
        """Token ids the model has."""
        return self.model.model_args.vocab_size

    # ------------------------------------------------------------------------------------------------ library calls
    def update(self, batch: RolloutBatch) -> dict[str, float]:
        """Update the policy on one batch of rollouts: ``rl.epochs`` passes of ``rl.mini_batches`` optimizer steps.

        Args:
            batch: the trajectories of the step over all replicas; every rank passes the same batch.

        Returns:
            Metrics by name: loss, gradient norm, objective, router, plan and token figures; the same on every rank,
            but for seconds.

        Raises:
            ValueError: If the batch lacks what the objective needs, before any compute.
            NonFiniteError: If a loss or gradient norm is not finite; the weights are then those of the last good step.
            PlanningError: If the batch was planned ahead and the planning process has died.
        """
        if not isinstance(batch, RolloutBatch):
            raise TypeError(
                f"update takes a RolloutBatch, got {type(batch).__name__}; see harts_titan.data.from_padded"
            )
        if self.optimizers is None:
            raise ValueError("this engine was built without an optimizer and can only compute log-probs")
        self.num_updates += 1
        steps = self.prepare_update(batch)
        parts: list[dict[str, Metric]] = []
        for _ in range(self.config.rl.epochs):
            for step in steps:
                parts.append(self._optimizer_step(step))
        if self.lr_schedulers is not None:
            self.lr_schedulers.step()
        epochs = self.config.rl.epochs
        had_old = "old_logprobs" in columns_of(steps[0].batch)
        passes = epochs + (not had_old and "old_logprob" in self.objective.needs)
        return means_over_steps(parts) | plan_figures(steps, epochs=epochs, passes=passes)

    def plan_ahead(self, batch: RolloutBatch) -> None:
        """Start planning the batch of a coming update while this process goes on.

        ``update`` takes the plan if it is given the same object, and plans in place otherwise; results are the same.
        Two batches are kept, those of the next update and of the one after it; a third replaces the oldest. Nothing
        happens with ``tree.plan_in_background = false``, and until the planning process has started.

        Args:
            batch: the trajectories of that update; its arrays must not be written to afterwards.

        Raises:
            ValueError: As ``update``, where planning is not needed to see that the batch cannot be used.
            PlanningError: If the planning process has died.
        """
        if not self.config.tree.plan_in_background or any(batch is known for known, _ in self._ahead):
            return
        planner = self.start_planner()
        if planner.ready:
            self._ahead.append((batch, self.preparation.mini_batches(batch, planner)))

    def start_planner(self) -> StepPlanner:
        """Return the planning process; start it, which takes seconds of its own, if there is none yet."""
        if self._planner is None:
            self._planner = StepPlanner()
        return self._planner

    def close(self) -> None:
        """End the planning process if there is one; the engine can still be used."""
        self._ahead.clear()
        if self._planner is not None:
            self._planner.close()
            self._planner = None

    def compute_log_probs(self, batch: RolloutBatch) -> np.ndarray:
        """Compute the current policy's log-prob of every token, without gradients.

        Bit-equal to the forward pass of an update on the same batch with one mini-batch.

        Args:
            batch: trajectories; every rank passes the same batch.

        Returns:
            float32 (float64 for a float64 model) (S,), token-aligned; entry 0 of every trajectory is 0.0.

        Raises:
            ValueError: If a trajectory is longer than ``tree.max_tokens`` or has an id the model does not have.
            NonFiniteError: If a log-prob is NaN or infinite; the message names the episodes.
        """
        check_vocabulary(batch, self.vocab_size)
        batch, _ = apply_overlong(batch, self.config.tree.max_tokens, "error")
        step = self.prepare(batch)
        logprob_S = self._gather(self.runner.run(step, backward=False).logprob_S)
        if episodes := _episodes(batch, ~torch.isfinite(logprob_S)):
            raise NonFiniteError(f"the model gives log-probs that are not finite in episodes {episodes}")
        return token_aligned(logprob_S.numpy(), batch.offsets, 0.0)

    def save(self, folder: str | Path) -> None:
        """Write the weights as a checkpoint folder that ``from_config(checkpoint=...)`` reads on any number of ranks.

        Args:
            folder: created if missing; every rank calls this.
        """
        dcp.save(self.model.state_dict(), checkpoint_id=str(folder))

    def save_hf(self, folder: str | Path) -> None:
        """Write ``config.json`` and sharded safetensors as published checkpoints have them.

        Args:
            folder: created if missing; every rank calls this.

        Raises:
            ValueError: If the model family cannot write Hugging Face folders.
        """
        name = self.config.model.name
        save = hugging_face_format(name).save
        if save is None:
            raise ValueError(f"model.name = '{name}' reads Hugging Face folders but cannot write them; use Engine.save")
        save(self.model, self.model.model_args, folder)

    # --------------------------------------------------------------------------------------------------- preparation
    def check(self, batch: RolloutBatch) -> None:
        """Refuse a batch that an update could not use, before any compute.

        Raises:
            ValueError: Naming the missing column, the row whose token id the model does not have, the episode without a
                reward, or the trajectory that is too long.
        """
        self.preparation.check(batch)

    def prepare_update(self, batch: RolloutBatch) -> list[Step]:
        """Check a batch and turn it into the optimizer steps of one epoch: advantages, plans, old log-probs.

        Args:
            batch: trajectories; every rank passes the same batch.

        Returns:
            One step per mini-batch.

        Raises:
            ValueError: If the batch lacks what the objective needs, before any compute.
        """
        planned = [parts for known, parts in self._ahead if known is batch]
        self._ahead = deque((entry for entry in self._ahead if entry[0] is not batch), self._ahead.maxlen)
        parts = planned[0] if planned else self.preparation.mini_batches(batch, None)
        steps = [self.preparation.prepare(part.batch, part.advantage_S, part.pending) for part in parts]
        if self.objective.must_compute_old_logprobs(columns_of(batch)):
            # Same plans as the updates, so that the first ratio is exactly 1.
            with record_function("harts::old_logprobs"):
                steps = [self._with_old_logprobs(step) for step in steps]
        return steps

    def replan(self, step: Step, **plan_options: Any) -> Step:
        """Plan the same optimizer step differently, e.g. ``mode="expanded"``; metadata and totals stay."""
        return self.preparation.replan(step, **plan_options)

    def prepare(self, batch: RolloutBatch) -> Step:
        """Plan one optimizer step and align its metadata; advantages are those of the batch's column.

        Args:
            batch: the step's trajectories.
        """
        return self.preparation.prepare(batch)

    def _with_old_logprobs(self, step: Step) -> Step:
        logprob_S = self._gather(self.runner.run(step, backward=False).logprob_S)
        return replace(step, positions=replace(step.positions, old_logprob_S=logprob_S))

    def _optimizer_step(self, step: Step) -> dict[str, Metric]:
        self.optimizers.zero_grad()
        started = time.perf_counter()
        result = self.runner.run(step, backward=True)
        with record_function("harts::optimizer"):
            parameters = [p for p in self.model.parameters() if p.requires_grad]
            grad_norm = gradient_norm(parameters)
            # The first time that the host waits for the device: the step is taken only if everything is finite.
            metrics = metrics_on_host(result.metrics | {"grad_norm": figure("mean", grad_norm)})
            norm = {"grad_norm": metrics.pop("grad_norm")}
            metrics = all_reduce_metrics(metrics, self.dp_group) if self.dp_degree > 1 else metrics
            metrics |= norm
            self._check_finite(step, result, metrics)
            clip_gradients(parameters, grad_norm, self.config.training.max_norm)
            self.optimizers.step()
            metrics |= self._apply_expert_counts(result.counts_LE)
        metrics["time/step_seconds"] = figure("sum", time.perf_counter() - started)
        return metrics

    def _apply_expert_counts(self, counts_LE: Tensor | None) -> dict[str, Metric]:
        """Sum the assignments over replicas, update the expert biases, report the load."""
        if counts_LE is None:
            return {}
        if self.dp_degree > 1:
            dist.all_reduce(counts_LE, group=self.dp_group)
        if self.config.moe.expert_bias_rate > 0:
            update_expert_bias(self.model.expert_biases(), counts_LE, rate=self.config.moe.expert_bias_rate)
        return expert_load(counts_LE)

    def _check_finite(self, step: Step, result: StepResult, metrics: dict[str, Metric]) -> None:
        loss, grad_norm = metrics["loss"].result(), metrics["grad_norm"].result()
        terms = [loss, *(m.result() for name, m in metrics.items() if name.startswith("router/"))]
        if np.isfinite(grad_norm) and all(np.isfinite(terms)):
            return
        episodes = _episodes(step.batch, ~(torch.isfinite(result.logprob_S) & torch.isfinite(result.loss_S)))
        where = (
            f"non-finite in episodes {episodes}"
            if episodes
            else (
                f"log-probs and losses on this replica are finite; episodes: {sorted(set(step.batch.episode_id))[:8]}"
            )
        )
        self.optimizers.zero_grad()
        raise NonFiniteError(
            f"step {self.num_updates}, replica {self.dp_rank}: loss {loss}, gradient norm {grad_norm}; {where}. "
            "The optimizer step was not taken."
        )

    def _gather(self, logprob_S: Tensor) -> Tensor:
        """Complete the log-probs of all replicas; every position belongs to one replica, so the sum is exact."""
        if self.dp_degree == 1:
            return logprob_S
        on_device = logprob_S.to(self.device)
        dist.all_reduce(on_device, group=self.dp_group)
        return on_device.cpu()


def _episodes(batch: RolloutBatch, bad_S: Tensor) -> list[str]:
    """Name up to eight trajectories that have a true entry in ``bad_S``: by episode, or by file and row."""
    rows = np.unique(batch.row_of_position(np.flatnonzero(bad_S.numpy())))
    return [batch.episode_id[n] or batch.location[n] for n in rows[:8]]
