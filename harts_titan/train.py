"""Training entry point: a torchtitan trainer whose step is :meth:`harts_titan.engine.Engine.update`.

``run_train.sh`` starts ``python -m harts_titan.train --job.config_file CONFIG.toml [--section.field value ...]``, with
torchrun in between when there are several ranks.
torchtitan builds the meshes, the model, optimizers, schedulers, checkpoints and metrics; the loader delivers the
rollouts of one step; the engine does the rest.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torchtitan.train as titan
from torchtitan.components.checkpoint import DATALOADER
from torchtitan.components.dataloader import DataloaderExhaustedError
from torchtitan.tools.logging import init_logger, logger

from harts_titan import _compat
from harts_titan.data import RolloutBatch
from harts_titan.data.look_ahead import LookAhead
from harts_titan.engine import Engine, NonFiniteError
from harts_titan.job_config import parse_config, validate
from harts_titan.planning import PlanningError

# torchtitan's own version fails without an accelerator; Trainer.train looks the name up in its module.
titan.maybe_enable_profiling = _compat.profiling


# What a launcher sets; without one the process is the only rank. Port 0: any free one.
_ONE_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}


class HartsTrainer(titan.Trainer):
    """torchtitan's trainer with planned, shared execution of a step's rollouts."""

    dataloader: Any

    def __init__(self, job_config: Any) -> None:
        validate(job_config)
        # Without elastic's `record`, which prints a traceback for every exception, a user's one-line mistake included.
        titan.Trainer.__init__.__wrapped__(self, job_config)
        dims = self.parallel_dims
        mesh = dims.get_mesh("batch") if dims.dp_enabled else None
        self.engine = Engine(
            self.model_parts[0],
            job_config,
            device=self.device,
            optimizers=self.optimizers,
            lr_schedulers=self.lr_schedulers,
            dp_rank=0 if mesh is None else mesh.get_local_rank(),
            dp_degree=1 if mesh is None else mesh.size(),
            dp_group=None if mesh is None else mesh.get_group(),
        )
        self.optimizers.register_step_pre_hook(lambda *_, **__: self.checkpointer.maybe_wait_for_staging())
        # Refuse unusable rollouts now, not when their step comes.
        for members in self.dataloader.dataset.steps_of_epoch(0):
            self.engine.check(self.dataloader.dataset.batch.select(members))
        # Checkpoints must hold the position of the step in training, not of the step that is planned meanwhile.
        self.dataloader = self.checkpointer.states[DATALOADER] = LookAhead(self.dataloader)
        if job_config.tree.plan_in_background:
            self.engine.start_planner()
        self._window: dict[str, float] = {}
        self._window_start = time.perf_counter()

    def close(self) -> None:
        """End what the trainer started: checkpoints and logs of torchtitan, the planning process."""
        super().close()
        self.engine.close()

    def train(self) -> None:
        """Run the training loop of torchtitan, without elastic's `record` around it."""
        titan.Trainer.train.__wrapped__(self)

    def batch_generator(self, data_iterable: Iterable[RolloutBatch]) -> Iterator[RolloutBatch]:
        """Yield the rollouts of one step after another and count their tokens."""
        iterator = iter(data_iterable)
        while True:
            started = time.perf_counter()
            try:
                batch = next(iterator)
            except StopIteration as error:
                raise DataloaderExhaustedError() from error
            self.ntokens_seen += batch.num_positions
            self.metrics_processor.data_loading_times.append(time.perf_counter() - started)
            yield batch

    def _plan_next_step(self) -> None:
        started = time.perf_counter()
        batch = self.dataloader.peek()
        # One entry a step, so that the mean stays that of a step.
        self.metrics_processor.data_loading_times[-1] += time.perf_counter() - started
        if batch is not None:
            self.engine.plan_ahead(batch)

    def train_step(self, data_iterator: Iterator[RolloutBatch]) -> None:
        """Run one update and log it."""
        lr = self.lr_schedulers.schedulers[0].get_last_lr()[0]
        batch = next(data_iterator)
        if self.job_config.tree.plan_in_background and self.step < self.job_config.training.steps:
            self._plan_next_step()
        # Messages name the step of the run, also after a resume.
        self.engine.num_updates = self.step - 1
        metrics = self.engine.update(batch)
        for name in ("tokens/original", "tokens/compact", "tokens/executed"):
            self._window[name] = self._window.get(name, 0.0) + metrics[name]
        if not self.metrics_processor.should_log(self.step):
            return
        seconds = time.perf_counter() - self._window_start
        rates = {f"{name}_per_second": total / seconds for name, total in self._window.items()}
        # torchtitan's throughput is per device: this rank's share of the original tokens.
        self.metrics_processor.ntokens_since_last_log = int(self._window["tokens/original"] / self.engine.dp_degree)
        extra = metrics | rates | {"n_tokens_seen": self.ntokens_seen, "lr": lr}
        self.metrics_processor.log(
            self.step, metrics["loss"], metrics["loss"], metrics["grad_norm"], extra_metrics=extra
        )
        logger.info(
            "step %d: %d original = %.2f x %d compact tokens (%d rows executed, %d replayed), %.0f original and "
            "%.0f compact tokens/s, planned in %.3f s (waited for %.3f s), %d round(s)",
            self.step,
            metrics["tokens/original"],
            metrics["plan/compression"],
            metrics["tokens/compact"],
            metrics["tokens/executed"],
            metrics["tokens/replayed"],
            rates["tokens/original_per_second"],
            rates["tokens/compact_per_second"],
            metrics["plan/seconds"],
            metrics["plan/wait_seconds"],
            metrics["plan/rounds_max"],
        )
        self._window = {}
        self._window_start = time.perf_counter()


def main() -> None:
    """Parse the configuration and train."""
    init_logger()
    logging.getLogger("harts_titan").setLevel(logging.INFO)
    logging.getLogger("harts_titan").handlers = logger.handlers or logging.getLogger().handlers
    logging.getLogger("harts_titan").propagate = False
    for name, value in _ONE_RANK.items():
        os.environ.setdefault(name, value)
    trainer: HartsTrainer | None = None
    try:
        trainer = HartsTrainer(parse_config(sys.argv[1:]))
        trainer.train()
    except ValueError as error:
        logger.error("%s", error)
        sys.exit(2)
    except (NonFiniteError, PlanningError) as error:
        logger.error("%s", error)
        sys.exit(1)
    finally:
        if trainer is not None:
            trainer.close()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
