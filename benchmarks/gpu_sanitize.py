"""Run every own Triton kernel on small odd sizes under compute-sanitizer; writes ``gpu_sanitize.json`` and logs.

    python benchmarks/gpu_sanitize.py OUT                         # all sections: kernels, control, and every tool
    python benchmarks/gpu_sanitize.py OUT --sections racecheck --cases router,head
    python benchmarks/gpu_sanitize.py --command                   # the sanitizer's command of every tool
    python benchmarks/gpu_sanitize.py --list                      # own kernels, and helpers that they call
    TRITON_INTERPRET=1 python benchmarks/gpu_sanitize.py OUT --dry-run

Every case runs in a process of its own under every tool; ``<tool>.json`` says how each ended, and what it launched. A
tool fails if a case is not clean, or if the clean cases did not reach a kernel of the package or one value of a
compile-time switch; section ``kernels`` is one without a sanitizer. ``control`` proves that the sanitizer and the
filter work: a kernel that writes past its tensor and whose threads race has to be reported.

Only own kernels are instrumented: those of libraries are slow to check, and split-K products of cuBLAS are reported as
hazards. racecheck also fails on products of cuBLAS that the filter leaves out ("failed to handle a hardware
exception"), so that under it the host computes them. initcheck cannot be filtered (it would not see what the others
write); reads of unwritten memory show up in the numerical checks, whose allocations hold NaN.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
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
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from gpu_timing import DEVICE, DRY, ROOT, Report, run_sections
from own_kernels import Launches, fixed_switches, kernels_of, recorded

# The command line of a folder starts with it.
LOGS = Path(sys.argv[1]) if len(sys.argv) > 1 else Path()
CONTROLLED = ("memcheck", "racecheck")
TOOLS = ("racecheck", "memcheck", "synccheck")
SUMMARY = re.compile(r"^=+ ((?:ERROR|RACECHECK) SUMMARY: .*)$", re.MULTILINE)
INTERNAL = re.compile(r"^=+ (Internal Sanitizer Error: .*)$", re.MULTILINE)
# Of choose_forward: the device's exponential or, on a CPU, Triton's; the interpreter has no bfloat16.
ONE_SIDED = {"LIBDEVICE", "WIDE"} if DRY else {"LIBDEVICE"}
CONTROL = "planted_faults"
HOST_PRODUCTS = "--host-products"
TIMEOUT_S = 75
# For the runs of all tools together.
BUDGET_S = 95
WORKERS = min(14, os.cpu_count() or 1)


def run_cases(names: list[str], record: Path | None = None, *, host_products: bool = False) -> Launches:
    """Run cases in this process and write to ``record`` what they launched, also where one of them fails."""
    import torch
    from sanitize_cases import CASES

    if unknown := sorted(set(names) - set(CASES)):
        raise SystemExit(f"--run: unknown {unknown}; there are {', '.join(CASES)}")
    torch.manual_seed(0)
    ended: dict[str, Any] = {"finished": False, "error": "", "seconds": {}}
    with contextlib.ExitStack() as stack:
        if host_products:
            from host_products import on_host

            stack.enter_context(on_host())
        launches = stack.enter_context(recorded())
        try:
            for name in names:
                begin = time.perf_counter()
                CASES[name]()
                if not DRY:
                    torch.cuda.synchronize()
                ended["seconds"][name] = round(time.perf_counter() - begin, 1)
            ended["finished"] = True
        except Exception as error:
            ended["error"] = f"{type(error).__name__}: {error}"
            raise
        finally:
            if record is not None:
                record.write_text(json.dumps({**ended, "launches": launches.dumped()}))
    return launches


def missing(launches: Launches) -> list[str]:
    return launches.missing(kernels_of()[0], ONE_SIDED | fixed_switches())


def kernels() -> Report:
    """Every case without a sanitizer; on a GPU in a process each, so that the kernels compile side by side."""
    from sanitize_cases import CASES

    launches, cases = Launches(), asked_cases()
    if DRY:
        launches = run_cases(cases)
    else:
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(cases)) as pool:
            records = {case: Path(folder) / case for case in cases}
            commands = [own_command(case, record=records[case]) for case in cases]
            done = list(pool.map(lambda c: subprocess.run(c, cwd=ROOT, check=False).returncode, commands))
            failed = [case for case, status in zip(cases, done, strict=True) if status]
            assert not failed, f"failed, see above: {failed}"
            for record in records.values():
                launches.merge(Launches.loaded(json.loads(record.read_text())["launches"]))
    if cases == list(CASES):
        assert not missing(launches), f"never launched: {', '.join(missing(launches))}"
    return {"cases": cases, "kernels": launches.report(kernels_of()[0])}


def option(name: str) -> list[str]:
    """Comma-separated values of an option of the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument(name, dest="value")
    value = parser.parse_known_args()[0].value
    return value.split(",") if value else []


def asked_cases() -> list[str]:
    from sanitize_cases import CASES

    cases = option("--cases") or list(CASES)
    if unknown := sorted(set(cases) - set(CASES)):
        raise SystemExit(f"--cases: unknown {unknown}; there are {', '.join(CASES)}")
    return cases


# ---- the sanitizer


def own_command(*cases: str, record: Path | None = None, options: Sequence[str] = ()) -> list[str]:
    command = [sys.executable, __file__, "--run", *cases, *options, *(["--dry-run"] if DRY else [])]
    return command if record is None else [*command, "--record", str(record)]


def sanitizer_command(tool: str, names: list[str], target: list[str]) -> list[str]:
    """Instrument the kernels with these names only; Triton's kernels have the names of the functions."""
    program = shutil.which("compute-sanitizer") or "compute-sanitizer"
    filters = [part for name in names for part in ("--kernel-name", f"kernel_name={name}")]
    return [program, "--tool", tool, "--print-limit", "20", *filters, *target]


def options_of(tool: str) -> list[str]:
    return [HOST_PRODUCTS] if tool == "racecheck" else []


def environment_of(tool: str) -> dict[str, str]:
    """Blocking launches: an error is raised where it was made.

    Without PyTorch's cache every tensor is an allocation of its own, whose ends memcheck knows.
    """
    variables = {"CUDA_LAUNCH_BLOCKING": "1"}
    return variables | ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if tool == "memcheck" else {})


def kernel_names() -> list[str]:
    return sorted({name.rpartition(".")[2] for name in kernels_of()[0]})


def sanitize(
    tool: str, names: list[str], target: list[str], log: Path, port: int, timeout: float = TIMEOUT_S
) -> tuple[str, int | str, float]:
    """Run a tool; return what it printed, its exit status or why it was stopped, and seconds."""
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
            status: int | str = done.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(done.pid, signal.SIGKILL)
            done.wait()
            status = f"stopped after {timeout:.0f} s"
    return log.read_text(errors="replace"), status, round(time.perf_counter() - begin, 1)


def errors_of(summary: str) -> int:
    """Errors (memcheck, synccheck) or hazards (racecheck), warnings included, that a summary line counts."""
    numbers = re.findall(r"(\d+) (?:errors?|hazards?|warnings?)", summary)
    if not numbers:
        raise ValueError(f"no number of errors in the summary {summary!r}")
    return max(map(int, numbers))


def verdict(text: str, status: int | str, record: Report | None) -> tuple[str, str]:
    """How a case ended under a tool, and the message to it.

    Args:
        text: What the tool and the case printed.
        status: Exit status, or why the tool was stopped.
        record: What :func:`run_cases` wrote, if it came to that.

    Returns:
        ``clean``, ``errors`` (hazards are such), ``sanitizer failed``, ``stopped`` or ``case failed``; a message.
    """
    found, internal = SUMMARY.findall(text), INTERNAL.findall(text)
    after = f", last launched {record['launches']['last'] or 'nothing'}: {record['error']}" if record else ""
    if internal:
        # The tool counts this as a hazard.
        return "sanitizer failed", internal[0] + after
    if isinstance(status, str):
        return "stopped", status + after
    if not found:
        return "sanitizer failed", f"no summary, exit status {status}{after}: {text[-500:]}"
    if errors_of(found[-1]):
        return "errors", found[-1]
    if record is None or not record["finished"]:
        return "case failed", f"exit status {status}{after}: {text[-500:]}"
    return ("clean", found[-1]) if status == 0 else ("case failed", f"exit status {status}: {text[-500:]}")


def checked(tool: str, case: str, port: int, deadline: float) -> Report:
    """A case under a tool: how it ended, and what it launched."""
    timeout = min(TIMEOUT_S, deadline - time.perf_counter())
    if timeout < 5:
        return {"case": case, "verdict": "not run", "message": "no time left", "launches": Launches().dumped()}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "launches.json"
        target = own_command(case, record=path, options=options_of(tool))
        text, status, seconds = sanitize(tool, kernel_names(), target, LOGS / f"{tool}.{case}.log", port, timeout)
        record = json.loads(path.read_text()) if path.exists() else None
    ended, message = verdict(text, status, record)
    launches = record["launches"] if record else Launches().dumped()
    return {"case": case, "verdict": ended, "message": message, "seconds": seconds, "launches": launches}


def planted(tool: str, port: int) -> Report:
    """A kernel with faults is reported, and is not where the filter names others."""
    target = [sys.executable, __file__, "--planted"]
    report: Report = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, names in (("named", [CONTROL]), ("others named", kernel_names())):
            text, status, _ = sanitize(tool, names, target, Path(folder) / "log", port)
            found = SUMMARY.findall(text)
            assert found and not INTERNAL.findall(text), f"{tool}, {name}, {status}: {text[-3000:]}"
            assert (errors_of(found[-1]) > 0) == (name == "named"), f"{tool}, {name}: {text[-3000:]}"
            report[name] = found[-1]
    return report


@functools.cache
def started() -> dict[str, list[Future[Report]]]:
    """All asked-for runs of the sanitizer side by side: most of their time is spent on one core of the host."""
    asked, cases = option("--sections") or list(SECTIONS), asked_cases()
    deadline, pool, ports = time.perf_counter() + BUDGET_S, ThreadPoolExecutor(WORKERS), itertools.count(49_152, 32)
    jobs: dict[str, list[Future[Report]]] = {}
    for tool in CONTROLLED if "control" in asked else ():
        jobs[f"control {tool}"] = [pool.submit(planted, tool, next(ports))]
    for tool in (tool for tool in TOOLS if tool in asked):
        jobs[tool] = [pool.submit(checked, tool, case, next(ports), deadline) for case in cases]
    return jobs


def reported(tool: str) -> Report:
    """All cases under a tool; red if one is not clean, or if the clean ones did not reach a kernel."""
    from sanitize_cases import CASES

    results = [one.result() for one in started()[tool]]
    own, clean = kernels_of()[0], Launches()
    for result in results:
        launches = Launches.loaded(result.pop("launches"))
        result["kernels"] = launches.report(own)
        if result["verdict"] == "clean":
            clean.merge(launches)
        took = f" in {result['seconds']} s" if "seconds" in result else ""
        print(f"{tool} {result['case']}: {result['verdict']}{took}, {len(result['kernels'])} kernels", flush=True)
    verdicts = Counter(result["verdict"] for result in results)
    report: Report = {
        "tool": tool,
        "summary": ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common()),
        # Of the clean cases.
        "kernels": len(clean.report(own)),
        "launches": sum(clean.count[name] for name in own),
        "seconds": round(sum(result.get("seconds", 0) for result in results), 1),
        "cases": results,
        "never launched": missing(clean) if asked_cases() == list(CASES) else [],
    }
    (LOGS / f"{tool}.json").write_text(json.dumps(report, indent=1))
    print(f"{tool}: {report['summary']}; {report['kernels']} kernels, {report['launches']} launches", flush=True)
    bad = [f"{one['case']}: {one['verdict']}: {one['message']}" for one in results if one["verdict"] != "clean"]
    if report["never launched"]:
        bad.append(f"never launched in a clean case: {', '.join(report['never launched'])}")
    assert not bad, "\n".join([tool, *bad])
    return report


def add_results(path: Path) -> None:
    """Put what the tools said into the report of a run, also where it made their section fail."""
    if not path.exists():
        return
    report = json.loads(path.read_text())
    for tool in TOOLS:
        if "error" in report["sections"].get(tool, {}) and (LOGS / f"{tool}.json").exists():
            report["sections"][tool]["result"] = json.loads((LOGS / f"{tool}.json").read_text())
    path.write_text(json.dumps(report, indent=1))


def control() -> Report:
    """Planted faults of the tools whose faults a Triton kernel can have on purpose."""
    result = {tool: started()[f"control {tool}"][0].result() for tool in CONTROLLED}
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
            target = ["python", str(Path(__file__).relative_to(ROOT)), "--run", "CASE", *options_of(tool)]
            print(*variables, shlex.join(sanitizer_command(tool, kernel_names(), target)))
        return 0
    if "--planted" in sys.argv:
        run_planted()
        return 0
    if "--run" in sys.argv:
        parser = argparse.ArgumentParser()
        parser.add_argument("--run", nargs="+")
        parser.add_argument("--record", type=Path)
        parser.add_argument(HOST_PRODUCTS, action="store_true")
        args = parser.parse_known_args()[0]
        # Where a run that is stopped for its time was.
        faulthandler.dump_traceback_later(TIMEOUT_S - 5)
        run_cases(args.run, args.record, host_products=args.host_products)
        return 0
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--cases")
    argv = parser.parse_known_args()[1]
    default = ("kernels",) if DRY else tuple(SECTIONS)
    for tool in TOOLS:
        (LOGS / f"{tool}.json").unlink(missing_ok=True)
    status = run_sections("gpu_sanitize", SECTIONS, doc=__doc__, default=default, argv=argv)
    add_results(LOGS / "gpu_sanitize.json")
    return status


if __name__ == "__main__":
    sys.exit(main())
