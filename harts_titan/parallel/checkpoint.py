"""Weights from training checkpoints."""

from __future__ import annotations

from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch import nn


def load_checkpoint(model: nn.Module, folder: str) -> None:
    """Fill a model with the weights of a training checkpoint, on any number of ranks.

    Args:
        model: the model; buffers (expert biases) are loaded as well.
        folder: a checkpoint of the trainer, ``{dump_folder}/checkpoint/step-N``.

    Raises:
        ValueError: If the folder is no checkpoint.
    """
    if not (Path(folder) / ".metadata").is_file():
        raise ValueError(f"'{folder}' is no training checkpoint (it has no .metadata file); name a step-N folder")
    state = model.state_dict()
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state)
