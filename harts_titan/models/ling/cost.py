"""What a row and an attended pair of Ling cost, from its sizes (HARTS A.2); see docs/planning_cost.md.

A multiply-add is two operations. Norms, activations, rotations, softmax and the router's choice are left out: they move
memory rather than compute, and calibration adds what they take.
"""

from __future__ import annotations

from dataclasses import dataclass

from harts_titan.models.ling.config import LingArgs
from harts_titan.tree.cost import PlanCost

_WIDE_BYTES = 4
"""Boundary states and router logits stay float32."""
_ID_BYTES = 8
"""Expert choices are int64."""


@dataclass(frozen=True)
class RowOperations:
    """Operations of one forward pass over all layers, by how their backward pass relates to it."""

    products: int
    """Per row: projections, router, dense feed-forward and experts, which backward computes twice."""
    convolution: int
    """Per row: the three short convolutions, which backward computes twice."""
    core: int
    """Per row: chunk kernels of linear attention, which keep their inputs only: backward recomputes them as well."""
    query_key: int
    """Per attended pair: scores of full attention, three such products in backward."""
    value: int
    """Per attended pair: weighted values of full attention, two such products in backward."""
    head: int
    """Per complete row: LM head, whose logits backward recomputes."""


def row_operations(args: LingArgs, *, chunk_size: int) -> RowOperations:
    """Count the operations of one row and one attended pair, over all layers.

    Args:
        args: the architecture.
        chunk_size: tokens in a chunk of the linear-attention kernel; the work inside a chunk grows with it.
    """
    num_mla = sum(args.is_mla(layer) for layer in range(args.n_layers))
    num_kda = args.n_layers - num_mla
    num_moe = sum(args.is_moe(layer) for layer in range(args.n_layers))
    width = args.n_heads * args.kda_head_dim
    expert = 3 * args.dim * (args.top_k * args.moe_inter_dim + args.shared_inter_dim)
    multiply_adds = (
        num_kda * (6 * args.dim * width + args.dim * args.n_heads)
        + num_mla * _mla_products(args)
        + num_moe * (args.dim * args.num_experts + expert)
        + (args.n_layers - num_moe) * 3 * args.dim * args.inter_dim
    )
    return RowOperations(
        products=2 * multiply_adds,
        convolution=2 * num_kda * 3 * width * args.num_taps,
        core=num_kda * args.n_heads * kda_core_operations(args.kda_head_dim, chunk_size),
        query_key=2 * num_mla * args.n_heads * args.qk_head_dim,
        value=2 * num_mla * args.n_heads * args.v_head_dim,
        head=2 * args.dim * args.vocab_size,
    )


def kda_core_operations(head_dim: int, chunk_size: int) -> int:
    """Return the operations of one row and head in the chunk form of KDA (``harts_titan/ops/kda/README.md``).

    ``P`` and ``A`` read ``chunk_size`` keys each, ``[W | U]`` and ``P R`` as many rows; ``W S``, ``(q~ exp(G)) S`` and
    the update of ``S'`` are ``head_dim`` squared. Whole chunks, not their triangles: that is what tiles compute.
    """
    return 2 * (chunk_size * 5 * head_dim + 3 * head_dim**2)


def _mla_products(args: LingArgs) -> int:
    q_dim = args.n_heads * args.qk_head_dim
    query = args.q_lora_rank * (args.dim + q_dim) if args.q_lora_rank else args.dim * q_dim
    latent = args.dim * (args.kv_lora_rank + args.qk_rope_head_dim)
    expand = args.kv_lora_rank * args.n_heads * (args.qk_nope_head_dim + args.v_head_dim)
    return query + latent + expand + args.dim * args.n_heads + args.n_heads * args.v_head_dim * args.dim


def shared_row_bytes(args: LingArgs, *, element_bytes: int) -> int:
    """Return what a producer hands over for each row (HARTS "Hand-over"), over all layers, without gradients.

    Keys and values of every head of the full-attention layers, router logits and choices of the MoE layers, and the
    final hidden row.
    """
    num_mla = sum(args.is_mla(layer) for layer in range(args.n_layers))
    num_moe = sum(args.is_moe(layer) for layer in range(args.n_layers))
    keys_values = num_mla * args.n_heads * (args.qk_head_dim + args.v_head_dim)
    router = num_moe * (args.num_experts * _WIDE_BYTES + args.top_k * _ID_BYTES)
    return (keys_values + args.dim) * element_bytes + router


def handed_state_bytes(args: LingArgs) -> int:
    """Return the size of one boundary state, float32 over all KDA layers, without its gradient."""
    num_kda = sum(not args.is_mla(layer) for layer in range(args.n_layers))
    return num_kda * args.n_heads * args.kda_head_dim**2 * _WIDE_BYTES


def ling_plan_cost(args: LingArgs, *, chunk_size: int, recompute: bool, element_bytes: int) -> PlanCost:
    """Return the cost coefficients of a Ling model in operations; the signature every family registers.

    Args:
        args: the architecture.
        chunk_size: tokens in a chunk of the linear-attention kernel.
        recompute: layers run forward again in the backward pass (``activation_checkpoint.mode = "full"``).
        element_bytes: of the dtype layers compute in.
    """
    one = row_operations(args, chunk_size=chunk_size)
    forward_row = one.products + one.convolution + one.core
    forward_pair = one.query_key + one.value
    again = int(recompute)
    return PlanCost(
        forward_row=forward_row,
        forward_pair=forward_pair,
        backward_row=2 * (one.products + one.convolution) + 3 * one.core + again * forward_row,
        backward_pair=3 * one.query_key + 2 * one.value + again * forward_pair,
        head_forward_row=one.head,
        head_backward_row=3 * one.head,
        shared_row_bytes=shared_row_bytes(args, element_bytes=element_bytes),
        handed_state_bytes=handed_state_bytes(args),
    )
