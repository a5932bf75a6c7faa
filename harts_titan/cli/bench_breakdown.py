"""Where the time of a run goes: kernels of a torch.profiler trace, by kind, by range and by name."""

from __future__ import annotations

import functools
import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import harts_titan.ops

# Ordered: the first pattern found in a kernel's name decides. Kernels of this package are known by their op's folder.
_PATTERNS = (
    ("optimizer", r"adam|multi_tensor|foreach"),
    ("attention", r"flash|fmha|flex|attention|attn"),
    ("kda", r"kda|l2norm|recompute_w_u|chunk_(fwd|bwd|gated|local|scaled)|cumsum|delta|beta_sigmoid"),
    ("short_conv", r"conv"),
    ("grouped_gemm", r"grouped|groupproblem|group_gemm|moe_gemm"),
    ("gemm", r"gemm|nvjet|cublas|cutlass|xmma|matmul|aten::(mm|bmm|addmm|baddbmm|linear)"),
    ("head", r"logsumexp|log_softmax|cross_entropy|nll"),
    ("norm", r"rms|norm"),
    ("moe", r"topk|sort|radix|searchsorted|index|gather|scatter|histogram|bincount|permut"),
    ("copies", r"memcpy|memset|copy|fill|\bcat|zero_"),
    ("elementwise", r"elementwise|triton_|reduce|vectorized|aten::"),
)
_FOLDERS = {
    "kda": "kda",
    "attention": "attention",
    "short_conv": "short_conv",
    "norm": "norm",
    "activation": "activation",
    "rope": "activation",
    "moe": "moe",
    "grouped_mm": "grouped_gemm",
    "logprob": "head",
}
KINDS = tuple(dict.fromkeys([*(name for name, _ in _PATTERNS), *_FOLDERS.values(), "other"]))
"""Groups of kernels; ``elementwise`` holds what torch and its compiler generate, fused parts of any of the others."""
TOP = 20


@dataclass(frozen=True)
class Kernel:
    """One execution on the device, or all of an operator of a CPU; microseconds."""

    name: str
    start: float
    duration: float
    calls: int = 1


@functools.cache
def own_kernels() -> dict[str, str]:
    """Return the Triton kernels of this package: name -> kind, by the folder of the op."""
    found: dict[str, str] = {}
    for folder, kind in _FOLDERS.items():
        for file in sorted((Path(harts_titan.ops.__file__).parent / folder).glob("*.py")):
            for name in re.findall(r"@triton\.jit[^\n]*\n(?:@[^\n]*\n)*def (\w+)\(", file.read_text()):
                found.setdefault(name, kind)
    return found


def kind_of(name: str) -> str:
    """Return the kind of a kernel by its name, one of :data:`KINDS`."""
    if name in own_kernels():
        return own_kernels()[name]
    lowered = name.lower()
    return next((kind for kind, pattern in _PATTERNS if re.search(pattern, lowered)), "other")


def summarise(kernels: Iterable[Kernel], ranges: Iterable[Kernel] = (), *, timeline: bool = True) -> dict[str, Any]:
    """Group kernels.

    Args:
        kernels: executions.
        ranges: annotated intervals of the device, by name; ``harts::layer3`` and the like count as ``harts::layer``.
        timeline: whether starts mean anything: without them there is no span and no idle time.

    Returns:
        ``kinds`` and ``ranges``: ms, share of the busy time and number by kind and range; ``top``: the kernels that
        take most; ``busy_ms``, ``span_ms`` (first start to last end) and ``idle_ms``, in which no kernel ran.
    """
    kernels = sorted(kernels, key=lambda k: k.start)
    busy = _covered(kernels) if timeline else sum(k.duration for k in kernels)
    span = max((k.start + k.duration for k in kernels), default=0.0) - (kernels[0].start if kernels else 0.0)

    def table(groups: dict[str, list[Kernel]]) -> dict[str, dict[str, float]]:
        rows = {name: (sum(k.duration for k in group), sum(k.calls for k in group)) for name, group in groups.items()}
        ordered = sorted(rows.items(), key=lambda row: -row[1][0])
        return {n: {"ms": us / 1e3, "share": us / busy if busy else 0.0, "calls": count} for n, (us, count) in ordered}

    by_kind: dict[str, list[Kernel]] = defaultdict(list)
    by_name: dict[str, list[Kernel]] = defaultdict(list)
    by_range: dict[str, list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        by_kind[kind_of(kernel.name)].append(kernel)
        by_name[kernel.name].append(kernel)
    for interval in ranges:
        name = re.sub(r"\d+", "", interval.name)
        end = interval.start + interval.duration
        by_range[name] += [k for k in kernels if interval.start <= k.start < end]
    top = [{"name": name[:160], "kind": kind_of(name)} | row for name, row in list(table(by_name).items())[:TOP]]
    return {
        "kinds": table(by_kind),
        "ranges": table(by_range),
        "top": top,
        "kernels": sum(k.calls for k in kernels),
        "busy_ms": busy / 1e3,
        "span_ms": span / 1e3 if timeline else None,
        "idle_ms": (span - busy) / 1e3 if timeline else None,
    }


def _covered(kernels: list[Kernel]) -> float:
    """Return the time in which at least one kernel ran; kernels sorted by start."""
    total, end = 0.0, float("-inf")
    for kernel in kernels:
        stop = kernel.start + kernel.duration
        total += max(0.0, stop - max(kernel.start, end))
        end = max(end, stop)
    return total


def breakdown(run: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """Run once under the profiler and group what ran: kernels of a GPU, operators of a CPU by their own time.

    Args:
        run: what is profiled; it need not wait for the device.
        device: of the model.
    """
    if device.type != "cuda":
        with profile(activities=[ProfilerActivity.CPU]) as prof:
            run()
        own = [Kernel(row.key, 0.0, row.self_cpu_time_total, row.count) for row in prof.key_averages()]
        return summarise([k for k in own if k.name.startswith("aten::")], timeline=False)
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
        run()
        torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        prof.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return summarise(*read_trace(events))


def read_trace(events: list[dict[str, Any]]) -> tuple[list[Kernel], list[Kernel]]:
    """Return kernels (copies included) and annotated intervals of the device from a chrome trace."""
    kernels, ranges = [], []
    for event in events:
        if event.get("ph") != "X":
            continue
        category = event.get("cat", "")
        one = Kernel(event["name"], float(event["ts"]), float(event.get("dur", 0.0)))
        if category in ("kernel", "gpu_memcpy", "gpu_memset"):
            kernels.append(one)
        elif category == "gpu_user_annotation" and one.name.startswith("harts::"):
            ranges.append(one)
    return kernels, ranges
