"""Configuration: every refusal of ``validate`` and of the command line, and what passes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from harts_titan import job_config
from harts_titan.job_config import load_config, parse_config, validate
from harts_titan.ops import OpsBackends

CONFIG = str(Path(__file__).resolve().parents[2] / "train_configs" / "ling_debug.toml")


@pytest.fixture
def config():
    return load_config(CONFIG)


def changed(config, path, value):
    section, name = path.split(".")
    # The settings of [rl] are frozen.
    object.__setattr__(getattr(config, section), name, value)
    return config


@pytest.mark.parametrize("section", ["tree", "data", "rl", "moe", "ops"])
def test_a_missing_section_names_the_module_that_brings_it(config, section):
    sections = {name: value for name, value in vars(config).items() if name != section}
    with pytest.raises(ValueError, match=rf"section \[{section}\] is missing: set \[job\] custom_config_module"):
        validate(SimpleNamespace(**sections))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("tree.mode", "shared", r"tree.mode is 'shared'; choose one of 'compact', 'nodewise', 'depthwise', 'expanded'"),
        ("data.scheme", "path", r"data.scheme is 'path'; choose one of 'step', 'tree'"),
        ("data.overlong", "cut", r"data.overlong is 'cut'; choose one of 'error', 'drop', 'truncate'"),
        ("moe.load_balance_scope", "step", r"moe.load_balance_scope is 'step'"),
        ("tree.max_tokens", 64.0, r"tree.max_tokens is 64.0 \(float\); type int is needed"),
        ("tree.max_tokens", True, r"tree.max_tokens is True \(bool\); type int is needed"),
        ("tree.validate", 1, r"tree.validate is 1 \(int\); type bool is needed"),
        ("data.path", Path("x"), r"data.path is .*\(PosixPath\); type str is needed"),
        ("data.shuffle", "no", r"data.shuffle is 'no' \(str\); type bool is needed"),
        ("rl.kl_coef", "0.1", r"rl.kl_coef is '0.1' \(str\); type float is needed"),
        ("rl.kl_coef", True, r"rl.kl_coef is True \(bool\); type float is needed"),
        ("rl.epochs", 1.5, r"rl.epochs is 1.5 \(float\); type int is needed"),
        ("moe.z_loss_coef", None, r"moe.z_loss_coef is None"),
        ("ops.kda", None, r"ops.kda is None"),
        ("tree.max_tokens", 0, r"tree.max_tokens \(0\) must be at least 1"),
        ("tree.chunk_size", 0, r"tree.chunk_size \(0\) must be at least 1"),
        ("data.limit", -1, r"data.limit \(-1\) must not be negative"),
        ("data.trajectories_per_step", -1, r"data.trajectories_per_step \(-1\) must not be negative"),
        ("data.num_workers", -1, r"data.num_workers \(-1\) must not be negative"),
        ("moe.z_loss_coef", -0.1, r"moe.z_loss_coef \(-0.1\) must not be negative"),
        ("moe.load_balance_coef", -0.1, r"moe.load_balance_coef \(-0.1\) must not be negative"),
        ("moe.expert_bias_rate", -0.1, r"moe.expert_bias_rate \(-0.1\) must not be negative"),
    ],
)
def test_wrong_values_are_refused(config, path, value, message):
    with pytest.raises(ValueError, match=message):
        validate(changed(config, path, value))


UNUSED = {
    "training.local_batch_size": 2,
    "training.global_batch_size": 16,
    "training.dataset": "c4",
    "training.dataset_path": "folder",
    "training.seq_len": 17,
    "validation.enable": True,
    "fault_tolerance.enable": True,
    "model.converters": ["float8"],
}


def test_every_unused_setting_is_tried():
    assert set(UNUSED) == set(job_config._UNUSED)


@pytest.mark.parametrize("path", UNUSED)
def test_settings_that_would_do_nothing_are_refused(config, path):
    with pytest.raises(ValueError) as caught:
        validate(changed(config, path, UNUSED[path]))
    assert str(caught.value) == (
        f"{path} = {UNUSED[path]!r} is not used by harts_titan; remove it and use {job_config._UNUSED[path]}"
    )


@pytest.mark.parametrize(
    "name",
    [
        "tensor_parallel_degree",
        "pipeline_parallel_degree",
        "expert_parallel_degree",
        "context_parallel_degree",
        "data_parallel_replicate_degree",
    ],
)
def test_other_kinds_of_parallelism_are_refused(config, name):
    with pytest.raises(ValueError, match=rf"parallelism.{name} = 2 is not supported yet; only data parallelism"):
        validate(changed(config, f"parallelism.{name}", 2))


def test_only_the_model_is_compiled(config):
    compiled = changed(config, "compile.enable", True)
    with pytest.raises(ValueError, match=r"compile.components is \['model', 'loss'\]; only the layers"):
        validate(compiled)
    validate(changed(compiled, "compile.components", ["model"]))


def test_what_is_in_range_passes(config):
    for path, value in {
        "tree.max_tokens": 1,
        "tree.chunk_size": 1,
        "data.limit": 0,
        "moe.expert_bias_rate": 0,
        "rl.kl_coef": 1,  # whole numbers serve as floats
        "parallelism.data_parallel_shard_degree": 8,
    }.items():
        validate(changed(config, path, value))


def test_backends_are_those_of_the_ops():
    assert job_config.Ops() == job_config.Ops(**vars(OpsBackends()))


def test_overrides_win_and_are_validated():
    assert load_config(CONFIG, ["--tree.chunk_size", "8"]).tree.chunk_size == 8
    with pytest.raises(ValueError, match=r"tree.chunk_size \(0\)"):
        load_config(CONFIG, ["--tree.chunk_size", "0"])


@pytest.mark.parametrize(
    "arguments",
    [
        ["--tree.chunk_size", "many"],
        ["--tree.mode", "shared"],
        ["--tree.chunks", "8"],
        ["--data.overlong", "cut"],
        ["--activation_checkpoint.mode", "selective"],
    ],
)
def test_options_the_parser_does_not_know(arguments, capsys):
    with pytest.raises(ValueError, match=r"an option of the form --section.field is not the configuration's"):
        load_config(CONFIG, arguments)
    assert capsys.readouterr(), "the parser has said which"


def test_files(tmp_path):
    with pytest.raises(ValueError, match=r"configuration file '.*absent.toml' does not exist; see train_configs/"):
        load_config(str(tmp_path / "absent.toml"))
    file = tmp_path / "broken.toml"
    file.write_text("[tree\nchunk_size = 8")
    with pytest.raises(ValueError, match=r"broken.toml is no valid TOML"):
        load_config(str(file))
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"broken.toml is no valid TOML"):
        load_config(str(file))


def test_the_sections_are_merged_without_being_asked_for(tmp_path):
    file = tmp_path / "small.toml"
    file.write_text("[tree]\nchunk_size = 8\n")
    assert load_config(str(file)).tree.chunk_size == 8
    assert parse_config(["--tree.chunk_size", "4"]).tree.chunk_size == 4
    module = ["--job.custom_config_module", "harts_titan.job_config"]
    assert parse_config([*module, "--tree.chunk_size", "4"]).tree.chunk_size == 4
