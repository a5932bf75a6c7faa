"""Sizes of Ling: published counts, layer pattern, refusals, Hugging Face config in and out."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
import torch

from harts_titan.models.ling import (
    FLAVOURS,
    Ling,
    LingArgs,
    active_parameter_count,
    from_hf_config,
    parameter_count,
    to_hf_config,
)


def test_published_parameter_counts():
    assert parameter_count(FLAVOURS["tiny"]) == 7_893_392_800
    assert parameter_count(FLAVOURS["tiny"], include_mtp=True) == 7_893_392_800
    assert parameter_count(FLAVOURS["flash"]) == 124_414_211_552
    assert parameter_count(FLAVOURS["flash"], include_mtp=True) == 127_486_405_600


def test_published_active_parameter_counts():
    rounded = {name: [round(n / 1e9, 4) for n in active_parameter_count(FLAVOURS[name])] for name in ("tiny", "flash")}
    assert rounded == {"tiny": [1.3817, 1.1403], "flash": [5.5057, 5.1033]}


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_analytic_count_is_that_of_the_model(flavour):
    args = FLAVOURS[flavour]
    with torch.device("meta"):
        model = Ling(args)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert sum(t.numel() for t in tensors.values()) == parameter_count(args)
    count, flops = args.get_nparams_and_flops(model, 4096)
    assert count == parameter_count(args)
    assert flops > 6 * active_parameter_count(args)[1]


def test_published_layer_patterns():
    for name, expected in (("tiny", [3, 7, 11, 15, 19, 23]), ("flash", [5, 11, 17, 23, 29, 35, 41])):
        args = FLAVOURS[name]
        assert [i for i in range(args.n_layers) if args.is_mla(i)] == expected
    # Layers after the last complete group are MLA.
    args = LingArgs(n_layers=11, layer_group_size=4)
    assert [i for i in range(11) if args.is_mla(i)] == [3, 7, 8, 9, 10]


def test_published_clamps():
    flash = FLAVOURS["flash"]
    limits = [flash.swiglu_limits(i) for i in range(42)]
    assert [routed for routed, _ in limits] == [0.0] * 35 + [4.0] * 7
    assert [shared for _, shared in limits] == [0.0] * 34 + [5.0] * 6 + [7.0] * 2
    assert all(FLAVOURS["tiny"].swiglu_limits(i) == (0.0, 0.0) for i in range(24))


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_config_round_trip(flavour, tmp_path):
    args = FLAVOURS[flavour]
    config = to_hf_config(args)
    assert from_hf_config(config) == replace(args, head_rows_per_chunk=LingArgs().head_rows_per_chunk)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert from_hf_config(path) == from_hf_config(tmp_path) == from_hf_config(str(path)) == from_hf_config(config)
    json.dumps(asdict(args))


def test_keys_that_do_not_matter_are_ignored_and_nested_theta_is_read():
    config = to_hf_config(FLAVOURS["flash"]) | {
        "partial_rotary_factor": 0.5,
        "attention_dropout": 0.0,
        "pad_token_id": 1,
    }
    config["expert_swiglu_limit_list"] = [*config["expert_swiglu_limit_list"], 4.0]
    assert from_hf_config(config) == FLAVOURS["flash"]
    theta = config.pop("rope_theta")
    assert (
        from_hf_config(config | {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}).rope_theta == theta
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"model_type": "llama"}, "model_type"),
        ({"architectures": ["BailingMoeV2_5ForCausalLM"]}, "BailingMoeV3ForCausalLM"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"num_key_value_heads": 1}, "num_key_value_heads"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "yarn"),
        ({"no_kda_lora": False}, "no_kda_lora"),
        ({"num_shared_experts": 2}, "num_shared_experts"),
        ({"score_function": "softmax"}, "score_function"),
        ({"moe_expert_capacity_factor": 1.25}, "drop tokens"),
        ({"topk_group": 99}, "top_groups"),
    ],
)
def test_configs_that_are_another_model_are_refused(change, message):
    config = to_hf_config(FLAVOURS["debug"]) | change
    config = {key: value for key, value in config.items() if value is not None or key == "q_lora_rank"}
    with pytest.raises(ValueError, match=message):
        from_hf_config(config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"expert_capacity_factor": 1.25}, "drop tokens"),
        ({"dim": 0}, "dim"),
        ({"num_groups": 3}, "num_groups"),
        ({"top_k": 9}, "top_k"),
        ({"qk_rope_head_dim": 7}, "even"),
        ({"kda_lower_bound": 0.0}, "kda_lower_bound"),
        ({"n_dense_layers": 5}, "n_dense_layers"),
        ({"expert_swiglu_limits": (1.0,)}, "expert_swiglu_limits"),
    ],
)
def test_sizes_that_are_no_model_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        LingArgs(**change)
