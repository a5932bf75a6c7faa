"""benchmarks/gpu_sanitize.py reaches every Triton kernel of the package, and notices one that it does not reach."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu_sanitize.py"
sys.path.insert(0, str(ROOT / "benchmarks"))
import own_kernels  # noqa: E402

# Dependent launches need a device.
DEVICE_ONLY = {"scale_gradient"}


@pytest.mark.slow
def test_every_kernel_of_the_package_runs(tmp_path):
    pytest.importorskip("triton", reason="needs triton (pip install triton)")
    pytest.importorskip("fla", reason="needs fla-core==0.6.0 (pip install 'harts_titan[dev]')")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-W", "ignore", str(SCRIPT), str(tmp_path), "--dry-run"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads((tmp_path / "gpu_sanitize.json").read_text())["sections"]["kernels"]["result"]
    # Read from the text alone: whatever has a grid somewhere.
    text = "\n".join(file.read_text() for file in (ROOT / "harts_titan").rglob("*.py"))
    jitted = set(re.findall(r"@triton\.jit.*\ndef (\w+)\(", text))
    launched = {name for name in jitted if re.search(rf"\b{name}\[", text)}
    assert len(launched) > 40
    assert {name.rpartition(".")[2] for name in report["kernels"]} == launched - DEVICE_ONLY


SOURCE = {
    "ops/kernels.py": """
import triton
from harts_titan.ops.shared import shared_helper

@triton.jit
def helper(x):
    return x

@triton.jit(do_not_specialize=["N"])
def launched(x, N):
    return helper(x) + shared_helper(x) + both(x)

@triton.jit
def both(x):
    return x

@triton.jit
def forgotten(x):
    return x

def plain(x):
    return forgotten(x)
""",
    "ops/shared.py": "import triton\n\n@triton.jit\ndef shared_helper(x):\n    return x\n",
    "ops/launch.py": """
from harts_titan.ops.kernels import both, launched as run

def op(x):
    run[(1,)](x, 3)
    both[(1,)](x)
""",
}


@pytest.fixture
def package(tmp_path):
    for name, text in SOURCE.items():
        file = tmp_path / "harts_titan" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path / "harts_titan"


def test_kernels_and_helpers_are_told_apart(package):
    kernels, helpers = own_kernels.kernels_of(package)
    assert kernels == {"ops.kernels.launched", "ops.kernels.both", "ops.kernels.forgotten"}
    assert helpers == {"ops.kernels.helper", "ops.shared.shared_helper"}


def test_what_did_not_run_is_named(package):
    kernels, _ = own_kernels.kernels_of(package)
    launches = own_kernels.Launches()

    def kernel(name: str) -> SimpleNamespace:
        return SimpleNamespace(fn=SimpleNamespace(__module__="harts_titan.ops.kernels", __name__=name))

    launches.add(kernel("launched"), {"GATED": True, "N": 3})
    launches.add(kernel("both"), {"GATED": False, "WIDE": True})
    launches.add(kernel("both"), {"GATED": True, "WIDE": True})
    expected = ["ops.kernels.forgotten", "ops.kernels.launched with GATED = False"]
    assert launches.missing(kernels, {"WIDE"}) == expected
    assert launches.report(kernels)["ops.kernels.both"] == {"launches": 2, "variants": 2}


PROGRAM = """
import gpu_sanitize as s
log = "text\\n========= ERROR SUMMARY: 3 errors\\n"
log += "========= RACECHECK SUMMARY: 2 hazards displayed (0 errors, 2 warnings)\\n"
assert [s.errors_of(line) for line in s.SUMMARY.findall(log)] == [3, 2]
assert s.errors_of("RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)") == 0
try:
    s.errors_of("ERROR SUMMARY: unknown")
except ValueError:
    s.sys.argv.append("--command")
    s.main()
"""


def test_only_own_kernels_are_instrumented_and_summaries_are_read():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=SCRIPT.parent, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    commands = done.stdout.splitlines()
    assert len(commands) == 3 and commands[0].startswith("PYTORCH_NO_CUDA_MEMORY_CACHING=1 ")
    names = {name.rpartition(".")[2] for name in own_kernels.kernels_of()[0]}
    for command in commands:
        assert set(re.findall(r"--kernel-name kernel_name=(\w+)", command)) == names
