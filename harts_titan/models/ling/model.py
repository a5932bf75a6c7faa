"""Ling-3.0 on the rows of a plan. Single-device code: sharding and recomputation are applied from outside.

Letters: T compact rows, S semantic positions, D model dimension, E experts, A experts per row, W vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.profiler import record_function
from torch.utils.checkpoint import checkpoint
from torchtitan.protocols.model import ModelProtocol

from harts_titan.models.common.feed_forward import FeedForward
from harts_titan.models.common.layer_run import LayerRun
from harts_titan.models.common.lm_head import LMHead
from harts_titan.models.common.moe import GroupedExperts, MoE, Router, RouterOutput
from harts_titan.models.common.norm import RMSNorm
from harts_titan.models.common.rope import rope_tables
from harts_titan.models.common.tree_inputs import TreeInputs
from harts_titan.models.ling.attention import KDACore, KimiDeltaAttention, MultiHeadLatentAttention
from harts_titan.models.ling.config import LingArgs
from harts_titan.models.ling.init import init_ling_weights


class LingOutput(NamedTuple):
    """Results of one call; a named tuple so that sharding hooks see its tensors."""

    logprob_S: Tensor | None
    """Log-probability of each position's label, 0 where there is none; at least float32. None without a head."""
    entropy_T: Tensor | None
    """Entropy (nats) of each row's distribution; at least float32. None without a head."""
    router: tuple[RouterOutput, ...]
    """One entry per MoE layer, in layer order."""
    logits_TW: Tensor | None
    """At least float32; only when asked for."""
    hidden_TD: Tensor | None
    """Rows for the next pipeline stage; only without a head."""


_Rows = tuple[Tensor, Tensor | None, Tensor | None]

# torch.compile makes graphs of their own for sizes 0 and 1; calls that small are run as they are.
_MIN_COMPILED_ROWS = 2


class TransformerBlock(nn.Module):
    """One layer: mixer, then dense feed-forward or experts, both pre-normed and residual."""

    def __init__(self, layer: int, args: LingArgs) -> None:
        super().__init__()
        self.top_k = args.top_k
        self.compiled_rows: Callable[..., _Rows] | None = None
        """:meth:`rows`, compiled; set by whoever compiles the model."""
        self.moe_enabled = args.is_moe(layer)
        self.attention: KimiDeltaAttention | MultiHeadLatentAttention
        self.attention = MultiHeadLatentAttention(args) if args.is_mla(layer) else KimiDeltaAttention(args)
        self.attention_norm = RMSNorm(args.dim, eps=args.norm_eps)
        self.ffn_norm = RMSNorm(args.dim, eps=args.norm_eps)
        if self.moe_enabled:
            self.moe = _build_moe(layer, args)
        else:
            self.feed_forward = FeedForward(args.dim, args.inter_dim)

    def forward(self, x_TD: Tensor, inputs: TreeInputs, rope: tuple[Tensor, Tensor], run: LayerRun) -> _Rows:
        """Run the layer.

        Args:
            x_TD: Hidden rows in plan order.
            inputs: Tables of the call.
            rope: Cosine and sine tables.
            run: Of this execution; a recomputation gets the same one and repeats its choices.

        Returns:
            (T, D), and the router's logits and choices (None in a dense layer). Everything the loss may need is an
            output: a recomputed forward must have no side effect.
        """
        if self.compiled_rows is None or x_TD.shape[0] < _MIN_COMPILED_ROWS:
            out = self.rows(x_TD, inputs, rope, run.topk_TA)
        elif torch.is_grad_enabled():
            out = self._compiled(x_TD, inputs, rope, run.topk_TA)
        else:
            # Another graph could round differently: log-probs would differ from those of the training forward.
            with torch.enable_grad():
                out = self._compiled(x_TD.detach().requires_grad_(), inputs, rope, run.topk_TA)
            y_TD, logits_TE, topk_TA = out
            out = y_TD.detach(), None if logits_TE is None else logits_TE.detach(), topk_TA
        run.topk_TA = out[2]
        return out

    def _compiled(self, x_TD: Tensor, inputs: TreeInputs, rope: tuple[Tensor, Tensor], topk_TA: Tensor | None) -> _Rows:
        assert self.compiled_rows is not None
        if topk_TA is None and self.moe_enabled:
            topk_TA = inputs.position_T.new_full((x_TD.shape[0], self.top_k), -1)
        # Sharding hooks hand over a view in one execution and not in the other, which would be two graphs.
        x_TD = x_TD.view_as(x_TD)
        out = self.compiled_rows(x_TD, inputs, rope, topk_TA, self.attention.outer_parameters())
        # The graph knows the inputs by their handle only and must keep them for its backward pass.
        out[0].register_hook(lambda gradient, inputs=inputs: None)
        return out

    def rows(
        self,
        x_TD: Tensor,
        inputs: TreeInputs,
        rope: tuple[Tensor, Tensor],
        topk_TA: Tensor | None,
        outer: tuple[Tensor, ...] = (),
    ) -> _Rows:
        """Compute the layer without side effects: what is compiled.

        Args:
            x_TD: Hidden rows in plan order.
            inputs: Tables of the call.
            rope: Cosine and sine tables.
            topk_TA: Experts to repeat, see :class:`Router`.
            outer: Parameters of the mixer that sharding hooks gather; empty: the mixer reads them itself.

        Returns:
            As :meth:`forward`.
        """
        h_TD = x_TD + self.attention(self.attention_norm(x_TD), inputs, rope, outer)
        normed_TD = self.ffn_norm(h_TD)
        if not self.moe_enabled:
            return h_TD + self.feed_forward(normed_TD), None, None
        y_TD, routed = self.moe(normed_TD, topk_TA, backend=inputs.backends.grouped_mm)
        return h_TD + y_TD, routed.logits_TE, routed.topk_TA


def _build_moe(layer: int, args: LingArgs) -> MoE:
    routed_limit, shared_limit = args.swiglu_limits(layer)
    router = Router(
        args.dim,
        args.num_experts,
        top_k=args.top_k,
        num_groups=args.num_groups,
        top_groups=args.top_groups,
        route_scale=args.route_scale,
    )
    experts = GroupedExperts(args.dim, args.moe_inter_dim, args.num_experts, limit=routed_limit)
    shared = FeedForward(args.dim, args.shared_inter_dim, limit=shared_limit) if args.shared_inter_dim else None
    return MoE(router, experts, shared)


class Ling(ModelProtocol):
    """Ling-3.0: every distinct prefix of a call is one row, computed once.

    ``tok_embeddings``, ``norm`` and ``output`` may be None and ``layers`` may be partial (pipeline stages).
    """

    def __init__(self, model_args: LingArgs) -> None:
        super().__init__(model_args)
        self.model_args = model_args
        self.recompute_layers = False
        """Recompute every layer in the backward pass from its inputs and the fixed plan."""
        args = model_args
        self.tok_embeddings: nn.Embedding | None = nn.Embedding(args.vocab_size, args.dim)
        self.layers = nn.ModuleDict({str(i): TransformerBlock(i, args) for i in range(args.n_layers)})
        self.norm: RMSNorm | None = RMSNorm(args.dim, eps=args.norm_eps)
        self.output: LMHead | None = LMHead(args.dim, args.vocab_size, rows_per_chunk=args.head_rows_per_chunk)

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        """Fill every parameter, deterministically from ``torch.initial_seed()``, whatever the sharding.

        Args:
            buffer_device: Where the expert biases go; default: where they are.
        """
        init_ling_weights(self, self.model_args, buffer_device)

    def forward(
        self, inputs: TreeInputs, hidden_TD: Tensor | None = None, *, return_logits: bool = False
    ) -> LingOutput:
        """Run one call of a plan.

        Args:
            inputs: From :meth:`TreeInputs.from_layout`.
            hidden_TD: Rows of the previous pipeline stage; only without ``tok_embeddings``.
            return_logits: Also return the (T, W) logits; for comparisons on small batches.

        Raises:
            ValueError: If the call attaches to rows outside it, or is longer than the model's positions.
        """
        if inputs.num_external_rows:
            raise ValueError(f"the call attaches to {inputs.num_external_rows} producer rows; none are accepted yet")
        if inputs.max_position >= self.model_args.max_position:
            raise ValueError(
                f"a trajectory has {inputs.max_position + 1} tokens; the model has {self.model_args.max_position} "
                "positions (max_position_embeddings)"
            )
        if self.tok_embeddings is not None:
            hidden_TD = self.tok_embeddings(inputs.token_T)
        assert hidden_TD is not None, "a stage without embeddings needs hidden_TD"
        inputs.prepare(dtype=hidden_TD.dtype, key_dim=self.model_args.qk_head_dim)
        rope = rope_tables(
            inputs.position_T,
            dim=self.model_args.qk_rope_head_dim,
            theta=self.model_args.rope_theta,
            dtype=hidden_TD.dtype,
        )
        router = []
        for name, layer in self.layers.items():
            hidden_TD, logits_TE, topk_TA = self._run_layer(name, layer, hidden_TD, inputs, rope)
            if logits_TE is not None:
                router.append(RouterOutput(logits_TE, topk_TA))
        if self.norm is None or self.output is None:
            return LingOutput(None, None, tuple(router), None, hidden_TD)
        with record_function("harts::head"):
            head = self.output(
                self.norm(hidden_TD), inputs.row_of_position_S, inputs.label_S, return_logits=return_logits
            )
        return LingOutput(head.logprob_S, head.entropy_T, tuple(router), head.logits_TW, None)

    def _run_layer(self, name: str, layer: nn.Module, hidden_TD: Tensor, *tables: Any) -> Any:
        run = LayerRun()
        with record_function(f"harts::layer{name}"):
            if self.recompute_layers and torch.is_grad_enabled():
                # No random numbers are drawn in a layer.
                return checkpoint(layer, hidden_TD, *tables, run, use_reentrant=False, preserve_rng_state=False)
            return layer(hidden_TD, *tables, run)

    def expert_biases(self) -> list[Tensor]:
        """Selection biases of the MoE layers, in the order of ``LingOutput.router``; update them in place."""
        return [layer.moe.router.expert_bias for layer in self._blocks() if layer.moe_enabled]

    def layer_kinds(self) -> set[tuple[Any, ...]]:
        """What makes layers differ in more than their weights: mixer, experts, clamps."""
        args = self.model_args
        indices = [int(name) for name in self.layers]
        return {(args.is_mla(i), args.is_moe(i), args.is_moe(i) and args.swiglu_limits(i)) for i in indices}

    def _blocks(self) -> list[TransformerBlock]:
        return cast("list[TransformerBlock]", list(self.layers.values()))

    def linear_attention_cores(self) -> list[KDACore]:
        """Cores of the KDA layers in layer order: ``core(q, k, v, f, b, inputs) -> o``."""
        return [module for module in self.modules() if isinstance(module, KDACore)]
