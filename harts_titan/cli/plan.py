"""``harts-plan INPUT``: plan rollouts without a model and print what sharing saves."""

from __future__ import annotations

import argparse
import resource
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from harts_titan.cli import common
from harts_titan.data import RolloutBatch, apply_overlong, read_rollouts
from harts_titan.tree import MODES, StepPlan, plan_step


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="harts-plan", description="Plan rollouts into microbatches and report compression, rounds and replay."
    )
    parser.add_argument(
        "input",
        nargs="+",
        help="rollout file (parquet, JSONL, path format), or .npz with flat int32 'tokens' and int64 'offsets' (N+1); "
        "several files are several steps",
    )
    parser.add_argument("--capacity", type=int, default=65536, metavar="T", help="compact rows a microbatch may have")
    parser.add_argument("--chunk-size", type=int, default=64, metavar="B", help="linear-attention chunk in tokens")
    parser.add_argument("--dp", type=int, default=1, metavar="D", help="data-parallel replicas")
    parser.add_argument("--mode", choices=MODES, default="compact", help="execution mode to lay out")
    parser.add_argument("--overlong", choices=("error", "drop", "truncate"), default="error")
    parser.add_argument("--validate", action="store_true", help="prove every invariant of the plan (slow)")
    parser.add_argument("--save", metavar="PLAN", help="write the plan of the (single) step to a file")
    common.add_common_options(parser)
    return parser


def read_step(path: str, *, scheme: str, limit: int) -> tuple[np.ndarray, np.ndarray, RolloutBatch | None]:
    """Read one step's trajectories: flat int32 tokens, int64 offsets, and the batch unless it is an ``.npz``.

    Raises:
        ValueError: If the file is missing or its content is not what its name says.
    """
    if not path.endswith(".npz"):
        batch = read_rollouts(path, scheme=scheme, limit=limit)
        return batch.tokens, batch.offsets, batch
    if not Path(path).is_file():
        raise ValueError(f"{path} does not exist")
    try:
        with np.load(path, allow_pickle=False) as content:
            missing = {"tokens", "offsets"} - set(content.files)
            if missing:
                raise ValueError(f"{path} lacks {sorted(missing)}; it has {content.files}")
            tokens, offsets = content["tokens"], content["offsets"].astype(np.int64)
    except (zipfile.BadZipFile, OSError) as error:
        raise ValueError(f"{path} is no readable .npz file: {error}") from error
    if limit and len(offsets) > limit + 1:
        offsets = offsets[: limit + 1]
        tokens = tokens[: offsets[-1]]
    return tokens, offsets, None


def plan_figures(plan: StepPlan) -> dict[str, Any]:
    """Return the figures of one step's plan under the JSON keys of ``harts-plan``."""
    stats = plan.stats
    rows = np.array(
        [
            [sum(c.num_rows for c in plan.consumer(d, j).calls) for d in range(plan.dp_degree)]
            for j in range(plan.num_slots)
        ]
    )
    return {
        "original_tokens": stats.original_tokens,
        "distinct_tokens": stats.distinct_tokens,
        "compact_tokens": stats.compact_tokens,
        "executed_rows": stats.executed_rows,
        "replay_tokens": stats.replay_tokens,
        "l1_compression": stats.original_tokens / stats.compact_tokens,
        "compression": stats.compression,
        "l1_balance": float(rows.sum() / (rows.max(axis=1).sum() * plan.dp_degree)),
        "l1_slots": plan.num_slots,
        "slots": plan.num_slots,
        "consumers": stats.num_consumers,
        "segments": stats.num_segments,
        "rounds_max": stats.rounds_max,
        "rounds_mean": stats.rounds_mean,
        "seconds": dict(stats.seconds),
    }


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    options = _parser().parse_args(argv)
    common.check_target(options.json, "--json")
    if options.save and len(options.input) > 1:
        raise ValueError("--save takes one INPUT; plan the steps one by one")
    common.config_overrides(options)
    common.check_target(options.save, "--save")
    if options.overlong != "error" and any(path.endswith(".npz") for path in options.input):
        raise ValueError("--overlong applies to rollout files; an .npz must fit --capacity as it is")
    steps = []
    for path in tqdm(options.input, desc="plan", unit="step", disable=len(options.input) < 2):
        tokens, offsets, batch = read_step(path, scheme=options.scheme or "tree", limit=options.limit or 0)
        if batch is not None:
            batch, _ = apply_overlong(batch, options.capacity, options.overlong)
            tokens, offsets = batch.tokens, batch.offsets
        plan = plan_step(
            tokens,
            offsets,
            capacity=options.capacity,
            chunk_size=options.chunk_size,
            dp_degree=options.dp,
            mode=options.mode,
        )
        if options.validate:
            plan.validate(tokens, offsets)
        if options.save:
            plan.save(options.save)
        steps.append({"input": path, "trajectories": len(offsets) - 1} | plan_figures(plan))
    total = overall(steps)
    common.write_json(total | {"steps": steps}, options.json)
    rows = [(name, round(value, 4) if isinstance(value, float) else value) for name, value in total.items()]
    common.table(f"harts-plan: {len(steps)} step(s), mode {options.mode}", rows, to_stderr=options.json == "-")
    return 0


def overall(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Combine the figures of several steps: counts add, ratios are taken of the sums."""

    def total(name: str) -> int:
        return sum(step[name] for step in steps)

    original, compact = total("original_tokens"), total("compact_tokens")
    # Balance of the whole run: mean rows over the rows of the slowest replica in every slot.
    slowest = sum(step["executed_rows"] / step["l1_balance"] for step in steps)
    return {
        "original_tokens": original,
        "distinct_tokens": total("distinct_tokens"),
        "compact_tokens": compact,
        "executed_rows": total("executed_rows"),
        "replay_tokens": total("replay_tokens"),
        "l1_compression": original / compact,
        "compression": original / total("executed_rows"),
        "l1_balance": total("executed_rows") / slowest,
        "l1_slots": total("slots"),
        "slots": total("slots"),
        "rounds_max": max(step["rounds_max"] for step in steps),
        "rounds_mean": sum(step["rounds_mean"] * step["consumers"] for step in steps) / total("consumers"),
        "seconds_per_step": sum(sum(step["seconds"].values()) for step in steps) / len(steps),
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def entry() -> None:
    """Console script."""
    sys.exit(common.run(main))
