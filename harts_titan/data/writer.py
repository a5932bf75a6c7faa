"""Write a batch as a public rollout file; ``read_rollouts`` gives the same batch back."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from harts_titan.data.batch import TOKEN_FIELDS, RolloutBatch
from harts_titan.data.files import JSON_SUFFIXES, PARQUET_SUFFIXES


def write_rollouts(batch: RolloutBatch, path: str | os.PathLike[str]) -> None:
    """Write the trajectories of a batch, one row each, in order; densified ids are mapped back.

    The file appears only when it is complete, so an interrupted run leaves no half-written rollouts.

    Args:
        batch: what to write; fields that no trajectory has are left out.
        path: ends in ``.parquet`` or ``.jsonl``.

    Raises:
        ValueError: If the suffix is neither, or there is no trajectory.
    """
    target = Path(path)
    suffix = target.suffix.lower()
    if suffix not in (*PARQUET_SUFFIXES, *JSON_SUFFIXES):
        raise ValueError(f"{path}: unknown kind of file; needed: .parquet or .jsonl")
    if not batch.num_trajectories:
        raise ValueError(f"{path}: there is no trajectory to write")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        if suffix in PARQUET_SUFFIXES:
            pq.write_table(_table(batch), partial, compression="zstd")
        else:
            with open(partial, "w", encoding="utf-8") as handle:
                handle.writelines(_lines(batch))
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def _token_columns(batch: RolloutBatch) -> dict[str, np.ndarray]:
    columns = {"tokens": batch.original_tokens.astype(np.int32), "loss_mask": batch.loss_mask}
    return columns | {name: getattr(batch, name) for name in TOKEN_FIELDS if getattr(batch, name) is not None}


def _row_columns(batch: RolloutBatch) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {
        "reward": [None if np.isnan(value) else float(value) for value in batch.reward],
        "group_id": [None if value < 0 else value for value in batch.group_id.tolist()],
        "episode_id": [name or None for name in batch.episode_id],
        "step": [None if value < 0 else value for value in batch.step.tolist()],
    }
    return {name: column for name, column in columns.items() if any(value is not None for value in column)}


def _table(batch: RolloutBatch) -> pa.Table:
    offsets = pa.array(batch.offsets)
    arrays: dict[str, pa.Array] = {
        name: pa.LargeListArray.from_arrays(offsets, pa.array(values)) for name, values in _token_columns(batch).items()
    }
    return pa.table(arrays | {name: pa.array(column) for name, column in _row_columns(batch).items()})


def _lines(batch: RolloutBatch) -> Iterator[str]:
    per_token, per_row = _token_columns(batch), _row_columns(batch)
    for n in range(batch.num_trajectories):
        span = slice(batch.offsets[n], batch.offsets[n + 1])
        record: dict[str, Any] = {name: values[span].tolist() for name, values in per_token.items()}
        record |= {name: column[n] for name, column in per_row.items() if column[n] is not None}
        yield json.dumps(record) + "\n"
