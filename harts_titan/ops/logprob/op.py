"""Log-probabilities of semantic positions and entropies of compact rows (HARTS 3.5).

Letters: T rows, S semantic positions, D model dim, W vocabulary.

``logprob_s = z[m(s), y_s] - lse[m(s)]`` and ``entropy_c = lse_c - sum_w p_cw z_cw``, in float32 (float64 for float64
logits). With ``G_c`` = the sum of the log-prob gradients of the row's positions and ``e_c`` its entropy gradient,
``dz_cw = sum_{s in c} dlogprob_s [w = y_s] - p_cw (G_c + e_c (log p_cw + entropy_c))``.
"""

from __future__ import annotations

from torch import Tensor

from harts_titan.ops.backend import AUTO, choose
from harts_titan.ops.logprob.reference import linear_logprobs_reference, recover_logprobs_reference
from harts_titan.ops.logprob.sharded import VocabularyShard, sharded_logprobs


def recover_logprobs(
    logits_TW: Tensor, row_of_position_S: Tensor, label_S: Tensor, *, backend: str = AUTO
) -> tuple[Tensor, Tensor]:
    """Log-prob of every position's label and entropy of every row, from compact logits.

    Args:
        logits_TW: Logits of the rows, any floating dtype.
        row_of_position_S: int64 row of each position, in [0, T).
        label_S: int64 next-token id in [0, W); -100 marks a position without a label.
        backend: "auto", "triton" or "reference".

    Returns:
        ``logprob_S`` (0 where ignored) and ``entropy_T`` in nats, float32 (float64 for float64 logits). Both are
        differentiable in the logits.

    Raises:
        ValueError: If shapes disagree, or the forced backend cannot run.

    Memory: O(T + S) beyond the logits and their gradient, never (S, W); the reference adds blocks of rows.
    """
    _check(row_of_position_S, label_S, logits_TW.shape[0], "logits")
    if choose("logprob", backend, device=logits_TW.device, dtype=logits_TW.dtype) == "triton":
        # Triton is optional: CPU installations do not have it.
        from harts_titan.ops.logprob.triton_op import recover_logprobs_triton

        return recover_logprobs_triton(logits_TW, row_of_position_S, label_S)
    return recover_logprobs_reference(logits_TW, row_of_position_S, label_S)


def linear_logprobs(
    hidden_TD: Tensor,
    weight_WD: Tensor,
    row_of_position_S: Tensor,
    label_S: Tensor,
    *,
    rows_per_chunk: int = 4096,
    shard: VocabularyShard | None = None,
    backend: str = AUTO,
) -> tuple[Tensor, Tensor]:
    """:func:`recover_logprobs` of ``hidden @ weight^T`` without ever holding all logits.

    "triton" works on blocks of the vocabulary with float32 logits, "reference" on blocks of rows with logits rounded to
    the inputs' dtype. Either computes the logits again in backward and rounds gradients once.

    Args:
        hidden_TD: Final hidden rows.
        weight_WD: LM head weight, same dtype; this rank's words if ``shard`` is given.
        row_of_position_S: int64 row of each position, in [0, T).
        label_S: int64 next-token id in the whole vocabulary, or -100.
        rows_per_chunk: Memory: about as many logits exist at once as these rows have. Small numbers cost time.
        shard: Where the weight's words lie in a vocabulary that is spread over ranks.
        backend: "auto", "triton" or "reference".

    Returns:
        As :func:`recover_logprobs`; differentiable in ``hidden`` and ``weight``.

    Raises:
        ValueError: If shapes or dtypes disagree, ``rows_per_chunk`` is not positive, or the forced backend cannot run.

    Memory: ``rows_per_chunk * W`` logits in float32 and, in backward, once more in the dtype of ``hidden`` ("triton",
    which takes at least 1024 words of all rows) or float32; in backward a float32 copy of the hidden rows ("triton") or
    of the weight ("reference").
    """
    _check(row_of_position_S, label_S, hidden_TD.shape[0], "hidden")
    if rows_per_chunk < 1:
        raise ValueError(f"rows_per_chunk ({rows_per_chunk}) must be positive")
    if hidden_TD.dtype != weight_WD.dtype or hidden_TD.shape[1] != weight_WD.shape[1]:
        raise ValueError(
            f"hidden is {hidden_TD.dtype} {tuple(hidden_TD.shape)}, weight {weight_WD.dtype} {tuple(weight_WD.shape)}; "
            "they must share the dtype and the last dimension"
        )
    name = choose("logprob", backend, device=hidden_TD.device, dtype=hidden_TD.dtype)
    if shard is not None:
        return sharded_logprobs(
            hidden_TD, weight_WD, row_of_position_S, label_S, shard, rows_per_chunk=rows_per_chunk, backend=name
        )
    if name == "triton":
        from harts_titan.ops.logprob.triton_op import linear_logprobs_triton

        return linear_logprobs_triton(
            hidden_TD, weight_WD, row_of_position_S, label_S, rows_per_chunk * weight_WD.shape[0]
        )
    return linear_logprobs_reference(hidden_TD, weight_WD, row_of_position_S, label_S, rows_per_chunk)


def _check(row_of_position_S: Tensor, label_S: Tensor, num_rows: int, name: str) -> None:
    if row_of_position_S.shape != label_S.shape or label_S.dim() != 1:
        raise ValueError(
            f"row_of_position has shape {tuple(row_of_position_S.shape)}, label {tuple(label_S.shape)}; both need (S,)"
        )
    if num_rows == 0 and label_S.numel():
        raise ValueError(f"{label_S.numel()} positions but {name} has no rows")
