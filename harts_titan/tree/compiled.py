"""The decorator of small compiled kernels that allocate nothing."""

from __future__ import annotations

import sys
from typing import Any

import numba
from numba.core.dispatcher import Dispatcher

# Counting references to array arguments would take most of the time of a function of a few nanoseconds. The option is
# not public (and unknown to numba's stubs): numba is pinned below the next version that has not been tried.
_options: dict[str, Any] = {"cache": True, "nogil": True, "_nrt": False}
kernel = numba.njit(**_options)


def planner_signatures() -> dict[str, set[str]]:
    """Return the argument types that each compiled function of the planner has machine code for in this process."""
    return {f"{f.__module__}.{f.__name__}": {str(signature) for signature in f.signatures} for f in _dispatchers()}


def compilations() -> int:
    """Return how often this process compiled a function of the planner because numba's cache did not have it."""
    return sum(sum(f.stats.cache_misses.values()) for f in _dispatchers())


def _dispatchers() -> set[Any]:
    modules = [module for name, module in sys.modules.items() if name.startswith(f"{__package__}.")]
    return {value for module in modules for value in vars(module).values() if isinstance(value, Dispatcher)}
