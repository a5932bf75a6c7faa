"""Index lists of the Triton backend: tiles of queries with their path's keys, tiles of keys with their readers.

Letters: T own rows, X external rows, Y = X + T path rows, V segments; C chains (own rows without a gap in memory or on
the path), I query tiles, J key tiles, L entries of tile lists, R runs of query rows, M rows of a query tile, N rows of
a key tile. Positions are absolute.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from harts_titan.ops.attention.block_kernels import key_tiles, visible_runs
from harts_titan.ops.attention.mask import TreeMask


class PathTables(NamedTuple):
    """All lists in one int32 buffer on the device, and where they lie in it; :func:`views` takes it apart."""

    packed: Tensor
    sizes: Tensor
    """int64 (12,) on the host: numbers in each list. A tensor, so that a compiled graph holds for every plan."""


class PathViews(NamedTuple):
    """int32 lists."""

    query_chain_I: Tensor
    """Chain of each query tile; tiles with the longest paths come first."""
    query_first_I: Tensor
    """Row of the tile's first position, counted from the chain's first row; negative where the tile begins above it."""
    chain_row_C: Tensor
    """First own row."""
    chain_rows_C: Tensor
    """Rows of the chain."""
    chain_position_C: Tensor
    """Absolute position of the first row."""
    chain_list_C: Tensor
    """Where the chain's key tiles begin in ``list_L``."""
    list_L: Tensor
    """Key tile, an index into ``rows_N``, of positions ``[j N, (j + 1) N)`` of each chain's path, from position 0."""
    rows_N: Tensor
    """Path rows of tiles, N each; chains share the tiles that lie above their forks."""
    key_row_J: Tensor
    """First path row of each tile of keys whose gradients are wanted; those with most readers come first."""
    key_rows_J: Tensor
    """Rows of it, of one segment or one stretch of external rows."""
    key_runs_J2: Tensor
    """First and end of the tile's runs."""
    run_R2: Tensor
    """First and end own row of a run of query rows that may see keys of the tile."""


def views(packed: Tensor, sizes: Tensor) -> PathViews:
    """The lists of a :class:`PathTables`."""
    parts, at = [], 0
    for size in sizes.tolist():
        parts.append(packed[at : at + size])
        at += _aligned(size)
    return PathViews(*parts)


def path_tables(mask: TreeMask, block_q: int, block_kv: int, block_key: int) -> PathTables:
    """Build the lists on the host, in O(key tiles of all chains), and copy them to the mask's device at once.

    Query and key tiles lie on grids of absolute positions, so a row meets the same tiles in the same order, with the
    same shapes, as in a call of its trajectory alone.

    Args:
        mask: Visibility.
        block_q: M, positions of a query tile.
        block_kv: N, positions of a key tile of a path.
        block_key: Rows of a tile of keys whose gradients are summed.
    """
    host = mask._host
    joined = host.joined
    heads_C = joined.order[joined.top[joined.order] == host.seg_row[joined.order]]
    row_C = host.seg_row[heads_C]
    rows_C = np.diff(np.append(row_C, mask.num_rows))
    position_C = host.seg_start[heads_C]
    list_C1, list_L, rows_N = _key_lists(mask, heads_C, row_C, rows_C, position_C, block_kv)
    chain_I, number_I = _tiles(position_C % block_q + rows_C, block_q)
    first_I = number_I * block_q - (position_C % block_q)[chain_I]
    longest = np.argsort(-(position_C[chain_I] + first_I), kind="stable")

    # Keys in stretches whose readers differ only by depth-first number: runs of external rows, and segments.
    begin = np.concatenate([joined.external[:-1], host.num_external_rows + host.seg_row[joined.order]])
    size = np.concatenate([np.diff(joined.external), host.seg_length[joined.order]])
    run_ptr, runs = _runs(mask, begin)
    stretch_J, number_J = _tiles(size, block_key)
    readers = np.concatenate([[0], np.cumsum(runs[:, 1] - runs[:, 0])])
    readers = readers[run_ptr[1:]] - readers[run_ptr[:-1]]
    most = np.argsort(-(readers[stretch_J] - number_J * block_key), kind="stable")
    stretch_J, number_J = stretch_J[most], number_J[most]
    arrays = (
        chain_I[longest],
        first_I[longest],
        row_C,
        rows_C,
        position_C,
        list_C1[:-1],
        list_L,
        rows_N,
        begin[stretch_J] + number_J * block_key,
        np.minimum(block_key, size[stretch_J] - number_J * block_key),
        np.stack([run_ptr[stretch_J], run_ptr[stretch_J + 1]], axis=1),
        runs,
    )
    return _one_copy([a.reshape(-1) for a in arrays], mask.device)


def _tiles(size: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Owner of each tile of ``block`` numbers, and the tile's number in its owner."""
    count = -(-size // block)
    owner = np.repeat(np.arange(size.size), count)
    return owner, np.arange(owner.size) - np.repeat(np.cumsum(count) - count, count)


def _key_lists(
    mask: TreeMask,
    heads_C: np.ndarray,
    row_C: np.ndarray,
    rows_C: np.ndarray,
    position_C: np.ndarray,
    block: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where each chain's tile list begins, the lists of their paths, and the rows of the tiles."""
    host, X = mask._host, mask.num_external_rows
    chain_V = np.searchsorted(row_C, host.seg_row, side="right") - 1
    parent_V, hang_C = host.seg_parent[heads_C], host.seg_attach[heads_C]
    parent_C = np.where(parent_V >= 0, chain_V[parent_V], -1)
    above_C = np.zeros(heads_C.size, np.int64)
    external: list[np.ndarray] = []
    at = 0
    for hang in np.unique(hang_C[(hang_C >= 0) & (parent_C < 0)]):
        path = mask.external_path(hang)
        above_C[hang_C == hang] = at
        external.append(np.pad(path, (0, -path.size % block)))
        at += external[-1].size // block
    tiles = at + int((-(-(position_C % block + rows_C) // block)).sum())
    rows_N = np.zeros((tiles, block), np.int64)
    if external:
        rows_N[:at] = np.concatenate(external).reshape(-1, block)
    ptr_C1 = np.concatenate([[0], np.cumsum(-(-(position_C + rows_C) // block))])
    list_L = np.empty(int(ptr_C1[-1]), np.int64)
    # A chain's parent chain begins above it.
    order = np.argsort(position_C, kind="stable")
    key_tiles(order, parent_C, row_C, rows_C, position_C, above_C, X, ptr_C1, list_L, rows_N, at)
    return ptr_C1, list_L, rows_N


def _runs(mask: TreeMask, begin: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Runs of own rows below each stretch of keys that starts at a row of ``begin``."""
    host = mask._host
    order = host.joined.order
    ptr = np.zeros(begin.size + 1, np.int64)
    row, X = host.seg_row[order], mask.num_external_rows
    arguments = (row, host.seg_length[order], host.tin[X + row], host.tin, host.tout, X, begin)
    visible_runs(*arguments, ptr, np.empty((0, 2), np.int64))
    ptr[1:] = np.cumsum(ptr[1:])
    runs = np.empty((int(ptr[-1]), 2), np.int64)
    visible_runs(*arguments, ptr, runs)
    return ptr, runs


def _aligned(count: int) -> int:
    return -(-count // 32) * 32


def _one_copy(arrays: list[np.ndarray], device: torch.device) -> PathTables:
    sizes = torch.tensor([a.size for a in arrays])
    buffer = torch.zeros(sum(_aligned(a.size) for a in arrays), dtype=torch.int32, pin_memory=device.type == "cuda")
    for view, a in zip(views(buffer, sizes), arrays):
        view.numpy()[:] = a
    return PathTables(buffer.to(device, non_blocking=True), sizes)
