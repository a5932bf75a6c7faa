"""Public entry of KDA over the packed sequences of one call."""

from __future__ import annotations

import torch
from torch import Tensor

from harts_titan.ops.backend import AUTO, choose
from harts_titan.ops.dtypes import wide_dtype
from harts_titan.ops.kda.reference import kda_recurrent, kda_reference
from harts_titan.ops.kda.sequences import PackedSequences


def kda(
    q_YHK: Tensor,
    k_YHK: Tensor,
    v_YHV: Tensor,
    f_YHK: Tensor,
    b_YH: Tensor,
    A_log_H: Tensor,
    dt_bias_HK: Tensor,
    sequences: PackedSequences,
    *,
    lower_bound: float = -5.0,
    external_state_EHKV: Tensor | None = None,
    backend: str = AUTO,
) -> tuple[Tensor, Tensor]:
    """``ChunkLA`` of HARTS 3.4: packed, differentiable in every input, initial state and exported state.

    Inside: l2norm of q and k (eps 1e-6 in the root), scale ``K^-0.5`` on q, log decay
    ``lower_bound * sigmoid(exp(A_log) * (f + dt_bias))`` per channel, ``beta = sigmoid(b)``, the gather of replay rows.
    Gradients of replay rows are added to the rows they repeat, in packed order.

    Args:
        q_YHK: Queries of the path rows (external rows first), after convolution and SiLU.
        k_YHK: Keys, likewise.
        v_YHV: Values, likewise; V may differ from K.
        f_YHK: Raw decay gate.
        b_YH: Raw beta.
        A_log_H: Log slope of the gate per head, usually float32.
        dt_bias_HK: Gate bias, usually float32.
        sequences: Packed sequences on the inputs' device.
        lower_bound: Lower bound of the log decay, negative.
        external_state_EHKV: float32 (float64 for float64 inputs) states handed in; ``sequences.num_external_states``.
        backend: "auto", "triton", "reference", "recurrent" or "fla" (states behind last rows only).

    Returns:
        ``o_THV`` in the dtype of ``v``, and the exported states (E, H, K, V), float32 (float64 for float64 inputs):
        the carried values, not rounded copies.

    Raises:
        ValueError: If shapes, devices or the number of external states disagree with ``sequences``, or a forced
            backend cannot run.
    """
    _check(q_YHK, k_YHK, v_YHV, f_YHK, b_YH, A_log_H, dt_bias_HK, sequences, external_state_EHKV)
    if not lower_bound < 0:
        raise ValueError(f"lower_bound ({lower_bound}) must be negative: it bounds the log decay from below")
    name = choose("kda", backend, device=q_YHK.device, dtype=q_YHK.dtype)
    arguments = (q_YHK, k_YHK, v_YHV, f_YHK, b_YH, A_log_H, dt_bias_HK, sequences, lower_bound, external_state_EHKV)
    if name == "triton":
        # Triton is optional: CPU installations do not have it.
        from harts_titan.ops.kda.triton_op import kda_triton

        return kda_triton(*arguments)
    if name == "fla":
        # Optional as well, and needed to measure only.
        from harts_titan.ops.kda.fla_op import kda_fla

        return kda_fla(*arguments)
    return kda_reference(*arguments) if name == "reference" else kda_recurrent(*arguments)


def prepare_kda(sequences: PackedSequences, *, dtype: torch.dtype, backend: str = AUTO) -> None:
    """Build what :func:`kda` will read besides the sequences, once per call of a plan.

    A compiled region finds it then; outside of one the op would build it on first use.

    Args:
        sequences: Of the call, on the inputs' device.
        dtype: Dtype of the inputs.
        backend: As for the op.

    Raises:
        ValueError: If a forced backend cannot run, or not on these sequences.
    """
    name = choose("kda", backend, device=sequences.device, dtype=dtype)
    if name == "triton":
        # Triton is optional: CPU installations do not have it.
        from harts_titan.ops.kda.triton_op import prepare_tables

        prepare_tables(sequences)
    elif name == "fla":
        # Optional as well, and needed to measure only.
        from harts_titan.ops.kda.fla_op import prepare_calls

        prepare_calls(sequences)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    f: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    sequences: PackedSequences,
    external: Tensor | None,
) -> None:
    if q.dim() != 3 or v.dim() != 3:
        raise ValueError(f"q and v must be (rows, heads, dim); got {tuple(q.shape)} and {tuple(v.shape)}")
    rows, heads, key_dim = q.shape
    expected = {
        "q": (q, (sequences.num_path_rows, heads, key_dim)),
        "k": (k, (rows, heads, key_dim)),
        "v": (v, (rows, heads, v.shape[2])),
        "f": (f, (rows, heads, key_dim)),
        "b": (b, (rows, heads)),
        "A_log": (A_log, (heads,)),
        "dt_bias": (dt_bias, (heads, key_dim)),
    }
    for name, (tensor, shape) in expected.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {shape} (path rows, heads, dim)")
        if tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device}, q on {q.device}")
    if sequences.device != q.device:
        raise ValueError(f"sequences are on {sequences.device}, q on {q.device}; use sequences.to(device)")
    state_shape = (sequences.num_external_states, heads, key_dim, v.shape[2])
    if external is None:
        if sequences.num_external_states:
            raise ValueError(f"sequences expect {sequences.num_external_states} external states; got none")
        return
    if tuple(external.shape) != state_shape:
        raise ValueError(f"external_state has shape {tuple(external.shape)}, expected {state_shape}")
    if external.dtype != wide_dtype(q.dtype):
        raise ValueError(
            f"external_state is {external.dtype}, expected {wide_dtype(q.dtype)}: states are never rounded"
        )
