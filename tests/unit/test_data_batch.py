"""RolloutBatch: alignment (docs/notation.md), selection, joining, and every refusal at construction."""

from __future__ import annotations

import numpy as np
import pytest

from harts_titan.data import RolloutBatch, label_aligned, token_aligned


def make(**fields):
    defaults = {"tokens": [[7, 8, 9, 4], [7, 8, 5]], "loss_mask": [[0, 0, 1, 1], [0, 0, 1]]}
    return RolloutBatch.from_lists(**(defaults | fields))


def test_alignment_example_of_the_design():
    batch = RolloutBatch.from_lists([[7, 8, 9, 4]], [[0, 0, 1, 1]])
    assert batch.labels.tolist() == [8, 9, 4, -100]
    assert batch.label_mask.tolist() == [False, True, True, False]
    of_label = np.array([-1.0, -2.0, -3.0, 99.0])
    assert token_aligned(of_label, batch.offsets, 0.0).tolist() == [0.0, -1.0, -2.0, -3.0]
    assert batch.num_positions == 4


def test_alignment_stays_inside_each_trajectory():
    offsets = np.array([0, 3, 3, 5])
    values = np.array([10, 11, 12, 20, 21])
    assert label_aligned(values, offsets, -1).tolist() == [11, 12, -1, 21, -1]
    assert token_aligned(values, offsets, -1).tolist() == [-1, 10, 11, -1, 20]


def test_alignments_are_inverse_on_labelled_positions():
    rng = np.random.default_rng(0)
    offsets = np.concatenate([[0], np.cumsum(rng.integers(2, 9, 20))])
    values = rng.normal(size=offsets[-1])
    values[offsets[:-1]] = 0.0
    back = token_aligned(label_aligned(values, offsets, 5.0), offsets, 0.0)
    assert np.array_equal(back, values)


def test_defaults_mean_none():
    batch = make()
    assert batch.tokens.dtype == np.int32 and batch.offsets.dtype == np.int64 and batch.loss_mask.dtype == bool
    assert np.isnan(batch.reward).all() and batch.group_id.tolist() == [-1, -1] and batch.step.tolist() == [-1, -1]
    assert batch.episode_id == ["", ""] and batch.logprobs is None
    assert batch.lengths.tolist() == [4, 3]


def test_one_number_per_trajectory_is_repeated():
    batch = make(advantages=[2.0, -1.0], weights=[[1, 1, 0.5, 2], [1, 1, 1]])
    assert batch.advantages.tolist() == [2, 2, 2, 2, -1, -1, -1]
    assert batch.weights.tolist() == [1, 1, 0.5, 2, 1, 1, 1]


def test_select_reorders_repeats_and_concat_joins():
    batch = make(logprobs=[[0, 0, -1, -2], [0, 0, -3]], reward=[1, 0], episode_id=["a", "b"], group_id=[3, 4])
    picked = batch.select([1, 0, 1])
    assert picked.tokens.tolist() == [7, 8, 5, 7, 8, 9, 4, 7, 8, 5]
    assert picked.logprobs.tolist() == [0, 0, -3, 0, 0, -1, -2, 0, 0, -3]
    assert picked.episode_id == ["b", "a", "b"] and picked.group_id.tolist() == [4, 3, 4]
    joined = RolloutBatch.concat([batch.select([1]), batch.select([0]), batch.select([1])])
    assert joined.tokens.tolist() == picked.tokens.tolist() and joined.offsets.tolist() == picked.offsets.tolist()
    assert batch.select([]).num_trajectories == 0


def test_concat_refuses_a_field_present_in_some_only():
    with pytest.raises(ValueError, match="logprobs is present in trajectory 0 but absent in trajectory 0"):
        RolloutBatch.concat([make(logprobs=[[0] * 4, [0] * 3]), make()])


def test_prompt_only_and_all_masked_are_legal():
    assert not make(loss_mask=[[0] * 4, [0] * 3]).label_mask.any()


WHERE = {"location": ["f.jsonl:row 0", "f.jsonl:row 1"], "episode_id": ["ep-a", "ep-b"]}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokens": [[7, 8, 9, 4], [7, -8, 5]]}, r"tokens: -8 at token 1; token ids must be >= 0"),
        ({"loss_mask": [[0, 0, 1, 1], [1, 0, 1]]}, r"loss_mask: True at token 0; token 0 is predicted by nothing"),
        ({"logprobs": [[0] * 4, [0, 0, float("nan")]]}, r"logprobs: nan at token 2; log-probabilities must be finite"),
        ({"logprobs": [[0] * 4, [0, 0, 0.5]]}, r"logprobs: 0.5 at token 2; log-probabilities must be finite and <= 0"),
        ({"old_logprobs": [[0] * 4, [0, -np.inf, 0]]}, r"old_logprobs: -inf at token 1"),
        ({"ref_logprobs": [[0] * 4, [0, 0, np.inf]]}, r"ref_logprobs: inf at token 2"),
        ({"advantages": [[0] * 4, [0, np.nan, 0]]}, r"advantages: nan at token 1; advantages must be finite"),
        ({"weights": [[1] * 4, [1, 1, -1]]}, r"weights: -1.0 at token 2; weights must be finite and >= 0"),
        ({"reward": [0, np.inf]}, r"reward: inf; must be finite, or NaN if missing"),
        ({"group_id": [0, -2]}, r"group_id: -2; must be >= 0, or -1"),
        ({"tokens": [[7, 8, 9, 4], [7]], "loss_mask": [[0] * 4, [0]]}, r"tokens: one token only; at least 2"),
        ({"tokens": [[7, 8, 9, 4], []], "loss_mask": [[0] * 4, []]}, r"tokens: the trajectory is empty"),
        ({"loss_mask": [[0] * 4, [0, 1]]}, r"loss_mask: 2 entries, tokens has 3"),
        ({"ref_logprobs": [[0] * 4, [0] * 5]}, r"ref_logprobs: 5 entries, tokens has 3"),
    ],
)
def test_refused_with_row_episode_and_field(fields, message):
    with pytest.raises(ValueError, match=r"f.jsonl:row 1 \(episode 'ep-b'\), " + message):
        make(**WHERE, **fields)


def test_at_most_five_rows_are_named_and_the_rest_counted():
    with pytest.raises(ValueError, match=r"8 invalid entries(.|\n)*trajectory 4, (.|\n)*\.\.\. and 3 more") as error:
        RolloutBatch.from_lists([[1, -2]] * 8, [[0, 1]] * 8)
    assert "trajectory 5" not in str(error.value)


def test_flat_arrays_of_other_lengths_are_refused():
    flat = {"tokens": np.arange(5), "offsets": np.array([0, 2, 5])}
    with pytest.raises(ValueError, match=r"loss_mask has shape \(4,\), tokens has \(5,\)"):
        RolloutBatch(**flat, loss_mask=np.zeros(4, bool))
    with pytest.raises(ValueError, match="offsets must rise from 0 to the number of tokens"):
        RolloutBatch(tokens=np.arange(5), offsets=np.array([0, 2, 4]), loss_mask=np.zeros(5, bool))
    with pytest.raises(ValueError, match="tokens must be integers, got float64"):
        RolloutBatch(**(flat | {"tokens": np.arange(5.0)}), loss_mask=np.zeros(5, bool))
    with pytest.raises(ValueError, match="loss_mask must be boolean or 0/1"):
        RolloutBatch(**flat, loss_mask=np.full(5, 2))
    with pytest.raises(ValueError, match="do not fit into 32 bits"):
        RolloutBatch(**(flat | {"tokens": np.arange(5) + 2**31}), loss_mask=np.zeros(5, bool))


def test_rounding_above_zero_is_not_refused():
    assert make(logprobs=[[0, 0, 1e-6, -1], [0, 0, 0]]).logprobs[2] == 1e-6
