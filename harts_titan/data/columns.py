"""Columns of a public rollout file, from Arrow or from parsed JSON, to flat host arrays with every row checked.

The public format (one row per trajectory): ``tokens`` and ``loss_mask``, optional token-aligned ``logprobs``,
``old_logprobs``, ``ref_logprobs``, ``advantages`` and ``weights`` (the last two also one number per row), and optional
``reward``, ``group_id``, ``episode_id``, ``step`` per row. Lists are read from their flat buffers, not token by token.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from harts_titan.data.batch import TOKEN_FIELDS, RolloutBatch
from harts_titan.data.problems import Problems

logger = logging.getLogger(__name__)

REQUIRED_COLUMNS = ("tokens", "loss_mask")
SCALAR_OR_LIST = ("advantages", "weights")
ROW_COLUMNS = ("reward", "group_id", "episode_id", "step")
LIST_COLUMNS = (*REQUIRED_COLUMNS, *TOKEN_FIELDS)
KNOWN_COLUMNS = (*LIST_COLUMNS, *ROW_COLUMNS)

_NEEDED = {"tokens": "integer token ids", "loss_mask": "booleans (or 0/1)"}


@dataclass(frozen=True)
class RowInfo:
    """Names of the rows of one file, for messages."""

    source: str
    location: list[str]
    episode: list[str]


class GroupNumbers:
    """Numbers for groups, shared by all files of one read: integers are kept, names are numbered as they appear."""

    def __init__(self) -> None:
        self.names: dict[str, int] = {}
        self.seen: np.ndarray = np.empty(0, np.int64)

    def integers(self, ids_N: np.ndarray, source: str) -> np.ndarray:
        """Return integer group ids unchanged; refuse them after named ones, whose numbers they could equal."""
        if self.names and (ids_N >= 0).any():
            raise ValueError(f"{source}: group_id holds integers, but other rows use text; use one type for all files")
        self.seen = np.union1d(self.seen, ids_N[ids_N >= 0])
        return ids_N

    def text(self, names: Sequence[str | None], source: str) -> np.ndarray:
        """Return one number per distinct name, int64; missing names give -1."""
        if len(self.seen):
            raise ValueError(f"{source}: group_id holds text, but other rows use integers; use one type for all files")
        known = self.names
        return np.array([-1 if name is None else known.setdefault(name, len(known)) for name in names], dtype=np.int64)

    def local(self, ids_N: np.ndarray, source: str) -> np.ndarray:
        """Return ids local to their file, raised past those of earlier files if they collide."""
        if self.names:
            raise ValueError(f"{source}: group_id holds integers, but other files use text; read them separately")
        if np.isin(ids_N[ids_N >= 0], self.seen).any():
            shift = int(self.seen.max()) + 1
            logger.info("%s: group ids are local to the file and are raised by %d to keep them apart", source, shift)
            ids_N = np.where(ids_N >= 0, ids_N + shift, ids_N)
        self.seen = np.union1d(self.seen, ids_N[ids_N >= 0])
        return ids_N


def require_columns(found: Sequence[str], source: str) -> None:
    """Refuse a file without the required columns.

    Raises:
        ValueError: Naming the file, the missing columns and the columns found.
    """
    missing = [name for name in REQUIRED_COLUMNS if name not in found]
    if missing:
        raise ValueError(
            f"{source}: required column{'s' * (len(missing) > 1)} {', '.join(missing)} missing; "
            f"columns found: {', '.join(found) or 'none'}"
        )


@dataclass(frozen=True)
class TokenColumn:
    """A list column, flat: ``lengths`` entries per row; or one number per row (``lengths`` is None)."""

    values: np.ndarray
    lengths: np.ndarray | None


def arrow_token_column(name: str, column: pa.ChunkedArray, rows: RowInfo, problems: Problems) -> TokenColumn | None:
    """Read one token-aligned Arrow column; None if every row is null.

    Args:
        name: column name.
        column: its data; list, large list or fixed-size list, or a number for ``advantages`` and ``weights``.
        rows: row names.
        problems: null rows and null entries are recorded here.

    Returns:
        The column's flat values.

    Raises:
        ValueError: If the column's type is wrong.
    """
    kind = column.type
    if column.null_count == len(column) and name not in REQUIRED_COLUMNS:
        return None
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    inner = kind.value_type if is_list else kind
    if not (is_list or name in SCALAR_OR_LIST) or not _type_fits(name, inner):
        raise ValueError(f"{rows.source}: column {name} has type {kind}; needed: a list of {_needed(name)} per row")
    null = column.is_null().to_numpy()
    where = {"location": rows.location, "episode": rows.episode}
    problems.add_rows(np.flatnonzero(null).tolist(), name, lambda row: _null_text(name), **where)
    if not is_list:
        return TokenColumn(_arrow_values(column), None)
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy().astype(np.int64)
    # flatten() honours slices and leaves the hidden values of null rows out.
    flat = pa.chunked_array([chunk.flatten() for chunk in column.chunks], type=inner)
    if flat.null_count:
        position = np.flatnonzero(flat.is_null().to_numpy())
        row_of = np.searchsorted(np.cumsum(lengths), position, side="right")
        bad = np.unique(row_of).tolist()
        problems.add_rows(bad, name, lambda row: "null entries; every token needs a value", **where)
    return TokenColumn(_arrow_values(flat), lengths)


def arrow_row_columns(table: pa.Table, source: str, groups: GroupNumbers) -> dict[str, Any]:
    """Read the per-row columns that ``table`` has.

    Args:
        table: the file's rows.
        source: file name.
        groups: numbering of named groups.

    Returns:
        Batch fields by name.

    Raises:
        ValueError: If a column's type is wrong.
    """
    values = {name: table.column(name).to_pylist() for name in ROW_COLUMNS if name in table.column_names}
    return python_row_columns(values, source, groups)


def python_row_columns(values: dict[str, list[Any]], source: str, groups: GroupNumbers) -> dict[str, Any]:
    """Convert per-row values (None = missing) to batch fields.

    Args:
        values: per column, one value per row.
        source: file name.
        groups: numbering of named groups.

    Returns:
        Batch fields by name: ``reward`` float64, ``group_id`` and ``step`` int64, ``episode_id`` list of str.

    Raises:
        ValueError: If a value has the wrong type.
    """
    fields: dict[str, Any] = {}
    for name, column in values.items():
        kinds = {type(value) for value in column} - {type(None)}
        if name == "reward":
            _only(kinds, {int, float, bool}, f"{source}: column reward", "numbers")
            try:
                fields[name] = _as_array([np.nan if value is None else value for value in column], np.float64)
            except ValueError as error:
                raise ValueError(f"{source}: column reward: {error}") from error
        elif name == "episode_id":
            _only(kinds, {str, int}, f"{source}: column episode_id", "text or integers")
            fields[name] = ["" if value is None else str(value) for value in column]
        elif name == "group_id" and kinds == {str}:
            fields[name] = groups.text(column, source)
        else:
            need = "integers" if name == "step" else "integers, or text in every row"
            _only(kinds, {int, float}, f"{source}: column {name}", need)
            fields[name] = _integers(column, f"{source}: column {name}")
            if name == "group_id":
                groups.integers(fields[name], source)
    return fields


def json_token_value(name: str, value: Any) -> np.ndarray:
    """Convert one token-aligned JSON value.

    Args:
        name: column name.
        value: a list, or a number for ``advantages`` and ``weights``.

    Returns:
        int64, bool or float64; 0-D for a number.

    Raises:
        ValueError: If the value has the wrong type or holds nulls.
    """
    allowed: set[type] = {int} if name == "tokens" else {bool, int} if name == "loss_mask" else {int, float}
    if not isinstance(value, list):
        if name in SCALAR_OR_LIST and type(value) in (int, float):
            return _as_array(value, np.float64)
        raise ValueError(f"{'null' if value is None else type(value).__name__}; needed: a list of {_needed(name)}")
    kinds = set(map(type, value))
    if type(None) in kinds:
        raise ValueError("null entries; every token needs a value")
    _only(kinds, allowed, "entries", _needed(name))
    if name == "tokens" and value and not -(2**63) <= min(value) <= max(value) < 2**63:
        raise ValueError(f"an id of {max(value, key=abs)} does not fit into 32 bits")
    return _as_array(value, np.int64 if name in REQUIRED_COLUMNS else np.float64)


def assemble(
    columns: dict[str, TokenColumn], fields: dict[str, Any], rows: RowInfo, problems: Problems
) -> RolloutBatch:
    """Join the columns of one file to a batch.

    Args:
        columns: token-aligned columns by name; the required ones are present.
        fields: per-row batch fields.
        rows: row names.
        problems: what was found so far; unequal lengths are added, then everything is raised.

    Returns:
        The batch.

    Raises:
        ValueError: If anything is wrong, naming up to five rows.
    """
    lengths = columns["tokens"].lengths
    assert lengths is not None, "arrow_token_column refuses a scalar tokens column"
    problems.raise_if_any()
    flat: dict[str, Any] = {}
    for name, column in columns.items():
        if column.lengths is None:
            flat[name] = np.repeat(column.values, lengths)
            continue
        for row in np.flatnonzero(column.lengths != lengths).tolist():
            text = f"{column.lengths[row]} entries, tokens has {lengths[row]}"
            problems.add(rows.location[row], rows.episode[row], name, text)
        flat[name] = column.values
    problems.raise_if_any()
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    _check_integers(flat["tokens"], offsets, "tokens", np.iinfo(np.int32).max, rows, problems)
    if flat["loss_mask"].dtype != np.bool_:
        _check_integers(flat["loss_mask"], offsets, "loss_mask", 1, rows, problems)
    problems.raise_if_any()
    return RolloutBatch(offsets=offsets, location=rows.location, **{"episode_id": rows.episode, **fields}, **flat)


def _check_integers(
    values_S: np.ndarray, offsets_N1: np.ndarray, name: str, largest: int, rows: RowInfo, problems: Problems
) -> None:
    """Record rows with values outside [0, largest], before they are converted to a narrower type."""
    bad_S = (values_S < 0) | (values_S > largest)
    if values_S.dtype.kind == "f":
        bad_S |= values_S != np.floor(values_S)
    position = np.flatnonzero(bad_S)
    row_of = np.searchsorted(offsets_N1, position, side="right") - 1
    for row, first in zip(*np.unique(row_of, return_index=True)):
        at = position[first]
        need = "must be 0 or 1" if largest == 1 else "token ids must be >= 0 and fit into 32 bits"
        text = f"{values_S[at]} at token {at - offsets_N1[row]}; {need}"
        problems.add(rows.location[row], rows.episode[row], name, text)


def _needed(name: str) -> str:
    return _NEEDED.get(name, "numbers" + (" (or one number)" if name in SCALAR_OR_LIST else ""))


def _null_text(name: str) -> str:
    return "null" if name in REQUIRED_COLUMNS else "null, but other rows have values: give it for all rows or for none"


def _type_fits(name: str, kind: pa.DataType) -> bool:
    if name == "tokens":
        return pa.types.is_integer(kind)
    numeric = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    return numeric or (name == "loss_mask" and pa.types.is_boolean(kind))


def _arrow_values(column: pa.ChunkedArray) -> np.ndarray:
    if column.null_count:
        column = pc.fill_null(column, False if pa.types.is_boolean(column.type) else 0)
    return column.to_numpy()


def _only(kinds: set[type], allowed: set[type], what: str, need: str) -> None:
    wrong = kinds - allowed
    if wrong:
        names = ", ".join(sorted(kind.__name__ for kind in wrong))
        raise ValueError(f"{what} of type {names}; needed: {need}")


def _as_array(value: Any, dtype: type[np.generic]) -> np.ndarray:
    """Convert parsed JSON numbers, which have no largest value, to an array."""
    try:
        return np.asarray(value, dtype=dtype)
    except OverflowError as error:
        raise ValueError(f"holds a number too large for {np.dtype(dtype).name}") from error


def _integers(values: list[Any], what: str) -> np.ndarray:
    """Convert integers with gaps (None, or NaN where a writer made floats of them) to int64 with -1 in the gaps."""
    filled = [-1 if value is None or value != value else value for value in values]
    # The range first: int() of an infinity raises.
    if not all(-(2**63) <= value < 2**63 and value == int(value) for value in filled):
        raise ValueError(f"{what} holds numbers that are not 64-bit integers")
    return np.array([int(value) for value in filled], dtype=np.int64)
