"""Sizes of Ling-3.0 and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torchtitan.protocols.model import BaseModelArgs

_POSITIVE = (
    "dim",
    "n_layers",
    "layer_group_size",
    "n_heads",
    "kda_head_dim",
    "num_taps",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "inter_dim",
    "num_experts",
    "top_k",
    "moe_inter_dim",
    "num_groups",
    "top_groups",
    "vocab_size",
    "max_position",
    "head_rows_per_chunk",
)


@dataclass
class LingArgs(BaseModelArgs):
    """Architecture of a Ling-3.0 model; the defaults are the ``debug`` flavour."""

    dim: int = 64
    """Model dimension."""
    n_layers: int = 4
    layer_group_size: int = 4
    """The last layer of every group is MLA, as are the layers after the last complete group."""
    n_heads: int = 2
    """Heads of KDA and of MLA."""
    kda_head_dim: int = 16
    """Key and value dimension of a KDA head."""
    num_taps: int = 4
    """Width of the short convolution in tokens."""
    kda_lower_bound: float = -5.0
    """Smallest log decay of a KDA channel."""
    q_lora_rank: int = 32
    """Rank of the MLA query projection; 0 projects directly."""
    kv_lora_rank: int = 32
    qk_nope_head_dim: int = 16
    qk_rope_head_dim: int = 8
    v_head_dim: int = 16
    rope_theta: float = 6.0e6
    norm_eps: float = 1e-6
    inter_dim: int = 128
    """Hidden dimension of the dense feed-forward layers."""
    n_dense_layers: int = 1
    """The first layers have a dense feed-forward instead of experts."""
    num_experts: int = 16
    top_k: int = 4
    moe_inter_dim: int = 32
    """Hidden dimension of a routed expert."""
    shared_inter_dim: int = 32
    """Hidden dimension of the shared expert."""
    num_groups: int = 4
    """Expert groups of the group-limited choice."""
    top_groups: int = 2
    """Groups a token may choose experts from."""
    route_scale: float = 2.5
    """Factor of the normalised expert weights."""
    expert_swiglu_limits: tuple[float, ...] = ()
    """SwiGLU clamp of the routed experts per layer, 0 = none; empty = none anywhere."""
    shared_swiglu_limits: tuple[float, ...] = ()
    """SwiGLU clamp of the shared expert per layer, 0 = none; empty = none anywhere."""
    expert_capacity_factor: float = 0.0
    """Must stay 0: dropping tokens would make a shared row depend on its neighbours."""
    vocab_size: int = 4096
    max_position: int = 131072
    """Longest trajectory in tokens."""
    num_mtp_layers: int = 0
    """Multi-token-prediction layers of the published checkpoint; they are skipped, not built."""
    init_std: float = 0.02
    """Standard deviation of the initial projections."""
    head_rows_per_chunk: int = 4096
    """Memory of the head: about as many float32 logits exist at once as these rows have; small numbers cost time."""

    def __post_init__(self) -> None:
        self.expert_swiglu_limits = tuple(float(limit) for limit in self.expert_swiglu_limits)
        self.shared_swiglu_limits = tuple(float(limit) for limit in self.shared_swiglu_limits)
        self.validate()

    def validate(self) -> None:
        """Check that the sizes describe a model.

        Raises:
            ValueError: Naming the field, its value and what is needed.
        """
        for name in _POSITIVE:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} ({getattr(self, name)}) must be at least 1")
        if self.layer_group_size > self.n_layers:
            raise ValueError(f"layer_group_size ({self.layer_group_size}) is larger than n_layers ({self.n_layers})")
        if self.q_lora_rank < 0:
            raise ValueError(f"q_lora_rank ({self.q_lora_rank}) must be positive, or 0 for a direct projection")
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim ({self.qk_rope_head_dim}) must be even")
        if not self.kda_lower_bound < 0:
            raise ValueError(f"kda_lower_bound ({self.kda_lower_bound}) must be negative")
        if not 0 <= self.n_dense_layers <= self.n_layers:
            raise ValueError(f"n_dense_layers ({self.n_dense_layers}) must lie in [0, n_layers = {self.n_layers}]")
        if self.num_experts % self.num_groups:
            raise ValueError(f"num_experts ({self.num_experts}) is not a multiple of num_groups ({self.num_groups})")
        if self.top_groups > self.num_groups:
            raise ValueError(f"top_groups ({self.top_groups}) is larger than num_groups ({self.num_groups})")
        eligible = self.top_groups * (self.num_experts // self.num_groups)
        if self.top_k > eligible:
            raise ValueError(f"top_k ({self.top_k}) is larger than the {eligible} experts of top_groups groups")
        if self.shared_inter_dim < 0:
            raise ValueError(f"shared_inter_dim ({self.shared_inter_dim}) must be positive, or 0 for no shared expert")
        if self.expert_capacity_factor != 0.0:
            raise ValueError(
                f"expert_capacity_factor ({self.expert_capacity_factor}) would drop tokens; a shared prefix has one "
                "result only if no token is dropped: remove it (0)"
            )
        for name in ("expert_swiglu_limits", "shared_swiglu_limits"):
            limits = getattr(self, name)
            if limits and (len(limits) != self.n_layers or min(limits) < 0):
                raise ValueError(f"{name} has {len(limits)} entries; {self.n_layers} non-negative ones are needed")

    def is_mla(self, layer: int) -> bool:
        """Whether ``layer`` (0-based) is MLA; the others are KDA."""
        complete = self.n_layers // self.layer_group_size * self.layer_group_size
        return (layer + 1) % self.layer_group_size == 0 or layer >= complete

    def is_moe(self, layer: int) -> bool:
        """Whether ``layer`` (0-based) has experts."""
        return layer >= self.n_dense_layers

    @property
    def qk_head_dim(self) -> int:
        """Query and key dimension of an MLA head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def swiglu_limits(self, layer: int) -> tuple[float, float]:
        """SwiGLU clamps (routed, shared) of ``layer``; 0 = none."""
        routed = self.expert_swiglu_limits[layer] if self.expert_swiglu_limits else 0.0
        return routed, self.shared_swiglu_limits[layer] if self.shared_swiglu_limits else 0.0

    def update_from_config(self, job_config: Any, **kwargs: Any) -> None:
        """Check the sizes again: a field may have been set by hand. Nothing in a job changes the architecture.

        Raises:
            ValueError: If the sizes contradict each other.
        """
        self.validate()

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, float]:
        """Parameters of ``model`` (with ``expert_bias``) and floating-point operations per trained token.

        Args:
            model: The built model, on any device.
            seq_len: Length of a trajectory in tokens; causal attention sees half of it on average.

        Returns:
            The count, and operations of forward and backward; recomputation is not counted.
        """
        num_params = sum(p.numel() for p in model.parameters()) + sum(
            b.numel() for name, b in model.named_buffers() if name.endswith("expert_bias")
        )
        num_mla = sum(self.is_mla(i) for i in range(self.n_layers))
        attention = num_mla * self.n_heads * (self.qk_head_dim + self.v_head_dim) * seq_len
        # Per token and head: decay, prediction, rank-one update and read of a (K, V) state.
        linear = (self.n_layers - num_mla) * self.n_heads * 7 * self.kda_head_dim**2
        return num_params, 6 * active_parameter_count(self)[1] + 3 * (attention + linear)


def _layer_parameters(args: LingArgs, layer: int, num_experts: int) -> int:
    """Parameters of one layer with ``num_experts`` of its experts counted, ``expert_bias`` included."""
    mixer = _mla_parameters(args) if args.is_mla(layer) else _kda_parameters(args)
    if args.is_moe(layer):
        ffn = _moe_parameters(args, num_experts)
    else:
        ffn = 3 * args.dim * args.inter_dim
    return 2 * args.dim + mixer + ffn


def _kda_parameters(args: LingArgs) -> int:
    width = args.n_heads * args.kda_head_dim
    projections = 6 * args.dim * width + args.dim * args.n_heads
    return projections + 3 * width * args.num_taps + args.n_heads + width + args.kda_head_dim


def _mla_parameters(args: LingArgs) -> int:
    q_dim = args.n_heads * args.qk_head_dim
    if args.q_lora_rank:
        query = args.dim * args.q_lora_rank + args.q_lora_rank + args.q_lora_rank * q_dim
    else:
        query = args.dim * q_dim
    latent = args.dim * (args.kv_lora_rank + args.qk_rope_head_dim) + args.kv_lora_rank
    expand = args.kv_lora_rank * args.n_heads * (args.qk_nope_head_dim + args.v_head_dim)
    return query + latent + expand + args.dim * args.n_heads + args.n_heads * args.v_head_dim * args.dim


def _moe_parameters(args: LingArgs, num_experts: int) -> int:
    router = args.num_experts * args.dim + args.num_experts
    return router + 3 * args.dim * (num_experts * args.moe_inter_dim + args.shared_inter_dim)


def parameter_count(args: LingArgs, *, include_mtp: bool = False) -> int:
    """Number of parameters, ``expert_bias`` included.

    Args:
        args: The architecture.
        include_mtp: Also count the multi-token-prediction layers of the published checkpoint.
    """
    layers = sum(_layer_parameters(args, i, args.num_experts) for i in range(args.n_layers))
    total = layers + 2 * args.vocab_size * args.dim + args.dim
    if include_mtp:
        # Five norms and the projection of [embedding | hidden], one MLA, one MoE.
        mtp = 5 * args.dim + 2 * args.dim**2 + _mla_parameters(args) + _moe_parameters(args, args.num_experts)
        total += args.num_mtp_layers * mtp
    return total


def active_parameter_count(args: LingArgs) -> tuple[int, int]:
    """Parameters a token uses: (all, without the input embedding)."""
    layers = sum(_layer_parameters(args, i, args.top_k) for i in range(args.n_layers))
    table = args.vocab_size * args.dim
    return layers + 2 * table + args.dim, layers + table + args.dim


_TINY = LingArgs(
    dim=1536,
    n_layers=24,
    layer_group_size=4,
    n_heads=16,
    kda_head_dim=128,
    q_lora_rank=256,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    inter_dim=4608,
    n_dense_layers=1,
    num_experts=128,
    top_k=8,
    moe_inter_dim=512,
    shared_inter_dim=512,
    num_groups=8,
    top_groups=4,
    vocab_size=157184,
    max_position=131072,
)

FLAVOURS: dict[str, LingArgs] = {
    "debug": LingArgs(),
    "debug_dense": LingArgs(n_dense_layers=4),
    "tiny": _TINY,
    # Tiny's dimensions and vocabulary, one group of layers: fits one device with room for 64k rows.
    "tiny_4layer": replace(_TINY, n_layers=4),
    "flash": replace(
        _TINY,
        dim=2560,
        n_layers=42,
        layer_group_size=6,
        n_heads=32,
        q_lora_rank=0,
        inter_dim=6144,
        n_dense_layers=2,
        num_experts=512,
        moe_inter_dim=768,
        shared_inter_dim=768,
        expert_swiglu_limits=(0.0,) * 35 + (4.0,) * 7,
        shared_swiglu_limits=(0.0,) * 34 + (5.0,) * 6 + (7.0,) * 2,
        max_position=262144,
        num_mtp_layers=1,
    ),
}
