"""What to do with trajectories longer than a microbatch."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass

import numpy as np

from harts_titan.data.batch import RolloutBatch
from harts_titan.data.problems import Problems

logger = logging.getLogger(__name__)

POLICIES = ("error", "drop", "truncate")


@dataclass(frozen=True)
class OverlongCounts:
    """What the over-long policy did; all zero if every trajectory fitted."""

    dropped: int = 0
    """Trajectories left out."""
    truncated: int = 0
    """Trajectories cut to the capacity."""
    lost_tokens: int = 0
    """Tokens left out or cut off."""
    lost_trained_tokens: int = 0
    """Of those, tokens the loss mask would have trained."""


def apply_overlong(
    batch: RolloutBatch,
    capacity: int,
    policy: str,
    *,
    capacity_name: str = "tree.max_tokens",
    policy_name: str = "data.overlong",
) -> tuple[RolloutBatch, OverlongCounts]:
    """Refuse, drop or cut the trajectories that cannot fit into a microbatch.

    A trajectory is indivisible (HARTS 3.2), so one longer than the capacity can never be placed. A cut trajectory keeps
    its first ``capacity`` tokens and all its metadata; it may keep no trained token and then contributes exactly zero.

    Args:
        batch: trajectories.
        capacity: largest length allowed, in tokens.
        policy: "error", "drop" or "truncate".
        capacity_name: setting that gives ``capacity``, for messages.
        policy_name: setting that gives ``policy``.

    Returns:
        The batch (the same object if everything fits) with its ``num_dropped`` / ``num_truncated`` raised, and what was
        done. The counts are logged as a warning.

    Raises:
        ValueError: If the policy is unknown, is "error" and a trajectory is too long (up to five are named), or would
            leave nothing.
    """
    if policy not in POLICIES:
        raise ValueError(f"{policy_name} must be one of {', '.join(POLICIES)}, got {policy!r}")
    if capacity < 2:
        raise ValueError(f"{capacity_name} must be at least 2 tokens, got {capacity}")
    lengths = batch.lengths
    long_N = lengths > capacity
    num_long = int(np.count_nonzero(long_N))
    if not num_long:
        return batch, OverlongCounts()
    if policy == "error":
        problems = Problems(f"rollouts longer than {capacity_name} ({capacity})")
        change = f'raise {capacity_name} or set {policy_name} to "drop" or "truncate"'
        for row in np.flatnonzero(long_N).tolist():
            problems.add(batch.location[row], batch.episode_id[row], "tokens", f"{lengths[row]} tokens; {change}")
        problems.raise_if_any()
    if policy == "drop":
        if num_long == batch.num_trajectories:
            raise ValueError(
                f"{policy_name} = 'drop' would leave nothing: all {num_long} trajectories are longer than "
                f"{capacity_name} ({capacity}; shortest {lengths.min()} tokens)"
            )
        kept = batch.select(np.flatnonzero(~long_N))
        kept = dataclasses.replace(kept, num_dropped=batch.num_dropped + num_long)
        lost = OverlongCounts(dropped=num_long, **_lost(batch, kept))
    else:
        new_lengths = np.minimum(lengths, capacity)
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(new_lengths)])
        source = np.repeat(batch.offsets[:-1] - offsets[:-1], new_lengths) + np.arange(offsets[-1])
        kept = batch.gather(source, offsets, np.arange(batch.num_trajectories))
        kept = dataclasses.replace(kept, num_truncated=batch.num_truncated + num_long)
        lost = OverlongCounts(truncated=num_long, **_lost(batch, kept))
    logger.warning(
        "%s = %s: %d of %d trajectories exceed %d tokens (longest %d); %d tokens lost, %d of them trained",
        policy_name,
        policy,
        num_long,
        batch.num_trajectories,
        capacity,
        lengths.max(),
        lost.lost_tokens,
        lost.lost_trained_tokens,
    )
    return kept, lost


def _lost(before: RolloutBatch, after: RolloutBatch) -> dict[str, int]:
    trained = int(np.count_nonzero(before.loss_mask) - np.count_nonzero(after.loss_mask))
    return {"lost_tokens": before.num_positions - after.num_positions, "lost_trained_tokens": trained}
