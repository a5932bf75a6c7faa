"""Launches of the KDA kernels of one call, forward and backward; letters as in ``triton_op.py``.

Everything inside a chunk is independent of the carried state, so the kernels of ``chunk_kernels.py`` and
``chunk_gradient_kernels.py`` run once over all chunks; only the two state scans of ``kernels.py`` run round by round,
because a round starts from states that earlier rounds export.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.profiler import record_function

from harts_titan.ops.kda.chunk_gradient_kernels import (
    chunk_backward_keys,
    chunk_backward_norms,
    chunk_backward_values,
    chunk_output_gradient,
    fan_in_copies,
)
from harts_titan.ops.kda.chunk_kernels import chunk_forward, chunk_output
from harts_titan.ops.kda.configs import BLOCK_ROWS, launch
from harts_titan.ops.kda.kernels import fan_in_states, state_scan_backward, state_scan_forward
from harts_titan.ops.kda.tables import Index, Round

_FAN_BLOCK = 1024


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
        if event is not None and self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(event)


def _chunk_ranges(t: Index, num_chunks: int) -> tuple[tuple[slice, slice], ...]:
    """Rounds, and their chunks, that are launched together: the first round, and the others."""
    if not OVERLAP or not 0 < t.first_chunks < num_chunks:
        return ((slice(0, len(t.rounds)), slice(0, num_chunks)),)
    return (slice(0, 1), slice(0, t.first_chunks)), (slice(1, len(t.rounds)), slice(t.first_chunks, num_chunks))


def _scan_forward(s: Saved, u: Tensor, pool: Tensor, t: Index, which: slice) -> None:
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


def _scan_backward(s: Saved, d: _ScanGradients, t: Index, which: slice) -> None:
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


class Saved(NamedTuple):
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


def new_saved(q: Tensor, v: Tensor, num_slots: int, chunk_size: int) -> Saved:
    """Room for what forward keeps, on the device of ``q``."""
    (H, K), V = q.shape[1:], v.shape[-1]
    S = num_slots
    wide = q.new_empty((S, H, K), dtype=torch.float32)
    return Saved(
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


def run_forward(
    inputs: list[Tensor], s: Saved, u: Tensor, pool: Tensor, o: Tensor, t: Index, lower_bound: float
) -> None:
    """Fill ``s``, ``u``, the outputs ``o`` and the exported rows of ``pool``."""
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


def run_backward(
    inputs: list[Tensor],
    grads: list[Tensor],
    s: Saved,
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
    dA_shape = (keys["PARTS"], *s.Akk.shape)
    dA = [s.Akk.new_empty(dA_shape, dtype=torch.float32 if keys["WIDE"] else s.Akk.dtype) for _ in range(2)]
    diagonal = s.row.new_empty(s.row.shape[1:])
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
            diagonal,
            db_part,
            size,
            chunks.start * H,
            **sizes,
            PARTS=keys["PARTS"],
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
            diagonal,
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
        0,
        H=H,
        K=K,
        BT=BT,
        ND=db_part.shape[0],
        **options,
    )
    if num_shared := t.shared_row_D.shape[0]:
        fan_in_copies[(num_shared * H,)](*copies, *grads, t.shared_row_D, t.shared_ptr_D1, H=H, K=K, V=V, num_warps=1)
    return part


def _output_gradient(do: Tensor | None, s: Saved, t: Index) -> tuple[Tensor, Tensor]:
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
