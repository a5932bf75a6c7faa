"""Ancestor attention with flash-attn-4: an ancestor mask per element, block-sparse tiles around it.

HARTS 2.2 (the tree mask): row q sees row k iff k is q itself or an ancestor of it, ``tin[k] <= tin[q] < tout[k]`` in
depth-first numbers. Rows are in the plan's sequence order, so the mask compares depth-first numbers, and the tables
name the tiles with any visible pair (partial) and those with only visible pairs (full, no mask evaluated).

Two measured choices, neither of which changes a number: forward programs start with the last queries, which have most
keys (up to 12 % faster), and the mask is two 32-bit loads a key forward, one 64-bit load backward (3 to 15 % faster
there, slower forward where segments are short).

Outputs are deterministic, and so are the gradients of k and v. The gradient of q is summed with float32 atomics on
compute capability 9 (flash-attn-4 has no deterministic block-sparse kernel there), so two runs may differ in its last
bits; the "path" backend has a fixed order.

Letters: T own rows, X external rows, Y = X + T path rows, H heads, K query/key width, V value width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from flash_attn.cute import utils
from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd
from torch import Tensor

from harts_titan.ops.attention.fa4_package import last_queries_first
from harts_titan.ops.attention.mask import TreeMask, list_views, number_of_blocks, packed_lists, packed_size


class TileSizes(NamedTuple):
    """Rows of q and k per entry of the block tables; multiples of flash-attn-4's own tiles."""

    forward: tuple[int, int]
    backward: tuple[int, int]


def tile_sizes(head_dim: int, capability: tuple[int, int]) -> TileSizes:
    """Return the block sizes flash-attn-4 4.0.0b36 accepts for a head width on a device.

    Raises:
        ValueError: If the head width is above 192 or the device is neither Hopper nor Blackwell.
    """
    if head_dim > 192:
        raise ValueError(f"q/k head width {head_dim} exceeds 192; use backend='flex' for this attention")
    if capability[0] == 9:
        # The backward kernel for widths in (128, 192] works on 96 keys at a time.
        return TileSizes((128, 128), (128, 96 if head_dim > 128 else 128))
    if capability[0] in (10, 11):
        # Two q tiles per program forward; pairs of key tiles backward at width 192. Not measured yet.
        return TileSizes((256, 128), (128, 256 if head_dim > 128 else 128))
    raise ValueError(
        f"compute capability {capability} has no block-sparse backward in flash-attn-4; use backend='flex'"
    )


@cute.jit
def ancestor_mask(batch, head, m_idx, n_idx, seqlen_info, aux_tensors):
    """``tin[n] <= tin[X + m] < tout[n]``; the last tile's rows past the end are clamped, their scores are dropped."""
    tin, tout = aux_tensors[0], aux_tensors[1]
    m = cutlass.min(m_idx[0], seqlen_info.seqlen_q - 1) + seqlen_info.seqlen_k - seqlen_info.seqlen_q
    n = cutlass.min(n_idx[0], seqlen_info.seqlen_k - 1)
    number = utils.scalar_to_ssa(tin[m], cutlass.Int32)
    return (utils.scalar_to_ssa(tin[n], cutlass.Int32) <= number) & (
        number < utils.scalar_to_ssa(tout[n], cutlass.Int32)
    )


@cute.jit
def ancestor_mask_backward(batch, head, m_idx, n_idx, seqlen_info, aux_tensors):
    """The same in one unsigned comparison of distances, ``tin[X + m] - tin[n] < tout[n] - tin[n]``, of packed words."""
    words = aux_tensors[0]
    m = cutlass.min(m_idx[0], seqlen_info.seqlen_q - 1) + seqlen_info.seqlen_k - seqlen_info.seqlen_q
    n = cutlass.min(n_idx[0], seqlen_info.seqlen_k - 1)
    word = words[n]
    distance = cutlass.Uint32(cutlass.Int32(words[m] >> 32) - cutlass.Int32(word >> 32))
    size = cutlass.Uint32(cutlass.Int32(word & 0x7FFFFFFF))
    return utils.scalar_to_ssa(distance, cutlass.Uint32) < utils.scalar_to_ssa(size, cutlass.Uint32)


def packed_intervals(mask: TreeMask) -> Tensor:
    """int64 (Y,): ``tin << 32 | tout - tin``, what :func:`ancestor_mask_backward` reads."""
    return mask.tin_Y.long() << 32 | (mask.tout_Y - mask.tin_Y).long()


def tree_attention_fa4(q_THK: Tensor, k_YHK: Tensor, v_YHV: Tensor, mask: TreeMask, scale: float) -> Tensor:
    """Attend from every own row to its ancestors and itself.

    Args:
        q_THK: float16 or bfloat16 queries of own rows.
        k_YHK: Keys of the path rows, external rows first; same dtype.
        v_YHV: Values, same dtype; V <= 128 for K in (128, 192].
        mask: Depth-first intervals of the path rows, on the inputs' device.
        scale: Factor of the scores, usually K ** -0.5.

    Returns:
        (T, H, V) in the inputs' dtype.

    Raises:
        ValueError: If shapes, dtypes or the device are not supported.

    Memory: one float32 log-sum-exp per row and head beside the output, and the block tables (kept with the mask).
    """
    _check(q_THK, k_YHK, v_YHV, mask)
    tables = prepare_tables(mask, q_THK.shape[-1])
    sizes = [*tables.sizes.forward, *tables.sizes.backward]
    intervals = (mask.tin_Y, mask.tout_Y, tables.words_Y)
    out, _ = _attention_forward(q_THK, k_YHK, v_YHV, *intervals, tables.lists, sizes, float(scale))
    return out


class FA4Tables(NamedTuple):
    """What the kernels read besides q, k, v and the intervals of the mask."""

    lists: Tensor
    """int32: key blocks per query block (forward), then query blocks per key block (backward), in one buffer."""
    words_Y: Tensor
    """int64 intervals of the path rows, as :func:`packed_intervals` gives them."""
    sizes: TileSizes

    def views(self, mask: TreeMask) -> tuple[list[Tensor], list[Tensor]]:
        """The lists of the forward and of the backward pass, as :func:`list_views` gives them."""
        rows = mask.num_rows, mask.num_path_rows
        return _lists(self.lists, *rows, self.sizes.forward), _lists(self.lists, *rows, self.sizes.backward, True)


def prepare_tables(mask: TreeMask, head_dim: int) -> FA4Tables:
    """Return the kernels' tables of ``mask`` for one head width, built once and kept with it.

    Call it before a ``torch.compile`` region that runs :func:`tree_attention_fa4`: building them is host work that
    cannot be traced.
    """
    cache: dict[TileSizes, FA4Tables] | None = getattr(mask, "_fa4_tables", None)
    sizes = tile_sizes(head_dim, torch.cuda.get_device_capability(mask.device))
    if cache is not None and sizes in cache:
        return cache[sizes]
    if torch.compiler.is_compiling():
        raise ValueError("call prepare_tables(mask, head_dim) before the compiled region that runs tree_attention_fa4")
    if cache is None:
        cache = {}
        object.__setattr__(mask, "_fa4_tables", cache)
    lists = packed_lists(mask, by_query=sizes.forward, by_key=sizes.backward)
    cache[sizes] = FA4Tables(lists, packed_intervals(mask), sizes)
    return cache[sizes]


def _check(q: Tensor, k: Tensor, v: Tensor, mask: TreeMask) -> None:
    Y = k.shape[0]
    T = Y - mask.num_external_rows
    (_, H, K), V = q.shape, v.shape[-1]
    if tuple(q.shape) != (T, H, K) or tuple(k.shape) != (Y, H, K) or tuple(v.shape) != (Y, H, V):
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} do not fit: needed (T, H, K), (Y, H, K), "
            f"(Y, H, V) with Y - T = num_external_rows = {mask.num_external_rows}"
        )
    if mask.tin_Y.shape[0] != Y or mask.tin_Y.device != q.device:
        got = f"{mask.tin_Y.shape[0]} path rows on {mask.tin_Y.device}"
        raise ValueError(f"mask covers {got}, k has {Y} rows on {q.device}")
    if q.dtype not in (torch.float16, torch.bfloat16) or k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(f"q, k, v must share float16 or bfloat16; got {q.dtype}, {k.dtype}, {v.dtype}")


def _lists(
    packed: Tensor, num_rows: int, num_path_rows: int, size: Sequence[int], by_key: bool = False
) -> list[Tensor]:
    """Lists by query at the front of the buffer, or those by key at its end."""
    num_q, num_kv = number_of_blocks(num_rows, num_path_rows, (size[0], size[1]))
    if by_key:
        return list_views(packed[packed.shape[0] - packed_size(num_kv, num_q) :], num_kv, num_q)
    return list_views(packed[: packed_size(num_q, num_kv)], num_q, num_kv)


@torch.library.custom_op(
    "harts_titan::tree_attention_fa4",
    mutates_args=(),
    schema=(
        "(Tensor q, Tensor k, Tensor v, Tensor tin, Tensor tout, Tensor words, Tensor lists, int[] sizes, "
        "float scale) -> (Tensor, Tensor)"
    ),
)
def _attention_forward(q, k, v, tin, tout, words, lists, sizes, scale):
    """Output and float32 log-sum-exp (H, T)."""
    if q.shape[0] == 0:
        return v.new_empty((0, *v.shape[1:])), q.new_empty((q.shape[1], 0), dtype=torch.float32)
    blocks = _lists(lists, q.shape[0], k.shape[0], sizes[:2])
    hopper = torch.cuda.get_device_capability(q.device)[0] == 9
    with torch.cuda.device(q.device), last_queries_first() if hopper else contextlib.nullcontext():
        out, lse = _flash_attn_fwd(
            q[None],
            k[None],
            v[None],
            softmax_scale=scale,
            mask_mod=ancestor_mask,
            aux_tensors=[tin, tout],
            block_sparse_tensors=BlockSparseTensorsTorch(*blocks, block_size=(sizes[0], sizes[1])),
            return_lse=True,
        )[:2]
    return out[0], lse[0]


@_attention_forward.register_fake
def _(q, k, v, tin, tout, words, lists, sizes, scale):
    return q.new_empty((q.shape[0], *v.shape[1:])), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


@torch.library.custom_op(
    "harts_titan::tree_attention_fa4_backward",
    mutates_args=(),
    schema=(
        "(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor dout, Tensor words, Tensor lists, "
        "int[] sizes, float scale) -> (Tensor, Tensor, Tensor)"
    ),
)
def _attention_backward(q, k, v, out, lse, dout, words, lists, sizes, scale):
    if q.shape[0] == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    blocks = _lists(lists, q.shape[0], k.shape[0], sizes[2:], by_key=True)
    with torch.cuda.device(q.device):
        dq, dk, dv = _flash_attn_bwd(
            q[None],
            k[None],
            v[None],
            out[None],
            dout.contiguous()[None],
            lse[None],
            scale,
            mask_mod=ancestor_mask_backward,
            aux_tensors=[words],
            block_sparse_tensors=BlockSparseTensorsTorch(*blocks, block_size=(sizes[2], sizes[3])),
        )
    # Gradients take the inputs' layouts, which may be permuted views.
    return dq[0].contiguous(), dk[0].contiguous(), dv[0].contiguous()


@_attention_backward.register_fake
def _(q, k, v, out, lse, dout, words, lists, sizes, scale):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx, inputs, output):
    q, k, v, _, _, words, lists, sizes, scale = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, out, lse, words, lists)
    ctx.settings = (sizes, scale)


def _differentiate(ctx, dout, _):
    grads: tuple[Tensor | None, ...] = (None, None, None)
    if dout is not None:
        q, k, v, out, lse, words, lists = ctx.saved_tensors
        grads = _attention_backward(q, k, v, out, lse, dout, words, lists, *ctx.settings)
    return (*grads, None, None, None, None, None, None)


_attention_forward.register_autograd(_differentiate, setup_context=_save)
