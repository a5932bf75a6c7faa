from __future__ import annotations

import math

import numpy as np
import pytest

from harts_titan.rl import ObjectiveConfig, build_objective, position_advantages, trajectory_advantages


def relative(reward, group, **kwargs):
    kwargs.setdefault("method", "group_relative")
    return trajectory_advantages(np.asarray(reward, dtype=float), np.asarray(group), **kwargs)


def test_group_relative_by_hand():
    # Group 7: rewards 1, 2, 3: mean 2, sample deviation 1. Group 4: 0, 4: mean 2, sample deviation sqrt(8).
    got = relative([1, 0, 2, 4, 3], [7, 4, 7, 4, 7], eps=1e-12)
    assert got == pytest.approx([-1, -2 / math.sqrt(8), 0, 2 / math.sqrt(8), 1])
    assert relative([1, 0, 2, 4, 3], [7, 4, 7, 4, 7], method="group_mean").tolist() == [-1, -2, 0, 2, 1]
    assert relative([1, 0, 2], [-1, -1, -1], method="reward").tolist() == [1, 0, 2]


def test_eps_is_added_to_the_deviation():
    assert relative([0, 2], [0, 0], eps=0.5) == pytest.approx([-1 / (math.sqrt(2) + 0.5), 1 / (math.sqrt(2) + 0.5)])


def test_an_episode_counts_once():
    """Step-wise samples: three rows of one won episode, one row of a lost one: the mean is 1/2, not 3/4."""
    ids = ["won", "won", "won", "lost"]
    assert relative([1, 1, 1, 0], [0] * 4, episode_ids=ids, method="group_mean").tolist() == [0.5, 0.5, 0.5, -0.5]
    got = relative([1, 1, 1, 0], [0] * 4, episode_ids=ids, eps=1e-12)
    assert got == pytest.approx([math.sqrt(0.5)] * 3 + [-math.sqrt(0.5)])


def test_rows_of_an_episode_may_differ():
    # Episode a: rows 0 and 2, mean 1. Episode b: 3. Group mean 2: own reward minus 2.
    got = relative([0, 2, 3], [0, 0, 0], episode_ids=["a", "a", "b"], method="group_mean")
    assert got.tolist() == [-2, 0, 1]
    got = relative([0, 2, 3], [0, 0, 0], episode_ids=["a", "a", "b"], eps=1e-12)
    assert got == pytest.approx([-2 / math.sqrt(2), 0, 1 / math.sqrt(2)])


@pytest.mark.parametrize("method", ["group_relative", "group_mean"])
def test_group_of_one_gives_zero(method):
    assert relative([5.0, 1.0, 3.0], [0, 1, 1], method=method)[0] == 0
    # One episode of several rows is still a group of one.
    assert relative([5.0, 4.0], [0, 0], episode_ids=["a", "a"], method=method).tolist() == [0, 0]


def test_equal_rewards_give_exactly_zero():
    assert (relative([0.1] * 7, [3] * 7) == 0).all()
    assert (relative([0.1] * 7, [3] * 7, method="group_mean") == 0).all()
    # Episodes equal, rows of one of them not: no deviation to divide by.
    assert relative([0, 2, 1], [0, 0, 0], episode_ids=["a", "a", "b"]).tolist() == [0, 0, 0]


def test_against_loops_on_random_groups():
    rng = np.random.default_rng(0)
    for _ in range(50):
        episodes = rng.integers(0, 12, 40)
        group_of_episode = rng.integers(0, 4, 12)
        reward = rng.normal(size=40)
        expected = np.zeros(40)
        deviation = np.zeros(40)
        for row in range(40):
            group = group_of_episode[episodes[row]]
            members = sorted({e for e in episodes if group_of_episode[e] == group})
            means = [np.mean(reward[episodes == e]) for e in members]
            if len(members) > 1:
                expected[row] = reward[row] - np.mean(means)
                deviation[row] = np.std(means, ddof=1)
        ids = [f"episode-{e}" for e in episodes]
        groups = group_of_episode[episodes] * 1000
        np.testing.assert_allclose(
            relative(reward, groups, episode_ids=ids, method="group_mean"), expected, rtol=1e-12, atol=1e-14
        )
        np.testing.assert_allclose(
            relative(reward, groups, episode_ids=ids), expected / (deviation + 1e-6), rtol=1e-11, atol=1e-13
        )


@pytest.mark.parametrize("method", ["reward", "group_mean", "group_relative"])
def test_missing_reward_names_the_episode(method):
    with pytest.raises(
        ValueError, match=r"a\.jsonl:row 2: episode 'two' \(row 1\) has no reward \(NaN\).*rl\.advantage"
    ):
        relative(
            [1, math.nan, 2],
            [0, 0, 0],
            method=method,
            episode_ids=["one", "two", "three"],
            locations=["a.jsonl:row 1", "a.jsonl:row 2", "a.jsonl:row 3"],
        )
    with pytest.raises(ValueError, match=r"row 0 has reward inf"):
        relative([math.inf, 1], [0, 0], method=method)


def test_missing_reward_of_an_untrained_row_is_legal():
    got = relative([1, math.nan, 3, math.nan], [0, 0, 0, -1], trained_N=[5, 0, 2, 0], method="group_mean")
    assert got.tolist() == [-1, 0, 1, 0]
    # An untrained row with a reward counts in its group.
    got = relative([1, 5, 3], [0, 0, 0], trained_N=np.array([True, False, True]), method="group_mean")
    assert got.tolist() == [-2, 2, 0]
    got = relative([math.nan], [0], trained_N=[0], method="reward")
    assert got.tolist() == [0]


def test_missing_group_id_is_refused():
    with pytest.raises(ValueError, match=r"episode 'b' \(row 1\) has no group_id, which rl\.advantage = 'group_mean'"):
        relative([1, 2], [0, -1], episode_ids=["a", "b"], method="group_mean")
    with pytest.raises(ValueError, match=r"has no group_id.*\(2 such rows\)"):
        trajectory_advantages(np.array([1.0, 2.0]), None, method="group_relative")
    assert trajectory_advantages(np.array([1.0, 2.0]), None, method="reward").tolist() == [1, 2]


def test_episode_in_two_groups_is_refused():
    with pytest.raises(ValueError, match=r"episode 'a' .*lies in groups \[3, 8\]"):
        relative([1, 2, 3], [3, 3, 8], episode_ids=["a", "b", "a"])


def test_other_bad_arguments():
    with pytest.raises(ValueError, match="group_id_N has 1 entries"):
        relative([1, 2], [0])
    with pytest.raises(ValueError, match=r"rl\.advantage is 'given'"):
        relative([1, 2], [0, 0], method="given")
    assert relative([], []).tolist() == []


def test_position_advantages():
    assert position_advantages(np.array([1.5, -2.0]), np.array([0, 2, 5])).tolist() == [1.5, 1.5, -2, -2, -2]


def test_objective_chooses_the_source():
    reward, group = np.array([1.0, 3.0]), np.array([0, 0])
    assert build_objective(ObjectiveConfig(objective="grpo", advantage_eps=1e-12)).advantages(
        reward, group
    ) == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)])
    assert build_objective(ObjectiveConfig(objective="grpo", advantage="given")).advantages(reward, group) is None
    assert build_objective(ObjectiveConfig(objective="reinforce")).advantages(reward).tolist() == [1, 3]
    # An objective that needs no rewards accepts missing ones.
    assert build_objective(ObjectiveConfig(objective="sft")).advantages(np.array([math.nan])) is None
    assert build_objective(ObjectiveConfig(objective="ppo_clip")).advantages(np.array([math.nan])) is None
