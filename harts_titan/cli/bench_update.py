"""``harts-bench update CONFIG``: policy updates in several modes on the same trajectories, in one process.

Throughput counts original trajectory tokens and includes planning, as a user sees it. The modes take turns, so a
machine that slows down slows all of them; figures are medians over the repeats.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tqdm import tqdm

from harts_titan.cli import bench_options, bench_workload, common
from harts_titan.cli.bench_breakdown import breakdown
from harts_titan.cli.bench_ceilings import measure_ceilings
from harts_titan.cli.timing import device_name, synchronize
from harts_titan.data import RolloutBatch
from harts_titan.engine import Engine
from harts_titan.job_config import load_config
from harts_titan.models.ling import LingArgs
from harts_titan.models.ling.cost import row_operations
from harts_titan.models.ling.flops import CallWork, Flops, count_flops, work_of_calls
from harts_titan.models.train_specs import model_args_of


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="harts-bench update",
        description="Time policy updates (forward, loss, backward, optimizer) in several tree modes on the first step "
        "of a configuration, on a step of tokens or on a stored tree. Unknown options of the form --section.field "
        "value override the configuration.",
    )
    bench_options.add_bench_options(parser)
    return parser


def time_modes(
    engine: Engine, batch: RolloutBatch, *, repeats: Mapping[str, int], warmup: int
) -> dict[str, dict[str, Any]]:
    """Run updates in turn and return, per mode, seconds and tokens per second.

    Args:
        engine: with an optimizer.
        batch: the trajectories of every update.
        repeats: timed updates of each mode; a mode with fewer pauses in the last turns.
        warmup: untimed updates of each mode.
    """
    seconds: dict[str, list[float]] = {mode: [] for mode in repeats}
    last: dict[str, dict[str, float]] = {}
    peak: dict[str, int] = {}
    for turn in tqdm(range(warmup + max(repeats.values())), desc="bench", unit="round"):
        for mode, number in repeats.items():
            if turn >= warmup + number:
                continue
            engine.config.tree.mode = mode
            if engine.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(engine.device)
            synchronize(engine.device)
            started = time.perf_counter()
            last[mode] = engine.update(batch)
            synchronize(engine.device)
            if turn >= warmup:
                seconds[mode].append(time.perf_counter() - started)
            if engine.device.type == "cuda":
                peak[mode] = torch.cuda.max_memory_allocated(engine.device)
    return {mode: _figures(values, last[mode], peak.get(mode)) for mode, values in seconds.items()}


def _figures(seconds: Sequence[float], metrics: Mapping[str, float], peak: int | None) -> dict[str, Any]:
    timed = bench_options.spread(seconds)
    return timed | {
        "original_tokens_per_second": metrics["tokens/original"] / timed["seconds_median"],
        "rows_executed": int(metrics["tokens/executed"]),
        "replay_tokens": int(metrics["tokens/replayed"]),
        "rounds_max": int(metrics["plan/rounds_max"]),
        "plan_seconds": metrics["plan/seconds"],
        "loss": metrics["loss"],
        "peak_memory_bytes": peak,
    }


def work_of_modes(engine: Engine, batch: RolloutBatch, modes: Sequence[str]) -> dict[str, CallWork]:
    """Plan the update in every mode and count what it executes."""
    step = engine.prepare(batch)
    work = {}
    for mode in modes:
        plan = engine.replan(step, mode=mode).plan
        work[mode] = work_of_calls([call for consumer in plan.consumers() for call in consumer.calls])
    return work


def flops_of_update(engine: Engine, batch: RolloutBatch, work: CallWork) -> Flops | None:
    """Count the operations of an update, None where the model has no formula.

    Old log-probs that the update has to compute are forward passes, part of the model's work.
    """
    args, config = engine.model.model_args, engine.config
    if not isinstance(args, LingArgs):
        return None
    one = row_operations(args, chunk_size=config.tree.chunk_size)
    recompute = config.activation_checkpoint.mode == "full"
    total = count_flops(work, one, recompute=recompute, passes=config.rl.epochs)
    columns = {"old_logprobs"} if batch.old_logprobs is not None else set()
    if engine.objective.must_compute_old_logprobs(columns):
        total = total + count_flops(work, one, recompute=False, backward=False)
    return total


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    options, overrides = _parser().parse_known_args(argv)
    common.check_target(options.json, "--json")
    modes = bench_options.read_modes(options)
    repeats, profiled = bench_options.read_repeats(options, modes), bench_options.read_breakdown(options, modes)
    bench_workload.check_workload_options(options)
    config = load_config(options.config, [*common.config_overrides(options), *overrides])
    if config.rl.mini_batches != 1:
        raise ValueError(
            f"rl.mini_batches ({config.rl.mini_batches}) cuts the trajectories into several optimizer steps, whose "
            "operations are not counted; set it to 1"
        )
    # Before the model is built: reading and placing a large step may be refused.
    workload = bench_workload.load_workload(options, config, vocab_size=model_args_of(config).vocab_size)
    engine = Engine.from_config(config)
    ceilings = measure_ceilings(engine.device)
    work = work_of_modes(engine, workload.batch, modes)
    figures = time_modes(engine, workload.batch, repeats=repeats, warmup=options.warmup)
    flops = {mode: flops_of_update(engine, workload.batch, work[mode]) for mode in modes}
    for mode, one in figures.items():
        count = flops[mode]
        if count is not None:
            one["flops"] = count.report()
            one |= bench_options.speeds(count, one["seconds_median"], ceilings)
        one["work"] = vars(work[mode])
    result = report(argv, options, engine, workload) | {"ceilings": ceilings, "modes": figures}
    medians = {mode: one["seconds_median"] for mode, one in figures.items()}
    executed = {mode: count.executed for mode, count in flops.items() if count is not None}
    result["ratios"] = bench_options.ratios(medians, executed)
    bench_options.write_early(result, options)
    for mode in profiled:
        engine.config.tree.mode = mode
        figures[mode]["breakdown"] = breakdown(lambda: engine.update(workload.batch), engine.device)
    common.write_json(result, options.json)
    common.table("harts-bench update", _rows(result), to_stderr=options.json == "-")
    return 0


def report(
    argv: Sequence[str], options: argparse.Namespace, engine: Engine, workload: bench_workload.Workload
) -> dict[str, Any]:
    """Return what identifies a measurement, as JSON."""
    config = engine.config
    return {
        "command": "update",
        "arguments": bench_options.arguments(argv),
        "config": options.config,
        "model": {"name": config.model.name, "flavor": config.model.flavor, "layers": len(engine.model.layers)},
        "training_dtype": config.training.dtype,
        "compute_dtype": config.training.mixed_precision_param,
        "recomputation": config.activation_checkpoint.mode,
        "objective": config.rl.objective,
        "capacity": config.tree.max_tokens,
        "chunk_size": config.tree.chunk_size,
        "compiled": config.compile.enable,
        "ops": vars(config.ops),
        "warmup": options.warmup,
        "workload": workload.report(),
        **bench_options.environment(engine.device, device_name(engine.device)),
    }


def _rows(result: dict[str, Any]) -> list[tuple[str, Any]]:
    ceilings = result["ceilings"]
    rows: list[tuple[str, Any]] = [
        ("device", result["device"]),
        *bench_options.workload_rows(
            result["workload"], {mode: one["rows_executed"] for mode, one in result["modes"].items()}
        ),
        ("copy", f"{ceilings['copy_bytes_per_second'] / 1e9:,.0f} GB/s"),
        ("GEMM", f"{bench_options.tflops(ceilings['gemm_flops_per_second'] / 1e12)} TFLOP/s"),
        ("grouped GEMM", f"{bench_options.tflops(ceilings['grouped_gemm_flops_per_second'] / 1e12)} TFLOP/s"),
    ]
    for mode, one in result["modes"].items():
        text = f"{one['seconds_median']:.3f} s ({one['seconds_min']:.3f} to {one['seconds_max']:.3f})"
        rows.append((mode, f"{one['original_tokens_per_second']:,.0f} original tokens/s, {text}"))
        if "flops" in one:
            peak = one["peak_memory_bytes"]
            memory = "" if peak is None else f", {peak / 2**30:.1f} GiB"
            share = f"{one['hardware_utilisation']:.1%} of the GEMM"
            speed = bench_options.tflops(one["hardware_tflops_per_second"])
            rows.append(("", f"{speed} TFLOP/s executed, {share}{memory}"))
        for kind, row in list(one.get("breakdown", {}).get("kinds", {}).items())[:8]:
            rows.append((f"  {kind}", f"{row['ms']:.2f} ms, {row['share']:.1%}, {row['calls']} kernels"))
        if (idle := one.get("breakdown", {}).get("idle_ms")) is not None:
            rows.append(("  idle", f"{idle:.2f} ms"))
    for name, value in result["ratios"]["speedup"].items():
        share = result["ratios"]["share"].get(name)
        rows.append((name, f"{value:.2f}x" + ("" if share is None else f", {share:.3f} of the FLOP ratio")))
    return rows
