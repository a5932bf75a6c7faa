"""What the GPU benchmarks share: timing, ceilings of the device, and a runner that records sections in a JSON file.

    from gpu_timing import copy_bandwidth, line, median_ms, rate, run_sections      # before anything imports triton

    def numerics() -> Report: ...          # raises: the section is recorded as failed, the others run
    def timing() -> Report:
        ceiling = copy_bandwidth()
        timed = median_ms(lambda: op(x))
        return {"op": rate(timed, num_bytes=..., bandwidth=ceiling)}

    if __name__ == "__main__":
        sys.exit(run_sections("gpu_norms", {"numerics": numerics, "timing": timing}, doc=__doc__))

Command line of every such script: ``OUT [--sections a,b] [--dry-run]``; the dry run is on a CPU under
``TRITON_INTERPRET=1`` with tiny sizes.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
DRY = "--dry-run" in sys.argv
if DRY and os.environ.get("TRITON_INTERPRET") != "1":
    sys.exit("--dry-run needs TRITON_INTERPRET=1 in the environment: triton reads it when it is imported")

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

DEVICE = "cpu" if DRY else "cuda"
Report = dict[str, Any]

_FLUSH_BYTES = 256 << 20
"""Several times the level 2 cache of any present GPU (50 MB on Hopper)."""
_SLEEP_CYCLES_PER_MS = 2_000_000
"""Clock cycles of one millisecond at most (2 GHz)."""
_flush_buffer: list[Tensor] = []


def median_ms(
    run: Callable[[], object],
    *,
    repeats: int = 7,
    warmup: int = 2,
    flush: bool = True,
    prepare: Callable[[], object] | None = None,
) -> Report:
    """Time ``run`` on the device, launch overhead hidden.

    Before every timed run the level 2 cache is overwritten, and the device sleeps as long as the host needs to queue
    the run, so that kernels follow each other without gaps caused by Python.

    Args:
        run: What is timed. If it synchronises, the host's time is in the result.
        repeats: Timed runs.
        warmup: Runs before them (compilation included).
        flush: Overwrite the level 2 cache first.
        prepare: Called before every run, outside of the timed interval.

    Returns:
        Milliseconds: ``median``, ``min``, ``max``; ``host`` is what the host needed to queue one run; ``runs``.
    """
    if DRY:
        if prepare is not None:
            prepare()
        begin = time.perf_counter()
        run()
        ms = (time.perf_counter() - begin) * 1e3
        return {"median": ms, "min": ms, "max": ms, "host": ms, "runs": 1}
    host = 0.0
    for _ in range(max(warmup, 1)):
        if prepare is not None:
            prepare()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        host = (time.perf_counter() - begin) * 1e3
    torch.cuda.synchronize()
    cycles = int(min(1.5 * host + 0.1, 50.0) * _SLEEP_CYCLES_PER_MS)
    pairs = []
    for _ in range(repeats):
        if prepare is not None:
            prepare()
        # Nothing of an earlier run may be pending: the sleep has to cover this run alone.
        torch.cuda.synchronize()
        if flush:
            flush_cache()
        torch.cuda._sleep(cycles)
        begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin_event.record()
        run()
        end_event.record()
        pairs.append((begin_event, end_event))
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in pairs]
    return {
        "median": statistics.median(times),
        "min": min(times),
        "max": max(times),
        "host": host,
        "runs": repeats,
    }


def flush_cache() -> None:
    """Overwrite the level 2 cache."""
    if DRY:
        return
    if not _flush_buffer:
        _flush_buffer.append(torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=DEVICE))
    _flush_buffer[0].zero_()


def copy_bandwidth(num_bytes: int = 1 << 30) -> float:
    """Bytes per second of a device copy, read and written bytes both counted."""
    if DRY:
        num_bytes = 1 << 16
    source = torch.empty(num_bytes // 2, dtype=torch.bfloat16, device=DEVICE).normal_()
    target = torch.empty_like(source)
    timed = median_ms(lambda: target.copy_(source), repeats=9)
    return 2 * num_bytes / (timed["median"] * 1e-3)


def gemm_rate(m: int = 65_536, n: int = 2048, k: int = 8192, dtype: torch.dtype = torch.bfloat16) -> float:
    """FLOP per second of a dense product (m, k) @ (k, n)."""
    if DRY:
        m, n, k, dtype = 32, 16, 8, torch.float32
    a, b = torch.randn(m, k, device=DEVICE, dtype=dtype), torch.randn(k, n, device=DEVICE, dtype=dtype)
    timed = median_ms(lambda: a @ b, repeats=9)
    return 2 * m * n * k / (timed["median"] * 1e-3)


def rate(
    timed: Report,
    *,
    num_bytes: float | None = None,
    bandwidth: float | None = None,
    flops: float | None = None,
    peak: float | None = None,
) -> Report:
    """Add GB/s and TFLOP/s, and the shares of the ceilings, to what :func:`median_ms` returned.

    Args:
        timed: From :func:`median_ms`.
        num_bytes: Compulsory traffic: every distinct input read once, every output written once.
        bandwidth: From :func:`copy_bandwidth`.
        flops: Work of one run.
        peak: From :func:`gemm_rate`.
    """
    seconds = timed["median"] * 1e-3
    result = dict(timed)
    if num_bytes is not None:
        result["bytes"] = num_bytes
        result["gb_per_s"] = num_bytes / seconds / 1e9
        if bandwidth is not None:
            result["share_of_copy"] = num_bytes / seconds / bandwidth
    if flops is not None:
        result["tflop_per_s"] = flops / seconds / 1e12
        if peak is not None:
            result["share_of_gemm"] = flops / seconds / peak
    return result


def line(name: str, timed: Report, **labels: object) -> None:
    """Print one alternative on one line."""
    parts = [f"{name:<36}", f"{timed['median']:9.4f} ms"]
    if "gb_per_s" in timed:
        parts.append(f"{timed['gb_per_s']:7.0f} GB/s")
    if "tflop_per_s" in timed:
        parts.append(f"{timed['tflop_per_s']:7.1f} TFLOP/s")
    parts += [f"{100 * timed[k]:5.1f} % of {k[9:]}" for k in ("share_of_copy", "share_of_gemm") if k in timed]
    parts += [f"{key}={value}" for key, value in labels.items()]
    print("  ".join(parts), flush=True)


def environment(packages: Sequence[str] = ("torch", "triton", "fla-core")) -> Report:
    """Commit, device and versions."""
    from importlib.metadata import PackageNotFoundError, version

    versions = {}
    for name in packages:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "absent"
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "commit": commit.stdout.strip() or "unknown",
        "device": "cpu, interpreted" if DRY else torch.cuda.get_device_name(0),
        "python": sys.version.split()[0],
        "cuda": torch.version.cuda,
        "versions": versions,
    }


def run_sections(
    name: str,
    sections: dict[str, Callable[[], Report]],
    *,
    doc: str | None = None,
    settings: Report | None = None,
    packages: Sequence[str] = ("torch", "triton", "fla-core"),
    default: Sequence[str] | None = None,
    argv: Sequence[str] | None = None,
) -> int:
    """Run sections in order and write ``OUT/<name>.json`` after each; a failed one is recorded with its traceback.

    Args:
        name: Stem of the file.
        sections: What can be run, in order.
        doc: Docstring of the script; its first line is the help text.
        settings: Recorded with the environment.
        packages: Whose versions are recorded.
        default: Sections that run without ``--sections``; all by default.
        argv: Arguments; the command line by default.

    Returns:
        Exit status: 1 if a section failed.
    """
    parser = argparse.ArgumentParser(description=doc or name, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help=f"folder for {name}.json")
    parser.add_argument("--sections", default=",".join(default or sections), help="of: " + ", ".join(sections))
    parser.add_argument("--dry-run", action="store_true", help="CPU, interpreter, tiny sizes")
    args = parser.parse_args(argv)
    names = args.sections.split(",")
    unknown = sorted(set(names) - set(sections))
    if unknown:
        parser.error(f"unknown sections {unknown}")
    if not DRY and not torch.cuda.is_available():
        parser.error("no CUDA device; use --dry-run with TRITON_INTERPRET=1 on a CPU")
    if DRY:
        torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    report: Report = {"environment": {**environment(packages), "settings": settings or {}}, "sections": {}}
    failed = []
    for section in names:
        print(f"== {section}", flush=True)
        begin = time.perf_counter()
        try:
            entry: Report = {"result": sections[section]()}
        except Exception:
            entry = {"error": traceback.format_exc()}
            failed.append(section)
        entry["seconds"] = round(time.perf_counter() - begin, 1)
        report["sections"][section] = entry
        # Written after every section: a run that is cut off keeps what it has.
        (args.out / f"{name}.json").write_text(json.dumps(report, indent=1, default=str))
        if "error" in entry:
            print(entry["error"][-3000:], flush=True)
        print(f"== {section}: {'FAILED' if 'error' in entry else 'ok'} in {entry['seconds']} s", flush=True)
        gc.collect()
        if not DRY:
            torch.cuda.empty_cache()
    return 1 if failed else 0
