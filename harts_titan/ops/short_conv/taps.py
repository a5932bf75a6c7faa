"""What the short convolution reads: a tap table, and its inverse for the backward kernels.

Letters: T own rows, Y path rows (external first), W here is the number of taps, R (row, tap) pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor


class TapReaders(NamedTuple):
    """CSR from every path row to the (row, tap) pairs that read it, ordered by row, then tap; int32."""

    ptr_Y1: Tensor
    row_R: Tensor
    tap_R: Tensor


@dataclass(frozen=True, eq=False)
class ConvTaps:
    """The taps of one call; its inverse is built once, on first use, and serves every layer."""

    conv_tap_TW: Tensor
    """int64 path rows that each own row reads, oldest first, the last one the row itself, -1 before the root."""
    num_path_rows: int
    """Y."""

    @cached_property
    def readers(self) -> TapReaders:
        """Inverse of the table, on its device."""
        return tap_readers(self.conv_tap_TW, self.num_path_rows)


def tap_readers(conv_tap_TW: Tensor, num_path_rows: int) -> TapReaders:
    """Invert a tap table on its device, without a host synchronisation.

    Args:
        conv_tap_TW: int (T, taps) path row of every tap, -1 before the root.
        num_path_rows: Y.

    Returns:
        int32 tables. Entries before ``ptr_Y1[0]`` are the taps before the root; nothing reads them.
    """
    num_taps = conv_tap_TW.shape[1]
    # A stable sort keeps (row, tap) order inside a path row: the fixed order of the gradient sums.
    path_row, entry = torch.sort(conv_tap_TW.reshape(-1), stable=True)
    edges = torch.arange(num_path_rows + 1, device=conv_tap_TW.device, dtype=path_row.dtype)
    ptr = torch.searchsorted(path_row, edges)
    return TapReaders(
        ptr.to(torch.int32),
        torch.div(entry, num_taps, rounding_mode="floor").to(torch.int32),
        torch.remainder(entry, num_taps).to(torch.int32),
    )
