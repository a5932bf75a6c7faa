"""What the short convolution reads: a tap table, and the tables its kernels walk.

Letters: T output rows, Y path rows (external first), W here is the number of taps, G groups of rows, J path rows whose
gradient is joined from slots.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from harts_titan.ops.host_tables import any_length, to_device

KERNEL_TAPS = 4
"""Taps of the kernels; shorter filters get zero weights in front."""
GROUP_ROWS = 8
"""Rows of a group."""
HEAD, LAST = 1, 2
"""Bits of ``kind_T``: first and last row of a chain."""


class ChainTables(NamedTuple):
    """Chains of a tap table, see ``kernels.py``. Dense ones have four taps, -1 in front of shorter filters."""

    tap_T4: Tensor
    """int32 path row of every tap, -1 before the root."""
    kind_T: Tensor
    """int8 bits ``HEAD`` and ``LAST``."""
    forward_G: Tensor
    """int32, one more than groups: first path row of a plain group, else -1."""
    backward_G: Tensor
    """The same for the backward pass: the sums the group finishes belong to consecutive rows of ``dx`` as well."""
    target_T4: Tensor
    """int32: where the gradient sum of a tap goes: row of ``dx``, slot s as ``-2 - s``, -1 before the root."""
    join_row_J: Tensor
    """int32 path rows with several sums, or none."""
    join_ptr_J1: Tensor
    """int32: slots of each, ordered by the row that starts the sum."""
    slot_S: Tensor
    """int8 zeros; its length is the number of slots, read without waiting for the device."""


@dataclass(frozen=True, eq=False)
class ConvTaps:
    """The taps of one call; the tables of the kernels are built once, on first use, and serve every layer."""

    conv_tap_TW: Tensor
    """int64 path rows that each row reads, oldest first, the last one the row itself, -1 before the root."""
    num_path_rows: int
    """Y."""
    host_TW: np.ndarray | None = field(default=None, repr=False)
    """The same table on the host; without it the first use of ``tables`` waits for the device."""

    @cached_property
    def tables(self) -> ChainTables:
        """Chains of the table, on its device."""
        host = self.conv_tap_TW if self.host_TW is None else self.host_TW
        return chain_tables(host, self.num_path_rows, device=self.conv_tap_TW.device)

    def packed(self, packed_row_P: np.ndarray, *, num_external_rows: int = 0) -> ConvTaps:
        """Taps of the rows of packed sequences: the convolution then writes packed order, replay rows included.

        Args:
            packed_row_P: int (P) path row of each packed row, on the host (``CallLayout.packed_row_P``).
            num_external_rows: Path rows in front of the own rows.

        Raises:
            ValueError: If an external row is replayed: the call has no taps of it.
        """
        own = np.asarray(packed_row_P) - num_external_rows
        if own.size and own.min() < 0:
            raise ValueError(f"packed rows below {num_external_rows} are rows of a producer, whose taps are not known")
        host = (self.conv_tap_TW.cpu().numpy() if self.host_TW is None else self.host_TW)[own]
        return ConvTaps(to_device(host, self.conv_tap_TW.device), self.num_path_rows, host)


def chain_tables(
    conv_tap_TW: Tensor | np.ndarray, num_path_rows: int, *, device: torch.device | str | None = None
) -> ChainTables:
    """Cut the rows of a tap table into chains, on the host, in O(T).

    Args:
        conv_tap_TW: int (T, taps) path row of every tap, -1 before the root; a device tensor is waited for.
        num_path_rows: Y.
        device: Where the tables go; default: that of ``conv_tap_TW``.

    Raises:
        ValueError: If there are no or more than four taps, or a tap is not a path row.
    """
    if device is None:
        device = conv_tap_TW.device if isinstance(conv_tap_TW, Tensor) else "cpu"
    tap = conv_tap_TW.detach().cpu().numpy() if isinstance(conv_tap_TW, Tensor) else conv_tap_TW
    T, num_taps = tap.shape
    if not 1 <= num_taps <= KERNEL_TAPS:
        raise ValueError(f"the kernels have 1 to {KERNEL_TAPS} taps, the table {num_taps}; use the reference backend")
    if T and (tap.min() < -1 or tap.max() >= num_path_rows or tap[:, -1].min() < 0):
        raise ValueError(f"taps must lie in [-1, {num_path_rows}), the last one in [0, {num_path_rows})")
    tap4 = np.full((T, KERNEL_TAPS), -1, dtype=np.int64)
    tap4[:, KERNEL_TAPS - num_taps :] = tap
    head = np.ones(T, dtype=bool)
    head[1:] = (tap[1:, :-1] != tap[:-1, 1:]).any(axis=1)
    last = np.append(head[1:], True)[:T]

    target, join_row, join_ptr = _targets(tap4, head, num_path_rows)
    # Groups: no head inside, consecutive path rows; the backward pass also ends no chain and finishes plain sums.
    num_groups = -(-T // GROUP_ROWS)
    whole = T // GROUP_ROWS
    first = np.full(num_groups + 1, -1, dtype=np.int64)
    rows = tap4[: whole * GROUP_ROWS, -1].reshape(whole, GROUP_ROWS)
    ahead = np.arange(GROUP_ROWS)
    inside = ~head[: whole * GROUP_ROWS].reshape(whole, GROUP_ROWS).any(axis=1)
    inside &= (rows - rows[:, :1] == ahead).all(axis=1)
    forward, backward = first.copy(), first
    forward[:whole][inside] = rows[inside, 0]
    finished = target[: whole * GROUP_ROWS, 0].reshape(whole, GROUP_ROWS)
    inside &= ~last[: whole * GROUP_ROWS].reshape(whole, GROUP_ROWS).any(axis=1)
    inside &= (finished - rows[:, :1] == ahead - (KERNEL_TAPS - 1)).all(axis=1) & (finished[:, 0] >= 0)
    backward[:whole][inside] = rows[inside, 0]

    def put(array: np.ndarray, dtype: torch.dtype = torch.int32) -> Tensor:
        return to_device(array, torch.device(device), dtype)

    return ChainTables(
        tap_T4=put(tap4),
        kind_T=put(head * HEAD + last * LAST, torch.int8),
        forward_G=put(forward),
        backward_G=put(backward),
        target_T4=put(target),
        join_row_J=any_length(put(join_row)),
        join_ptr_J1=any_length(put(join_ptr)),
        slot_S=any_length(put(np.zeros(int(join_ptr[-1]), dtype=np.int8), torch.int8)),
    )


def _targets(tap4: np.ndarray, head: np.ndarray, num_path_rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where the sum of every (row, tap) goes, and which path rows are joined from which slots."""
    T, before = tap4.shape[0], KERNEL_TAPS - 1
    head_row = np.flatnonzero(head)
    number = np.cumsum(head) - 1
    # Sums in the order of the chains: the taps before a head, oldest first, then the chain's rows.
    sum_of_row = np.arange(T) + before * (number + 1)
    sum_of_head = (head_row + before * np.arange(head_row.size))[:, None] + np.arange(before)
    path_row = np.full(T + before * head_row.size, -1, dtype=np.int64)
    path_row[sum_of_row] = tap4[:, -1]
    path_row[sum_of_head] = tap4[head_row, :before]

    used = path_row >= 0
    count = np.bincount(path_row[used], minlength=num_path_rows)
    joined = np.flatnonzero(count != 1)
    ptr = np.concatenate([[0], np.cumsum(count[joined])])
    goal = path_row.copy()
    shared = np.flatnonzero(used & (count[path_row] > 1))
    shared = shared[np.argsort(path_row[shared], kind="stable")]
    goal[shared] = -2 - np.arange(shared.size)

    # A row's older taps are the sums before its own: rows of the chain, or taps of its head (they are adjacent).
    target = goal[sum_of_row[:, None] + np.arange(-before, 1)] if T else np.empty((0, KERNEL_TAPS), dtype=np.int64)
    return target, joined, ptr
