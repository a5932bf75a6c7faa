"""Over-long trajectories and densified ids: nothing is lost without a count, nothing is mapped twice."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from harts_titan.data import (
    OverlongCounts,
    RolloutBatch,
    apply_overlong,
    check_vocabulary,
    densify_ids,
    read_rollouts,
    write_rollouts,
)


def batch():
    return RolloutBatch.from_lists(
        [[1, 2, 3], [1, 2, 3, 4, 5, 6], [1, 9, 8, 7]],
        [[0, 0, 1], [0, 0, 0, 0, 1, 1], [0, 1, 1, 1]],
        advantages=[[0, 1, 2], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3]],
        reward=[0, 1, 2],
        episode_id=["a", "b", "c"],
        location=["f:row 0", "f:row 1", "f:row 2"],
    )


def test_what_fits_is_untouched():
    whole = batch()
    kept, counts = apply_overlong(whole, 6, "error")
    assert kept is whole and counts == OverlongCounts()


def test_error_names_rows_lengths_and_settings():
    message = (
        r"rollouts longer than tree.max_tokens \(3\): 2 invalid entries\n"
        r"  f:row 1 \(episode 'b'\), tokens: 6 tokens; raise tree.max_tokens or set data.overlong(.|\n)*f:row 2"
    )
    with pytest.raises(ValueError, match=message):
        apply_overlong(batch(), 3, "error")


def test_drop_leaves_whole_trajectories_out_and_counts(caplog):
    with caplog.at_level(logging.WARNING):
        kept, counts = apply_overlong(batch(), 4, "drop")
    assert kept.episode_id == ["a", "c"] and kept.num_dropped == 1
    assert (counts.dropped, counts.truncated, counts.lost_tokens, counts.lost_trained_tokens) == (1, 0, 6, 2)
    assert "data.overlong = drop: 1 of 3 trajectories exceed 4 tokens (longest 6); 6 tokens lost" in caplog.text


def test_truncate_keeps_the_first_tokens_and_counts(caplog):
    with caplog.at_level(logging.WARNING):
        kept, counts = apply_overlong(batch(), 3, "truncate")
    assert kept.tokens.tolist() == [1, 2, 3, 1, 2, 3, 1, 9, 8] and kept.num_truncated == 2
    assert kept.loss_mask.tolist() == [False, False, True, False, False, False, False, True, True]
    assert kept.advantages.tolist() == [0, 1, 2] * 3 and kept.reward.tolist() == [0, 1, 2]
    assert (counts.dropped, counts.truncated, counts.lost_tokens, counts.lost_trained_tokens) == (0, 2, 4, 3)
    assert "2 of 3 trajectories" in caplog.text


def test_overlong_refusals():
    with pytest.raises(ValueError, match=r"data.overlong must be one of error, drop, truncate, got 'cut'"):
        apply_overlong(batch(), 4, "cut")
    with pytest.raises(ValueError, match="would leave nothing: all 3 trajectories"):
        apply_overlong(batch(), 2, "drop")
    with pytest.raises(ValueError, match="at least 2 tokens, got 1"):
        apply_overlong(batch(), 1, "truncate")


@pytest.mark.parametrize("largest", [151_645, 2**31 - 1])
def test_densify_is_one_to_one_and_reversible(caplog, largest):
    rng = np.random.default_rng(0)
    rows = [rng.choice([0, 5, 99, largest, 70_000], size=rng.integers(2, 9)).tolist() for _ in range(30)]
    source = RolloutBatch.from_lists(rows, [[0] * len(row) for row in rows])
    with caplog.at_level(logging.INFO):
        dense = densify_ids(source, vocab_size=5)
    assert np.array_equal(dense.original_tokens, source.tokens)
    assert dense.tokens.max() == 4 and len(np.unique(dense.original_id)) == 5
    assert [r.message for r in caplog.records] == [
        f"data.densify: 5 distinct token ids (largest {largest}) are mapped one to one onto 0..4"
    ]
    assert np.array_equal(dense.select([3, 1]).original_tokens, source.select([3, 1]).tokens)
    assert np.array_equal(densify_ids(dense.select([0])).original_tokens, source.select([0]).tokens)


def test_densify_names_both_numbers_when_the_vocabulary_is_too_small():
    message = "data.densify: the rollouts use 9 distinct token ids, but the model vocabulary has 8"
    with pytest.raises(ValueError, match=message):
        densify_ids(batch(), vocab_size=8)


def test_densify_spans_all_files_and_written_ids_are_the_original_ones(tmp_path):
    write_rollouts(RolloutBatch.from_lists([[900, 20]], [[0, 1]]), tmp_path / "a.jsonl")
    write_rollouts(RolloutBatch.from_lists([[20, 500]], [[0, 1]]), tmp_path / "b.parquet")
    both = read_rollouts(tmp_path, densify=True, vocab_size=3)
    assert both.tokens.tolist() == [2, 0, 0, 1]
    write_rollouts(both, tmp_path / "c.jsonl")
    assert read_rollouts(tmp_path / "c.jsonl").tokens.tolist() == [900, 20, 20, 500]
    alone = read_rollouts(tmp_path / "a.jsonl", densify=True)
    with pytest.raises(ValueError, match="different densified ids"):
        RolloutBatch.concat([alone, both])


def test_ids_outside_the_vocabulary_name_the_settings():
    message = r"f:row 2 \(episode 'c'\), tokens: 9 at token 1; the model vocabulary has 7 ids; .*data.densify = true"
    with pytest.raises(ValueError, match=message):
        check_vocabulary(batch(), 7)
    check_vocabulary(batch(), 10)
