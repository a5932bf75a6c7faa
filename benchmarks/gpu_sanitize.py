"""Run every own Triton kernel on small odd sizes under compute-sanitizer; writes ``gpu_sanitize.json`` and logs.

    python benchmarks/gpu_sanitize.py OUT                         # all sections: kernels, control, and every tool
    python benchmarks/gpu_sanitize.py OUT --sections memcheck
    python benchmarks/gpu_sanitize.py --command                   # the sanitizer's command of every tool
    python benchmarks/gpu_sanitize.py --list                      # own kernels, and helpers that they call
    TRITON_INTERPRET=1 python benchmarks/gpu_sanitize.py OUT --dry-run

A run fails if a kernel of the package, or one value of a compile-time switch, was not reached; section ``kernels`` is
one without a sanitizer. ``control`` proves that the sanitizer and the filter work: a kernel that writes
past its tensor and whose threads race has to be reported. Only own kernels are instrumented: those of libraries are
slow to check, and split-K products of cuBLAS are reported as hazards. initcheck cannot be filtered (it would not see
what the others write); reads of unwritten memory show up in the numerical checks, whose allocations hold NaN.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from gpu_timing import DEVICE, DRY, ROOT, Report, run_sections
from own_kernels import kernels_of, recorded

# The command line of a folder starts with it.
LOGS = Path(sys.argv[1]) if len(sys.argv) > 1 else Path()
CONTROLLED = ("memcheck", "racecheck")
TOOLS = ("memcheck", "racecheck", "synccheck")
SUMMARY = re.compile(r"^=+ ((?:ERROR|RACECHECK) SUMMARY: .*)$", re.MULTILINE)
# Of choose_forward: the device's exponential or, on a CPU, Triton's; the interpreter has no bfloat16.
ONE_SIDED = {"LIBDEVICE", "WIDE"} if DRY else {"LIBDEVICE"}
# Launched as a dependent kernel, which the interpreter cannot do.
DEVICE_ONLY = {"ops.norm.kernels.scale_gradient"} if DRY else set()
CONTROL = "planted_faults"
TIMEOUT_S = 150


def run_cases(names: list[str]) -> Report:
    """Run cases in this process; return ``Launches`` as a report."""
    import torch
    from sanitize_cases import CASES

    torch.manual_seed(0)
    seconds = {}
    with recorded() as launches:
        for name in names or CASES:
            begin = time.perf_counter()
            CASES[name]()
            if not DRY:
                torch.cuda.synchronize()
            seconds[name] = round(time.perf_counter() - begin, 1)
    required, _ = kernels_of()
    missing = [] if names else launches.missing(required - DEVICE_ONLY, ONE_SIDED)
    return {"seconds": seconds, "kernels": launches.report(required), "missing": missing}


def kernels() -> Report:
    """Every case without a sanitizer; on a GPU in a process each, so that the kernels compile side by side."""
    from sanitize_cases import CASES

    if DRY:
        result = run_cases([])
        assert not result["missing"], f"never launched: {', '.join(result['missing'])}"
        return result
    with ThreadPoolExecutor(len(CASES)) as pool:
        done = pool.map(lambda case: subprocess.run(own_command(case), cwd=ROOT, check=False).returncode, CASES)
    failed = [case for case, status in zip(CASES, done, strict=True) if status]
    assert not failed, f"failed, see above: {failed}"
    return {"cases": list(CASES)}


# ---- the sanitizer


def own_command(*cases: str, record: Path | None = None) -> list[str]:
    command = [sys.executable, __file__, "--run", *cases]
    return command if record is None else [*command, "--record", str(record)]


def sanitizer_command(tool: str, names: list[str], target: list[str]) -> list[str]:
    """Instrument the kernels with these names only; Triton's kernels have the names of the functions."""
    program = shutil.which("compute-sanitizer") or "compute-sanitizer"
    filters = [part for name in names for part in ("--kernel-name", f"kernel_name={name}")]
    return [program, "--tool", tool, "--print-limit", "20", *filters, *target]


def environment_of(tool: str) -> dict[str, str]:
    """Without PyTorch's cache every tensor is an allocation of its own, whose ends memcheck knows."""
    return {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if tool == "memcheck" else {}


def kernel_names() -> list[str]:
    return sorted({name.rpartition(".")[2] for name in kernels_of()[0]})


def sanitize(tool: str, names: list[str], target: list[str], log: Path, port: int) -> Report:
    """Run a tool; return its summary line, and the number of errors in it."""
    command = sanitizer_command(tool, names, target)
    command[1:1] = ["--port", str(port)]
    begin = time.perf_counter()
    with log.open("w") as out:
        # A session of its own: the program under test ends with the tool.
        done = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **environment_of(tool)},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | str = done.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(done.pid, signal.SIGKILL)
            done.wait()
            status = f"stopped after {TIMEOUT_S} s"
    text = log.read_text(errors="replace")
    found = SUMMARY.findall(text)
    assert found, f"{tool} ended without a summary, exit status {status}: {text[-3000:]}"
    return {
        "tool": tool,
        "summary": found[-1],
        "errors": errors_of(found[-1]),
        "exit_status": status,
        "seconds": round(time.perf_counter() - begin, 1),
        "text": text[:3000],
    }


def errors_of(summary: str) -> int:
    """Errors (memcheck, synccheck) or hazards (racecheck), warnings included, that a summary line counts."""
    numbers = re.findall(r"(\d+) (?:errors?|hazards?|warnings?)", summary)
    if not numbers:
        raise ValueError(f"no number of errors in the summary {summary!r}")
    return max(map(int, numbers))


def checked(tool: str, port: int) -> Report:
    """All cases under a tool; red if it reports anything, or if a kernel did not run."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "launches.json"
        result = sanitize(tool, kernel_names(), own_command(record=record), LOGS / f"{tool}.log", port)
        assert result["errors"] == 0, f"{result['summary']}: {result['text']}"
        assert record.exists(), f"{tool}: the cases did not end, {result['exit_status']}: {result['text']}"
        ran = json.loads(record.read_text())
    assert not ran["missing"], f"{tool}: never launched: {', '.join(ran['missing'])}"
    del result["text"]
    result["kernels"] = len(ran["kernels"])
    result["launches"] = sum(one["launches"] for one in ran["kernels"].values())
    return result


def planted(tool: str, port: int) -> Report:
    """A kernel with faults is reported, and is not where the filter names others."""
    target = [sys.executable, __file__, "--planted"]
    report: Report = {}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        for name, names in (("named", [CONTROL]), ("others named", kernel_names())):
            result = sanitize(tool, names, target, log, port)
            assert (result["errors"] > 0) == (name == "named"), f"{tool}, {name}: {result}"
            report[name] = result["summary"]
    return report


@functools.cache
def started() -> dict[str, Future[Report]]:
    """All asked-for runs of the sanitizer side by side: most of their time is spent on one core of the host."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sections", default=",".join(SECTIONS))
    asked = parser.parse_known_args()[0].sections.split(",")
    jobs: list[tuple[str, Callable[[str, int], Report], str]] = []
    jobs += [(tool, checked, tool) for tool in TOOLS if tool in asked]
    jobs += [(f"control {tool}", planted, tool) for tool in CONTROLLED if "control" in asked]
    pool = ThreadPoolExecutor(len(jobs))
    ports = itertools.count(49_152, 32)
    return {name: pool.submit(run, tool, port) for (name, run, tool), port in zip(jobs, ports)}


def reported(tool: str) -> Report:
    result = started()[tool].result()
    print(f"{tool}: {result['summary']}; {result['kernels']} kernels, {result['launches']} launches", flush=True)
    return result


def control() -> Report:
    """Planted faults of the tools whose faults a Triton kernel can have on purpose."""
    result = {tool: started()[f"control {tool}"].result() for tool in CONTROLLED}
    print(f"control: {result}", flush=True)
    return result


def run_planted() -> None:
    """Launch the kernel of ``control``."""
    import torch
    from planted_kernel import planted_faults

    x = torch.zeros(32, dtype=torch.int32, device=DEVICE)
    planted_faults[(1,)](x, N=64, num_warps=2)
    torch.cuda.synchronize()


SECTIONS: dict[str, Callable[[], Report]] = {"kernels": kernels, "control": control}
SECTIONS |= {tool: functools.partial(reported, tool) for tool in TOOLS}


def main() -> int:
    if "--list" in sys.argv:
        for title, names in zip(("kernels", "helpers, compiled into kernels"), kernels_of(), strict=True):
            print(f"{title}:", *sorted(names), sep="\n  ")
        return 0
    if "--command" in sys.argv:
        for tool in TOOLS:
            variables = [f"{name}={value}" for name, value in environment_of(tool).items()]
            target = ["python", str(Path(__file__).relative_to(ROOT)), "--run"]
            print(*variables, shlex.join(sanitizer_command(tool, kernel_names(), target)))
        return 0
    if "--planted" in sys.argv:
        run_planted()
        return 0
    if "--run" in sys.argv:
        names = [name for name in sys.argv[sys.argv.index("--run") + 1 :] if name != "--dry-run"]
        record = Path(names[-1]) if "--record" in names else None
        result = run_cases(names[: names.index("--record")] if record else names)
        if record is not None:
            record.write_text(json.dumps(result))
        return 0
    return run_sections("gpu_sanitize", SECTIONS, doc=__doc__, default=("kernels",) if DRY else tuple(SECTIONS))


if __name__ == "__main__":
    sys.exit(main())
