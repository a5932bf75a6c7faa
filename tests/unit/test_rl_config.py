from __future__ import annotations

import dataclasses

import pytest
import torch

from harts_titan.rl import ObjectiveConfig, PositionBatch, StepTotals, build_objective, objective_names


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"objective": ""}, r"rl\.objective is empty"),
        ({"aggregation": "mean"}, r"rl\.aggregation is 'mean'; it must be one of '', 'token_mean'"),
        ({"advantage": "gae"}, r"rl\.advantage is 'gae'"),
        ({"kl_estimator": "k4"}, r"rl\.kl_estimator is 'k4'; it must be one of 'k1', 'k2', 'k3'"),
        ({"missing_old_logprobs": "zero"}, r"rl\.missing_old_logprobs is 'zero'"),
        ({"kl_coef": -0.1}, r"rl\.kl_coef is -0\.1; it must be finite and >= 0"),
        ({"entropy_coef": float("nan")}, r"rl\.entropy_coef is nan"),
        ({"tis_cap": float("inf")}, r"rl\.tis_cap is inf"),
        ({"advantage_eps": 0.0}, r"rl\.advantage_eps is 0\.0"),
        ({"clip_low": 1.0}, r"rl\.clip_low is 1\.0; it must lie in \[0, 1\)"),
        ({"clip_low": -0.2}, r"rl\.clip_low is -0\.2"),
        ({"clip_high": float("inf")}, r"rl\.clip_high is inf"),
        ({"dual_clip": 1.0}, r"rl\.dual_clip is 1\.0; it must be > 1"),
        ({"epochs": 0}, r"rl\.epochs is 0"),
        ({"mini_batches": 0}, r"rl\.mini_batches is 0"),
        ({"aggregation": "sequence_mean_token_sum_norm"}, r"rl\.sequence_norm_tokens, which is 0"),
        ({"aggregation": "token_mean", "sequence_norm_tokens": 5.0}, r"does not read it"),
    ],
)
def test_bad_values_name_the_field(change, message):
    with pytest.raises(ValueError, match=message):
        ObjectiveConfig(**change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"objective": "grpoo"},
            r"rl\.objective is 'grpoo'; registered are dapo, grpo, gspo, ppo_clip, reinforce, sft",
        ),
        ({"objective": "sft", "clip_low": 0.1}, r"rl\.clip_low is 0\.1, but rl\.objective = 'sft' clips no ratios"),
        ({"objective": "reinforce", "dual_clip": 3.0}, r"rl\.dual_clip is 3\.0, but rl\.objective = 'reinforce'"),
        ({"objective": "sft", "advantage": "given"}, r"rl\.advantage is 'given', but .* uses no advantages"),
        ({"objective": "sft", "tis_cap": 2.0}, r"rl\.tis_cap is 2\.0, but"),
        ({"objective": "grpo", "sequence_norm_tokens": 9.0}, r"rl\.sequence_norm_tokens is 9\.0"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        build_objective(ObjectiveConfig(**change))


def test_builtin_names():
    assert {"sft", "reinforce", "ppo_clip", "grpo", "dapo", "gspo"} <= set(objective_names())


def test_defaults_are_resolved():
    config = build_objective(ObjectiveConfig(objective="dapo", clip_low=0.1)).config
    assert (config.clip_low, config.clip_high) == (0.1, 0.28)
    assert (config.aggregation, config.advantage) == ("token_mean", "group_relative")


def test_fields_are_plain_and_documented():
    import inspect

    source = inspect.getsource(ObjectiveConfig)
    for field in dataclasses.fields(ObjectiveConfig):
        assert field.type in (str, float, int, bool)
        assert type(field.default) is field.type
        assert f"{field.name}: {field.type.__name__}" in source


ALL = ("advantages", "old_logprobs", "ref_logprobs", "logprobs")


@pytest.mark.parametrize(
    ("config", "missing", "message"),
    [
        ({"objective": "ppo_clip"}, "advantages", r"no column 'advantages', which rl\.objective = 'ppo_clip'.*given"),
        ({"objective": "ppo_clip", "missing_old_logprobs": "error"}, "old_logprobs", r"'old_logprobs'.*compute"),
        ({"objective": "grpo", "kl_coef": 0.1}, "ref_logprobs", r"'ref_logprobs', which rl\.kl_coef = 0\.1"),
        ({"objective": "sft", "kl_coef": 0.1}, "ref_logprobs", r"'ref_logprobs', which rl\.kl_coef = 0\.1"),
        ({"objective": "grpo", "tis_cap": 2.0}, "logprobs", r"'logprobs', which rl\.tis_cap = 2\.0"),
        (
            {"objective": "reinforce", "tis_cap": 2.0, "missing_old_logprobs": "error"},
            "old_logprobs",
            r"'old_logprobs', which rl\.tis_cap = 2\.0",
        ),
    ],
)
def test_missing_columns_are_refused_before_compute(config, missing, message):
    objective = build_objective(ObjectiveConfig(**config))
    objective.check_inputs(ALL)
    with pytest.raises(ValueError, match=message):
        objective.check_inputs([name for name in ALL if name != missing])


def test_missing_old_logprobs_compute():
    objective = build_objective(ObjectiveConfig(objective="grpo"))
    objective.check_inputs(())
    assert objective.computes_advantages
    assert objective.must_compute_old_logprobs(())
    assert not objective.must_compute_old_logprobs(("old_logprobs",))
    assert not build_objective(ObjectiveConfig(objective="sft")).must_compute_old_logprobs(())
    assert build_objective(ObjectiveConfig(objective="reinforce", tis_cap=2.0)).must_compute_old_logprobs(())


def test_call_without_a_needed_input():
    mask = torch.tensor([True, False])
    positions = PositionBatch(mask, torch.zeros(2, dtype=torch.int64), 1)
    totals = StepTotals.from_arrays(mask.numpy(), torch.tensor([0, 2]).numpy())
    logprob = torch.zeros(2)
    with pytest.raises(ValueError, match=r"positions\.advantage_S is None, which rl\.objective = 'grpo'"):
        build_objective(ObjectiveConfig(objective="grpo", advantage="given"))(logprob, None, positions, totals)
    with pytest.raises(ValueError, match=r"entropy_S is None, which rl\.entropy_coef = 0\.1"):
        build_objective(ObjectiveConfig(entropy_coef=0.1))(logprob, None, positions, totals)
    with pytest.raises(ValueError, match=r"logprob_S has shape \(3,\); the positions have \(2,\)"):
        build_objective(ObjectiveConfig())(torch.zeros(3), None, positions, totals)
