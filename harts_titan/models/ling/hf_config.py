"""Sizes of Ling-3.0 in the keys of the published ``config.json``, both ways."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harts_titan.models.ling.config import LingArgs

# Hugging Face key -> field. The first group has no default: a wrong guess would silently be another model.
_HF_REQUIRED = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "layer_group_size": "layer_group_size",
    "num_attention_heads": "n_heads",
    "head_dim": "kda_head_dim",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_nope_head_dim",
    "qk_rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
    "intermediate_size": "inter_dim",
    "first_k_dense_replace": "n_dense_layers",
    "num_experts": "num_experts",
    "num_experts_per_tok": "top_k",
    "moe_intermediate_size": "moe_inter_dim",
    "n_group": "num_groups",
    "topk_group": "top_groups",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_position",
}
_HF_OPTIONAL = {
    "short_conv_kernel_size": "num_taps",
    "kda_lower_bound": "kda_lower_bound",
    "rms_norm_eps": "norm_eps",
    "rope_theta": "rope_theta",
    "routed_scaling_factor": "route_scale",
    "num_nextn_predict_layers": "num_mtp_layers",
    "initializer_range": "init_std",
}
# Key -> the only value this implementation computes; an absent key means that value.
_HF_FIXED: dict[str, Any] = {
    "model_type": "bailing_hybrid",
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "use_bias": False,
    "use_qkv_bias": False,
    "use_rmsnorm": True,
    "no_kda_lora": True,
    "kda_safe_gate": True,
    "gated_attention_proj_granularity_type": "head_wise",
    "rope_interleave": True,
    "use_mla_nope": False,
    "score_function": "sigmoid",
    "norm_topk_prob": True,
    "moe_router_enable_expert_bias": True,
    "num_shared_experts": 1,
}
_HF_DROPPING = ("capacity_factor", "expert_capacity_factor", "moe_capacity_factor", "moe_expert_capacity_factor")
ARCHITECTURE = "BailingMoeV3ForCausalLM"


def _check_hf(config: Mapping[str, Any], where: str) -> None:
    missing = sorted(set(_HF_REQUIRED) - set(config))
    if missing:
        raise ValueError(f"{where} lacks {', '.join(missing)}")
    architectures = config.get("architectures") or [ARCHITECTURE]
    if ARCHITECTURE not in architectures:
        raise ValueError(f"{where}: architectures is {architectures}; {ARCHITECTURE} is needed")
    for key, needed in _HF_FIXED.items():
        if config.get(key, needed) != needed:
            raise ValueError(f"{where}: {key} is {config[key]!r}; only {needed!r} is implemented")
    for key in _HF_DROPPING:
        if config.get(key):
            raise ValueError(
                f"{where}: {key} is {config[key]!r}, which would drop tokens; a shared prefix has one result only if "
                "no token is dropped: remove it"
            )
    heads = config["num_attention_heads"]
    if config.get("num_key_value_heads", heads) != heads:
        raise ValueError(f"{where}: num_key_value_heads ({config['num_key_value_heads']}) must equal {heads} heads")
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind != "default":
        raise ValueError(f"{where}: RoPE scaling {kind!r} is not implemented; only unscaled positions are")


def from_hf_config(config: Mapping[str, Any] | str | Path) -> LingArgs:
    """Read the architecture of a published checkpoint.

    ``partial_rotary_factor`` is ignored, as the published model does. Keys that do not change the numbers are ignored.

    Args:
        config: The parsed ``config.json``, its path, or the folder that holds it.

    Raises:
        ValueError: If a key is missing, or asks for something that is not implemented.
    """
    where = "config"
    if not isinstance(config, Mapping):
        path = Path(config)
        path = path / "config.json" if path.is_dir() else path
        try:
            where, config = str(path), json.loads(path.read_text())
        except (OSError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is no readable model configuration: {error}") from error
    assert isinstance(config, Mapping)
    _check_hf(config, where)
    values = {field: config[key] for key, field in _HF_REQUIRED.items()}
    values |= {field: config[key] for key, field in _HF_OPTIONAL.items() if config.get(key) is not None}
    theta = (config.get("rope_parameters") or {}).get("rope_theta")
    if theta is not None:
        values["rope_theta"] = theta
    for field in ("rope_theta", "kda_lower_bound", "norm_eps", "route_scale", "init_std"):
        if field in values:
            values[field] = float(values[field])
    values["q_lora_rank"] = config.get("q_lora_rank") or 0
    shared = config.get("moe_shared_expert_intermediate_size")
    values["shared_inter_dim"] = shared if shared is not None else values["moe_inter_dim"]
    for key, field in (
        ("expert_swiglu_limit_list", "expert_swiglu_limits"),
        ("share_expert_swiglu_limit_list", "shared_swiglu_limits"),
    ):
        # The lists may also cover the multi-token-prediction layers.
        limits = [float(limit or 0.0) for limit in (config.get(key) or ())][: values["n_layers"]]
        values[field] = tuple(limits) if any(limits) else ()
    try:
        return LingArgs(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def to_hf_config(args: LingArgs) -> dict[str, Any]:
    """Write the architecture under the keys of the published checkpoints; :func:`from_hf_config` reads it back.

    Raises:
        ValueError: If the published format cannot say it (no shared expert).
    """
    if args.shared_inter_dim == 0:
        raise ValueError("shared_inter_dim = 0 cannot be written: the published format has one shared expert")
    config: dict[str, Any] = {"architectures": [ARCHITECTURE], **_HF_FIXED}
    config |= {key: getattr(args, field) for key, field in (_HF_REQUIRED | _HF_OPTIONAL).items()}
    config["num_key_value_heads"] = args.n_heads
    config["qk_head_dim"] = args.qk_head_dim
    config["q_lora_rank"] = args.q_lora_rank or None
    config["moe_shared_expert_intermediate_size"] = args.shared_inter_dim
    config["expert_swiglu_limit_list"] = list(args.expert_swiglu_limits) or [0.0] * args.n_layers
    config["share_expert_swiglu_limit_list"] = list(args.shared_swiglu_limits) or [0.0] * args.n_layers
    return config
