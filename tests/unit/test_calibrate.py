"""Cost coefficients from measured items: recovery, refusals, generated items."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from harts_titan.cli import bench, calibrate
from harts_titan.cli.calibrate import SHAPES, generate_trajectories
from harts_titan.tree.cost import PlanCost
from harts_titan.tree.cost_fit import (
    PICOSECONDS,
    CostFit,
    MeasuredItem,
    errors,
    fit_cost,
    fit_speed,
    nonnegative_least_squares,
)
from harts_titan.tree.sorted_step import SortedStep

TRUTH = PlanCost(
    forward_row=4_600_000,
    forward_pair=154,
    backward_row=13_000_000,
    backward_pair=530,
    head_forward_row=1_200_000,
    head_backward_row=3_500_000,
    row_alignment=16,
    shared_row_bytes=77_760,
    handed_state_bytes=18_874_368,
)
CONSTANT = (2e-3, 5e-3)


def items_of(cost=TRUTH, number=12, seed=0, noise=0.0, constant=CONSTANT):
    """Items that take what ``cost`` says, in picoseconds."""
    rng = np.random.default_rng(seed)
    truth = CostFit(cost, 1 / PICOSECONDS, constant)
    items = []
    for i in range(number):
        rows = int(rng.integers(4096, 65536))
        depth = int(rng.integers(64, rows))
        item = MeasuredItem(f"item {i}", rows, rows * depth // 2, rows * depth, rows * (i % 2), 1.0, 1.0)
        forward, backward = (value * (1 + noise * rng.standard_normal()) for value in truth.predict(item))
        items.append(replace(item, forward=forward, backward=backward))
    return items


def test_known_coefficients_are_recovered_to_the_picosecond():
    fit = fit_cost(items_of(), replace(TRUTH, forward_row=0, backward_pair=0), source="synthetic timings")
    assert fit.cost == replace(TRUTH, source="synthetic timings")
    assert fit.constant == pytest.approx(CONSTANT, rel=1e-6)
    assert all(isinstance(value, int) for name, value in vars(fit.cost).items() if name != "source")


def test_noise_moves_the_coefficients_little_and_unseen_items_are_predicted():
    fitted_on, unseen = items_of(number=24, noise=0.02), items_of(number=12, seed=1)
    fit = fit_cost(fitted_on, TRUTH, source="")
    for name in ("forward_row", "backward_row", "backward_pair"):
        assert getattr(fit.cost, name) == pytest.approx(getattr(TRUTH, name), rel=0.15)
    for figures in errors(fit, unseen).values():
        assert figures["max_relative_error"] < 0.05 and figures["r2"] > 0.995


def test_no_coefficient_is_negative():
    # Times fall with the pairs: the best non-negative coefficient is zero.
    items = [replace(i, forward=i.rows * 1e-6 + 0.02 - i.attended * 1e-12) for i in items_of()]
    fit = fit_cost(items, TRUTH, source="")
    assert fit.cost.forward_pair == 0 < fit.cost.forward_row


def test_least_squares_against_brute_force():
    rng = np.random.default_rng(3)
    for _ in range(20):
        matrix, target = rng.standard_normal((9, 3)), rng.standard_normal(9)
        found = nonnegative_least_squares(matrix, target)
        assert (found >= 0).all()
        # Conditions of Karush, Kuhn and Tucker: they characterise the minimum.
        gradient = matrix.T @ (matrix @ found - target)
        assert (gradient > -1e-9).all() and np.abs(gradient * found).max() < 1e-9


def test_the_speed_of_given_coefficients():
    fit = fit_speed(items_of(), replace(TRUTH, **{name: 7 * v for name, v in vars(TRUTH).items() if "row" in name}))
    assert fit.second < 1 / PICOSECONDS
    exact = fit_speed(items_of(), TRUTH)
    assert exact.second == pytest.approx(1 / PICOSECONDS, rel=1e-9)
    assert exact.constant == pytest.approx(CONSTANT, rel=1e-6)
    assert max(figures["max_relative_error"] for figures in errors(exact, items_of(seed=5)).values()) < 1e-9


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0, -1.0])
def test_a_time_that_is_none_is_refused_by_name(bad):
    items = items_of()
    items[4] = replace(items[4], backward=bad)
    with pytest.raises(ValueError, match=r"item 'item 4': backward took .* a positive time is needed"):
        fit_cost(items, TRUTH, source="")
    with pytest.raises(ValueError, match="'item 4'"):
        fit_speed(items, TRUTH)


def test_too_few_items_are_refused_by_name():
    with pytest.raises(ValueError, match=r"1 item\(s\) \('item 0'\) cannot tell rows, pairs, head and call apart"):
        fit_cost(items_of(number=1), TRUTH, source="")
    with pytest.raises(ValueError, match=r"0 item\(s\)"):
        fit_cost([], TRUTH, source="")


def test_items_that_are_alike_are_refused():
    with_head = [replace(item, head_rows=item.rows) for item in items_of()]
    one_depth = [replace(item, attended=100 * item.rows, recomputed=200 * item.rows) for item in items_of()]
    for items in (with_head, one_depth):
        with pytest.raises(ValueError, match="the 12 items differ too little"):
            fit_cost(items, TRUTH, source="")


def test_one_item_has_no_r2():
    (figures, _) = errors(CostFit(TRUTH, 1 / PICOSECONDS, CONSTANT), items_of(number=1)).values()
    assert math.isnan(figures["r2"]) and figures["max_relative_error"] < 1e-12


@pytest.mark.parametrize("max_length", [10_000, 700])
@pytest.mark.parametrize("shape", SHAPES)
def test_generated_trajectories(shape, max_length):
    rows = 1000
    made = generate_trajectories(shape, rows, max_length=max_length, vocab_size=512, seed=0)
    lengths = [len(tokens) for tokens in made]
    assert max(lengths) <= max_length and min(lengths) > 0
    step = SortedStep.from_tokens(np.concatenate(made), np.cumsum([0, *lengths]))
    # Branches share their trunk, so the rest does not divide evenly.
    assert rows - 8 <= step.distinct_tokens <= rows + 8
    assert max(tokens.max() for tokens in made) < 512
    again = generate_trajectories(shape, rows, max_length=max_length, vocab_size=512, seed=0)
    assert all((a == b).all() for a, b in zip(made, again, strict=True))


def test_the_first_argument_chooses_the_measurement(monkeypatch):
    seen = []
    monkeypatch.setitem(bench.SUBCOMMANDS, "calibrate", lambda argv: seen.append(list(argv)) or 3)
    assert bench.main(["calibrate", "a.toml", "--items", "9"]) == 3
    assert seen == [["a.toml", "--items", "9"]]
    with pytest.raises(ValueError, match=r"'absent.toml' does not exist"):
        bench.main(["absent.toml"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--items", "3"], r"--items \(3\) must be at least 8"),
        (["--repeats", "0"], r"--repeats \(0\) must be at least 1"),
        (["--json", "/absent/cost.json"], "--json: the folder '/absent' does not exist"),
    ],
)
def test_options_are_refused_before_any_work(arguments, message):
    with pytest.raises(ValueError, match=message):
        calibrate.main(["absent.toml", *arguments])
