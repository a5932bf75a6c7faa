"""Advantages of trajectories from rewards, over the whole batch of rollouts.

Letters: N trajectories (rows), E episodes, G groups, S semantic positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from harts_titan.rl.config import ADVANTAGES


def trajectory_advantages(
    reward_N: np.ndarray,
    group_id_N: np.ndarray | None = None,
    *,
    method: str,
    eps: float = 1e-6,
    episode_ids: Sequence[str] | None = None,
    trained_N: np.ndarray | Sequence[int] | None = None,
    locations: Sequence[str] | None = None,
) -> np.ndarray:
    """Compute one advantage per row from rewards.

    ``reward``: the row's own reward. ``group_mean``: minus the mean of its group. ``group_relative``: that, divided by
    the group's sample standard deviation (divisor members - 1, as GRPO implementations do) plus ``eps``.

    A group's members are its episodes, each counted once with the mean of its rows' rewards, so an episode cut into
    many step-wise samples has no more say than one that was not; the row's own reward is what the group's mean is
    subtracted from. A group of one episode gives 0: there is nothing to compare with. So does, under
    ``group_relative``, a group whose episodes all have the same reward.

    Args:
        reward_N: float64, NaN = missing.
        group_id_N: int64, -1 = none. Not read by ``reward``.
        method: reward | group_mean | group_relative.
        eps: Added to the standard deviation, unit of the reward.
        episode_ids: Episode of each row; None = every row is its own episode.
        trained_N: Rows with a trained position, as bool or as their number; None = all. An untrained row may lack its
            reward or its group (its advantage is then 0 and it enters no statistics); with both it counts in its group.
        locations: File and row, for messages.

    Returns:
        float64 (N,).

    Raises:
        ValueError: If a trained row lacks its reward or group id, an episode lies in two groups, or lengths differ; the
            message names the episode.
    """
    reward_N = np.asarray(reward_N, dtype=np.float64)
    if method not in ADVANTAGES or method == "given":
        raise ValueError(f"rl.advantage is {method!r}; from rewards it must be reward, group_mean or group_relative")
    has_trained_N = np.ones(len(reward_N), dtype=bool) if trained_N is None else np.asarray(trained_N, dtype=bool)
    for name, values in (("group_id_N", group_id_N), ("episode_ids", episode_ids), ("trained_N", has_trained_N)):
        if values is not None and len(values) != len(reward_N):
            raise ValueError(f"{name} has {len(values)} entries; reward_N has {len(reward_N)}")
    names = _RowNames(episode_ids, locations)

    bad_N = has_trained_N & ~np.isfinite(reward_N)
    if bad_N.any():
        row = int(np.flatnonzero(bad_N)[0])
        problem = "has no reward (NaN)" if np.isnan(reward_N[row]) else f"has reward {reward_N[row]}"
        raise ValueError(
            f"{names.of(row)} {problem}, which rl.advantage = {method!r} needs ({int(bad_N.sum())} such rows); supply "
            "finite rewards, leave these rows out, or give advantages with rl.advantage = 'given'"
        )
    if method == "reward":
        return np.where(np.isfinite(reward_N), reward_N, 0.0)

    group_id_N = np.full(len(reward_N), -1) if group_id_N is None else np.asarray(group_id_N)
    missing_N = has_trained_N & (group_id_N < 0)
    if missing_N.any():
        row = int(np.flatnonzero(missing_N)[0])
        raise ValueError(
            f"{names.of(row)} has no group_id, which rl.advantage = {method!r} needs ({int(missing_N.sum())} such "
            "rows); supply group ids or use rl.advantage = 'reward' or 'given'"
        )
    counted_N = np.isfinite(reward_N) & (group_id_N >= 0)
    advantage_N = np.zeros(len(reward_N))
    advantage_N[counted_N] = _group_advantages(
        reward_N[counted_N], group_id_N[counted_N], np.flatnonzero(counted_N), method=method, eps=eps, names=names
    )
    return advantage_N


def position_advantages(advantage_N: np.ndarray, offsets_N1: np.ndarray) -> np.ndarray:
    """Spread one advantage per trajectory over its positions.

    Args:
        advantage_N: float64.
        offsets_N1: int64, trajectory n owns positions [offsets[n], offsets[n+1]).

    Returns:
        float64 (S,). Constant inside a trajectory, so it is label- and token-aligned alike.
    """
    return np.repeat(np.asarray(advantage_N, dtype=np.float64), np.diff(offsets_N1))


class _RowNames:
    """How messages call a row."""

    def __init__(self, episode_ids: Sequence[str] | None, locations: Sequence[str] | None):
        self.episode_ids = episode_ids
        self.locations = locations

    def of(self, row: int) -> str:
        name = f"row {row}" if self.episode_ids is None else f"episode {self.episode_ids[row]!r} (row {row})"
        return name if self.locations is None else f"{self.locations[row]}: {name}"


def _group_advantages(
    reward_N: np.ndarray, group_id_N: np.ndarray, row_N: np.ndarray, *, method: str, eps: float, names: _RowNames
) -> np.ndarray:
    """Return the advantages of rows that all have a reward and a group; ``row_N`` are their indices in the batch."""
    if len(reward_N) == 0:
        return np.zeros(0)
    if names.episode_ids is None:
        episode_N = np.arange(len(reward_N))
    else:
        _, episode_N = np.unique([names.episode_ids[row] for row in row_N], return_inverse=True)
    _, group_N = np.unique(group_id_N, return_inverse=True)
    num_episodes = int(episode_N.max()) + 1
    num_groups = int(group_N.max()) + 1

    group_E = np.empty(num_episodes, dtype=np.int64)
    group_E[episode_N] = group_N
    split_N = group_E[episode_N] != group_N
    if split_N.any():
        index = int(np.flatnonzero(split_N)[0])
        others = sorted(set(group_id_N[episode_N == episode_N[index]].tolist()))
        raise ValueError(
            f"{names.of(int(row_N[index]))} lies in groups {others}; an episode belongs to one group: change group_id "
            "or give the episodes different ids"
        )

    reward_E = np.bincount(episode_N, weights=reward_N, minlength=num_episodes) / np.bincount(episode_N)
    size_G = np.bincount(group_E, minlength=num_groups)
    low_G = np.full(num_groups, np.inf)
    high_G = np.full(num_groups, -np.inf)
    np.minimum.at(low_G, group_E, reward_E)
    np.maximum.at(high_G, group_E, reward_E)
    # Centred on the group's minimum: equal rewards then have exactly that mean and exactly zero deviation.
    centred_E = reward_E - low_G[group_E]
    mean_G = low_G + np.bincount(group_E, weights=centred_E, minlength=num_groups) / size_G
    advantage_N = np.where(size_G[group_N] > 1, reward_N - mean_G[group_N], 0.0)
    if method == "group_mean":
        return advantage_N
    square_G = np.bincount(group_E, weights=(reward_E - mean_G[group_E]) ** 2, minlength=num_groups)
    std_G = np.sqrt(square_G / np.maximum(size_G - 1, 1))
    # Rows of one episode may differ where the episodes do not; dividing by eps alone would blow that difference up.
    return np.where((high_G > low_G)[group_N], advantage_N / (std_G[group_N] + eps), 0.0)
