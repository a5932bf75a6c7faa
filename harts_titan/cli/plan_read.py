"""Input of ``harts-plan``: one training step per file, without needless copies of its tokens."""

from __future__ import annotations

import os
import resource
import sys
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from harts_titan.data import OverlongCounts, apply_overlong, read_rollouts
from harts_titan.data.files import resolve_files
from harts_titan.tree import check_node_start

_PIECE = 1 << 20
"""Entries read at once: what reading needs besides the array itself."""
_HINT = "check INPUT"
_LARGEST_ID = np.iinfo(np.int32).max


def read_step(
    path: str, *, capacity: int, dp_degree: int, overlong: str = "error", scheme: str = "tree", limit: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, OverlongCounts]:
    """Read one step's trajectories and refuse what cannot be planned.

    Args:
        path: rollout file, or ``.npz`` with ``tokens`` and ``offsets``, and ``node_start`` where nodes are named.
        capacity: rows a microbatch may have; no trajectory may be longer.
        dp_degree: replicas; each needs a trajectory.
        overlong: what happens to longer trajectories of rollout files.
        scheme: trajectories taken from path files.
        limit: read only the first so many trajectories, 0 for all.

    Returns:
        int32 (S,) tokens, one trajectory after another; int64 (N+1,) offsets; int64 (M,) ascending positions where
        nodes of the rollout tree begin, None if the file names none; what ``overlong`` left out or cut.

    Raises:
        ValueError: Naming the file and the field.
    """
    lost = OverlongCounts()
    if is_npz(path):
        tokens, offsets = read_npz(path, limit=limit)
        node_start = read_node_start(path, tokens.size)
        length_N = np.diff(offsets)
        if length_N.max() > capacity:
            i = int(length_N.argmax())
            raise ValueError(
                f"{path}: offsets: trajectory {i} has {length_N[i]} tokens, more than a microbatch may have; raise "
                f"--capacity ({capacity}) or shorten it"
            )
    else:
        batch = read_rollouts(path, scheme=scheme, limit=limit, hint=_HINT)
        batch, lost = apply_overlong(batch, capacity, overlong, capacity_name="--capacity", policy_name="--overlong")
        tokens, offsets, node_start = batch.tokens, batch.offsets, batch.node_start
    if len(offsets) - 1 < dp_degree:
        raise ValueError(
            f"{path}: {len(offsets) - 1} trajectories cannot give each of {dp_degree} replicas one; lower --dp or put "
            "more trajectories into the step"
        )
    return tokens, offsets, node_start, lost


def is_npz(path: str) -> bool:
    """Return whether an input holds token arrays rather than rollouts."""
    return path.lower().endswith(".npz")


def input_files(path: str) -> list[str]:
    """Return the files that an input stands for: one, or those of a folder or pattern.

    Raises:
        ValueError: If it is not there.
    """
    if not is_npz(path):
        return resolve_files(path, hint=_HINT)
    if not Path(path).is_file():
        raise ValueError(f"{path}: {'is a folder, no .npz file' if Path(path).is_dir() else 'no such file'}")
    return [path]


def read_npz(path: str, *, limit: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Read ``tokens`` and ``offsets`` of an ``.npz`` file, piece by piece: nothing as large as the tokens beside them.

    Integers of another width are converted on the way, each value checked; anything else is refused.

    Args:
        path: the file.
        limit: read only the first so many trajectories, 0 for all.

    Returns:
        int32 (S,) tokens and int64 (N+1,) offsets.

    Raises:
        ValueError: Naming the file and the field.
    """
    input_files(path)
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name.removesuffix(".npy") for name in archive.namelist()]
            missing = [name for name in ("tokens", "offsets") if name not in names]
            if missing:
                raise ValueError(f"{path}: lacks {' and '.join(missing)}; it has {', '.join(names) or 'nothing'}")
            with _member(archive, path, "tokens") as (stream, dtype, num_tokens):
                offsets = _read_offsets(archive, path, num_tokens)
                if limit and len(offsets) > limit + 1:
                    offsets = offsets[: limit + 1]
                tokens = np.empty(int(offsets[-1]), np.int32)
                for lo, piece in _pieces(stream, dtype, tokens.size, path, "tokens"):
                    bad = (piece < 0) | (piece > _LARGEST_ID)
                    if bad.any():
                        at = int(bad.argmax())
                        raise ValueError(
                            f"{path}: tokens: {piece[at]} at {_place(offsets, lo + at)}; token ids must be in "
                            f"[0, {_LARGEST_ID}] (remove padding)"
                        )
                    tokens[lo : lo + piece.size] = piece
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError, RuntimeError) as error:
        raise ValueError(f"{path}: no readable .npz file: {error}") from error
    return tokens, offsets


def read_node_start(path: str, num_tokens: int) -> np.ndarray | None:
    """Read where nodes of the rollout tree begin: ``node_start`` of an ``.npz`` file, None if it has none.

    Args:
        path: the file.
        num_tokens: tokens that were read; positions behind them are left out.

    Raises:
        ValueError: Naming the file and the field.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            if not {"node_start", "node_start.npy"} & set(archive.namelist()):
                return None
            with _member(archive, path, "tokens") as (_, _, size):
                pass
            with _member(archive, path, "node_start") as (stream, dtype, count):
                pieces = [piece for _, piece in _pieces(stream, dtype, count, path, "node_start")]
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError, RuntimeError) as error:
        raise ValueError(f"{path}: no readable .npz file: {error}") from error
    try:
        node_start = check_node_start(np.concatenate([np.zeros(0, dtype), *pieces]), size)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return node_start[node_start < num_tokens]


@contextmanager
def _member(archive: zipfile.ZipFile, path: str, field: str) -> Iterator[tuple[IO[bytes], np.dtype[Any], int]]:
    """Open an array of the archive and read its header: stream at the first entry, dtype, number of entries."""
    names = archive.namelist()
    with archive.open(field if field in names else f"{field}.npy") as stream:
        try:
            version = np.lib.format.read_magic(stream)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(stream)
        except ValueError as error:
            raise ValueError(f"{path}: {field}: no readable array: {error}") from error
        # A pickled array is refused here, before anything of it is read.
        if not np.issubdtype(dtype, np.integer) or len(shape) != 1:
            kind = "int32" if field == "tokens" else "int64"
            raise ValueError(f"{path}: {field}: is {dtype} of shape {shape}; must be a 1-D integer array ({kind})")
        yield stream, dtype, int(shape[0])


def _pieces(
    stream: IO[bytes], dtype: np.dtype[Any], count: int, path: str, field: str
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (first entry, array) over the first ``count`` entries of an opened array."""
    for lo in range(0, count, _PIECE):
        need = min(_PIECE, count - lo) * dtype.itemsize
        parts = []
        while need and (part := stream.read(need)):
            parts.append(part)
            need -= len(part)
        if need:
            raise ValueError(f"{path}: {field}: the file ends early")
        yield lo, np.frombuffer(parts[0] if len(parts) == 1 else b"".join(parts), dtype)


def _read_offsets(archive: zipfile.ZipFile, path: str, num_tokens: int) -> np.ndarray:
    with _member(archive, path, "offsets") as (stream, dtype, count):
        pieces = [piece for _, piece in _pieces(stream, dtype, count, path, "offsets")]
    raw = np.concatenate([np.zeros(0, dtype), *pieces])
    if raw.size < 2:
        raise ValueError(f"{path}: offsets: {raw.size} entries; one trajectory needs two, N need N+1")
    if raw[0] != 0 or raw[-1] != num_tokens:
        raise ValueError(
            f"{path}: offsets: run from {raw[0]} to {raw[-1]}; must run from 0 to the number of tokens ({num_tokens})"
        )
    # Compared, not subtracted: unsigned offsets would wrap.
    falls = raw[1:] <= raw[:-1]
    if falls.any():
        i = int(falls.argmax())
        what = "is empty" if raw[i + 1] == raw[i] else f"ends at {raw[i + 1]}, before it starts at {raw[i]}"
        raise ValueError(f"{path}: offsets: trajectory {i} {what}; offsets must increase")
    return raw.astype(np.int64)


def _place(offsets: np.ndarray, entry: int) -> str:
    trajectory = int(np.searchsorted(offsets, entry, side="right")) - 1
    return f"entry {entry} (trajectory {trajectory}, token {entry - int(offsets[trajectory])})"


def resident_bytes() -> int:
    """Return the resident memory of this process now, in bytes (its peak where the system does not tell)."""
    statm = Path("/proc/self/statm")
    if statm.is_file():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return peak_bytes()


def peak_bytes() -> int:
    """Return the largest resident memory this process has had, in bytes."""
    status = Path("/proc/self/status")
    if status.is_file():
        # getrusage also counts what the process that started this one had resident.
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    # Kibibytes, except on macOS.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
