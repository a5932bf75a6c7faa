"""What the execution of a work item costs (HARTS A.2)."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

_FORMAT = "harts_titan plan cost 1"
LARGEST = 2**48
"""Largest coefficient and alignment. What a step costs is checked as well: ``Work.phi``."""
LARGEST_BYTES = 2**40
"""Largest size of a shared row or a handed state."""


@dataclass(frozen=True)
class PlanCost:
    """Cost coefficients of a model: integers, so that every rank and machine compares plans alike.

    A work item with ``n`` executed rows, ``A`` attended pairs (query, visible key) and ``R`` recomputed pairs costs
    ``forward_row * n + forward_pair * A`` forward and ``backward_row * n + backward_pair * R`` backward (HARTS A.2);
    a consumer adds ``head_row`` times its complete rows to either (not in the paper, which leaves the head out).
    The unit is floating-point operations, or picoseconds after calibration: only ratios matter.

    Attributes:
        forward_row: per row, forward, everything but attention scores and the LM head.
        forward_pair: per attended pair, forward.
        backward_row: per row, backward, recomputation included if the model recomputes.
        backward_pair: per recomputed pair, backward.
        head_forward_row: LM head and log-probs per complete row, forward.
        head_backward_row: the same, backward.
        row_alignment: executed rows of an item are rounded up to a multiple of this.
        shared_row_bytes: interface tensors a producer keeps for one row, bytes over all layers.
        handed_state_bytes: one boundary state, bytes over all linear-attention layers.
        source: where the coefficients are from, for reports.
    """

    forward_row: int = 1
    forward_pair: int = 0
    backward_row: int = 2
    backward_pair: int = 0
    head_forward_row: int = 0
    head_backward_row: int = 0
    row_alignment: int = 8
    shared_row_bytes: int = 0
    handed_state_bytes: int = 0
    source: str = "rows"

    def __post_init__(self) -> None:
        if not isinstance(self.source, str):
            raise ValueError(f"PlanCost.source is {self.source!r}; must be a text")
        for name, value in vars(self).items():
            if name == "source":
                continue
            whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
            if not whole or value < (name == "row_alignment"):
                raise ValueError(f"PlanCost.{name} is {value!r}; must be a non-negative integer (row_alignment >= 1)")
            limit = LARGEST_BYTES if name.endswith("_bytes") else LARGEST
            if value > limit:
                raise ValueError(f"PlanCost.{name} is {value}; must be at most {limit}, so that sums fit into int64")
        if not (self.forward_row or self.forward_pair or self.backward_row or self.backward_pair):
            raise ValueError("PlanCost: neither rows nor pairs cost anything, so plans cannot be compared")

    def align(self, rows: np.ndarray) -> np.ndarray:
        """Round rows up to the alignment."""
        return -(-np.asarray(rows) // self.row_alignment) * self.row_alignment

    def vector(self) -> np.ndarray:
        """Return the cost coefficients and the alignment in declaration order, for compiled loops: int64 (7,)."""
        return np.array(
            [
                self.forward_row,
                self.forward_pair,
                self.backward_row,
                self.backward_pair,
                self.head_forward_row,
                self.head_backward_row,
                self.row_alignment,
            ],
            np.int64,
        )

    def document(self, report: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return what a cost file holds.

        Args:
            report: how the coefficients were measured, for readers of the file; plain JSON values.
        """
        values = {name: value if name == "source" else int(value) for name, value in asdict(self).items()}
        return {"format": _FORMAT, "cost": values} | ({} if report is None else {"report": report})

    def save(self, path: str | Path, report: dict[str, Any] | None = None) -> None:
        """Write the coefficients to a JSON file that :meth:`load` reads; ``report`` as in :meth:`document`."""
        Path(path).write_text(json.dumps(self.document(report), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> PlanCost:
        """Read coefficients that :meth:`save` wrote.

        Raises:
            ValueError: If the file is missing, of another kind, or does not hold exactly the coefficients.
        """
        if not Path(path).is_file():
            raise ValueError(f"cost file '{path}' does not exist; harts-bench calibrate CONFIG --json FILE writes one")
        try:
            content = json.loads(Path(path).read_text())
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"cost file '{path}' is no JSON: {error}") from error
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            raise ValueError(f"cost file '{path}' is not of format '{_FORMAT}'; harts-bench calibrate writes one")
        values = content.get("cost")
        names = {field.name for field in fields(cls)}
        if not isinstance(values, dict) or set(values) != names:
            raise ValueError(f"cost file '{path}': 'cost' must have exactly {sorted(names)}")
        try:
            return cls(**values)
        except ValueError as error:
            raise ValueError(f"cost file '{path}': {error}") from error
