"""The decorator of small compiled kernels that allocate nothing."""

from __future__ import annotations

from typing import Any

import numba

# Counting references to array arguments would take most of the time of a function of a few nanoseconds. The option is
# not public (and unknown to numba's stubs): numba is pinned below the next version that has not been tried.
_options: dict[str, Any] = {"cache": True, "nogil": True, "_nrt": False}
kernel = numba.njit(**_options)
