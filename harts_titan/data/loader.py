"""Training steps from a batch of rollouts: whole groups, endless epochs, and a loader that resumes exactly.

Every rank loads the whole step; planning divides it. The state is the position in the sequence of steps, not data.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from harts_titan.data.batch import TOKEN_FIELDS, RolloutBatch

logger = logging.getLogger(__name__)


class RolloutDataset(IterableDataset):
    """Endless sequence of training steps, each a :class:`RolloutBatch` of whole groups.

    Trajectories with the same ``group_id`` stay together; without one, those of the same ``episode_id``; without
    either, a trajectory is its own group. A step takes groups until it has at least ``trajectories_per_step``; an
    epoch's last step takes what is left, so that every trajectory is seen once per epoch.

    Args:
        batch: all trajectories, at least one.
        trajectories_per_step: least number per step; 0 = every step is the whole batch.
        min_trajectories: what any step must have, one for each data-parallel replica; an epoch's last groups join the
            step before them if they are fewer.
        shuffle: order the groups anew in every epoch, by ``seed`` and the epoch number.
        seed: of the shuffle.

    Raises:
        ValueError: If the batch is empty or a count is negative.
    """

    def __init__(
        self,
        batch: RolloutBatch,
        *,
        trajectories_per_step: int = 0,
        min_trajectories: int = 1,
        shuffle: bool = False,
        seed: int = 0,
    ) -> None:
        if not batch.num_trajectories:
            raise ValueError("there is no trajectory to train on; check data.path and data.limit")
        if trajectories_per_step < 0 or seed < 0:
            raise ValueError(
                "data.trajectories_per_step (0 = whole file) and data.seed must be >= 0, "
                f"got {trajectories_per_step} and {seed}"
            )
        self.batch = batch
        if batch.num_trajectories < min_trajectories:
            raise ValueError(
                f"{batch.num_trajectories} trajectories are fewer than the {min_trajectories} data-parallel replicas; "
                "use more rollouts or fewer ranks"
            )
        self.trajectories_per_step = trajectories_per_step
        self.min_trajectories = min_trajectories
        self.shuffle = shuffle
        self.seed = seed
        self.groups = group_members(batch)

    def steps_of_epoch(self, epoch: int) -> list[np.ndarray]:
        """Return the trajectories of every step of an epoch, each int64 (any,)."""
        if not self.trajectories_per_step:
            return [np.arange(self.batch.num_trajectories)]
        order = np.arange(len(self.groups))
        if self.shuffle:
            np.random.default_rng([self.seed, epoch]).shuffle(order)
        steps: list[list[np.ndarray]] = [[]]
        filled = 0
        for group in order.tolist():
            if filled >= max(self.trajectories_per_step, self.min_trajectories):
                steps.append([])
                filled = 0
            steps[-1].append(self.groups[group])
            filled += len(self.groups[group])
        if filled < self.min_trajectories and len(steps) > 1:
            last = steps.pop()
            steps[-1] += last
        return [np.concatenate(members) for members in steps]

    def fingerprint(self) -> dict[str, Any]:
        """Return what must be equal for a saved position to mean the same steps."""
        digest = hashlib.blake2b(digest_size=16)
        for array in (self.batch.tokens, self.batch.offsets, self.batch.loss_mask, self.batch.group_id):
            digest.update(np.ascontiguousarray(array).data)
        for name in TOKEN_FIELDS:
            values = getattr(self.batch, name)
            digest.update(name.encode() if values is None else np.ascontiguousarray(values).data)
        digest.update(self.batch.reward.tobytes())
        return {
            "rollouts": digest.hexdigest(),
            "trajectories_per_step": self.trajectories_per_step,
            "min_trajectories": self.min_trajectories,
            "shuffle": self.shuffle,
            "seed": self.seed,
        }

    def __iter__(self) -> Iterator[RolloutBatch]:
        info = get_worker_info()
        if info is None:
            return StepIterator(self)
        return StepIterator(self, worker=info.id, num_workers=info.num_workers)


class StepIterator:
    """Iterates over the steps of a dataset, from the first or from a saved position.

    Worker ``w`` of ``n`` gives the steps ``w, w+n, ...``; the loader takes from the workers in turn, so the sequence is
    the same for every number of workers.

    Args:
        dataset: where steps come from.
        worker: index of this worker.
        num_workers: how many share the sequence.
    """

    def __init__(self, dataset: RolloutDataset, *, worker: int = 0, num_workers: int = 1) -> None:
        self._dataset = dataset
        self._worker = worker
        self._num_workers = num_workers
        self._epoch = 0
        # Steps of this epoch that are behind us, and steps of all epochs that are.
        self._done = 0
        self._total = 0
        self._steps = dataset.steps_of_epoch(0)

    def __iter__(self) -> StepIterator:
        return self

    def __next__(self) -> RolloutBatch:
        while True:
            while self._done == len(self._steps):
                self._epoch += 1
                self._done = 0
                self._steps = self._dataset.steps_of_epoch(self._epoch)
            members = self._steps[self._done]
            mine = self._total % self._num_workers == self._worker
            self._done += 1
            self._total += 1
            if mine:
                return self._dataset.batch.select(members)

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        return {"epoch": self._epoch, "done": self._done, "total": self._total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the last step that was given when ``state`` was saved.

        Args:
            state: what :meth:`state_dict` returned.
        """
        self._epoch, self._done, self._total = state["epoch"], state["done"], state["total"]
        self._steps = self._dataset.steps_of_epoch(self._epoch)


def group_members(batch: RolloutBatch) -> list[np.ndarray]:
    """Return the trajectories that stay together, by group, else episode, else alone, in order of appearance.

    Args:
        batch: trajectories.

    Returns:
        int64 index arrays that cover every trajectory once.
    """
    members: dict[tuple[str, int | str], list[int]] = {}
    for row, (group, episode) in enumerate(zip(batch.group_id.tolist(), batch.episode_id)):
        key = ("group", group) if group >= 0 else ("episode", episode) if episode else ("row", row)
        members.setdefault(key, []).append(row)
    return [np.array(rows, dtype=np.int64) for rows in members.values()]


class RolloutLoader(StatefulDataLoader):
    """Endless torchdata loader of training steps; its state says which rollouts and settings it belongs to.

    Args:
        dataset: where steps come from.
        num_workers: processes that prepare steps.
    """

    def __init__(self, dataset: RolloutDataset, *, num_workers: int = 0) -> None:
        # An own generator: the loader draws a worker seed, and the global one belongs to the model, whose random
        # numbers must not depend on when a run was resumed.
        super().__init__(
            dataset,
            batch_size=None,
            collate_fn=_unchanged,
            num_workers=num_workers,
            generator=torch.Generator().manual_seed(dataset.seed),
            snapshot_every_n_steps=1,
        )
        self._belongs_to = dataset.fingerprint() | {"num_workers": num_workers}

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last step taken; picklable plain data."""
        return {"belongs_to": dict(self._belongs_to), "position": super().state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after the last step taken when the state was saved; takes effect at the next ``iter``.

        Args:
            state_dict: what :meth:`state_dict` returned; empty = start from the first step.

        Raises:
            ValueError: If the rollouts or the settings that decide the steps have changed.
        """
        if state_dict:
            saved = state_dict["belongs_to"]
            changed = [name for name, value in self._belongs_to.items() if saved[name] != value]
            if changed:
                detail = ", ".join(f"{name} was {saved[name]!r}, is {self._belongs_to[name]!r}" for name in changed)
                raise ValueError(f"the saved data position does not fit: {detail}; restore the data.* settings")
        super().load_state_dict(state_dict["position"] if state_dict else {})


def build_loader(
    batch_or_dataset: RolloutBatch | RolloutDataset,
    *,
    trajectories_per_step: int = 0,
    min_trajectories: int = 1,
    shuffle: bool = False,
    seed: int = 0,
    num_workers: int = 0,
) -> RolloutLoader:
    """Return a torchdata loader of training steps whose ``state_dict`` resumes exactly, also across an epoch's end.

    Args:
        batch_or_dataset: all trajectories; or a dataset, which then brings its own settings.
        trajectories_per_step: least number per step, whole groups; 0 = every step is the whole batch.
        min_trajectories: see :class:`RolloutDataset`.
        shuffle: order the groups anew in every epoch.
        seed: of the shuffle.
        num_workers: processes that prepare steps; must be the same when a run is resumed.

    Returns:
        An endless loader of :class:`RolloutBatch`.

    Raises:
        ValueError: If there is no trajectory, a setting is negative, or a dataset is given with settings.
    """
    if num_workers < 0:
        raise ValueError(f"data.num_workers must be >= 0, got {num_workers}")
    if isinstance(batch_or_dataset, RolloutDataset):
        if trajectories_per_step or shuffle or seed:
            raise ValueError("a RolloutDataset brings its own trajectories_per_step, shuffle and seed; set them there")
        dataset = batch_or_dataset
    else:
        dataset = RolloutDataset(
            batch_or_dataset,
            trajectories_per_step=trajectories_per_step,
            min_trajectories=min_trajectories,
            shuffle=shuffle,
            seed=seed,
        )
    logger.info(
        "data: %d trajectories in %d groups, %d step(s) in the first epoch",
        dataset.batch.num_trajectories,
        len(dataset.groups),
        len(dataset.steps_of_epoch(0)),
    )
    return RolloutLoader(dataset, num_workers=num_workers)


def _unchanged(step: RolloutBatch) -> RolloutBatch:
    return step
