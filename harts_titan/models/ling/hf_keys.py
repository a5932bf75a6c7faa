"""The keys of published Ling-3.0 checkpoints, each with the parameter it belongs to."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from harts_titan.models.ling.config import LingArgs


@dataclass(frozen=True)
class HfEntry:
    """One tensor of a published checkpoint."""

    key: str
    name: str
    """Parameter or buffer of the model."""
    shape: tuple[int, ...]
    """Shape as published."""
    expert: int | None = None
    """Row of the 3-D expert parameter that this tensor is; None: the whole parameter."""
    wide: bool = False
    """Published in float32 whatever the dtype of the rest."""

    def to_native(self, tensor: Tensor) -> Tensor:
        """Return a published tensor in the shape of the parameter (of one expert of it).

        Raises:
            ValueError: If the shape is not the published one.
        """
        shape = tuple(tensor.shape)
        accepted = {self.shape}
        if self.key.endswith("A_log"):
            # Some files keep the broadcast shape of the recurrence.
            accepted.add((1, 1, self.shape[0], 1))
        if shape not in accepted:
            raise ValueError(f"{self.key} has shape {shape}; {self.shape} is needed: another architecture")
        if self.key.endswith("A_log"):
            return tensor.reshape(self.shape)
        return tensor.squeeze(1) if self.key.endswith("conv1d.weight") else tensor

    def to_published(self, tensor: Tensor) -> Tensor:
        """Return a parameter (or one expert of it) in the published shape."""
        return tensor.unsqueeze(1) if self.key.endswith("conv1d.weight") else tensor


def _mixer(args: LingArgs, layer: int) -> Iterator[tuple[str, str, tuple[int, ...], bool]]:
    dim, heads = args.dim, args.n_heads
    if args.is_mla(layer):
        q_dim = heads * args.qk_head_dim
        if args.q_lora_rank:
            yield "q_a_proj.weight", "q_a_proj.weight", (args.q_lora_rank, dim), False
            yield "q_a_layernorm.weight", "q_a_layernorm.weight", (args.q_lora_rank,), False
            yield "q_b_proj.weight", "q_b_proj.weight", (q_dim, args.q_lora_rank), False
        else:
            yield "q_proj.weight", "q_proj.weight", (q_dim, dim), False
        kv_a = (args.kv_lora_rank + args.qk_rope_head_dim, dim)
        kv_b = (heads * (args.qk_nope_head_dim + args.v_head_dim), args.kv_lora_rank)
        yield "kv_a_proj_with_mqa.weight", "kv_a_proj_with_mqa.weight", kv_a, False
        yield "kv_a_layernorm.weight", "kv_a_layernorm.weight", (args.kv_lora_rank,), False
        yield "kv_b_proj.weight", "kv_b_proj.weight", kv_b, False
        yield "g_proj.weight", "g_proj.weight", (heads, dim), False
        yield "dense.weight", "dense.weight", (dim, heads * args.v_head_dim), False
        return
    width = heads * args.kda_head_dim
    for part in ("q", "k", "v", "f", "g"):
        yield f"{part}_proj.weight", f"{part}_proj.weight", (width, dim), False
    yield "b_proj.weight", "b_proj.weight", (heads, dim), False
    yield "o_proj.weight", "o_proj.weight", (dim, width), False
    for part in ("q", "k", "v"):
        yield f"{part}_conv1d.weight", f"{part}_conv1d.weight", (width, 1, args.num_taps), False
    yield "A_log", "core.A_log", (heads,), True
    yield "dt_bias", "core.dt_bias", (width,), True
    yield "o_norm.weight", "o_norm.weight", (args.kda_head_dim,), False


_SWIGLU = (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))


def _swiglu_shape(part: str, dim: int, hidden: int) -> tuple[int, int]:
    return (dim, hidden) if part == "down_proj" else (hidden, dim)


def _layer_entries(args: LingArgs, layer: int) -> Iterator[HfEntry]:
    theirs, ours, dim = f"model.layers.{layer}.", f"layers.{layer}.", args.dim
    yield HfEntry(f"{theirs}input_layernorm.weight", f"{ours}attention_norm.weight", (dim,))
    for key, name, shape, wide in _mixer(args, layer):
        yield HfEntry(f"{theirs}attention.{key}", f"{ours}attention.{name}", shape, wide=wide)
    yield HfEntry(f"{theirs}post_attention_layernorm.weight", f"{ours}ffn_norm.weight", (dim,))
    if not args.is_moe(layer):
        for part, name in _SWIGLU:
            shape = _swiglu_shape(part, dim, args.inter_dim)
            yield HfEntry(f"{theirs}mlp.{part}.weight", f"{ours}feed_forward.{name}.weight", shape)
        return
    router = f"{ours}moe.router."
    yield HfEntry(f"{theirs}mlp.gate.weight", f"{router}gate.weight", (args.num_experts, dim))
    yield HfEntry(f"{theirs}mlp.gate.expert_bias", f"{router}expert_bias", (args.num_experts,), wide=True)
    for expert in range(args.num_experts):
        for part, name in _SWIGLU:
            key = f"{theirs}mlp.experts.{expert}.{part}.weight"
            yield HfEntry(key, f"{ours}moe.experts.{name}", _swiglu_shape(part, dim, args.moe_inter_dim), expert)
    for part, name in _SWIGLU if args.shared_inter_dim else ():
        key = f"{theirs}mlp.shared_experts.{part}.weight"
        shape = _swiglu_shape(part, dim, args.shared_inter_dim)
        yield HfEntry(key, f"{ours}moe.shared_experts.{name}.weight", shape)


def hf_entries(args: LingArgs) -> Iterator[HfEntry]:
    """Every tensor a published checkpoint of this architecture holds, without the multi-token-prediction layers."""
    yield HfEntry("model.word_embeddings.weight", "tok_embeddings.weight", (args.vocab_size, args.dim))
    for layer in range(args.n_layers):
        yield from _layer_entries(args, layer)
    yield HfEntry("model.norm.weight", "norm.weight", (args.dim,))
    yield HfEntry("lm_head.weight", "output.weight", (args.vocab_size, args.dim))


def is_mtp_key(args: LingArgs, key: str) -> bool:
    """Whether ``key`` belongs to a multi-token-prediction layer of the published checkpoint."""
    match = re.match(r"model\.layers\.(\d+)\.", key)
    return match is not None and args.n_layers <= int(match[1]) < args.n_layers + args.num_mtp_layers


def check_keys(args: LingArgs, keys: set[str], expected: set[str], where: str) -> set[str]:
    """Check that a checkpoint holds exactly the expected tensors.

    Args:
        args: The architecture.
        keys: What the checkpoint holds.
        expected: What the model needs.
        where: For the message.

    Returns:
        The multi-token-prediction keys, which are to be skipped.

    Raises:
        ValueError: Naming the unknown or missing keys.
    """
    mtp = {key for key in keys - expected if is_mtp_key(args, key)}
    unknown, missing = keys - expected - mtp, expected - keys
    for kind, found in (("unknown", unknown), ("missing", missing)):
        if found:
            names = sorted(found)
            more = f" and {len(names) - 8} more" if len(names) > 8 else ""
            raise ValueError(f"{where}: {len(names)} {kind} tensors: {', '.join(names[:8])}{more}")
    return mtp
