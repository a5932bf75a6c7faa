"""One batch ahead of a loader, without the loader's saved position running ahead too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from harts_titan.data.batch import RolloutBatch


class LookAhead:
    """Iterates over a loader and can show the batch after the one in use.

    A batch is in use from the moment it is given until the next one is. The state is the loader's at the batch in use:
    a batch that was only looked at is given again after a resume.

    Args:
        loader: iterable with ``state_dict`` and ``load_state_dict``, such as :class:`RolloutLoader`.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._iterator: Iterator[RolloutBatch] | None = None
        self._state: dict[str, Any] | None = None
        # The batch looked at, or None at the end, and the loader's state behind it.
        self._next: tuple[RolloutBatch | None, dict[str, Any]] | None = None

    def __iter__(self) -> LookAhead:
        self._iterator, self._state, self._next = iter(self.loader), None, None
        return self

    def peek(self) -> RolloutBatch | None:
        """Return the batch that the next call of ``next`` gives; None if there is none."""
        if self._iterator is None:
            raise RuntimeError("peek before iter: there is no position to look ahead from")
        if self._next is None:
            # The state of the batch in use must be read before the loader moves on.
            self._state = self.state_dict()
            self._next = (next(self._iterator, None), self.loader.state_dict())
        return self._next[0]

    def __next__(self) -> RolloutBatch:
        batch = self.peek()
        assert self._next is not None
        if batch is None:
            raise StopIteration
        self._state, self._next = self._next[1], None
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's position after the batch in use."""
        return self.loader.state_dict() if self._state is None else self._state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after the batch that was in use when the state was saved; takes effect at the next ``iter``.

        Args:
            state_dict: what :meth:`state_dict` returned.
        """
        self._iterator = self._state = self._next = None
        self.loader.load_state_dict(state_dict)
