"""Who sees whom in ancestor attention, and block-sparse tables of it.

Letters: T own rows (queries), X external rows, Y = X + T path rows (keys), V segments of own rows.
Row k is visible to row q iff ``tin[k] <= tin[q] < tout[k]``: depth-first numbers, because rows lie in round order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from harts_titan.ops.attention.block_kernels import external_stretches, join_segments, list_blocks
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

    @cached_property
    def joined(self) -> _Joined:
        """What the block kernels read besides the segments; shared by every block size."""
        order = np.argsort(self.seg_row, kind="stable")
        top, above, hang = (np.empty_like(self.seg_row) for _ in range(3))
        join_segments(order, self.seg_parent, self.seg_length, self.seg_row, self.seg_attach, top, above, hang)
        external = np.empty(self.num_external_rows + 1, np.int64)
        count = external_stretches(self.tin, self.tout, self.num_external_rows, external)
        external[count] = self.num_external_rows
        return _Joined(order, top, above, hang, external[: count + 1])


class _Joined(NamedTuple):
    """Segments by row, the stretch of ancestor rows that ends at each of them, and stretches of external rows."""

    order: np.ndarray
    top: np.ndarray
    """First row of the stretch."""
    above: np.ndarray
    """Segment above the stretch, -1 at a root."""
    hang: np.ndarray
    """External row the stretch's root hangs on, -1 for none."""
    external: np.ndarray
    """First rows of the stretches, then X."""


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
            pieces.append(self.external_path(host.seg_attach[v]))
        return torch.from_numpy(np.concatenate(pieces[::-1]))

    def external_path(self, row: int) -> np.ndarray:
        """int64 external rows from position 0 to external row ``row``; O(X)."""
        host = self._host
        tin, tout = host.tin[: host.num_external_rows], host.tout[: host.num_external_rows]
        above = np.flatnonzero((tin <= host.tin[row]) & (host.tin[row] < tout))
        return above[np.argsort(tin[above])]

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
    mask = mask if device is None else mask.to(device)
    cache = mask._device_tables
    if (q_block, kv_block) not in cache:
        size = (q_block, kv_block)
        lists = packed_lists(mask, by_query=size, by_key=size)
        num_q, num_kv = number_of_blocks(mask.num_rows, mask.num_path_rows, size)
        cut = packed_size(num_q, num_kv)
        views = (*list_views(lists[:cut], num_q, num_kv), *list_views(lists[cut:], num_kv, num_q))
        cache[size] = BlockTables(*views)
    return cache[q_block, kv_block]


def number_of_blocks(num_rows: int, num_path_rows: int, size: tuple[int, int]) -> tuple[int, int]:
    """Blocks of own rows and of path rows."""
    return -(-num_rows // size[0]), -(-num_path_rows // size[1])


def packed_size(blocks: int, entries: int) -> int:
    """int32 numbers that the lists of ``blocks`` blocks, of at most ``entries`` entries each, take in one buffer."""
    return 2 * (_aligned(blocks) + _aligned(blocks * entries))


def list_views(packed: Tensor, blocks: int, entries: int) -> list[Tensor]:
    """Views of a buffer: partial counts (1, 1, blocks), partial lists (1, 1, blocks, entries), then the full ones."""
    views, at = [], 0
    for _ in range(2):
        views.append(packed[at : at + blocks].view(1, 1, blocks))
        at += _aligned(blocks)
        views.append(packed[at : at + blocks * entries].view(1, 1, blocks, entries))
        at += _aligned(blocks * entries)
    return views


def packed_lists(
    mask: TreeMask, *, by_query: tuple[int, int] | None = None, by_key: tuple[int, int] | None = None
) -> Tensor:
    """Block lists in one int32 buffer on the mask's device, copied there at once without waiting.

    Args:
        mask: Visibility.
        by_query: (query rows, key rows) of a block for lists of key blocks per query block; None: none.
        by_key: The same for lists of query blocks per key block; they come after the others.

    Returns:
        :func:`list_views` of its first :func:`packed_size` numbers are the lists by query, of the rest those by key.
        Entries behind a list's count are arbitrary.

    Raises:
        ValueError: If a block size is not positive.
    """
    rows = mask.num_rows, mask.num_path_rows
    wanted = [size for size in (by_query, by_key) if size is not None]
    if any(min(size) < 1 for size in wanted):
        raise ValueError(f"block sizes must be positive; got {wanted}")
    first = second = (0, 0)
    if by_query is not None:
        first = number_of_blocks(*rows, by_query)
    if by_key is not None:
        second = number_of_blocks(*rows, by_key)[::-1]
    cut = packed_size(*first)
    # Written where the copy reads: pageable memory would be copied once more, and the copy would wait for the device.
    buffer = torch.empty(cut + packed_size(*second), dtype=torch.int32, pin_memory=mask.device.type == "cuda")
    query_lists = [x[0, 0].numpy() for x in list_views(buffer[:cut], *first)]
    key_lists = [x[0, 0].numpy() for x in list_views(buffer[cut:], *second)]
    for lists in (query_lists, key_lists):
        lists[0][:] = 0
        lists[2][:] = 0
    for size in dict.fromkeys(wanted):
        _list(mask._host, size, query_lists if size == by_query else None, key_lists if size == by_key else None)
    return buffer.to(mask.device, non_blocking=True)


_Lists = list[np.ndarray]
_NO_COUNT, _NO_LIST = np.empty(0, np.int32), np.empty((0, 0), np.int32)
_NO_LISTS = [_NO_COUNT, _NO_LIST, _NO_COUNT, _NO_LIST]


def _aligned(count: int) -> int:
    # 128 bytes: kernels assume aligned tables.
    return -(-count // 32) * 32


def _list(host: _HostMask, size: tuple[int, int], by_query: _Lists | None, by_key: _Lists | None) -> None:
    num_kv = -(-host.tin.size // size[1])
    joined = host.joined
    list_blocks(
        joined.order,
        host.seg_length,
        host.seg_row,
        joined.top,
        joined.above,
        joined.hang,
        host.tin,
        host.tout,
        joined.external,
        host.num_external_rows,
        *size,
        np.full((8, num_kv + 2), -1),
        by_query is not None,
        by_key is not None,
        *(by_query or _NO_LISTS),
        *(by_key or _NO_LISTS),
    )


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
