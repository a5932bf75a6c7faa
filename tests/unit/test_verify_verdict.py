"""harts-verify never passes a figure that is not a number."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from harts_titan.cli import verify
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
