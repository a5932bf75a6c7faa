"""Event lists of pipeline stages against a brute simulation."""

from itertools import product

import numpy as np
import pytest

from harts_titan.tree import stage_events
from harts_titan.tree.invariants_plan import check_events

SHAPES = [
    [1],
    [3],
    [1, 1],
    [1, 1, 1, 1, 1],
    [2, 2],
    [6, 6, 1],
    [1, 4, 1, 2],
    [3, 1, 1, 1, 3],
    [2, 5, 2, 1],
]


def one_forward_one_backward(num_slots, in_flight):
    """Return the order of a pipeline without producers, step by step from its definition."""
    order, forwards, backwards = [], 0, 0
    while backwards < num_slots:
        if forwards < num_slots and forwards - backwards < in_flight:
            order.append((1, forwards))
            forwards += 1
        else:
            order.append((2, backwards))
            backwards += 1
    return order


def live_producers(order, window_of_slot, has_producer):
    """Return the most producers live at once: windows between their first forward and their last backward."""
    most = 0
    last = {w: max(j for j, v in enumerate(window_of_slot) if v == w) for w in set(window_of_slot)}
    for at in range(len(order)):
        begun = {window_of_slot[j] for kind, j in order[: at + 1] if kind == 1}
        # A producer's backward runs right after the last backward: live until then.
        over = {w for w in begun if (2, last[w]) in order[:at]}
        most = max(most, sum(has_producer[w] for w in begun - over))
    return most


@pytest.mark.parametrize("in_flight", range(1, 7))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_events_against_brute_simulation(shape, in_flight):
    ptr = np.concatenate([[0], np.cumsum(shape)])
    window_of_slot = np.repeat(np.arange(len(shape)), shape).tolist()
    order = one_forward_one_backward(int(ptr[-1]), in_flight)
    refused = accepted = 0
    for has, limit in product(product((False, True), repeat=len(shape)), range(1, 5)):
        needed = live_producers(order, window_of_slot, has)
        arguments = {"in_flight": in_flight, "max_live_producers": limit}
        if needed > limit:
            refused += 1
            with pytest.raises(ValueError, match=f"hold {needed} producers at once, more than max_live"):
                stage_events(ptr, np.array(has), **arguments)
            continue
        accepted += 1
        events = stage_events(ptr, np.array(has), **arguments)
        check_events(events, ptr, np.array(has), **arguments)
        listed = [tuple(event) for event in events.tolist()]
        assert [event for event in listed if event[0] in (1, 2)] == order
        live = 0
        for at, (kind, w) in enumerate(listed):
            live += (kind == 0) - (kind == 3)
            assert live <= needed <= limit
            if kind == 0:
                assert listed[at + 1] == (1, ptr[w])
            if kind == 3:
                assert listed[at - 1] == (2, ptr[w + 1] - 1)
        assert sorted(w for kind, w in listed if kind == 0) == np.flatnonzero(has).tolist()
        assert sorted(w for kind, w in listed if kind == 3) == np.flatnonzero(has).tolist()
    assert accepted and (refused or in_flight == 1 or len(shape) == 1)


def test_next_producer_may_start_before_the_current_one_ends():
    events = stage_events(np.array([0, 1, 2]), np.ones(2, bool), in_flight=2, max_live_producers=2)
    assert events.tolist() == [[0, 0], [1, 0], [0, 1], [1, 1], [2, 0], [3, 0], [2, 1], [3, 1]]


@pytest.mark.parametrize(("in_flight", "limit"), ((0, 1), (1, 0)))
def test_refusals(in_flight, limit):
    with pytest.raises(ValueError, match="must be at least 1"):
        stage_events(np.array([0, 1]), np.ones(1, bool), in_flight=in_flight, max_live_producers=limit)


@pytest.mark.parametrize("in_flight", (1, 2, 3))
def test_every_damaged_event_list_is_caught(in_flight):
    ptr, has = np.array([0, 2, 3, 5]), np.array([True, False, True])
    arguments = {"in_flight": in_flight, "max_live_producers": 2}
    events = stage_events(ptr, has, **arguments)
    damaged = [events[:-1], np.concatenate([events, events[-1:]]), events[:, :1]]
    for i in range(len(events)):
        damaged += [np.delete(events, i, 0), np.insert(events, i, events[i], 0)]
        for column, delta in product((0, 1), (-1, 1)):
            changed = events.copy()
            changed[i, column] += delta
            damaged.append(changed)
        for j in range(i):
            changed = events.copy()
            changed[[i, j]] = changed[[j, i]]
            damaged.append(changed)
    # A producer may start earlier than it must, as long as the limit holds: those lists are right.
    early = 0
    for changed in damaged:
        try:
            check_events(changed, ptr, has, **arguments)
        except ValueError as error:
            assert "invariant '" in str(error)
        else:
            early += 1
            listed = [tuple(event) for event in changed.tolist()]
            assert sorted(listed) == sorted(tuple(event) for event in events.tolist())
            assert [e for e in listed if e[0] != 0] == [tuple(e) for e in events.tolist() if e[0] != 0]
    assert early < len(events)
    with pytest.raises(ValueError, match="live producers stay within the limit"):
        check_events(events, ptr, has, in_flight=in_flight, max_live_producers=0)
