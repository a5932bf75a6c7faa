"""KDA by fla-core's ``chunk_kda``: one stock call a round, to measure against and to check with.

The only module of the package that imports fla. A call takes sequences from a state and gives the state behind their
last rows; states inside a sequence, which HARTS 3.4 hands over, cannot be had from it. So modes ``expanded``,
``nodewise`` and ``depthwise`` run, ``compact`` where no fork lies behind the first chunk.

fla's autotuners time every configuration when a process starts, and two configurations of one kernel may round
differently. So importing this module replaces the configuration list of every kernel ``chunk_kda`` runs by a single
entry, the ones that were checked against float64 and timed on an H200 (fla issue 988: Hopper miscompiles some).

Letters: T own rows, Y path rows, N sequences of a round, E exports, H heads, K key width, V value width.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor
from torch.profiler import record_function

from harts_titan.ops.assembler import require_sound_ptxas
from harts_titan.ops.host_tables import to_device
from harts_titan.ops.kda.sequences import PackedSequences

logger = logging.getLogger(__name__)

REQUIRED_FLA_VERSION = "0.6.0"
CHUNK_SIZE = 64
"""Rows per chunk of a stock call."""

# fla may swap a kernel for a TileLang or Gluon one with other rounding; it reads the variable when it is imported.
os.environ.setdefault("FLA_DISABLE_BACKEND_DISPATCH", "1")
# Chunk tables of packed calls are found again by the identity of cu_seqlens; the default of 4 holds those of 4 rounds,
# and a table that has to be built anew waits for the device.
os.environ.setdefault("FLA_TENSOR_CACHE_SIZE", "128")
_fla_was_imported = "fla" in sys.modules

import fla  # noqa: E402
import fla.backends  # noqa: E402
from fla.utils import FLA_TENSOR_CACHE_SIZE  # noqa: E402

if fla.__version__ != REQUIRED_FLA_VERSION:
    raise ImportError(
        f"fla-core {fla.__version__} is installed, exactly {REQUIRED_FLA_VERSION} is needed: older ones let "
        f"later tokens change earlier rows, newer ones are unchecked; pip install fla-core=={REQUIRED_FLA_VERSION}"
    )
if not fla.backends._DISPATCH_DISABLED:
    when = "fla was imported before harts_titan" if _fla_was_imported else "the environment sets it to another value"
    raise ImportError(f"FLA_DISABLE_BACKEND_DISPATCH must be 1 before fla is imported ({when})")
if FLA_TENSOR_CACHE_SIZE < 128:
    logger.warning(
        "fla keeps the tables of %d rounds only, and builds others anew in every layer, which waits for the device; "
        "import harts_titan.ops.kda.fla_op before fla, or set FLA_TENSOR_CACHE_SIZE=128",
        FLA_TENSOR_CACHE_SIZE,
    )

from fla.modules.norm import l2norm as _l2norm  # noqa: E402
from fla.ops.common import chunk_delta_h as _delta_h  # noqa: E402
from fla.ops.gla import chunk as _gla  # noqa: E402
from fla.ops.kda import chunk_bwd as _chunk_bwd  # noqa: E402
from fla.ops.kda import chunk_intra as _chunk_intra  # noqa: E402
from fla.ops.kda import chunk_kda  # noqa: E402
from fla.ops.kda import gate as _gate  # noqa: E402
from fla.ops.kda import wy_fast as _wy_fast  # noqa: E402
from fla.ops.utils import cumsum as _cumsum  # noqa: E402
from fla.ops.utils.index import prepare_chunk_indices  # noqa: E402

# kernel -> (module, meta-parameters, warps, pipeline stages)
PINNED: dict[str, tuple[Any, dict[str, int], int, int]] = {
    "l2norm_fwd_kernel": (_l2norm, {"BT": 8}, 4, 3),
    "l2norm_bwd_kernel": (_l2norm, {"BT": 8}, 4, 3),
    "kda_gate_chunk_cumsum_vector_kernel": (_gate, {"BS": 32}, 4, 3),
    "kda_gate_bwd_kernel": (_gate, {}, 4, 2),
    "chunk_kda_fwd_kernel_intra_sub_chunk": (_chunk_intra, {}, 4, 2),
    "chunk_kda_fwd_kernel_inter_solve_fused": (_chunk_intra, {"BK": 64}, 1, 3),
    "recompute_w_u_fwd_kda_kernel": (_wy_fast, {}, 4, 2),
    "chunk_gla_fwd_kernel_o": (_gla, {"BK": 64, "BV": 128}, 4, 2),
    "chunk_kda_bwd_kernel_dAv": (_chunk_bwd, {}, 4, 2),
    "chunk_kda_bwd_kernel_wy_dqkg_fused": (_chunk_bwd, {"BK": 64, "BV": 64}, 4, 2),
    "chunk_kda_bwd_kernel_intra": (_chunk_intra, {}, 4, 2),
    "chunk_local_cumsum_vector_kernel": (_cumsum, {"BS": 32}, 4, 3),
    "chunk_gated_delta_rule_fwd_kernel_h_blockdim64": (_delta_h, {"BV": 32}, 4, 2),
    "chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64": (_delta_h, {"BV": 32}, 4, 2),
}


def pin(name: str, meta: dict[str, int], num_warps: int, num_stages: int) -> None:
    """Replace the autotuning list of one kernel of ``PINNED`` by a single configuration.

    Args:
        name: Key of ``PINNED``.
        meta: Constexpr meta-parameters the autotuner chooses (tile sizes).
        num_warps: Warps per program.
        num_stages: Software pipeline stages.

    Raises:
        ImportError: If the installed fla-core has no such autotuned kernel.
    """
    module = PINNED[name][0]
    tuner = getattr(module, name, None)
    while tuner is not None and not hasattr(tuner, "configs"):
        tuner = getattr(tuner, "fn", None)
    if tuner is None:
        raise ImportError(f"fla-core {fla.__version__} has no autotuned kernel {module.__name__}.{name}")
    tuner.configs = [triton.Config(dict(meta), num_warps=num_warps, num_stages=num_stages)]
    tuner.cache.clear()


_PARAMETERS = (
    *("q", "k", "v", "g", "beta", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel"),
    *("use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "safe_gate", "lower_bound", "cu_seqlens", "cu_seqlens_cpu"),
)


def check_signature(function: Callable[..., Any]) -> None:
    """Refuse a ``chunk_kda`` that lacks a parameter the backend passes.

    Raises:
        ImportError: naming the parameters.
    """
    parameters = inspect.signature(function).parameters
    missing = [name for name in _PARAMETERS if name not in parameters]
    # The gate's parameters are read from the keywords.
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        missing += [name for name in ("A_log", "dt_bias", "chunk_size") if name not in parameters]
    if missing:
        raise ImportError(
            f"chunk_kda of the installed fla-core has no parameters {missing}; "
            f"pip install --force-reinstall fla-core=={REQUIRED_FLA_VERSION}"
        )


check_signature(chunk_kda)
for _name, (_, _meta, _warps, _stages) in PINNED.items():
    pin(_name, _meta, _warps, _stages)


class _Gather(NamedTuple):
    """States taken from ``[external states, final states of round 0, of round 1, ...]``."""

    sources: tuple[int, ...]
    """Entries that are read, concatenated; none: no state is read."""
    with_zero: bool
    """Whether a zero state follows them."""
    row_N: Tensor | None
    """int64: rows of the concatenation; None: all of them, in order."""


class _Round(NamedTuple):
    """One call of ``chunk_kda``."""

    num_rows: int
    cu_seqlens: Tensor | None
    """int64 (N+1), on the device and (next) on the host; None for one sequence, which needs no packing."""
    cu_seqlens_cpu: Tensor | None
    starts: _Gather
    hands_over: bool
    """Whether a later round or the caller reads a final state."""


class _Calls(NamedTuple):
    """Everything the calls of all rounds read besides rows and states."""

    rounds: tuple[_Round, ...]
    packed_row: Tensor | None
    """None: packed rows are the path rows, in order."""
    kept: Tensor | None
    """None: every packed row is an own row."""
    exports: _Gather


def prepare_calls(sequences: PackedSequences) -> _Calls:
    """Return the index tables of one call a round, built once and kept with ``sequences``.

    Raises:
        ValueError: If a state inside a sequence is handed over, or chunks do not have fla's size.
    """
    cached = getattr(sequences, "_fla_calls", None)
    if cached is not None:
        return cached
    _check_sequences(sequences)
    device = sequences.device
    bounds = [(first, last) for first, last in sequences.rounds if last > first]
    # Where each row of the state pool comes from: entry of the list of states, and row of that entry.
    sizes = [sequences.num_external_states, *(last - first for first, last in bounds)]
    place = [(1 + r, n - first) for r, (first, last) in enumerate(bounds) for n in range(first, last)]
    pool = [(0, row) for row in range(sequences.num_external_states)]
    pool += [place[n] for n in sequences.export_sequence_host]
    handing_over = {entry for entry, _ in pool}
    rounds = []
    for r, (first, last) in enumerate(bounds):
        cu = np.asarray(sequences.cu_seqlens_host[first : last + 1], dtype=np.int64)
        cu -= cu[0]
        cu_seqlens = cu_seqlens_cpu = None
        if last - first > 1:
            cu_seqlens, cu_seqlens_cpu = to_device(cu, device), torch.from_numpy(cu)
            _build_chunk_table(cu_seqlens, cu_seqlens_cpu)
        starts = _gather([pool[i] if i >= 0 else None for i in sequences.init_state_host[first:last]], sizes, device)
        rounds.append(_Round(int(cu[-1]), cu_seqlens, cu_seqlens_cpu, starts, 1 + r in handing_over))
    in_order = np.array_equal(sequences.packed_row_host, np.arange(sequences.num_path_rows))
    calls = _Calls(
        tuple(rounds),
        None if in_order else sequences.packed_row_P,
        None if sequences.num_rows == sequences.num_packed_rows else sequences.kept_T,
        _gather(pool[sequences.num_external_states :], sizes, device),
    )
    object.__setattr__(sequences, "_fla_calls", calls)
    return calls


def _check_sequences(sequences: PackedSequences) -> None:
    if sequences.chunk_size != CHUNK_SIZE:
        raise ValueError(
            f"chunk_size = {sequences.chunk_size} must be {CHUNK_SIZE} for backend 'fla' of kda (tree.chunk_size)"
        )
    length = np.diff(sequences.cu_seqlens_host)
    for n, boundary in zip(sequences.export_sequence_host, sequences.export_boundary_host):
        if boundary * CHUNK_SIZE < length[n]:
            raise ValueError(
                "backend 'fla' of kda gives the state behind a sequence's last row only, but the state behind row "
                f"{boundary * CHUNK_SIZE} of the {length[n]} of sequence {n} is handed over, as in mode 'compact'; set "
                "tree.mode to 'nodewise', 'depthwise' or 'expanded', or ops.kda to 'auto'"
            )


def _gather(places: Sequence[tuple[int, int] | None], sizes: Sequence[int], device: torch.device) -> _Gather:
    """States at (entry, row) of the list of states with ``sizes`` rows each; None: the zero state."""
    sources = tuple(sorted({place[0] for place in places if place is not None}))
    if not sources:
        return _Gather((), False, None)
    offset = dict(zip(sources, np.cumsum([0, *(sizes[s] for s in sources)]).tolist()))
    zero = sum(sizes[s] for s in sources)
    index = np.array([zero if place is None else offset[place[0]] + place[1] for place in places], dtype=np.int64)
    with_zero = None in places
    if np.array_equal(index, np.arange(zero + with_zero)):
        return _Gather(sources, with_zero, None)
    return _Gather(sources, with_zero, to_device(index, device))


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _build_chunk_table(cu_seqlens: Tensor, cu_seqlens_cpu: Tensor) -> None:
    """Let fla build its table of chunks before it is needed; it keeps the table of these very tensors.

    Its copy to the device waits for the stream it runs on: one that is empty, so that queued layers go on.
    """
    arguments: dict[str, Any] = {"cu_seqlens": cu_seqlens, "chunk_size": CHUNK_SIZE, "cu_seqlens_cpu": cu_seqlens_cpu}
    if not cu_seqlens.is_cuda:
        prepare_chunk_indices(**arguments)
        return
    with torch.cuda.stream(_copy_stream(cu_seqlens.device)):
        table = prepare_chunk_indices(**arguments)
    table.record_stream(torch.cuda.current_stream(cu_seqlens.device))


def kda_fla(
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
    """Run KDA with one ``chunk_kda`` call a round; arguments and results as in :func:`harts_titan.ops.kda.kda`.

    Rows and states are gathered, and their gradients added up, by plain PyTorch around the calls: in the inputs' dtype,
    and on CUDA in no fixed order where several packed rows or sequences read the same one.

    Args:
        q_YHK: float16 or bfloat16 on CUDA; K up to 256. float32 is for checks.
        k_YHK: Likewise.
        v_YHV: Likewise.
        f_YHK: Raw decay gate.
        b_YH: Raw beta.
        A_log_H: float32.
        dt_bias_HK: float32.
        sequences: With chunks of 64, and no state handed over but those behind last rows.
        lower_bound: In [-5, 0).
        external_state_EHKV: float32 states handed in, or None.

    Raises:
        ValueError: If ``sequences``, K or ``lower_bound`` are not what ``chunk_kda`` takes.
    """
    if q_YHK.shape[2] > 256:
        raise ValueError(f"head width K = {q_YHK.shape[2]} must be at most 256 for backend 'fla' of kda")
    calls = prepare_calls(sequences)
    x = [q_YHK, k_YHK, v_YHV, f_YHK, b_YH]
    if calls.packed_row is not None:
        x = [t.index_select(0, calls.packed_row) for t in x]
    # One node of the graph for all rounds: a slice of its own for each would add a gradient of all rows for each.
    parts = zip(*(t.split([one.num_rows for one in calls.rounds]) for t in x))
    zero = v_YHV.new_zeros((1, *q_YHK.shape[1:], v_YHV.shape[2]), dtype=torch.float32)
    states: list[Tensor | None] = [zero[:0] if external_state_EHKV is None else external_state_EHKV]
    outputs = [v_YHV[:0]]
    if q_YHK.is_cuda and torch.cuda.get_device_capability(q_YHK.device)[0] == 9:
        require_sound_ptxas()
    for r, (one, rows) in enumerate(zip(calls.rounds, parts)):
        with record_function(f"harts::round{r}"):
            o, final = _call(rows, A_log_H, dt_bias_HK, _read(states, one.starts, zero), one, lower_bound)
        outputs.append(o)
        states.append(final)
    o_PHV = torch.cat(outputs)
    exported = _read(states, calls.exports, zero)
    o_THV = o_PHV if calls.kept is None else o_PHV.index_select(0, calls.kept)
    return o_THV, zero[:0] if exported is None else exported


def _read(states: Sequence[Tensor | None], which: _Gather, zero: Tensor) -> Tensor | None:
    if not which.sources:
        return None
    parts: list[Any] = [states[s] for s in which.sources]
    if which.with_zero:
        parts.append(zero)
    state_NHKV = torch.cat(parts) if len(parts) > 1 else parts[0]
    return state_NHKV if which.row_N is None else state_NHKV.index_select(0, which.row_N)


def _call(
    rows: Sequence[Tensor], A_log: Tensor, dt_bias: Tensor, state: Tensor | None, one: _Round, lower_bound: float
) -> tuple[Tensor, Tensor | None]:
    q, k, v, f, b = (t[None] for t in rows)
    o, final = chunk_kda(
        *(q, k, v),
        g=f,
        beta=b,
        A_log=A_log,
        dt_bias=dt_bias.reshape(-1),
        initial_state=state,
        output_final_state=one.hands_over,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        safe_gate=True,
        lower_bound=lower_bound,
        cu_seqlens=one.cu_seqlens,
        cu_seqlens_cpu=one.cu_seqlens_cpu,
        chunk_size=CHUNK_SIZE,
    )
    return o[0], final
