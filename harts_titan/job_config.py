"""The sections that ``harts_titan`` adds to torchtitan's ``JobConfig``.

Selected by ``[job] custom_config_module = "harts_titan.job_config"``; torchtitan's ConfigManager merges this
``JobConfig`` with its own, so ``[tree] chunk_size = 16`` works in TOML and ``--tree.chunk_size 16`` on the command
line, and an unknown key is refused. Booleans are given as ``--data.densify true`` or as a flag (``--data.densify``,
``--data.no-densify``). Model sizes live in Python (``models/*/config.py``), not in TOML.
"""

# No `from __future__ import annotations`: ConfigManager merges sections by their real types.
import argparse
import dataclasses
import tomllib
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from harts_titan.ops import OpsBackends
from harts_titan.overrides import booleans_as_flags, field_types, mistaken_option, unknown_keys
from harts_titan.rl import ObjectiveConfig


@dataclass
class Tree:
    """How the trajectories of a step are shared and packed (HARTS 3.2, 3.3)."""

    mode: Literal["compact", "nodewise", "depthwise", "expanded"] = "compact"
    """compact: each distinct prefix of a microbatch once. expanded: every trajectory on its own, the baseline with the
    same microbatch membership. nodewise: compact rows, linear attention one call per tree node (an action or an
    observation if the input has node_start, else a path without a fork); depthwise: one per depth of the tree
    (ablations: final states are handed over, nothing is replayed)."""

    max_tokens: int = 65536
    """Capacity of a microbatch in compact rows (tokens)."""

    chunk_size: int = 64
    """Chunk of the linear-attention kernel in tokens; 64 for the Triton KDA kernels."""

    cost_file: str = ""
    """Cost coefficients of the planner, measured by `harts-bench calibrate CONFIG --json FILE`; "" counts operations
    from the sizes of the model."""

    plan_in_background: bool = True
    """Plan the next step in a process of its own while this one runs; false plans every step where it is needed. The
    plans are the same."""

    validate: bool = False
    """Prove every invariant of every plan before it is executed (slow; for tests and bug reports)."""


@dataclass
class Data:
    """Where rollouts come from and how they are cut into training steps."""

    path: str = ""
    """Rollout file, folder or glob: parquet or JSONL, one row per trajectory, or the delta-coded path format.
    "synthetic" generates deterministic agent-like rollouts and keeps them as a public file in `job.dump_folder`."""

    scheme: Literal["step", "tree"] = "tree"
    """Path format only: step = independent episodes, tree = all branches."""

    limit: int = 0
    """Read only the first `limit` trajectories; 0 reads all."""

    densify: bool = False
    """Map the token ids in use bijectively onto 0..n-1, for models whose vocabulary is smaller than the tokenizer's."""

    overlong: Literal["error", "drop", "truncate"] = "error"
    """What to do with a trajectory longer than `tree.max_tokens`; drops and cuts are counted in the log and metrics."""

    trajectories_per_step: int = 0
    """A training step takes whole groups until it has at least this many trajectories; 0 takes the whole file."""

    shuffle: bool = False
    """Shuffle the groups, differently in every epoch, seeded by `data.seed`."""

    seed: int = 0
    """Seed of the shuffle and of the synthetic rollouts."""

    num_workers: int = 0
    """Processes that prepare steps ahead of training."""

    synthetic_trajectories: int = 48
    """Trajectories to generate for `data.path = "synthetic"`."""


@dataclass
class Moe:
    """Router losses and expert-bias updates; every statistic is weighted by multiplicity (HARTS 3.5)."""

    z_loss_coef: float = 0.0
    """Coefficient of the mean over positions of logsumexp(router logits)^2, summed over MoE layers."""

    load_balance_coef: float = 0.0
    """Coefficient of the load-balancing loss (fraction of assignments x mean probability), summed over MoE layers."""

    load_balance_scope: Literal["consumer", "trajectory"] = "consumer"
    """consumer: statistics over a microbatch; trajectory: over each trajectory, weighted by its length."""

    expert_bias_rate: float = 0.001
    """Step of the auxiliary-loss-free bias update, `bias += rate * sign(mean load - load)`; 0 disables it."""


@dataclass
class Ops:
    """Backends of the kernels. "auto" chooses by device and availability and logs the choice once."""

    kda: str = OpsBackends.kda
    """auto | reference | recurrent | triton | fla; fla: fla-core's kernels, to measure modes nodewise, depthwise and
    expanded with; needs tree.chunk_size 64 and refuses mode compact where it hands a state over"""

    short_conv: str = OpsBackends.short_conv
    """auto | reference | triton"""

    attention: str = OpsBackends.attention
    """auto | dense | path | flex | triton | fa4; triton is deterministic, each trajectory as in its run alone"""

    grouped_mm: str = OpsBackends.grouped_mm
    """auto | grouped_mm | loop"""


@dataclass
class Model:
    """Overrides of torchtitan's defaults."""

    name: str = "ling"
    """Registered model spec."""

    flavor: str = "debug"
    """Size of the model: a key of its spec's `model_args`."""

    hf_assets_path: str = "."
    """Folder of Hugging Face assets for torchtitan's own loading (`checkpoint.initial_load_in_hf`). Rollouts are token
    ids: no tokenizer is needed."""


@dataclass
class ActivationCheckpoint:
    """Activation recomputation; torchtitan's selective modes do not survive sharded experts on torch 2.13."""

    mode: Literal["none", "full"] = "none"
    """none, or recompute every decoder layer in the backward pass from the fixed plan."""


@dataclass
class Checkpoint:
    """Overrides of torchtitan's defaults."""

    last_save_model_only: bool = False
    """False: the last checkpoint can be resumed. True: the last checkpoint holds the model only."""


@dataclass
class JobConfig:
    """Merged into torchtitan's ``JobConfig`` by its ConfigManager."""

    tree: Tree = field(default_factory=Tree)
    data: Data = field(default_factory=Data)
    rl: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    moe: Moe = field(default_factory=Moe)
    ops: Ops = field(default_factory=Ops)
    model: Model = field(default_factory=Model)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)


# Settings of torchtitan that this trainer does not use: changing one would silently do nothing, so it is refused.
_UNUSED = {
    "training.local_batch_size": "data.trajectories_per_step",
    "training.global_batch_size": "data.trajectories_per_step",
    "training.dataset": "data.path",
    "training.dataset_path": "data.path",
    "training.seq_len": "tree.max_tokens",
    "validation.enable": "harts-logprobs on a held-out file",
    "fault_tolerance.enable": "nothing: not supported",
    "model.converters": "nothing: quantised training is not supported",
}


def _check_types(section: str, value: Any) -> None:
    hints = typing.get_type_hints(type(value))
    for item in dataclasses.fields(value):
        got, want = getattr(value, item.name), hints[item.name]
        name = f"{section}.{item.name}"
        if typing.get_origin(want) is Literal:
            if got not in typing.get_args(want):
                raise ValueError(f"{name} is {got!r}; choose one of {', '.join(map(repr, typing.get_args(want)))}")
        elif want is float and isinstance(got, int) and not isinstance(got, bool):
            continue
        elif want in (int, float, str, bool) and type(got) is not want:
            raise ValueError(f"{name} is {got!r} ({type(got).__name__}); type {want.__name__} is needed")


def validate(config: Any) -> None:
    """Refuse settings that are wrong or that would silently do nothing, before anything is built.

    Args:
        config: the merged torchtitan ``JobConfig``.

    Raises:
        ValueError: naming the setting, what was got and what is needed.
    """
    for section in ("tree", "data", "rl", "moe", "ops"):
        if not hasattr(config, section):
            raise ValueError(
                f'section [{section}] is missing: set [job] custom_config_module = "harts_titan.job_config"'
            )
        _check_types(section, getattr(config, section))
    for name in ("max_tokens", "chunk_size"):
        if getattr(config.tree, name) < 1:
            raise ValueError(f"tree.{name} ({getattr(config.tree, name)}) must be at least 1")
    if config.ops.kda == "fla" and config.tree.chunk_size != 64:
        raise ValueError(f"tree.chunk_size ({config.tree.chunk_size}) must be 64 with ops.kda = 'fla'")
    for name in ("limit", "trajectories_per_step", "num_workers"):
        if getattr(config.data, name) < 0:
            raise ValueError(f"data.{name} ({getattr(config.data, name)}) must not be negative")
    for name in ("z_loss_coef", "load_balance_coef", "expert_bias_rate"):
        if getattr(config.moe, name) < 0:
            raise ValueError(f"moe.{name} ({getattr(config.moe, name)}) must not be negative")
    for path, instead in _UNUSED.items():
        section, name = path.split(".")
        default = getattr(type(getattr(config, section))(), name)
        got = getattr(getattr(config, section), name)
        if got != default:
            raise ValueError(f"{path} = {got!r} is not used by harts_titan; remove it and use {instead}")
    if config.compile.enable and config.compile.components != ["model"]:
        raise ValueError(
            f'compile.components is {config.compile.components}; only the layers of the model are compiled: ["model"]'
        )
    parallel = config.parallelism
    for name in (
        "tensor_parallel_degree",
        "pipeline_parallel_degree",
        "expert_parallel_degree",
        "context_parallel_degree",
        "data_parallel_replicate_degree",
    ):
        if getattr(parallel, name) != 1:
            raise ValueError(
                f"parallelism.{name} = {getattr(parallel, name)} is not supported yet; only data parallelism "
                "(parallelism.data_parallel_shard_degree) is"
            )


def parse_config(arguments: Sequence[str], *, hint: str = "rollouts go to --data.path") -> Any:
    """Merge a TOML file and command-line options into one ``JobConfig``.

    Args:
        arguments: ``--job.config_file FILE`` and ``--section.field value`` pairs; a boolean may also be a flag,
            ``--section.field`` or ``--section.no-field``.
        hint: what to do instead, if the file is not named like a TOML file and is none.

    Returns:
        The merged ``JobConfig``, not yet validated.

    Raises:
        ValueError: If the file is missing or no TOML, or an option or key is unknown or has a wrong value.
    """
    # Imported here: ConfigManager itself imports this module by name.
    from torchtitan.config import ConfigManager
    from torchtitan.config import JobConfig as TorchtitanConfig

    types = field_types(TorchtitanConfig, JobConfig)
    arguments = booleans_as_flags(arguments, types)
    # Another module brings settings that are not known here.
    given = any("custom_config_module" in a or "custom-config-module" in a for a in arguments)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--job.config_file", "--job.config-file", dest="path")
    path = parser.parse_known_args(arguments)[0].path
    if path is not None:
        if not Path(path).is_file():
            raise ValueError(f"configuration file '{path}' does not exist; see train_configs/")
        # ConfigManager logs a traceback for these; read the file once more to say it in a line.
        try:
            content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            instead = "" if Path(path).suffix == ".toml" else f"; {hint}"
            raise ValueError(f"{path} is no valid TOML: {error}{instead}") from error
        unknown = [] if given else list(unknown_keys(content, types))
        if unknown:
            raise ValueError(f"{path}, {'; '.join(unknown)}")
    module = ["--job.custom_config_module", "harts_titan.job_config"]
    try:
        return ConfigManager().parse_args([*([] if given else module), *arguments])
    except SystemExit as error:
        # The parser has printed what it disliked, or the help that was asked for.
        if error.code in (0, None):
            raise
        why = "" if given else mistaken_option(arguments, types)
        raise ValueError(f"an override was refused: {why or 'unknown option or wrong value'}; see above") from error


def load_config(path: str, overrides: Sequence[str] = ()) -> Any:
    """Read a TOML configuration with command-line overrides and validate it.

    Args:
        path: TOML file.
        overrides: ``--section.field value`` pairs and flags, as ``run_train.sh`` takes them.

    Returns:
        The merged ``JobConfig``.

    Raises:
        ValueError: If the file is missing or a setting is refused.
    """
    hint = "the first argument is CONFIG.toml; rollouts go to --rollouts"
    config = parse_config(["--job.config_file", path, *overrides], hint=hint)
    validate(config)
    return config
