"""Collect what is wrong with an input, so that one message names the first few offending rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable

MAX_REPORTED = 5
"""Offending rows written out in one message; the rest is counted."""


class Problems:
    """Findings about one input (files, or an in-memory batch), raised together as one ``ValueError``.

    Args:
        source: what is being checked, as it opens the message ("rollouts FILE").
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self.count = 0
        self._lines: list[str] = []

    def add(self, location: str, episode: str, field: str, text: str) -> None:
        """Record one finding: where (file and row), which episode ("" if unknown), which field, and what is wrong."""
        self.count += 1
        if len(self._lines) < MAX_REPORTED:
            name = f" (episode {episode!r})" if episode else ""
            self._lines.append(f"{location}{name}, {field}: {text}")

    def add_rows(
        self,
        rows: Iterable[int],
        field: str,
        text: Callable[[int], str],
        *,
        location: list[str],
        episode: list[str],
    ) -> None:
        """Record one finding per row index; ``text(row)`` is only called for rows that will be shown."""
        for row in rows:
            shown = text(int(row)) if len(self._lines) < MAX_REPORTED else ""
            self.add(location[row], episode[row], field, shown)

    def raise_if_any(self) -> None:
        """Raise the collected findings.

        Raises:
            ValueError: If anything was recorded.
        """
        if not self.count:
            return
        rest = self.count - len(self._lines)
        lines = [*self._lines, f"... and {rest} more"] if rest else self._lines
        head = f"{self.source}: {self.count} invalid {'entry' if self.count == 1 else 'entries'}"
        raise ValueError("\n  ".join([head, *lines]))
