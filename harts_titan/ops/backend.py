"""Which implementation of an op runs: one registry, one choice function, one log line per choice.

Automatic choice: on CUDA the first usable of the op's device backends, elsewhere its plain PyTorch one. A forced
backend that cannot run is an error, never a silent replacement.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
from dataclasses import dataclass

import torch

logger = logging.getLogger(__name__)

AUTO = "auto"

_HALF = (torch.bfloat16, torch.float16)
_UP_TO_FLOAT32 = (*_HALF, torch.float32)


@dataclass(frozen=True)
class _Backend:
    """One implementation: where it runs, what it imports, and which of the automatic lists it belongs to."""

    name: str
    dtypes: tuple[torch.dtype, ...] | None = None
    """Dtypes it accepts; None: every floating dtype."""
    cuda_only: bool = False
    module: str | None = None
    """Module that holds it; imported on first use, so that its absence is a reason and not a crash."""
    requires: tuple[str, ...] = ()
    """Importable package names the module needs."""
    install: str = ""
    capabilities: tuple[int, ...] | None = None
    """Major compute capabilities it supports; None: all."""
    auto_cuda: bool = False
    auto_cpu: bool = False
    slow_on_cuda: bool = False
    """Automatic choice of it on CUDA is a fallback worth a warning."""
    traceable: bool = True
    """torch.compile can trace it; otherwise a compiled layer runs it through :mod:`harts_titan.ops.untraced`."""


_BACKENDS: dict[str, tuple[_Backend, ...]] = {
    "kda": (
        _Backend(
            "triton",
            dtypes=_UP_TO_FLOAT32,
            cuda_only=True,
            module="harts_titan.ops.kda.triton_op",
            requires=("triton",),
            install="pip install triton",
            auto_cuda=True,
        ),
        _Backend("reference", auto_cuda=True, auto_cpu=True, slow_on_cuda=True, traceable=False),
        # Never chosen automatically: it refuses the states that mode compact hands over.
        _Backend(
            "fla",
            dtypes=_HALF,
            cuda_only=True,
            module="harts_titan.ops.kda.fla_op",
            requires=("triton", "fla"),
            install="pip install fla-core==0.6.0",
            traceable=False,
        ),
        _Backend("recurrent", traceable=False),
    ),
    "short_conv": (
        _Backend(
            "triton",
            dtypes=_UP_TO_FLOAT32,
            cuda_only=True,
            module="harts_titan.ops.short_conv.triton_op",
            requires=("triton",),
            install="pip install triton",
            auto_cuda=True,
        ),
        _Backend("reference", auto_cuda=True, auto_cpu=True, slow_on_cuda=True, traceable=False),
    ),
    "attention": (
        _Backend(
            "fa4",
            dtypes=_HALF,
            cuda_only=True,
            module="harts_titan.ops.attention.fa4",
            requires=("flash_attn", "cutlass"),
            install="pip install 'harts_titan[gpu]'",
            capabilities=(9, 10, 11),
            auto_cuda=True,
        ),
        _Backend(
            "triton",
            dtypes=_UP_TO_FLOAT32,
            cuda_only=True,
            module="harts_titan.ops.attention.triton_op",
            requires=("triton",),
            install="pip install triton",
        ),
        _Backend(
            "flex",
            dtypes=_UP_TO_FLOAT32,
            requires=("torch.nn.attention.flex_attention",),
            install="pip install 'torch>=2.11'",
            auto_cuda=True,
            traceable=False,
        ),
        _Backend("path", auto_cuda=True, auto_cpu=True, slow_on_cuda=True, traceable=False),
        _Backend("dense", traceable=False),
    ),
    "grouped_mm": (
        _Backend("grouped_mm", dtypes=_UP_TO_FLOAT32, auto_cuda=True, auto_cpu=True),
        _Backend("loop", auto_cuda=True, auto_cpu=True, slow_on_cuda=True, traceable=False),
    ),
    "logprob": (
        _Backend(
            "triton",
            dtypes=_UP_TO_FLOAT32,
            cuda_only=True,
            module="harts_titan.ops.logprob.triton_op",
            requires=("triton",),
            install="pip install triton",
            auto_cuda=True,
        ),
        _Backend("reference", auto_cuda=True, auto_cpu=True, slow_on_cuda=True),
    ),
    "moe": (
        _Backend(
            "triton",
            dtypes=_UP_TO_FLOAT32,
            cuda_only=True,
            module="harts_titan.ops.moe.triton_op",
            requires=("triton",),
            install="pip install triton",
            auto_cuda=True,
        ),
        _Backend("reference", auto_cuda=True, auto_cpu=True, slow_on_cuda=True),
    ),
    "norm": (
        _Backend(
            "triton",
            dtypes=_UP_TO_FLOAT32,
            cuda_only=True,
            module="harts_titan.ops.norm.triton_op",
            requires=("triton",),
            install="pip install triton",
            auto_cuda=True,
        ),
        _Backend("reference", auto_cuda=True, auto_cpu=True, slow_on_cuda=True),
    ),
    "activation": (
        _Backend(
            "triton",
            dtypes=_UP_TO_FLOAT32,
            cuda_only=True,
            module="harts_titan.ops.activation.triton_op",
            requires=("triton",),
            install="pip install triton",
            auto_cuda=True,
        ),
        _Backend("reference", auto_cuda=True, auto_cpu=True, slow_on_cuda=True),
    ),
    "rope": (
        _Backend(
            "triton",
            dtypes=_UP_TO_FLOAT32,
            cuda_only=True,
            module="harts_titan.ops.rope.triton_op",
            requires=("triton",),
            install="pip install triton",
            auto_cuda=True,
        ),
        _Backend("reference", auto_cuda=True, auto_cpu=True, slow_on_cuda=True),
    ),
}


@dataclass(frozen=True)
class OpsBackends:
    """Backend of each op: "auto" or a name from :func:`backend_names`.

    Raises:
        ValueError: If a name is unknown.
    """

    kda: str = AUTO
    short_conv: str = AUTO
    attention: str = AUTO
    grouped_mm: str = AUTO

    def __post_init__(self) -> None:
        for op, name in vars(self).items():
            if name != AUTO and name not in backend_names(op):
                raise ValueError(f"ops.{op} = {name!r} is unknown; use 'auto' or one of {list(backend_names(op))}")


def backend_names(op: str) -> tuple[str, ...]:
    """Names of the implementations of ``op``, fastest first.

    Raises:
        ValueError: If ``op`` is unknown.
    """
    if op not in _BACKENDS:
        raise ValueError(f"unknown op {op!r}; ops are {list(_BACKENDS)}")
    return tuple(b.name for b in _BACKENDS[op])


def unavailable_reason(op: str, name: str, *, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why backend ``name`` of ``op`` cannot run ``dtype`` tensors on ``device``; None if it can.

    Raises:
        ValueError: If ``op`` or ``name`` is unknown.
    """
    backend = next(b for b in _BACKENDS[op] if b.name == _known(op, name))
    if backend.dtypes is not None and dtype not in backend.dtypes:
        return f"it accepts {', '.join(_short(d) for d in backend.dtypes)}, not {_short(dtype)}"
    if backend.cuda_only and device.type != "cuda" and not _interpreted(backend):
        return f"it needs CUDA tensors, the inputs are on {device.type}"
    if backend.capabilities is not None and device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if major not in backend.capabilities:
            return f"it runs on compute capabilities {backend.capabilities}, the device has {major}.{minor}"
    for package in backend.requires:
        if not _has_package(package):
            return f"package {package!r} is not installed ({backend.install})"
    if backend.module is not None:
        error = _import_error(backend.module)
        if error is not None:
            return f"{backend.module} does not import: {error} ({backend.install})"
    return None


@torch.compiler.assume_constant_result
def is_traceable(op: str, name: str) -> bool:
    """Whether torch.compile can trace backend ``name`` of ``op``.

    Raises:
        ValueError: If ``op`` has no such backend.
    """
    return next(b for b in _BACKENDS[op] if b.name == _known(op, name)).traceable


# A compiled layer takes the answer as a constant: it depends on the op, the device and the dtype only.
@torch.compiler.assume_constant_result
def choose(op: str, forced: str = AUTO, *, device: torch.device | str, dtype: torch.dtype) -> str:
    """Name of the implementation of ``op`` that runs.

    Args:
        op: "kda", "short_conv", "attention" or "grouped_mm".
        forced: "auto", or the name of a backend that must run.
        device: Device of the inputs.
        dtype: Dtype of the inputs.

    Returns:
        The backend's name. Each (op, backend) is logged once; a slow automatic choice on CUDA as a warning that says
        why the faster ones were passed over.

    Raises:
        ValueError: If ``op`` or ``forced`` is unknown, or the forced backend cannot run.
    """
    device = torch.device(device)
    if forced != AUTO:
        reason = unavailable_reason(op, forced, device=device, dtype=dtype)
        if reason is not None:
            usable = [b for b in backend_names(op) if unavailable_reason(op, b, device=device, dtype=dtype) is None]
            raise ValueError(f"backend {forced!r} of {op} cannot run: {reason}; usable here: {['auto', *usable]}")
        _log_choice(op, forced, "forced", False)
        return forced
    skipped: list[str] = []
    backend_names(op)
    for backend in _BACKENDS[op]:
        if not (backend.auto_cuda if device.type == "cuda" else backend.auto_cpu):
            continue
        reason = unavailable_reason(op, backend.name, device=device, dtype=dtype)
        if reason is None:
            why = "; ".join(skipped) or f"automatic on {device.type}"
            _log_choice(op, backend.name, why, backend.slow_on_cuda and device.type == "cuda")
            return backend.name
        skipped.append(f"{backend.name}: {reason}")
    raise ValueError(f"no backend of {op} runs {_short(dtype)} on {device.type}: {'; '.join(skipped)}")


def _known(op: str, name: str) -> str:
    if name not in backend_names(op):
        raise ValueError(f"{op} has no backend {name!r}; use 'auto' or one of {list(backend_names(op))}")
    return name


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _interpreted(backend: _Backend) -> bool:
    # Triton's interpreter runs the same kernels on CPU tensors; it is set for kernel tests only.
    return backend.name in ("triton", "fla") and os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def _has_package(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


@functools.cache
def _import_error(module: str) -> str | None:
    try:
        importlib.import_module(module)
    except ImportError as error:
        return str(error)
    return None


_logged: set[tuple[str, str]] = set()


def _log_choice(op: str, name: str, why: str, slow: bool) -> None:
    if (op, name) in _logged:
        return
    _logged.add((op, name))
    if slow:
        logger.warning("%s runs its plain PyTorch backend %r on CUDA, far slower than the kernels: %s", op, name, why)
    else:
        logger.info("%s backend: %s (%s)", op, name, why)
