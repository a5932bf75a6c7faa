"""Other forms of flash-attn-4's ancestor attention, for ``gpu_attention.py`` to measure beside the one in use."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from flash_attn.cute import block_sparse_utils, flash_bwd_sm90, utils
from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd
from torch import Tensor

from harts_titan.ops.attention import TreeMask, fa4
from harts_titan.ops.attention.fa4_package import last_queries_first
from harts_titan.ops.attention.mask import list_views, number_of_blocks, packed_lists, packed_size


@cute.jit
def two_arrays(batch, head, m_idx, n_idx, seqlen_info, aux_tensors):
    """The forward mask in use, under another name: its kernels are compiled apart, in the package's order."""
    tin, tout = aux_tensors[0], aux_tensors[1]
    m = cutlass.min(m_idx[0], seqlen_info.seqlen_q - 1) + seqlen_info.seqlen_k - seqlen_info.seqlen_q
    n = cutlass.min(n_idx[0], seqlen_info.seqlen_k - 1)
    number = utils.scalar_to_ssa(tin[m], cutlass.Int32)
    return (utils.scalar_to_ssa(tin[n], cutlass.Int32) <= number) & (
        number < utils.scalar_to_ssa(tout[n], cutlass.Int32)
    )


@cute.jit
def distance(batch, head, m_idx, n_idx, seqlen_info, aux_tensors):
    """One unsigned comparison: ``tin_q - tin_k < tout_k - tin_k``."""
    tin, size = aux_tensors[0], aux_tensors[1]
    m = cutlass.min(m_idx[0], seqlen_info.seqlen_q - 1) + seqlen_info.seqlen_k - seqlen_info.seqlen_q
    n = cutlass.min(n_idx[0], seqlen_info.seqlen_k - 1)
    gap = cutlass.Uint32(tin[m] - tin[n])
    return utils.scalar_to_ssa(gap, cutlass.Uint32) < utils.scalar_to_ssa(cutlass.Uint32(size[n]), cutlass.Uint32)


@cute.jit
def distance_from_last(batch, head, m_idx, n_idx, seqlen_info, aux_tensors):
    """:func:`distance` under another name."""
    tin, size = aux_tensors[0], aux_tensors[1]
    m = cutlass.min(m_idx[0], seqlen_info.seqlen_q - 1) + seqlen_info.seqlen_k - seqlen_info.seqlen_q
    n = cutlass.min(n_idx[0], seqlen_info.seqlen_k - 1)
    gap = cutlass.Uint32(tin[m] - tin[n])
    return utils.scalar_to_ssa(gap, cutlass.Uint32) < utils.scalar_to_ssa(cutlass.Uint32(size[n]), cutlass.Uint32)


@cute.jit
def lean_loads(
    tensors, batch, head, n_block, state_q, state_do, pipeline_q, pipeline_do, load_k, load_v, load_q, load_do,
    load_lse, load_dpsum, bytes_k, bytes_v, Q_stage_eq_dO_stage: cutlass.Constexpr,
    q_subtile_factor: cutlass.Constexpr, m_block_max,
):  # fmt: skip
    """The backward kernel's loads when a list entry is one tile of queries: no division, no bound."""
    count, index, full_count, full_index, *_ = tensors
    loaded = False
    for i in cutlass.range(count[batch, head, n_block], unroll=1):
        state_q, state_do = block_sparse_utils._load_q_do_block_sm90(
            index[batch, head, n_block, i], state_q, state_do, pipeline_q, pipeline_do, load_k, load_v, load_q,
            load_do, load_lse, load_dpsum, bytes_k, bytes_v, Q_stage_eq_dO_stage, load_kv=not loaded,
        )  # fmt: skip
        loaded = True
    for i in cutlass.range(full_count[batch, head, n_block], unroll=1):
        state_q, state_do = block_sparse_utils._load_q_do_block_sm90(
            full_index[batch, head, n_block, i], state_q, state_do, pipeline_q, pipeline_do, load_k, load_v, load_q,
            load_do, load_lse, load_dpsum, bytes_k, bytes_v, Q_stage_eq_dO_stage, load_kv=not loaded,
        )  # fmt: skip
        loaded = True
    return state_q, state_do


@cute.jit
def lean_products(
    tensors, batch_idx, head_idx, n_block, state_q, state_do, mma_one_m_block_fn, mask, mask_mod,
    is_causal: cutlass.Constexpr, is_local: cutlass.Constexpr, thr_mma_SdP, score_mod_fn=None,
    score_mod_bwd_fn=None, q_subtile_factor: cutlass.Constexpr = 1, m_block_max=0, aux_data=None,
    fastdiv_mods=(None, None),
):  # fmt: skip
    """The backward kernel's products likewise; full tiles, which are complete, are not masked at all."""
    count, index, full_count, *_ = tensors
    masked = partial(
        mask.apply_mask, batch_idx=batch_idx, head_idx=head_idx, n_block=n_block, thr_mma=thr_mma_SdP,
        mask_seqlen=True, mask_causal=is_causal, mask_local=is_local, mask_mod=mask_mod, aux_data=aux_data,
        fastdiv_mods=fastdiv_mods,
    )  # fmt: skip
    accumulate = False
    for i in cutlass.range(count[batch_idx, head_idx, n_block], unroll=1):
        state_q, state_do = mma_one_m_block_fn(
            index[batch_idx, head_idx, n_block, i], state_q, state_do, mask_fn=masked, score_mod_fn=score_mod_fn,
            score_mod_bwd_fn=score_mod_bwd_fn, dKV_accumulate=accumulate,
        )  # fmt: skip
        accumulate = True
    for i in cutlass.range(full_count[batch_idx, head_idx, n_block], unroll=1):
        state_q, state_do = mma_one_m_block_fn(
            i, state_q, state_do, mask_fn=None, score_mod_fn=score_mod_fn, score_mod_bwd_fn=score_mod_bwd_fn,
            dKV_accumulate=accumulate,
        )  # fmt: skip
        accumulate = True
    return state_q, state_do


@cute.jit
def words_lean(batch, head, m_idx, n_idx, seqlen_info, aux_tensors):
    """The backward mask in use, under another name."""
    words = aux_tensors[0]
    m = cutlass.min(m_idx[0], seqlen_info.seqlen_q - 1) + seqlen_info.seqlen_k - seqlen_info.seqlen_q
    n = cutlass.min(n_idx[0], seqlen_info.seqlen_k - 1)
    word = words[n]
    gap = cutlass.Uint32(cutlass.Int32(words[m] >> 32) - cutlass.Int32(word >> 32))
    size = cutlass.Uint32(cutlass.Int32(word & 0x7FFFFFFF))
    return utils.scalar_to_ssa(gap, cutlass.Uint32) < utils.scalar_to_ssa(size, cutlass.Uint32)


@cute.jit
def depth_first(batch, head, m_idx, n_idx, seqlen_info, aux_tensors):
    """Rows in depth-first order, no external rows: one load per key."""
    tout = aux_tensors[0]
    n = cutlass.min(n_idx[0], seqlen_info.seqlen_k - 1)
    end = utils.scalar_to_ssa(tout[n], cutlass.Int32)
    return (n_idx <= m_idx) & (m_idx < end)


class Variant(NamedTuple):
    """What one measured form gives the kernels."""

    mask_mod: Callable[..., Any]
    aux: Callable[[TreeMask], list[Tensor]]
    mask_mod_backward: Callable[..., Any] | None = None
    """Another mask backward, with its arrays."""
    aux_backward: Callable[[TreeMask], list[Tensor]] | None = None
    last_first: bool = False
    """Forward programs from the last block of queries, which has most keys, to the first."""
    lean: bool = False
    """Backward loops without divisions and bounds; lists of single tiles of 64 queries."""
    forward: tuple[int, int] = (128, 128)
    backward: tuple[int, int] = (128, 96)


def _intervals(mask: TreeMask) -> list[Tensor]:
    return [mask.tin_Y, mask.tout_Y]


def _sizes(mask: TreeMask) -> list[Tensor]:
    return [mask.tin_Y, mask.tout_Y - mask.tin_Y]


def _words(mask: TreeMask) -> list[Tensor]:
    return [fa4.packed_intervals(mask)]


IN_USE = Variant(fa4.ancestor_mask, _intervals, fa4.ancestor_mask_backward, _words, last_first=True)
VARIANTS = {
    "first_queries_first": Variant(two_arrays, _intervals),
    "distance": Variant(distance_from_last, _sizes, distance, _sizes, last_first=True),
    "one_word": Variant(fa4.ancestor_mask_backward, _words, last_first=True),
    "lean": Variant(distance, _sizes, lean=True, backward=(64, 96)),
    "lean_one_word": Variant(distance, _sizes, words_lean, _words, lean=True, backward=(64, 96)),
}


@contextlib.contextmanager
def lean_loops(wanted: bool) -> Iterator[None]:
    """Backward kernels compiled inside run the lean loops."""
    names = {
        "produce_block_sparse_q_loads_bwd_sm90": lean_loads,
        "consume_block_sparse_mma_bwd_sm90": lean_products,
    }
    originals = {name: getattr(flash_bwd_sm90, name) for name in names}
    try:
        for name, function in names.items() if wanted else ():
            setattr(flash_bwd_sm90, name, function)
        yield
    finally:
        for name, function in originals.items():
            setattr(flash_bwd_sm90, name, function)


class Measured:
    """Forward and backward of one variant on one mask."""

    def __init__(self, variant: Variant, mask: TreeMask, scale: float) -> None:
        self.variant, self.mask, self.scale = variant, mask, scale
        lists = packed_lists(mask, by_query=variant.forward, by_key=variant.backward)
        rows = mask.num_rows, mask.num_path_rows
        num_q, num_kv = number_of_blocks(*rows, variant.forward)
        cut = packed_size(num_q, num_kv)
        self.by_query = BlockSparseTensorsTorch(*list_views(lists[:cut], num_q, num_kv), block_size=variant.forward)
        num_q, num_kv = number_of_blocks(*rows, variant.backward)
        self.by_key = BlockSparseTensorsTorch(*list_views(lists[cut:], num_kv, num_q), block_size=variant.backward)
        self.aux = variant.aux(mask)
        self.aux_backward = (variant.aux_backward or variant.aux)(mask)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        with last_queries_first() if self.variant.last_first else contextlib.nullcontext():
            out, lse = _flash_attn_fwd(
                q[None],
                k[None],
                v[None],
                softmax_scale=self.scale,
                mask_mod=self.variant.mask_mod,
                aux_tensors=self.aux,
                block_sparse_tensors=self.by_query,
                return_lse=True,
            )[:2]
        return out, lse

    def backward(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor) -> list[Tensor]:
        with lean_loops(self.variant.lean):
            grads = _flash_attn_bwd(
                q[None],
                k[None],
                v[None],
                out,
                dout[None],
                lse,
                self.scale,
                mask_mod=self.variant.mask_mod_backward or self.variant.mask_mod,
                aux_tensors=self.aux_backward,
                block_sparse_tensors=self.by_key,
            )
        return [g[0] for g in grads[:3]]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
        with torch.no_grad():
            out, lse = self.forward(q, k, v)
            return [out[0], *self.backward(q, k, v, out, lse, dout)]
