"""Per-position inputs of an objective, and the denominators of a whole step.

A position is *trained* when its mask is true and its weight is not 0. Everything here is label-aligned: entry ``i``
speaks of the prediction of token ``i + 1``, so the last position of a trajectory is never trained.

Letters: S semantic positions, N trajectories.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

OPTIONAL_FIELDS = ("advantage_S", "old_logprob_S", "ref_logprob_S", "sampler_logprob_S", "weight_S")


@dataclass(frozen=True)
class PositionBatch:
    """What an objective may know of the positions of one call, besides the current log-probs and entropies.

    Optional fields are None when the batch does not have them, never filled with a stand-in. Their values outside the
    mask are never read, so they may be anything, NaN included.

    Raises:
        ValueError: If a field is not a (S,) tensor of the right kind.
    """

    mask_S: Tensor
    """bool. True where the label was sampled by the policy and is trained."""

    trajectory_S: Tensor
    """int64. Local index of the position's trajectory, in [0, num_trajectories). Trajectories are never split over
    calls."""

    num_trajectories: int
    """Trajectories of this call."""

    advantage_S: Tensor | None = None
    """Float. Advantage of the label."""

    old_logprob_S: Tensor | None = None
    """Float, nats. The trainer's log-prob of the label before the first update of the batch."""

    ref_logprob_S: Tensor | None = None
    """Float, nats. The reference policy's log-prob of the label."""

    sampler_logprob_S: Tensor | None = None
    """Float, nats. The log-prob the sampling engine reported when it generated the label."""

    weight_S: Tensor | None = None
    """Float, >= 0. Weight of the position in numerators and denominators; None = 1 everywhere."""

    def __post_init__(self) -> None:
        if self.mask_S.dtype != torch.bool or self.mask_S.dim() != 1:
            raise ValueError(f"mask_S is {self.mask_S.dtype} {tuple(self.mask_S.shape)}; it must be bool and (S,)")
        for name in ("trajectory_S", *OPTIONAL_FIELDS):
            value = getattr(self, name)
            if value is not None and value.shape != self.mask_S.shape:
                raise ValueError(f"{name} has shape {tuple(value.shape)}; mask_S has {tuple(self.mask_S.shape)}")
        for name in OPTIONAL_FIELDS:
            value = getattr(self, name)
            if value is not None and not value.is_floating_point():
                raise ValueError(f"{name} has dtype {value.dtype}; it must be a float tensor")

    @classmethod
    def from_arrays(
        cls,
        mask_S: np.ndarray,
        offsets_N1: np.ndarray,
        *,
        advantage_S: np.ndarray | None = None,
        old_logprob_S: np.ndarray | None = None,
        ref_logprob_S: np.ndarray | None = None,
        sampler_logprob_S: np.ndarray | None = None,
        weight_S: np.ndarray | None = None,
        device: torch.device | str = "cpu",
    ) -> PositionBatch:
        """Build the positions of flat, label-aligned arrays of whole trajectories.

        Args:
            mask_S: bool, label-aligned.
            offsets_N1: int64, trajectory n owns positions [offsets[n], offsets[n+1]).
            advantage_S: Float, label-aligned, or None; as are the following four.
            old_logprob_S: Nats.
            ref_logprob_S: Nats.
            sampler_logprob_S: Nats.
            weight_S: Weights, >= 0.
            device: Where the tensors go.

        Raises:
            ValueError: If the arrays do not fit the offsets, or a last position is masked in.
        """
        mask_S = _checked_mask(mask_S, offsets_N1)
        num_trajectories = len(offsets_N1) - 1
        trajectory_S = np.repeat(np.arange(num_trajectories, dtype=np.int64), np.diff(offsets_N1))
        optional = {
            "advantage_S": advantage_S,
            "old_logprob_S": old_logprob_S,
            "ref_logprob_S": ref_logprob_S,
            "sampler_logprob_S": sampler_logprob_S,
            "weight_S": weight_S,
        }
        return cls(
            mask_S=torch.as_tensor(mask_S, device=device),
            trajectory_S=torch.as_tensor(trajectory_S, device=device),
            num_trajectories=num_trajectories,
            **{
                name: None if value is None else torch.as_tensor(np.ascontiguousarray(value), device=device)
                for name, value in optional.items()
            },
        )

    def take(self, source_position_S: Tensor, position_offset_N1: Tensor) -> PositionBatch:
        """Select the positions of one call from those of the whole step.

        Args:
            source_position_S: int64 (S,) flat positions in this batch (``CallLayout.source_position_S``); they must
                cover whole trajectories.
            position_offset_N1: int64 (N + 1,) offsets of the call's trajectories (``CallLayout.position_offset_N1``).

        Returns:
            The call's positions on this batch's device, trajectories numbered from 0 in the call's order.
        """
        device = self.mask_S.device
        source_position_S = source_position_S.to(device)
        length_N = position_offset_N1.to(device).diff()
        num_trajectories = len(position_offset_N1) - 1
        return replace(
            self._map(lambda value_S: value_S[source_position_S]),
            trajectory_S=torch.repeat_interleave(
                torch.arange(num_trajectories, device=device), length_N, output_size=len(source_position_S)
            ),
            num_trajectories=num_trajectories,
        )

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> PositionBatch:
        """Return the same positions on another device.

        Args:
            device: Where to.
            non_blocking: Do not wait for work queued on a CUDA device: copies are made from page-locked memory.
        """
        pin = non_blocking and torch.device(device).type == "cuda" and self.mask_S.device.type == "cpu"

        def moved(value_S: Tensor) -> Tensor:
            return (value_S.pin_memory() if pin else value_S).to(device, non_blocking=non_blocking)

        return self._map(moved)

    @property
    def trained_S(self) -> Tensor:
        """Bool (S,): the positions that enter numerators, denominators, ratios and metrics."""
        return self.mask_S if self.weight_S is None else self.mask_S & (self.weight_S != 0)

    def masked(self) -> PositionBatch:
        """Return the positions with ``mask_S = trained_S`` and every untrained optional entry replaced by 0.

        Replacing inputs, not results, keeps whatever an untrained entry holds out of every ``exp`` and every gradient.
        """
        trained_S = self.trained_S
        safe: dict[str, Any] = {
            name: torch.where(trained_S, value_S, 0.0)
            for name in OPTIONAL_FIELDS
            if (value_S := getattr(self, name)) is not None
        }
        return replace(self, mask_S=trained_S, **safe)

    def sum_per_trajectory(self, value_S: Tensor) -> Tensor:
        """Sum ``value_S`` over the positions of each trajectory: (S,) -> (N,), differentiable, same dtype."""
        return value_S.new_zeros(self.num_trajectories).index_add(0, self.trajectory_S, value_S)

    def _map(self, function: Callable[[Tensor], Tensor]) -> PositionBatch:
        changed: dict[str, Any] = {
            field.name: function(value)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return replace(self, **changed)


@dataclass(frozen=True)
class StepTotals:
    """Denominators of a whole optimizer step, over all its microbatches and ranks, as if nothing were shared.

    Built from the expanded batch, so they do not depend on how it is packed. With mini-batches, each mini-batch is a
    step.
    """

    positions: int
    """Semantic positions, the unlabelled last ones included."""

    trajectories: int
    """Trajectories, those without any trained position included."""

    trained_tokens: int
    """Trained positions (tokens)."""

    weighted_tokens: float
    """Sum of the weights of the trained positions (tokens)."""

    trained_trajectories: int
    """Trajectories with at least one trained position."""

    trained_tokens_N: tuple[int, ...] = ()
    """Trained positions of each trajectory (tokens), in the order of the step batch."""

    @classmethod
    def from_arrays(
        cls, mask_S: np.ndarray, offsets_N1: np.ndarray, *, weight_S: np.ndarray | None = None
    ) -> StepTotals:
        """Count the whole step from its flat, label-aligned arrays.

        Args:
            mask_S: bool, label-aligned.
            offsets_N1: int64, trajectory n owns positions [offsets[n], offsets[n+1]).
            weight_S: Float, label-aligned, >= 0; None = 1 everywhere. Read at masked-in positions only.

        Raises:
            ValueError: If the arrays do not fit the offsets, a last position is masked in, or a weight of a masked-in
                position is negative or not finite; the message names the trajectory.
        """
        mask_S = _checked_mask(mask_S, offsets_N1)
        trained_S = mask_S
        weighted_tokens = float(mask_S.sum())
        if weight_S is not None:
            if np.shape(weight_S) != mask_S.shape:
                raise ValueError(f"weights have shape {np.shape(weight_S)}; the mask has {mask_S.shape}")
            bad_S = mask_S & ~(np.isfinite(weight_S) & (np.asarray(weight_S) >= 0))
            if bad_S.any():
                position = int(np.flatnonzero(bad_S)[0])
                raise ValueError(
                    f"weight {weight_S[position]} at {_where(position, offsets_N1)}; a weight must be finite and >= 0"
                )
            trained_S = mask_S & (np.asarray(weight_S) != 0)
            weighted_tokens = float(np.sum(weight_S, dtype=np.float64, where=trained_S))
        cumulative = np.concatenate([[0], np.cumsum(trained_S, dtype=np.int64)])
        trained_N = cumulative[offsets_N1[1:]] - cumulative[offsets_N1[:-1]]
        return cls(
            positions=len(mask_S),
            trajectories=len(offsets_N1) - 1,
            trained_tokens=int(trained_S.sum()),
            weighted_tokens=weighted_tokens,
            trained_trajectories=int(np.count_nonzero(trained_N)),
            trained_tokens_N=tuple(trained_N.tolist()),
        )


def _checked_mask(mask_S: np.ndarray, offsets_N1: np.ndarray) -> np.ndarray:
    """Return the mask as a bool array after checking it against the offsets."""
    mask_S = np.asarray(mask_S)
    offsets_N1 = np.asarray(offsets_N1)
    if mask_S.dtype != np.bool_ or mask_S.ndim != 1:
        raise ValueError(f"mask is {mask_S.dtype} {mask_S.shape}; it must be a bool array of shape (S,)")
    increasing = (
        offsets_N1.ndim == 1 and len(offsets_N1) > 0 and offsets_N1[0] == 0 and bool((np.diff(offsets_N1) > 0).all())
    )
    if not increasing or offsets_N1[-1] != len(mask_S):
        raise ValueError(
            f"offsets must rise strictly from 0 to {len(mask_S)}, the number of positions; got {_ends(offsets_N1)}"
        )
    last_N = offsets_N1[1:] - 1
    if mask_S[last_N].any():
        trajectory = int(np.flatnonzero(mask_S[last_N])[0])
        raise ValueError(
            f"the last position of trajectory {trajectory} is masked in, but it has no label; "
            "the mask must be label-aligned (entry i speaks of token i + 1)"
        )
    return mask_S


def _where(position: int, offsets_N1: np.ndarray) -> str:
    trajectory = int(np.searchsorted(offsets_N1, position, side="right")) - 1
    return f"trajectory {trajectory}, position {position - int(offsets_N1[trajectory])}"


def _ends(offsets: np.ndarray) -> str:
    values = offsets.ravel().tolist()
    return str(values if len(values) <= 6 else [*values[:3], "...", *values[-2:]])
