"""Rollouts as section ``[data]`` of a configuration describes them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from harts_titan.data.batch import RolloutBatch
from harts_titan.data.files import read_rollouts
from harts_titan.data.loader import RolloutDataset
from harts_titan.data.overlong import apply_overlong
from harts_titan.data.synthetic import write_synthetic

logger = logging.getLogger(__name__)

SYNTHETIC = "synthetic"
"""Value of ``data.path`` that asks for generated rollouts."""


def rollouts_from_config(
    data: Any, *, vocab_size: int, folder: str | Path, hint: str = "set data.path"
) -> RolloutBatch:
    """Read the rollouts of a configuration, generating them first if it asks for that.

    Args:
        data: section ``[data]`` (:class:`harts_titan.job_config.Data`).
        vocab_size: ids the model has.
        folder: where generated rollouts are kept (``job.dump_folder``).
        hint: what the user can do about a path that names nothing.

    Returns:
        All trajectories.

    Raises:
        ValueError: If ``data.path`` is empty, or a file or row is invalid; see :func:`read_rollouts`.
    """
    path = data.path
    if not path:
        raise ValueError(
            f"data.path is empty; name a rollout file, folder or glob, or '{SYNTHETIC}' for generated rollouts"
        )
    if path == SYNTHETIC:
        # The name holds all that decides the content, so a file that is there can be used. The writer renames a
        # complete file into place, so ranks may write at the same time.
        path = str(Path(folder) / f"rollouts_{data.synthetic_trajectories}_{data.seed}.parquet")
        if not Path(path).exists():
            write_synthetic(path, trajectories=data.synthetic_trajectories, seed=data.seed)
            logger.info("wrote generated rollouts to %s", path)
    return read_rollouts(
        path, scheme=data.scheme, limit=data.limit, vocab_size=vocab_size, densify=data.densify, hint=hint
    )


def dataset_from_config(
    config: Any, *, vocab_size: int, min_trajectories: int = 1, hint: str = "set data.path"
) -> RolloutDataset:
    """Read the rollouts of a configuration and cut them into its training steps.

    The over-long policy is applied to all trajectories at once, so no step can turn out too small later.

    Args:
        config: merged ``JobConfig``; reads ``data``, ``tree.max_tokens`` and ``job.dump_folder``.
        vocab_size: ids the model has.
        min_trajectories: what any step must have, one for each data-parallel replica.
        hint: what the user can do about a path that names nothing.

    Raises:
        ValueError: As :func:`rollouts_from_config`, or if a trajectory is too long and ``data.overlong`` refuses it.
    """
    data = config.data
    batch = rollouts_from_config(data, vocab_size=vocab_size, folder=config.job.dump_folder, hint=hint)
    batch, _ = apply_overlong(batch, config.tree.max_tokens, data.overlong)
    return RolloutDataset(
        batch,
        trajectories_per_step=data.trajectories_per_step,
        min_trajectories=min_trajectories,
        shuffle=data.shuffle,
        seed=data.seed,
    )
