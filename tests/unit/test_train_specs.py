"""What the trainer finds under ``model.name``: spec, sizes, loader, Hugging Face format."""

from __future__ import annotations

from pathlib import Path

import pytest
from torchtitan.components.lr_scheduler import build_lr_schedulers
from torchtitan.protocols.train_spec import get_train_spec, register_train_spec

from harts_titan.data import RolloutBatch, write_rollouts
from harts_titan.job_config import load_config
from harts_titan.models import ling, train_specs
from harts_titan.models.common.no_loss import build_no_loss
from harts_titan.models.train_specs import HuggingFaceFormat, build_dataloader, hugging_face_format, model_args_of

CONFIG = str(Path(__file__).resolve().parents[2] / "train_configs" / "ling_debug.toml")


def config_of(path="unused", *overrides):
    return load_config(CONFIG, ["--data.path", str(path), *overrides])


@pytest.fixture
def rollouts(tmp_path):
    """Seven trajectories in groups of three, two and two; the third one has 40 tokens."""
    tokens = [[1, 2, n + 3] for n in range(7)]
    tokens[2] = [1, 2, *range(38)]
    mask = [[False] * (len(t) - 1) + [True] for t in tokens]
    batch = RolloutBatch.from_lists(
        tokens, mask, reward=[0, 1, 0, 1, 0, 1, 0], group_id=[0, 0, 0, 1, 1, 2, 2], episode_id=list("abcdefg")
    )
    path = tmp_path / "rollouts.parquet"
    write_rollouts(batch, path)
    return path


def load(path, *overrides, dp_world_size=1):
    return build_dataloader(dp_world_size, 0, None, config_of(path, *overrides))


def test_ling_is_registered_once():
    spec = get_train_spec("ling")
    assert spec.model_cls is ling.Ling and spec.parallelize_fn is ling.parallelize_ling
    assert spec.build_dataloader_fn is build_dataloader and spec.build_lr_schedulers_fn is build_lr_schedulers
    assert set(spec.model_args) == set(ling.FLAVOURS)
    # torchtitan writes job settings into the args of a spec; the published sizes must stay.
    assert all(spec.model_args[name] is not args for name, args in ling.FLAVOURS.items())
    with pytest.raises(ValueError, match="ling is already registered"):
        register_train_spec("ling", ling.make_train_spec(build_dataloader))


def test_the_loss_torchtitan_asks_for_refuses_to_be_used():
    assert get_train_spec("ling").build_loss_fn is build_no_loss
    loss = build_no_loss(None, parallel_dims=None, ft_manager=None)
    with pytest.raises(RuntimeError, match="from log-probabilities"):
        loss(None, None)


def test_sizes_by_name():
    assert model_args_of(config_of("unused", "--model.flavor", "tiny")).n_layers == 24
    with pytest.raises(ValueError, match=r"model.flavor = 'huge' is unknown; choose one of \['debug'"):
        model_args_of(config_of("unused", "--model.flavor", "huge"))
    with pytest.raises(ValueError, match="nosuch"):
        model_args_of(config_of("unused", "--model.name", "nosuch"))


def test_every_rank_loads_whole_steps_of_whole_groups(rollouts):
    loader = load(rollouts, "--data.trajectories_per_step", "2")
    steps = [step.episode_id for step, _ in zip(loader, range(3))]
    assert steps == [["a", "b", "c"], ["d", "e"], ["f", "g"]]
    one, two = (build_dataloader(2, rank, None, config_of(rollouts)) for rank in range(2))
    assert next(iter(one)).episode_id == next(iter(two)).episode_id == list("abcdefg")


def test_no_step_is_smaller_than_the_number_of_replicas(rollouts):
    loader = load(rollouts, "--data.trajectories_per_step", "2", dp_world_size=3)
    # The last group alone would leave a replica without work.
    assert [len(step.episode_id) for step, _ in zip(loader, range(2))] == [3, 4]
    with pytest.raises(ValueError, match="7 trajectories are fewer than the 8 data-parallel replicas"):
        load(rollouts, dp_world_size=8)


def test_shuffle_is_that_of_the_seed(rollouts):
    def order(*overrides):
        loader = load(rollouts, "--data.trajectories_per_step", "2", "--data.shuffle", *overrides)
        return [step.episode_id[0] for step, _ in zip(loader, range(12))]

    assert order("--data.seed", "1") == order("--data.seed", "1") != order("--data.seed", "2")


def test_the_overlong_policy_is_applied_before_steps_are_cut(rollouts):
    short = ["--tree.max_tokens", "8", "--data.trajectories_per_step", "2"]
    with pytest.raises(ValueError, match=r"rollouts longer than tree.max_tokens \(8\)"):
        load(rollouts, *short)
    dropped = next(iter(load(rollouts, *short, "--data.overlong", "drop")))
    assert dropped.episode_id == ["a", "b"]
    cut = next(iter(load(rollouts, *short, "--data.overlong", "truncate")))
    assert cut.lengths.tolist() == [3, 3, 8]


def test_ids_the_model_does_not_have_are_refused(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    write_rollouts(RolloutBatch.from_lists([[1, 99_999]], [[0, 1]], episode_id=["a"]), path)
    with pytest.raises(ValueError, match="99999"):
        load(path, "--data.no-densify")
    # The debug configuration maps the ids in use onto the model's.
    assert next(iter(load(path))).tokens.max() == 1


def test_hugging_face_formats(monkeypatch):
    monkeypatch.setattr(train_specs, "_HUGGING_FACE", dict(train_specs._HUGGING_FACE))
    known = hugging_face_format("ling")
    assert (known.read_args, known.load, known.save) == (ling.from_hf_config, ling.load_hf, ling.save_hf)
    with pytest.raises(ValueError, match=r"model.name = 'mine' cannot read Hugging Face folders; .* \['ling'"):
        hugging_face_format("mine")
    mine = HuggingFaceFormat(lambda path: None, lambda model, args, folder: None)
    train_specs.register_hugging_face("mine", mine)
    assert hugging_face_format("mine") is mine and mine.save is None
    with pytest.raises(ValueError, match="'mine' is already registered"):
        train_specs.register_hugging_face("mine", mine)
