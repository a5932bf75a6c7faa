"""Objectives by name: what each is, what it needs and what its defaults are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch import Tensor

from harts_titan.rl.config import ADVANTAGES, AGGREGATIONS, ObjectiveConfig
from harts_titan.rl.metrics import Metric
from harts_titan.rl.positions import PositionBatch

INPUTS = ("advantage", "old_logprob", "ref_logprob", "sampler_logprob")


@dataclass(frozen=True)
class PolicyTerm:
    """The policy part of an objective at every position of a call, before aggregation."""

    loss_S: Tensor
    """Term to be minimised; untrained positions must be finite, their value is not read."""

    metrics: dict[str, Metric] = field(default_factory=dict)
    """Figures of this objective beyond the common ones."""


TermFunction = Callable[[Tensor, PositionBatch, ObjectiveConfig], PolicyTerm]


@dataclass(frozen=True)
class ObjectiveSpec:
    """A registered objective."""

    name: str
    term: TermFunction
    needs: frozenset[str]
    aggregation: str
    advantage: str
    clip_low: float
    clip_high: float
    clipped: bool


_REGISTRY: dict[str, ObjectiveSpec] = {}


def register_objective(
    name: str,
    *,
    needs: Iterable[str] = (),
    aggregation: str = "token_mean",
    advantage: str = "given",
    clip: tuple[float, float] | None = None,
) -> Callable[[TermFunction], TermFunction]:
    """Register a policy term under ``rl.objective = name``; works from any module imported before training.

    The decorated function takes ``(logprob_S, positions, config)`` and returns a ``PolicyTerm``. It gets masked inputs:
    untrained entries of the log-probs and of every tensor of ``positions`` are 0 and ``positions.mask_S`` is the
    trained mask. KL, entropy bonus, truncated importance weights, aggregation and common metrics are added around it.

    Args:
        name: Name in the configuration.
        needs: Inputs the term reads: advantage, old_logprob, ref_logprob, sampler_logprob. Others may be None.
        aggregation: Default of ``rl.aggregation``.
        advantage: Default of ``rl.advantage``; only read if "advantage" is needed.
        clip: Defaults of ``rl.clip_low`` and ``rl.clip_high`` if the term clips ratios, else None: the clip settings
            are then refused.

    Raises:
        ValueError: If the name is taken or an argument is unknown.
    """
    unknown = set(needs := frozenset(needs)) - set(INPUTS)
    if unknown:
        raise ValueError(f"objective {name!r} needs {sorted(unknown)}; inputs are {INPUTS}")
    if aggregation not in AGGREGATIONS:
        raise ValueError(f"objective {name!r} has aggregation {aggregation!r}; it must be one of {AGGREGATIONS}")
    if advantage not in ADVANTAGES:
        raise ValueError(f"objective {name!r} has advantage {advantage!r}; it must be one of {ADVANTAGES}")

    def decorate(term: TermFunction) -> TermFunction:
        if name in _REGISTRY:
            raise ValueError(f"an objective named {name!r} is already registered; choose another name")
        clip_low, clip_high = clip or (0.0, 0.0)
        _REGISTRY[name] = ObjectiveSpec(
            name=name,
            term=term,
            needs=needs,
            aggregation=aggregation,
            advantage=advantage,
            clip_low=clip_low,
            clip_high=clip_high,
            clipped=clip is not None,
        )
        return term

    return decorate


def objective_spec(name: str) -> ObjectiveSpec:
    """Look up a registered objective.

    Raises:
        ValueError: If the name is unknown; the message lists the known ones.
    """
    if name not in _REGISTRY:
        raise ValueError(
            f"rl.objective is {name!r}; registered are {', '.join(objective_names())}. An objective of your own must "
            "be registered with register_objective in a module imported before training"
        )
    return _REGISTRY[name]


def objective_names() -> tuple[str, ...]:
    """Return the registered names in alphabetical order."""
    return tuple(sorted(_REGISTRY))
