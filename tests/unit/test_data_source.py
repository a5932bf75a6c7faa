"""Section ``[data]``: named files, generated rollouts, and refusals."""

from __future__ import annotations

import numpy as np
import pytest

from harts_titan.data import RolloutBatch, write_rollouts
from harts_titan.data.source import SYNTHETIC, rollouts_from_config
from harts_titan.job_config import Data

LARGE = 100_000


def test_an_empty_path_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"data.path is empty; name a rollout file, folder or glob, or 'synthetic'"):
        rollouts_from_config(Data(), vocab_size=8, folder=tmp_path)
    assert not list(tmp_path.iterdir())


def test_settings_reach_the_reader(tmp_path):
    batch = RolloutBatch.from_lists(
        [[7, LARGE, 9], [7, LARGE, 8, 8], [7, 9]], [[0, 1, 1], [0, 0, 0, 1], [0, 1]], episode_id=["a", "b", "c"]
    )
    path = str(tmp_path / "rollouts.jsonl")
    write_rollouts(batch, path)
    whole = rollouts_from_config(Data(path=path), vocab_size=LARGE + 1, folder=tmp_path)
    assert whole.tokens.tolist() == batch.tokens.tolist() and whole.episode_id == ["a", "b", "c"]
    first = rollouts_from_config(Data(path=path, limit=2), vocab_size=LARGE + 1, folder=tmp_path)
    assert first.episode_id == ["a", "b"]
    dense = rollouts_from_config(Data(path=path, densify=True), vocab_size=8, folder=tmp_path)
    assert dense.tokens.max() == 3 and dense.original_id[dense.tokens].tolist() == batch.tokens.tolist()
    with pytest.raises(ValueError, match=str(LARGE)):
        rollouts_from_config(Data(path=path), vocab_size=8, folder=tmp_path)
    # A file is read where it is; nothing is written beside it.
    assert [p.name for p in tmp_path.iterdir()] == ["rollouts.jsonl"]


def test_generated_rollouts_are_written_once_and_named_by_what_decides_them(tmp_path):
    folder = tmp_path / "outputs"
    first = Data(path=SYNTHETIC, synthetic_trajectories=6, seed=3)
    batch = rollouts_from_config(first, vocab_size=512, folder=folder)
    (file,) = folder.iterdir()
    assert file.name == "rollouts_6_3.parquet" and batch.num_trajectories == 6
    written = file.stat().st_mtime_ns
    again = rollouts_from_config(first, vocab_size=512, folder=str(folder))
    assert np.array_equal(again.tokens, batch.tokens) and file.stat().st_mtime_ns == written
    for other in (Data(path=SYNTHETIC, synthetic_trajectories=7, seed=3), Data(path=SYNTHETIC, seed=4)):
        assert not np.array_equal(rollouts_from_config(other, vocab_size=512, folder=folder).tokens, batch.tokens)
    assert len(list(folder.iterdir())) == 3


def test_generated_rollouts_are_those_of_the_seed(tmp_path):
    data = Data(path=SYNTHETIC, synthetic_trajectories=6, seed=3)
    one, two = (rollouts_from_config(data, vocab_size=512, folder=tmp_path / name) for name in ("a", "b"))
    assert np.array_equal(one.tokens, two.tokens) and np.array_equal(one.reward, two.reward)
