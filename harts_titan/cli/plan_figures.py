"""The figures of ``harts-plan``: of one step, and of several together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from harts_titan.tree import PlanStats

PHASES = ("read", "sort", "l1", "l2", "rounds", "layout")
"""Keys of ``seconds``, in order."""
ADDED = (
    "trajectories",
    "original_tokens",
    "distinct_tokens",
    "compact_tokens",
    "executed_rows",
    "l1_tokens",
    "l1_slots",
    "l1_lower_bound",
    "decoder_tokens",
    "producer_tokens",
    "residual_tokens",
    "alignment_tokens",
    "slots",
    "windows",
    "producers",
    "consumers",
    "work_items",
    "segments",
    "handed_states",
    "replay_tokens",
    "phi",
)
"""Counts: over several steps they add up."""
LARGEST = ("rounds_max", "producer_rows_max", "interface_bytes")
"""Figures whose largest step counts."""


def step_figures(
    stats: PlanStats,
    *,
    trajectories: int,
    work_items: int,
    lower_bound: int,
    read_seconds: float,
    plan_seconds: float,
) -> dict[str, Any]:
    """Return the figures of one step under the JSON keys of ``harts-plan``.

    Args:
        stats: of the step's plan.
        trajectories: of the step.
        work_items: consumers and producers that execute rows.
        lower_bound: least compact rows level 1 could reach.
        read_seconds: reading the step.
        plan_seconds: from token arrays in memory to the step plan.
    """
    counts = {
        "trajectories": trajectories,
        "original_tokens": stats.original_tokens,
        "distinct_tokens": stats.distinct_tokens,
        "compact_tokens": stats.compact_tokens,
        "executed_rows": stats.executed_rows,
        "l1_tokens": stats.l1_tokens,
        "l1_slots": stats.l1_slots,
        "l1_lower_bound": lower_bound,
        "decoder_tokens": stats.decoder_tokens,
        "producer_tokens": stats.producer_tokens,
        "residual_tokens": stats.residual_tokens,
        "alignment_tokens": stats.alignment_tokens,
        "slots": stats.num_slots,
        "windows": stats.num_windows,
        "producers": stats.num_producers,
        "consumers": stats.num_consumers,
        "work_items": work_items,
        "segments": stats.num_segments,
        "handed_states": stats.handed_states,
        "replay_tokens": stats.replay_tokens,
        "phi": stats.phi,
    }
    return (
        counts
        | _ratios(counts)
        | {
            "l1_balance": stats.l1_balance,
            "l1_method": stats.l1_method,
            "balance": stats.balance,
            "balance_p5": percentile_5(stats.computation_balance),
            "worst_step_balance": stats.step_balance,
            "rounds_max": stats.rounds_max,
            "rounds_mean": stats.rounds_mean,
            "producer_rows_max": stats.producer_rows_max,
            "interface_bytes": stats.interface_bytes,
            "seconds": {name: {"read": read_seconds, **stats.seconds}.get(name, 0.0) for name in PHASES},
            "seconds_per_step": plan_seconds,
        }
    )


def overall_figures(steps: Sequence[dict[str, Any]], computation_balance: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Combine the figures of several steps.

    Counts add up, ratios are taken of the sums, percentiles of all steps' computations together.

    Args:
        steps: as ``step_figures`` returns them.
        computation_balance: mean over largest rows of each slot and window, of each step.
    """
    counts = {name: sum(step[name] for step in steps) for name in ADDED}
    executed = [step["residual_tokens"] + step["producer_tokens"] for step in steps]
    return (
        counts
        | _ratios(counts)
        | {name: max(step[name] for step in steps) for name in LARGEST}
        | {
            "l1_balance": _pooled([step["l1_tokens"] for step in steps], [step["l1_balance"] for step in steps]),
            "balance": _pooled(executed, [step["balance"] for step in steps]),
            "balance_p5": percentile_5(np.concatenate([np.asarray(one) for one in computation_balance])),
            "worst_step_balance": min(step["worst_step_balance"] for step in steps),
            "rounds_mean": sum(step["rounds_mean"] * step["work_items"] for step in steps) / counts["work_items"],
            "seconds": {name: sum(step["seconds"][name] for step in steps) for name in PHASES},
            "seconds_per_step": float(np.median([step["seconds_per_step"] for step in steps])),
        }
    )


_TRAINER_TODAY = "executes level 1, without windows: --windows off reports its balance, rounds and memory"


def percentile_5(balance: Sequence[float] | np.ndarray) -> float:
    """Return the 5th percentile, linearly interpolated."""
    return float(np.percentile(np.asarray(balance, np.float64), 5))


def summary(total: dict[str, Any], num_steps: int) -> list[tuple[str, str]]:
    """Return the lines of the table that the command prints."""
    seconds = ", ".join(f"{name} {value / num_steps:.3f}" for name, value in total["seconds"].items())
    lost = []
    if "overlong" in total:
        counts = total["overlong"]
        text = f"{counts['dropped']:,} left out, {counts['truncated']:,} cut; {counts['lost_tokens']:,} tokens lost"
        lost = [("over-long", text)]
    executed = f"{total['executed_rows']:,}, {total['compression']:.3f}x"
    if total["mode"] == "expanded":
        executed += ": every trajectory alone; level 1, decoder and balance count the compact rows of its microbatches"
    # As Settings.report: windows that are off hold no producers.
    trainer = [("trainer today", _TRAINER_TODAY)] if total["max_live_producers"] else []
    return [
        ("trajectories", f"{total['trajectories']:,} of {total['original_tokens']:,} tokens"),
        *lost,
        ("distinct tokens", f"{total['distinct_tokens']:,}, {total['whole_step_compression']:.3f}x"),
        (
            "level 1",
            f"{total['l1_tokens']:,} tokens, {total['l1_compression']:.3f}x, {100 * total['l1_gap']:.2f} % above the "
            f"bound; {total['l1_slots']} slots, balance {100 * total['l1_balance']:.2f} %",
        ),
        (
            "decoder",
            f"{total['decoder_tokens']:,} tokens, {total['decoder_compression']:.3f}x; {total['residual_tokens']:,} in "
            f"consumers, {total['producer_tokens']:,} in producers, {total['alignment_tokens']:,} alignment",
        ),
        ("executed rows", executed),
        *trainer,
        ("windows", f"{total['windows']} over {total['slots']} slots, {total['producers']} producers"),
        (
            "balance",
            f"{100 * total['balance']:.2f} %; 5th percentile {100 * total['balance_p5']:.2f} %, worst step "
            f"{100 * total['worst_step_balance']:.2f} %",
        ),
        (
            "rounds",
            f"{total['rounds_max']} at most, {total['rounds_mean']:.2f} on average; {total['replay_tokens']:,} "
            "tokens replayed",
        ),
        ("interface memory", f"{total['interface_bytes'] / 2**30:.2f} GiB on one replica"),
        ("Phi", f"{total['phi']:.6g} ({total['cost']['source']})"),
        ("seconds per step", f"{total['seconds_per_step']:.3f} (median, without reading); mean of {seconds}"),
        ("compilation", f"{total['compile_seconds']:.2f} s"),
        (
            "memory",
            f"{total['peak_memory_bytes'] / 2**30:.2f} GiB, {total['memory_before_read_bytes'] / 2**30:.2f} GiB before "
            "reading",
        ),
    ]


def _ratios(counts: dict[str, int]) -> dict[str, float]:
    original = counts["original_tokens"]
    return {
        "whole_step_compression": original / counts["distinct_tokens"],
        "l1_compression": original / counts["l1_tokens"],
        "l1_gap": counts["l1_tokens"] / counts["l1_lower_bound"] - 1,
        "decoder_compression": original / counts["decoder_tokens"],
        "compression": original / counts["executed_rows"],
    }


def _pooled(rows: list[int], balance: list[float]) -> float:
    """Return the balance of all steps: rows over those of the slowest replica of every computation."""
    return sum(rows) / sum(n / eta for n, eta in zip(rows, balance, strict=True))
