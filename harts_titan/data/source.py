"""Rollouts as section ``[data]`` of a configuration describes them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from harts_titan.data.batch import RolloutBatch
from harts_titan.data.files import read_rollouts
from harts_titan.data.synthetic import write_synthetic

logger = logging.getLogger(__name__)


def rollouts_from_config(data: Any, *, vocab_size: int) -> RolloutBatch:
    """Read the rollouts of a configuration, writing the synthetic file first if it asks for one.

    Args:
        data: section ``[data]`` (:class:`harts_titan.job_config.Data`).
        vocab_size: ids the model has.

    Returns:
        All trajectories.

    Raises:
        ValueError: If ``data.path`` is empty, or a file or row is invalid; see :func:`read_rollouts`.
    """
    if not data.path:
        raise ValueError("data.path is empty; name a rollout file, folder or glob (see README, Rollout files)")
    if data.synthetic and not Path(data.path).exists():
        # The writer renames a complete file into place, so ranks may do this at the same time.
        write_synthetic(data.path, trajectories=data.synthetic_trajectories, seed=data.seed)
        logger.info("wrote synthetic rollouts to %s", data.path)
    return read_rollouts(data.path, scheme=data.scheme, limit=data.limit, vocab_size=vocab_size, densify=data.densify)
