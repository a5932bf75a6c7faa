"""The delta-coded path format: equal to its documented reader on real files, and its own refusals."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from harts_titan.data import read_rollouts

SHARED = Path(os.environ.get("HARTS_SHARED", Path(__file__).resolve().parents[3] / "shared"))
FILES = ("tiny", "small_tau", "small_toolbench", "small_sweagent", "small_minisweagent")


def two_paths(**changes):
    """A trunk with two steps, and a branch that leaves it inside the second step."""
    base = {
        "episode_id": ["trunk", "branch"],
        "group_id": pa.array([0, 0], pa.int32()),
        "in_stepwise": [True, False],
        "reward": [1.0, None],
        "n_tokens": pa.array([8, 8], pa.int32()),
        "prefix_of": pa.array([-1, 0], pa.int32()),
        "prefix_len": pa.array([0, 6], pa.int32()),
        "suffix_ids": [[10, 11, 12, 13, 14, 15, 16, 17], [26, 27]],
        "step_start": [[2, 5], [2, 5]],
        "step_end": [[4, 8], [4, 8]],
        "step_new": [[True, True], [False, True]],
        "step_reward": [[0.5, 1.0], [0.5, None]],
        "turn_role": [[0, 2, 3, 2]] * 2,
    }
    return pa.table(base | changes)


@pytest.fixture
def write(tmp_path):
    def write_table(table, name="paths.parquet"):
        pq.write_table(table, tmp_path / name)
        return tmp_path / name

    return write_table


def test_tree_scheme_takes_each_new_step_once(write):
    batch = read_rollouts(write(two_paths()))
    assert [batch.trajectory(n).tolist() for n in range(3)] == [
        [10, 11, 12, 13],
        [10, 11, 12, 13, 14, 15, 16, 17],
        [10, 11, 12, 13, 14, 15, 26, 27],
    ]
    assert np.flatnonzero(batch.loss_mask).tolist() == [2, 3, 4 + 5, 4 + 6, 4 + 7, 12 + 5, 12 + 6, 12 + 7]
    assert batch.episode_id == ["trunk", "trunk", "branch"] and batch.step.tolist() == [0, 1, 1]
    assert batch.reward[:2].tolist() == [0.5, 1.0] and np.isnan(batch.reward[2])
    assert batch.location[2].endswith("paths.parquet:row 1 step 1")


def test_step_scheme_takes_every_step_of_independent_episodes(write):
    batch = read_rollouts(write(two_paths()), scheme="step")
    assert batch.lengths.tolist() == [4, 8] and batch.reward.tolist() == [1.0, 1.0]
    assert read_rollouts(write(two_paths()), limit=2).lengths.tolist() == [4, 8]


def test_groups_of_several_path_files_stay_apart(write):
    first = write(two_paths())
    second = write(two_paths(episode_id=["other", "branch 2"]), "second.parquet")
    assert read_rollouts([first, second]).group_id.tolist() == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prefix_of": pa.array([-1, 1])}, r"row 1 \(episode 'branch'\), prefix_of: 1; must be -1 or an earlier row"),
        ({"prefix_len": pa.array([0, 9])}, r"row 1 \(episode 'branch'\), prefix_len: 9, but row 0 has 8 tokens"),
        ({"n_tokens": pa.array([8, 7])}, r"row 1 \(episode 'branch'\), n_tokens: 7, but the row decodes to 8"),
        ({"suffix_ids": [[10, 11, 12, 13, 14, 15, 16, -17], [26, 27]]}, r"row 0 .*suffix_ids: token id -17"),
        (
            {"step_start": [[0, 5], [2, 5]]},
            r"row 0 .*step_start/step_end: step 0 is \[0, 4\).*token 0 cannot",
        ),
        ({"step_end": [[4, 8], [4, 9]]}, r"row 1 .*step_start/step_end: step 1 is \[5, 9\) of 8 tokens"),
        ({"step_new": [[True], [False, True]]}, r"row 0 .*step_new: 1 entries, step_end has 2"),
        ({"suffix_ids": [None, [26, 27]]}, "column suffix_ids must be a list of numbers per row without nulls"),
        ({"n_tokens": ["8", "8"]}, "column n_tokens must be integers without nulls, got string"),
        ({"episode_id": ["same", "same"], "step_new": [[True, True], [True, True]]}, "the pair must be unique"),
    ],
)
def test_inconsistent_rows_are_named(write, changes, message):
    with pytest.raises(ValueError, match=message):
        read_rollouts(write(two_paths(**changes)))


def test_missing_columns_and_empty_schemes_are_named(write):
    with pytest.raises(ValueError, match="path-format column n_tokens missing; columns found: episode_id"):
        read_rollouts(write(two_paths().drop_columns(["n_tokens"])))
    with pytest.raises(ValueError, match="scheme 'step' selects none of its 4 steps"):
        read_rollouts(write(two_paths(in_stepwise=[False, False])), scheme="step")


def load_rollout_io():
    path = SHARED / "tools" / "rollout_io.py"
    if not path.exists():
        pytest.skip(f"real rollout files are not here: {path} is absent (set HARTS_SHARED)")
    spec = importlib.util.spec_from_file_location("rollout_io", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["rollout_io"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("scheme", ["step", "tree"])
@pytest.mark.parametrize("name", FILES)
def test_real_files_equal_the_documented_reader(name, scheme):
    rollout_io = load_rollout_io()
    path = SHARED / "data" / f"rollouts_{name}.parquet"
    batch = read_rollouts(path, scheme=scheme)
    samples = rollout_io.samples(rollout_io.read_paths(str(path)), scheme)
    assert batch.num_trajectories == len(samples)
    label_mask, labels = batch.label_mask, batch.labels
    for n, sample in enumerate(samples):
        span = slice(batch.offsets[n], batch.offsets[n + 1])
        assert np.array_equal(batch.tokens[span], sample.tokens)
        assert np.array_equal(label_mask[span], sample.loss_mask)
        assert np.array_equal(labels[span], sample.labels)
    assert np.array_equal(batch.reward, [sample.reward for sample in samples], equal_nan=True)
    assert batch.group_id.tolist() == [sample.group_id for sample in samples]
    assert batch.episode_id == [sample.episode_id for sample in samples]
    assert batch.step.tolist() == [sample.step for sample in samples]


def test_real_files_densify_as_the_documented_reader_does():
    rollout_io = load_rollout_io()
    path = SHARED / "data" / "rollouts_tiny.parquet"
    batch = read_rollouts(path, densify=True)
    items, used = rollout_io.densify(rollout_io.samples(rollout_io.read_paths(str(path)), "tree"))
    assert np.array_equal(batch.tokens, np.concatenate([item.tokens for item in items]))
    assert np.array_equal(batch.original_id, used)


def test_several_real_files_read_together():
    load_rollout_io()
    paths = [SHARED / "data" / f"rollouts_small_{name}.parquet" for name in ("tau", "toolbench")]
    batch = read_rollouts(paths)
    tau = batch.location.index(next(where for where in batch.location if "toolbench" in where))
    assert tau == 2454 and batch.num_trajectories == 2454 + 345
    assert not set(batch.group_id[:tau].tolist()) & set(batch.group_id[tau:].tolist())
