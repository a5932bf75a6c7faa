"""The rollouts of a step (or of a file) as flat host arrays, and the two alignments of per-token data.

Letters: N = trajectories, S = semantic positions (one per token of every trajectory). Everything here is token-aligned:
entry ``t`` of a trajectory speaks of token ``t`` as the thing predicted, and entry 0 is never trained. Not in the
paper: the two alignments, docs/notation.md has them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from harts_titan.data.problems import Problems
from harts_titan.ops.logprob import IGNORED_LABEL
from harts_titan.tree import check_node_start

LOGPROB_FIELDS = ("logprobs", "old_logprobs", "ref_logprobs")
TOKEN_FIELDS = (*LOGPROB_FIELDS, "advantages", "weights")
"""Optional token-aligned fields of a batch."""

MAX_LOGPROB = 1e-4
"""Largest log-prob taken as rounding of 0: float32 ``x - logsumexp(x)`` is off by up to a few ulp of logits near 50
(4e-6 each). Anything above is not a log-probability."""


def label_aligned(values_S: np.ndarray, offsets_N1: np.ndarray, fill: Any) -> np.ndarray:
    """Shift token-aligned values to the position that predicts the token (docs/notation.md).

    Args:
        values_S: any dtype; entry ``t`` of a trajectory speaks of token ``t``.
        offsets_N1: int64 (N+1,); trajectory ``n`` is ``[offsets[n], offsets[n+1])``.
        fill: value of every trajectory's last position, which predicts nothing.

    Returns:
        The dtype of ``values_S``, (S,): entry ``i`` is token-aligned entry ``i+1`` of the same trajectory.
    """
    out_S = np.empty_like(values_S)
    out_S[:-1] = values_S[1:]
    ends = offsets_N1[1:][np.diff(offsets_N1) > 0]
    out_S[ends - 1] = fill
    return out_S


def token_aligned(values_S: np.ndarray, offsets_N1: np.ndarray, fill: Any) -> np.ndarray:
    """Shift label-aligned values to the token they predict; the inverse of :func:`label_aligned` (docs/notation.md).

    Args:
        values_S: any dtype; entry ``i`` of a trajectory speaks of token ``i+1``.
        offsets_N1: int64 (N+1,).
        fill: value of every trajectory's entry 0, which nothing predicts.

    Returns:
        The dtype of ``values_S``, (S,): entry ``t`` is label-aligned entry ``t-1``; each last entry is dropped.
    """
    out_S = np.empty_like(values_S)
    out_S[1:] = values_S[:-1]
    starts = offsets_N1[:-1][np.diff(offsets_N1) > 0]
    out_S[starts] = fill
    return out_S


@dataclass(frozen=True, kw_only=True)
class RolloutBatch:
    """Trajectories with their per-token and per-trajectory data, flat, checked at construction.

    Integer and 0/1 inputs are converted to the dtypes below; fields left ``None`` in the second group are filled with
    their "none" value. The arrays must not be written to afterwards.
    """

    tokens: np.ndarray
    """int32 (S,), ids >= 0."""
    offsets: np.ndarray
    """int64 (N+1,): trajectory n is [offsets[n], offsets[n+1])."""
    loss_mask: np.ndarray
    """bool (S,), token-aligned: true = sampled by the policy and trained; false at token 0."""
    logprobs: np.ndarray | None = None
    """float32 or float64 (S,), token-aligned: the sampler's log-probabilities."""
    old_logprobs: np.ndarray | None = None
    """float32 or float64 (S,), token-aligned: the trainer's log-probabilities before the update."""
    ref_logprobs: np.ndarray | None = None
    """float32 or float64 (S,), token-aligned: the reference model's log-probabilities."""
    advantages: np.ndarray | None = None
    """float32 or float64 (S,), token-aligned."""
    weights: np.ndarray | None = None
    """float32 or float64 (S,), token-aligned, >= 0: loss weights."""
    reward: np.ndarray = None  # type: ignore[assignment]
    """float64 (N,); NaN = missing."""
    group_id: np.ndarray = None  # type: ignore[assignment]
    """int64 (N,): trajectories of one prompt or task; -1 = none."""
    episode_id: list[str] = None  # type: ignore[assignment]
    """(N,); "" = none."""
    step: np.ndarray = None  # type: ignore[assignment]
    """int64 (N,): step within the episode; -1 = none."""
    location: list[str] = None  # type: ignore[assignment]
    """(N,): where the trajectory came from ("FILE:row 12"), for messages."""
    node_start: np.ndarray | None = None
    """int64 (any,): ascending flat positions where a node of the rollout tree begins, see
    :func:`harts_titan.tree.plan_step`; None = not known."""
    original_id: np.ndarray | None = None
    """int64 (ids,): the id each dense id stands for, when the ids were densified; see ``densify_ids``."""
    num_dropped: int = 0
    """Trajectories left out of this batch by the over-long policy."""
    num_truncated: int = 0
    """Trajectories of this batch cut by the over-long policy."""

    def __post_init__(self) -> None:
        offsets = np.asarray(self.offsets)
        if offsets.ndim != 1 or not len(offsets) or offsets.dtype.kind not in "iu":
            raise ValueError(f"offsets must be a non-empty 1-D integer array, got {offsets.dtype} {offsets.shape}")
        num = len(offsets) - 1
        set_field = object.__setattr__
        set_field(self, "offsets", offsets.astype(np.int64, copy=False))
        set_field(self, "tokens", _as_ids(self.tokens))
        set_field(self, "loss_mask", _as_mask(self.loss_mask))
        for name in TOKEN_FIELDS:
            value = getattr(self, name)
            if value is not None:
                set_field(self, name, _as_float(value, name))
        reward = np.full(num, np.nan) if self.reward is None else np.asarray(self.reward, dtype=np.float64)
        set_field(self, "reward", reward)
        for name in ("group_id", "step"):
            value = getattr(self, name)
            set_field(self, name, np.full(num, -1) if value is None else np.asarray(value, dtype=np.int64))
        set_field(self, "episode_id", [""] * num if self.episode_id is None else list(self.episode_id))
        default = [f"trajectory {n}" for n in range(num)] if self.location is None else list(self.location)
        set_field(self, "location", default)
        self._check_lengths()
        self._check_values()
        if self.node_start is not None:
            set_field(self, "node_start", check_node_start(self.node_start, self.num_positions))

    @classmethod
    def from_lists(cls, tokens: Sequence[Any], loss_mask: Sequence[Any], **fields: Any) -> RolloutBatch:
        """Build a batch from one sequence per trajectory.

        Args:
            tokens: per trajectory, its token ids.
            loss_mask: per trajectory, its token-aligned mask.
            **fields: other fields of the batch; token-aligned ones as one sequence, or one number, per trajectory.

        Returns:
            The batch.

        Raises:
            ValueError: If a token-aligned field differs in length from its trajectory's tokens, or a value is invalid.
        """
        rows = [np.asarray(row) for row in tokens]
        lengths = np.array([len(row) for row in rows], dtype=np.int64)
        location = fields.get("location") or [f"trajectory {n}" for n in range(len(rows))]
        episode = fields.get("episode_id") or [""] * len(rows)
        problems = Problems("in-memory rollouts")
        flat: dict[str, Any] = {}
        columns = {"loss_mask": loss_mask} | {name: fields.pop(name) for name in TOKEN_FIELDS if name in fields}
        for name, column in columns.items():
            if column is None:
                continue
            if len(column) != len(rows):
                raise ValueError(f"{name} has {len(column)} trajectories, tokens has {len(rows)}")
            values = [np.asarray(value) for value in column]
            if name != "loss_mask":
                values = [np.full(size, value) if not value.ndim else value for value, size in zip(values, lengths)]
            for n, value in enumerate(values):
                if len(value) != lengths[n]:
                    problems.add(location[n], episode[n], name, f"{len(value)} entries, tokens has {lengths[n]}")
            flat[name] = _joined(values, bool)
        problems.raise_if_any()
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        return cls(tokens=_joined(rows, np.int32), offsets=offsets, **flat, **fields)

    @property
    def num_trajectories(self) -> int:
        """Number of trajectories N."""
        return len(self.offsets) - 1

    @property
    def num_positions(self) -> int:
        """Number of semantic positions S, over all trajectories."""
        return len(self.tokens)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens per trajectory, int64 (N,)."""
        return np.diff(self.offsets)

    @property
    def labels(self) -> np.ndarray:
        """Label-aligned next-token ids, int64 (S,); -100 at every trajectory's last position (docs/notation.md)."""
        return label_aligned(self.tokens.astype(np.int64), self.offsets, IGNORED_LABEL)

    @property
    def label_mask(self) -> np.ndarray:
        """Label-aligned loss mask, bool (S,): true where the label of the position is trained (docs/notation.md)."""
        return label_aligned(self.loss_mask, self.offsets, False)

    @property
    def original_tokens(self) -> np.ndarray:
        """Token ids as the input had them, int64 (S,): the densified ids mapped back."""
        return self.tokens.astype(np.int64) if self.original_id is None else self.original_id[self.tokens]

    def trajectory(self, n: int) -> np.ndarray:
        """Return the token ids of trajectory ``n``, int32 (length,)."""
        return self.tokens[self.offsets[n] : self.offsets[n + 1]]

    def select(self, idx: np.ndarray | Sequence[int]) -> RolloutBatch:
        """Return the trajectories ``idx``, in that order; repeats are allowed.

        Args:
            idx: integers in [0, N), (any,).

        Returns:
            A new batch. The dropped and truncated counts describe the whole batch and are kept.
        """
        chosen = np.asarray(idx, dtype=np.int64).reshape(-1)
        lengths = self.lengths[chosen]
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        source = np.repeat(self.offsets[:-1][chosen] - offsets[:-1], lengths) + np.arange(offsets[-1])
        return self.gather(source, offsets, chosen)

    def gather(self, source_S: np.ndarray, offsets_N1: np.ndarray, chosen_N: np.ndarray) -> RolloutBatch:
        """Return a batch of the positions ``source_S`` (int64), divided by ``offsets_N1``, with rows ``chosen_N``."""
        per_token: dict[str, Any] = {
            name: None if getattr(self, name) is None else getattr(self, name)[source_S]
            for name in ("tokens", "loss_mask", *TOKEN_FIELDS)
        }
        return dataclasses.replace(
            self,
            offsets=offsets_N1,
            reward=self.reward[chosen_N],
            group_id=self.group_id[chosen_N],
            step=self.step[chosen_N],
            episode_id=[self.episode_id[n] for n in chosen_N],
            location=[self.location[n] for n in chosen_N],
            node_start=None if self.node_start is None else np.flatnonzero(np.isin(source_S, self.node_start)),
            **per_token,
        )

    @staticmethod
    def concat(batches: Sequence[RolloutBatch]) -> RolloutBatch:
        """Join batches in order.

        Args:
            batches: at least one; all with the same optional fields and the same densification.

        Returns:
            One batch; dropped and truncated counts are added.

        Raises:
            ValueError: If there is no batch, an optional field is present in some batches only, or they were
                densified differently.
        """
        if not batches:
            raise ValueError("concat needs at least one batch")
        first = batches[0]
        flat: dict[str, Any] = {}
        for name in ("tokens", "loss_mask", "node_start", *TOKEN_FIELDS):
            missing = next((b for b in batches if getattr(b, name) is None), None)
            present = next((b for b in batches if getattr(b, name) is not None), None)
            if missing is not None and present is not None:
                raise ValueError(
                    f"{name} is present in {_first_location(present)} but absent in {_first_location(missing)}: "
                    "give it for all trajectories or for none"
                )
            flat[name] = None if present is None else np.concatenate([getattr(b, name) for b in batches])
        if flat["node_start"] is not None:
            begin = np.cumsum([0, *(b.num_positions for b in batches)])
            flat["node_start"] += np.repeat(begin[:-1], [np.asarray(b.node_start).size for b in batches])
        for other in batches[1:]:
            ids, other_ids = first.original_id, other.original_id
            same = np.array_equal(ids, other_ids) if ids is not None and other_ids is not None else ids is other_ids
            if not same:
                raise ValueError("batches with different densified ids cannot be joined: read their files in one call")
        lengths = np.concatenate([b.lengths for b in batches])
        return RolloutBatch(
            offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]),
            reward=np.concatenate([b.reward for b in batches]),
            group_id=np.concatenate([b.group_id for b in batches]),
            step=np.concatenate([b.step for b in batches]),
            episode_id=[e for b in batches for e in b.episode_id],
            location=[e for b in batches for e in b.location],
            original_id=first.original_id,
            num_dropped=sum(b.num_dropped for b in batches),
            num_truncated=sum(b.num_truncated for b in batches),
            **flat,
        )

    def row_of_position(self, position: np.ndarray) -> np.ndarray:
        """Return the trajectory of each flat position, int64 (any,)."""
        return np.searchsorted(self.offsets, position, side="right") - 1

    def check_positions(self, problems: Problems, field: str, bad_S: np.ndarray, need: str) -> None:
        """Record every trajectory with a true entry in ``bad_S``, naming its first bad token.

        Args:
            problems: where to record.
            field: the field that ``bad_S`` judges; its value is quoted.
            bad_S: bool (S,).
            need: what the value had to be, and which field to change.
        """
        position = np.flatnonzero(bad_S)
        if not len(position):
            return
        rows, first = np.unique(self.row_of_position(position), return_index=True)
        at = dict(zip(rows.tolist(), position[first].tolist()))
        values = getattr(self, field)

        def text(row: int) -> str:
            return f"{values[at[row]]} at token {at[row] - int(self.offsets[row])}; {need}"

        problems.add_rows(rows.tolist(), field, text, location=self.location, episode=self.episode_id)

    def _check_lengths(self) -> None:
        num, size = self.num_trajectories, self.num_positions
        if self.offsets[0] != 0 or self.offsets[-1] != size or (num and self.lengths.min() < 0):
            raise ValueError(f"offsets must rise from 0 to the number of tokens ({size}), got {self.offsets}")
        for name in ("loss_mask", *TOKEN_FIELDS):
            value = getattr(self, name)
            if value is not None and value.shape != (size,):
                raise ValueError(f"{name} has shape {value.shape}, tokens has ({size},): they must be equally long")
        for name in ("reward", "group_id", "step", "episode_id", "location"):
            if len(getattr(self, name)) != num:
                raise ValueError(f"{name} has {len(getattr(self, name))} entries for {num} trajectories")
        problems = Problems("rollouts")
        where = {"location": self.location, "episode": self.episode_id}
        lengths = self.lengths
        problems.add_rows(
            np.flatnonzero(lengths < 2).tolist(),
            "tokens",
            lambda row: "the trajectory is empty" if not lengths[row] else "one token only; at least 2 are needed",
            **where,
        )
        problems.raise_if_any()

    def _check_values(self) -> None:
        problems = Problems("rollouts")
        self.check_positions(problems, "tokens", self.tokens < 0, "token ids must be >= 0")
        first_token = np.zeros(self.num_positions, bool)
        first_token[self.offsets[:-1]] = True
        need = "token 0 is predicted by nothing and cannot be trained; set loss_mask[0] to false"
        self.check_positions(problems, "loss_mask", self.loss_mask & first_token, need)
        for name in TOKEN_FIELDS:
            value = getattr(self, name)
            if value is None:
                continue
            bad, need = ~np.isfinite(value), f"{name} must be finite"
            if name in LOGPROB_FIELDS:
                bad, need = bad | (value > MAX_LOGPROB), "log-probabilities must be finite and <= 0"
            elif name == "weights":
                bad, need = bad | (value < 0), "weights must be finite and >= 0 (a sign belongs in advantages)"
            self.check_positions(problems, name, bad, need)
        where = {"location": self.location, "episode": self.episode_id}
        rows = np.flatnonzero(np.isinf(self.reward)).tolist()
        problems.add_rows(rows, "reward", lambda row: f"{self.reward[row]}; must be finite, or NaN if missing", **where)
        for name, ids in (("group_id", self.group_id), ("step", self.step)):
            for row in np.flatnonzero(ids < -1).tolist():
                problems.add(self.location[row], self.episode_id[row], name, f"{ids[row]}; must be >= 0, or -1 (none)")
        problems.raise_if_any()


def _first_location(batch: RolloutBatch) -> str:
    return batch.location[0] if batch.num_trajectories else "an empty batch"


def _joined(parts: list[np.ndarray], dtype_if_empty: type) -> np.ndarray:
    # NumPy gives an empty list the type float64, which would spread to the others.
    return np.concatenate([part for part in parts if len(part)] or [np.empty(0, dtype_if_empty)])


def _as_ids(values: np.ndarray) -> np.ndarray:
    ids = np.asarray(values)
    if ids.dtype == np.int32:
        return ids
    if ids.dtype.kind not in "iu" and len(ids):
        raise ValueError(f"tokens must be integers, got {ids.dtype}")
    if len(ids) and (ids.max() > np.iinfo(np.int32).max or ids.min() < np.iinfo(np.int32).min):
        raise ValueError(f"tokens: ids up to {ids.max()} and down to {ids.min()} do not fit into 32 bits")
    return ids.astype(np.int32)


def _as_mask(values: np.ndarray) -> np.ndarray:
    mask = np.asarray(values)
    if mask.dtype == np.bool_:
        return mask
    if mask.dtype.kind not in "iuf" or not np.isin(mask, (0, 1)).all():
        raise ValueError(f"loss_mask must be boolean or 0/1, got {mask.dtype} with other values")
    return mask.astype(np.bool_)


def _as_float(values: np.ndarray, name: str) -> np.ndarray:
    array = np.asarray(values)
    if array.dtype.kind not in "iuf":
        raise ValueError(f"{name} must be numbers, got {array.dtype}")
    if array.dtype in (np.float32, np.float64):
        return array
    return array.astype(np.float32 if array.dtype == np.float16 else np.float64)
