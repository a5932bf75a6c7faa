"""From a batch of rollouts to planned optimizer steps: everything of an update that needs neither weights nor a device.

Letters: S semantic positions, N trajectories.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch.profiler import record_function

from harts_titan.data import RolloutBatch, apply_overlong, check_vocabulary, label_aligned
from harts_titan.planning import StepPlanner, make_plan
from harts_titan.rl import Objective, PositionBatch, StepTotals, position_advantages
from harts_titan.step import Step
from harts_titan.tree import PlanCost, StepPlan

_OPTIONAL_COLUMNS = ("logprobs", "old_logprobs", "ref_logprobs", "advantages", "weights")


@dataclass(frozen=True)
class MiniBatch:
    """The trajectories of one optimizer step, checked."""

    batch: RolloutBatch
    advantage_S: np.ndarray | None
    """Derived from rewards, label-aligned; None where the batch has the column or needs none."""
    pending: Future[StepPlan] | None
    """Its plan, if it was given to the planning process."""


class StepPreparation:
    """Checks batches, cuts them into optimizer steps and plans them.

    Args:
        config: merged ``JobConfig``.
        objective: what is optimised.
        plan_cost: what plans are compared by.
        vocab_size: token ids the model has.
        num_taps: width of its short convolution, 1 without one: the plan then lists each row itself.
        dp_rank: this rank's replica.
        dp_degree: number of data-parallel replicas.
    """

    def __init__(
        self,
        config: Any,
        objective: Objective,
        *,
        plan_cost: PlanCost,
        vocab_size: int,
        num_taps: int,
        dp_rank: int,
        dp_degree: int,
    ) -> None:
        self.config = config
        self.objective = objective
        self.plan_cost = plan_cost
        self.vocab_size = vocab_size
        self.num_taps = num_taps
        self.dp_rank = dp_rank
        self.dp_degree = dp_degree

    def check(self, batch: RolloutBatch) -> None:
        """See :meth:`harts_titan.engine.Engine.check`."""
        check_vocabulary(batch, self.vocab_size)
        self.objective.check_inputs(columns_of(batch))
        self._advantages(batch)
        self._split(batch)
        if self.config.data.overlong == "error":
            apply_overlong(batch, self.config.tree.max_tokens, "error")

    def mini_batches(self, batch: RolloutBatch, planner: StepPlanner | None) -> list[MiniBatch]:
        """Check a batch and cut it into its optimizer steps; ``planner`` starts planning them."""
        self.check(batch)
        batch, _ = apply_overlong(batch, self.config.tree.max_tokens, self.config.data.overlong)
        advantage_S = self._advantages(batch)
        parts = []
        for idx in self._split(batch):
            part = batch.select(idx)
            picked_S = None if advantage_S is None else self._pick(batch, advantage_S, idx)
            options = self._plan_options(part)
            pending = None if planner is None else planner.submit(part.tokens, part.offsets, **options)
            parts.append(MiniBatch(part, picked_S, pending))
        return parts

    def prepare(
        self, batch: RolloutBatch, advantage_S: np.ndarray | None = None, pending: Future[StepPlan] | None = None
    ) -> Step:
        """Plan one optimizer step and align its metadata.

        Args:
            batch: the step's trajectories.
            advantage_S: label-aligned advantages derived from rewards; None reads the batch's column.
            pending: the plan of the batch that is being made; None plans in place.
        """
        started = time.perf_counter()
        with record_function("harts::plan"):
            plan = self.plan(batch) if pending is None else pending.result()
        waited = time.perf_counter() - started
        offsets = batch.offsets
        mask_S = batch.label_mask

        def aligned(values: np.ndarray | None) -> np.ndarray | None:
            return None if values is None else label_aligned(values, offsets, 0.0)

        positions = PositionBatch.from_arrays(
            mask_S,
            offsets,
            advantage_S=aligned(batch.advantages) if advantage_S is None else advantage_S,
            old_logprob_S=aligned(batch.old_logprobs),
            ref_logprob_S=aligned(batch.ref_logprobs),
            sampler_logprob_S=aligned(batch.logprobs),
            weight_S=aligned(batch.weights),
        )
        totals = StepTotals.from_arrays(mask_S, offsets, weight_S=aligned(batch.weights))
        return Step(batch, plan, positions, totals, waited)

    def replan(self, step: Step, **plan_options: Any) -> Step:
        """See :meth:`harts_titan.engine.Engine.replan`."""
        return replace(step, plan=self.plan(step.batch, **plan_options))

    def plan(self, batch: RolloutBatch, **plan_options: Any) -> StepPlan:
        """Plan one optimizer step here and now; options as :func:`harts_titan.planning.make_plan` takes them."""
        return make_plan(batch.tokens, batch.offsets, **(self._plan_options(batch) | plan_options))

    def _plan_options(self, batch: RolloutBatch) -> dict[str, Any]:
        tree = self.config.tree
        return {
            "capacity": tree.max_tokens,
            "chunk_size": tree.chunk_size,
            "dp_degree": self.dp_degree,
            # Every rank plans the whole step and lays out the rows it runs.
            "replicas": (self.dp_rank,),
            "mode": tree.mode,
            "num_taps": self.num_taps,
            "validate": tree.validate,
            "cost": self.plan_cost,
            "node_start": batch.node_start,
        }

    def _advantages(self, batch: RolloutBatch) -> np.ndarray | None:
        trained_N = np.add.reduceat(batch.loss_mask, batch.offsets[:-1], dtype=np.int64)
        advantage_N = self.objective.advantages(
            batch.reward,
            batch.group_id,
            # Rows without an episode id are their own episodes.
            episode_ids=[episode or f"row {n}" for n, episode in enumerate(batch.episode_id)],
            trained_N=trained_N,
            locations=batch.location,
        )
        return None if advantage_N is None else position_advantages(advantage_N, batch.offsets)

    def _split(self, batch: RolloutBatch) -> list[np.ndarray]:
        """Cut the batch into ``rl.mini_batches`` parts of neighbouring rows, fewer if a replica would get none."""
        number = batch.num_trajectories
        if number < self.dp_degree:
            raise ValueError(f"{number} trajectories cannot fill {self.dp_degree} data-parallel replicas")
        return np.array_split(np.arange(number), min(self.config.rl.mini_batches, number // self.dp_degree))

    @staticmethod
    def _pick(batch: RolloutBatch, values_S: np.ndarray, idx: np.ndarray) -> np.ndarray:
        return np.concatenate([values_S[batch.offsets[n] : batch.offsets[n + 1]] for n in idx])


def columns_of(batch: RolloutBatch) -> set[str]:
    """Names of the optional columns that a batch has."""
    return {name for name in _OPTIONAL_COLUMNS if getattr(batch, name) is not None}
