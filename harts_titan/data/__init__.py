"""Rollout intake: files, padded batches, checks, over-long rows, and training steps that resume exactly."""

from harts_titan.data.batch import IGNORE_INDEX, RolloutBatch, label_aligned, token_aligned
from harts_titan.data.densify import check_vocabulary, densify_ids
from harts_titan.data.files import read_rollouts, resolve_files

__all__ = [
    "IGNORE_INDEX",
    "RolloutBatch",
    "check_vocabulary",
    "densify_ids",
    "label_aligned",
    "read_rollouts",
    "resolve_files",
    "token_aligned",
]
