"""Ancestor attention by own Triton kernels: deterministic; each trajectory has the bits of its run alone.

HARTS 2.2 (the tree mask). Slower than flash-attn-4; for runs that compare compact and expanded execution bit for bit,
or need the gradient of q without atomics. float32 is for tests.

Letters: T own rows, X external rows, Y = X + T path rows, H heads, K query-key width, V value width.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import torch
from torch import Tensor

from harts_titan.ops.assembler import require_sound_ptxas
from harts_titan.ops.attention.kernels import attention_forward, attention_key_gradients, attention_query_gradient
from harts_titan.ops.attention.mask import TreeMask
from harts_titan.ops.attention.path_tables import PathTables, path_tables, views


class Launch(NamedTuple):
    """Rows of query and key tiles, and options of a launch."""

    block_q: int
    block_kv: int
    num_warps: int
    num_stages: int


class Configuration(NamedTuple):
    """Pinned launches of the kernels."""

    forward: Launch
    query_gradient: Launch
    """Query tiles of ``forward``, and its key tiles or equal parts of them: the two share lists."""
    key_gradients: Launch

    def check(self) -> None:
        """Raise ValueError if the kernels that share lists have tiles that do not fit together."""
        lists, tiles = self.forward, self.query_gradient
        if tiles.block_q != lists.block_q or lists.block_kv % tiles.block_kv:
            raise ValueError(f"query_gradient {tiles} must have the query tiles of {lists} and divide its key tiles")


CONFIGURATION = Configuration(Launch(128, 64, 8, 3), Launch(128, 64, 8, 3), Launch(32, 64, 4, 3))
"""float16 and bfloat16 on compute capability 9: the fastest of ``benchmarks/gpu_attention.py``'s section ``sweep``. The
first two take most of a multiprocessor's shared memory at K = 192, V = 128; of the third two programs fit."""
CONFIGURATION_FLOAT32 = Configuration(Launch(16, 16, 4, 1), Launch(16, 16, 4, 1), Launch(16, 16, 4, 1))


def configuration(dtype: torch.dtype) -> Configuration:
    """Launches for a dtype."""
    return CONFIGURATION_FLOAT32 if dtype == torch.float32 else CONFIGURATION


def tree_attention_triton(q_THK: Tensor, k_YHK: Tensor, v_YHV: Tensor, mask: TreeMask, scale: float) -> Tensor:
    """Attend from every own row to its ancestors and itself.

    Args:
        q_THK: float16, bfloat16 or float32 queries of own rows.
        k_YHK: Keys of the path rows, external rows first; same dtype.
        v_YHV: Values, same dtype.
        mask: Depth-first intervals of the path rows, on the inputs' device.
        scale: Factor of the scores, positive, usually K ** -0.5.

    Returns:
        (T, H, V) in the inputs' dtype.

    Raises:
        ValueError: If the scale is not positive, or shapes or dtypes are not supported: K and V are powers of two of at
            least 16, K may also be the sum of two (192 = 128 + 64).

    Memory: one float32 log-sum-exp per row and head beside the output, one more in the backward pass, and the lists
    (kept with the mask).
    """
    widths(q_THK.shape[-1], v_YHV.shape[-1])
    if not scale > 0:
        # The running maximum is taken before the scale.
        raise ValueError(f"scale must be positive, got {scale}")
    if q_THK.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"q, k, v must be float16, bfloat16 or float32, got {q_THK.dtype}")
    if k_YHK.dtype != q_THK.dtype or v_YHV.dtype != q_THK.dtype:
        raise ValueError(f"q, k, v must share a dtype; got {q_THK.dtype}, {k_YHK.dtype}, {v_YHV.dtype}")
    tables = prepare_tables(mask, q_THK.dtype)
    out, _ = _attention_forward(
        q_THK, k_YHK, v_YHV, mask.tin_Y, tables.packed, tables.sizes, mask.num_external_rows, float(scale)
    )
    return out


def prepare_tables(mask: TreeMask, dtype: torch.dtype) -> PathTables:
    """Return the lists of ``mask``, built once per tile sizes and kept with it.

    Call it before a ``torch.compile`` region that runs :func:`tree_attention_triton`: host work cannot be traced.
    """
    config = configuration(dtype)
    config.check()
    blocks = (config.forward.block_q, config.forward.block_kv, config.key_gradients.block_kv)
    cache: dict[tuple[int, ...], PathTables] | None = getattr(mask, "_path_tables", None)
    if cache is not None and blocks in cache:
        return cache[blocks]
    if torch.compiler.is_compiling():
        raise ValueError("call prepare_tables(mask, dtype) before the compiled region that runs tree_attention_triton")
    if mask.device.type == "cuda" and torch.cuda.get_device_capability(mask.device)[0] == 9:
        require_sound_ptxas()
    if cache is None:
        cache = {}
        object.__setattr__(mask, "_path_tables", cache)
    cache[blocks] = path_tables(mask, *blocks)
    return cache[blocks]


def widths(key_dim: int, value_dim: int) -> tuple[int, int]:
    """The two power-of-two parts of the query-key width; the second is 0 if the first is all of it.

    Raises:
        ValueError: If the kernels have no tiles for these widths.
    """
    first = 1 << (key_dim.bit_length() - 1)
    second = key_dim - first
    for width in (first, second or first, value_dim):
        if width < 16 or width & (width - 1):
            raise ValueError(
                f"head widths K = {key_dim}, V = {value_dim}: the triton backend needs V and K, or the two parts of K, "
                "to be powers of two of at least 16; use attention backend 'flex' or 'path'"
            )
    return first, second


def _device_of(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    # Triton launches on the current device, which need not be the tensors'.
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def _last_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _constants(q: Tensor, v: Tensor, launch: Launch) -> dict[str, object]:
    first, second = widths(q.shape[-1], v.shape[-1])
    return {
        "H": q.shape[1],
        "KA": first,
        "KB": second,
        "V": v.shape[-1],
        "M": launch.block_q,
        "N": launch.block_kv,
        # Tensor cores would round float32 inputs.
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        "num_warps": launch.num_warps,
        "num_stages": launch.num_stages,
    }


@torch.library.custom_op(
    "harts_titan::tree_attention_triton",
    mutates_args=(),
    schema=(
        "(Tensor q, Tensor k, Tensor v, Tensor tin, Tensor packed, Tensor sizes, int num_external, float scale) "
        "-> (Tensor, Tensor)"
    ),
)
def _attention_forward(q, k, v, tin, packed, sizes, num_external, scale):
    """Output and base-2 log-sum-exp, float32 (H, T)."""
    T, H, _ = q.shape
    out = v.new_empty((T, H, v.shape[2]))
    lse = q.new_empty((H, T), dtype=torch.float32)
    if T == 0:
        return out, lse
    q, k, v = map(_last_contiguous, (q, k, v))
    lists = views(packed, sizes)
    tiles = lists.query_chain_I.shape[0]
    strides = [s for x in (q, k, v) for s in x.stride()[:2]]
    with _device_of(q):
        attention_forward[(tiles * H,)](
            q, k, v, out, lse, *lists[:8], scale, T, tiles, *strides,
            **_constants(q, v, configuration(q.dtype).forward), L=configuration(q.dtype).forward.block_kv,
        )  # fmt: skip
    return out, lse


@_attention_forward.register_fake
def _(q, k, v, tin, packed, sizes, num_external, scale):
    return (
        v.new_empty((q.shape[0], q.shape[1], v.shape[2])),
        q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32),
    )


@torch.library.custom_op(
    "harts_titan::tree_attention_triton_backward",
    mutates_args=(),
    schema=(
        "(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor dout, Tensor tin, Tensor packed, Tensor sizes, "
        "int num_external, float scale) -> (Tensor, Tensor, Tensor)"
    ),
)
def _attention_backward(q, k, v, out, lse, dout, tin, packed, sizes, num_external, scale):
    if q.shape[0] == 0:
        return q.new_empty(q.shape), torch.zeros_like(k), torch.zeros_like(v)
    q, k, v, dout = map(_last_contiguous, (q, k, v, dout))
    dq, delta = query_gradient(q, k, v, out, lse, dout, packed, sizes, scale)
    return dq, *key_gradients(q, k, v, lse, delta, dout, tin, packed, sizes, num_external, scale)


def query_gradient(q, k, v, out, lse, dout, packed, sizes, scale):
    """Gradient of q and ``sum(dout * out)``, float32 (H, T); last dimensions are contiguous."""
    T, H, _ = q.shape
    dq, delta = q.new_empty(q.shape), torch.empty_like(lse)
    lists = views(packed, sizes)
    config = configuration(q.dtype)
    strides = [s for x in (q, k, v, dout) for s in x.stride()[:2]]
    tiles = lists.query_chain_I.shape[0]
    with _device_of(q):
        attention_query_gradient[(tiles * H,)](
            q, k, v, out, dout, lse, delta, dq, *lists[:8], scale, T, tiles, *strides,
            **_constants(q, v, config.query_gradient), L=config.forward.block_kv,
        )  # fmt: skip
    return dq, delta


def key_gradients(q, k, v, lse, delta, dout, tin, packed, sizes, num_external, scale):
    """Gradients of k and v, from the log-sum-exp and what :func:`query_gradient` gives."""
    T, H, _ = q.shape
    dk, dv = k.new_empty(k.shape), v.new_empty(v.shape)
    lists = views(packed, sizes)
    strides = [s for x in (q, k, v, dout) for s in x.stride()[:2]]
    tiles = lists.key_row_J.shape[0]
    with _device_of(q):
        attention_key_gradients[(tiles * H,)](
            q, k, v, dout, lse, delta, dk, dv, tin, *lists[8:], scale, T, num_external, tiles, *strides,
            **_constants(q, v, configuration(q.dtype).key_gradients),
        )  # fmt: skip
    return dk, dv


@_attention_backward.register_fake
def _(q, k, v, out, lse, dout, tin, packed, sizes, num_external, scale):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx, inputs, output):
    q, k, v, tin, packed, sizes, num_external, scale = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, out, lse, tin, packed, sizes)
    ctx.settings = (num_external, scale)


def _differentiate(ctx, dout, _):
    grads: tuple[Tensor | None, ...] = (None, None, None)
    if dout is not None:
        q, k, v, out, lse, tin, packed, sizes = ctx.saved_tensors
        grads = _attention_backward(q, k, v, out, lse, dout, tin, packed, sizes, *ctx.settings)
    return (*grads, None, None, None, None, None)


_attention_forward.register_autograd(_differentiate, setup_context=_save)
