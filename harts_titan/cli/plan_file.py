"""The file that ``harts-plan --save`` writes; docs/plan_file.md describes it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from harts_titan.tree import PlanCost, StepPlan

FORMAT = "harts_titan plan 1"
HEADER = ("dp_degree", "capacity", "chunk_size", "row_alignment", "max_window_slots", "max_live_producers")
"""Integers that hold for all steps of a file."""
_TABLES = (
    "item_kind_I",
    "item_replica_I",
    "item_index_I",
    "item_rounds_I",
    "sequence_ptr_I1",
    "sequence_round_Q",
    "sequence_trajectory_Q",
    "sequence_anchor_Q",
    "sequence_start_Q",
    "sequence_end_Q",
)


def step_arrays(plan: StepPlan) -> dict[str, np.ndarray]:
    """Return the arrays of one step under their names in the file, without the prefix of the step."""
    by_trajectory = {
        "replica_N": plan.replica_N,
        "slot_N": plan.slot_N,
        "shared_N": plan.shared_N,
        "window_ptr_W1": plan.window_ptr_W1,
    }
    items = plan.items
    arrays = by_trajectory | {name: items[name] for name in _TABLES} | {"events_V2": plan.events}
    return {name: np.asarray(array, np.int64) for name, array in arrays.items()}


def write_plan_file(
    path: str, steps: Sequence[Mapping[str, np.ndarray]], *, settings: Mapping[str, int], cost: PlanCost
) -> None:
    """Write the plans of one or several steps; the file appears only when it is complete.

    Args:
        path: file to write; its name is kept as it is.
        steps: arrays of each step.
        settings: integers that hold for all steps.
        cost: coefficients the plans were made with.
    """
    content: dict[str, np.ndarray] = {"format": np.array(FORMAT), "num_steps": np.array(len(steps), np.int64)}
    content |= {name: np.array(value, np.int64) for name, value in settings.items()}
    for name, value in asdict(cost).items():
        content[f"cost_{name}"] = np.array(value) if isinstance(value, str) else np.array(value, np.int64)
    for i, arrays in enumerate(steps):
        content |= {f"s{i}_{name}": array for name, array in arrays.items()}
    # Links followed: the file they name is replaced, not the link.
    target = Path(path).resolve()
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    if (target.exists() and not target.is_file()) or not os.access(target.parent, os.W_OK):
        # A device, or a file in a folder that takes no other.
        partial = target
    try:
        with partial.open("wb") as stream:
            # An open file: NumPy would add ".npz" to another name.
            np.savez_compressed(stream, **content)  # type: ignore[arg-type]
        if partial != target:
            os.replace(partial, target)
    finally:
        if partial != target:
            partial.unlink(missing_ok=True)
