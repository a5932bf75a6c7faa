"""Make torchtitan 0.2.2 importable and runnable on CPU-only machines and on hosts without its optional packages.

Call :func:`install` before the first ``import torchtitan``: ``torchtitan/__init__`` binds its device type everywhere at
import. Nothing here changes behaviour on a CUDA machine that has every package.

What breaks without it (probed on torchtitan 0.2.2):

* no accelerator: the device type falls back to "cuda" and ``set_device`` raises;
* ``torchtitan.train`` imports ``datasets`` and ``torch.utils.tensorboard`` unconditionally, which bare GPU hosts lack;
* ``maybe_enable_profiling`` passes ``None`` as an activity when there is no accelerator.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch._utils

_installed = False


class _CpuDevice(types.ModuleType):
    """``torch.cpu`` with the members of ``torch.cuda`` that torchtitan calls."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    @staticmethod
    def set_device(device: object) -> None:
        """Do nothing: there is one CPU."""

    @staticmethod
    def current_device() -> int:
        """Return 0: there is one CPU."""
        return 0

    @staticmethod
    def synchronize(*args: object) -> None:
        """Do nothing: CPU work is synchronous."""

    @staticmethod
    def get_device_name(*args: object) -> str:
        """Return the name that appears in logs."""
        return "CPU"

    @staticmethod
    def get_device_properties(*args: object) -> types.SimpleNamespace:
        """Return the physical memory in bytes as ``total_memory``."""
        return types.SimpleNamespace(total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))

    @staticmethod
    def memory_stats(*args: object) -> dict[str, int]:
        """Return the peak resident memory of the process (bytes) under the names of the CUDA allocator."""
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"active_bytes.all.peak": peak, "reserved_bytes.all.peak": peak, "num_alloc_retries": 0, "num_ooms": 0}

    @staticmethod
    def reset_peak_memory_stats(*args: object) -> None:
        """Do nothing: the operating system keeps the peak of the whole process."""

    @staticmethod
    def empty_cache() -> None:
        """Do nothing: the CPU allocator keeps no cache."""


def _missing(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is None
    except (ImportError, ValueError):
        return True


def _unavailable(package: str) -> Any:
    def fail(*args: object, **kwargs: object) -> None:
        raise ImportError(f"the package '{package}' is not installed; install it to use this feature")

    return fail


def _stub_datasets() -> None:
    # torchtitan.train imports `datasets` for its own text loaders, which harts_titan never builds.
    datasets = types.ModuleType("datasets")
    datasets.Dataset = type("Dataset", (), {})  # type: ignore[attr-defined]
    datasets.load_dataset = _unavailable("datasets")  # type: ignore[attr-defined]
    distributed = types.ModuleType("datasets.distributed")
    distributed.split_dataset_by_node = _unavailable("datasets")  # type: ignore[attr-defined]
    datasets.distributed = distributed  # type: ignore[attr-defined]
    sys.modules["datasets"] = datasets
    sys.modules["datasets.distributed"] = distributed


def _stub_tensorboard() -> None:
    stub = types.ModuleType("torch.utils.tensorboard")

    class SummaryWriter:
        def __init__(self, *args: object, **kwargs: object) -> None:
            raise ImportError(
                "metrics.enable_tensorboard is true but the package 'tensorboard' is not installed; "
                "install it or set metrics.enable_tensorboard = false"
            )

    stub.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    sys.modules["torch.utils.tensorboard"] = stub


def install() -> None:
    """Install the shims; a second call does nothing."""
    global _installed
    if _installed:
        return
    _installed = True
    if _missing("datasets"):
        _stub_datasets()
    if _missing("tensorboard"):
        _stub_tensorboard()
    if not torch.cuda.is_available():
        cpu = _CpuDevice("harts_titan._compat.cpu")
        get_module = torch._utils._get_device_module
        torch._utils._get_available_device_type = lambda: "cpu"
        # The original is a cached function; any callable serves.
        setattr(torch._utils, "_get_device_module", lambda name: cpu if name == "cpu" else get_module(name))  # noqa: B010


@contextlib.contextmanager
def profiling(
    config: Any, *, global_step: int = 0, base_folder: str = "", leaf_folder: str = ""
) -> Iterator[torch.profiler.profile | None]:
    """Yield a running profiler when ``profiling.enable_profiling`` is set, else ``None``.

    Replaces ``torchtitan.tools.profiling.maybe_enable_profiling``, which fails without an accelerator. Chrome traces go
    to ``{base_folder}/{save_traces_folder}/iteration_{step}/rank{r}_trace.json``.

    Args:
        config: torchtitan's ``Profiling`` section; frequencies in steps.
        global_step: step at which the profiler starts counting.
        base_folder: dump folder of the job.
        leaf_folder: folder below the iteration folder.

    Raises:
        ValueError: If ``profile_freq`` is smaller than warm-up plus active steps.
    """
    if not config.enable_profiling:
        yield None
        return
    wait = config.profile_freq - config.profiler_active - config.profiler_warmup
    if wait < 0:
        raise ValueError(
            f"profiling.profile_freq ({config.profile_freq}) is smaller than profiler_warmup + profiler_active "
            f"({config.profiler_warmup} + {config.profiler_active}); raise profile_freq"
        )
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0

    def write_trace(profiler: torch.profiler.profile) -> None:
        folder = os.path.join(base_folder, config.save_traces_folder, f"iteration_{profiler.step_num}", leaf_folder)
        os.makedirs(folder, exist_ok=True)
        profiler.export_chrome_trace(os.path.join(folder, f"rank{rank}_trace.json"))

    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(
        activities=activities,
        schedule=torch.profiler.schedule(wait=wait, warmup=config.profiler_warmup, active=config.profiler_active),
        on_trace_ready=write_trace,
        record_shapes=True,
    ) as profiler:
        profiler.step_num = global_step
        yield profiler
