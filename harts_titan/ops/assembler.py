"""Which ptxas assembles Triton's kernels for Hopper."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import subprocess
from pathlib import Path

_SOUND = (12, 9)
_VARIABLE = "TRITON_PTXAS_PATH"


@functools.cache
def require_sound_ptxas() -> None:
    """Make Triton assemble kernels of compute capability 9.0 with a ptxas that gets their operands right.

    ptxas 12.8 builds some descriptors of ``wgmma`` operands from a wrong register (both halves of the 64-bit sum of a
    widened shared memory address and a constant, where the sum lies in a later block than the address): the products
    read other operands or addresses outside of shared memory. Triton 3.6 uses that release for Hopper, and brings 12.9
    for Blackwell along; 12.9 assembles Hopper's kernels correctly. A path set by the user stays as it is.

    Call it before the first kernel with ``tl.dot`` is compiled.

    Raises:
        RuntimeError: If no ptxas of release 12.9 or later is at hand.
    """
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        return
    tools = Path(spec.origin).parent / "backends" / "nvidia" / "bin"
    chosen = Path(os.environ.get(_VARIABLE) or tools / "ptxas")
    if _release(chosen) >= _SOUND:
        return
    other = tools / "ptxas-blackwell"
    if _VARIABLE in os.environ or _release(other) < _SOUND:
        raise RuntimeError(
            f"{chosen} is of release {'.'.join(map(str, _release(chosen)))}, which assembles Hopper products "
            f"wrongly; set {_VARIABLE} to a ptxas of CUDA 12.9 or later"
        )
    os.environ[_VARIABLE] = str(other)


def _release(path: Path) -> tuple[int, ...]:
    """CUDA release of a ptxas; (0, 0) if it does not run."""
    try:
        output = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return (0, 0)
    found = re.search(r"release (\d+)\.(\d+)", output)
    return tuple(map(int, found.groups())) if found else (0, 0)
