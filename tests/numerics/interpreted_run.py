"""Run a module of kernel cases in a process of its own: triton reads TRITON_INTERPRET when it is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_interpreted(module: str, path: Path) -> set[str]:
    """Run every case of ``tests.numerics.<module>`` under the interpreter; return the names of those that ran.

    One process serves all cases: a start for each, or on every worker, would cost more than the cases. bfloat16 and the
    autotuner's benchmark need a device; float16 and pinned configurations do not.

    Args:
        module: with a ``main`` that writes ``{case: {"error": traceback}}``, without the key where a case passed.
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
