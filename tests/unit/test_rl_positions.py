from __future__ import annotations

import dataclasses
import math
import subprocess
import sys

import numpy as np
import pytest
import torch

from harts_titan.rl import Metric, PositionBatch, StepTotals, all_reduce_metrics, merge_metrics, metric_values

# Tokens [7, 8, 9, 4], the policy sampled 9 and 4: label-aligned mask [0, 1, 1, 0] (docs/notation.md).
MASK = np.array([0, 1, 1, 0, 0, 1, 0, 0, 0], dtype=bool)
OFFSETS = np.array([0, 4, 8, 9])


def test_totals_by_hand():
    totals = StepTotals.from_arrays(MASK, OFFSETS)
    assert totals == StepTotals(
        positions=9,
        trajectories=3,
        trained_tokens=3,
        weighted_tokens=3.0,
        trained_trajectories=2,
        trained_tokens_N=(2, 1, 0),
    )


def test_totals_with_weights():
    weight = np.array([9, 0.5, 0, 9, 9, 0, 9, 9, math.nan])
    totals = StepTotals.from_arrays(MASK, OFFSETS, weight_S=weight)
    assert totals.weighted_tokens == 0.5
    assert totals.trained_tokens == 1
    assert totals.trained_trajectories == 1
    assert totals.trained_tokens_N == (1, 0, 0)


def test_totals_of_parts_add_up():
    whole = StepTotals.from_arrays(MASK, OFFSETS)
    first = StepTotals.from_arrays(MASK[:4], OFFSETS[:2])
    rest = StepTotals.from_arrays(MASK[4:], OFFSETS[1:] - 4)
    for field in dataclasses.fields(StepTotals):
        assert getattr(first, field.name) + getattr(rest, field.name) == getattr(whole, field.name), field.name


def test_empty_step():
    totals = StepTotals.from_arrays(np.zeros(0, dtype=bool), np.array([0]))
    assert (totals.positions, totals.trajectories, totals.trained_tokens) == (0, 0, 0)


@pytest.mark.parametrize(
    ("mask", "offsets", "weight", "message"),
    [
        ([0, 1], [0, 2], None, r"last position of trajectory 0 is masked in.*label-aligned"),
        ([1, 0, 1, 1], [0, 2, 4], None, r"last position of trajectory 1"),
        ([1, 0], [0, 3], None, r"offsets must rise strictly from 0 to 2"),
        ([1, 0], [0, 0, 2], None, r"offsets must rise strictly"),
        ([1, 0], [0, 2], [-1.0, 0.0], r"weight -1\.0 at trajectory 0, position 0; a weight must be finite and >= 0"),
        ([0, 0, 1, 0], [0, 2, 4], [0, 0, math.nan, 0], r"weight nan at trajectory 1, position 0"),
        ([1, 0], [0, 2], [1.0], r"weights have shape \(1,\)"),
    ],
)
def test_bad_arrays(mask, offsets, weight, message):
    weight = None if weight is None else np.array(weight)
    with pytest.raises(ValueError, match=message):
        StepTotals.from_arrays(np.array(mask, dtype=bool), np.array(offsets), weight_S=weight)


def test_mask_must_be_bool():
    with pytest.raises(ValueError, match="bool array"):
        StepTotals.from_arrays(np.array([1, 0]), np.array([0, 2]))


def test_take_reorders_whole_trajectories():
    step = PositionBatch.from_arrays(MASK, OFFSETS, advantage_S=np.arange(9.0), weight_S=np.arange(9.0) + 1)
    call = step.take(torch.tensor([8, 0, 1, 2, 3]), torch.tensor([0, 1, 5]))
    assert call.num_trajectories == 2
    assert call.trajectory_S.tolist() == [0, 1, 1, 1, 1]
    assert call.mask_S.tolist() == [False, False, True, True, False]
    assert call.advantage_S.tolist() == [8, 0, 1, 2, 3]
    assert call.weight_S.tolist() == [9, 1, 2, 3, 4]
    assert call.old_logprob_S is None
    assert call.to("cpu").advantage_S.tolist() == call.advantage_S.tolist()


def test_position_batch_checks():
    with pytest.raises(ValueError, match="advantage_S has shape"):
        PositionBatch(torch.tensor(MASK), torch.zeros(9, dtype=torch.int64), 1, advantage_S=torch.zeros(8))
    with pytest.raises(ValueError, match="must be a float tensor"):
        PositionBatch(torch.tensor(MASK), torch.zeros(9, dtype=torch.int64), 1, advantage_S=torch.zeros(9).long())
    with pytest.raises(ValueError, match=r"mask_S is torch\.int64"):
        PositionBatch(torch.zeros(9).long(), torch.zeros(9, dtype=torch.int64), 1)


def test_masked_replaces_untrained_inputs():
    step = PositionBatch.from_arrays(MASK, OFFSETS, old_logprob_S=np.where(MASK, -1.0, math.nan))
    assert step.masked().old_logprob_S.tolist() == np.where(MASK, -1.0, 0.0).tolist()


def metric_of(kind: str, values: list[float]) -> Metric:
    values_S = torch.tensor([*values, math.nan], dtype=torch.float64)
    return Metric.over(kind, values_S, ~values_S.isnan())


def test_metrics_combine_parts_not_averages():
    parts = [metric_of("mean", [1.0, 2.0]), metric_of("mean", [6.0]), metric_of("mean", [])]
    merged = merge_metrics({"x": part} for part in parts)
    assert merged["x"].result() == 3.0
    assert metric_of("mean", [1.0]).merge(metric_of("mean", [2.0, 3.0])).result() == 2.0
    assert metric_of("max", [1.0]).merge(metric_of("max", [])).merge(metric_of("max", [-5.0])).result() == 1.0
    assert metric_of("min", [1.0]).merge(metric_of("min", [])).merge(metric_of("min", [-5.0])).result() == -5.0
    assert metric_of("sum", [1.0, 4.0]).merge(metric_of("sum", [2.0])).result() == 7.0
    assert math.isnan(metric_of("mean", []).result())
    assert metric_values({"empty": metric_of("max", []), "zero": metric_of("sum", [])}) == {"zero": 0.0}
    with pytest.raises(ValueError, match="cannot be merged"):
        metric_of("max", [1.0]).merge(metric_of("min", [1.0]))
    with pytest.raises(ValueError, match="metric kind is 'median'"):
        metric_of("median", [1.0])


def test_all_reduce_without_process_group_is_identity():
    metrics = {"x": metric_of("mean", [1.0, 2.0])}
    assert metric_values(all_reduce_metrics(metrics)) == {"x": 1.5}


RANK_PROGRAM = """
import sys, torch, torch.distributed as dist
from harts_titan.rl import Metric, all_reduce_metrics, metric_values
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=3)
every = torch.ones(1, dtype=torch.bool)
# 1e16 + 1 - 1e16 is 0 or 1 in float64, depending on the order; the exact sum is 1.
value = torch.tensor([[1e16, 1.0, -1e16][rank]], dtype=torch.float64)
metrics = {"mean": Metric.over("mean", value, every), "max": Metric.over("max", value, every)}
if rank == 1:
    metrics["only_here"] = Metric.over("sum", value, every)
if rank == 2:
    metrics = dict(reversed(metrics.items()))
values = metric_values(all_reduce_metrics(metrics))
assert values == {"mean": 1.0 / 3, "max": 1e16, "only_here": 1.0}, values
dist.destroy_process_group()
"""


def test_all_reduce_is_exact_over_ranks_with_different_names(tmp_path):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK_PROGRAM, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(3)
    ]
    for process in ranks:
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output.decode()
