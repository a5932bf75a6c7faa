"""Metric accumulators that add over calls and combine over ranks without averaging averages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

METRIC_KINDS = ("mean", "sum", "max", "min")


@dataclass(frozen=True)
class Metric:
    """A partial result: enough of a figure to be combined with other parts of the same step.

    ``mean`` and ``sum`` hold a sum; a mean divides by ``count`` only when read. ``max`` and ``min`` hold the extremum.
    Values stay on their device until read, so building and adding metrics does not wait for the accelerator.
    """

    kind: str
    """mean | sum | max | min."""

    value: Tensor
    """float64 scalar: the sum (mean, sum) or the extremum (max, min; infinite when ``count`` is 0)."""

    count: Tensor
    """int64 scalar: trained positions (or trajectories) the value covers."""

    def __post_init__(self) -> None:
        if self.kind not in METRIC_KINDS:
            raise ValueError(f"metric kind is {self.kind!r}; it must be one of {METRIC_KINDS}")

    @classmethod
    def over(cls, kind: str, value_S: Tensor, where_S: Tensor) -> Metric:
        """Build a metric from the entries of ``value_S`` where ``where_S`` holds; other entries are never read.

        Args:
            kind: mean | sum | max | min.
            value_S: Values, any float or bool dtype. Detached.
            where_S: bool (S,).

        Returns:
            The metric of this call.
        """
        value_S = value_S.detach().to(torch.float64)
        count = where_S.sum()
        if kind in ("mean", "sum"):
            return cls(kind, torch.where(where_S, value_S, 0.0).sum(), count)
        worst = -math.inf if kind == "max" else math.inf
        # The appended entry makes an empty call well defined.
        padded = torch.cat([torch.where(where_S, value_S, worst), value_S.new_full((1,), worst)])
        return cls(kind, padded.max() if kind == "max" else padded.min(), count)

    def merge(self, other: Metric) -> Metric:
        """Combine two parts of one figure.

        Raises:
            ValueError: If the kinds differ.
        """
        if self.kind != other.kind:
            raise ValueError(f"a metric of kind {self.kind!r} cannot be merged with one of kind {other.kind!r}")
        if self.kind == "max":
            value = torch.maximum(self.value, other.value)
        elif self.kind == "min":
            value = torch.minimum(self.value, other.value)
        else:
            value = self.value + other.value
        return Metric(self.kind, value, self.count + other.count)

    def result(self) -> float:
        """Return the figure; ``nan`` for a mean, maximum or minimum over nothing. Waits for the device."""
        count = int(self.count)
        if self.kind == "sum":
            return float(self.value)
        if count == 0:
            return math.nan
        return float(self.value) / count if self.kind == "mean" else float(self.value)


def merge_metrics(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Combine the metrics of several calls; a name need not occur in every call."""
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = merged[name].merge(metric) if name in merged else metric
    return merged


def metrics_on_host(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """Return the same metrics with CPU tensors; waits for each device once, whatever their number."""
    tensors = [tensor for metric in metrics.values() for tensor in (metric.value, metric.count)]
    # float64 holds every count below 2^53.
    host: dict[int, float] = {}
    for device in {tensor.device for tensor in tensors}:
        there = [(i, tensor) for i, tensor in enumerate(tensors) if tensor.device == device]
        values = torch.stack([tensor.to(torch.float64) for _, tensor in there]).tolist()
        host.update(zip((i for i, _ in there), values))
    return {
        name: Metric(
            metric.kind,
            torch.tensor(host[2 * i], dtype=torch.float64),
            torch.tensor(int(host[2 * i + 1]), dtype=torch.int64),
        )
        for i, (name, metric) in enumerate(metrics.items())
    }


def metric_values(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Read metrics as floats, leaving out figures over nothing (a batch without any trained position)."""
    return {name: m.result() for name, m in metrics.items() if m.kind == "sum" or int(m.count) > 0}


def all_reduce_metrics(metrics: Mapping[str, Metric], group: dist.ProcessGroup | None = None) -> dict[str, Metric]:
    """Combine metrics over the ranks of a process group.

    Sums are added with ``math.fsum`` over the ranks' float64 parts: the result is the correctly rounded sum, the same
    on every rank whatever the reduction order. Ranks may hold different names (a rank whose slot was empty has none),
    which is why names travel with the values. Collective: every rank of ``group`` must call it. Meant for the
    metrics flush, since it waits for the device.

    Args:
        metrics: This rank's metrics, already merged over its calls.
        group: Process group; the default group if None. Without an initialised process group nothing is exchanged.

    Returns:
        CPU metrics over all ranks.
    """
    own = {name: (m.kind, float(m.value), int(m.count)) for name, m in metrics.items()}
    gathered: list[Any] = [own]
    if dist.is_available() and dist.is_initialized():
        gathered = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, own, group=group)
    return {name: _combine(name, [part[name] for part in gathered if name in part]) for name in _names(gathered)}


def _names(gathered: Iterable[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for part in gathered for name in part))


def _combine(name: str, parts: list[tuple[str, float, int]]) -> Metric:
    kinds = {kind for kind, _, _ in parts}
    if len(kinds) != 1:
        raise ValueError(f"metric {name!r} has kinds {sorted(kinds)} on different ranks; it must have one")
    kind = parts[0][0]
    values = [value for _, value, _ in parts]
    if kind in ("max", "min"):
        value = max(values) if kind == "max" else min(values)
    else:
        # fsum refuses inf - inf; plain addition gives the nan that the reader must see.
        value = math.fsum(values) if all(map(math.isfinite, values)) else sum(values)
    count = sum(part[2] for part in parts)
    return Metric(kind, torch.tensor(value, dtype=torch.float64), torch.tensor(count, dtype=torch.int64))
