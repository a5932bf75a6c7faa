"""Run a module of kernel cases in a process of its own: triton reads TRITON_INTERPRET when it is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]


def run_interpreted(module: str, path: Path) -> set[str]:
    """Run every case of ``tests.numerics.<module>`` under the interpreter; return the names of those that ran.

    One process serves all cases: a start for each, or on every worker, would cost more than the cases. bfloat16 and the
    autotuner's benchmark need a device; float16 and pinned configurations do not.

    Args:
        module: run as a program, it writes ``{case: {"error": traceback}}``, without the key where a case passed.
        path: where it writes that.

    Raises:
        AssertionError: If the process or a case failed.
    """
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-m", f"tests.numerics.{module}", str(path)]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(path.read_text())
    errors = [f"{case}: {result['error']}" for case, result in report.items() if "error" in result]
    assert not errors, "\n".join(errors)
    return set(report)


def run_cases(cases: Iterable[Callable[[], Any]], path: str, names: list[str]) -> None:
    """Run the cases of a module, on one thread, and write what they return; its half of :func:`run_interpreted`.

    Args:
        cases: functions that raise where something is wrong, and return figures for a reader.
        path: the report; it is there after every case, so that a process which is stopped leaves what it had.
        names: cases to run; none: all.
    """
    torch.set_num_threads(1)
    report: dict[str, dict[str, Any]] = {}
    for case in cases:
        if names and case.__name__ not in names:
            continue
        torch.manual_seed(0)
        begin = time.perf_counter()
        try:
            report[case.__name__] = {"result": case()}
        except Exception:
            report[case.__name__] = {"error": traceback.format_exc()}
        report[case.__name__]["seconds"] = round(time.perf_counter() - begin, 1)
        Path(path).write_text(json.dumps(report, indent=1, default=str), encoding="utf-8")
