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
import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.profiler import record_function

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
from harts_titan.ops.kda.tables import Index, KDATables, Round, prepare_tables, unpack

_FAN_BLOCK = 1024


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


def _recorded(rounds: list[Round], which: slice, label: str, *, backward: bool = False) -> Iterator[Round]:
    """Yield some rounds, last first if ``backward``, each under a profiler label that names its index."""
    indices = range(len(rounds))[which]
    for i in reversed(indices) if backward else indices:
        with record_function(label.format(i)):
            yield rounds[i]


OVERLAP = True
"""Run scans beside the other kernels where rounds allow it; the bits are the same."""


@functools.cache
def _scan_stream(device: torch.device) -> torch.cuda.Stream:
    # A scan's few programs are the critical path: they go first wherever a multiprocessor has room.
    return torch.cuda.Stream(device, priority=-1)


class _Scans:
    """Runs scans on a stream of their own, beside kernels on chunks of other rounds.

    A scan is a chain over the chunks of the longest sequence and leaves most of the device idle.
    """

    def __init__(self, device: torch.device, overlap: bool) -> None:
        self._stream = _scan_stream(device) if overlap and device.type == "cuda" else None

    def run(self, scan: Callable[[], None]) -> torch.cuda.Event | None:
        """Start ``scan`` after all work queued so far; the result is for :meth:`wait`."""
        if self._stream is None:
            scan()
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            scan()
            return self._stream.record_event()

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Work queued from now on runs after the scan. Every scan has to be waited for before the op returns."""
        if event is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(event)


def _chunk_ranges(t: Index, num_chunks: int) -> tuple[tuple[slice, slice], ...]:
    """Rounds, and their chunks, that are launched together: the first round, and the others."""
    if not OVERLAP or not 0 < t.first_chunks < num_chunks:
        return ((slice(0, len(t.rounds)), slice(0, num_chunks)),)
    return (slice(0, 1), slice(0, t.first_chunks)), (slice(1, len(t.rounds)), slice(t.first_chunks, num_chunks))


def _scan_forward(s: _Saved, u: Tensor, pool: Tensor, t: Index, which: slice) -> None:
    """Forward scan, round after round: fills ``v_new``, ``h`` and the exported rows of ``pool``."""
    _, H, K, V = s.h.shape
    options = launch("state_scan_forward", s.h, K=K, V=V)
    for r in _recorded(t.rounds, which, "harts::round{}"):
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


class _ScanGradients(NamedTuple):
    """What the reverse scan reads and writes."""

    do: Tensor
    dv: Tensor
    dv_new: Tensor
    dh: Tensor
    dpool: Tensor
    dinit: Tensor
    """Of one round: rounds run one after another, so one buffer of the largest round serves all."""


def _scan_backward(s: _Saved, d: _ScanGradients, t: Index, which: slice) -> None:
    """Reverse scan, last round first; ``dpool`` holds the exports' gradients and collects those of initial states."""
    _, H, K, V = s.h.shape
    size = H * K * V
    options = launch("state_scan_backward", s.h, K=K, V=V)
    for r in _recorded(t.rounds, which, "harts::round{}_backward", backward=True):
        state_scan_backward[(r.num_sequences * H * (V // options["BV"]),)](
            s.qg,
            s.kg,
            s.w,
            s.g,
            *d,
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
                d.dinit,
                d.dpool,
                t.fan_row_F,
                t.fan_ptr_F1,
                t.fan_slot_M,
                r.first_fan,
                S=size,
                BS=_FAN_BLOCK,
                num_warps=4,
            )


class _Saved(NamedTuple):
    """What the backward pass keeps beside the inputs; S slots lie in tiles [C, H, chunk_size, width]."""

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


def _run_forward(
    inputs: list[Tensor], s: _Saved, u: Tensor, pool: Tensor, o: Tensor, t: Index, lower_bound: float
) -> None:
    num_chunks, H, K, V = s.h.shape
    BT = s.Aqk.shape[2]
    sizes = {"H": H, "K": K, "V": V, "BT": BT}
    ranges = _chunk_ranges(t, num_chunks)
    scans, done = _Scans(o.device, len(ranges) > 1), []
    for rounds, chunks in ranges:
        chunk_forward[((chunks.stop - chunks.start) * H,)](
            *inputs,
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
            num_chunks * BT * H,
            chunks.start * H,
            **sizes,
            BC=BLOCK_ROWS,
            **launch("chunk_forward", s.h, K=K, V=V),
        )
        done.append(scans.run(functools.partial(_scan_forward, s, u, pool, t, rounds)))
    options = launch("chunk_output", s.h, K=K, V=V)
    for (_, chunks), scan in zip(ranges, done):
        scans.wait(scan)
        programs = H * (V // options["BV"])
        chunk_output[((chunks.stop - chunks.start) * programs,)](
            s.qg, s.Aqk, s.v_new, s.h, o, t.own_row_S, chunks.start * programs, **sizes, **options
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
    t = unpack(tables, chunk_size)
    (H, K), V = q.shape[1:], v.shape[-1]
    num_slots, num_external = t.packed_row_S.shape[0], external.shape[0]
    pool = external.new_empty((num_external + t.num_exports, H, K, V))
    pool[:num_external] = external
    o = v.new_empty((t.kept_T.shape[0], H, V))
    s = _new_saved(q, v, num_slots, chunk_size)
    if num_slots:
        u = torch.empty_like(s.v_new)
        with _device_of(q):
            _run_forward([x.contiguous() for x in (q, k, v, f, b, A_log, dt_bias)], s, u, pool, o, t, lower_bound)
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


def _run_backward(
    inputs: list[Tensor],
    grads: list[Tensor],
    s: _Saved,
    do: Tensor | None,
    dpool: Tensor,
    t: Index,
    lower_bound: float,
) -> Tensor:
    """Fill ``grads`` and ``dpool``; return the chunks' sums for ``dt_bias`` and ``A_log``."""
    num_chunks, H, K, V = s.h.shape
    BT = s.Aqk.shape[2]
    sizes = {"H": H, "K": K, "V": V, "BT": BT}
    size = num_chunks * BT * H
    do_tile, dv = _output_gradient(do, s, t)
    d = _ScanGradients(
        do=do_tile,
        dv=dv,
        dv_new=torch.empty_like(dv),
        dh=torch.empty_like(s.h),
        dpool=dpool,
        dinit=dpool.new_empty((max((r.num_starts for r in t.rounds), default=0), H, K, V)),
    )
    values, keys = (launch(name, s.h, K=K, V=V) for name in ("chunk_backward_values", "chunk_backward_keys"))
    copies = [x.new_empty((t.num_copies, *x.shape[1:]), dtype=torch.float32) for x in grads]
    dA = [s.Akk.new_empty(s.Akk.shape, dtype=torch.float32 if keys["WIDE"] else s.Akk.dtype) for _ in range(2)]
    dq, dk = torch.empty_like(s.g), torch.empty_like(s.g)
    db_part = s.row.new_empty((1 + K // keys["BK"], BT * num_chunks, H))
    part = s.row.new_empty((2, num_chunks, H, K))
    ranges = _chunk_ranges(t, num_chunks)
    scans = _Scans(dpool.device, len(ranges) > 1)
    # The scans do not depend on the gradients of their chunks' inputs: all are queued first.
    done = [scans.run(functools.partial(_scan_backward, s, d, t, rounds)) for rounds, _ in reversed(ranges)]
    for (_, chunks), scan in zip(reversed(ranges), done):
        scans.wait(scan)
        count = chunks.stop - chunks.start
        chunk_backward_values[(count * H,)](
            inputs[1],
            inputs[2],
            t.packed_row_S,
            t.copy_slot_S,
            s.g,
            s.row,
            s.Akk,
            s.h,
            s.v_new,
            d.do,
            d.dv_new,
            grads[2],
            copies[2],
            *dA,
            db_part,
            size,
            chunks.start * H,
            **sizes,
            **values,
        )
        programs = H * (K // keys["BK"])
        chunk_backward_keys[(count * programs,)](
            *inputs[:2],
            *inputs[3:],
            t.packed_row_S,
            t.copy_slot_S,
            s.g,
            s.row,
            s.Akk,
            s.h,
            s.v_new,
            d.do,
            d.dh,
            d.dv_new,
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
            chunks.start * programs,
            **sizes,
            BC=BLOCK_ROWS,
            **keys,
        )
    options = launch("chunk_backward_norms", s.h, K=K, V=V)
    chunk_backward_norms[(num_chunks * H * (BT // options["BS"]),)](
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
        BT=BT,
        ND=db_part.shape[0],
        **options,
    )
    if num_shared := t.shared_row_D.shape[0]:
        fan_in_copies[(num_shared * H,)](*copies, *grads, t.shared_row_D, t.shared_ptr_D1, H=H, K=K, V=V, num_warps=1)
    return part


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
    t, s = unpack(tables, chunk_size), _Saved(*saved)
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
        part = _run_backward(inputs, grads, s, do, dpool, t, lower_bound)
        ddt_bias, dA_log = part.sum(1)
    return *grads, dA_log.sum(-1).to(A_log.dtype), ddt_bias.to(dt_bias.dtype), dpool[:num_external]


def _output_gradient(do: Tensor | None, s: _Saved, t: Index) -> tuple[Tensor, Tensor]:
    """``dO`` as tiles, and ``P^T dO``."""
    if do is None:
        return torch.zeros_like(s.v_new), torch.zeros_like(s.v_new)
    do_tile, dv = torch.empty_like(s.v_new), torch.empty_like(s.v_new)
    _, H, K, V = s.h.shape
    BT = s.Aqk.shape[2]
    options = launch("chunk_output_gradient", s.h, K=K, V=V)
    chunk_output_gradient[(s.h.shape[0] * H * (V // options["BV"]),)](
        do.contiguous(), s.Aqk, do_tile, dv, t.own_row_S, 0, H=H, V=V, BT=BT, **options
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
