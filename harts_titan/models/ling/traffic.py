"""Compulsory memory traffic of what a Ling layer does beside matrix products, per row: a floor for its kernels.

Every operation reads each of its inputs and writes each of its outputs once, in the dtype layers compute in. Operations
that a kernel fuses move less, so more than the copy bandwidth can be reached.
"""

from __future__ import annotations

from harts_titan.models.ling.config import LingArgs


def elementwise_bytes(args: LingArgs, layer: int, *, element_bytes: int, backward: bool) -> int:
    """Return bytes per row of norms, residual sums, convolutions, gates, rotations, activations and routing.

    Args:
        args: the architecture.
        layer: 0-based.
        element_bytes: of the dtype layers compute in.
        backward: with the backward pass.
    """
    forward, gradient = _mla(args) if args.is_mla(layer) else _kda(args)
    # Two norms: x -> y, and (x, dy) -> dx. Two residual sums: (a, b) -> c, and the sum of two gradients.
    forward += 2 * 2 * args.dim + 2 * 3 * args.dim
    gradient += 2 * 3 * args.dim + 2 * 3 * args.dim
    if args.is_moe(layer):
        routed, width = args.top_k * args.dim, args.top_k * args.moe_inter_dim + args.shared_inter_dim
        # Rows to their experts, and the weighted sum of what comes back.
        forward += (args.dim + routed) + (routed + args.dim)
        # The sum over a row's copies; gradients of the expert outputs and of the weights, which read the outputs again.
        gradient += (routed + args.dim) + (args.dim + 2 * routed)
    else:
        width = args.inter_dim
    # SwiGLU: (gate, up) -> y, and (gate, up, dy) -> (dgate, dup).
    forward += 3 * width
    gradient += 5 * width
    return element_bytes * (forward + backward * gradient)


def _kda(args: LingArgs) -> tuple[int, int]:
    width = args.n_heads * args.kda_head_dim
    # Three convolutions with SiLU: x -> y, and (x, dy) -> dx; gated norm: (o, gate) -> y, and (o, gate, dy) -> both.
    return 3 * 2 * width + 3 * width, 3 * 3 * width + 5 * width


def _mla(args: LingArgs) -> tuple[int, int]:
    keys, values = args.n_heads * args.qk_head_dim, args.n_heads * args.v_head_dim
    latent = args.q_lora_rank + args.kv_lora_rank
    # Rotated queries and keys are written beside what is not rotated; the output gate: o -> y, and (o, dy) -> do.
    forward = 2 * (2 * keys) + 2 * latent + 2 * values
    return forward, 2 * (2 * keys) + 3 * latent + 3 * values
