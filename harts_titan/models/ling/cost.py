"""What a row and an attended pair of Ling cost, from its sizes (HARTS A.2); see docs/planning_cost.md.

A multiply-add is two operations. Norms, activations, rotations, softmax and the router's choice are left out: they move
memory rather than compute, and calibration adds what they take.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from harts_titan.models.ling.config import LingArgs
from harts_titan.tree.cost import PlanCost

_WIDE_BYTES = 4
"""Boundary states and router logits stay float32."""
_ID_BYTES = 8
"""Expert choices are int64."""


@dataclass(frozen=True)
class RowOperations:
    """Operations of one forward pass, by how their backward pass relates to it (:data:`BACKWARD`)."""

    products: int
    """Per row: projections, router, dense feed-forward and experts."""
    convolution: int
    """Per row: the three short convolutions."""
    core: int
    """Per packed row, replay included: chunk kernels of linear attention."""
    query_key: int
    """Per attended pair: scores of full attention."""
    value: int
    """Per attended pair: weighted values of full attention."""
    head: int
    """Per complete row: LM head."""

    def __add__(self, other: RowOperations) -> RowOperations:
        return RowOperations(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


BACKWARD = RowOperations(products=2, convolution=2, core=2, query_key=2, value=2, head=2)
"""Products of a backward pass for each of the forward pass: one for each of its two operands."""
AGAIN = RowOperations(products=0, convolution=0, core=1, query_key=1, value=0, head=1)
"""Forward products that backward computes again although no layer is recomputed: the reference's chunk kernel keeps its
inputs only, attention no scores, the head no logits. The CUDA kernels of KDA keep what they need instead."""


def layer_operations(args: LingArgs, layer: int, *, chunk_size: int) -> RowOperations:
    """Count the operations of one row and one attended pair in one layer.

    Args:
        args: the architecture.
        layer: 0-based.
        chunk_size: tokens in a chunk of the linear-attention kernel; the work inside a chunk grows with it.
    """
    width = args.n_heads * args.kda_head_dim
    if args.is_moe(layer):
        expert = 3 * args.dim * (args.top_k * args.moe_inter_dim + args.shared_inter_dim)
        feed_forward = args.dim * args.num_experts + expert
    else:
        feed_forward = 3 * args.dim * args.inter_dim
    if args.is_mla(layer):
        return RowOperations(
            products=2 * (_mla_products(args) + feed_forward),
            convolution=0,
            core=0,
            query_key=2 * args.n_heads * args.qk_head_dim,
            value=2 * args.n_heads * args.v_head_dim,
            head=0,
        )
    return RowOperations(
        products=2 * (6 * args.dim * width + args.dim * args.n_heads + feed_forward),
        convolution=2 * 3 * width * args.num_taps,
        core=args.n_heads * kda_core_operations(args.kda_head_dim, chunk_size),
        query_key=0,
        value=0,
        head=0,
    )


def head_operations(args: LingArgs) -> RowOperations:
    """Count the operations of one row in the LM head."""
    return RowOperations(0, 0, 0, 0, 0, head=2 * args.dim * args.vocab_size)


def row_operations(args: LingArgs, *, chunk_size: int) -> RowOperations:
    """Count the operations of one row and one attended pair, over all layers and the head; arguments as above."""
    layers = [layer_operations(args, layer, chunk_size=chunk_size) for layer in range(args.n_layers)]
    return sum(layers, head_operations(args))


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
    row, pair = ("products", "convolution", "core"), ("query_key", "value")

    def forward(names: tuple[str, ...]) -> int:
        return sum(getattr(one, name) for name in names)

    def backward(names: tuple[str, ...], again: bool) -> int:
        times = {name: getattr(BACKWARD, name) + getattr(AGAIN, name) + again for name in names}
        return sum(times[name] * getattr(one, name) for name in names)

    return PlanCost(
        forward_row=forward(row),
        forward_pair=forward(pair),
        backward_row=backward(row, recompute),
        backward_pair=backward(pair, recompute),
        head_forward_row=one.head,
        head_backward_row=backward(("head",), False),
        shared_row_bytes=shared_row_bytes(args, element_bytes=element_bytes),
        handed_state_bytes=handed_state_bytes(args),
    )
