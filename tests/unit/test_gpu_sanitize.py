"""benchmarks/gpu_sanitize.py reaches every Triton kernel of the package, and notices one that it does not reach."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu_sanitize.py"
sys.path.insert(0, str(ROOT / "benchmarks"))
import host_products  # noqa: E402
import own_kernels  # noqa: E402


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
    assert {name.rpartition(".")[2] for name in report["kernels"]} == launched


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

def late(x, wide, options):
    both[(1,)](x, FIXED=True, WIDE=True, OPEN=wide, num_warps=1)
    both[(2,)](x, FIXED=True, WIDE=False, num_warps=1)
    run[(1,)](x, 3, FIXED=True, **options)
""",
}


FAKE_TOOL = """#!{python}
import subprocess, sys
at = sys.argv.index("{python}")
tool = sys.argv[sys.argv.index("--tool") + 1]
case = sys.argv[sys.argv.index("--run") + 1]
if (tool, case) == ("racecheck", "rotary"):
    print("========= Internal Sanitizer Error: The Sanitizer failed to handle a hardware exception.")
    print("========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)")
    sys.exit(1)
status = subprocess.run(sys.argv[at:]).returncode
print("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)")
sys.exit(status)
"""


@pytest.mark.slow
def test_one_case_that_fails_hides_no_other(tmp_path):
    pytest.importorskip("triton", reason="needs triton (pip install triton)")
    pytest.importorskip("fla", reason="needs fla-core==0.6.0 (pip install 'harts_titan[dev]')")
    tool = tmp_path / "bin" / "compute-sanitizer"
    tool.parent.mkdir()
    tool.write_text(FAKE_TOOL.format(python=sys.executable))
    tool.chmod(0o755)
    path = f"{tool.parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1", "PATH": path}
    command = [sys.executable, "-W", "ignore", str(SCRIPT), str(tmp_path), "--dry-run"]
    command += ["--sections", "racecheck,memcheck", "--cases", "rotary,activations"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1, done.stdout[-3000:] + done.stderr[-3000:]
    sections = json.loads((tmp_path / "gpu_sanitize.json").read_text())["sections"]
    assert {name: "error" in section for name, section in sections.items()} == {"racecheck": True, "memcheck": False}
    found = {name: section["result"] for name, section in sections.items()}
    assert found["racecheck"]["summary"] == "1 sanitizer failed, 1 clean"
    assert 0 < found["racecheck"]["kernels"] < found["memcheck"]["kernels"]
    results = {(name, case["case"]): case for name, result in found.items() for case in result["cases"]}
    verdicts = {key: result["verdict"] for key, result in results.items()}
    assert verdicts.pop(("racecheck", "rotary")) == "sanitizer failed"
    assert len(verdicts) == 3 and set(verdicts.values()) == {"clean"}, done.stdout
    assert "hardware exception" in results["racecheck", "rotary"]["message"]
    assert results["racecheck", "rotary"]["kernels"] == {} and results["memcheck", "rotary"]["kernels"]
    assert results["racecheck", "activations"]["kernels"] == results["memcheck", "activations"]["kernels"]


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


def kernel(name: str) -> SimpleNamespace:
    return SimpleNamespace(fn=SimpleNamespace(__module__="harts_titan.ops.kernels", __name__=name))


def test_what_did_not_run_is_named(package):
    kernels, _ = own_kernels.kernels_of(package)
    launches = own_kernels.Launches()

    launches.add(kernel("launched"), {"GATED": True, "N": 3})
    launches.add(kernel("both"), {"GATED": False, "WIDE": True})
    launches.add(kernel("both"), {"GATED": True, "WIDE": True})
    expected = ["ops.kernels.forgotten", "ops.kernels.launched with GATED = False"]
    assert launches.missing(kernels, {"WIDE"}) == expected
    assert launches.report(kernels)["ops.kernels.both"] == {"launches": 2, "variants": 2}


def test_switches_that_the_source_sets_to_one_value_only(package):
    assert own_kernels.fixed_switches(package) == {"ops.kernels.both.FIXED"}
    launches = own_kernels.Launches()
    launches.add(kernel("both"), {"FIXED": True, "OPEN": True})
    launches.add(kernel("launched"), {"FIXED": True})
    missing = launches.missing({"ops.kernels.both", "ops.kernels.launched"}, own_kernels.fixed_switches(package))
    assert missing == ["ops.kernels.both with OPEN = False", "ops.kernels.launched with FIXED = False"]


def test_a_dependent_launch_needs_a_plain_one(package):
    launches = own_kernels.Launches()
    launches.add(kernel("both"), {"launch_pdl": True})
    launches.add(kernel("launched"), {})
    required = {"ops.kernels.both", "ops.kernels.launched"}
    assert launches.missing(required, set()) == ["ops.kernels.both with launch_pdl = False"]
    launches.add(kernel("both"), {})
    assert launches.missing(required, set()) == []


def test_launches_of_several_processes_are_one(package):
    kernels, _ = own_kernels.kernels_of(package)
    parts = own_kernels.Launches(), own_kernels.Launches()
    parts[0].add(kernel("launched"), {"GATED": True})
    parts[1].add(kernel("launched"), {"GATED": False})
    parts[1].add(kernel("both"), {"N": 2})
    merged = own_kernels.Launches()
    for part in parts:
        assert part.missing(kernels, set())
        merged.merge(own_kernels.Launches.loaded(json.loads(json.dumps(part.dumped()))))
    assert merged.missing(kernels - {"ops.kernels.forgotten"}, set()) == []
    assert merged.report(kernels)["ops.kernels.launched"] == {"launches": 2, "variants": 2}
    assert parts[1].last == own_kernels.Launches.loaded(parts[1].dumped()).last == "ops.kernels.both"


PROGRAM = """
import gpu_sanitize as s
log = "text\\n========= ERROR SUMMARY: 3 errors\\n"
log += "========= RACECHECK SUMMARY: 2 hazards displayed (0 errors, 2 warnings)\\n"
assert [s.errors_of(line) for line in s.SUMMARY.findall(log)] == [3, 2]
assert s.errors_of("RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)") == 0
clean = "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\\n"
ran = {"finished": True, "error": "", "launches": {"last": "one"}}
broken = {**ran, "finished": False, "error": "RuntimeError: illegal"}
internal = "========= Internal Sanitizer Error: The Sanitizer failed.\\n"
internal += "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\\n"
for text, status, record, expected in (
    (clean, 0, ran, ("clean", clean[10:-1])),
    (log, 0, ran, ("errors", "RACECHECK SUMMARY: 2 hazards displayed (0 errors, 2 warnings)")),
    (internal, 1, broken, ("sanitizer failed", "Internal Sanitizer Error: The Sanitizer failed., last launched one")),
    (clean, "stopped after 9 s", None, ("stopped", "stopped after 9 s")),
    ("nothing", 1, None, ("sanitizer failed", "no summary, exit status 1: nothing")),
    (clean, 1, broken, ("case failed", "exit status 1, last launched one: RuntimeError: illegal")),
    (clean, 0, None, ("case failed", "exit status 0")),
    (clean, 3, ran, ("case failed", "exit status 3")),
):
    ended, message = s.verdict(text, status, record)
    assert ended == expected[0] and message.startswith(expected[1]), (ended, message)
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
    assert [re.findall(r"--tool (\w+)", command) for command in commands] == [
        ["racecheck"],
        ["memcheck"],
        ["synccheck"],
    ]
    assert all("CUDA_LAUNCH_BLOCKING=1 " in command for command in commands)
    assert ["PYTORCH_NO_CUDA_MEMORY_CACHING=1 " in command for command in commands] == [False, True, False]
    assert ["--host-products" in command for command in commands] == [True, False, False]
    names = {name.rpartition(".")[2] for name in own_kernels.kernels_of()[0]}
    for command in commands:
        assert set(re.findall(r"--kernel-name kernel_name=(\w+)", command)) == names


def test_products_on_the_host():
    left, right, offsets = torch.randn(5, 7).bfloat16(), torch.randn(7, 3).bfloat16(), torch.tensor([2, 2, 5]).int()
    stack = torch.randn(3, 7, 4).bfloat16()
    exact = left.double() @ right.double()
    with host_products.on_host("CPU"):
        total = torch.ones(5, 3)
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
        wide = torch.mm(left, right, out_dtype=torch.float32)
        rows = torch._grouped_mm(left, stack, offs=offsets)
        columns = torch._grouped_mm(left.t(), torch.ones(5, 4).bfloat16(), offs=offsets)
        # In a thread of autograd's, inside other ops, and into a tensor.
        x = left.float().requires_grad_()
        (x @ right.float()).sum().backward()
        out = torch.empty(5, 3)
        torch.mm(left.float(), right.float(), out=out)
    assert wide.dtype == torch.float32 and rows.dtype == torch.bfloat16
    for value in (wide, out, total - 1):
        torch.testing.assert_close(value.double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.grad, right.float().sum(1).expand(5, 7))
    expected = torch.cat([left[:2].float() @ stack[0].float(), left[2:].float() @ stack[2].float()])
    torch.testing.assert_close(rows, expected.bfloat16())
    sums = torch.stack([part.float().sum(0) for part in left.split([2, 0, 3])])
    torch.testing.assert_close(columns, sums.bfloat16()[:, :, None].expand(3, 7, 4))
    # And the library's again afterwards.
    assert torch.equal(left.double() @ right.double(), exact)
