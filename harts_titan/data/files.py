"""Read rollout files: public parquet or JSON lines, and the delta-coded path format, with every fault named."""

from __future__ import annotations

import glob
import json
import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from harts_titan.data.batch import RolloutBatch
from harts_titan.data.columns import (
    KNOWN_COLUMNS,
    LIST_COLUMNS,
    REQUIRED_COLUMNS,
    ROW_COLUMNS,
    GroupNumbers,
    RowInfo,
    TokenColumn,
    arrow_row_columns,
    arrow_token_column,
    assemble,
    json_token_value,
    python_row_columns,
    require_columns,
)
from harts_titan.data.densify import check_vocabulary, densify_ids
from harts_titan.data.path_format import INFORMATIVE_COLUMNS, PATH_COLUMNS, is_path_format, read_path_table
from harts_titan.data.problems import Problems

logger = logging.getLogger(__name__)

PARQUET_SUFFIXES = (".parquet", ".pq")
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
SCHEMES = ("step", "tree")
_KINDS = ".parquet, .pq, .jsonl, .ndjson or .json"

PathLike = str | os.PathLike[str]


def read_rollouts(
    path: PathLike | Sequence[PathLike],
    *,
    scheme: str = "tree",
    limit: int = 0,
    vocab_size: int | None = None,
    densify: bool = False,
    hint: str = "set data.path",
) -> RolloutBatch:
    """Read and check rollouts; nothing is left out silently.

    Args:
        path: a file, a folder (its parquet and JSON-lines files, by name), a glob pattern, or a list of those.
        scheme: which trajectories a path-format file gives, "step" or "tree"; public files have one per row.
        limit: read only the first ``limit`` trajectories over all files; 0 = all.
        vocab_size: ids the model has; ids outside are refused. None = any id.
        densify: map the ids in use over all files one to one onto 0..n-1 first.
        hint: what the user can do about a path that names nothing.

    Returns:
        The trajectories in file and row order.

    Raises:
        ValueError: If a file is missing, empty or corrupt, or a column or row is invalid; the message names the file
            and up to five rows with their episodes and fields.
    """
    if scheme not in SCHEMES:
        raise ValueError(f"data.scheme must be one of {', '.join(SCHEMES)}, got {scheme!r}")
    if limit < 0:
        raise ValueError(f"data.limit must be >= 0 (0 = all), got {limit}")
    groups = GroupNumbers()
    batches: list[RolloutBatch] = []
    ignored: set[str] = set()
    files = resolve_files(path, hint=hint)
    for number, file in enumerate(files):
        remaining = limit - sum(batch.num_trajectories for batch in batches) if limit else 0
        if limit and remaining <= 0:
            logger.info("data.limit %d reached: %d of %d files not read", limit, len(files) - number, len(files))
            break
        read = _read_parquet if _is_parquet(file) else _read_json_lines
        batch, unknown = read(file, scheme=scheme, limit=remaining, groups=groups)
        ignored |= unknown
        batches.append(batch)
    if ignored:
        logger.warning("rollouts: unknown columns ignored: %s", ", ".join(sorted(ignored)))
    batch = RolloutBatch.concat(batches) if len(batches) > 1 else batches[0]
    check_unique(batch)
    if densify:
        batch = densify_ids(batch, vocab_size)
    elif vocab_size is not None:
        check_vocabulary(batch, vocab_size)
    logger.info(
        "rollouts: %d trajectories, %d tokens, %d trained, from %d file(s)",
        batch.num_trajectories,
        batch.num_positions,
        np.count_nonzero(batch.loss_mask),
        len(batches),
    )
    return batch


def resolve_files(path: PathLike | Sequence[PathLike], *, hint: str = "set data.path") -> list[str]:
    """Return the rollout files that ``path`` names, folders and patterns expanded in name order.

    Args:
        path: a file, folder or glob pattern, or a list of those.
        hint: what the user can do about a path that names nothing.

    Returns:
        At least one existing, distinct file.

    Raises:
        ValueError: If a part names nothing, or a file is named twice.
    """
    parts = [path] if isinstance(path, str | os.PathLike) else list(path)
    files: list[str] = []
    for part in [os.fspath(item) for item in parts]:
        if os.path.isdir(part):
            inside = sorted(os.listdir(part))
            found = [name for name in inside if name.lower().endswith((*PARQUET_SUFFIXES, *JSON_SUFFIXES))]
            if not found:
                raise ValueError(f"{part}: the folder holds no rollout file ({_KINDS}); {hint}")
            other = sorted(set(inside) - set(found))
            if other:
                logger.info("%s: not rollout files, left aside: %s", part, ", ".join(other))
            files += [os.path.join(part, name) for name in found]
        elif os.path.exists(part):
            files.append(part)
        else:
            matches = sorted(glob.glob(part))
            if not matches:
                raise ValueError(f"{part or '(empty path)'}: no such file, folder or pattern; {hint}")
            files += matches
    if not files:
        raise ValueError(f"no rollout file given; {hint}")
    real = [os.path.realpath(file) for file in files]
    twice = next((file for file, name in zip(files, real) if real.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"{twice}: the file is named twice")
    return files


def check_unique(batch: RolloutBatch) -> None:
    """Refuse two trajectories with the same (episode_id, step); rows without either id are not compared.

    Raises:
        ValueError: Naming both rows.
    """
    problems = Problems("rollouts")
    seen: dict[tuple[str, int], int] = {}
    for row, key in enumerate(zip(batch.episode_id, batch.step.tolist())):
        if not key[0] or key[1] < 0:
            continue
        first = seen.setdefault(key, row)
        if first != row:
            text = f"step {key[1]} of this episode is also at {batch.location[first]}; the pair must be unique"
            problems.add(batch.location[row], batch.episode_id[row], "episode_id/step", text)
    problems.raise_if_any()


def _is_parquet(file: str) -> bool:
    if not os.path.isfile(file):
        raise ValueError(f"{file}: not a file")
    if not os.path.getsize(file):
        raise ValueError(f"{file}: the file is empty")
    with open(file, "rb") as handle:
        magic = handle.read(4) == b"PAR1"
    suffix = Path(file).suffix.lower()
    if not magic and suffix == ".npz":
        raise ValueError(
            f"{file}: an .npz of tokens and offsets has no loss mask, only harts-plan and harts-bench read it; "
            f"needed: {_KINDS}"
        )
    if not magic and suffix not in (*PARQUET_SUFFIXES, *JSON_SUFFIXES):
        raise ValueError(f"{file}: unknown kind of file; needed: {_KINDS} (harts-plan and harts-bench also read .npz)")
    return magic or suffix in PARQUET_SUFFIXES


def _read_parquet(file: str, *, scheme: str, limit: int, groups: GroupNumbers) -> tuple[RolloutBatch, set[str]]:
    # OSError: a truncated page; ArrowInvalid and ArrowException: a broken footer or encoding.
    try:
        parquet = pq.ParquetFile(file)
        names = parquet.schema_arrow.names
        wanted = PATH_COLUMNS if is_path_format(names) else KNOWN_COLUMNS
        table = parquet.read(columns=[name for name in names if name in wanted])
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{file}: not a readable parquet file (truncated or corrupt): {error}") from error
    if not parquet.metadata.num_rows:
        raise ValueError(f"{file}: the file holds no rows")
    if is_path_format(names):
        batch, total = read_path_table(table, file, scheme=scheme, limit=limit, groups=groups)
        logger.info(
            "%s: path format, scheme %s: %d of %d trajectories in %d paths",
            file,
            scheme,
            batch.num_trajectories,
            total,
            table.num_rows,
        )
        return batch, set(names) - set(PATH_COLUMNS) - set(INFORMATIVE_COLUMNS)
    require_columns(names, file)
    if limit and limit < table.num_rows:
        logger.info("%s: the first %d of %d trajectories (data.limit)", file, limit, table.num_rows)
        table = table.slice(0, limit)
    fields = arrow_row_columns(table, file, groups)
    location = [f"{file}:row {row}" for row in range(table.num_rows)]
    rows = RowInfo(file, location, fields.get("episode_id", [""] * table.num_rows))
    problems = Problems("rollouts")
    columns = {}
    for name in LIST_COLUMNS:
        column = arrow_token_column(name, table.column(name), rows, problems) if name in table.column_names else None
        if column is not None:
            columns[name] = column
    return assemble(columns, fields, rows, problems), set(names) - set(KNOWN_COLUMNS)


def _read_json_lines(file: str, *, scheme: str, limit: int, groups: GroupNumbers) -> tuple[RolloutBatch, set[str]]:
    problems = Problems("rollouts")
    values: dict[str, list[np.ndarray | None]] = {name: [] for name in LIST_COLUMNS}
    scalars: dict[str, list[Any]] = {name: [] for name in ROW_COLUMNS}
    location: list[str] = []
    found: set[str] = set()
    episode: list[str] = []
    for line, record in _json_records(file):
        if limit and len(location) == limit:
            logger.info("%s: the first %d trajectories (data.limit); line %d and after not read", file, limit, line)
            break
        location.append(f"{file}:row {len(location)} (line {line})")
        name = record.get("episode_id")
        episode.append("" if name is None else str(name))
        found |= set(record)
        for field in ROW_COLUMNS:
            scalars[field].append(record.get(field))
        for field in LIST_COLUMNS:
            value = record.get(field)
            # A missing optional field is judged below, when it is known whether other rows have it.
            if value is None and (field not in REQUIRED_COLUMNS or field not in record):
                values[field].append(None)
                continue
            try:
                values[field].append(json_token_value(field, value))
            except ValueError as error:
                problems.add(location[-1], episode[-1], field, str(error))
                values[field].append(np.empty(0))
    if not location:
        raise ValueError(f"{file}: the file holds no rows")
    require_columns(sorted(found), file)
    problems.raise_if_any()
    fields = python_row_columns({name: column for name, column in scalars.items() if name in found}, file, groups)
    rows = RowInfo(file, location, episode)
    sizes = [0 if value is None else len(value) for value in values["tokens"]]
    columns = {}
    for field, column in values.items():
        joined = _join(field, column, sizes, rows, problems)
        if joined is not None:
            columns[field] = joined
    return assemble(columns, fields, rows, problems), found - set(KNOWN_COLUMNS)


def _json_records(file: str) -> Iterable[tuple[int, dict[str, Any]]]:
    """Yield (line number from 1, object) for every line that is not blank."""
    with open(file, "rb") as handle:
        for number, raw in enumerate(handle, start=1):
            if not raw.strip():
                continue
            try:
                record = json.loads(raw)
            # ValueError: no JSON, no UTF-8, or an integer of thousands of digits; RecursionError: nested too deep.
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{file}: line {number} is not valid JSON: {error}") from error
            if not isinstance(record, dict):
                raise ValueError(
                    f"{file}: line {number} is a JSON {type(record).__name__}; needed: one object per line"
                )
            yield number, record


def _join(
    name: str, column: list[np.ndarray | None], sizes: list[int], rows: RowInfo, problems: Problems
) -> TokenColumn | None:
    """Flatten one field of all rows; None if no row has it. A row's single number stands for all its tokens."""
    if all(value is None for value in column):
        return None
    flat: list[np.ndarray] = []
    for row, (value, size) in enumerate(zip(column, sizes)):
        if value is None:
            text = "missing, but other rows have it: give it for all rows or for none"
            problems.add(rows.location[row], rows.episode[row], name, "missing" if name in REQUIRED_COLUMNS else text)
            value = np.empty(0)
        flat.append(value if value.ndim else np.full(size, value))
    return TokenColumn(np.concatenate(flat), np.array([len(value) for value in flat], dtype=np.int64))
