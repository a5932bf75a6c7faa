"""A group of KDA chunks in plain PyTorch: everything between the raw inputs and the outputs and next states.

Letters: G chunks of a group, B rows of a chunk, H heads, K key dim, V value dim; N rows of a block of pairs.
Equations are in README.md beside this file.

Shapes depend on the chunk size, H, K and V only: the caller always passes the same number of chunks, zero where there
are no rows, and dimensions such that no SIMD kernel meets an incomplete vector. Then a row's result depends on nothing
but its own chunk's earlier rows and the incoming state, bit for bit, wherever its chunk lies in the group.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

L2NORM_EPS = 1e-6

# exp of it, and its inverse, are far from the limits of float64 (exp(709)).
_MAX_EXPONENT = 640.0


class ChunkInputs(NamedTuple):
    """Raw inputs of G chunks in float64, zero past the last row of each."""

    q_GBHK: Tensor
    k_GBHK: Tensor
    v_GBHV: Tensor
    f_GBHK: Tensor
    b_GBH: Tensor


class Gate(NamedTuple):
    """Parameters of the decay, in float64."""

    A_log_H: Tensor
    dt_bias_HK: Tensor
    lower_bound: float
    """Lower bound of the log decay, negative."""


class ChunkTerms(NamedTuple):
    """What G chunks contribute before any state is known, in the dtype of the states."""

    w_GHBK: Tensor
    u_GHBV: Tensor
    scores_GHBB: Tensor
    """P of the README."""
    q_GHBK: Tensor
    """``q~ exp(G)``."""
    k_GHKB: Tensor
    """``k~ exp(G_B - G)``, transposed."""
    decay_GHK1: Tensor
    """``exp(G_B)``."""


def l2norm(x: Tensor) -> Tensor:
    """``x / sqrt(sum(x^2) + 1e-6)`` over the last dimension."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2NORM_EPS)


def safe_gate(f_BHK: Tensor, A_log_H: Tensor, dt_bias_HK: Tensor, lower_bound: float) -> Tensor:
    """Log decay per channel, in (lower_bound, 0): ``lower_bound * sigmoid(exp(A_log) * (f + dt_bias))``."""
    return lower_bound * torch.sigmoid(A_log_H.exp()[:, None] * (f_BHK + dt_bias_HK))


def chunk_terms(inputs: ChunkInputs, valid_GB: Tensor, gate: Gate, scale: float, dtype: torch.dtype) -> ChunkTerms:
    """Everything about G chunks that does not depend on their incoming states.

    Float64 throughout and rounded once, for any dtype: sums of log decays reach chunk_size * lower_bound (-320), where
    float32 resolves 3e-5, and strong decay makes float32 subnormal, which is many times slower.

    Args:
        inputs: Raw inputs.
        valid_GB: 1 for rows of a sequence, 0 for padding; float64.
        gate: Decay parameters.
        scale: Factor of the normalised queries.
        dtype: Of the result.
    """
    key_dim = inputs.k_GBHK.shape[3]
    q_GHBK, k_GHBK = _by_head(l2norm(inputs.q_GBHK) * scale), _by_head(l2norm(inputs.k_GBHK))
    # A padding row must not decay the state either: its gate is zero although sigmoid(bias) is not.
    G_GHBK = _by_head(safe_gate(inputs.f_GBHK, *gate) * valid_GB[..., None, None]).cumsum(2)
    beta_GHB1 = _by_head(torch.sigmoid(inputs.b_GBH) * valid_GB[..., None]).unsqueeze(-1)
    decay_GHBK, end_GH1K = G_GHBK.exp(), G_GHBK[:, :, -1:]

    write_GHBK = k_GHBK * beta_GHB1
    scores_GHBB, A_GHBB = _pairwise(q_GHBK, write_GHBK, k_GHBK, G_GHBK, lower_bound=gate.lower_bound)
    rhs_GHBX = torch.cat([write_GHBK * decay_GHBK, _by_head(inputs.v_GBHV) * beta_GHB1], dim=-1)
    # (I + A)^-1 by substitution: row i reads rows < i only. Powers of A would cancel badly when keys repeat.
    solved_GHBX = torch.linalg.solve_triangular(A_GHBB, rhs_GHBX, upper=False, unitriangular=True)
    terms = ChunkTerms(
        w_GHBK=solved_GHBX[..., :key_dim],
        u_GHBV=solved_GHBX[..., key_dim:],
        scores_GHBB=scores_GHBB,
        q_GHBK=q_GHBK * decay_GHBK,
        k_GHKB=(k_GHBK * (end_GH1K - G_GHBK).exp()).transpose(2, 3),
        decay_GHK1=end_GH1K.exp().transpose(2, 3),
    )
    return ChunkTerms(*(x.to(dtype).contiguous() for x in terms))


def next_state(state_HKV: Tensor, w_HBK: Tensor, u_HBV: Tensor, k_HKB: Tensor, decay_HK1: Tensor) -> Tensor:
    """State behind one chunk: ``R = U - W S``, ``S' = Diag(exp(G_B)) S + (k~ exp(G_B - G))^T R``."""
    r_HBV = torch.baddbmm(u_HBV, w_HBK, state_HKV, alpha=-1)
    return torch.baddbmm(decay_HK1 * state_HKV, k_HKB, r_HBV)


def previous_dstate(
    dstate_HKV: Tensor, w_HBK: Tensor, k_HKB: Tensor, decay_HK1: Tensor, dr_HBV: Tensor, ds_HKV: Tensor
) -> Tensor:
    """Gradient of the state in front of one chunk.

    Args:
        dstate_HKV: Gradient of the state behind the chunk.
        w_HBK: Of the chunk's terms, like ``k_HKB`` and ``decay_HK1``.
        k_HKB: Transposed keys, decayed to the end.
        decay_HK1: Decay of the whole chunk.
        dr_HBV: ``P^T dO``.
        ds_HKV: ``(q~ exp(G))^T dO``.
    """
    dr_HBV = torch.baddbmm(dr_HBV, k_HKB.transpose(1, 2), dstate_HKV)
    return torch.baddbmm(torch.addcmul(ds_HKV, decay_HK1, dstate_HKV), w_HBK.transpose(1, 2), dr_HBV, alpha=-1)


def chunk_outputs(terms: ChunkTerms, state_GHKV: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs ``O = (q~ exp(G)) S + P R`` (G, H, B, V) and next states of G chunks whose incoming states are known."""
    r_GHBV = terms.u_GHBV - terms.w_GHBK @ state_GHKV
    o_GHBV = terms.q_GHBK @ state_GHKV + terms.scores_GHBB @ r_GHBV
    return o_GHBV, terms.decay_GHK1 * state_GHKV + terms.k_GHKB @ r_GHBV


def _by_head(x_GBH: Tensor) -> Tensor:
    return x_GBH.transpose(1, 2).contiguous()


def _pairwise(
    q_GHBK: Tensor, write_GHBK: Tensor, k_GHBK: Tensor, G_GHBK: Tensor, *, lower_bound: float
) -> tuple[Tensor, Tensor]:
    """P and A of the README: ``sum_K x_i k_j exp(G_i - G_j)`` for x = q (j <= i) and x = beta k (j < i), else 0.

    The exponent is split at the first row of a block of rows, ``(G_i - G_1) + (G_1 - G_j)``: the first part is never
    positive, the second at most ``_MAX_EXPONENT`` inside the block and never positive before it. No factor overflows
    float64 and none underflows that matters: 128 rows at -5 fit into one block.
    """
    num_rows = q_GHBK.shape[2]
    block = max(int(_MAX_EXPONENT / -lower_bound), 1)
    block_rows: tuple[list[Tensor], list[Tensor]] = ([], [])
    for first in range(0, num_rows, block):
        last = min(first + block, num_rows)
        # Constant for autograd: where the exponent is split does not change the product.
        at_GH1K = G_GHBK[:, :, first : first + 1].detach()
        down_GHNK = (G_GHBK[:, :, first:last] - at_GH1K).exp()
        right_GHKB = (k_GHBK[:, :, :last] * (at_GH1K - G_GHBK[:, :, :last]).exp()).transpose(2, 3)
        for x_GHBK, rows in zip((q_GHBK, write_GHBK), block_rows):
            rows.append((x_GHBK[:, :, first:last] * down_GHNK) @ right_GHKB)
    scores_GHBB, A_GHBB = (_joined(rows, num_rows).tril_(-1) for rows in block_rows)
    # A row does not decay towards itself: no exponent, and no rounding noise in its gradient.
    scores_GHBB.diagonal(dim1=2, dim2=3).copy_((q_GHBK * k_GHBK).sum(-1))
    return scores_GHBB, A_GHBB


def _joined(block_rows: list[Tensor], num_rows: int) -> Tensor:
    if len(block_rows) == 1:
        return block_rows[0]
    return torch.cat([F.pad(x, (0, num_rows - x.shape[3])) for x in block_rows], dim=2)
