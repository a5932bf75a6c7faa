"""KDA over packed tree sequences on CUDA: fla-core's chunk kernels around this project's own state scans.

HARTS 3.4 (ChunkLA with exported boundary states). Everything inside a chunk is independent of the carried state, so
those kernels run once over all packed rows; only the two state scans run round by round, because a round starts from
states that earlier rounds export. Replay rows are copies of ancestor rows: their outputs are dropped and their
gradients are added to the ancestor's in float32, in packed order.

Letters: T own rows, X external rows, Y = X + T path rows, P packed rows, Q sequences, C chunks, E exports, H heads,
K key width, V value width.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch
import triton
from torch import Tensor
from torch.profiler import record_function

from harts_titan.ops.host_tables import to_device
from harts_titan.ops.kda import fla_pinned as fk
from harts_titan.ops.kda.kernels import fan_in_rows, fan_in_states, state_scan_backward, state_scan_forward
from harts_titan.ops.kda.sequences import PackedSequences

# Columns of V per program of the state scans, as in fla's own scan.
SCAN_BLOCK_V = 32
_FAN_BLOCK = 1024


class KDATables(NamedTuple):
    """Index tables of one call, in the order the custom ops take them.

    All tables a kernel reads lie in one tensor: torch.compile makes a graph of its own for every table of size 0 or 1
    and for every two tables that happen to have one size, and a call has a dozen.
    """

    index_I: Tensor
    """int64 on the device; ``_unpack`` cuts it."""
    header_J: Tensor
    """int64 on the host: Q, C, F, M, Y, then one ``_Round`` after another."""
    packed_row_P: Tensor
    kept_T: Tensor
    export_sequence_E: Tensor
    """On the host; only its size is read."""


class _Index(NamedTuple):
    cu_seqlens_Q1: Tensor
    chunk_indices_C2: Tensor
    chunk_offset_Q1: Tensor
    init_row_Q: Tensor
    init_slot_Q: Tensor
    """Row of the round's initial-state gradient buffer, -1 = the sequence starts from zero."""
    export_row_B: Tensor
    fan_row_F: Tensor
    """Pool rows that sequences start from, round after round."""
    fan_ptr_F1: Tensor
    fan_slot_M: Tensor
    copy_ptr_Y1: Tensor
    copy_row_P: Tensor
    packed_row_P: Tensor
    kept_T: Tensor
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
    fan_in = sequences.replay_fan_in
    device = sequences.device
    pieces: list[Tensor] = []
    for table in (
        sequences.cu_seqlens_Q1,
        sequences.chunk_indices_C2,
        sequences.chunk_offset_Q1,
        sequences.init_state_Q,
        to_device(slot, device),
        sequences.export_row_B,
        to_device(np.concatenate(fan_row), device),
        to_device(np.cumsum(np.concatenate(fan_count)), device),
        to_device(np.concatenate(fan_slot), device),
        fan_in.ptr_Y1,
        fan_in.packed_P,
    ):
        flat = table.reshape(-1).to(torch.int64)
        pieces += [flat, flat.new_zeros(-flat.numel() % _ALIGN)]
    header = [
        sequences.num_sequences,
        sequences.num_chunks,
        num_fans,
        sum(r.num_starts for r in rounds),
        sequences.num_path_rows,
    ]
    tables = KDATables(
        torch.cat(pieces),
        torch.tensor([*header, *(value for r in rounds for value in r)], dtype=torch.int64),
        sequences.packed_row_P,
        sequences.kept_T,
        torch.tensor(sequences.export_sequence_host, dtype=torch.int64),
    )
    object.__setattr__(sequences, "_triton_tables", tables)
    return tables


def _unpack(tables: list[Tensor]) -> _Index:
    t = KDATables(*tables)
    header = t.header_J.tolist()
    Q, C, F, M, Y = header[:_HEADER]
    P = t.packed_row_P.shape[0]
    views, at = [], 0
    for size in (Q + 1, 2 * C, Q + 1, Q, Q, C + Q, F, F + 1, M, Y + 1, P):
        views.append(t.index_I[at : at + size])
        at += -(-size // _ALIGN) * _ALIGN
    views[1] = views[1].view(C, 2)
    rounds = [_Round(*header[i : i + 5]) for i in range(_HEADER, len(header), 5)]
    return _Index._make([*views, t.packed_row_P, t.kept_T, t.export_sequence_E.shape[0], rounds])


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

    Memory: beyond the inputs, float32 gates and a state per chunk while it runs; two (P, H, chunk_size) matrices stay
    for the backward pass, which recomputes the rest.
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
    o_THV, exported_EHKV, _, _ = _kda_forward(
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


@functools.cache
def _scan_options(device: torch.device, itemsize: int) -> dict[str, int]:
    """Warps and pipeline stages of the state scans: one choice per device and dtype, whatever the call's sizes."""
    if device.type != "cuda":
        return {"num_warps": 4, "num_stages": 1}
    capability = torch.cuda.get_device_capability(device)
    # Triton before 3.8 races in a tl.dot recurrence on Blackwell with more than two warps.
    warps = 2 if capability[0] >= 10 else 4
    # The reverse scan at K = 128 takes 168 KiB of shared memory with three stages and 116 KiB with two, as compiled for
    # sm_90a; 227 KiB are there on 9.x and 10.x, 163 KiB on 8.0, 99 KiB elsewhere. float32 takes twice as much.
    stages = 3 if capability[0] in (9, 10) else 2 if capability == (8, 0) else 1
    return {"num_warps": warps, "num_stages": stages if itemsize == 2 else 1}


class _Packed(NamedTuple):
    """Packed inputs of the chunk kernels, with fla's leading batch dimension of 1."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    g: Tensor
    """float32 cumulative log2 decay inside the chunk."""
    q_row: tuple[Tensor, Tensor]
    """Normalised q of the path rows and its reciprocal norm."""
    k_row: tuple[Tensor, Tensor]


def _pack(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    f: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    t: _Index,
    chunk_size: int,
    lower_bound: float,
) -> _Packed:
    """Normalise path rows, gather them in packed order and build the gates; forward and backward run it alike."""
    qn, q_rstd = fk.l2norm_fwd(q.contiguous())
    kn, k_rstd = fk.l2norm_fwd(k.contiguous())
    beta = fk.fused_beta_sigmoid_fwd(b.contiguous())
    qp, kp, vp, fp, bp = (_gather(x, t) for x in (qn, kn, v, f, beta))
    g = fk.kda_gate_chunk_cumsum(
        g=fp[None],
        A_log=A_log,
        dt_bias=dt_bias.reshape(-1),
        scale=fk.RCP_LN2,
        chunk_size=chunk_size,
        cu_seqlens=t.cu_seqlens_Q1,
        chunk_indices=t.chunk_indices_C2,
        lower_bound=lower_bound,
    )
    return _Packed(qp[None], kp[None], vp[None], bp[None], g, (qn, q_rstd), (kn, k_rstd))


def _is_identity(t: _Index) -> bool:
    # Every own row is packed at least once; as many packed as path rows leave no room for replay or external rows.
    return t.packed_row_P.shape[0] == t.kept_T.shape[0] == t.copy_ptr_Y1.shape[0] - 1


def _gather(rows: Tensor, t: _Index) -> Tensor:
    return rows.contiguous() if _is_identity(t) else rows.index_select(0, t.packed_row_P)


def _sum_copies(packed: Tensor, t: _Index, dtype: torch.dtype) -> Tensor:
    """Gradient of :func:`_gather`: (P, ...) -> (Y, ...), float32 sums in packed order, cast to ``dtype``."""
    if _is_identity(t):
        return packed.to(dtype)
    num_rows = t.copy_ptr_Y1.shape[0] - 1
    rows = packed.new_empty((num_rows, *packed.shape[1:]), dtype=dtype)
    width = rows[0].numel()
    block = min(_FAN_BLOCK, triton.next_power_of_2(width))
    fan_in_rows[(num_rows * triton.cdiv(width, block),)](
        packed, rows, t.copy_ptr_Y1, t.copy_row_P, width, BD=block, num_warps=4
    )
    return rows


_Launch = TypeVar("_Launch")


def _recorded(rounds: Sequence[_Launch], name: str, *, backward: bool = False) -> Iterator[_Launch]:
    """Yield each round's launch inside its profiler range; last to first for ``backward``."""
    for r in reversed(range(len(rounds))) if backward else range(len(rounds)):
        with record_function(name.format(r)):
            yield rounds[r]


def _scan_forward(
    kg: Tensor, w: Tensor, u: Tensor, g: Tensor, pool: Tensor, t: _Index, chunk_size: int, *, first_time: bool
) -> tuple[Tensor, Tensor]:
    """State before every chunk and the corrected values.

    The first time exports are written to ``pool``, round after round; later every initial state is there already, and
    one launch covers all sequences.
    """
    H, K, V = kg.shape[2], kg.shape[3], u.shape[3]
    num_chunks, num_sequences = t.chunk_indices_C2.shape[0], t.init_row_Q.shape[0]
    h = kg.new_empty((1, num_chunks, H, K, V))
    v_new = torch.empty_like(u)
    launches = [(r.first_sequence, r.num_sequences) for r in t.rounds] if first_time else [(0, num_sequences)]
    for first, count in _recorded(launches, "harts::round{}" if first_time else "harts::all_rounds"):
        state_scan_forward[(count * H * triton.cdiv(V, SCAN_BLOCK_V),)](
            kg,
            w,
            u,
            g,
            v_new,
            h,
            pool,
            t.init_row_Q,
            t.export_row_B,
            t.cu_seqlens_Q1,
            t.chunk_offset_Q1,
            first,
            H=H,
            K=K,
            V=V,
            BT=chunk_size,
            BV=SCAN_BLOCK_V,
            STORE_EXPORTS=first_time,
            **_scan_options(kg.device, kg.element_size()),
        )
    return h, v_new


def _scan_backward(
    qg: Tensor,
    kg: Tensor,
    w: Tensor,
    g: Tensor,
    do: Tensor,
    dv: Tensor,
    dpool: Tensor,
    t: _Index,
    chunk_size: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Reverse scan, last round first; ``dpool`` holds the exports' gradients and collects those of initial states."""
    H, K, V = kg.shape[2], kg.shape[3], do.shape[3]
    size = H * K * V
    # Rounds run one after another, so one buffer of the largest round serves all.
    dinit = dpool.new_empty((max((r.num_starts for r in t.rounds), default=0), H, K, V))
    dh = kg.new_empty((1, t.chunk_indices_C2.shape[0], H, K, V))
    dv_new = torch.empty_like(dv)
    for r in _recorded(t.rounds, "harts::round{}_backward", backward=True):
        state_scan_backward[(r.num_sequences * H * triton.cdiv(V, SCAN_BLOCK_V),)](
            qg,
            kg,
            w,
            g,
            do,
            dv,
            dv_new,
            dh,
            dpool,
            dinit,
            t.export_row_B,
            t.init_slot_Q,
            t.cu_seqlens_Q1,
            t.chunk_offset_Q1,
            r.first_sequence,
            scale,
            H=H,
            K=K,
            V=V,
            BT=chunk_size,
            BV=SCAN_BLOCK_V,
            **_scan_options(kg.device, kg.element_size()),
        )
        if r.num_fans:
            fan_in_states[(r.num_fans * triton.cdiv(size, _FAN_BLOCK),)](
                dinit, dpool, t.fan_row_F, t.fan_ptr_F1, t.fan_slot_M, r.first_fan, S=size, BS=_FAN_BLOCK, num_warps=4
            )
    return dh, dv_new


@torch.library.custom_op(
    "harts_titan::kda_forward",
    mutates_args=(),
    schema=(
        "(Tensor q, Tensor k, Tensor v, Tensor f, Tensor b, Tensor A_log, Tensor dt_bias, Tensor external, "
        "Tensor[] tables, int chunk_size, float lower_bound) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
)
def _kda_forward(q, k, v, f, b, A_log, dt_bias, external, tables, chunk_size, lower_bound):
    """Outputs, exported states, and the two in-chunk matrices the backward pass keeps."""
    t = _unpack(tables)
    (H, K), V = q.shape[1:], v.shape[-1]
    num_packed, num_external = t.packed_row_P.shape[0], external.shape[0]
    pool = external.new_empty((num_external + t.num_exports, H, K, V))
    pool[:num_external] = external
    if num_packed == 0:
        empty = q.new_empty((1, 0, H, chunk_size))
        return v.new_empty((0, H, V)), pool[num_external:].clone(), empty, empty.clone()
    with _device_of(q):
        x = _pack(q, k, v, f, b, A_log, dt_bias, t, chunk_size, lower_bound)
        chunks = {"cu_seqlens": t.cu_seqlens_Q1, "chunk_indices": t.chunk_indices_C2, "chunk_size": chunk_size}
        scale = K**-0.5
        w, u, _, kg, Aqk, Akk = fk.chunk_kda_fwd_intra(
            q=x.q, k=x.k, v=x.v, gk=x.g, beta=x.beta, scale=scale, safe_gate=True, **chunks
        )
        h, v_new = _scan_forward(kg, w, u, x.g, pool, t, chunk_size, first_time=True)
        o = fk.chunk_gla_fwd_o_gk(q=x.q, v=v_new, g=x.g, A=Aqk, h=h, scale=scale, **chunks)[0]
        if t.kept_T.shape[0] != num_packed:
            o = o.index_select(0, t.kept_T)
    # A copy: the pool's external rows need not live as long as the exports.
    return o, pool[num_external:].clone(), Aqk, Akk


@_kda_forward.register_fake
def _(q, k, v, f, b, A_log, dt_bias, external, tables, chunk_size, lower_bound):
    t = KDATables(*tables)
    H, K = q.shape[1:]
    matrix = q.new_empty((1, t.packed_row_P.shape[0], H, chunk_size))
    return (
        v.new_empty((t.kept_T.shape[0], H, v.shape[-1])),
        external.new_empty((t.export_sequence_E.shape[0], H, K, v.shape[-1])),
        matrix,
        torch.empty_like(matrix),
    )


@torch.library.custom_op(
    "harts_titan::kda_backward",
    mutates_args=(),
    schema=(
        "(Tensor q, Tensor k, Tensor v, Tensor f, Tensor b, Tensor A_log, Tensor dt_bias, Tensor external, "
        "Tensor exported, Tensor Aqk, Tensor Akk, Tensor? do, Tensor? dexported, Tensor[] tables, int chunk_size, "
        "float lower_bound) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
)
def _kda_backward(
    q, k, v, f, b, A_log, dt_bias, external, exported, Aqk, Akk, do, dexported, tables, chunk_size, lower_bound
):
    """Gradients of the eight differentiable inputs of ``kda_forward``."""
    t = _unpack(tables)
    K = q.shape[2]
    num_packed, num_external = t.packed_row_P.shape[0], external.shape[0]
    pool = torch.cat([external, exported])
    dpool = torch.zeros_like(pool)
    if dexported is not None:
        dpool[num_external:] = dexported
    if num_packed == 0:
        zeros = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, f, b, A_log, dt_bias)]
        return (*zeros, dpool[:num_external])
    with _device_of(q):
        x = _pack(q, k, v, f, b, A_log, dt_bias, t, chunk_size, lower_bound)
        chunks = {"cu_seqlens": t.cu_seqlens_Q1, "chunk_indices": t.chunk_indices_C2}
        sized = {**chunks, "chunk_size": chunk_size}
        scale = K**-0.5
        dop = _pack_output_gradient(do, x.v, t)
        w, u, qg, kg = fk.recompute_w_u_fwd(q=x.q, k=x.k, v=x.v, beta=x.beta, A=Akk, gk=x.g, **chunks)
        h, v_new = _scan_forward(kg, w, u, x.g, pool, t, chunk_size, first_time=False)
        del u
        dAqk, dv = fk.chunk_kda_bwd_dAv(q=x.q, k=x.k, v=v_new, do=dop, A=Aqk, scale=scale, **sized)
        dh, dv = _scan_backward(qg, kg, w, x.g, dop, dv, dpool, t, chunk_size, scale)
        del w, qg, kg
        dq, dk, dv, db, dg, dAkk = fk.chunk_kda_bwd_wy_dqkg_fused(
            q=x.q,
            k=x.k,
            v=x.v,
            v_new=v_new,
            g=x.g,
            beta=x.beta,
            A=Akk,
            h=h,
            do=dop,
            dh=dh,
            dv=dv,
            scale=scale,
            **sized,
        )
        del h, dh, v_new, dop
        dq, dk, db, dg = fk.chunk_kda_bwd_intra(
            q=x.q,
            k=x.k,
            g=x.g,
            beta=x.beta,
            dAqk=dAqk,
            dAkk=dAkk,
            dq=dq,
            dk=dk,
            db=db,
            dg=dg,
            safe_gate=True,
            **sized,
        )
        dg = fk.chunk_local_cumsum(dg, chunk_size=chunk_size, reverse=True, **chunks)
        # Replay rows equal their ancestor row bit for bit, and the remaining steps are linear in the gradient for
        # fixed inputs: the copies are summed first, in float32, and each path row is finished once.
        dq, dk, dg, db = (_sum_copies(d[0], t, torch.float32) for d in (dq, dk, dg, db))
        dv = _sum_copies(dv[0], t, v.dtype)
        dq, dk = fk.l2norm_bwd(*x.q_row, dq), fk.l2norm_bwd(*x.k_row, dk)
        df, dA_log, ddt_bias = fk.kda_gate_bwd(
            g=f.contiguous(), A_log=A_log, dt_bias=dt_bias.reshape(-1), dyg=dg, lower_bound=lower_bound
        )
        db = fk.fused_beta_sigmoid_bwd(x=b.contiguous(), dy=db)
    return dq, dk, dv, df, db, dA_log, ddt_bias.view_as(dt_bias), dpool[:num_external]


def _pack_output_gradient(do: Tensor | None, v_packed: Tensor, t: _Index) -> Tensor:
    if do is None:
        return torch.zeros_like(v_packed)
    if t.kept_T.shape[0] == t.packed_row_P.shape[0]:
        return do.contiguous()[None]
    packed = torch.zeros_like(v_packed)
    packed[0].index_copy_(0, t.kept_T, do)
    return packed


@_kda_backward.register_fake
def _(q, k, v, f, b, A_log, dt_bias, external, exported, Aqk, Akk, do, dexported, tables, chunk_size, lower_bound):
    return tuple(x.new_empty(x.shape) for x in (q, k, v, f, b, A_log, dt_bias, external))


def _save(ctx, inputs, output):
    *tensors, tables, chunk_size, lower_bound = inputs
    _, exported, Aqk, Akk = output
    ctx.mark_non_differentiable(Aqk, Akk)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, exported, Aqk, Akk, *tables)
    ctx.num_tensors = len(tensors) + 3
    ctx.settings = (chunk_size, lower_bound)


def _differentiate(ctx, do, dexported, *_):
    saved = ctx.saved_tensors
    tensors, tables = saved[: ctx.num_tensors], list(saved[ctx.num_tensors :])
    if do is None and dexported is None:
        grads: tuple[Tensor | None, ...] = (None,) * (ctx.num_tensors - 3)
    else:
        grads = _kda_backward(*tensors, do, dexported, tables, *ctx.settings)
    return (*grads, [None] * len(tables), None, None)


_kda_forward.register_autograd(_differentiate, setup_context=_save)
