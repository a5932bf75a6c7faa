"""Published-format checkpoints in and out."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import pytest
import torch
from ling_cases import build, calls_of, rollouts, small_args
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from harts_titan.models.common.tree_inputs import TreeInputs
from harts_titan.models.ling import Ling, LingStateDictAdapter, from_hf_config, load_hf, save_hf

ARGS = small_args()


def empty(args, dtype=torch.float64) -> Ling:
    with torch.device("meta"):
        model = Ling(args)
    model = model.to_empty(device="cpu").to(dtype)
    for tensor in model.state_dict().values():
        tensor.fill_(float("nan"))
    return model


def assert_same(got: Ling, expected: Ling) -> None:
    mine, theirs = got.state_dict(), expected.state_dict()
    assert set(mine) == set(theirs)
    for name in mine:
        assert mine[name].dtype == theirs[name].dtype
        assert torch.equal(mine[name], theirs[name]), name


def published(folder) -> dict[str, torch.Tensor]:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_shard_bytes", [10**9, 50_000])
def test_round_trip_is_bit_exact(tmp_path, dtype, max_shard_bytes):
    model = build(ARGS).to(dtype)
    save_hf(model, ARGS, tmp_path, max_shard_bytes=max_shard_bytes)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert (len(files) > 5) == (max_shard_bytes == 50_000)
    args = from_hf_config(tmp_path)
    assert args == ARGS
    loaded = empty(args, dtype)
    load_hf(loaded, args, tmp_path)
    assert_same(loaded, model)
    (layout,) = calls_of(*rollouts(1), "compact")
    inputs = TreeInputs.from_layout(layout)
    with torch.no_grad():
        assert torch.equal(loaded(inputs).logprob_S, model(inputs).logprob_S)


def test_published_names_shapes_and_files(tmp_path):
    save_hf(build(ARGS).to(torch.bfloat16), ARGS, tmp_path, max_shard_bytes=100_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    tensors = published(tmp_path)
    assert set(index["weight_map"]) == set(tensors)
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in tensors.values())
    for file in tmp_path.glob("*.safetensors"):
        content = load_file(file)
        assert sum(t.numel() * t.element_size() for t in content.values()) <= 100_000 or len(content) == 1
    shapes = {
        "model.word_embeddings.weight": (64, 64),
        "lm_head.weight": (64, 64),
        "model.norm.weight": (64,),
        "model.layers.0.input_layernorm.weight": (64,),
        "model.layers.0.attention.f_proj.weight": (32, 64),
        "model.layers.0.attention.b_proj.weight": (2, 64),
        "model.layers.0.attention.k_conv1d.weight": (32, 1, 4),
        "model.layers.0.attention.A_log": (2,),
        "model.layers.0.attention.dt_bias": (32,),
        "model.layers.0.attention.o_norm.weight": (16,),
        "model.layers.0.mlp.gate_proj.weight": (128, 64),
        "model.layers.1.mlp.gate.weight": (16, 64),
        "model.layers.1.mlp.gate.expert_bias": (16,),
        "model.layers.1.mlp.experts.15.down_proj.weight": (64, 32),
        "model.layers.1.mlp.shared_experts.up_proj.weight": (32, 64),
        "model.layers.3.attention.q_a_proj.weight": (32, 64),
        "model.layers.3.attention.q_b_proj.weight": (48, 32),
        "model.layers.3.attention.kv_a_proj_with_mqa.weight": (40, 64),
        "model.layers.3.attention.kv_b_proj.weight": (64, 32),
        "model.layers.3.attention.g_proj.weight": (2, 64),
        "model.layers.3.attention.dense.weight": (64, 32),
    }
    assert {k: tuple(tensors[k].shape) for k in shapes} == shapes
    wide = {k for k, t in tensors.items() if t.dtype == torch.float32}
    assert wide == {k for k in tensors if k.endswith(("A_log", "dt_bias", "expert_bias"))}


def test_file_dtype_can_differ_from_the_model(tmp_path):
    model = build(ARGS, torch.float32)
    save_hf(model, ARGS, tmp_path, dtype=torch.bfloat16)
    loaded = empty(ARGS, torch.float32)
    load_hf(loaded, ARGS, tmp_path)
    for name, tensor in model.state_dict().items():
        kept = name.endswith(("A_log", "dt_bias", "expert_bias"))
        expected = tensor if kept else tensor.bfloat16().float()
        assert torch.equal(loaded.state_dict()[name], expected), name


def test_without_index_and_with_broadcast_decay(tmp_path):
    model = build(ARGS)
    save_hf(model, ARGS, tmp_path, max_shard_bytes=200_000)
    (tmp_path / "model.safetensors.index.json").unlink()
    for file in tmp_path.glob("*.safetensors"):
        content = load_file(file)
        changed = {k: t.reshape(1, 1, -1, 1).clone() if k.endswith("A_log") else t for k, t in content.items()}
        save_file(changed, file)
    loaded = empty(ARGS)
    load_hf(loaded, ARGS, tmp_path)
    assert_same(loaded, model)


def test_prediction_layers_are_skipped_with_one_message(tmp_path, caplog):
    args = replace(ARGS, num_mtp_layers=1)
    model = build(args)
    save_hf(model, args, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["num_nextn_predict_layers"] == 0
    content = load_file(tmp_path / "model.safetensors")
    extra = {f"model.layers.4.{name}.weight": torch.zeros(3) for name in ("enorm", "eh_proj", "mlp.experts.0.up_proj")}
    save_file(content | extra, tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors.index.json").unlink()
    loaded = empty(args)
    with caplog.at_level(logging.INFO, logger="harts_titan"):
        load_hf(loaded, args, tmp_path)
    assert_same(loaded, model)
    messages = [r.getMessage() for r in caplog.records if "multi-token" in r.getMessage()]
    assert len(messages) == 1
    assert "3 tensors" in messages[0]
    with pytest.raises(ValueError, match=r"3 unknown tensors: model\.layers\.4\."):
        load_hf(empty(ARGS), ARGS, tmp_path)


def edit(folder, change):
    content = load_file(folder / "model.safetensors")
    change(content)
    save_file(content, folder / "model.safetensors")
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)


def test_wrong_checkpoints_are_refused_by_name(tmp_path):
    save_hf(build(ARGS), ARGS, tmp_path)
    key = "model.layers.1.mlp.experts.7.up_proj.weight"
    index = tmp_path / "model.safetensors.index.json"
    listing = json.loads(index.read_text())
    index.write_text(json.dumps({"weight_map": listing["weight_map"] | {key: "model-9.safetensors"}}))
    with pytest.raises(ValueError, match=r"lacks model-9\.safetensors"):
        load_hf(empty(ARGS), ARGS, tmp_path)
    edit(tmp_path, lambda c: c.update({"model.layers.1.attention.query_key_value.weight": torch.zeros(1)}))
    with pytest.raises(ValueError, match=r"unknown tensors: model\.layers\.1\.attention\.query_key_value"):
        load_hf(empty(ARGS), ARGS, tmp_path)
    edit(tmp_path, lambda c: c.pop("model.layers.1.attention.query_key_value.weight"))
    edit(tmp_path, lambda c: c.update({key: torch.zeros(64, 32)}))
    with pytest.raises(ValueError, match=r"experts\.7\.up_proj\.weight has shape"):
        load_hf(empty(ARGS), ARGS, tmp_path)
    edit(tmp_path, lambda c: c.update({key: torch.zeros(32, 64, dtype=torch.int8)}))
    with pytest.raises(ValueError, match="quantised"):
        load_hf(empty(ARGS), ARGS, tmp_path)
    edit(tmp_path, lambda c: c.pop(key))
    with pytest.raises(ValueError, match=r"missing tensors: model\.layers\.1\.mlp\.experts\.7\.up_proj"):
        load_hf(empty(ARGS), ARGS, tmp_path)
    with pytest.raises(ValueError, match=r"no \.safetensors"):
        load_hf(empty(ARGS), ARGS, tmp_path / "nowhere")


def test_loading_opens_every_file_once(tmp_path, monkeypatch):
    save_hf(build(ARGS), ARGS, tmp_path, max_shard_bytes=100_000)
    opened = []
    monkeypatch.setattr(
        "harts_titan.models.ling.hf.safe_open", lambda *a, **k: (opened.append(a[0]), safe_open(*a, **k))[1]
    )
    load_hf(empty(ARGS), ARGS, tmp_path)
    assert len(opened) == len(set(opened)) == len(list(tmp_path.glob("*.safetensors")))


def test_adapter_round_trip(tmp_path):
    model = build(ARGS)
    adapter = LingStateDictAdapter(ARGS, None)
    save_hf(model, ARGS, tmp_path)
    theirs = adapter.to_hf(model.state_dict())
    files = published(tmp_path)
    assert set(theirs) == set(files)
    assert all(torch.equal(theirs[k], files[k]) for k in files)
    back = adapter.from_hf(theirs | {})
    assert set(back) == set(model.state_dict())
    assert all(torch.equal(back[n], t) for n, t in model.state_dict().items())
    with pytest.raises(ValueError, match=r"unknown tensors: nonsense"):
        adapter.to_hf({"nonsense": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"unknown tensors: nonsense"):
        adapter.from_hf(theirs | {"nonsense": torch.zeros(1)})
    theirs.pop("model.layers.2.mlp.experts.3.gate_proj.weight")
    with pytest.raises(ValueError, match=r"missing tensors: model\.layers\.2\.mlp\.experts\.3\.gate_proj"):
        adapter.from_hf(theirs)
