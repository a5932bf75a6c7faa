"""Launches of the KDA kernels of one call, forward and backward; letters as in ``triton_op.py``.

Everything inside a chunk is independent of the carried state, so the kernels of ``chunk_kernels.py`` and
``chunk_gradient_kernels.py`` run once over all chunks; only the two state scans of ``kernels.py`` run round by round,
because a round starts from states that earlier rounds export. Where the sequences ask for separate calls, all kernels
run round by round.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.profiler import record_function

from harts_titan.ops.kda.chunk_gradient_kernels import (
    chunk_backward_keys,
    chunk_backward_norms,
    chunk_backward_values,
    chunk_output_gradient,
)
from harts_titan.ops.kda.chunk_kernels import chunk_forward, chunk_gates, chunk_output
from harts_titan.ops.kda.configs import launch
from harts_titan.ops.kda.kernels import fan_in_copies, fan_in_states, state_scan_backward, state_scan_forward
from harts_titan.ops.kda.saved import Saved
from harts_titan.ops.kda.tables import Index

_FAN_BLOCK = 1024

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


def _recorded(label: str) -> contextlib.AbstractContextManager[object]:
    """Profiler range of a scan. Without a profiler there is none: entering one takes the host as long as a launch."""
    return record_function(label) if torch.autograd._profiler_enabled() else contextlib.nullcontext()


class _Part(NamedTuple):
    """Rounds whose scans run one after another, and their chunks."""

    rounds: range
    first_chunk: int
    num_chunks: int


def _calls(t: Index, num_chunks: int) -> list[list[_Part]]:
    """Return calls, which run one after another, and the parts of each, whose scans may run beside other kernels."""

    def part(first: int, last: int) -> _Part:
        own = t.rounds[first:last]
        begin = own[0].first_chunk
        return _Part(range(first, last), begin, own[-1].first_chunk + own[-1].num_chunks - begin)

    count = len(t.rounds)
    if t.separate_calls:
        return [[part(i, i + 1)] for i in range(count)]
    if OVERLAP and 0 < t.rounds[0].num_chunks < num_chunks:
        return [[part(0, 1), part(1, count)]]
    return [[part(0, count)]]


def run_forward(
    inputs: list[Tensor], s: Saved, u: Tensor, pool: Tensor, o: Tensor, t: Index, lower_bound: float
) -> None:
    """Fill ``s``, ``u``, the outputs ``o`` and the exported rows of ``pool``."""
    kernels = _Forward(inputs, s, u, pool, o, t, lower_bound)
    for parts in _calls(t, s.h.shape[0]):
        scans, done = _Scans(o.device, len(parts) > 1), []
        for part in parts:
            kernels.inside(part)
            done.append(scans.run(functools.partial(kernels.scan, part)))
        for part, scan in zip(parts, done):
            scans.wait(scan)
            kernels.output(part)


class _Forward:
    """Launches the forward kernels of a part; there may be hundreds, so what their launches share is made once."""

    def __init__(
        self, inputs: list[Tensor], s: Saved, u: Tensor, pool: Tensor, o: Tensor, t: Index, lower_bound: float
    ) -> None:
        self._inputs, self._s, self._u, self._pool, self._o, self._t = inputs, s, u, pool, o, t
        num_chunks, self._H, K, V = s.h.shape
        BT = s.Aqk.shape[2]
        self._scalars = lower_bound, K**-0.5, num_chunks * BT * self._H
        sizes = {"H": self._H, "K": K, "V": V, "BT": BT}
        names = ("chunk_forward", "state_scan_forward", "chunk_output")
        self._options = [sizes | launch(name, s.h, K=K, V=V) for name in names]
        self._gates = {"H": self._H, "K": K, "BT": BT} | launch("chunk_gates", s.h, K=K, V=V)
        self._scan_programs, self._output_programs = (self._H * (V // x["BV"]) for x in self._options[1:])

    def inside(self, part: _Part) -> None:
        """Everything a scan needs."""
        s, (q, k, v, *gate) = self._s, self._inputs
        _, scale, size = self._scalars
        programs = self._H * (self._gates["K"] // self._gates["BK"])
        chunk_gates[(part.num_chunks * programs,)](
            q,
            k,
            *gate,
            self._t.packed_row_S,
            s.qg,
            s.kg,
            s.g,
            s.row,
            *self._scalars,
            part.first_chunk * programs,
            **self._gates,
        )
        chunk_forward[(part.num_chunks * self._H,)](
            q,
            k,
            v,
            self._t.packed_row_S,
            s.w,
            self._u,
            s.g,
            s.Aqk,
            s.Akk,
            s.row,
            scale,
            size,
            part.first_chunk * self._H,
            **self._options[0],
        )

    def scan(self, part: _Part) -> None:
        """Round after round: fills ``v_new``, ``h`` and the exported rows of the pool."""
        s, t = self._s, self._t
        for i in part.rounds:
            with _recorded(f"harts::round{i}"):
                state_scan_forward[(t.rounds[i].num_sequences * self._scan_programs,)](
                    s.kg,
                    s.w,
                    self._u,
                    s.g,
                    s.v_new,
                    s.h,
                    self._pool,
                    t.init_row_Q,
                    t.export_row_B,
                    t.chunk_offset_Q1,
                    t.rounds[i].first_sequence,
                    **self._options[1],
                )

    def output(self, part: _Part) -> None:
        """Outputs of own rows."""
        s, programs = self._s, self._output_programs
        chunk_output[(part.num_chunks * programs,)](
            s.qg, s.Aqk, s.v_new, s.h, self._o, self._t.own_row_S, part.first_chunk * programs, **self._options[2]
        )


def run_backward(
    inputs: list[Tensor], grads: list[Tensor], s: Saved, do: Tensor | None, dpool: Tensor, t: Index, lower_bound: float
) -> Tensor:
    """Fill ``grads`` and ``dpool``; return the chunks' sums for ``dt_bias`` and ``A_log``."""
    kernels = _Backward(inputs, grads, s, do, dpool, t, lower_bound)
    for parts in reversed(_calls(t, s.h.shape[0])):
        whole = _Part(range(0), parts[0].first_chunk, sum(part.num_chunks for part in parts))
        kernels.output_gradient(whole)
        scans = _Scans(dpool.device, len(parts) > 1)
        # The scans do not depend on the gradients of their chunks' inputs: all are queued first.
        done = [scans.run(functools.partial(kernels.scan, part)) for part in reversed(parts)]
        for part, scan in zip(reversed(parts), done):
            scans.wait(scan)
            kernels.values_and_keys(part)
        kernels.norms(whole)
    kernels.copies()
    return kernels.part


class _Backward:
    """Launches the backward kernels of a part; ``dpool`` holds the exports' gradients and collects initial states'."""

    def __init__(
        self,
        inputs: list[Tensor],
        grads: list[Tensor],
        s: Saved,
        do: Tensor | None,
        dpool: Tensor,
        t: Index,
        lower_bound: float,
    ) -> None:
        self._inputs, self._grads, self._s, self._t, self._dpool = inputs, grads, s, t, dpool
        num_chunks, self._H, K, V = s.h.shape
        BT = s.Aqk.shape[2]
        self._state_size = self._H * K * V
        self._num_slots = num_chunks * BT * self._H
        self._scalars = lower_bound, K**-0.5, self._num_slots
        sizes = {"H": self._H, "K": K, "V": V, "BT": BT}
        names = ("state_scan_backward", "chunk_backward_values", "chunk_backward_keys")
        self._scan, self._values, self._keys = (sizes | launch(name, s.h, K=K, V=V) for name in names)
        self._values["PARTS"] = self._keys["PARTS"]
        self._output = {"H": self._H, "V": V, "BT": BT} | launch("chunk_output_gradient", s.h, K=K, V=V)
        self._norms = {"H": self._H, "K": K, "BT": BT} | launch("chunk_backward_norms", s.h, K=K, V=V)
        self._do = None if do is None else do.contiguous()
        new = torch.zeros_like if do is None else torch.empty_like
        self._do_tile, self._dv = new(s.v_new), new(s.v_new)
        self._dv_new, self._dh = torch.empty_like(s.v_new), torch.empty_like(s.h)
        # Of one round: rounds run one after another, so one buffer of the largest round serves all.
        self._dinit = dpool.new_empty((max((r.num_starts for r in t.rounds), default=0), self._H, K, V))
        self._copies = [x.new_empty((t.num_copies, *x.shape[1:]), dtype=torch.float32) for x in grads]
        dA_dtype = torch.float32 if self._keys["WIDE"] else s.Akk.dtype
        self._dA = [s.Akk.new_empty((self._keys["PARTS"], *s.Akk.shape), dtype=dA_dtype) for _ in range(2)]
        self._diagonal = s.row.new_empty(s.row.shape[1:])
        self._dq, self._dk = torch.empty_like(s.g), torch.empty_like(s.g)
        self._norms["ND"] = 1 + K // self._keys["BK"]
        self._db_part = s.row.new_empty((self._norms["ND"], BT * num_chunks, self._H))
        self.part = s.row.new_empty((2, num_chunks, self._H, K))

    def output_gradient(self, part: _Part) -> None:
        """``dO`` as tiles, and ``P^T dO``: zeros, which need no kernel, without gradients of the outputs."""
        if self._do is None:
            return
        programs = self._H * (self._output["V"] // self._output["BV"])
        chunk_output_gradient[(part.num_chunks * programs,)](
            self._do,
            self._s.Aqk,
            self._do_tile,
            self._dv,
            self._t.own_row_S,
            part.first_chunk * programs,
            **self._output,
        )

    def scan(self, part: _Part) -> None:
        """Reverse scan, last round first; ``dpool`` then holds the gradients of the states the round started from."""
        s, t, size = self._s, self._t, self._state_size
        for i in reversed(part.rounds):
            r = t.rounds[i]
            with _recorded(f"harts::round{i}_backward"):
                state_scan_backward[(r.num_sequences * self._H * (self._scan["V"] // self._scan["BV"]),)](
                    s.qg,
                    s.kg,
                    s.w,
                    s.g,
                    self._do_tile,
                    self._dv,
                    self._dv_new,
                    self._dh,
                    self._dpool,
                    self._dinit,
                    t.export_row_B,
                    t.init_slot_Q,
                    t.chunk_offset_Q1,
                    r.first_sequence,
                    **self._scan,
                )
                if r.num_fans:
                    fan_in_states[(r.num_fans * -(-size // _FAN_BLOCK),)](
                        self._dinit,
                        self._dpool,
                        t.fan_row_F,
                        t.fan_ptr_F1,
                        t.fan_slot_M,
                        r.first_fan,
                        S=size,
                        BS=_FAN_BLOCK,
                        num_warps=4,
                    )

    def values_and_keys(self, part: _Part) -> None:
        """Gradients of v and of the raw gate; those of the normalised q and k."""
        s, t = self._s, self._t
        chunk_backward_values[(part.num_chunks * self._H,)](
            self._inputs[1],
            self._inputs[2],
            t.packed_row_S,
            t.copy_slot_S,
            s.g,
            s.row,
            s.Akk,
            s.h,
            s.v_new,
            self._do_tile,
            self._dv_new,
            self._grads[2],
            self._copies[2],
            *self._dA,
            self._diagonal,
            self._db_part,
            self._num_slots,
            part.first_chunk * self._H,
            **self._values,
        )
        programs = self._H * (self._keys["K"] // self._keys["BK"])
        chunk_backward_keys[(part.num_chunks * programs,)](
            *self._inputs[:2],
            *self._inputs[3:],
            t.packed_row_S,
            t.copy_slot_S,
            s.g,
            s.row,
            s.Akk,
            s.h,
            s.v_new,
            self._do_tile,
            self._dh,
            self._dv_new,
            *self._dA,
            self._diagonal,
            self._dq,
            self._dk,
            self._grads[3],
            self._copies[3],
            self._db_part,
            self.part,
            *self._scalars,
            part.first_chunk * programs,
            **self._keys,
        )

    def norms(self, part: _Part) -> None:
        """Gradients of the raw q, k and beta."""
        programs = self._H * (self._norms["BT"] // self._norms["BS"])
        chunk_backward_norms[(part.num_chunks * programs,)](
            *self._inputs[:2],
            self._t.packed_row_S,
            self._t.copy_slot_S,
            self._s.row,
            self._dq,
            self._dk,
            self._db_part,
            *(self._grads[i] for i in (0, 1, 4)),
            *(self._copies[i] for i in (0, 1, 4)),
            self._num_slots,
            part.first_chunk * programs,
            **self._norms,
        )

    def copies(self) -> None:
        """Gradients of path rows that several packed rows read, or none."""
        t, (_, H, K, V) = self._t, self._s.h.shape
        if num_shared := t.shared_row_D.shape[0]:
            fan_in_copies[(num_shared * H,)](
                *self._copies, *self._grads, t.shared_row_D, t.shared_ptr_D1, H=H, K=K, V=V, num_warps=1
            )
