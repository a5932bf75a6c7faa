"""The order in which a pipeline stage runs the work items of a step (HARTS 4.3).

Shapes: W sharing windows, V events.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

PRODUCER_FORWARD, CONSUMER_FORWARD, CONSUMER_BACKWARD, PRODUCER_BACKWARD = range(4)
"""Kinds of an event. The index of a producer event is a window, of a consumer event a slot."""


def stage_events(
    window_ptr_W1: np.ndarray, has_producer_W: np.ndarray, *, in_flight: int, max_live_producers: int
) -> np.ndarray:
    """Return what one pipeline stage runs, in order; the same on every replica (HARTS 4.3).

    Consumers keep the one-forward-one-backward order of an ordinary pipeline: ``in_flight - 1`` forwards, then forward
    and backward in turn, then the backwards left. A window's producer runs forward right before the window's first
    consumer does and backward right after its last consumer did: any earlier or later only holds its activations for
    longer. Where the next window's first consumer runs before this window's last backward, two producers are live.

    Args:
        window_ptr_W1: int64 slots of window ``w`` are ``[window_ptr[w], window_ptr[w+1])``.
        has_producer_W: bool, True where any replica has a producer in the window.
        in_flight: microbatches between their forward and their backward at this stage: 1 without a pipeline, ``P - s``
            at stage ``s`` of ``P``.
        max_live_producers: producers that may be between the start of their forward and the end of their backward.

    Returns:
        int64 (V, 2) kind and index of each event.

    Raises:
        ValueError: If an argument is out of range, or the consumer order alone needs more live producers.
    """
    if in_flight < 1 or max_live_producers < 1:
        raise ValueError(f"in_flight ({in_flight}) and max_live_producers ({max_live_producers}) must be at least 1")
    first, last = np.asarray(window_ptr_W1)[:-1].tolist(), (np.asarray(window_ptr_W1)[1:] - 1).tolist()
    opens = {j: w for w, j in enumerate(first) if has_producer_W[w]}
    closes = {j: w for w, j in enumerate(last) if has_producer_W[w]}
    events: list[tuple[int, int]] = []
    live = most = 0
    for kind, j in _one_forward_one_backward(int(window_ptr_W1[-1]), in_flight):
        if kind == CONSUMER_FORWARD and j in opens:
            events.append((PRODUCER_FORWARD, opens[j]))
            live += 1
            most = max(most, live)
        events.append((kind, j))
        if kind == CONSUMER_BACKWARD and j in closes:
            events.append((PRODUCER_BACKWARD, closes[j]))
            live -= 1
    if most > max_live_producers:
        raise ValueError(
            f"{in_flight} microbatches in flight hold {most} producers at once, more than max_live_producers "
            f"{max_live_producers}; raise max_live_producers, or plan longer windows or fewer pipeline stages"
        )
    return np.array(events, np.int64).reshape(-1, 2)


def _one_forward_one_backward(num_slots: int, in_flight: int) -> Iterator[tuple[int, int]]:
    warm_up = min(in_flight - 1, num_slots)
    for j in range(warm_up):
        yield CONSUMER_FORWARD, j
    for j in range(num_slots):
        if j + warm_up < num_slots:
            yield CONSUMER_FORWARD, j + warm_up
        yield CONSUMER_BACKWARD, j


def largest_live_bytes(events_V2: np.ndarray, bytes_WD: np.ndarray) -> int:
    """Return the most bytes that live producers hold at once on one replica.

    Args:
        events_V2: int64 events of the stage.
        bytes_WD: int64 bytes of each replica's producer in each window.
    """
    held_D = np.zeros(bytes_WD.shape[1], np.int64)
    most = 0
    for kind, w in np.asarray(events_V2).tolist():
        if kind == PRODUCER_FORWARD:
            held_D += bytes_WD[w]
            most = max(most, int(held_D.max()))
        elif kind == PRODUCER_BACKWARD:
            held_D -= bytes_WD[w]
    return most
