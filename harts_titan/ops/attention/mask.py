"""Who sees whom in ancestor attention, and block-sparse tables of it.

Letters: T own rows (queries), X external rows, Y = X + T path rows (keys), V segments of own rows.
Row k is visible to row q iff ``tin[k] <= tin[q] < tout[k]``: depth-first numbers, because rows lie in round order.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from harts_titan.ops.host_tables import as_int64, to_device


class BlockTables(NamedTuple):
    """Block-sparse form of a TreeMask, int32, leading (1, 1) for batch and heads.

    ``kv_*`` list, per query block, the partially visible key blocks in ascending order (the first ``num`` entries of a
    row count); ``full_kv_*`` those whose every pair is visible. ``q_*`` is the transpose, per key block.
    """

    kv_num_blocks: Tensor
    kv_indices: Tensor
    full_kv_num_blocks: Tensor
    full_kv_indices: Tensor
    q_num_blocks: Tensor
    q_indices: Tensor
    full_q_num_blocks: Tensor
    full_q_indices: Tensor


@dataclass(frozen=True)
class _HostMask:
    """NumPy arrays shared by all device copies of one mask."""

    tin: np.ndarray
    tout: np.ndarray
    num_external_rows: int
    seg_parent: np.ndarray
    seg_start: np.ndarray
    seg_length: np.ndarray
    seg_row: np.ndarray
    seg_attach: np.ndarray
    blocks: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)

    def visible_blocks(self, q_block: int, kv_block: int) -> tuple[np.ndarray, np.ndarray]:
        """Boolean (query blocks, key blocks): partly visible, and wholly visible. Exact for depth-first numbers."""
        if (q_block, kv_block) not in self.blocks:
            self.blocks[q_block, kv_block] = _visible_blocks(
                self.tin[self.num_external_rows :], self.tin, self.tout, q_block, kv_block
            )
        return self.blocks[q_block, kv_block]


@dataclass(frozen=True)
class TreeMask:
    """Ancestor visibility of one call; build it with :meth:`build`."""

    tin_Y: Tensor
    """int32: depth-first number of each path row."""
    tout_Y: Tensor
    """int32: end of its depth-first interval."""
    num_external_rows: int
    _host: _HostMask = field(repr=False, compare=False)

    @classmethod
    def build(
        cls,
        *,
        tin: Tensor | Sequence[int],
        tout: Tensor | Sequence[int],
        seg_parent: Tensor | Sequence[int],
        seg_start: Tensor | Sequence[int],
        seg_length: Tensor | Sequence[int],
        seg_row: Tensor | Sequence[int],
        seg_attach: Tensor | Sequence[int] | None = None,
        num_external_rows: int = 0,
        device: torch.device | str = "cpu",
    ) -> TreeMask:
        """Check the host arrays of a call layout and pack them.

        Args:
            tin: int64 (Y,) depth-first number of each path row.
            tout: int64 (Y,) end of its interval, exclusive.
            seg_parent: int64 (V,) parent segment, -1 for roots.
            seg_start: int64 (V,) absolute position of the segment's first token.
            seg_length: int64 (V,) rows of the segment.
            seg_row: int64 (V,) first own row (in [0, T)) of the segment.
            seg_attach: int64 (V,) external path row a root hangs on, -1 for none; None: none.
            num_external_rows: X.
            device: Where the number tensors go.

        Returns:
            The checked mask on ``device``.

        Raises:
            ValueError: If the arrays contradict each other.
        """
        tin_array, tout_array, parent, start, length, row = (
            as_int64(x) for x in (tin, tout, seg_parent, seg_start, seg_length, seg_row)
        )
        attach = np.full(parent.size, -1) if seg_attach is None else as_int64(seg_attach)
        host = _HostMask(tin_array, tout_array, int(num_external_rows), parent, start, length, row, attach)
        _check(host)
        return cls._from_host(host, torch.device(device))

    @classmethod
    def _from_host(cls, host: _HostMask, device: torch.device) -> TreeMask:
        tin, tout = (to_device(x, device, torch.int32) for x in (host.tin, host.tout))
        return cls(tin, tout, host.num_external_rows, host)

    def to(self, device: torch.device | str) -> TreeMask:
        """Return the same mask with its tensors on ``device`` (self if they are there)."""
        device = torch.device(device)
        same = device.type == self.device.type and device.index in (None, self.device.index)
        return self if same else self._from_host(self._host, device)

    @property
    def device(self) -> torch.device:
        """Device of the number tensors."""
        return self.tin_Y.device

    @property
    def num_path_rows(self) -> int:
        """Y, keys."""
        return self._host.tin.size

    @property
    def num_rows(self) -> int:
        """T, queries."""
        return self._host.tin.size - self.num_external_rows

    @property
    def num_segments(self) -> int:
        """V."""
        return self._host.seg_parent.size

    @cached_property
    def segments(self) -> tuple[tuple[int, int, int], ...]:
        """(first own row, first absolute position, length) of each segment."""
        host = self._host
        return tuple(zip(host.seg_row.tolist(), host.seg_start.tolist(), host.seg_length.tolist()))

    def path_rows(self, segment: int) -> Tensor:
        """int64 path rows from position 0 to the end of ``segment``, on the host; O(path)."""
        host, pieces, v = self._host, [], segment
        while True:
            first = host.num_external_rows + host.seg_row[v]
            pieces.append(np.arange(first, first + host.seg_length[v]))
            if host.seg_parent[v] < 0:
                break
            v = host.seg_parent[v]
        if host.seg_attach[v] >= 0:
            tin, tout = host.tin[: host.num_external_rows], host.tout[: host.num_external_rows]
            at = host.tin[host.seg_attach[v]]
            above = np.flatnonzero((tin <= at) & (at < tout))
            pieces.append(above[np.argsort(tin[above])])
        return torch.from_numpy(np.concatenate(pieces[::-1]))

    @cached_property
    def _device_tables(self) -> dict[tuple[int, int], BlockTables]:
        return {}


def block_tables(mask: TreeMask, q_block: int, kv_block: int, device: torch.device | str | None = None) -> BlockTables:
    """Block-sparse tables of ``mask`` for the given block sizes, from the segment structure (never from all pairs).

    A block is full only if it is complete and every pair in it is visible; a partial block holds at least one visible
    pair. Cached per mask and block size.

    Args:
        mask: Visibility.
        q_block: Query rows per block.
        kv_block: Key rows per block.
        device: Where the tables go; default the mask's device.

    Returns:
        int32 tables of (T / q_block) x (Y / kv_block) blocks, both rounded up.

    Raises:
        ValueError: If a block size is not positive.
    """
    if q_block < 1 or kv_block < 1:
        raise ValueError(f"block sizes must be positive; got q_block {q_block}, kv_block {kv_block}")
    mask = mask if device is None else mask.to(device)
    cache = mask._device_tables
    if (q_block, kv_block) not in cache:
        partial, full = mask._host.visible_blocks(q_block, kv_block)
        arrays = [a for m in (partial, full, partial.T, full.T) for a in _ordered(m)]
        cache[q_block, kv_block] = BlockTables(*(to_device(a, mask.device, torch.int32)[None, None] for a in arrays))
    return cache[q_block, kv_block]


def _ordered(dense: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    count = dense.sum(axis=1).astype(np.int32)
    return count, np.argsort(~dense, axis=1, kind="stable").astype(np.int32)


def _runs(block: int, *breaking: np.ndarray) -> np.ndarray:
    """First indices of maximal stretches inside a block where every array of ``breaking`` is constant."""
    size = breaking[0].size
    new = np.zeros(size, dtype=bool)
    new[::block] = True
    for values in breaking:
        new[1:] |= values[1:] != values[:-1]
    return np.flatnonzero(new)


def _visible_blocks(
    tin_T: np.ndarray, tin_Y: np.ndarray, tout_Y: np.ndarray, q_block: int, kv_block: int
) -> tuple[np.ndarray, np.ndarray]:
    num_q, num_kv = -(-tin_T.size // q_block), -(-tin_Y.size // kv_block)
    partial, full = (np.zeros((num_q, num_kv), dtype=bool) for _ in range(2))
    if not num_q:
        return partial, full
    # Inside a run depth-first numbers are consecutive (and tout is one value), so intervals decide visibility exactly.
    q_first = _runs(q_block, tin_T - np.arange(tin_T.size))
    k_first = _runs(kv_block, tin_Y - np.arange(tin_Y.size), tout_Y)
    q_last, k_last = (np.append(x[1:], n) - 1 for x, n in ((q_first, tin_T.size), (k_first, tin_Y.size)))
    q_lo, q_hi = tin_T[q_first][:, None], tin_T[q_last][:, None]
    k_lo, k_hi, k_end = tin_Y[k_first], tin_Y[k_last], tout_Y[k_first]
    q_ptr = np.searchsorted(q_first, np.arange(0, num_q + 1) * q_block)
    k_start = np.searchsorted(k_first, np.arange(num_kv) * kv_block)
    for i, (a, b) in enumerate(itertools.pairwise(q_ptr)):
        some = ((q_hi[a:b] >= k_lo) & (q_lo[a:b] < k_end)).any(axis=0)
        every = ((q_lo[a:b] >= k_hi) & (q_hi[a:b] < k_end)).all(axis=0)
        partial[i] = np.logical_or.reduceat(some, k_start)
        full[i] = np.logical_and.reduceat(every, k_start)
    # Kernels skip the bounds check in full blocks, so an incomplete last block is never one.
    full[tin_T.size // q_block :] = False
    full[:, tin_Y.size // kv_block :] = False
    return partial & ~full, full


def _check(host: _HostMask) -> None:
    num_rows = host.tin.size - host.num_external_rows
    if host.tin.shape != host.tout.shape or host.num_external_rows < 0 or num_rows < 0:
        raise ValueError(
            f"tin has {host.tin.size} entries, tout {host.tout.size}, of which {host.num_external_rows} external; "
            "both need one entry per path row (external + own)"
        )
    if (host.tout <= host.tin).any():
        raise ValueError("every row needs tin < tout: it sees itself")
    sizes = {x.size for x in (host.seg_parent, host.seg_start, host.seg_length, host.seg_row, host.seg_attach)}
    if len(sizes) != 1:
        raise ValueError(f"segment arrays differ in length: {sorted(sizes)}")
    order = np.argsort(host.seg_row, kind="stable")
    ends = np.cumsum(host.seg_length[order])
    if not np.array_equal(host.seg_row[order], ends - host.seg_length[order]) or ends[-1:].sum() != num_rows:
        raise ValueError(f"segments must cover the {num_rows} own rows once each")
    child = host.seg_parent >= 0
    parent = host.seg_parent[child]
    if (host.seg_parent >= host.seg_parent.size).any() or (host.seg_attach >= host.num_external_rows).any():
        raise ValueError("seg_parent or seg_attach names a segment or an external row that does not exist")
    if not np.array_equal(host.seg_start[child], host.seg_start[parent] + host.seg_length[parent]):
        raise ValueError("a child segment must start where its parent ends")
    if ((host.seg_attach < 0) & ~child & (host.seg_start > 0)).any():
        raise ValueError("a root that starts after position 0 needs seg_attach")
