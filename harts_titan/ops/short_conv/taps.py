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
from harts_titan.ops.short_conv.chain_kernels import find_plain_groups, find_targets, mark_chains, number_slots

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
    """The same for groups that also end no chain: the first path row where the sums they finish belong to consecutive
    rows of ``dx``, -2 minus it where some go elsewhere."""
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
    tap4, target = (np.empty((T, KERNEL_TAPS), dtype=np.int32) for _ in range(2))
    kind = np.empty(T, dtype=np.int8)
    count = np.zeros(num_path_rows, dtype=np.int32)
    if mark_chains(np.ascontiguousarray(tap, dtype=np.int64), tap4, kind, count, HEAD, LAST):
        raise ValueError(f"taps must lie in [-1, {num_path_rows}), the last one in [0, {num_path_rows})")
    join_row, slot = (np.empty(num_path_rows, dtype=np.int32) for _ in range(2))
    join_ptr = np.empty(num_path_rows + 1, dtype=np.int32)
    num_joined = number_slots(count, join_row, join_ptr, slot)
    join_row, join_ptr = join_row[:num_joined], join_ptr[: num_joined + 1]
    find_targets(tap4, kind, slot, target, HEAD)
    forward, backward = (np.empty(-(-T // GROUP_ROWS) + 1, dtype=np.int32) for _ in range(2))
    find_plain_groups(tap4, kind, target, GROUP_ROWS, HEAD, forward, backward)

    def put(array: np.ndarray, dtype: torch.dtype = torch.int32) -> Tensor:
        return to_device(array, torch.device(device), dtype)

    return ChainTables(
        tap_T4=put(tap4),
        kind_T=put(kind, torch.int8),
        forward_G=put(forward),
        backward_G=put(backward),
        target_T4=put(target),
        join_row_J=any_length(put(join_row)),
        join_ptr_J1=any_length(put(join_ptr)),
        slot_S=any_length(put(np.zeros(int(join_ptr[-1]), dtype=np.int8), torch.int8)),
    )
