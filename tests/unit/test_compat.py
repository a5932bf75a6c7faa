"""Shims for torchtitan: machines without its optional packages or an accelerator, and its profiler."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torchtitan.config import Profiling

from harts_titan import _compat

ROOT = Path(__file__).resolve().parents[2]

# A finder in front of all others hides the packages, as if they had never been installed.
BLOCKED = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {packages!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocker())
import harts_titan
"""

WITHOUT_BOTH = """
# The trainer's module imports both packages at its top.
import harts_titan.train
import datasets, datasets.distributed
from torch.utils.tensorboard import SummaryWriter
from torchtitan.components.metrics import TensorBoardLogger

def refused(call):
    try:
        call()
    except ImportError as error:
        return str(error)
    raise AssertionError("accepted")

message = refused(lambda: datasets.load_dataset("c4"))
assert message == "the package 'datasets' is not installed; install it to use this feature", message
assert "'datasets' is not installed" in refused(lambda: datasets.distributed.split_dataset_by_node(None, 0, 1))
assert not isinstance([], datasets.Dataset)
for call in (lambda: SummaryWriter("folder"), lambda: TensorBoardLogger("folder")):
    message = refused(call)
    assert "metrics.enable_tensorboard is true" in message and "'tensorboard' is not installed" in message, message
"""

ONLY_ONE_IS_STUBBED = """
import datasets
import torch.utils.tensorboard as tensorboard
assert hasattr(datasets, "__file__"), "an installed package must not be replaced"
assert not hasattr(tensorboard, "__file__")
# A second call leaves the first one's stubs.
harts_titan._compat.install()
assert sys.modules["torch.utils.tensorboard"] is tensorboard
"""


def run(program: str, *packages: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", BLOCKED.format(packages=packages) + program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def test_without_datasets_and_tensorboard_the_trainer_imports_and_using_them_is_refused():
    run(WITHOUT_BOTH, "datasets", "tensorboard")


def test_only_what_is_missing_is_stubbed():
    pytest.importorskip("datasets", reason="needs an installed package to leave alone (pip install datasets)")
    run(ONLY_ONE_IS_STUBBED, "tensorboard")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the shim is for machines without an accelerator")
def test_torchtitan_runs_on_the_cpu():
    from torchtitan.tools import utils

    assert utils.device_type == "cpu"
    device = utils.device_module
    device.set_device(torch.device("cpu"))
    device.synchronize()
    device.empty_cache()
    device.reset_peak_memory_stats()
    assert device.current_device() == 0 and device.get_device_name() == "CPU"
    # What the shim does not have is torch.cpu's.
    assert device.device_count() == torch.cpu.device_count()
    stats = device.memory_stats()
    assert 0 < stats["active_bytes.all.peak"] == stats["reserved_bytes.all.peak"]
    assert stats["active_bytes.all.peak"] < device.get_device_properties().total_memory
    assert stats["num_ooms"] == stats["num_alloc_retries"] == 0


def profile(tmp_path: Path, steps: int, **settings) -> list[str]:
    config = Profiling(enable_profiling=True, save_traces_folder="traces", **settings)
    with _compat.profiling(config, base_folder=str(tmp_path), leaf_folder="leaf") as profiler:
        for _ in range(steps):
            with torch.profiler.record_function("harts::test"):
                torch.ones(3).sum()
            profiler.step()
    return sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.json"))


def test_traces_are_written_every_profile_freq_steps(tmp_path):
    written = profile(tmp_path, 7, profile_freq=3, profiler_active=1, profiler_warmup=1)
    assert written == [f"traces/iteration_{n}/leaf/rank0_trace.json" for n in (3, 6)]
    events = json.loads((tmp_path / written[0]).read_text())["traceEvents"]
    assert "harts::test" in {event.get("name") for event in events}


def test_profiler_starts_at_the_resumed_step(tmp_path):
    config = Profiling(enable_profiling=True, save_traces_folder="traces", profile_freq=2, profiler_warmup=1)
    with _compat.profiling(config, global_step=10, base_folder=str(tmp_path)) as profiler:
        for _ in range(2):
            profiler.step()
    assert [path.parent.name for path in tmp_path.rglob("*.json")] == ["iteration_12"]


def test_profiling_off_and_impossible_frequencies():
    with _compat.profiling(Profiling()) as profiler:
        assert profiler is None
    message = r"profiling.profile_freq \(3\) is smaller than profiler_warmup \+ profiler_active \(3 \+ 1\)"
    with (
        pytest.raises(ValueError, match=message),
        _compat.profiling(Profiling(enable_profiling=True, profile_freq=3)),
    ):
        pass
