"""Configuration: every refusal of ``validate`` and of the command line, and what passes."""

from __future__ import annotations

from dataclasses import fields
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
    ("arguments", "why"),
    [
        (["--tree.chunk_size", "many"], "--tree.chunk_size is 'many'; a whole number is needed"),
        (["--tree.chunk-size=1.5"], "--tree.chunk-size is '1.5'; a whole number is needed"),
        (["--rl.kl_coef", "low"], "--rl.kl_coef is 'low'; a number is needed"),
        (
            ["--data.densify", "true", "--tree.mode", "shared"],
            "--tree.mode is 'shared'; choose one of 'compact', 'nodewise', 'depthwise', 'expanded'",
        ),
        (["--tree.max_token", "8"], "unknown option --tree.max_token; did you mean --tree.max_tokens?"),
        (["--tree.no-chunks"], "unknown option --tree.no-chunks"),
        (["--nosuch", "8"], "unknown option --nosuch"),
        (["--training.steps"], "--training.steps needs a value"),
        (["--training.steps", "--data.densify"], "--training.steps needs a value"),
        (["--training.steps", "5", "6"], "'6' belongs to no option"),
        (["--data.overlong", "cut"], "--data.overlong is 'cut'; choose one of 'error', 'drop', 'truncate'"),
        (["--activation_checkpoint.mode", "selective"], "--activation_checkpoint.mode is 'selective'"),
        # What only the parser can tell.
        (["--checkpoint.load_step", "3", "--parallelism.pipeline_parallel_layers_per_stage", "x"], "unknown option or"),
    ],
)
def test_refused_overrides_are_named(arguments, why, capsys):
    with pytest.raises(ValueError) as caught:
        load_config(CONFIG, arguments)
    message = str(caught.value)
    assert message.startswith(f"an override was refused: {why}") and message.endswith("; see above")
    assert "".join(capsys.readouterr()), "the parser has said more"


BOOLEANS = sorted(
    f"{section.name}.{setting.name}"
    for section in fields(job_config.JobConfig)
    for setting in fields(section.type)
    if setting.type in (bool, "bool")
)


def test_the_boolean_settings_are_found():
    assert {"tree.plan_in_background", "tree.validate", "data.densify", "data.shuffle"} <= set(BOOLEANS)


@pytest.mark.parametrize("path", [*BOOLEANS, "compile.enable", "training.dataloader.pin_memory"])
def test_booleans_are_given_as_values_or_as_flags(path):
    section, _, name = path.rpartition(".")
    dashed = name.replace("_", "-")
    forms = {
        True: ([f"--{path}", "true"], [f"--{path}=True"], [f"--{path}"], [f"--{section}.{dashed}", "TRUE"]),
        False: ([f"--{path}", "false"], [f"--{section}.{dashed}=false"], [f"--{section}.no-{dashed}"]),
    }
    for wanted, options in forms.items():
        for option in options:
            config = parse_config([*option, "--tree.chunk_size", "4"])
            for part in path.split("."):
                config = getattr(config, part)
            assert config is wanted, option


def test_the_last_boolean_wins_and_strings_stay_strings():
    options = ["--data.densify", "true", "--data.densify", "false", "--data.path", "true", "--job.description=false"]
    config = parse_config(options)
    assert (config.data.densify, config.data.path, config.job.description) == (False, "true", "false")


@pytest.mark.parametrize("options", [["--data.densify", "maybe"], ["--data.densify=1"], ["--data.densify="]])
def test_a_boolean_of_another_value_is_refused(options):
    with pytest.raises(ValueError, match=r"^--data.densify is '.*'; true or false is needed$"):
        load_config(CONFIG, options)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[tree]\nmax_token = 8", "[tree]: unknown key max_token; did you mean max_tokens?"),
        ("[tre]\nmax_tokens = 8", "unknown section [tre]; did you mean [tree]?"),
        ("[zzz]\nmax_tokens = 8", "unknown section [zzz]"),
        ("[training]\nmax_tokens = 8", "[training]: unknown key max_tokens; did you mean tree.max_tokens?"),
        ("max_tokens = 8", "unknown key max_tokens; did you mean tree.max_tokens?"),
        ("tree = 8", "tree is 8; [tree] is a section"),
        (
            "[tree]\nmod = 'compact'\n[data]\nshufle = true",
            "[tree]: unknown key mod; did you mean mode?; [data]: unknown key shufle; did you mean shuffle?",
        ),
        ("[training.dataloader]\npin = true", "[training.dataloader]: unknown key pin"),
        ("[training.loader]\npin = true", "[training]: unknown section [training.loader]"),
    ],
)
def test_unknown_keys_of_a_file_are_named(tmp_path, content, message):
    file = tmp_path / "small.toml"
    file.write_text(content)
    with pytest.raises(ValueError) as caught:
        load_config(str(file))
    assert str(caught.value).startswith(f"{file}, {message}")


def test_rollouts_in_the_place_of_the_configuration(tmp_path):
    file = tmp_path / "rollouts.parquet"
    file.write_bytes(b"PAR1\xff\xfe")
    with pytest.raises(ValueError, match=r"the first argument is CONFIG.toml; rollouts go to --rollouts$"):
        load_config(str(file))
    with pytest.raises(ValueError, match=r"rollouts go to --data.path$"):
        parse_config(["--job.config_file", str(file)])


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
