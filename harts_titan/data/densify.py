"""Bijective renumbering of the token ids in use, for models whose vocabulary is smaller than the tokenizer's."""

from __future__ import annotations

import dataclasses
import logging

import numpy as np

from harts_titan.data.batch import RolloutBatch
from harts_titan.data.problems import Problems

logger = logging.getLogger(__name__)

_TABLE_IDS = 1 << 24


def densify_ids(batch: RolloutBatch, vocab_size: int | None = None) -> RolloutBatch:
    """Map the ids in use onto 0..n-1 in rising order; prefix sharing is unchanged because the map is one to one.

    Not in the paper: real files hold ids up to 151,645 and small models have a few hundred.

    Args:
        batch: all trajectories that will be used together; the map depends on them.
        vocab_size: ids the model has; None = no bound.

    Returns:
        The batch with new ids; ``original_id[new]`` is the id each stood for.

    Raises:
        ValueError: If there are more distinct ids than ``vocab_size``.
    """
    used, dense = _used_ids(batch.tokens)
    if vocab_size is not None and len(used) > vocab_size:
        raise ValueError(
            f"data.densify: the rollouts use {len(used)} distinct token ids, but the model vocabulary has "
            f"{vocab_size}; read fewer trajectories (data.limit) or use a model flavor with a larger vocab_size"
        )
    logger.info(
        "data.densify: %d distinct token ids (largest %d) are mapped one to one onto 0..%d",
        len(used),
        used[-1] if len(used) else -1,
        len(used) - 1,
    )
    original = used.astype(np.int64) if batch.original_id is None else batch.original_id[used]
    return dataclasses.replace(batch, tokens=dense, original_id=original)


def _used_ids(tokens_S: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct ids in rising order, and each token's place among them (int32)."""
    if not len(tokens_S) or tokens_S.max() >= _TABLE_IDS:
        used, dense = np.unique(tokens_S, return_inverse=True)
        return used, dense.reshape(-1).astype(np.int32)
    # A table over the id range instead of a sort of all tokens.
    present = np.zeros(int(tokens_S.max()) + 1, bool)
    present[tokens_S] = True
    place = np.cumsum(present, dtype=np.int32) - 1
    return np.flatnonzero(present), place[tokens_S]


def check_vocabulary(batch: RolloutBatch, vocab_size: int) -> None:
    """Refuse ids the model does not have.

    Args:
        batch: trajectories; ids are checked as they are now (densified or not).
        vocab_size: ids the model has.

    Raises:
        ValueError: Naming up to five rows with an id >= ``vocab_size``.
    """
    problems = Problems("rollouts")
    need = f"the model vocabulary has {vocab_size} ids; use a larger model or data.densify = true"
    batch.check_positions(problems, "tokens", batch.tokens >= vocab_size, need)
    problems.raise_if_any()
