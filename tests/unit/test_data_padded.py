"""Padded framework batches, in both directions."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from harts_titan.data import from_padded, to_padded

P = 0
IDS = {
    "right": [[7, 8, 9, 4, P, P], [7, 8, 5, P, P, P], [1, 2, 3, 4, 5, 6]],
    "left": [[P, P, 7, 8, 9, 4], [P, P, P, 7, 8, 5], [1, 2, 3, 4, 5, 6]],
    # Prompts padded left, responses right: two rows of two-token prompts, one of three.
    "both": [[P, 7, 8, 9, 4, P], [P, 7, 8, 5, P, P], [1, 2, 3, 4, 5, 6]],
}
NAN = float("nan")


def batch(side, **changes):
    ids = torch.tensor(IDS[side])
    attention = (ids != P).long()
    mask = attention.clone()
    for row, prompt in enumerate((2, 2, 3)):
        mask[row, int(attention[row].argmax()) : int(attention[row].argmax()) + prompt] = 0
    data = {"input_ids": ids, "attention_mask": attention, "loss_mask": mask} | changes
    return {key: value for key, value in data.items() if value is not None}


def full(side, values, padding=NAN):
    """Spread three lists of per-token values over the attended columns; padding holds something unusable."""
    attended = torch.tensor(IDS[side]) != P
    out = torch.full(attended.shape, padding)
    out[attended] = torch.tensor([value for row in values for value in row])
    return out


LOGPROBS = [[0, 0, -1.0, -2.0], [0, 0, -3.0], [0, 0, 0, -4.0, -5.0, -6.0]]


@pytest.mark.parametrize("side", IDS)
@pytest.mark.parametrize("container", [dict, TensorDict])
def test_padding_side_is_read_from_the_mask(side, container):
    data = batch(side, old_log_probs=full(side, LOGPROBS), ref_log_prob=full(side, LOGPROBS), rewards=torch.ones(3))
    if container is TensorDict:
        data = TensorDict(data, batch_size=[3])
    out = from_padded(data)
    assert out.tokens.tolist() == [7, 8, 9, 4, 7, 8, 5, 1, 2, 3, 4, 5, 6] and out.lengths.tolist() == [4, 3, 6]
    assert np.flatnonzero(out.loss_mask).tolist() == [2, 3, 6, 10, 11, 12]
    flat = [value for row in LOGPROBS for value in row]
    assert out.old_logprobs.tolist() == flat and out.ref_logprobs.tolist() == flat
    assert out.reward.tolist() == [1, 1, 1] and out.location[1] == "padded batch:row 1"
    back = to_padded(out.old_logprobs, data["attention_mask"], fill=NAN)
    assert torch.equal(back.nan_to_num(9.0), data["old_log_probs"].double().nan_to_num(9.0))


@pytest.mark.parametrize("known_by", ["responses", "prompts", "argument"])
def test_response_only_tensors_are_the_last_columns(known_by):
    ids = torch.tensor(IDS["both"])
    response = torch.tensor([[-1.0, -2.0, NAN], [-3.0, NAN, NAN], [-4.0, -5.0, -6.0]])
    data = batch(
        "both",
        loss_mask=None,
        response_mask=torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1]]),
        rollout_log_probs=response,
        old_log_probs=response.bfloat16(),
        advantages=torch.tensor([0.5, -0.5, 1.5]),
    )
    if known_by != "argument":
        data[known_by] = ids[:, 3:] if known_by == "responses" else ids[:, :3]
    out = from_padded(data, response_width=3 if known_by == "argument" else None)
    assert out.logprobs.tolist() == [value for row in LOGPROBS for value in row]
    assert out.old_logprobs.dtype == np.float32 and out.old_logprobs.tolist() == out.logprobs.tolist()
    assert out.advantages.tolist() == [0.5] * 4 + [-0.5] * 3 + [1.5] * 6
    assert np.flatnonzero(out.loss_mask).tolist() == [2, 3, 6, 10, 11, 12]
    back = to_padded(torch.as_tensor(out.logprobs), data["attention_mask"], response_width=3)
    assert torch.equal(back, response.nan_to_num(0.0).to(back.dtype))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_ids": None}, "padded batch: input_ids missing; keys found: attention_mask, loss_mask"),
        ({"loss_mask": None}, r"padded batch: loss_mask \(or response_mask\) missing; keys found: input_ids"),
        ({"attention_mask": torch.ones(3, 5)}, r"attention_mask is \(3, 5\), input_ids is \(3, 6\)"),
        ({"attention_mask": torch.full((3, 6), 2)}, "attention_mask must be boolean or 0/1"),
        ({"input_ids": torch.ones(3, 6)}, "input_ids must be integers"),
        (
            {"old_log_probs": torch.zeros(3, 3)},
            r"old_log_probs is \(3, 3\).*response width is unknown \(give",
        ),
        ({"old_log_probs": torch.zeros(3, 5)}, r"old_log_probs is \(3, 5\), which is neither all columns \(3, 6\)"),
        ({"old_log_probs": torch.zeros(2, 6)}, r"old_log_probs is \(2, 6\)"),
        (
            {"old_log_probs": full("right", [LOGPROBS[0], [0, 0, NAN], LOGPROBS[2]])},
            "row 1, old_logprobs: nan at",
        ),
        (
            {"ref_log_prob": full("right", [LOGPROBS[0], [0, 0, 0.5], LOGPROBS[2]])},
            "row 1, ref_logprobs: 0.5 at",
        ),
        ({"advantages": torch.tensor([1.0, NAN, 0.0])}, "row 1, advantages: nan at token 0"),
        ({"loss_mask": torch.ones(3, 6)}, r"row 0, loss_mask: true on padding(.|\n)*row 1"),
        ({"response_mask": torch.zeros(3, 6)}, "row 0, loss_mask: disagrees with response_mask"),
        ({"rewards": torch.zeros(3, 6)}, "rewards is float32.*expected one number per row"),
        ({"group_id": torch.zeros(3)}, "group_id is float32.*expected one integer per row"),
        ({"group_id": torch.zeros(3, dtype=torch.long), "uid": ["a", "b", "c"]}, "give group_id or uid, not both"),
        ({"episode_id": ["a", "b"]}, r"episode_id is \(2,\), expected one per row"),
        ({"episode_id": ["a", "b", "a"], "step": torch.ones(3, dtype=torch.long)}, r"row 2 .*pair must be unique"),
        ({"responses": torch.tensor(IDS["right"])[:, 1:4]}, "responses is not the last 3 columns .* ambiguous"),
        ({"prompts": torch.tensor(IDS["right"])[:, 1:4]}, "prompts is not the first 3 columns .* ambiguous"),
    ],
)
def test_refusals(changes, message):
    with pytest.raises(ValueError, match=message):
        from_padded(batch("right", **changes))


def test_holes_empty_rows_and_short_rows_are_refused():
    data = batch("right")
    data["attention_mask"][1] = torch.tensor([1, 1, 0, 1, 0, 0])
    with pytest.raises(ValueError, match=r"row 1, attention_mask: has 1 hole\(s\)"):
        from_padded(data)
    data["attention_mask"][1] = 0
    data["loss_mask"][1] = 0
    with pytest.raises(ValueError, match="padded batch:row 1, tokens: the trajectory is empty"):
        from_padded(data)
    data["attention_mask"][1, 0] = 1
    with pytest.raises(ValueError, match="padded batch:row 1, tokens: one token only"):
        from_padded(data)


def test_trained_tokens_without_a_response_value_are_refused():
    ids = torch.tensor(IDS["right"])
    data = batch("right", responses=ids[:, 3:], old_log_probs=torch.zeros(3, 3))
    with pytest.raises(ValueError, match="row 0, old_log_probs: covers only the last 3 columns, but tokens before"):
        from_padded(data)


def test_mask_on_the_first_token_is_refused():
    data = batch("left")
    data["loss_mask"][0, 2] = 1
    with pytest.raises(ValueError, match="row 0, loss_mask: True at token 0"):
        from_padded(data)


def test_widths_that_disagree_are_refused():
    ids = torch.tensor(IDS["both"])
    with pytest.raises(ValueError, match=r"response widths disagree: \{'response_width': 2, 'responses': 3\}"):
        from_padded(batch("both", responses=ids[:, 3:]), response_width=2)


def test_names_and_ignored_keys(caplog):
    with caplog.at_level(logging.INFO):
        out = from_padded(
            batch("left", uid=["x", "y", "x"], episode_id=["a", "b", "c"], position_ids=torch.zeros(3, 6), extra=1)
        )
    assert out.group_id.tolist() == [0, 1, 0] and out.episode_id == ["a", "b", "c"]
    assert "padded batch: keys ignored: extra, position_ids" in caplog.text


def test_names_inside_a_tensordict():
    data = TensorDict(batch("left"), batch_size=[3])
    data.set_non_tensor("uid", np.array(["x", "y", "x"], dtype=object))
    data["episode_id"] = ["a", "b", "c"]
    out = from_padded(data)
    assert out.group_id.tolist() == [0, 1, 0] and out.episode_id == ["a", "b", "c"]


def test_to_padded_refuses_other_lengths():
    data = batch("left")
    with pytest.raises(ValueError, match=r"\(12,\) values for 13 attended tokens"):
        to_padded(np.zeros(12), data["attention_mask"])
    with pytest.raises(ValueError, match=r"response_width \(7\) must be in 1..6"):
        to_padded(np.zeros(13), data["attention_mask"], response_width=7)
