"""Another grouped product, for ``gpu_moe.py`` to measure beside ``torch._grouped_mm``: short sums, wide outputs.

Letters: R routed rows, E experts, K summed dimension, N columns; M, BN, BK a tile of rows, columns and summands.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Launch(NamedTuple):
    """Tile and options of a launch; small tiles let one program's stores overlap another's products."""

    rows: int
    columns: int
    summands: int
    num_warps: int
    num_stages: int


@triton.jit
def grouped_product(
    x, w, offsets, out, K, N, num_experts,
    EP: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BY_COLUMN: tl.constexpr,
):  # fmt: skip
    """Rows of expert e times ``w[e]^T``, (N, K) each; programs behind the last tile of the last expert end at once."""
    pid = tl.program_id(0)
    column_blocks = N // BN
    if BY_COLUMN:
        # All columns of a few rows, so that the rows are read from memory once.
        tile, column = pid // column_blocks, pid % column_blocks
    else:
        num_tiles = tl.num_programs(0) // column_blocks
        tile, column = pid % num_tiles, pid // num_tiles
    experts = tl.arange(0, EP)
    end_E = tl.load(offsets + experts, mask=experts < num_experts, other=0)
    begin_E = tl.load(offsets + experts - 1, mask=(experts > 0) & (experts < num_experts), other=0)
    tiles_E = tl.where(experts < num_experts, (end_E - begin_E + M - 1) // M, 0)
    last_E = tl.cumsum(tiles_E, 0)
    if tile < tl.max(last_E, 0):
        expert = tl.sum((last_E <= tile).to(tl.int32), 0)
        mine = experts == expert
        begin = tl.sum(tl.where(mine, begin_E, 0), 0) + (tile - tl.sum(tl.where(mine, last_E - tiles_E, 0), 0)) * M
        end = tl.sum(tl.where(mine, end_E, 0), 0)
        rows = begin + tl.arange(0, M)
        valid = rows < end
        columns = column * BN + tl.arange(0, BN)
        k = tl.arange(0, BK)
        x_at = x + rows.to(tl.int64)[:, None] * K + k[None, :]
        w_at = w + expert.to(tl.int64) * N * K + columns[None, :] * K + k[:, None]
        total = tl.zeros([M, BN], dtype=tl.float32)
        for i in range(0, K, BK):
            a = tl.load(x_at + i, mask=valid[:, None], other=0.0)
            total = tl.dot(a, tl.load(w_at + i), total, input_precision="ieee")
        at = out + rows.to(tl.int64)[:, None] * N + columns[None, :]
        tl.store(at, total.to(out.dtype.element_ty), mask=valid[:, None])


def product(x_RK: Tensor, w_ENK: Tensor, offsets_E: Tensor, launch: Launch, *, by_column: bool) -> Tensor:
    """``torch._grouped_mm(x, w.transpose(1, 2), offs=offsets)``; N and K are multiples of the tile."""
    (R, K), (E, N, _) = x_RK.shape, w_ENK.shape
    out = x_RK.new_empty((R, N))
    tiles = (R // launch.rows + E) * (N // launch.columns)
    grouped_product[(tiles,)](
        x_RK, w_ENK, offsets_E, out, K, N, E, EP=triton.next_power_of_2(E), M=launch.rows, BN=launch.columns,
        BK=launch.summands, BY_COLUMN=by_column, num_warps=launch.num_warps, num_stages=launch.num_stages,
    )  # fmt: skip
    return out


def check(launch: Launch, device: torch.device | str, dtype: torch.dtype) -> float:
    """Relative difference from a float64 loop, on uneven groups with empty ones."""
    generator = torch.Generator(device).manual_seed(0)
    counts = [0, 5, 3 * launch.rows, launch.rows + 1, 0, 1]
    offsets = torch.tensor(counts, device=device).cumsum(0).to(torch.int32)
    K, N = 2 * launch.summands, 2 * launch.columns
    x = torch.randn(sum(counts), K, generator=generator, device=device).to(dtype)
    w = torch.randn(len(counts), N, K, generator=generator, device=device).to(dtype)
    want = torch.cat([rows.double() @ e.double().t() for rows, e in zip(x.split(counts), w)])
    errors = [
        float((product(x, w, offsets, launch, by_column=by_column) - want).norm() / want.norm())
        for by_column in (True, False)
    ]
    return max(errors)
