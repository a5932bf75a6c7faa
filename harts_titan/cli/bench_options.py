"""Options and figures that ``harts-bench update`` and ``harts-bench layer`` share."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from harts_titan.cli import bench_workload, common
from harts_titan.models.ling.flops import Flops
from harts_titan.tree import MODES

_PACKAGES = ("torch", "triton", "fla-core", "flash-attn-4", "harts-titan")


def add_bench_options(parser: argparse.ArgumentParser) -> None:
    """Add configuration, workload, modes and repeats."""
    parser.add_argument("config", help="TOML configuration")
    bench_workload.add_workload_options(parser)
    parser.add_argument(
        "--modes",
        nargs="+",
        default=["compact,expanded"],
        metavar="MODE",
        help=f"of {', '.join(MODES)}; separated by commas or spaces (default compact,expanded)",
    )
    parser.add_argument(
        "--repeats",
        default="5",
        metavar="N[,MODE=N]",
        help="timed runs per mode, with exceptions: 5,expanded=3 (default %(default)s)",
    )
    parser.add_argument(
        "--warmup", type=int, default=1, metavar="N", help="untimed runs per mode (default %(default)s)"
    )
    parser.add_argument(
        "--breakdown",
        metavar="MODES",
        help="modes that run once more under the profiler, separated by commas, or 'none' (default: all)",
    )
    common.add_common_options(parser)


def read_modes(options: argparse.Namespace) -> tuple[str, ...]:
    """Return the modes asked for, without repetitions.

    Raises:
        ValueError: If one is unknown.
    """
    modes = [mode for part in options.modes for mode in part.split(",") if mode]
    for mode in modes:
        if mode not in MODES:
            raise ValueError(f"--modes: '{mode}' is no mode; choose from {', '.join(MODES)}")
    if not modes:
        raise ValueError(f"--modes names no mode; choose from {', '.join(MODES)}")
    return tuple(dict.fromkeys(modes))


def read_breakdown(options: argparse.Namespace, modes: Sequence[str]) -> tuple[str, ...]:
    """Return the modes to run under the profiler.

    Raises:
        ValueError: If one does not run.
    """
    if options.breakdown is None:
        return tuple(modes)
    chosen = () if options.breakdown == "none" else tuple(mode for mode in options.breakdown.split(",") if mode)
    for mode in chosen:
        if mode not in modes:
            raise ValueError(f"--breakdown: '{mode}' is not among --modes {','.join(modes)}; or 'none'")
    return chosen


def read_repeats(options: argparse.Namespace, modes: Sequence[str]) -> dict[str, int]:
    """Return the timed runs of each mode.

    Raises:
        ValueError: If ``--repeats`` or ``--warmup`` is out of range, or names a mode that does not run.
    """
    repeats: dict[str, int] = {}
    default: int | None = None
    for part in options.repeats.split(","):
        mode, _, number = part.rpartition("=")
        if not number.isdecimal() or int(number) < 1:
            raise ValueError(f"--repeats ({options.repeats}): '{part}' must be a number of at least 1, or MODE=NUMBER")
        if mode and mode not in modes:
            raise ValueError(f"--repeats ({options.repeats}): '{mode}' is not among --modes {','.join(modes)}")
        if mode:
            repeats[mode] = int(number)
        elif default is None:
            default = int(number)
        else:
            raise ValueError(f"--repeats ({options.repeats}) has two numbers without a mode")
    if options.warmup < 0:
        raise ValueError(f"--warmup ({options.warmup}) must be at least 0")
    return {mode: repeats.get(mode, 5 if default is None else default) for mode in modes}


def arguments(argv: Sequence[str]) -> list[str]:
    """Return a command line without where its result goes: what repeats a measurement."""
    kept, skip = [], False
    for argument in argv:
        if skip or argument.startswith("--json="):
            skip = False
        elif argument == "--json":
            skip = True
        else:
            kept.append(argument)
    return kept


def write_early(result: dict[str, Any], options: argparse.Namespace) -> None:
    """Write what has been measured so far to the file of ``--json``: a long run that fails later keeps it."""
    if options.json != "-":
        common.write_json(result, options.json)


def environment(device: torch.device, name: str) -> dict[str, Any]:
    """Return device and versions, as JSON."""
    versions: dict[str, str | None] = {}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return {"device": name, "device_type": device.type, "torch": torch.__version__, "versions": versions}


def spread(seconds: Sequence[float]) -> dict[str, Any]:
    """Return median, minimum, maximum and number of timed runs."""
    return {
        "seconds_median": statistics.median(seconds),
        "seconds_min": min(seconds),
        "seconds_max": max(seconds),
        "repeats": len(seconds),
    }


def workload_rows(workload: Mapping[str, Any], executed: Mapping[str, int]) -> list[tuple[str, Any]]:
    """Return the lines of a table that say what ran; ``executed`` has the rows of each mode."""
    original, fewest = workload["original_tokens"], min(executed.values())
    return [
        ("workload", workload["source"]),
        ("trajectories", workload["trajectories"]),
        ("original tokens", original),
        ("rows executed", ", ".join(f"{rows:,} {mode}" for mode, rows in executed.items())),
        ("compression", f"{original / fewest:.2f}x"),
    ]


def tflops(value: float) -> str:
    """Return TFLOP/s with three digits, however slow the device is."""
    return f"{value:,.1f}" if value >= 100 else f"{value:.3g}"


def speeds(flops: Flops, seconds: float, ceilings: Mapping[str, Any]) -> dict[str, float]:
    """Return useful and executed TFLOP/s, and the latter's share of the dense GEMM of the same call."""
    return {
        "model_tflops_per_second": flops.model / seconds / 1e12,
        "hardware_tflops_per_second": flops.executed / seconds / 1e12,
        "hardware_utilisation": flops.executed / seconds / ceilings["gemm_flops_per_second"],
    }


def ratios(seconds: Mapping[str, float], operations: Mapping[str, int]) -> dict[str, Any]:
    """Compare ``compact`` with every other mode.

    Args:
        seconds: median of each mode.
        operations: executed operations of each mode; may be empty.

    Returns:
        ``speedup``: how many times as fast ``compact`` runs the same original tokens; ``flop_ratio``: how many times as
        many operations the other mode executes; ``share``: the first over the second. Each by ``compact/MODE``.
    """
    out: dict[str, Any] = {"speedup": {}, "flop_ratio": {}, "share": {}}
    for mode in seconds:
        if mode == "compact" or "compact" not in seconds:
            continue
        name = f"compact/{mode}"
        out["speedup"][name] = seconds[mode] / seconds["compact"]
        if operations:
            out["flop_ratio"][name] = operations[mode] / operations["compact"]
            out["share"][name] = out["speedup"][name] / out["flop_ratio"][name]
    return out
