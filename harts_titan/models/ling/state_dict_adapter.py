"""Convert state dicts between the model and the published format, for torchtitan's checkpointing."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

from harts_titan.models.ling.config import LingArgs
from harts_titan.models.ling.hf_keys import HfEntry, check_keys, hf_entries
from harts_titan.parallel.sharding import local_box

logger = logging.getLogger(__name__)


class LingStateDictAdapter(StateDictAdapter):
    """Split 3-D expert parameters into one tensor per expert and back; rename and reshape the rest.

    Sharded expert parameters are split into the experts this rank owns, so no rank ever holds more than its shard.
    :func:`harts_titan.models.ling.hf.save_hf` and ``load_hf`` need no state dict at all.
    """

    def __init__(self, model_args: LingArgs, hf_assets_path: str | None) -> None:
        super().__init__(model_args, hf_assets_path)
        self._args = model_args
        self._entries = {entry.key: entry for entry in hf_entries(model_args)}
        self._by_name: dict[str, list[HfEntry]] = {}
        for entry in self._entries.values():
            self._by_name.setdefault(entry.name, []).append(entry)
        self._sharded: dict[str, DTensor] = {}

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the published keys and shapes of a model's (or a stage's) state dict.

        Raises:
            ValueError: If a key is no parameter of this architecture.
        """
        unknown = sorted(set(state_dict) - set(self._by_name))
        if unknown:
            raise ValueError(f"state dict: {len(unknown)} unknown tensors: {', '.join(unknown[:8])}")
        result: dict[str, Any] = {}
        for name, value in state_dict.items():
            entries = self._by_name[name]
            if entries[0].expert is None:
                result[entries[0].key] = entries[0].to_published(value)
            elif isinstance(value, DTensor):
                result |= self._split_sharded(name, value)
            else:
                result |= {entry.key: value[entry.expert] for entry in entries}
        return result

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the model's state dict.

        After ``to_hf`` of a sharded state dict the experts are put back into the shards they came from; otherwise the
        dict must be a whole checkpoint.

        Raises:
            ValueError: Naming unknown or missing tensors.
        """
        expected = set(self._entries)
        if self._sharded:
            # A rank (and a stage) holds its own part only; what it holds must still be known.
            expected &= set(hf_state_dict)
        skipped = check_keys(self._args, set(hf_state_dict), expected, "state dict")
        if skipped:
            logger.info("skipped %d tensors of the multi-token-prediction layers", len(skipped))
        result: dict[str, Any] = {}
        experts: dict[str, dict[int, Tensor]] = {}
        for key, value in hf_state_dict.items():
            if key in skipped:
                continue
            entry = self._entries[key]
            if entry.expert is None:
                result[entry.name] = entry.to_native(value)
            else:
                experts.setdefault(entry.name, {})[entry.expert] = value
        for name, by_expert in experts.items():
            result[name] = self._join(name, by_expert)
        return result

    def _split_sharded(self, name: str, value: DTensor) -> dict[str, Any]:
        local, offset = local_box(value)
        if local.shape[1:] != value.shape[1:]:
            raise ValueError(f"{name} is sharded as {value.placements}; only the expert dimension may be sharded")
        self._sharded[name] = value
        # Entries are in expert order.
        owned = self._by_name[name][offset[0] : offset[0] + local.shape[0]]
        return {entry.key: local[row] for row, entry in enumerate(owned)}

    def _join(self, name: str, by_expert: dict[int, Tensor]) -> Tensor:
        stacked = torch.stack([by_expert[expert] for expert in sorted(by_expert)])
        if name not in self._sharded:
            return stacked
        like = self._sharded[name]
        # The placements are those the experts were taken from.
        return DTensor.from_local(
            stacked, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )
