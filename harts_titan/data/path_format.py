"""The delta-coded path format: one parquet row per root-to-leaf path, many samples per path.

    ids(row) = ids(prefix_of)[:prefix_len] + suffix_ids          (prefix_of == -1: suffix_ids is everything)

A trajectory is (path, assistant step k): the history up to and including that step, ``ids[:step_end[k]]``; the tokens
``[step_start[k], step_end[k])`` are trained. Scheme ``tree`` takes the steps with ``step_new`` of every path (a step
shared by several paths was sampled once and belongs to the first) with reward ``step_reward[k]``; scheme ``step`` takes
every step of the paths with ``in_stepwise``, with the path's ``reward``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from harts_titan.data.batch import RolloutBatch
from harts_titan.data.columns import GroupNumbers
from harts_titan.data.problems import Problems

MARKER_COLUMNS = ("prefix_of", "suffix_ids")
"""Columns that tell a path file from a public one."""

_SCALARS = ("n_tokens", "prefix_of", "prefix_len", "group_id")
_LISTS = ("suffix_ids", "step_start", "step_end", "step_new", "step_reward")
PATH_COLUMNS = ("episode_id", "reward", "in_stepwise", *_SCALARS, *_LISTS)
INFORMATIVE_COLUMNS = ("task", "source", "policy", "trial", "turn_role", "turn_start")
"""Columns of the format that describe a path and are not needed for training."""


@dataclass(frozen=True)
class _Ragged:
    """A list column: row r is values[offsets[r]:offsets[r+1]]."""

    values: np.ndarray
    offsets: np.ndarray

    def row(self, r: int) -> np.ndarray:
        return self.values[self.offsets[r] : self.offsets[r + 1]]


def is_path_format(column_names: list[str]) -> bool:
    """Tell whether a parquet file with these columns is in the path format."""
    return all(name in column_names for name in MARKER_COLUMNS)


def read_path_table(
    table: pa.Table, source: str, *, scheme: str, limit: int, groups: GroupNumbers
) -> tuple[RolloutBatch, int]:
    """Expand a path table into its training trajectories.

    Args:
        table: the file's rows.
        source: file name, for messages.
        scheme: "step" or "tree", see the module text.
        limit: at most this many trajectories, in file order; 0 = all.
        groups: group numbers used by other files; path groups are local to their file and are shifted past them.

    Returns:
        The batch, and the number of trajectories in the file under this scheme.

    Raises:
        ValueError: If a column is missing or a row is inconsistent, or if the scheme selects nothing.
    """
    missing = [name for name in PATH_COLUMNS if name not in table.column_names]
    if missing:
        found = ", ".join(table.column_names)
        raise ValueError(f"{source}: path-format column {', '.join(missing)} missing; columns found: {found}")
    scalar = {name: _scalar(table, name, source) for name in _SCALARS}
    lists = {name: _ragged(table, name, source) for name in _LISTS}
    episode = ["" if name is None else str(name) for name in table.column("episode_id").to_pylist()]
    location = [f"{source}:row {row}" for row in range(table.num_rows)]
    paths = _decode(scalar, lists["suffix_ids"], location, episode)
    _check_steps(lists, scalar["n_tokens"], location, episode)

    counts = np.diff(lists["step_end"].offsets)
    path_J = np.repeat(np.arange(table.num_rows), counts)
    if scheme == "tree":
        chosen_J = lists["step_new"].values.astype(bool)
        reward_J = lists["step_reward"].values.astype(np.float64)
    else:
        chosen_J = pc.fill_null(table.column("in_stepwise"), False).to_numpy().astype(bool)[path_J]
        reward_J = pc.fill_null(pc.cast(table.column("reward"), pa.float64()), np.nan).to_numpy()[path_J]
    sample = np.flatnonzero(chosen_J)
    total = len(sample)
    if not total:
        raise ValueError(f"{source}: scheme {scheme!r} selects none of its {len(path_J)} steps; use the other scheme")
    if limit:
        sample = sample[:limit]
    path_N = path_J[sample]
    step_N = sample - lists["step_end"].offsets[path_N]
    group_N = groups.local(scalar["group_id"][path_N], source)
    lengths = lists["step_end"].values[sample].astype(np.int64)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    tokens = np.concatenate([paths[p][:end] for p, end in zip(path_N.tolist(), lengths.tolist())])
    # +1 where the trained span opens; it closes with the trajectory, where the running sum restarts.
    opens = np.zeros(offsets[-1] + 1, np.int8)
    opens[offsets[:-1] + lists["step_start"].values[sample]] = 1
    opens[offsets[1:]] -= 1
    batch = RolloutBatch(
        tokens=tokens,
        offsets=offsets,
        loss_mask=np.cumsum(opens[:-1], dtype=np.int8).astype(bool),
        reward=reward_J[sample],
        group_id=group_N,
        episode_id=[episode[p] for p in path_N],
        step=step_N,
        location=[f"{location[p]} step {k}" for p, k in zip(path_N, step_N)],
    )
    return batch, total


def _scalar(table: pa.Table, name: str, source: str) -> np.ndarray:
    column = table.column(name)
    if not pa.types.is_integer(column.type) or column.null_count:
        raise ValueError(f"{source}: column {name} must be integers without nulls, got {column.type}")
    return column.to_numpy().astype(np.int64)


def _ragged(table: pa.Table, name: str, source: str) -> _Ragged:
    column = table.column(name)
    is_list = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
    inner = column.type.value_type if is_list else None
    fits = is_list and (pa.types.is_integer(inner) or pa.types.is_boolean(inner) or pa.types.is_floating(inner))
    if not fits or column.null_count:
        raise ValueError(f"{source}: column {name} must be a list of numbers per row without nulls, got {column.type}")
    flat = pa.chunked_array([chunk.flatten() for chunk in column.chunks], type=inner)
    if flat.null_count:
        if name != "step_reward":
            raise ValueError(f"{source}: column {name} holds null entries")
        flat = pc.fill_null(flat, np.nan)
    lengths = pc.list_value_length(column).to_numpy().astype(np.int64)
    return _Ragged(flat.to_numpy(), np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]))


def _decode(
    scalar: dict[str, np.ndarray], suffix: _Ragged, location: list[str], episode: list[str]
) -> list[np.ndarray]:
    """Undo the delta coding: the token ids of every path, int32."""
    problems = Problems("path file")
    paths: list[np.ndarray] = []
    for row, (base, keep, size) in enumerate(zip(scalar["prefix_of"], scalar["prefix_len"], scalar["n_tokens"])):
        ids = suffix.row(row)
        if base >= row or base < -1:
            problems.add(location[row], episode[row], "prefix_of", f"{base}; must be -1 or an earlier row")
        elif base >= 0 and not 0 <= keep <= len(paths[base]):
            text = f"{keep}, but row {base} has {len(paths[base])} tokens"
            problems.add(location[row], episode[row], "prefix_len", text)
        elif base >= 0:
            ids = np.concatenate([paths[base][:keep], ids])
        if len(ids) and not 0 <= ids.min() <= ids.max() <= np.iinfo(np.int32).max:
            bad = ids.min() if ids.min() < 0 else ids.max()
            problems.add(
                location[row], episode[row], "suffix_ids", f"token id {bad}; must be >= 0 and fit into 32 bits"
            )
        if len(ids) != size and not problems.count:
            problems.add(location[row], episode[row], "n_tokens", f"{size}, but the row decodes to {len(ids)} tokens")
        paths.append(ids.astype(np.int32))
    problems.raise_if_any()
    return paths


def _check_steps(lists: dict[str, _Ragged], num_tokens: np.ndarray, location: list[str], episode: list[str]) -> None:
    problems = Problems("path file")
    counts = np.diff(lists["step_end"].offsets)
    for name in ("step_start", "step_new", "step_reward"):
        other = np.diff(lists[name].offsets)
        for row in np.flatnonzero(other != counts).tolist():
            problems.add(location[row], episode[row], name, f"{other[row]} entries, step_end has {counts[row]}")
    problems.raise_if_any()
    path_J = np.repeat(np.arange(len(counts)), counts)
    start_J, end_J = lists["step_start"].values, lists["step_end"].values
    bad = np.flatnonzero((start_J < 1) | (end_J <= start_J) | (end_J > num_tokens[path_J]))
    for j in bad.tolist():
        row = int(path_J[j])
        text = f"step {j - lists['step_end'].offsets[row]} is [{start_J[j]}, {end_J[j]}) of {num_tokens[row]} tokens"
        problems.add(location[row], episode[row], "step_start/step_end", text + "; token 0 cannot be trained")
    problems.raise_if_any()
