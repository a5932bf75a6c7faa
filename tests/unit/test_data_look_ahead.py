"""Looking one batch ahead neither loses nor repeats a batch, whenever the position is saved."""

from __future__ import annotations

import itertools
import pickle

import numpy as np
import pytest

from harts_titan.data import RolloutBatch, build_loader
from harts_titan.data.look_ahead import LookAhead


def loader(num_workers=0):
    rows = range(12)
    batch = RolloutBatch.from_lists(
        [[5, row + 10, 6] for row in rows], [[0, 0, 1]] * 12, group_id=np.array([0, 0, 1, 2, 1, 2, 2, 3, 4, 4, 4, 4])
    )
    return build_loader(batch, trajectories_per_step=3, shuffle=True, seed=7, num_workers=num_workers)


def rows(step):
    return (step.tokens[step.offsets[:-1] + 1] - 10).tolist()


@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.parametrize("last_peek", [True, False])
def test_resume_after_any_step_equals_uninterrupted(num_workers, last_peek):
    """An epoch has four steps or five; 3 + 4 + 0 + 1 + 6 steps stop within, at and after epoch ends."""
    whole = [rows(step) for step in itertools.islice(iter(loader()), 15)]
    seen, state = [], None
    for count in (3, 4, 0, 1, 6):
        ahead = LookAhead(loader(num_workers))
        if state is not None:
            ahead.load_state_dict(pickle.loads(pickle.dumps(state)))
        iterator = iter(ahead)
        for number in range(count):
            seen.append(rows(next(iterator)))
            if last_peek or number < count - 1:
                assert rows(ahead.peek()) == whole[len(seen)]
        state = ahead.state_dict()
    assert seen == whole[:-1]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_state_is_the_loaders_after_the_batch_in_use(num_workers):
    plain, ahead = loader(num_workers), LookAhead(loader(num_workers))
    assert ahead.state_dict() == plain.state_dict()
    given, looked = iter(plain), iter(ahead)
    for peeks in (0, 1, 2, 1, 0, 0, 1, 1, 1):
        batch, same = next(given), next(looked)
        assert rows(batch) == rows(same)
        shown = [ahead.peek() for _ in range(peeks)]
        assert all(batch is shown[0] for batch in shown)
        assert ahead.state_dict() == plain.state_dict()


def test_a_batch_shown_is_the_object_given_next():
    ahead = LookAhead(loader())
    with pytest.raises(RuntimeError, match="peek before iter"):
        ahead.peek()
    iterator = iter(ahead)
    shown = ahead.peek()
    assert next(iterator) is shown


class Finite:
    """Three batches and a position."""

    def __init__(self):
        self.given = 0

    def __iter__(self):
        while self.given < 3:
            self.given += 1
            yield self.given

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.given = state["given"]


def test_data_may_end():
    ahead = LookAhead(Finite())
    seen = []
    for batch in ahead:
        seen.append((batch, ahead.peek(), ahead.state_dict()["given"]))
    assert seen == [(1, 2, 1), (2, 3, 2), (3, None, 3)]
    assert ahead.peek() is None and ahead.state_dict() == {"given": 3}
    with pytest.raises(StopIteration):
        next(ahead)


def test_loading_a_state_forgets_what_was_looked_at():
    ahead = LookAhead(Finite())
    iterator = iter(ahead)
    assert next(iterator) == 1 and ahead.peek() == 2
    ahead.load_state_dict({"given": 0})
    assert next(iter(ahead)) == 1
