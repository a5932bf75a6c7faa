"""Objectives as functions of per-position log-probs and metadata, independent of how the positions were computed."""

from harts_titan.rl.advantages import position_advantages, trajectory_advantages
from harts_titan.rl.config import ObjectiveConfig
from harts_titan.rl.kl import kl_estimate
from harts_titan.rl.metrics import Metric, all_reduce_metrics, merge_metrics, metric_values, metrics_on_host
from harts_titan.rl.objective import Objective, ObjectiveOutput, build_objective
from harts_titan.rl.positions import PositionBatch, StepTotals
from harts_titan.rl.registry import PolicyTerm, objective_names, register_objective

__all__ = [
    "Metric",
    "Objective",
    "ObjectiveConfig",
    "ObjectiveOutput",
    "PolicyTerm",
    "PositionBatch",
    "StepTotals",
    "all_reduce_metrics",
    "build_objective",
    "kl_estimate",
    "merge_metrics",
    "metric_values",
    "metrics_on_host",
    "objective_names",
    "position_advantages",
    "register_objective",
    "trajectory_advantages",
]
