"""The Triton kernels on the CPU: ``interpreted_cases`` in one process with TRITON_INTERPRET=1."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs triton (pip install triton)")
pytest.importorskip("fla", reason="needs fla-core==0.6.0 (pip install 'harts_titan[dev]')")

ROOT = Path(__file__).parents[2]
CASES = (
    "kda_tree_equals_fla",
    "kda_handed_in_state",
    "kda_prefix_and_continuation",
    "kda_nothing_to_do",
    "kda_refuses",
    "conv_tree",
    "conv_external_rows",
    "tables_are_built_once",
    "compiled_without_breaks",
    "ops_are_well_formed",
    "backend_is_reachable",
)


def test_interpreted(tmp_path):
    """One test and one process: a start for every case, or on every worker, would cost more than the cases."""
    path = tmp_path / "report.json"
    # bfloat16 arithmetic and the autotuner's benchmark need a device; float16 and pinned configurations do not.
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-m", "tests.numerics.interpreted_cases", str(path)]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(path.read_text())
    errors = [f"{case}: {result['error']}" for case, result in report.items() if "error" in result]
    assert not errors, "\n".join(errors)
    assert set(report) == set(CASES)
