"""harts-verify never passes a figure that is not a number."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from harts_titan.cli import common, verify
from harts_titan.cli.comparison import LogitFigures, Recorded


def recorded(**changes):
    record = Recorded("compact", loss=1.0, z_loss=1.0, load_balance_loss=1.0)
    record.logprob_S = record.entropy_S = torch.zeros(3)
    record.row_S = torch.arange(3)
    record.grads = {"first": torch.ones(2), "second": torch.ones(2), "third": torch.ones(2)}
    for name, value in changes.items():
        setattr(record, name, value)
    return record


STEP = SimpleNamespace(batch=SimpleNamespace(offsets=np.array([0, 3]), labels=np.array([1, 2, -100])))
NAN_IN_THE_MIDDLE = {"first": torch.ones(2), "second": torch.tensor([1.0, math.nan]), "third": torch.ones(2) * 1.5}


@pytest.mark.parametrize(
    ("change", "figure"),
    [
        ({"loss": math.nan}, "loss_rel_diff"),
        ({"z_loss": math.nan}, "z_loss_rel_diff"),
        ({"load_balance_loss": math.nan}, "load_balance_loss_rel_diff"),
        ({"grads": NAN_IN_THE_MIDDLE}, "max_grad_rel_diff"),
        ({"grads": NAN_IN_THE_MIDDLE}, "grad_l2_rel_diff"),
        ({"logprob_S": torch.tensor([0.0, math.nan, 0.0])}, "max_logprob_diff"),
    ],
)
def test_nan_stays_the_worst_difference(monkeypatch, change, figure):
    """Neither a later parameter nor a later step without a fault hides it."""
    monkeypatch.setattr(verify, "compare_logits", lambda *_, **__: LogitFigures())
    differences = verify.Differences()
    for record in (recorded(), recorded(**change), recorded()):
        differences.include(None, STEP, record, recorded(), torch.zeros(3, dtype=torch.int64))
    figures = verify._figures(differences)
    assert math.isnan(figures[figure])
    if "grads" in change:
        assert figures["worst_parameter"] == "second"
    if figure != "max_logprob_diff":
        assert figures["max_logprob_diff"] == 0.0


@pytest.mark.parametrize("dtype", verify.BARS)
@pytest.mark.parametrize("figure", ["loss_rel_diff", "z_loss_rel_diff", "max_grad_rel_diff", "mean_token_cosine"])
def test_nan_misses_every_bar(dtype, figure):
    figures = verify._figures(verify.Differences())
    good = figures | {
        "dtype": dtype,
        "mode": "compact",
        "core_bit_equal": True,
        "original_tokens": 3,
        "compact_tokens": 3,
        "rows_executed": {"shared": 3, "expanded": 3, "rerun": 3},
        "rerun": figures,
    }
    assert verify.failures(good, verify.BARS[dtype]) == []
    assert verify.failures(good | {figure: math.nan}, verify.BARS[dtype])


def verified(dtype, **changes):
    """Figures as ``verify`` returns them, all good but for the changes."""
    figures = verify._figures(verify.Differences())
    return {
        "mode": "compact",
        "dtype": dtype,
        "steps": 1,
        "original_tokens": 4000,
        "compact_tokens": 3000,
        "compression": 4 / 3,
        "rows_executed": {"shared": 3000, "expanded": 4000, "rerun": 4000},
        **figures,
        "core_bit_equal": True,
        "core_elements_compared": 5,
        "rerun": figures | {"mean_symmetric_kl": 1e-3},
        **changes,
    }


BAD = {
    "max_logprob_diff_same_routing": 1.0,
    "max_entropy_diff_same_routing": 1.0,
    "max_grad_rel_diff": math.inf,
    "loss_rel_diff": 1.0,
    "z_loss_rel_diff": 1.0,
    "load_balance_loss_rel_diff": 1.0,
    "mean_token_cosine": 0.99,
    "expert_counts_equal": False,
    "max_logprob_diff": 1.0,
    "core_bit_equal": False,
    "mean_symmetric_kl": 1.0,
    "mean_cosine_error": 1.0,
    "mean_abs_nll_diff": 1.0,
    "grad_l2_rel_diff": 1.0,
}


@pytest.mark.parametrize("dtype", verify.BARS)
def test_a_figure_has_a_bar_in_the_table_exactly_if_it_is_judged(dtype):
    bars = verify.BARS[dtype]
    rows = {name: bar for name, _, bar in verify.table_rows(verified(dtype), bars)}
    for name, value in BAD.items():
        failed = verify.failures(verified(dtype, **{name: value}), bars)
        assert bool(rows[name]) == bool(failed), name
        assert len(failed) <= 1
    others = {name for name, bar in rows.items() if bar} - set(BAD)
    assert others == {"rows executed, shared", "rows executed, expanded", "rows executed, rerun"}


@pytest.mark.parametrize("dtype", verify.BARS)
def test_flipped_experts_are_judged_in_float64_only(dtype):
    bars = verify.BARS[dtype]
    flipped = verified(dtype, positions_with_routing_flips=3, expert_counts_equal=False, max_grad_rel_diff=0.5)
    failed = verify.failures(flipped, bars)
    assert len(failed) == (2 if dtype == "float64" else 0)
    rows = {name: bar for name, _, bar in verify.table_rows(flipped, bars)}
    assert rows["max_grad_rel_diff"] == ("<= 1.00e-09" if dtype == "float64" else "finite")
    assert rows["expert_counts_equal"] == ("True" if dtype == "float64" else "")


def test_the_table_shows_figures_beside_their_bars(capsys):
    result = verified("bfloat16", mean_symmetric_kl=2e-3)
    assert verify.failures(result, verify.BARS["bfloat16"]) == [
        "mean_symmetric_kl = 0.002, at most 1.1 x the re-run's 0.001 is accepted"
    ]
    rows = {name: (value, bar) for name, value, bar in verify.table_rows(result, verify.BARS["bfloat16"])}
    assert rows["compression"] == ("1.333", "")
    assert rows["mean_token_cosine"] == ("1.000000", ">= 0.9997")
    assert rows["mean_symmetric_kl"] == ("2.000e-03", "<= 1.10e-03, 1.1 x the re-run's 0.001")
    assert rows["rows executed, shared"] == (3000, "3,000")
    assert rows["core_bit_equal"] == (True, "True")
    common.table("title", verify.table_rows(result, verify.BARS["bfloat16"]), header=("figure", "value", "bar"))
    shown = capsys.readouterr().out
    assert "bar" in shown and ">= 0.9997" in shown
