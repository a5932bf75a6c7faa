"""Objectives against per-trajectory loops in float64 that are written from the papers' formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from harts_titan.rl import (
    Metric,
    ObjectiveConfig,
    PolicyTerm,
    PositionBatch,
    StepTotals,
    build_objective,
    kl_estimate,
    merge_metrics,
    metric_values,
    register_objective,
)
from harts_titan.rl.registry import _REGISTRY

OBJECTIVES = ("sft", "reinforce", "ppo_clip", "grpo", "dapo", "gspo")
AGGREGATIONS = ("token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "sequence_mean_token_sum_norm")
CLIPS = {"ppo_clip": (0.2, 0.2), "grpo": (0.2, 0.2), "dapo": (0.2, 0.28), "gspo": (3e-4, 4e-4)}


class Rollouts:
    """Random flat rollouts; untrained entries hold garbage on purpose."""

    def __init__(self, seed: int, num_trajectories: int = 9, *, spread: float = 0.3, weighted: bool = False):
        rng = np.random.default_rng(seed)
        lengths = rng.integers(1, 12, num_trajectories)
        self.offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        size = int(self.offsets[-1])
        self.mask = rng.random(size) < 0.6
        self.mask[self.offsets[1:] - 1] = False
        self.mask[self.offsets[2] : self.offsets[3]] = False
        self.logprob = -rng.exponential(1.0, size)
        self.entropy = rng.exponential(1.0, size)
        self.old = self.logprob + rng.normal(0, spread, size)
        self.ref = self.logprob + rng.normal(0, spread, size)
        self.sampler = self.old + rng.normal(0, spread, size)
        self.advantage = np.repeat(rng.normal(0, 1, num_trajectories), lengths)
        self.weight = rng.choice([0.0, 0.5, 1.0, 2.0], size) if weighted else None
        for k, array in enumerate((self.logprob, self.entropy, self.old, self.ref, self.sampler, self.advantage)):
            array[~self.mask] = [math.nan, -math.inf, math.inf, 1e300][k % 4]

    def positions(self) -> PositionBatch:
        return PositionBatch.from_arrays(
            self.mask,
            self.offsets,
            advantage_S=self.advantage,
            old_logprob_S=self.old,
            ref_logprob_S=self.ref,
            sampler_logprob_S=self.sampler,
            weight_S=self.weight,
        )

    def totals(self) -> StepTotals:
        return StepTotals.from_arrays(self.mask, self.offsets, weight_S=self.weight)

    def leaves(self, dtype=torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
        return (
            torch.tensor(self.logprob, dtype=dtype, requires_grad=True),
            torch.tensor(self.entropy, dtype=dtype, requires_grad=True),
        )


def oracle_loss(rollouts: Rollouts, logprob, entropy, name: str, config: ObjectiveConfig, aggregation: str):
    """Loss of the whole batch, one trajectory and one token at a time."""
    sequence_terms = []  # list of (weighted sum of terms, weight sum)
    for n in range(len(rollouts.offsets) - 1):
        span = range(int(rollouts.offsets[n]), int(rollouts.offsets[n + 1]))
        weight = {s: 1.0 if rollouts.weight is None else float(rollouts.weight[s]) for s in span}
        trained = [s for s in span if rollouts.mask[s] and weight[s] > 0]
        if not trained:
            continue
        if name == "gspo":
            mean = sum(logprob[s] - rollouts.old[s] for s in trained) / len(trained)
            ratios = {s: torch.exp(mean) for s in trained}
        else:
            ratios = {s: torch.exp(logprob[s] - rollouts.old[s]) for s in trained}
        total = torch.zeros((), dtype=torch.float64)
        for s in trained:
            adv = float(rollouts.advantage[s])
            if name == "sft":
                term = -logprob[s]
            elif name == "reinforce":
                term = -adv * logprob[s]
            else:
                low, high = CLIPS[name]
                objective = torch.min(ratios[s] * adv, torch.clamp(ratios[s], 1 - low, 1 + high) * adv)
                if config.dual_clip > 0 and adv < 0:
                    objective = torch.max(objective, torch.tensor(config.dual_clip * adv, dtype=torch.float64))
                term = -objective
            if config.tis_cap > 0:
                term = term * min(math.exp(rollouts.old[s] - rollouts.sampler[s]), config.tis_cap)
            if config.kl_coef > 0:
                log_r = rollouts.ref[s] - logprob[s]
                kl = {"k1": -log_r, "k2": log_r**2 / 2, "k3": torch.exp(log_r) - log_r - 1}[config.kl_estimator]
                term = term + config.kl_coef * kl
            term = term - config.entropy_coef * entropy[s]
            total = total + weight[s] * term
        sequence_terms.append((total, sum(weight[s] for s in trained)))
    if aggregation == "token_mean":
        return sum(t for t, _ in sequence_terms) / sum(w for _, w in sequence_terms)
    if aggregation == "sequence_mean_token_mean":
        return sum(t / w for t, w in sequence_terms) / len(sequence_terms)
    per_sequence = sum(t for t, _ in sequence_terms) / len(sequence_terms)
    return per_sequence / (config.sequence_norm_tokens or 1.0)


def config_for(name: str, aggregation: str = "", **changes) -> ObjectiveConfig:
    if name != "sft":
        changes.setdefault("advantage", "given")
    if aggregation == "sequence_mean_token_sum_norm":
        changes.setdefault("sequence_norm_tokens", 7.0)
    return ObjectiveConfig(objective=name, aggregation=aggregation, **changes)


def run(rollouts: Rollouts, config: ObjectiveConfig):
    logprob, entropy = rollouts.leaves()
    output = build_objective(config)(logprob, entropy, rollouts.positions(), rollouts.totals())
    output.loss.backward()
    entropy_grad = torch.zeros_like(entropy) if entropy.grad is None else entropy.grad
    return output, logprob.grad, entropy_grad


def check_against_oracle(rollouts: Rollouts, config: ObjectiveConfig) -> None:
    objective = build_objective(config)
    output, logprob_grad, entropy_grad = run(rollouts, config)
    logprob, entropy = rollouts.leaves()
    expected = oracle_loss(rollouts, logprob, entropy, config.objective, config, objective.config.aggregation)
    expected.backward()
    torch.testing.assert_close(output.loss, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(output.loss_S.sum(), expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(logprob_grad, logprob.grad, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(entropy_grad, entropy.grad, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("aggregation", ["", *AGGREGATIONS])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_equals_loop_oracle(name, aggregation):
    for seed in range(3):
        rollouts = Rollouts(seed, weighted=seed == 2)
        check_against_oracle(rollouts, config_for(name, aggregation))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_kl_entropy_tis_and_dual_clip_equal_loop_oracle(name, estimator):
    extra = {"kl_coef": 0.3, "kl_estimator": estimator, "entropy_coef": 0.05}
    if name != "sft":
        extra["tis_cap"] = 1.1
    if name in CLIPS:
        extra["dual_clip"] = 1.5
    for seed in range(2):
        check_against_oracle(Rollouts(10 + seed, spread=0.8, weighted=seed == 1), config_for(name, **extra))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_default_aggregation(name):
    expected = {
        "sft": "token_mean",
        "reinforce": "sequence_mean_token_sum",
        "ppo_clip": "token_mean",
        "dapo": "token_mean",
        "grpo": "sequence_mean_token_mean",
        "gspo": "sequence_mean_token_mean",
    }
    assert build_objective(config_for(name)).config.aggregation == expected[name]


def one_trajectory(logprob, old, advantage, **kwargs):
    """Every position but the last trained."""
    size = len(logprob) + 1
    mask = np.arange(size) < size - 1
    offsets = np.array([0, size])
    positions = PositionBatch.from_arrays(
        mask,
        offsets,
        advantage_S=np.append(advantage, 0.0),
        old_logprob_S=np.append(old, 0.0),
    )
    leaf = torch.tensor([*logprob, 0.0], dtype=torch.float64, requires_grad=True)
    output = build_objective(ObjectiveConfig(advantage="given", **kwargs))(
        leaf, None, positions, StepTotals.from_arrays(mask, offsets)
    )
    output.loss.backward()
    return output, leaf.grad


def test_ppo_by_hand():
    # Ratios 1.5, 0.5, 1.5, 0.5 with advantages +2, +2, -2, -2:
    #   1.2*2 (clipped), 0.5*2, -1.5*2, -0.8*2 (clipped): sum -1.2, minus sign and mean over 4 tokens: 0.3
    log_ratio = np.log([1.5, 0.5, 1.5, 0.5])
    output, grad = one_trajectory(log_ratio - 1, np.full(4, -1.0), [2, 2, -2, -2], objective="ppo_clip")
    assert output.loss.item() == pytest.approx(0.3, abs=1e-12)
    assert grad.tolist() == pytest.approx([0.0, -0.25, 0.75, 0.0, 0.0], abs=1e-12)
    values = metric_values(output.metrics)
    assert values["ratio_mean"] == pytest.approx(1.0)
    assert values["ratio_max"] == pytest.approx(1.5)
    assert values["ratio_min"] == pytest.approx(0.5)
    assert values["clip_fraction_low"] == 0.25
    assert values["clip_fraction_high"] == 0.25
    # k3 with labels of the old policy: mean(r - 1 - log r) = -(log 1.5 + log 0.5) / 2
    assert values["approx_kl"] == pytest.approx(-(math.log(1.5) + math.log(0.5)) / 2)
    assert values["trained_tokens"] == 4


def test_dual_clip_by_hand():
    # Ratio 5, advantage -1: without the dual clip 5, with bound 3 it is 3 and has no gradient. Positive advantages and
    # ratios below the bound are untouched.
    log_ratio = np.log([5.0, 2.0, 1.1])
    output, grad = one_trajectory(log_ratio, np.zeros(3), [-1, -1, 1], objective="ppo_clip", dual_clip=3.0)
    assert output.loss.item() == pytest.approx((3.0 + 2.0 - 1.1) / 3)
    assert grad.tolist() == pytest.approx([0.0, 2 / 3, -1.1 / 3, 0.0])
    assert metric_values(output.metrics)["clip_fraction_dual"] == pytest.approx(1 / 3)


def test_dapo_upper_clip_is_wider():
    log_ratio = np.log([1.25])
    _, grpo_grad = one_trajectory(log_ratio, np.zeros(1), [1], objective="grpo")
    _, dapo_grad = one_trajectory(log_ratio, np.zeros(1), [1], objective="dapo")
    assert grpo_grad[0] == 0
    assert dapo_grad[0].item() == pytest.approx(-1.25)


def test_clip_zero_switches_one_side_off():
    log_ratio = np.log([9.0, 0.1])
    output, grad = one_trajectory(log_ratio, np.zeros(2), [1, -1], objective="ppo_clip", clip_high=0.0)
    assert output.loss.item() == pytest.approx((-9.0 + 0.8) / 2)
    assert grad.tolist() == pytest.approx([-4.5, 0.0, 0.0])
    assert "clip_fraction_high" not in output.metrics


def test_gspo_ratio_is_exp_of_mean_log_ratio():
    log_ratio = np.array([0.3, -0.1, 0.1])
    output, grad = one_trajectory(log_ratio, np.zeros(3), [-1, -1, -1], objective="gspo")
    ratio = math.exp(0.1)
    assert metric_values(output.metrics)["ratio_max"] == pytest.approx(ratio)
    assert output.loss.item() == pytest.approx(ratio)
    assert grad.tolist() == pytest.approx([ratio / 3] * 3 + [0.0])
    # Positive advantage: the whole sequence is clipped at 1 + 4e-4, though the second token's own ratio is below 1.
    output, grad = one_trajectory(log_ratio, np.zeros(3), [1, 1, 1], objective="gspo")
    assert output.loss.item() == pytest.approx(-1.0004)
    assert grad.abs().max() == 0


def test_first_ratio_is_exactly_one_in_every_dtype():
    rollouts = Rollouts(3)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        logprob = torch.tensor(rollouts.logprob).to(dtype)
        positions = rollouts.positions()
        old = {"old_logprob_S": logprob.clone()}
        positions = PositionBatch(**{**vars(positions), **old})
        for name in ("grpo", "gspo"):
            output = build_objective(config_for(name))(logprob, None, positions, rollouts.totals())
            values = metric_values(output.metrics)
            assert values["ratio_max"] == values["ratio_min"] == values["ratio_mean"] == 1.0
            assert values["approx_kl"] == 0.0


@pytest.mark.parametrize("name", OBJECTIVES)
def test_any_split_into_calls_sums_to_the_single_batch(name):
    rollouts = Rollouts(5, num_trajectories=12, spread=0.6, weighted=True)
    extra = {"kl_coef": 0.1, "entropy_coef": 0.01}
    for aggregation in AGGREGATIONS:
        config = config_for(name, aggregation, **extra)
        objective = build_objective(config)
        whole, whole_logprob_grad, whole_entropy_grad = run(rollouts, config)
        step, totals = rollouts.positions(), rollouts.totals()
        rng = np.random.default_rng(0)
        for num_calls in (2, 5, 12):
            logprob, entropy = rollouts.leaves()
            outputs = []
            for members in np.array_split(rng.permutation(12), num_calls):
                source = np.concatenate([np.arange(rollouts.offsets[n], rollouts.offsets[n + 1]) for n in members])
                lengths = [rollouts.offsets[n + 1] - rollouts.offsets[n] for n in members]
                source_S = torch.as_tensor(source)
                call = step.take(source_S, torch.as_tensor(np.concatenate([[0], np.cumsum(lengths)])))
                outputs.append(objective(logprob[source_S], entropy[source_S], call, totals))
            loss = sum(output.loss for output in outputs)
            loss.backward()
            torch.testing.assert_close(loss, whole.loss, rtol=1e-12, atol=1e-13)
            torch.testing.assert_close(logprob.grad, whole_logprob_grad, rtol=1e-12, atol=1e-14)
            torch.testing.assert_close(entropy.grad, whole_entropy_grad, rtol=1e-12, atol=1e-14)
            merged = metric_values(merge_metrics(output.metrics for output in outputs))
            assert merged == pytest.approx(metric_values(whole.metrics), rel=1e-12, abs=1e-13)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_all_masked_gives_exactly_zero(name, aggregation):
    rollouts = Rollouts(6)
    rollouts.mask[:] = False
    rollouts.logprob[:] = -math.inf
    for array in (rollouts.entropy, rollouts.old, rollouts.ref, rollouts.sampler, rollouts.advantage):
        array[:] = math.nan
    extra = {} if name == "sft" else {"tis_cap": 2.0}
    output, logprob_grad, entropy_grad = run(
        rollouts, config_for(name, aggregation, kl_coef=0.1, entropy_coef=0.1, **extra)
    )
    assert output.loss.item() == 0.0
    assert (logprob_grad == 0).all()
    assert (entropy_grad == 0).all()
    assert set(metric_values(output.metrics)) == {"trained_tokens", "policy_loss", "loss"}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_all_masked_and_prompt_only_trajectories_change_nothing(name):
    """CP or call splits that leave one call without trained tokens must not move the loss."""
    rollouts = Rollouts(7)
    config = config_for(name, kl_coef=0.1)
    output, grad, _ = run(rollouts, config)
    size = len(rollouts.mask)
    extended = Rollouts(7)
    extended.offsets = np.append(rollouts.offsets, [size + 4, size + 5])
    for field in ("logprob", "entropy", "old", "ref", "sampler", "advantage"):
        setattr(extended, field, np.append(getattr(rollouts, field), np.full(5, math.nan)))
    extended.mask = np.append(rollouts.mask, np.zeros(5, dtype=bool))
    output_extended, grad_extended, _ = run(extended, config)
    assert output_extended.loss.item() == output.loss.item()
    assert (grad_extended[:size] == grad).all()
    assert (grad_extended[size:] == 0).all()
    assert metric_values(output_extended.metrics) == metric_values(output.metrics)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_weight_zero_equals_masked(name):
    rollouts = Rollouts(8)
    rollouts.weight = (np.arange(len(rollouts.mask)) % 2).astype(np.float64)
    weighted, weighted_grad, _ = run(rollouts, config_for(name))
    rollouts.mask &= rollouts.weight > 0
    rollouts.weight = None
    masked, masked_grad, _ = run(rollouts, config_for(name))
    assert weighted.loss.item() == masked.loss.item()
    assert (weighted_grad == masked_grad).all()
    assert metric_values(weighted.metrics) == metric_values(masked.metrics)


@pytest.mark.parametrize("name", ["ppo_clip", "grpo", "dapo", "gspo"])
def test_overflowing_ratio_on_the_clipped_side_is_harmless(name):
    """float32 exp overflows above 88; a clipped position must not turn that into 0 * inf."""
    mask = np.array([True, True, False])
    offsets = np.array([0, 3])
    positions = PositionBatch.from_arrays(
        mask,
        offsets,
        advantage_S=np.array([1.0, 1.0, 0.0], dtype=np.float32),
        old_logprob_S=np.array([-500.0, -400.0, 0.0], dtype=np.float32),
    )
    logprob = torch.tensor([-1.0, -2.0, math.nan], requires_grad=True)
    output = build_objective(config_for(name))(logprob, None, positions, StepTotals.from_arrays(mask, offsets))
    output.loss.backward()
    assert output.loss.item() == pytest.approx(-(1 + CLIPS[name][1]))
    assert (logprob.grad == 0).all()


def test_zero_advantage_has_no_gradient_whatever_its_ratio():
    output, grad = one_trajectory([-1.0, -1.0], [-2000.0, -1.0], [0.0, 1.0], objective="ppo_clip")
    assert output.loss.item() == -0.5
    assert grad.tolist() == [0.0, -0.5, 0.0]


def test_nonfinite_loss_can_be_traced_to_its_trajectory():
    rollouts = Rollouts(9)
    target = int(np.flatnonzero(rollouts.mask)[-1])
    rollouts.logprob[target] = math.nan
    output, _, _ = run(rollouts, config_for("sft"))
    assert math.isnan(output.loss.item())
    positions = rollouts.positions()
    bad = positions.trajectory_S[~torch.isfinite(output.loss_S)].unique()
    assert bad.tolist() == [positions.trajectory_S[target].item()]


@pytest.mark.parametrize("name", OBJECTIVES)
def test_gradcheck(name):
    rollouts = Rollouts(12, num_trajectories=5, spread=0.05)
    for field in ("logprob", "entropy"):
        getattr(rollouts, field)[~rollouts.mask] = 0.0
    clips = {"clip_low": 0.5, "clip_high": 0.5} if name in CLIPS else {}
    objective = build_objective(config_for(name, kl_coef=0.2, entropy_coef=0.1, **clips))
    positions, totals = rollouts.positions(), rollouts.totals()
    assert torch.autograd.gradcheck(lambda lp, h: objective(lp, h, positions, totals).loss, rollouts.leaves())


def test_kl_estimators_by_hand():
    logprob = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([-1.5, -1.0], dtype=torch.float64)
    d = [0.5, -1.0]
    expected = {
        "k1": (d, [1.0, 1.0]),
        "k2": ([x * x / 2 for x in d], d),
        "k3": ([math.exp(-x) - 1 + x for x in d], [1 - math.exp(-x) for x in d]),
    }
    for estimator, (value, gradient) in expected.items():
        kl = kl_estimate(logprob, ref, estimator=estimator)
        assert kl.tolist() == pytest.approx(value)
        (grad,) = torch.autograd.grad(kl.sum(), logprob)
        assert grad.tolist() == pytest.approx(gradient)
    with pytest.raises(ValueError, match=r"rl\.kl_estimator"):
        kl_estimate(logprob, ref, estimator="k4")


def test_kl_estimators_and_their_gradients_in_expectation():
    """The documented caveat, summed over a vocabulary under the policy: k1 has no gradient, k2 has the exact one."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, generator=generator, dtype=torch.float64, requires_grad=True)
    ref = torch.log_softmax(torch.randn(6, generator=generator, dtype=torch.float64), 0)
    logp = torch.log_softmax(logits, 0)
    probability = logp.detach().exp()
    exact = (logp.exp() * (logp - ref)).sum()
    (exact_grad,) = torch.autograd.grad(exact, logits, retain_graph=True)
    for estimator, unbiased_value, expected in (
        ("k1", True, torch.zeros(6, dtype=torch.float64)),
        ("k2", False, exact_grad),
        ("k3", True, None),
    ):
        value = (probability * kl_estimate(logp, ref, estimator=estimator)).sum()
        (grad,) = torch.autograd.grad(value, logits, retain_graph=True)
        assert unbiased_value == (abs(value.item() - exact.item()) < 1e-12)
        if expected is not None:
            torch.testing.assert_close(grad, expected, rtol=0, atol=1e-12)
        else:
            assert (grad - exact_grad).abs().max() > 1e-3


def test_metrics_equal_loops():
    rollouts = Rollouts(4, spread=0.8, weighted=True)
    cap = 1.2
    output, _, _ = run(rollouts, config_for("ppo_clip", tis_cap=cap, kl_coef=0.1, kl_estimator="k2"))
    trained = [s for s in range(len(rollouts.mask)) if rollouts.mask[s] and rollouts.weight[s] > 0]
    ratio = [math.exp(rollouts.logprob[s] - rollouts.old[s]) for s in trained]
    tis = [math.exp(rollouts.old[s] - rollouts.sampler[s]) for s in trained]
    adv = [rollouts.advantage[s] for s in trained]
    expected = {
        "ratio_mean": np.mean(ratio),
        "ratio_max": max(ratio),
        "ratio_min": min(ratio),
        "clip_fraction_low": np.mean([a < 0 and r < 0.8 for a, r in zip(adv, ratio)]),
        "clip_fraction_high": np.mean([a > 0 and r > 1.2 for a, r in zip(adv, ratio)]),
        "approx_kl": np.mean([r - 1 - math.log(r) for r in ratio]),
        "kl_ref": np.mean([(rollouts.logprob[s] - rollouts.ref[s]) ** 2 / 2 for s in trained]),
        "entropy": np.mean([rollouts.entropy[s] for s in trained]),
        "nll": np.mean([-rollouts.logprob[s] for s in trained]),
        "tis_weight_mean": np.mean([min(w, cap) for w in tis]),
        "tis_fraction_truncated": np.mean([w > cap for w in tis]),
        "sampler_kl": np.mean([w - 1 - math.log(w) for w in tis]),
        "advantage_mean": np.mean(adv),
        "trained_tokens": len(trained),
        "loss": output.loss.item(),
    }
    values = metric_values(output.metrics)
    assert 0 < expected["clip_fraction_low"] < 1
    assert 0 < expected["tis_fraction_truncated"] < 1
    policy_loss = values.pop("policy_loss")
    assert values == pytest.approx(expected, rel=1e-12)
    without_kl, _, _ = run(rollouts, config_for("ppo_clip", tis_cap=cap))
    assert policy_loss == pytest.approx(without_kl.loss.item())


@pytest.fixture
def clean_registry():
    before = dict(_REGISTRY)
    yield
    _REGISTRY.clear()
    _REGISTRY.update(before)


def test_external_objective(clean_registry):
    @register_objective("cispo_like", needs=("advantage", "old_logprob"), advantage="reward", clip=(0.1, 0.3))
    def cispo_like(logprob_S, positions, config):
        assert config.clip_high == 0.3
        assert torch.isfinite(logprob_S).all() and torch.isfinite(positions.advantage_S).all()
        weight = (logprob_S - positions.old_logprob_S).exp().detach().clamp(max=1 + config.clip_high)
        return PolicyTerm(
            -weight * positions.advantage_S * logprob_S, {"weight": Metric.over("max", weight, positions.mask_S)}
        )

    rollouts = Rollouts(1, spread=0.7)
    output, grad, _ = run(rollouts, ObjectiveConfig(objective="cispo_like"))
    expected = torch.zeros(len(grad), dtype=torch.float64)
    trained = np.flatnonzero(rollouts.mask)
    for s in trained:
        weight = min(math.exp(rollouts.logprob[s] - rollouts.old[s]), 1.3)
        expected[s] = -weight * rollouts.advantage[s] / len(trained)
    torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-14)
    assert metric_values(output.metrics)["weight"] == pytest.approx(1.3)

    with pytest.raises(ValueError, match="already registered"):
        register_objective("cispo_like")(cispo_like)
    with pytest.raises(ValueError, match="needs \\['rewards'\\]"):
        register_objective("other", needs=("rewards",))
    with pytest.raises(ValueError, match="aggregation 'mean'"):
        register_objective("other", aggregation="mean")
    with pytest.raises(ValueError, match="advantage 'gae'"):
        register_objective("other", advantage="gae")
