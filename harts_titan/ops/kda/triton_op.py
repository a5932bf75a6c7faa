"""KDA over packed tree sequences on CUDA (HARTS 3.4: ChunkLA with exported boundary states).

Everything inside a chunk is independent of the carried state, so ``chunk_kernels.py`` runs once over all chunks; only
the two state scans of ``kernels.py`` run round by round, because a round starts from states that earlier rounds export.
Replay rows are copies of ancestor rows: their outputs are dropped and their gradients are added to the ancestor's in
float32, in packed order.

Letters: T own rows, X external rows, Y = X + T path rows, S slots (rows of all chunks, padding included), Q sequences,
C chunks, E exports, H heads, K key width, V value width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.profiler import record_function

from harts_titan.ops.host_tables import to_device
from harts_titan.ops.kda.chunk_kernels import (
    chunk_backward_keys,
    chunk_backward_norms,
    chunk_backward_values,
    chunk_forward,
    chunk_output,
    chunk_output_gradient,
    fan_in_copies,
)
from harts_titan.ops.kda.configs import BLOCK_ROWS, launch
from harts_titan.ops.kda.kernels import fan_in_states, state_scan_backward, state_scan_forward
from harts_titan.ops.kda.sequences import PackedSequences

_FAN_BLOCK = 1024


class KDATables(NamedTuple):
    """Index tables of one call, in the order the custom ops take them.

    All tables a kernel reads lie in one tensor: torch.compile makes a graph of its own for every table of size 0 or 1
    and for every two tables that happen to have one size, and a call has a dozen.
    """

    index_I: Tensor
    """int64 on the device; ``_unpack`` cuts it."""
    header_J: Tensor
    """int64 on the host: Q, F, M, D, N, then one ``_Round`` after another."""
    packed_row_S: Tensor
    """int64: path row of every slot, -1 = padding at the end of a sequence."""
    kept_T: Tensor
    """Only its size is read."""
    export_sequence_E: Tensor
    """On the host; only its size is read."""


class _Index(NamedTuple):
    own_row_S: Tensor
    """Own row a slot's output goes to, -1 = replay row or padding."""
    copy_slot_S: Tensor
    """Row of the buffers of copies, -1 = nobody else reads the slot's path row."""
    chunk_offset_Q1: Tensor
    init_row_Q: Tensor
    init_slot_Q: Tensor
    """Row of the round's initial-state gradient buffer, -1 = the sequence starts from zero."""
    export_row_B: Tensor
    fan_row_F: Tensor
    """Pool rows that sequences start from, round after round."""
    fan_ptr_F1: Tensor
    fan_slot_M: Tensor
    shared_row_D: Tensor
    """Path rows that several packed rows read, or none."""
    shared_ptr_D1: Tensor
    """Their copies."""
    packed_row_S: Tensor
    kept_T: Tensor
    num_copies: int
    num_exports: int
    rounds: list[_Round]


class _Round(NamedTuple):
    first_sequence: int
    num_sequences: int
    first_fan: int
    """Position in ``fan_row_F``."""
    num_fans: int
    num_starts: int
    """Sequences that start from a pool row."""


# Tables start at multiples of 16 int64: Triton compiles kernels anew for pointers of another alignment.
_ALIGN = 16
_HEADER = 5


def prepare_tables(sequences: PackedSequences) -> KDATables:
    """Return the kernels' index tables of ``sequences``, built once and kept with it.

    Call it before a ``torch.compile`` region that runs :func:`kda_triton`: building them is host work that cannot be
    traced.
    """
    cached = getattr(sequences, "_triton_tables", None)
    if cached is not None:
        return cached
    if torch.compiler.is_compiling():
        raise ValueError("call prepare_tables(sequences) before the compiled region that runs kda_triton")
    init = np.asarray(sequences.init_state_host, dtype=np.int64)
    slot = np.full(init.size, -1, dtype=np.int64)
    fan_row, fan_slot = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    fan_count, rounds, num_fans = [np.zeros(1, dtype=np.int64)], [], 0
    for first, last in sequences.rounds:
        starts = first + np.flatnonzero(init[first:last] >= 0)
        slot[starts] = np.arange(starts.size)
        # A stable sort keeps sequence order inside a pool row: the fixed order of the gradient sum.
        order = np.argsort(init[starts], kind="stable")
        rows, count = np.unique(init[starts], return_counts=True)
        fan_row.append(rows)
        fan_count.append(count)
        fan_slot.append(slot[starts][order])
        rounds.append(_Round(first, last - first, num_fans, rows.size, starts.size))
        num_fans += rows.size
    packed_row, own_row, copy_slot, shared_row, shared_ptr = _slot_tables(sequences)
    device = sequences.device
    pieces: list[np.ndarray] = []
    for table in (
        own_row,
        copy_slot,
        np.asarray(sequences.chunk_offset_host, dtype=np.int64),
        init,
        slot,
        np.asarray(sequences.export_row_host, dtype=np.int64),
        np.concatenate(fan_row),
        np.cumsum(np.concatenate(fan_count)),
        np.concatenate(fan_slot),
        shared_row,
        shared_ptr,
    ):
        pieces += [table, np.zeros(-table.size % _ALIGN, dtype=np.int64)]
    header = [
        sequences.num_sequences,
        num_fans,
        sum(r.num_starts for r in rounds),
        shared_row.size,
        int(shared_ptr[-1]),
    ]
    tables = KDATables(
        to_device(np.concatenate(pieces), device),
        torch.tensor([*header, *(value for r in rounds for value in r)], dtype=torch.int64),
        to_device(packed_row, device),
        sequences.kept_T,
        torch.tensor(sequences.export_sequence_host, dtype=torch.int64),
    )
    object.__setattr__(sequences, "_triton_tables", tables)
    return tables


def _slot_tables(sequences: PackedSequences) -> tuple[np.ndarray, ...]:
    """``packed_row_S``, ``own_row_S``, ``copy_slot_S``, ``shared_row_D`` and ``shared_ptr_D1``."""
    packed, kept = sequences.packed_row_host, sequences.kept_host
    cu, chunk_offset = (np.asarray(x) for x in (sequences.cu_seqlens_host, sequences.chunk_offset_host))
    size = sequences.num_chunks * sequences.chunk_size
    slot_P = np.arange(packed.size) + np.repeat(chunk_offset[:-1] * sequences.chunk_size - cu[:-1], np.diff(cu))
    packed_row, own_row, copy_slot = (np.full(size, -1, dtype=np.int64) for _ in range(3))
    packed_row[slot_P] = packed
    own_row[slot_P[kept]] = np.arange(kept.size)
    count = np.bincount(packed, minlength=sequences.num_path_rows)
    shared_row = np.flatnonzero(count != 1)
    shared_ptr = np.concatenate([[0], np.cumsum(count[shared_row])]).astype(np.int64)
    # A stable sort keeps packed order inside a path row: the fixed order of the gradient sums.
    order = np.argsort(packed, kind="stable")
    copies = order[count[packed[order]] > 1]
    copy_slot[slot_P[copies]] = np.arange(copies.size)
    return packed_row, own_row, copy_slot, shared_row, shared_ptr


def _unpack(tables: list[Tensor], chunk_size: int) -> _Index:
    t = KDATables(*tables)
    header = t.header_J.tolist()
    Q, F, M, D, N = header[:_HEADER]
    S = t.packed_row_S.shape[0]
    views, at = [], 0
    for size in (S, S, Q + 1, Q, Q, S // chunk_size + Q, F, F + 1, M, D, D + 1):
        views.append(t.index_I[at : at + size])
        at += -(-size // _ALIGN) * _ALIGN
    rounds = [_Round(*header[i : i + 5]) for i in range(_HEADER, len(header), 5)]
    return _Index._make([*views, t.packed_row_S, t.kept_T, N, t.export_sequence_E.shape[0], rounds])


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


_Item = TypeVar("_Item")


def _recorded(items: Sequence[_Item], label: str, *, backward: bool = False) -> Iterator[_Item]:
    """Yield ``items``, last first if ``backward``, each under a profiler label that names its index."""
    for i in reversed(range(len(items))) if backward else range(len(items)):
        with record_function(label.format(i)):
            yield items[i]


def _scan_forward(s: _Saved, u: Tensor, pool: Tensor, t: _Index) -> None:
    """Forward scan, round after round: fills ``v_new``, ``h`` and the exported rows of ``pool``."""
    _, H, K, V = s.h.shape
    options = launch("state_scan_forward", s.h, K=K, V=V)
    for r in _recorded(t.rounds, "harts::round{}"):
        state_scan_forward[(r.num_sequences * H * (V // options["BV"]),)](
            s.kg,
            s.w,
            u,
            s.g,
            s.v_new,
            s.h,
            pool,
            t.init_row_Q,
            t.export_row_B,
            t.chunk_offset_Q1,
            r.first_sequence,
            H=H,
            K=K,
            V=V,
            BT=s.Aqk.shape[2],
            **options,
        )


def _scan_backward(s: _Saved, do: Tensor, dv: Tensor, dpool: Tensor, t: _Index) -> tuple[Tensor, Tensor]:
    """Reverse scan, last round first; ``dpool`` holds the exports' gradients and collects those of initial states."""
    _, H, K, V = s.h.shape
    size = H * K * V
    options = launch("state_scan_backward", s.h, K=K, V=V)
    # Rounds run one after another, so one buffer of the largest round serves all.
    dinit = dpool.new_empty((max((r.num_starts for r in t.rounds), default=0), H, K, V))
    dh, dv_new = torch.empty_like(s.h), torch.empty_like(dv)
    for r in _recorded(t.rounds, "harts::round{}_backward", backward=True):
        state_scan_backward[(r.num_sequences * H * (V // options["BV"]),)](
            s.qg,
            s.kg,
            s.w,
            s.g,
            do,
            dv,
            dv_new,
            dh,
            dpool,
            dinit,
            t.export_row_B,
            t.init_slot_Q,
            t.chunk_offset_Q1,
            r.first_sequence,
            H=H,
            K=K,
            V=V,
            BT=s.Aqk.shape[2],
            **options,
        )
        if r.num_fans:
            fan_in_states[(r.num_fans * -(-size // _FAN_BLOCK),)](
                dinit, dpool, t.fan_row_F, t.fan_ptr_F1, t.fan_slot_M, r.first_fan, S=size, BS=_FAN_BLOCK, num_warps=4
            )
    return dh, dv_new


class _Saved(NamedTuple):
    """What the backward pass keeps beside the inputs; rows are slots: S = C x chunk_size, in tiles [C, H, row, width]."""

    w: Tensor
    kg: Tensor
    qg: Tensor
    g: Tensor
    """float32 cumulative log2 decay inside the chunk."""
    v_new: Tensor
    h: Tensor
    """State in front of each chunk (C, H, K, V)."""
    Aqk: Tensor
    Akk: Tensor
    row: Tensor
    """float32 (3, S, H): beta, reciprocal norms of q and k."""


def _new_saved(q: Tensor, v: Tensor, num_slots: int, chunk_size: int) -> _Saved:
    (H, K), V = q.shape[1:], v.shape[-1]
    S = num_slots
    wide = q.new_empty((S, H, K), dtype=torch.float32)
    return _Saved(
        w=q.new_empty((S, H, K)),
        kg=q.new_empty((S, H, K)),
        qg=q.new_empty((S, H, K)),
        g=wide,
        v_new=q.new_empty((S, H, V)),
        h=q.new_empty((S // chunk_size, H, K, V)),
        Aqk=q.new_empty((S, H, chunk_size)),
        Akk=q.new_empty((S, H, chunk_size)),
        row=q.new_empty((3, S, H), dtype=torch.float32),
    )


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
    """Outputs, exported states, and ``_Saved``."""
    t = _unpack(tables, chunk_size)
    (H, K), V = q.shape[1:], v.shape[-1]
    num_slots, num_external = t.packed_row_S.shape[0], external.shape[0]
    pool = external.new_empty((num_external + t.num_exports, H, K, V))
    pool[:num_external] = external
    o = v.new_empty((t.kept_T.shape[0], H, V))
    s = _new_saved(q, v, num_slots, chunk_size)
    if num_slots:
        programs = num_slots // chunk_size * H
        sizes = {"H": H, "K": K, "V": V, "BT": chunk_size}
        with _device_of(q):
            u = torch.empty_like(s.v_new)
            chunk_forward[(programs,)](
                *(x.contiguous() for x in (q, k, v, f, b, A_log, dt_bias)),
                t.packed_row_S,
                s.w,
                u,
                s.qg,
                s.kg,
                s.g,
                s.Aqk,
                s.Akk,
                s.row,
                lower_bound,
                K**-0.5,
                num_slots * H,
                **sizes,
                BC=BLOCK_ROWS,
                **launch("chunk_forward", s.h, K=K, V=V),
            )
            _scan_forward(s, u, pool, t)
            options = launch("chunk_output", s.h, K=K, V=V)
            chunk_output[(programs * (V // options["BV"]),)](
                s.qg, s.Aqk, s.v_new, s.h, o, t.own_row_S, **sizes, **options
            )
    # A copy: the pool's external rows need not live as long as the exports.
    return o, pool[num_external:].clone(), *s


@_kda_forward.register_fake
def _(q, k, v, f, b, A_log, dt_bias, external, tables, chunk_size, lower_bound):
    t = KDATables(*tables)
    H, K = q.shape[1:]
    return (
        v.new_empty((t.kept_T.shape[0], H, v.shape[-1])),
        external.new_empty((t.export_sequence_E.shape[0], H, K, v.shape[-1])),
        *_new_saved(q, v, t.packed_row_S.shape[0], chunk_size),
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
    t, s = _unpack(tables, chunk_size), _Saved(*saved)
    (H, K), V = q.shape[1:], v.shape[-1]
    num_slots, num_external = t.packed_row_S.shape[0], external.shape[0]
    dpool = external.new_zeros((num_external + t.num_exports, H, K, V))
    if dexported is not None:
        dpool[num_external:] = dexported
    if not num_slots:
        zeros = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, f, b, A_log, dt_bias)]
        return (*zeros, dpool[:num_external])
    sizes = {"H": H, "K": K, "V": V, "BT": chunk_size}
    programs = num_slots // chunk_size * H
    with _device_of(q):
        do_tile, dv = _output_gradient(do, s, t)
        dh, dv = _scan_backward(s, do_tile, dv, dpool, t)
        inputs = [x.contiguous() for x in (q, k, v, f, A_log, dt_bias)]
        grads = [x.new_empty(x.shape) for x in (q, k, v, f, b)]
        copies = [x.new_empty((t.num_copies, *x.shape[1:]), dtype=torch.float32) for x in grads]
        part = s.row.new_empty((2, num_slots // chunk_size, H, K))
        options = launch("chunk_backward_keys", s.h, K=K, V=V)
        dA = [s.Akk.new_empty(s.Akk.shape, dtype=torch.float32 if options["WIDE"] else q.dtype) for _ in range(2)]
        db_part = s.row.new_empty((1 + K // options["BK"], num_slots, H))
        size = num_slots * H
        chunk_backward_values[(programs,)](
            inputs[1],
            inputs[2],
            t.packed_row_S,
            t.copy_slot_S,
            s.g,
            s.row,
            s.Akk,
            s.h,
            s.v_new,
            do_tile,
            dv,
            grads[2],
            copies[2],
            *dA,
            db_part,
            size,
            **sizes,
            **launch("chunk_backward_values", s.h, K=K, V=V),
        )
        dq, dk = torch.empty_like(s.g), torch.empty_like(s.g)
        chunk_backward_keys[(programs * (K // options["BK"]),)](
            *inputs[:2],
            *inputs[3:],
            t.packed_row_S,
            t.copy_slot_S,
            s.g,
            s.row,
            s.Akk,
            s.h,
            s.v_new,
            do_tile,
            dh,
            dv,
            *dA,
            dq,
            dk,
            grads[3],
            copies[3],
            db_part,
            part,
            lower_bound,
            K**-0.5,
            size,
            **sizes,
            BC=BLOCK_ROWS,
            **options,
        )
        options = launch("chunk_backward_norms", s.h, K=K, V=V)
        chunk_backward_norms[(programs * (chunk_size // options["BS"]),)](
            *inputs[:2],
            t.packed_row_S,
            t.copy_slot_S,
            s.row,
            dq,
            dk,
            db_part,
            *(grads[i] for i in (0, 1, 4)),
            *(copies[i] for i in (0, 1, 4)),
            size,
            H=H,
            K=K,
            BT=chunk_size,
            ND=db_part.shape[0],
            **options,
        )
        if num_shared := t.shared_row_D.shape[0]:
            fan_in_copies[(num_shared * H,)](
                *copies, *grads, t.shared_row_D, t.shared_ptr_D1, H=H, K=K, V=V, num_warps=1
            )
        ddt_bias, dA_log = part.sum(1)
    return *grads, dA_log.sum(-1).to(A_log.dtype), ddt_bias.to(dt_bias.dtype), dpool[:num_external]


def _output_gradient(do: Tensor | None, s: _Saved, t: _Index) -> tuple[Tensor, Tensor]:
    """``dO`` as tiles, and ``P^T dO``."""
    if do is None:
        return torch.zeros_like(s.v_new), torch.zeros_like(s.v_new)
    do_tile, dv = torch.empty_like(s.v_new), torch.empty_like(s.v_new)
    _, H, K, V = s.h.shape
    BT = s.Aqk.shape[2]
    options = launch("chunk_output_gradient", s.h, K=K, V=V)
    chunk_output_gradient[(s.h.shape[0] * H * (V // options["BV"]),)](
        do.contiguous(), s.Aqk, do_tile, dv, t.own_row_S, H=H, V=V, BT=BT, **options
    )
    return do_tile, dv


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
