"""Cost coefficients from measured work items: non-negative least squares (HARTS A.2).

Letters: I measured items, X unknowns.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np

from harts_titan.tree.cost import PlanCost

PICOSECONDS = 1e12
"""Of a second; the unit of calibrated coefficients."""

PASSES = ("forward", "backward")


@dataclass(frozen=True)
class MeasuredItem:
    """One work item and the time its two passes took.

    Attributes:
        name: for reports and refusals.
        rows: executed rows.
        attended: attended pairs.
        recomputed: recomputed pairs.
        head_rows: complete rows, 0 where the LM head does not run (a producer).
        forward: seconds.
        backward: seconds.
    """

    name: str
    rows: int
    attended: int
    recomputed: int
    head_rows: int
    forward: float
    backward: float


@dataclass(frozen=True)
class CostFit:
    """Coefficients that explain measured items, and what is left.

    Attributes:
        cost: coefficients. In picoseconds when fitted; of a formula those it was given.
        second: seconds per unit of ``cost``.
        constant: seconds of a call that do not depend on the item, per pass of :data:`PASSES`. Not part of ``cost``:
            every replica pays them for every computation, whatever the plan.
    """

    cost: PlanCost
    second: float
    constant: tuple[float, float]

    def predict(self, item: MeasuredItem) -> tuple[float, float]:
        """Return the seconds of the two passes."""
        cost = self.cost
        forward = cost.forward_row * item.rows + cost.forward_pair * item.attended
        backward = cost.backward_row * item.rows + cost.backward_pair * item.recomputed
        forward += cost.head_forward_row * item.head_rows
        backward += cost.head_backward_row * item.head_rows
        return self.second * forward + self.constant[0], self.second * backward + self.constant[1]


def nonnegative_least_squares(matrix_IX: np.ndarray, target_I: np.ndarray) -> np.ndarray:
    """Return the ``x >= 0`` that minimises ``|matrix x - target|``, exactly: every set of positive unknowns is tried.

    Args:
        matrix_IX: float64, at most 8 columns.
        target_I: float64.
    """
    num_unknowns = matrix_IX.shape[1]
    assert num_unknowns <= 8, "the number of sets doubles with every unknown"
    # Columns of rows and of pairs differ by many orders of magnitude.
    scale_X = np.maximum(np.linalg.norm(matrix_IX, axis=0), np.finfo(np.float64).tiny)
    best_X, best = np.zeros(num_unknowns), float(target_I @ target_I)
    for size in range(1, num_unknowns + 1):
        for chosen in itertools.combinations(range(num_unknowns), size):
            columns = list(chosen)
            x = np.linalg.lstsq(matrix_IX[:, columns] / scale_X[columns], target_I, rcond=None)[0]
            rest = target_I - matrix_IX[:, columns] / scale_X[columns] @ x
            if (x >= 0).all() and rest @ rest < best:
                best_X, best = np.zeros(num_unknowns), float(rest @ rest)
                best_X[columns] = x / scale_X[columns]
    return best_X


def fit_cost(items: list[MeasuredItem], base: PlanCost, *, source: str) -> CostFit:
    """Fit the coefficients of each pass and a constant; relative errors count, so small items count as much as large.

    Args:
        items: measured work items, of different rows and depths, with and without the LM head.
        base: gives the alignment and the interface sizes.
        source: of the result, for reports.

    Raises:
        ValueError: If a time is not a positive number, or the items cannot tell the coefficients apart.
    """
    check_items(items)
    unknowns = []
    for name in PASSES:
        pairs = "attended" if name == "forward" else "recomputed"
        matrix_IX = np.array([[i.rows, getattr(i, pairs), i.head_rows, 1] for i in items], np.float64)
        second_I = np.array([getattr(i, name) for i in items])
        unknowns.append(nonnegative_least_squares(matrix_IX / second_I[:, None], np.ones_like(second_I)))
    (row, pair, head, constant), (row_b, pair_b, head_b, constant_b) = unknowns
    cost = replace(
        base,
        forward_row=_picoseconds(row),
        forward_pair=_picoseconds(pair),
        backward_row=_picoseconds(row_b),
        backward_pair=_picoseconds(pair_b),
        head_forward_row=_picoseconds(head),
        head_backward_row=_picoseconds(head_b),
        source=source,
    )
    return CostFit(cost, 1 / PICOSECONDS, (float(constant), float(constant_b)))


def fit_speed(items: list[MeasuredItem], cost: PlanCost) -> CostFit:
    """Fit one speed for both passes, and their constants, to given coefficients.

    Raises:
        ValueError: As :func:`fit_cost`.
    """
    check_items(items)
    bare = CostFit(cost, 1.0, (0.0, 0.0))
    rows, target = [], []
    for item in items:
        for place, units in enumerate(bare.predict(item)):
            second = getattr(item, PASSES[place])
            rows.append([units / second, (place == 0) / second, (place == 1) / second])
            target.append(1.0)
    speed, *constant = nonnegative_least_squares(np.array(rows, np.float64), np.array(target))
    return CostFit(cost, float(speed), (float(constant[0]), float(constant[1])))


def check_items(items: list[MeasuredItem]) -> None:
    """Refuse items that determine no coefficients.

    Raises:
        ValueError: Naming the item, or what the items have in common.
    """
    for item in items:
        for name in PASSES:
            if not (np.isfinite(getattr(item, name)) and getattr(item, name) > 0):
                raise ValueError(f"item '{item.name}': {name} took {getattr(item, name)} s; a positive time is needed")
    matrix_IX = np.array([[i.rows, i.attended, i.head_rows, 1] for i in items], np.float64).reshape(-1, 4)
    if len(items) < matrix_IX.shape[1]:
        names = ", ".join(f"'{item.name}'" for item in items)
        raise ValueError(f"{len(items)} item(s) ({names}) cannot tell rows, pairs, head and call apart; 4 are needed")
    # Scaled columns: a rank that does not depend on units.
    matrix_IX /= np.maximum(np.linalg.norm(matrix_IX, axis=0), 1)
    if np.linalg.matrix_rank(matrix_IX, tol=1e-6) < matrix_IX.shape[1]:
        raise ValueError(
            f"the {len(items)} items differ too little to tell rows, pairs, head and call apart; they need different "
            "rows, different depths, and some without LM head"
        )


def errors(fit: CostFit, items: list[MeasuredItem]) -> dict[str, dict[str, float]]:
    """Return per pass the median and the largest relative error and R2 of predicted against measured seconds."""
    result = {}
    for place, name in enumerate(PASSES):
        measured_I = np.array([getattr(item, name) for item in items])
        predicted_I = np.array([fit.predict(item)[place] for item in items])
        relative_I = np.abs(predicted_I / measured_I - 1)
        spread = float(((measured_I - measured_I.mean()) ** 2).sum())
        left = float(((measured_I - predicted_I) ** 2).sum())
        result[name] = {
            "median_relative_error": float(np.median(relative_I)),
            "max_relative_error": float(relative_I.max()),
            # Of one item there is no spread to explain.
            "r2": 1 - left / spread if spread > 0 else float("nan"),
        }
    return result


def _picoseconds(seconds: float) -> int:
    return round(float(seconds) * PICOSECONDS)
