"""``harts-bench CONFIG``: update throughput of shared against expanded execution, in one process on the same steps.

Other measurements are subcommands with a module of their own: ``harts-bench calibrate CONFIG``.

Throughput counts original trajectory tokens and includes planning, as a user sees it. The modes take turns, so a
machine that slows down slows all of them; figures are medians over the repeats.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tqdm import tqdm

from harts_titan.cli import calibrate, common
from harts_titan.cli.timing import device_name, synchronize
from harts_titan.data import RolloutBatch
from harts_titan.data.source import dataset_from_config
from harts_titan.engine import Engine
from harts_titan.job_config import load_config
from harts_titan.tree import MODES

SUBCOMMANDS: dict[str, Callable[[Sequence[str]], int]] = {"calibrate": calibrate.main}
"""First argument of ``harts-bench`` -> its command; anything else is the CONFIG of an update benchmark."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="harts-bench",
        description="Time policy updates in several tree modes on the first step of a configuration. Unknown options "
        "of the form --section.field value override the configuration.",
        epilog="Other measurements, each with its own --help: "
        + ", ".join(f"harts-bench {name} CONFIG" for name in SUBCOMMANDS),
    )
    parser.add_argument("config", help="TOML configuration")
    parser.add_argument("--rollouts", metavar="FILE", help="rollouts to use instead of data.path")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["compact", "expanded"])
    parser.add_argument(
        "--repeats", type=int, default=3, metavar="N", help="timed updates per mode (default %(default)s)"
    )
    parser.add_argument(
        "--warmup", type=int, default=1, metavar="N", help="untimed updates per mode (default %(default)s)"
    )
    common.add_common_options(parser)
    return parser


def time_modes(
    engine: Engine, batch: RolloutBatch, *, modes: Sequence[str], repeats: int, warmup: int
) -> dict[str, dict[str, Any]]:
    """Run updates in turn and return, per mode, seconds (median, minimum, maximum) and tokens per second."""
    seconds: dict[str, list[float]] = {mode: [] for mode in modes}
    last: dict[str, dict[str, float]] = {}
    peak: dict[str, int] = {}
    for turn in tqdm(range(warmup + repeats), desc="bench", unit="round"):
        for mode in modes:
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
    return {
        mode: {
            "seconds_median": statistics.median(seconds[mode]),
            "seconds_min": min(seconds[mode]),
            "seconds_max": max(seconds[mode]),
            "original_tokens_per_second": last[mode]["tokens/original"] / statistics.median(seconds[mode]),
            "rows_executed": int(last[mode]["tokens/executed"]),
            "plan_seconds": last[mode]["plan/seconds"],
            "peak_memory_bytes": peak.get(mode),
        }
        for mode in modes
    }


def main(argv: Sequence[str]) -> int:
    """Run the command, or the subcommand that the first argument names, and return its exit status."""
    if argv and argv[0] in SUBCOMMANDS:
        return SUBCOMMANDS[argv[0]](argv[1:])
    options, overrides = _parser().parse_known_args(argv)
    common.check_target(options.json, "--json")
    if options.repeats < 1 or options.warmup < 0:
        raise ValueError(f"--repeats ({options.repeats}) must be at least 1 and --warmup ({options.warmup}) at least 0")
    config = load_config(options.config, [*common.config_overrides(options), *overrides])
    engine = Engine.from_config(config)
    dataset = dataset_from_config(config, vocab_size=engine.vocab_size)
    step = dataset.batch.select(dataset.steps_of_epoch(0)[0])
    modes = time_modes(engine, step, modes=options.modes, repeats=options.repeats, warmup=options.warmup)
    device = device_name(engine.device)
    result: dict[str, Any] = {
        "config": options.config,
        "device": device,
        "torch": torch.__version__,
        "objective": config.rl.objective,
        "trajectories": step.num_trajectories,
        "original_tokens": step.num_positions,
        "repeats": options.repeats,
        "warmup": options.warmup,
        "modes": modes,
    }
    rows: list[tuple[str, Any]] = [("device", device), ("original tokens", step.num_positions)]
    for mode, figures in modes.items():
        spread = f"{figures['seconds_median']:.3f} s ({figures['seconds_min']:.3f} to {figures['seconds_max']:.3f})"
        rows.append((mode, f"{figures['original_tokens_per_second']:,.0f} original tokens/s, {spread}"))
    if "expanded" in modes:
        base = modes["expanded"]["seconds_median"]
        result["speedup_over_expanded"] = {
            mode: base / figures["seconds_median"] for mode, figures in modes.items() if mode != "expanded"
        }
        rows += [(f"{mode} over expanded", f"{ratio:.2f}x") for mode, ratio in result["speedup_over_expanded"].items()]
    common.write_json(result, options.json)
    common.table("harts-bench", rows, to_stderr=options.json == "-")
    return 0


def entry() -> None:
    """Console script."""
    sys.exit(common.run(main))


if __name__ == "__main__":
    entry()
