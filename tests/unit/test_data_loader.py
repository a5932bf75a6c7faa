"""Training steps: whole groups, endless epochs, and exact resumption."""

from __future__ import annotations

import itertools
import pickle

import numpy as np
import pytest
import torch

from harts_titan.data import RolloutBatch, RolloutDataset, build_loader

GROUPS = [0, 0, 1, 2, 1, 2, 2, 3, 4, 4, 4, 4]


def batch(group_id=GROUPS, **fields):
    n = len(group_id)
    return RolloutBatch.from_lists(
        [[5, row + 10, 6] for row in range(n)], [[0, 0, 1]] * n, group_id=np.array(group_id), **fields
    )


def rows(step):
    return (step.tokens[step.offsets[:-1] + 1] - 10).tolist()


def take(iterator, count):
    return [rows(step) for step in itertools.islice(iterator, count)]


def test_a_step_is_whole_groups_and_an_epoch_is_everything_once():
    steps = take(iter(build_loader(batch(), trajectories_per_step=4)), 6)
    assert steps == [[0, 1, 2, 4], [3, 5, 6, 7], [8, 9, 10, 11]] * 2
    steps = take(iter(build_loader(batch(), trajectories_per_step=5)), 3)
    assert steps == [[0, 1, 2, 4, 3, 5, 6], [7, 8, 9, 10, 11], [0, 1, 2, 4, 3, 5, 6]]
    steps = take(iter(build_loader(batch(), trajectories_per_step=8)), 2)
    assert steps == [[0, 1, 2, 4, 3, 5, 6, 7], [8, 9, 10, 11]], "what is left is a step of its own"


def test_zero_takes_the_whole_file():
    assert take(iter(build_loader(batch())), 2) == [list(range(12))] * 2


def test_without_groups_episodes_stay_together():
    free = batch([-1] * 4, episode_id=["a", "b", "a", ""])
    assert take(iter(build_loader(free, trajectories_per_step=1)), 3) == [[0, 2], [1], [3]]


def test_shuffle_differs_by_epoch_and_seed_and_covers_everything():
    def epochs(seed):
        dataset = RolloutDataset(batch(list(range(12))), trajectories_per_step=4, shuffle=True, seed=seed)
        return [np.concatenate(dataset.steps_of_epoch(epoch)).tolist() for epoch in range(3)]

    first = epochs(0)
    assert first == epochs(0) and first != epochs(1)
    assert first[0] != first[1] != first[2] and all(sorted(epoch) == list(range(12)) for epoch in first)


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_resume_twice_and_across_an_epoch_end_equals_uninterrupted(num_workers):
    def loader():
        return build_loader(batch(), trajectories_per_step=3, shuffle=True, seed=7, num_workers=num_workers)

    whole = take(iter(build_loader(batch(), trajectories_per_step=3, shuffle=True, seed=7)), 14)
    assert take(iter(loader()), 14) == whole, "the same sequence for every number of workers"
    seen, state = [], None
    # 3 + 4 + 0 + 1 + 6: in the middle, across an epoch's end, with nothing in between, and again.
    for count in (3, 4, 0, 1, 6):
        current = loader()
        if state is not None:
            current.load_state_dict(pickle.loads(pickle.dumps(state)))
        seen += take(iter(current), count) if count else []
        state = current.state_dict()
    assert seen == whole


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_state_saved_while_iterating_does_not_disturb_the_run(num_workers):
    loader = build_loader(batch(), trajectories_per_step=3, num_workers=num_workers)
    iterator, seen, states = iter(loader), [], []
    for _ in range(9):
        seen.append(rows(next(iterator)))
        states.append(loader.state_dict())
    assert seen == take(iter(build_loader(batch(), trajectories_per_step=3)), 9)
    for at in (0, 4, 7):
        again = build_loader(batch(), trajectories_per_step=3, num_workers=num_workers)
        again.load_state_dict(states[at])
        assert take(iter(again), 8 - at) == seen[at + 1 :]


def test_the_global_generator_is_not_touched():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    take(iter(build_loader(batch(), trajectories_per_step=3, shuffle=True)), 5)
    assert torch.equal(before, torch.get_rng_state())


def test_all_fields_travel_through_a_worker():
    source = batch(logprobs=[[0, -0.5, -1.0]] * 12, reward=np.arange(12.0), location=[f"f:row {n}" for n in range(12)])
    step = next(iter(build_loader(source, trajectories_per_step=4, num_workers=1)))
    want = source.select([0, 1, 2, 4])
    assert np.array_equal(step.logprobs, want.logprobs) and np.array_equal(step.reward, want.reward)
    assert step.location == want.location and step.tokens.dtype == np.int32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trajectories_per_step": 4}, "trajectories_per_step was 3, is 4"),
        ({"seed": 1}, "seed was 0, is 1"),
        ({"shuffle": True}, "shuffle was False, is True"),
        ({"num_workers": 1}, "num_workers was 0, is 1"),
        ({"batch_or_dataset": batch(reward=np.ones(12))}, "rollouts was '[0-9a-f]+', is"),
    ],
)
def test_a_state_of_other_data_or_settings_is_refused(change, message):
    settings = {"batch_or_dataset": batch(), "trajectories_per_step": 3}
    state = build_loader(**settings).state_dict()
    with pytest.raises(ValueError, match=f"the saved data position does not fit: {message}"):
        build_loader(**(settings | change)).load_state_dict(state)


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="no trajectory to train on"):
        build_loader(batch().select([]))
    with pytest.raises(ValueError, match=r"trajectories_per_step .* must be >= 0"):
        build_loader(batch(), trajectories_per_step=-1)
    with pytest.raises(ValueError, match="num_workers must be >= 0"):
        build_loader(batch(), num_workers=-1)
    with pytest.raises(ValueError, match="a RolloutDataset brings its own"):
        build_loader(RolloutDataset(batch()), shuffle=True)
