"""Planners: which prefixes are shared, which trajectories run together, and in which order rows are computed."""

from harts_titan.tree.call_layout import CallLayout
from harts_titan.tree.cost import PlanCost
from harts_titan.tree.events import stage_events
from harts_titan.tree.forest import Forest, build_forest
from harts_titan.tree.invariants import ExternalRows, ProducerCall, check_call
from harts_titan.tree.layout import MODES, Attachment, build_layout, expanded_forests, plan_forest_rounds
from harts_titan.tree.nodes import check_node_start
from harts_titan.tree.partition import Partition, contiguous_partition
from harts_titan.tree.plan import ConsumerPlan, ProducerPlan, StepPlan
from harts_titan.tree.rounds import RoundPlan, plan_rounds
from harts_titan.tree.sorting import neighbour_lcp, sort_trajectories
from harts_titan.tree.stats import PlanStats
from harts_titan.tree.step import plan_step

__all__ = [
    "MODES",
    "Attachment",
    "CallLayout",
    "ConsumerPlan",
    "ExternalRows",
    "Forest",
    "Partition",
    "PlanCost",
    "PlanStats",
    "ProducerCall",
    "ProducerPlan",
    "RoundPlan",
    "StepPlan",
    "build_forest",
    "build_layout",
    "check_call",
    "check_node_start",
    "contiguous_partition",
    "expanded_forests",
    "neighbour_lcp",
    "plan_forest_rounds",
    "plan_rounds",
    "plan_step",
    "sort_trajectories",
    "stage_events",
]
