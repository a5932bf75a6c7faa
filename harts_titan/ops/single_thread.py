"""Run small CPU operations on one thread, so that their bits do not depend on the thread count."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def single_thread(device: torch.device) -> Iterator[None]:
    """Set one intra-op thread inside the context if ``device`` is a CPU, and restore the count afterwards.

    With several threads an element-wise kernel is cut at places that depend on the thread count, and at each cut the
    last elements of a piece go through scalar code, whose ``exp`` rounds differently from the vector code's. One
    thread cuts nothing. It is also faster for tensors of some thousand elements: the threads' barriers cost more than
    the work, above all on a loaded machine. The count is a property of the calling thread; switching costs about 1 us.
    """
    threads = torch.get_num_threads()
    if device.type != "cpu" or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
