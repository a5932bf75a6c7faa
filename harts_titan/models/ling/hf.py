"""Published-format checkpoints (``config.json`` and sharded safetensors) in and out, one tensor at a time.

Works on plain and on sharded models: every rank reads what it owns; rank 0 writes.
"""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from harts_titan.models.ling.config import LingArgs
from harts_titan.models.ling.hf_config import to_hf_config
from harts_titan.models.ling.hf_keys import HfEntry, check_keys, hf_entries
from harts_titan.ops.dtypes import wide_dtype
from harts_titan.parallel.sharding import copy_from_full_, copy_row_from_full_, full_tensor

logger = logging.getLogger(__name__)

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _is_rank_zero() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _entry_dtype(entry: HfEntry, tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    if entry.wide or dtype is None:
        return tensor.dtype
    return dtype


def _shards(sizes: list[int], max_shard_bytes: int) -> list[list[int]]:
    """Cut the tensors, in order, into files of at most ``max_shard_bytes``; a larger tensor gets a file of its own."""
    shards: list[list[int]] = [[]]
    used = 0
    for index, size in enumerate(sizes):
        if shards[-1] and used + size > max_shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(index)
        used += size
    return shards


def _published(entries: list[HfEntry], tensors: dict[str, Tensor]) -> Iterator[tuple[HfEntry, Tensor]]:
    """Yield whole tensors in published shape; a sharded parameter is gathered once for all of its experts."""
    gathered_name, gathered = "", torch.empty(0)
    for entry in entries:
        if entry.name != gathered_name:
            gathered_name, gathered = entry.name, full_tensor(tensors[entry.name])
        yield entry, entry.to_published(gathered if entry.expert is None else gathered[entry.expert])


@torch.no_grad()
def save_hf(
    model: nn.Module,
    args: LingArgs,
    folder: str | Path,
    *,
    max_shard_bytes: int = 5 * 10**9,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a model in the published format.

    Every rank must call it (sharded parameters are gathered one at a time); rank 0 writes. ``expert_bias``, ``A_log``
    and ``dt_bias`` keep their own dtype. Multi-token-prediction layers are not part of the model, and the written
    config says so.

    Args:
        model: A whole model, plain or sharded.
        args: Its architecture.
        folder: Created if absent.
        max_shard_bytes: Largest file, unless one tensor is larger.
        dtype: Dtype of the file; default: that of the model.

    Raises:
        ValueError: If ``max_shard_bytes`` is not positive, or the format cannot say the architecture.
    """
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes ({max_shard_bytes}) must be positive")
    config = to_hf_config(args) | {"num_nextn_predict_layers": 0}
    tensors = _tensors(model)
    entries = _experts_together(list(hf_entries(args)))
    dtypes = [_entry_dtype(entry, tensors[entry.name], dtype) for entry in entries]
    sizes = [dtypes[i].itemsize * torch.Size(entry.shape).numel() for i, entry in enumerate(entries)]
    shards = _shards(sizes, max_shard_bytes)
    config["torch_dtype"] = str(dtypes[0]).removeprefix("torch.")
    folder, write = Path(folder), _is_rank_zero()
    if write:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    weight_map: dict[str, str] = {}
    source = _published(entries, tensors)
    for number, shard in enumerate(shards, start=1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else _SINGLE
        content = {}
        for index in shard:
            entry, tensor = next(source)
            weight_map[entry.key] = file_name
            if write:
                content[entry.key] = tensor.to("cpu", dtypes[index]).contiguous().clone()
        if write:
            save_file(content, folder / file_name, metadata={"format": "pt"})
    if write:
        listing = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
        (folder / _INDEX).write_text(json.dumps(listing, indent=2, sort_keys=True) + "\n")
    _barrier()


def _experts_together(entries: list[HfEntry]) -> list[HfEntry]:
    """Order the experts of one parameter next to each other, so that it is gathered once."""
    first: dict[str, int] = {}
    for position, entry in enumerate(entries):
        first.setdefault(entry.name, position)
    return sorted(entries, key=lambda entry: (first[entry.name], entry.expert or 0))


def _weight_map(folder: Path) -> dict[str, str]:
    """File of every tensor, from the index or from the headers."""
    if (folder / _INDEX).exists():
        try:
            return json.loads((folder / _INDEX).read_text())["weight_map"]
        except (json.JSONDecodeError, KeyError) as error:
            raise ValueError(f"{folder / _INDEX} is no index of safetensors files: {error!r}") from error
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} holds no .safetensors file and no {_INDEX}")
    weight_map: dict[str, str] = {}
    for file in files:
        for key in _header_keys(file):
            if key in weight_map:
                raise ValueError(f"{folder}: {key} is in {weight_map[key]} and in {file.name}; remove one of them")
            weight_map[key] = file.name
    return weight_map


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is no readable safetensors file: {error}") from error


def _header_keys(file: Path) -> list[str]:
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header: dict[str, Any] = json.loads(stream.read(length))
    return [key for key in header if key != "__metadata__"]


@torch.no_grad()
def load_hf(model: nn.Module, args: LingArgs, folder: str | Path) -> None:
    """Read a published checkpoint into a model, file by file, one tensor in memory at a time.

    Values are converted to the dtype of each parameter. Multi-token-prediction weights are skipped with a message.

    Args:
        model: On a real device, plain or sharded; every rank reads.
        args: Its architecture; for a folder of unknown architecture build it with ``from_hf_config(folder)``.
        folder: Holds safetensors files, with or without an index.

    Raises:
        ValueError: Naming unknown or missing tensors, missing files, or a tensor of another shape.
    """
    folder = Path(folder)
    weight_map = _weight_map(folder)
    entries = {entry.key: entry for entry in hf_entries(args)}
    skipped = check_keys(args, set(weight_map), set(entries), str(folder))
    absent = sorted({name for name in weight_map.values() if not (folder / name).exists()})
    if absent:
        raise ValueError(f"{folder} lacks {', '.join(absent)}, which its index names")
    if skipped:
        logger.info("%s: skipped %d tensors of the multi-token-prediction layers", folder, len(skipped))
    tensors = _tensors(model)
    keys_of_file: dict[str, list[str]] = {}
    for key, file_name in weight_map.items():
        if key not in skipped:
            keys_of_file.setdefault(file_name, []).append(key)
    for file_name, keys in sorted(keys_of_file.items()):
        with _opened(folder / file_name) as file:
            held = set(file.keys())
            if not held.issuperset(keys):
                names = ", ".join(sorted(set(keys) - held)[:8])
                raise ValueError(f"{folder / file_name} lacks {names}, which the index puts there")
            for key in keys:
                entry, target = entries[key], tensors[entries[key].name]
                tensor = entry.to_native(file.get_tensor(key))
                if not tensor.is_floating_point() or wide_dtype(tensor.dtype) not in (torch.float32, torch.float64):
                    raise ValueError(f"{key} is {tensor.dtype}; quantised checkpoints are not supported")
                if entry.expert is None:
                    copy_from_full_(target, tensor)
                else:
                    copy_row_from_full_(target, entry.expert, tensor)
    _barrier()
