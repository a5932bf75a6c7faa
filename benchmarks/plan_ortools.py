"""Plan one step with the OR-Tools baseline and write its figures.

    python benchmarks/plan_ortools.py STEP.npz --seconds-per-shard 300 --processes 2 --json OUT.json
    python benchmarks/plan_ortools.py STEP.npz --first-feasible --json OUT.json

STEP.npz holds a step's tokens (flat int32 ``tokens``, int64 ``offsets``), or what the planner makes of them: int64
``order``, ``length`` and ``lcp`` by sorted place. Reading and sorting are not timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import platform
import sys
from pathlib import Path

import numpy as np

from harts_titan.tree.ortools_partition import OrtoolsResult, ortools_partition
from harts_titan.tree.sorted_step import SortedStep
from harts_titan.tree.work import Placement, measure


def read_step(path: Path) -> SortedStep:
    with np.load(path) as file:
        if {"tokens", "offsets"} <= set(file):
            return SortedStep.from_tokens(file["tokens"], file["offsets"])
        if {"order", "length", "lcp"} <= set(file):
            return SortedStep(file["order"], file["length"], file["lcp"])
        raise SystemExit(f"{path} holds {sorted(file)}: needed tokens and offsets, or order, length and lcp")


def figures(step: SortedStep, placement: Placement, dp_degree: int) -> dict[str, object]:
    work = measure(step, placement, dp_degree)
    return {
        "original_tokens": step.original_tokens,
        "distinct_tokens": step.distinct_tokens,
        "compact_tokens": work.compact_tokens,
        "compression": step.original_tokens / work.compact_tokens,
        "balance": work.balance(),
        "balance_p5": float(np.percentile(work.computation_balance(), 5)),
        "step_balance": work.step_balance(),
        "slots": placement.num_slots,
        "largest_microbatch": int(work.complete_JD.max()),
        "smallest_microbatch": int(work.complete_JD.min()),
    }


def shard_figures(result: OrtoolsResult) -> dict[str, object]:
    rows, bound = sum(s.rows for s in result.shards), sum(s.bound for s in result.shards)
    return {
        "items_per_replica": result.items_per_replica,
        "seconds": result.seconds,
        "sharding_seconds": result.sharding_seconds,
        "rows_before_alignment": rows,
        "bound_before_alignment": bound,
        "greedy_rows_before_alignment": sum(s.start_rows for s in result.shards),
        "gap_before_alignment": rows / bound - 1,
        "microbatches_before_alignment": sum(s.num_microbatches for s in result.shards),
        "rows_won_after_alignment": sum(max(0, s.start_rows - s.rows) for s in result.aligned),
        "first_solution_seconds": sum(s.first_seconds for s in result.shards),
        "shards": [dataclasses.asdict(s) for s in result.shards],
        "aligned": [dataclasses.asdict(s) for s in result.aligned],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", type=Path)
    parser.add_argument("--dp", type=int, default=8)
    parser.add_argument("--capacity", type=int, default=65536)
    parser.add_argument("--seconds-per-shard", type=float, default=300.0)
    parser.add_argument("--first-feasible", action="store_true")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    step = read_step(options.step)
    # Compilation is not planning: the first call of the compiled parts happens on one trajectory.
    ortools_partition(SortedStep(np.zeros(1), np.ones(1), np.zeros(1)), capacity=1, dp_degree=1)
    result = ortools_partition(
        step,
        capacity=options.capacity,
        dp_degree=options.dp,
        seconds_per_shard=options.seconds_per_shard,
        first_feasible=options.first_feasible,
        workers=options.workers,
        processes=options.processes,
        progress=True,
    )
    command = f"python benchmarks/plan_ortools.py {Path(sys.argv[1]).name} {' '.join(sys.argv[2:])}".rstrip()
    report = {
        "command": command,
        "dp_degree": options.dp,
        "capacity": options.capacity,
        "seconds_per_shard": options.seconds_per_shard,
        "first_feasible": options.first_feasible,
        "workers": options.workers,
        "processes": options.processes,
        **figures(step, result.placement, options.dp),
        **shard_figures(result),
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in ("ortools", "numpy", "numba")},
    }
    text = json.dumps(report, indent=1)
    if options.json:
        options.json.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
