"""The head's and the experts' kernels: in Triton's interpreter here, and on a CUDA device where there is one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="needs triton (pip install triton)")

ROOT = Path(__file__).parents[2]
CASES = (
    "head_values_and_gradients",
    "head_logits",
    "head_large_logits",
    "head_blocks_and_rows",
    "head_nothing",
    "head_shards",
    "moe_choice",
    "moe_routes",
    "moe_rows",
    "moe_experts",
    "moe_router",
    "compiled",
    "ops_are_well_formed",
)


def test_interpreted(tmp_path):
    """One process for all cases: triton reads TRITON_INTERPRET when it is imported."""
    pytest.importorskip("fla", reason="the interpreter's work-arounds need fla-core==0.6.0")
    path = tmp_path / "report.json"
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-m", "tests.numerics.head_moe_checks", str(path)]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(path.read_text())
    errors = [f"{case}: {error}" for case, error in report.items() if error]
    assert not errors, "\n".join(errors)
    assert set(report) == set(CASES)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("case", CASES)
def test_on_the_device(case, dtype):
    from tests.numerics import head_moe_checks as checks

    getattr(checks, case)(checks.Setting("cuda", dtype))
