"""One launch configuration per kernel and architecture.

Two configurations of a kernel may round differently, so none is chosen at run time: what a configuration computes was
checked against float64 and timed before it was entered here. On the CPU (Triton's interpreter) only tile widths count.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from harts_titan.ops.assembler import require_sound_ptxas


class Config(NamedTuple):
    """Tile widths (cut to the head's width: V for ``BV``, K for others), constants, warps and pipeline stages."""

    tiles: dict[str, int]
    num_warps: int
    num_stages: int
    constants: dict[str, Any] | None = None


HOPPER: dict[str, Config] = {
    "chunk_gates": Config({"BK": 64}, 4, 1, {"WIDE": False}),
    # 255 registers without spills; W as wide as U (BW 128) spills 4 bytes and is slower.
    "chunk_forward": Config({"BK": 32, "BV": 128, "BW": 64}, 4, 3, {"WIDE": False, "SOLVE": "tf32", "BC": 32}),
    "state_scan_forward": Config({"BV": 32}, 4, 3),
    "chunk_output": Config({"BK": 64, "BV": 128}, 4, 2),
    "chunk_output_gradient": Config({"BV": 128}, 4, 1),
    "state_scan_backward": Config({"BV": 32}, 4, 3),
    "chunk_backward_values": Config({"BK": 64}, 4, 2),
    # Both halves of V are on their way before the first product: three stages against two, 4.4 and 4.6 ms.
    "chunk_backward_keys": Config({"BK": 32, "BV": 64}, 4, 3, {"WIDE": False, "PARTS": 2, "BC": 32}),
    "chunk_backward_norms": Config({}, 4, 1, {"BS": 16}),
}
"""Compute capability 9.0, two-byte dtypes."""


def launch(kernel: str, like: Tensor, *, K: int, V: int) -> dict[str, Any]:
    """Launch options of ``kernel`` for tensors like ``like`` (dtype and device).

    Args:
        kernel: Key of ``HOPPER``.
        like: A tensor of the kernel's dtype on its device.
        K: Key width.
        V: Value width.
    """
    config = HOPPER[kernel]
    options: dict[str, Any] = {name: min(size, V if name == "BV" else K) for name, size in config.tiles.items()}
    options |= config.constants or {}
    if "WIDE" in options:
        # float16 does not hold the decays' factors; float32 inputs keep their precision.
        options["WIDE"] = options["WIDE"] or like.dtype != torch.bfloat16
        if options["WIDE"] and "PARTS" in options:
            options["PARTS"] = 1
    return options | _warps_and_stages(like.device, like.element_size(), config.num_warps, config.num_stages)


@functools.cache
def _warps_and_stages(device: torch.device, itemsize: int, warps: int, stages: int) -> dict[str, int]:
    if device.type != "cuda":
        return {"num_warps": 4, "num_stages": 1}
    capability = torch.cuda.get_device_capability(device)
    if capability[0] == 9:
        require_sound_ptxas()
    if capability[0] >= 10:
        # Triton before 3.8 races in a tl.dot recurrence on Blackwell with more than two warps.
        warps = min(warps, 2)
    # Shared memory per program: 227 KiB on 9.x and 10.x, 163 KiB on 8.0, 99 KiB elsewhere; float32 takes twice as much.
    limit = 3 if capability[0] in (9, 10) else 2 if capability == (8, 0) else 1
    return {"num_warps": warps, "num_stages": min(stages, limit if itemsize == 2 else 1)}
