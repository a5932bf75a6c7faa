"""The two mixers of Ling-3.0: Kimi Delta Attention and gated multi-head latent attention.

Letters: T compact rows, D model dimension, H heads, K key head dimension, V value head dimension, W convolution taps.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from harts_titan.models.common.dtypes import WideModule
from harts_titan.models.common.norm import GatedRMSNorm, RMSNorm
from harts_titan.models.common.tree_inputs import TreeInputs
from harts_titan.models.common.tree_ops import full_attention, linear_attention, short_conv
from harts_titan.models.ling.config import LingArgs
from harts_titan.ops.activation import head_gate
from harts_titan.ops.dtypes import wide_dtype
from harts_titan.ops.rope import rope_keys_values, rope_queries


class ShortConv(nn.Module):
    """Depthwise convolution over the previous tokens of the path, then SiLU. The last tap is the current token."""

    def __init__(self, width: int, num_taps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, num_taps))

    def forward(self, x_TD: Tensor, inputs: TreeInputs) -> Tensor:
        """Return (T, D)."""
        return short_conv(x_TD, self.weight, inputs)


class KDACore(WideModule):
    """The recurrence and the two parameters of its decay, which stay at least float32.

    A module of its own so that sharding gathers the decay parameters in float32 while everything around is 16 bits.
    """

    def __init__(self, n_heads: int, head_dim: int, *, lower_bound: float) -> None:
        super().__init__()
        self.lower_bound = lower_bound
        wide = wide_dtype(torch.get_default_dtype())
        self.A_log = nn.Parameter(torch.empty(n_heads, dtype=wide))
        self.dt_bias = nn.Parameter(torch.empty(n_heads * head_dim, dtype=wide))

    def forward(
        self,
        q_THK: Tensor,
        k_THK: Tensor,
        v_THV: Tensor,
        f_THK: Tensor,
        b_TH: Tensor,
        inputs: TreeInputs,
        decay: tuple[Tensor, ...] = (),
    ) -> Tensor:
        """Return o (T, H, V) from the convolved q, k, v, the raw gate and the raw beta.

        ``decay`` is what :meth:`gathered` returns; without it the parameters are read here.
        """
        A_log_H, dt_bias = decay or (self.A_log, self.dt_bias)
        return linear_attention(
            q_THK,
            k_THK,
            v_THV,
            f_THK,
            b_TH,
            A_log_H,
            dt_bias.unflatten(0, (A_log_H.shape[0], -1)),
            inputs=inputs,
            lower_bound=self.lower_bound,
        )

    def gathered(self) -> tuple[Tensor, ...]:
        """Return copies of the parameters, which stay when sharding frees what it gathered for this call."""
        return self.A_log.clone(), self.dt_bias.clone()


class KimiDeltaAttention(nn.Module):
    """KDA: gated delta rule with per-channel decay, short convolutions and a gated output norm."""

    def __init__(self, args: LingArgs) -> None:
        super().__init__()
        width = args.n_heads * args.kda_head_dim
        self.head_dim = args.kda_head_dim
        self.q_proj = nn.Linear(args.dim, width, bias=False)
        self.k_proj = nn.Linear(args.dim, width, bias=False)
        self.v_proj = nn.Linear(args.dim, width, bias=False)
        self.f_proj = nn.Linear(args.dim, width, bias=False)
        self.g_proj = nn.Linear(args.dim, width, bias=False)
        self.b_proj = nn.Linear(args.dim, args.n_heads, bias=False)
        self.q_conv1d = ShortConv(width, args.num_taps)
        self.k_conv1d = ShortConv(width, args.num_taps)
        self.v_conv1d = ShortConv(width, args.num_taps)
        self.core = KDACore(args.n_heads, args.kda_head_dim, lower_bound=args.kda_lower_bound)
        self.o_norm = GatedRMSNorm(args.kda_head_dim, eps=args.norm_eps)
        self.o_proj = nn.Linear(width, args.dim, bias=False)

    def outer_parameters(self) -> tuple[Tensor, ...]:
        """Parameters that a compiled layer gets as arguments: no sharding hook runs inside of it."""
        return self.core.gathered()

    def forward(
        self, x_TD: Tensor, inputs: TreeInputs, rope: tuple[Tensor, Tensor], outer: tuple[Tensor, ...] = ()
    ) -> Tensor:
        """Return (T, D). KDA has no positions: ``rope`` is not read."""
        heads = (-1, self.head_dim)
        q_THK = self.q_conv1d(self.q_proj(x_TD), inputs).unflatten(1, heads)
        k_THK = self.k_conv1d(self.k_proj(x_TD), inputs).unflatten(1, heads)
        v_THV = self.v_conv1d(self.v_proj(x_TD), inputs).unflatten(1, heads)
        f_THK = self.f_proj(x_TD).unflatten(1, heads)
        tensors = (q_THK, k_THK, v_THV, f_THK, self.b_proj(x_TD))
        # Past the hooks of the core where its parameters come as arguments.
        o_THV = self.core.forward(*tensors, inputs, outer) if outer else self.core(*tensors, inputs)
        return self.o_proj(self.o_norm(o_THV, self.g_proj(x_TD).unflatten(1, heads)).flatten(1))


class MultiHeadLatentAttention(nn.Module):
    """MLA with keys and values expanded per head, rotary part on interleaved pairs and a head-wise output gate."""

    def __init__(self, args: LingArgs) -> None:
        super().__init__()
        self.nope_dim, self.rope_dim, self.v_dim = args.qk_nope_head_dim, args.qk_rope_head_dim, args.v_head_dim
        self.kv_lora_rank = args.kv_lora_rank
        self.scale = args.qk_head_dim**-0.5
        q_dim = args.n_heads * args.qk_head_dim
        self.q_lora_rank = args.q_lora_rank
        if args.q_lora_rank:
            self.q_a_proj = nn.Linear(args.dim, args.q_lora_rank, bias=False)
            self.q_a_layernorm = RMSNorm(args.q_lora_rank, eps=args.norm_eps)
            self.q_b_proj = nn.Linear(args.q_lora_rank, q_dim, bias=False)
        else:
            self.q_proj = nn.Linear(args.dim, q_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(args.dim, args.kv_lora_rank + args.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = RMSNorm(args.kv_lora_rank, eps=args.norm_eps)
        self.kv_b_proj = nn.Linear(args.kv_lora_rank, args.n_heads * (self.nope_dim + self.v_dim), bias=False)
        self.g_proj = nn.Linear(args.dim, args.n_heads, bias=False)
        self.dense = nn.Linear(args.n_heads * args.v_head_dim, args.dim, bias=False)

    def outer_parameters(self) -> tuple[Tensor, ...]:
        """Parameters that a compiled layer gets as arguments: none."""
        return ()

    def forward(
        self, x_TD: Tensor, inputs: TreeInputs, rope: tuple[Tensor, Tensor], outer: tuple[Tensor, ...] = ()
    ) -> Tensor:
        """Return (T, D). ``rope`` is what :func:`rope_tables` returns; ``outer`` is empty."""
        q_TR = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_TD))) if self.q_lora_rank else self.q_proj(x_TD)
        q_THK = q_TR.unflatten(1, (-1, self.nope_dim + self.rope_dim))
        q_THK = rope_queries(q_THK, *rope)

        latent_TL, k_rope_TP = self.kv_a_proj_with_mqa(x_TD).split((self.kv_lora_rank, self.rope_dim), dim=1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent_TL)).unflatten(1, (-1, self.nope_dim + self.v_dim))
        # One rotary key serves all heads.
        k_THK, v_THV = rope_keys_values(kv, k_rope_TP, *rope, nope_dim=self.nope_dim)

        o_THV = full_attention(q_THK, k_THK, v_THV, inputs, scale=self.scale)
        return self.dense(head_gate(o_THV, self.g_proj(x_TD)).flatten(1))
