"""The attention kernels on the CPU: ``attention_interpreted`` in one process with TRITON_INTERPRET=1."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs triton (pip install triton)")
pytest.importorskip("fla", reason="needs fla-core==0.6.0 (pip install 'harts_titan[dev]')")

ROOT = Path(__file__).parents[2]
CASES = {
    "trees",
    "forks_at_every_offset",
    "other_orders",
    "nothing_to_do",
    "views_in_place",
    "compiled",
    "unseen_rows_stay_unseen",
    "refuses",
}


def test_interpreted(tmp_path):
    """One test and one process: a start for every case would cost more than the cases."""
    path = tmp_path / "report.json"
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-m", "tests.numerics.attention_interpreted", str(path)]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(path.read_text())
    errors = [f"{case}: {result['error']}" for case, result in report.items() if "error" in result]
    assert not errors, "\n".join(errors)
    assert set(report) == CASES
