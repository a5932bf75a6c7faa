"""Rollout intake: files, padded batches, checks, over-long rows, and training steps that resume exactly."""

from harts_titan.data.batch import RolloutBatch, label_aligned, token_aligned
from harts_titan.data.densify import check_vocabulary, densify_ids
from harts_titan.data.files import read_rollouts, resolve_files
from harts_titan.data.loader import RolloutDataset, RolloutLoader, build_loader
from harts_titan.data.overlong import OverlongCounts, apply_overlong
from harts_titan.data.padded import from_padded, to_padded
from harts_titan.data.writer import write_rollouts

__all__ = [
    "OverlongCounts",
    "RolloutBatch",
    "RolloutDataset",
    "RolloutLoader",
    "apply_overlong",
    "build_loader",
    "check_vocabulary",
    "densify_ids",
    "from_padded",
    "label_aligned",
    "read_rollouts",
    "resolve_files",
    "to_padded",
    "token_aligned",
    "write_rollouts",
]
