"""Ancestor attention in plain PyTorch: "dense" (tests) and "path" (CPU and any device, memory O(rows)).

Letters: T own rows, Y path rows (external rows first), H heads, K query-key dim, V value dim; L positions of one path,
N rows of a query tile.
"""

from __future__ import annotations

import torch
from torch import Tensor

from harts_titan.ops.attention.mask import TreeMask
from harts_titan.ops.dtypes import wide_dtype
from harts_titan.ops.single_thread import single_thread

QUERY_TILE = 32
"""Rows per query tile of the path backend; tiles sit on this grid of absolute positions."""


def tree_attention_dense(q_THK: Tensor, k_YHK: Tensor, v_YHV: Tensor, mask: TreeMask, scale: float) -> Tensor:
    """Masked softmax over all pairs; O(T Y) memory."""
    dtype = wide_dtype(q_THK.dtype)
    q_HTK, k_HYK, v_HYV = (x.to(dtype).transpose(0, 1) for x in (q_THK, k_YHK, v_YHV))
    tin_T1 = mask.tin_Y[mask.num_external_rows :, None]
    visible_TY = (mask.tin_Y <= tin_T1) & (tin_T1 < mask.tout_Y)
    scores_HTY = (q_HTK @ k_HYK.transpose(1, 2)) * scale
    weights_HTY = scores_HTY.masked_fill(~visible_TY, -torch.inf).softmax(dim=-1)
    return (weights_HTY @ v_HYV).transpose(0, 1).to(v_YHV.dtype)


def tree_attention_path(q_THK: Tensor, k_YHK: Tensor, v_YHV: Tensor, mask: TreeMask, scale: float) -> Tensor:
    """Per segment: gather its path's keys once, then attend in query tiles.

    Tiles lie on a fixed grid of absolute positions and read keys up to the end of their tile, so every matrix product
    of a row has the same shapes whatever other branches exist: the row's result is the same bit for bit, and equal to
    that of the trajectory alone.
    """
    return _PathAttention.apply(q_THK, k_YHK, v_YHV, mask, scale)


class _PathAttention(torch.autograd.Function):
    """Keeps inputs and outputs only; backward gathers and recomputes per tile."""

    @staticmethod
    def forward(ctx, q, k, v, mask, scale):
        o = v.new_empty((q.shape[0], *v.shape[1:]))
        with single_thread(q.device):
            for segment in range(mask.num_segments):
                path = _Path(mask, segment, q, k, v)
                for tile in path.tiles():
                    _, weights_HNL = path.attend(tile, scale)
                    o_NHV = (weights_HNL @ path.values(tile)).transpose(0, 1)
                    o[path.own_rows(tile)] = o_NHV[path.rows_in_tile(tile)].to(o.dtype)
        ctx.save_for_backward(q, k, v, o)
        ctx.mask, ctx.scale = mask, scale
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o = ctx.saved_tensors
        dtype = wide_dtype(q.dtype)
        dq, dk, dv = (x.new_zeros(x.shape, dtype=dtype) for x in (q, k, v))
        with single_thread(q.device):
            for segment in range(ctx.mask.num_segments):
                path = _Path(ctx.mask, segment, q, k, v)
                dk_LHK, dv_LHV = torch.zeros_like(path.k_LHK), torch.zeros_like(path.v_LHV)
                for tile in path.tiles():
                    end = tile + QUERY_TILE
                    q_HNK, weights_HNL = path.attend(tile, ctx.scale)
                    do_HNV, o_HNV = path.in_tile(do, tile), path.in_tile(o, tile)
                    dweights_HNL = do_HNV @ path.values(tile).transpose(1, 2)
                    mean_HN1 = (do_HNV * o_HNV).sum(-1, keepdim=True)
                    dscores_HNL = weights_HNL * (dweights_HNL - mean_HN1) * ctx.scale
                    dq_NHK = (dscores_HNL @ path.keys(tile)).transpose(0, 1)
                    dq[path.own_rows(tile)] = dq_NHK[path.rows_in_tile(tile)]
                    dk_LHK[:end] += (dscores_HNL.transpose(1, 2) @ q_HNK).transpose(0, 1)
                    dv_LHV[:end] += (weights_HNL.transpose(1, 2) @ do_HNV).transpose(0, 1)
                # Path rows of one segment are distinct, so the order of these sums is the order of segments.
                dk[path.rows] += dk_LHK[: path.end]
                dv[path.rows] += dv_LHV[: path.end]
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


class _Path:
    """Keys and values from position 0 to the end of one segment, padded with zeros to the tile grid."""

    def __init__(self, mask: TreeMask, segment: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.first_row, self.start, length = mask.segments[segment]
        self.end = self.start + length
        self.rows = mask.path_rows(segment).to(q.device)
        self.dtype, self.q_THK = wide_dtype(q.dtype), q
        self.k_LHK, self.v_LHV = self._padded(k), self._padded(v)
        self.later_NN = torch.ones(QUERY_TILE, QUERY_TILE, dtype=torch.bool, device=q.device).triu(1)

    def _padded(self, x: Tensor) -> Tensor:
        size = -(-self.end // QUERY_TILE) * QUERY_TILE
        padded = x.new_zeros((size, *x.shape[1:]), dtype=self.dtype)
        padded[: self.end] = x.index_select(0, self.rows)
        return padded

    def tiles(self) -> range:
        """Absolute positions of the tiles that hold rows of the segment."""
        return range(self.start // QUERY_TILE * QUERY_TILE, self.end, QUERY_TILE)

    def rows_in_tile(self, tile: int) -> slice:
        return slice(max(self.start - tile, 0), min(self.end - tile, QUERY_TILE))

    def own_rows(self, tile: int) -> slice:
        inside = self.rows_in_tile(tile)
        shift = self.first_row - self.start + tile
        return slice(inside.start + shift, inside.stop + shift)

    def in_tile(self, x: Tensor, tile: int) -> Tensor:
        """Rows of ``x`` that fall in the tile, zero elsewhere: (H, N, dim)."""
        buffer = x.new_zeros((x.shape[1], QUERY_TILE, x.shape[2]), dtype=self.dtype)
        buffer[:, self.rows_in_tile(tile)] = x[self.own_rows(tile)].transpose(0, 1).to(self.dtype)
        return buffer

    def keys(self, tile: int) -> Tensor:
        return self.k_LHK[: tile + QUERY_TILE].transpose(0, 1)

    def values(self, tile: int) -> Tensor:
        return self.v_LHV[: tile + QUERY_TILE].transpose(0, 1)

    def attend(self, tile: int, scale: float) -> tuple[Tensor, Tensor]:
        """Queries (H, N, K) and softmax weights (H, N, L) of one tile."""
        q_HNK = self.in_tile(self.q_THK, tile)
        scores_HNL = (q_HNK @ self.keys(tile).transpose(1, 2)) * scale
        scores_HNL[:, :, tile:].masked_fill_(self.later_NN, -torch.inf)
        return q_HNK, scores_HNL.softmax(dim=-1)
