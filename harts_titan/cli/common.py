"""What every command shares: options, configuration loading, JSON output, one-line errors."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

console = Console()


def add_common_options(parser: argparse.ArgumentParser, *, scheme: str = "data.scheme") -> None:
    """Add ``--json``, ``--scheme`` and ``--limit``, which every command has; ``scheme`` is named as its default."""
    parser.add_argument("--json", metavar="FILE", help="write the result as JSON to FILE ('-' for standard output)")
    parser.add_argument(
        "--scheme",
        choices=("step", "tree"),
        help=f"path format: independent episodes (step) or all branches (tree); default {scheme}",
    )
    parser.add_argument("--limit", type=int, metavar="N", help="read only the first N trajectories (default all)")


def config_overrides(options: argparse.Namespace) -> list[str]:
    """Return the common options as overrides of the configuration's ``[data]`` section."""
    overrides = []
    if options.scheme is not None:
        overrides += ["--data.scheme", options.scheme]
    if options.limit is not None:
        if options.limit < 1:
            raise ValueError(f"--limit ({options.limit}) must be at least 1")
        overrides += ["--data.limit", str(options.limit)]
    if getattr(options, "rollouts", None) is not None:
        overrides += ["--data.path", options.rollouts]
    return overrides


def path_hint(options: argparse.Namespace) -> str:
    """Return what the user can do about rollouts that are not there: where the command got their path from."""
    return "set data.path" if getattr(options, "rollouts", None) is None else "check --rollouts"


def check_target(target: str | None, option: str) -> None:
    """Refuse a file that could not be written, before the work that fills it.

    Raises:
        ValueError: If the folder is missing or the target is a folder.
    """
    if target is None or target == "-":
        return
    if not target:
        raise ValueError(f"{option}: the name of the file is empty")
    if Path(target).is_dir():
        raise ValueError(f"{option}: '{target}' is a folder; name a file")
    if not Path(target).absolute().parent.is_dir():
        raise ValueError(f"{option}: the folder '{Path(target).parent}' does not exist")
    if not os.access(target if Path(target).exists() else Path(target).absolute().parent, os.W_OK):
        raise ValueError(f"{option}: no permission to write '{target}'")


@contextlib.contextmanager
def writing(target: str, option: str) -> Iterator[None]:
    """Name option and file where a file cannot be written: a full disk says neither.

    Raises:
        ValueError: In place of the ``OSError``.
    """
    try:
        yield
    except OSError as error:
        raise ValueError(f"{option}: '{target}' cannot be written: {error.strerror or error}") from error


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON")


def write_json(result: dict[str, Any], target: str | None) -> None:
    """Write ``result`` to a file, to standard output for ``-``, nowhere for ``None``."""
    if target is None:
        return
    text = json.dumps(result, indent=2, default=_plain)
    if target == "-":
        sys.stdout.write(text + "\n")
        return
    with writing(target, "--json"):
        Path(target).write_text(text + "\n")


def table(
    title: str, rows: Sequence[tuple[Any, ...]], *, header: Sequence[str] | None = None, to_stderr: bool = False
) -> None:
    """Print a table: in each row a name, a value and, where ``header`` names more columns, what belongs to them."""
    view = Table(title=title, show_header=header is not None)
    for column in header or ():
        view.add_column(column, overflow="fold")
    for row in rows:
        view.add_row(*(f"{x:,}" if isinstance(x, int) and not isinstance(x, bool) else str(x) for x in row))
    (Console(stderr=True) if to_stderr else console).print(view)


def run(main: Callable[[Sequence[str]], int], argv: Sequence[str] | None = None) -> int:
    """Run a command; a user's mistake ends in one line on standard error and exit status 2."""
    if "OMP_NUM_THREADS" not in os.environ:
        # As run_train.sh: the small kernels of CPU runs lose more to thread barriers than they gain from threads.
        torch.set_num_threads(1)
    logging.basicConfig(level=os.environ.get("HARTS_LOG", "WARNING"), format="%(levelname)s %(message)s")
    try:
        return main(sys.argv[1:] if argv is None else argv)
    except (ValueError, OSError, ImportError) as error:
        if os.environ.get("HARTS_TRACEBACK"):
            raise
        sys.stderr.write(f"error: {error}\n")
        return 2
