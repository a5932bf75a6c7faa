"""Hostile but plausible inputs end in one message that names file and field, never in a traceback."""

from __future__ import annotations

import json

import numpy as np
import pytest

from harts_titan.data import from_padded, read_rollouts

ROW = {"tokens": [7, 8, 9, 4], "loss_mask": [0, 0, 1, 1]}
HUGE = 10**400


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"loss_mask": [0, 0, 1, 2**70]}, "loss_mask"),
        ({"advantages": HUGE}, "advantages"),
        ({"logprobs": [0, 0, -HUGE, -1]}, "logprobs"),
        ({"reward": HUGE}, "reward"),
        ({"group_id": float("inf")}, "group_id"),
        ({"step": float("inf"), "episode_id": "a"}, "step"),
    ],
)
def test_numbers_out_of_range_are_refused_by_name(tmp_path, changed, field):
    file = tmp_path / "rollouts.jsonl"
    file.write_text(json.dumps(ROW | changed) + "\n")
    with pytest.raises(ValueError, match=field) as caught:
        read_rollouts(file)
    assert "rollouts.jsonl" in str(caught.value)


@pytest.mark.parametrize("line", ["[" * 100_000, '{"tokens": [' + "9" * 5000 + "]}"])
def test_json_that_python_cannot_parse_names_the_line(tmp_path, line):
    file = tmp_path / "rollouts.jsonl"
    file.write_text(json.dumps(ROW) + "\n" + line + "\n")
    with pytest.raises(ValueError, match=r"rollouts\.jsonl: line 2"):
        read_rollouts(file)


def test_padded_rows_without_a_name_share_no_group():
    mask = np.ones((3, 4), dtype=np.int64)
    batch = from_padded(
        {
            "input_ids": np.arange(12).reshape(3, 4),
            "attention_mask": mask,
            "loss_mask": np.array([[0, 1, 1, 1]] * 3),
            "uid": np.array(["a", None, None], dtype=object),
        }
    )
    assert batch.group_id.tolist() == [0, -1, -1]
