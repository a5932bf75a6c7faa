"""What the device can do, measured in the call that is compared with it: copy bandwidth, dense and grouped GEMM."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from harts_titan.cli.timing import synchronize
from harts_titan.ops.grouped_mm import grouped_mm

_COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 20}
_GEMM = {"cuda": (65536, 2048, 8192), "cpu": (256, 64, 64)}
_GROUPED = {"cuda": (65536, 1536, 512, 128, 8), "cpu": (64, 32, 16, 4, 2)}
"""Rows, in, out, experts, experts of a row: the routed experts of Tiny."""


def time_runs(
    run: Callable[[], object], device: torch.device, *, repeats: int, warmup: int, flush: bool = False
) -> list[float]:
    """Return the seconds of each of ``repeats`` runs after ``warmup`` untimed ones, by device events where there are.

    Args:
        run: what is timed.
        device: it runs on.
        repeats: timed runs.
        warmup: runs before them.
        flush: write over the device's caches before each.
    """
    cache = torch.empty(256 << 20, dtype=torch.int8, device=device) if flush and device.type == "cuda" else None
    seconds = []
    for turn in range(warmup + repeats):
        if cache is not None:
            cache.zero_()
        synchronize(device)
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            synchronize(device)
            value = begin.elapsed_time(end) / 1e3
        else:
            started = time.perf_counter()
            run()
            value = time.perf_counter() - started
        if turn >= warmup:
            seconds.append(value)
    return seconds


def measure_ceilings(device: torch.device, *, repeats: int = 9) -> dict[str, Any]:
    """Measure copy bandwidth (bytes read and written) and GEMM rates in bfloat16 (float32 on a CPU).

    Returns:
        ``copy_bytes_per_second``, ``gemm_flops_per_second``, ``grouped_gemm_flops_per_second``, and the shapes.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    measured = {}
    with torch.no_grad():
        for name, make in (("copy_bytes", _copy), ("gemm_flops", _gemm), ("grouped_gemm_flops", _grouped_gemm)):
            run, work = make(device, dtype)
            seconds = time_runs(run, device, repeats=repeats, warmup=2)
            measured[f"{name}_per_second"] = work / statistics.median(seconds)
    if device.type == "cuda":
        del run
        torch.cuda.empty_cache()
    return measured | {
        "gemm_shape": list(_GEMM[device.type]),
        "grouped_gemm_shape": list(_GROUPED[device.type]),
        "dtype": str(dtype).removeprefix("torch."),
    }


def _copy(device: torch.device, _: torch.dtype) -> tuple[Callable[[], object], int]:
    source = torch.zeros(_COPY_BYTES[device.type], dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source), 2 * source.numel()


def _gemm(device: torch.device, dtype: torch.dtype) -> tuple[Callable[[], object], int]:
    m, n, k = _GEMM[device.type]
    a, b = torch.randn(m, k, device=device, dtype=dtype), torch.randn(k, n, device=device, dtype=dtype)
    return lambda: a @ b, 2 * m * n * k


def _grouped_gemm(device: torch.device, dtype: torch.dtype) -> tuple[Callable[[], object], int]:
    rows, dim, hidden, experts, chosen = _GROUPED[device.type]
    x = torch.randn(rows * chosen, dim, device=device, dtype=dtype)
    # As the model keeps its experts.
    w = torch.randn(experts, hidden, dim, device=device, dtype=dtype).transpose(1, 2)
    counts = torch.full((experts,), rows * chosen // experts, dtype=torch.int64, device=device)
    return lambda: grouped_mm(x, w, counts), 2 * rows * chosen * dim * hidden
