"""The optional package behind the OR-Tools baseline."""

from __future__ import annotations

from typing import Any


def import_cp_model() -> Any:
    """Return ``ortools.sat.python.cp_model``.

    Raises:
        ImportError: If OR-Tools is not installed, with the command that installs it.
    """
    try:
        from ortools.sat.python import cp_model  # optional extra
    except ModuleNotFoundError as error:
        raise ImportError("the ortools planner needs OR-Tools: pip install 'harts_titan[ortools]'") from error
    return cp_model
