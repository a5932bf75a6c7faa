"""KDA over packed tree sequences on CUDA (HARTS 3.4: ChunkLA with exported boundary states).

``launches.py`` launches the kernels. Replay rows are copies of ancestor rows: their outputs are dropped and their
gradients are added to the ancestor's in float32, in packed order.

Letters: T own rows, X external rows, Y = X + T path rows, S slots (rows of all chunks, padding included), Q sequences,
C chunks, E exports, H heads, K key width, V value width.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from harts_titan.ops.kda.launches import run_backward, run_forward
from harts_titan.ops.kda.saved import Saved, new_saved
from harts_titan.ops.kda.sequences import PackedSequences
from harts_titan.ops.kda.tables import KDATables, prepare_tables, unpack


def kda_triton(
    q_YHK: Tensor,
    k_YHK: Tensor,
    v_YHV: Tensor,
    f_YHK: Tensor,
    b_YH: Tensor,
    A_log_H: Tensor,
    dt_bias_HK: Tensor,
    sequences: PackedSequences,
    lower_bound: float = -5.0,
    external_state_EHKV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run KDA over the packed sequences of one call.

    HARTS 3.4. Differentiable in every floating input, through the exported states and the external states included.
    Deterministic: no atomics, and a row's result does not depend on what else is packed. Products of float32 inputs run
    in TF32 on CUDA.

    Args:
        q_YHK: float16, bfloat16 or float32 queries of the path rows (external first), after the short convolution.
        k_YHK: Keys, same dtype.
        v_YHV: Values, same dtype.
        f_YHK: Raw gate, before ``dt_bias``.
        b_YH: Raw beta, before its sigmoid.
        A_log_H: float32 log gate scale.
        dt_bias_HK: float32 gate bias.
        sequences: Packed sequences on the inputs' device; their ``chunk_size`` is 32 or 64.
        lower_bound: Log-decay per token lies in (lower_bound, 0); in [-5, 0).
        external_state_EHKV: float32 states of the pool's external rows, or None.

    Returns:
        Outputs of own rows (T, H, V) in the inputs' dtype, and float32 exported states (E, H, K, V).

    Raises:
        ValueError: If shapes, dtypes, ``chunk_size`` or ``lower_bound`` are not supported.

    Memory: besides the inputs, everything the backward pass would otherwise compute again stays for it: 2.3 KB per slot
    and head at K = V = 128 in bfloat16 (2.6 GB for 65,536 rows of 16 heads; the inputs are 1 KB). Meant for layers
    that are recomputed, where only one layer's share is alive at a time.
    """
    H, K = q_YHK.shape[1:]
    V = v_YHV.shape[-1]
    _check(q_YHK, k_YHK, v_YHV, f_YHK, b_YH, A_log_H, dt_bias_HK, sequences, lower_bound)
    if external_state_EHKV is None:
        external_state_EHKV = q_YHK.new_empty((0, H, K, V), dtype=torch.float32)
    if tuple(external_state_EHKV.shape) != (sequences.num_external_states, H, K, V):
        raise ValueError(
            f"external_state_EHKV has shape {tuple(external_state_EHKV.shape)}, "
            f"needed {(sequences.num_external_states, H, K, V)}"
        )
    o_THV, exported_EHKV, *_ = _kda_forward(
        q_YHK,
        k_YHK,
        v_YHV,
        f_YHK,
        b_YH,
        A_log_H,
        dt_bias_HK,
        external_state_EHKV.float(),
        list(prepare_tables(sequences)),
        sequences.chunk_size,
        float(lower_bound),
    )
    return o_THV, exported_EHKV


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    f: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    sequences: PackedSequences,
    lower_bound: float,
) -> None:
    Y, H, K = q.shape
    V = v.shape[-1]
    for name, tensor, shape in (
        ("k_YHK", k, (Y, H, K)),
        ("v_YHV", v, (Y, H, V)),
        ("f_YHK", f, (Y, H, K)),
        ("b_YH", b, (Y, H)),
        ("A_log_H", A_log, (H,)),
        ("dt_bias_HK", dt_bias, (H, K)),
    ):
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, needed {shape} from q_YHK")
    if q.dtype != k.dtype or q.dtype != v.dtype or q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"q, k, v must share float16, bfloat16 or float32; got {q.dtype}, {k.dtype}, {v.dtype}")
    if sequences.num_path_rows != Y:
        raise ValueError(f"q_YHK has {Y} rows, sequences cover {sequences.num_path_rows} path rows")
    for name, width in (("K", K), ("V", V)):
        if width not in (16, 32, 64, 128):
            raise ValueError(f"head width {name} = {width} must be 16, 32, 64 or 128 for the triton backend")
    if sequences.chunk_size not in (32, 64):
        raise ValueError(f"chunk_size = {sequences.chunk_size} must be 32 or 64 for the triton backend")
    if not -5.0 <= lower_bound < 0.0:
        raise ValueError(f"lower_bound = {lower_bound} must lie in [-5, 0): the in-chunk exponents overflow below it")


def _device_of(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    # Triton launches on the current device, which need not be the tensors'.
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


@torch.library.custom_op(
    "harts_titan::kda_forward",
    mutates_args=(),
    schema=(
        "(Tensor q, Tensor k, Tensor v, Tensor f, Tensor b, Tensor A_log, Tensor dt_bias, Tensor external, "
        "Tensor[] tables, int chunk_size, float lower_bound) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, "
        "Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
)
def _kda_forward(q, k, v, f, b, A_log, dt_bias, external, tables, chunk_size, lower_bound):
    """Outputs, exported states, and ``Saved``."""
    t = unpack(tables, chunk_size)
    (H, K), V = q.shape[1:], v.shape[-1]
    num_slots, num_external = t.packed_row_S.shape[0], external.shape[0]
    pool = external.new_empty((num_external + t.num_exports, H, K, V))
    pool[:num_external] = external
    o = v.new_empty((t.kept_T.shape[0], H, V))
    s = new_saved(q, v, num_slots, chunk_size)
    if num_slots:
        u = torch.empty_like(s.v_new)
        with _device_of(q):
            run_forward([x.contiguous() for x in (q, k, v, f, b, A_log, dt_bias)], s, u, pool, o, t, lower_bound)
    # A copy: the pool's external rows need not live as long as the exports.
    return o, pool[num_external:].clone(), *s


@_kda_forward.register_fake
def _(q, k, v, f, b, A_log, dt_bias, external, tables, chunk_size, lower_bound):
    t = KDATables(*tables)
    H, K = q.shape[1:]
    return (
        v.new_empty((t.kept_T.shape[0], H, v.shape[-1])),
        external.new_empty((t.export_sequence_E.shape[0], H, K, v.shape[-1])),
        *new_saved(q, v, t.packed_row_S.shape[0], chunk_size),
    )


@torch.library.custom_op(
    "harts_titan::kda_backward",
    mutates_args=(),
    schema=(
        "(Tensor q, Tensor k, Tensor v, Tensor f, Tensor b, Tensor A_log, Tensor dt_bias, Tensor external, "
        "Tensor[] saved, Tensor? do, Tensor? dexported, Tensor[] tables, int chunk_size, "
        "float lower_bound) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
)
def _kda_backward(q, k, v, f, b, A_log, dt_bias, external, saved, do, dexported, tables, chunk_size, lower_bound):
    """Gradients of the eight differentiable inputs of ``kda_forward``."""
    t, s = unpack(tables, chunk_size), Saved(*saved)
    (H, K), V = q.shape[1:], v.shape[-1]
    num_slots, num_external = t.packed_row_S.shape[0], external.shape[0]
    dpool = external.new_zeros((num_external + t.num_exports, H, K, V))
    if dexported is not None:
        dpool[num_external:] = dexported
    if not num_slots:
        zeros = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, f, b, A_log, dt_bias)]
        return (*zeros, dpool[:num_external])
    with _device_of(q):
        inputs = [x.contiguous() for x in (q, k, v, f, A_log, dt_bias)]
        grads = [x.new_empty(x.shape) for x in (q, k, v, f, b)]
        part = run_backward(inputs, grads, s, do, dpool, t, lower_bound)
        ddt_bias, dA_log = part.sum(1)
    return *grads, dA_log.sum(-1).to(A_log.dtype), ddt_bias.to(dt_bias.dtype), dpool[:num_external]


@_kda_backward.register_fake
def _(q, k, v, f, b, A_log, dt_bias, external, saved, do, dexported, tables, chunk_size, lower_bound):
    return tuple(x.new_empty(x.shape) for x in (q, k, v, f, b, A_log, dt_bias, external))


_NUM_INPUTS = 8


def _save(ctx, inputs, output):
    *tensors, tables, chunk_size, lower_bound = inputs
    _, _, *saved = output
    ctx.mark_non_differentiable(*saved)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *saved, *tables)
    ctx.num_saved = len(saved)
    ctx.settings = (chunk_size, lower_bound)


def _differentiate(ctx, do, dexported, *_):
    tensors = ctx.saved_tensors
    cut = _NUM_INPUTS + ctx.num_saved
    inputs, saved, tables = tensors[:_NUM_INPUTS], list(tensors[_NUM_INPUTS:cut]), list(tensors[cut:])
    if do is None and dexported is None:
        grads: tuple[Tensor | None, ...] = (None,) * _NUM_INPUTS
    else:
        grads = _kda_backward(*inputs, saved, do, dexported, tables, *ctx.settings)
    return (*grads, [None] * len(tables), None, None)


_kda_forward.register_autograd(_differentiate, setup_context=_save)
