"""One chunk of KDA in plain PyTorch: everything between the raw inputs and the outputs and next state.

Letters: B rows of a chunk (always chunk_size), N rows of a sub-block, M sub-blocks, H heads, K key dim, V value dim.
Equations are in README.md beside this file.

Every operation here works on tensors whose shapes depend on (chunk_size, H, K, V) only, and rows past the end of a
sequence are zero. CPU kernels round differently in SIMD tails, so this is what makes a row's result depend on nothing
but its own chunk's earlier rows and the incoming state, bit for bit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

L2NORM_EPS = 1e-6

_SUB_BLOCK = 16


class ChunkInputs(NamedTuple):
    """Raw inputs of one chunk, zero past its last row."""

    q_BHK: Tensor
    k_BHK: Tensor
    v_BHV: Tensor
    f_BHK: Tensor
    b_BH: Tensor


def l2norm(x: Tensor) -> Tensor:
    """``x / sqrt(sum(x^2) + 1e-6)`` over the last dimension."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2NORM_EPS)


def safe_gate(f_BHK: Tensor, A_log_H: Tensor, dt_bias_HK: Tensor, lower_bound: float) -> Tensor:
    """Log decay per channel, in (lower_bound, 0): ``lower_bound * sigmoid(exp(A_log) * (f + dt_bias))``."""
    return lower_bound * torch.sigmoid(A_log_H.exp()[:, None] * (f_BHK + dt_bias_HK))


def chunk_step(
    inputs: ChunkInputs, valid_B: Tensor, A_log_H: Tensor, dt_bias_HK: Tensor, state_HKV: Tensor, lower_bound: float
) -> tuple[Tensor, Tensor]:
    """Outputs of one chunk and the state after its last valid row.

    Args:
        inputs: Raw inputs, float32 or float64, zero where ``valid_B`` is 0.
        valid_B: 1 for rows of the sequence, 0 for padding; same dtype.
        A_log_H: Log of the gate slope per head.
        dt_bias_HK: Gate bias.
        state_HKV: State before the chunk.
        lower_bound: Lower bound of the log decay (negative).

    Returns:
        Outputs (B, H, V), meaningless in padding rows, and the next state (H, K, V).
    """
    num_rows, key_dim = inputs.q_BHK.shape[0], inputs.q_BHK.shape[2]
    q_HBK = (l2norm(inputs.q_BHK) * key_dim**-0.5).transpose(0, 1).contiguous()
    k_HBK = l2norm(inputs.k_BHK).transpose(0, 1).contiguous()
    v_HBV = inputs.v_BHV.transpose(0, 1).contiguous()
    # A padding row must not decay the state either: its gate is zero although sigmoid(bias) is not.
    g_BHK = safe_gate(inputs.f_BHK, A_log_H, dt_bias_HK, lower_bound) * valid_B[:, None, None]
    beta_HB1 = (torch.sigmoid(inputs.b_BH) * valid_B[:, None]).transpose(0, 1).unsqueeze(-1).contiguous()
    # Sums reach chunk_size * lower_bound (-320), where float32 resolves 3e-5: differences are taken in float64.
    G_HBK = g_BHK.double().cumsum(0).transpose(0, 1).contiguous()

    decay_HBK = G_HBK.to(g_BHK.dtype).exp()
    scores_HBB, write_HBB = _pairwise(q_HBK, k_HBK, G_HBK)
    lower_HBB = write_HBB * beta_HB1
    rhs_HBX = torch.cat([k_HBK * decay_HBK, v_HBV], dim=-1) * beta_HB1
    # (I + A)^-1 by substitution: row i reads rows < i only. Powers of A would cancel badly when keys repeat.
    solved_HBX = torch.linalg.solve_triangular(lower_HBB, rhs_HBX, upper=False, unitriangular=True)
    w_HBK, u_HBV = solved_HBX.split([key_dim, v_HBV.shape[-1]], dim=-1)
    new_HBV = u_HBV - torch.matmul(w_HBK.contiguous(), state_HKV)
    o_HBV = torch.matmul(q_HBK * decay_HBK, state_HKV) + torch.matmul(scores_HBB, new_HBV)
    to_end_HBK = (G_HBK[:, num_rows - 1 :] - G_HBK).to(g_BHK.dtype).exp()
    update_HKV = torch.matmul((k_HBK * to_end_HBK).transpose(1, 2).contiguous(), new_HBV)
    next_HKV = state_HKV * decay_HBK[:, num_rows - 1, :, None] + update_HKV
    return o_HBV.transpose(0, 1), next_HKV


def _pairwise(q_HBK: Tensor, k_HBK: Tensor, G_HBK: Tensor) -> tuple[Tensor, Tensor]:
    """``sum_K x_i k_j exp(G_i - G_j)`` for x = q (j <= i) and x = k (j < i).

    Every exponent is a difference that is never positive, so a chunk of strong gates (64 rows of -5) neither
    overflows nor loses the near-diagonal entries: inside a sub-block the difference is taken pair by pair, across
    sub-blocks it is split at the later sub-block's first row.
    """
    num_heads, num_rows, key_dim = q_HBK.shape
    sub = _SUB_BLOCK if num_rows % _SUB_BLOCK == 0 else num_rows
    num_sub, dtype = num_rows // sub, q_HBK.dtype
    qk_2HBK = torch.stack([q_HBK, k_HBK])
    blocks_2HMNK = qk_2HBK.view(2, num_heads, num_sub, sub, key_dim)
    k_HMNK = k_HBK.view(num_heads, num_sub, sub, key_dim)
    G_HMNK = G_HBK.view(num_heads, num_sub, sub, key_dim)
    causal_NN = torch.ones(sub, sub, dtype=torch.bool, device=q_HBK.device).tril()
    gap_HMNNK = (G_HMNK.unsqueeze(3) - G_HMNK.unsqueeze(2)).to(dtype)
    weight_HMNNK = gap_HMNNK.masked_fill(~causal_NN[..., None], -torch.inf).exp() * k_HMNK.unsqueeze(2)
    diagonal_2HMNN = (blocks_2HMNK.unsqueeze(4) * weight_HMNNK).sum(-1)

    block_rows = []
    for m in range(num_sub):
        pieces = [diagonal_2HMNN[:, :, m]]
        if m > 0:
            start_H1K = G_HMNK[:, m, :1]
            left_2HNK = blocks_2HMNK[:, :, m] * (G_HMNK[:, m] - start_H1K).to(dtype).exp()
            right_HBK = k_HBK[:, : m * sub] * (start_H1K - G_HBK[:, : m * sub]).to(dtype).exp()
            pieces.insert(0, torch.matmul(left_2HNK, right_HBK.transpose(1, 2)))
        block_rows.append(F.pad(torch.cat(pieces, dim=-1), (0, num_rows - (m + 1) * sub)))
    pairs_2HBB = torch.cat(block_rows, dim=2)
    strict_BB = torch.ones(num_rows, num_rows, dtype=torch.bool, device=q_HBK.device).tril(-1)
    return pairs_2HBB[0], pairs_2HBB[1].masked_fill(~strict_BB, 0.0)
