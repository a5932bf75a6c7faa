"""Metrics of an update beside those of its objective: means over its optimizer steps, expert load, plan and tokens."""

from __future__ import annotations

from torch import Tensor

from harts_titan.rl import Metric, merge_metrics, metric_values
from harts_titan.step import Step, figure

_SUMS_OF_A_STEP = ("loss", "policy_loss", "router/z_loss", "router/load_balance_loss")


def means_over_steps(parts: list[dict[str, Metric]]) -> dict[str, float]:
    """Return the metrics of an update as numbers: losses are means over its optimizer steps.

    Args:
        parts: metrics of each optimizer step, already over all replicas.
    """
    values = metric_values(merge_metrics(parts))
    return {name: value / len(parts) if name in _SUMS_OF_A_STEP else value for name, value in values.items()}


def expert_load(counts_LE: Tensor) -> dict[str, Metric]:
    """Return how far the busiest experts are above the mean, over layers.

    Args:
        counts_LE: int64 assignments of each MoE layer (L) and expert (E), over all replicas.
    """
    counts_LE = counts_LE.double()
    load_L = counts_LE.amax(dim=1) / counts_LE.mean(dim=1)
    return {
        "router/expert_load_max": figure("max", load_L.max()),
        "router/expert_load_mean_of_max": figure("mean", load_L.mean()),
    }


def plan_figures(steps: list[Step], *, epochs: int, passes: int) -> dict[str, float]:
    """Return tokens, compression and planning times of an update; seconds are this rank's.

    Args:
        steps: the optimizer steps of one epoch.
        epochs: how often each is trained on.
        passes: how often each runs forward: old log-probs that had to be computed are one more.
    """
    stats = [step.plan.stats for step in steps]
    original = sum(s.original_tokens for s in stats)
    compact = sum(s.compact_tokens for s in stats)
    return {
        "tokens/original": float(original * epochs),
        "tokens/compact": float(compact * epochs),
        "tokens/executed": float(sum(s.executed_rows for s in stats) * passes),
        "tokens/replayed": float(sum(s.replay_tokens for s in stats) * passes),
        "plan/compression": original / max(compact, 1),
        "plan/seconds": sum(sum(s.seconds.values()) for s in stats),
        "plan/wait_seconds": sum(step.plan_wait_seconds for step in steps),
        "plan/rounds_max": float(max(s.rounds_max for s in stats)),
        "plan/slots": float(sum(s.num_slots for s in stats)),
        "data/dropped": float(steps[0].batch.num_dropped),
        "data/truncated": float(steps[0].batch.num_truncated),
    }
