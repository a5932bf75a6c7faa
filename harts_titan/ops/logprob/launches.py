"""Launches of the head's kernels over a block of logits, and the products around them; letters as in ``triton_op.py``.

:class:`TileStatistics` holds what forward takes from one block to the next, :class:`LabelTerms` what all blocks of the
backward pass read.
"""

from __future__ import annotations

import contextlib

import torch
import triton
from torch import Tensor

from harts_titan.ops.logprob.kernels import (
    combine_tiles,
    gather_labels,
    label_gradients,
    logit_gradients,
    segment_sums,
    tile_statistics,
)

_TILE = 1024
"""Columns of one tile; blocks are multiples of it, so that tiles do not depend on the block width."""
_BLOCK_TILES = (1, 2, 5, 8, 11)
"""Tiles per block, then multiples of the last. 11 tiles are 88 GEMM tiles of 128 words: with 6 of 256 columns
(D = 1536) 4 full waves of the weight gradient's product on 132 multiprocessors; 8 tiles 2.9 of 3, 5 tiles 1.8 of 2."""
_STATISTICS_ROWS, _STATISTICS_WARPS = 4, 4
_GRADIENT_ROWS, _GRADIENT_WARPS = 4, 4
_KEY_SHIFT = 32


def block_width(num_rows: int, num_words: int, max_elements: int) -> int:
    """Words per block: at most ``max_elements`` logits at once where a block of one tile allows it.

    Args:
        num_rows: T.
        num_words: W.
        max_elements: Logits that may exist at once.
    """
    tiles = max_elements // max(num_rows, 1) // _TILE
    largest = _BLOCK_TILES[-1]
    fitting = tiles // largest * largest if tiles >= largest else max([1, *(n for n in _BLOCK_TILES if n <= tiles)])
    return min(fitting * _TILE, triton.cdiv(num_words, _TILE) * _TILE)


def vocabulary_blocks(num_words: int, width: int) -> list[tuple[int, int]]:
    """First and end word of each block."""
    return [(a, min(a + width, num_words)) for a in range(0, num_words, width)]


def device_of(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def product(left: Tensor, right: Tensor, out: Tensor, *, add: bool = False) -> None:
    """``out = left @ right`` or ``out += left @ right``, rounded to the dtype of ``out`` only."""
    if out.dtype == left.dtype:
        torch.addmm(out, left, right, out=out) if add else torch.mm(left, right, out=out)
    elif left.is_cuda:
        if add:
            torch.addmm(out, left, right, out_dtype=out.dtype, out=out)
        else:
            torch.mm(left, right, out_dtype=out.dtype, out=out)
    else:
        # The CPU runs these kernels in tests only and has no mixed product.
        value = left.to(out.dtype) @ right.to(out.dtype)
        out.copy_(out + value if add else value)


class TileStatistics:
    """Tile statistics of a row set, filled block after block and then combined."""

    def __init__(self, like: Tensor, num_rows: int, num_words: int, label_S: Tensor) -> None:
        self.num_rows, self.num_tiles = num_rows, triton.cdiv(num_words, _TILE)
        self.tiles = like.new_empty((3, self.num_tiles, num_rows), dtype=torch.float32)
        self.label_logit = like.new_zeros(label_S.shape, dtype=torch.float32)

    def add(self, z: Tensor, first: int, row_S: Tensor, label_S: Tensor, first_word: int) -> None:
        """Fill the tiles of logits ``z`` and pick its labels; ``first`` is its first word among all ``num_words``."""
        (T, W), S = z.shape, label_S.numel()
        num_tiles, rows = triton.cdiv(W, _TILE), _STATISTICS_ROWS
        if T:
            tile_statistics[(triton.cdiv(T, rows) * num_tiles,)](
                z,
                *self.tiles.unbind(0),
                T,
                W,
                z.stride(0),
                first // _TILE,
                num_tiles,
                BT=rows,
                BW=_TILE,
                num_warps=_STATISTICS_WARPS,
            )
        if S:
            gather_labels[(triton.cdiv(S, 512),)](
                z, row_S, label_S, self.label_logit, S, W, z.stride(0), first_word + first, BS=512, num_warps=4
            )

    def combine(self) -> tuple[Tensor, ...]:
        """Return maximum, sum and slope of each row and the label logits: the fields of ``Statistics``."""
        rows = self.tiles.new_empty((3, self.num_rows))
        if self.num_rows:
            combine_tiles[(triton.cdiv(self.num_rows, 128),)](
                *self.tiles.unbind(0), *rows.unbind(0), self.num_rows, self.num_tiles, BT=128, num_warps=4
            )
        return (*(r.clone() for r in rows.unbind(0)), self.label_logit)


class LabelTerms:
    """Gradients of the log-probs, gathered by row and by (row, label), and what the gradient kernels read."""

    def __init__(
        self,
        row_S: Tensor,
        label_S: Tensor,
        saved: tuple[Tensor, Tensor, Tensor],
        dlogprob_S: Tensor | None,
        dentropy_T: Tensor | None,
    ) -> None:
        self.lse, self.entropy, self.label_logit = (t.contiguous() for t in saved)
        T, S = self.lse.shape[0], label_S.numel()
        self.dentropy = torch.zeros_like(self.lse) if dentropy_T is None else dentropy_T.float().contiguous()
        self.row_gradient = torch.zeros_like(self.lse)
        self.num_positions = S if dlogprob_S is not None else 0
        if dlogprob_S is None or S == 0 or T == 0:
            self.num_positions = 0
            return
        # Unlabelled positions sort behind every row; the stable sort fixes the order in which gradients add up.
        key = torch.where(label_S < 0, T << _KEY_SHIFT, (row_S << _KEY_SHIFT) + label_S)
        self.key, self.index = torch.sort(key, stable=True)
        edges = torch.searchsorted(self.key, torch.arange(T + 1, device=key.device) << _KEY_SHIFT)
        own = torch.arange(S, device=key.device)
        end = torch.searchsorted(self.key, self.key, right=True)
        repeated = torch.zeros_like(own, dtype=torch.bool)
        repeated[1:] = self.key[1:] == self.key[:-1]
        self.group_end = torch.where(repeated | (self.key >= T << _KEY_SHIFT), 0, end)
        self.group_gradient = torch.empty_like(self.label_logit)
        value = dlogprob_S.float().contiguous()
        segment_sums[(T,)](value, self.index, edges[:-1], edges[1:], self.row_gradient, T, B=64, num_warps=1)
        segment_sums[(S,)](value, self.index, own, self.group_end, self.group_gradient, S, B=64, num_warps=1)

    def write(self, z: Tensor, dz: Tensor, first_word: int) -> None:
        """Gradient of logits ``z`` of the words from ``first_word`` on into ``dz``, which may be ``z``."""
        (T, W), rows = z.shape, _GRADIENT_ROWS
        if T == 0 or W == 0:
            return
        num_tiles = triton.cdiv(W, _TILE)
        terms = (self.lse, self.entropy, self.row_gradient, self.dentropy)
        logit_gradients[(triton.cdiv(T, rows) * num_tiles,)](
            z,
            dz,
            *terms,
            T,
            W,
            z.stride(0),
            dz.stride(0),
            num_tiles,
            BT=rows,
            BW=_TILE,
            num_warps=_GRADIENT_WARPS,
        )
        if self.num_positions:
            label_gradients[(triton.cdiv(self.num_positions, 256),)](
                dz,
                self.key,
                self.index,
                self.group_end,
                self.group_gradient,
                self.label_logit,
                *terms,
                self.num_positions,
                W,
                dz.stride(0),
                first_word,
                BS=256,
                num_warps=4,
            )
