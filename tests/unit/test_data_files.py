"""Public rollout files: both kinds, every column, and every fault named with file, row, episode and field."""

from __future__ import annotations

import json
import logging

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from harts_titan.data import RolloutBatch, files, read_rollouts, write_rollouts
from harts_titan.data.synthetic import SyntheticConfig, generate

NAN = float("nan")
KINDS = ("parquet", "jsonl")


def rows(**changes):
    """Three good rows; a change is the column's values for the three."""
    base = {
        "tokens": [[7, 8, 9, 4], [7, 8, 5], [7, 8, 9, 6, 2]],
        "loss_mask": [[False, False, True, True], [False, False, True], [False] * 5],
        "episode_id": ["ep-a", "ep-b", "ep-c"],
        "step": [0, 0, 1],
    }
    return {name: column for name, column in (base | changes).items() if column is not None}


def write(folder, kind, columns, name="rollouts"):
    path = folder / f"{name}.{kind}"
    if kind == "parquet":
        pq.write_table(pa.table(columns), path)
    else:
        records = [dict(zip(columns, values)) for values in zip(*columns.values())]
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_every_column_is_read(tmp_path, kind):
    path = write(
        tmp_path,
        kind,
        rows(
            logprobs=[[0, 0, -1.5, -2.5], [0, 0, -0.5], [0.0] * 5],
            old_logprobs=[[0, 0, -1.0, -2.0], [0, 0, -0.25], [0.0] * 5],
            ref_logprobs=[[0, 0, -3.0, -4.0], [0, 0, -0.125], [0.0] * 5],
            advantages=[1.5, -0.5, 0.0],
            weights=[[1.0] * 4, [2.0] * 3, [0.5] * 5],
            reward=[1.0, None, NAN],
            group_id=[5, 5, None],
        ),
    )
    batch = read_rollouts(path)
    assert batch.tokens.tolist() == [7, 8, 9, 4, 7, 8, 5, 7, 8, 9, 6, 2] and batch.offsets.tolist() == [0, 4, 7, 12]
    assert batch.loss_mask.tolist() == [False, False, True, True, False, False, True] + [False] * 5
    assert batch.logprobs[[2, 3, 6]].tolist() == [-1.5, -2.5, -0.5]
    assert batch.old_logprobs[[2, 3, 6]].tolist() == [-1.0, -2.0, -0.25]
    assert batch.ref_logprobs[[2, 3, 6]].tolist() == [-3.0, -4.0, -0.125]
    assert batch.advantages.tolist() == [1.5] * 4 + [-0.5] * 3 + [0.0] * 5
    assert batch.weights.tolist() == [1.0] * 4 + [2.0] * 3 + [0.5] * 5
    assert batch.reward[0] == 1 and np.isnan(batch.reward[1:]).all()
    assert batch.group_id.tolist() == [5, 5, -1] and batch.step.tolist() == [0, 0, 1]
    assert batch.episode_id == ["ep-a", "ep-b", "ep-c"]
    assert all(str(path) in where for where in batch.location) and "row 2" in batch.location[2]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("changes", "row", "message"),
    [
        ({"loss_mask": [[False] * 4, [False] * 4, [False] * 5]}, 1, "loss_mask: 4 entries, tokens has 3"),
        ({"logprobs": [[0.0] * 4, [0.0] * 2, [0.0] * 5]}, 1, "logprobs: 2 entries, tokens has 3"),
        ({"advantages": [[0.0] * 4, [0.0] * 3, [0.0] * 6]}, 2, "advantages: 6 entries, tokens has 5"),
        ({"logprobs": [[0.0] * 4, [0.0, NAN, -1.0], [0.0] * 5]}, 1, "logprobs: nan at token 1"),
        ({"logprobs": [[0.0] * 4, [0.0, 0.0, 1.0], [0.0] * 5]}, 1, "logprobs: 1.0 at token 2; .* <= 0"),
        ({"advantages": [0.5, NAN, 0.5]}, 1, "advantages: nan at token 0"),
        ({"advantages": [[0.0] * 4, [0.0, 0.0, float("inf")], [0.0] * 5]}, 1, "advantages: inf at token 2"),
        ({"loss_mask": [[False] * 4, [True, False, True], [False] * 5]}, 1, "loss_mask: True at token 0"),
        ({"loss_mask": [[0, 0, 1, 1], [0, 0, 2], [0] * 5]}, 1, "loss_mask: 2 at token 2; must be 0 or 1"),
        ({"tokens": [[7, 8, 9, 4], [7, -1, 5], [7, 8, 9, 6, 2]]}, 1, "tokens: -1 at token 1"),
        ({"tokens": [[7, 8, 9, 4], [7, 512, 5], [7, 8, 9, 6, 2]]}, 1, "tokens: 512 at token 1; .* 512 ids"),
        ({"tokens": [[7, 8, 9, 4], [7, 2**40, 5], [7, 8, 9, 6, 2]]}, 1, "tokens: .* fit into 32 bits"),
        ({"tokens": [[7, 8, 9, 4], [], [7, 8, 9, 6, 2]], "loss_mask": [[0] * 4, [], [0] * 5]}, 1, "is empty"),
        ({"tokens": [[7, 8, 9, 4], [7], [7, 8, 9, 6, 2]], "loss_mask": [[0] * 4, [0], [0] * 5]}, 1, "one token only"),
        ({"tokens": [[7, 8, 9, 4], None, [7, 8, 9, 6, 2]]}, 1, "tokens: null"),
        ({"loss_mask": [[False] * 4, None, [False] * 5]}, 1, "loss_mask: null"),
        ({"tokens": [[7, 8, 9, 4], [7, None, 5], [7, 8, 9, 6, 2]]}, 1, "tokens: null entries"),
        ({"logprobs": [[0.0] * 4, [0.0, None, 0.0], [0.0] * 5]}, 1, "logprobs: null entries"),
        ({"ref_logprobs": [[0.0] * 4, [0.0] * 3, None]}, 2, "ref_logprobs: .*other rows have"),
    ],
)
def test_a_bad_row_is_named(tmp_path, kind, changes, row, message):
    path = write(tmp_path, kind, rows(**changes))
    episode = f"ep-{'abc'[row]}"
    line = "" if kind == "parquet" else rf" \(line {row + 1}\)"
    with pytest.raises(ValueError, match=rf"rollouts.{kind}:row {row}{line} \(episode '{episode}'\), .*{message}"):
        read_rollouts(path, vocab_size=512)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("column", ["tokens", "loss_mask"])
def test_a_missing_column_names_the_columns_found(tmp_path, kind, column):
    columns = rows()
    columns["mask"] = columns.pop(column)
    path = write(tmp_path, kind, columns)
    with pytest.raises(ValueError, match=rf"{path}: required column {column} missing; columns found: .*mask"):
        read_rollouts(path)


def test_a_column_missing_in_one_json_row(tmp_path):
    records = [{"tokens": [1, 2], "loss_mask": [0, 1]}, {"tokens": [1, 3], "episode_id": "x"}]
    path = tmp_path / "r.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    with pytest.raises(ValueError, match=r"r.jsonl:row 1 \(line 2\) \(episode 'x'\), loss_mask: missing"):
        read_rollouts(path)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": [[7.0, 8.0, 9.0, 4.0], [7.0, 8.0, 5.0], [7.0] * 5]}, "tokens.*needed: .*integer token ids"),
        ({"tokens": ["7 8 9 4", "7 8 5", "7"]}, "tokens.*needed: .*integer token ids"),
        ({"loss_mask": [["a"] * 4, ["a"] * 3, ["a"] * 5]}, "loss_mask.*booleans"),
        ({"logprobs": [1.0, 2.0, 3.0]}, "logprobs.*needed: .*numbers"),
        ({"logprobs": [["x"] * 4, ["x"] * 3, ["x"] * 5]}, "logprobs.*needed: .*numbers"),
        ({"reward": ["good", "bad", "bad"]}, "column reward of type str; needed: numbers"),
        ({"step": ["0", "1", "2"]}, "column step of type str; needed: integers"),
        ({"group_id": [0.5, 1.0, 2.0]}, "column group_id holds numbers that are not 64-bit integers"),
    ],
)
def test_a_wrong_type_is_named(tmp_path, kind, changes, message):
    with pytest.raises(ValueError, match=rf"rollouts.{kind}(.|\n)*{message}"):
        read_rollouts(write(tmp_path, kind, rows(**changes)))


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_episode_and_step_twice_is_refused(tmp_path, kind):
    path = write(tmp_path, kind, rows(episode_id=["e", "f", "e"], step=[1, 1, 1]))
    with pytest.raises(ValueError, match=r"row 2.*\(episode 'e'\), episode_id/step: step 1 .* also at .*row 0"):
        read_rollouts(path)
    without = write(tmp_path, kind, rows(episode_id=["e", "e", "e"], step=None), name="no_step")
    assert read_rollouts(without).num_trajectories == 3


@pytest.mark.parametrize("kind", KINDS)
def test_unknown_columns_are_said_once(tmp_path, kind, caplog):
    first = write(tmp_path, kind, rows(logprob=[0, 0, 0]), name="a")
    second = write(tmp_path, kind, rows(logprob=[0, 0, 0], episode_id=["x", "y", "z"]), name="b")
    with caplog.at_level(logging.WARNING):
        read_rollouts([first, second])
    assert [r.message for r in caplog.records] == ["rollouts: unknown columns ignored: logprob"]


@pytest.mark.parametrize("kind", KINDS)
def test_group_names_are_numbered_and_nan_floats_are_none(tmp_path, kind):
    named = write(tmp_path, kind, rows(group_id=["t1", "t2", "t1"]))
    assert read_rollouts(named).group_id.tolist() == [0, 1, 0]
    floats = write(tmp_path, kind, rows(group_id=[4.0, NAN, 4.0]), name="floats")
    assert read_rollouts(floats).group_id.tolist() == [4, -1, 4]
    with pytest.raises(ValueError, match="group_id holds integers, but other rows use text"):
        read_rollouts([named, write(tmp_path, kind, rows(episode_id=None, group_id=[1, 2, 3]), name="z")])


def test_numbers_and_lists_may_be_mixed_in_json(tmp_path):
    path = write(tmp_path, "jsonl", rows(advantages=[2.0, [0.0, 1.0, 3.0], -1]))
    assert read_rollouts(path).advantages.tolist() == [2.0] * 4 + [0.0, 1.0, 3.0] + [-1.0] * 5


def test_a_bad_json_line_is_numbered(tmp_path):
    path = tmp_path / "r.jsonl"
    good = json.dumps({"tokens": [1, 2], "loss_mask": [0, 1]})
    path.write_text(good + "\n\n" + good[:-4] + "\n")
    with pytest.raises(ValueError, match=r"r.jsonl: line 3 is not valid JSON"):
        read_rollouts(path)
    path.write_text(good + "\n[1, 2]\n")
    with pytest.raises(ValueError, match=r"r.jsonl: line 2 is a JSON list; needed: one object per line"):
        read_rollouts(path)
    path.write_bytes(b'{"tokens": "\xff"}\n')
    with pytest.raises(ValueError, match=r"r.jsonl: line 1 is not valid JSON"):
        read_rollouts(path)


@pytest.mark.parametrize("keep", [0.3, 0.6, 0.98])
def test_a_truncated_parquet_file_is_named(tmp_path, keep):
    path = write(tmp_path, "parquet", rows())
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(ValueError, match=r"rollouts.parquet: not a readable parquet file \(truncated or corrupt\)"):
        read_rollouts(path)


def test_a_corrupt_parquet_page_is_named(tmp_path):
    path = tmp_path / "r.parquet"
    write_rollouts(generate(SyntheticConfig(trajectories=20)), path)
    data = bytearray(path.read_bytes())
    data[20:400] = bytes(380)
    path.write_bytes(bytes(data))
    with pytest.raises(ValueError, match=r"r.parquet: not a readable parquet file"):
        read_rollouts(path)


def test_empty_files_folders_and_missing_paths(tmp_path):
    for name in ("e.jsonl", "e.parquet"):
        (tmp_path / name).write_bytes(b"")
        with pytest.raises(ValueError, match=rf"{name}: the file is empty"):
            read_rollouts(tmp_path / name)
    (tmp_path / "blank.jsonl").write_text("\n\n")
    with pytest.raises(ValueError, match=r"blank.jsonl: the file holds no rows"):
        read_rollouts(tmp_path / "blank.jsonl")
    typed = {"tokens": pa.array([], pa.list_(pa.int32())), "loss_mask": pa.array([], pa.list_(pa.bool_()))}
    pq.write_table(pa.table(typed), tmp_path / "none.parquet")
    with pytest.raises(ValueError, match=r"none.parquet: the file holds no rows"):
        read_rollouts(tmp_path / "none.parquet")
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(ValueError, match=r"folder: the folder holds no rollout file \(.parquet, .*\); set data.path"):
        read_rollouts(folder)
    with pytest.raises(ValueError, match=r"the folder holds no rollout file .*; check INPUT$"):
        read_rollouts(folder, hint="check INPUT")
    for missing in (tmp_path / "absent.parquet", tmp_path / "*.none"):
        with pytest.raises(ValueError, match=r"no such file, folder or pattern; set data.path"):
            read_rollouts(missing)
        with pytest.raises(ValueError, match=r"no such file, folder or pattern; check --rollouts$"):
            read_rollouts(missing, hint="check --rollouts")
    with pytest.raises(ValueError, match=r"no rollout file given; set data\.path"):
        read_rollouts([])
    (tmp_path / "x.txt").write_text("hello")
    with pytest.raises(ValueError, match=r"x.txt: unknown kind of file; needed: .parquet, .*.json \(harts-plan"):
        read_rollouts(tmp_path / "x.txt")
    np.savez(tmp_path / "x.npz", tokens=np.arange(3), offsets=np.array([0, 3]))
    with pytest.raises(
        ValueError, match=r"x.npz: an .npz of tokens and offsets has no loss mask, .*; needed: .parquet"
    ):
        read_rollouts(tmp_path / "x.npz")


def test_the_kinds_in_messages_are_those_that_are_read():
    suffixes = (*files.PARQUET_SUFFIXES, *files.JSON_SUFFIXES)
    assert f"{', '.join(suffixes[:-1])} or {suffixes[-1]}" == files._KINDS


def test_several_files_by_list_folder_and_pattern(tmp_path):
    write(tmp_path, "parquet", rows(), name="a")
    write(tmp_path, "jsonl", rows(episode_id=["d", "e", "f"]), name="b")
    by_list = read_rollouts([tmp_path / "a.parquet", tmp_path / "b.jsonl"])
    assert by_list.episode_id == ["ep-a", "ep-b", "ep-c", "d", "e", "f"]
    assert read_rollouts(tmp_path).episode_id == by_list.episode_id
    assert read_rollouts(str(tmp_path / "*")).episode_id == by_list.episode_id
    assert read_rollouts(tmp_path, limit=4).episode_id == by_list.episode_id[:4]
    assert read_rollouts(tmp_path, limit=3).episode_id == by_list.episode_id[:3]
    with pytest.raises(ValueError, match="named twice"):
        read_rollouts([tmp_path / "a.parquet", tmp_path])
    write(tmp_path, "jsonl", rows(episode_id=["g", "h", "i"], logprobs=[[0] * 4, [0] * 3, [0] * 5]), name="c")
    with pytest.raises(ValueError, match=r"logprobs is present in .*c.jsonl.* but absent in .*a.parquet"):
        read_rollouts(tmp_path)


@pytest.mark.parametrize("limit", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_limit_takes_the_first_rows(tmp_path, kind, limit):
    assert read_rollouts(write(tmp_path, kind, rows()), limit=limit).episode_id == ["ep-a", "ep-b"][:limit]


def test_bad_settings(tmp_path):
    path = write(tmp_path, "jsonl", rows())
    with pytest.raises(ValueError, match=r"data.scheme must be one of step, tree, got 'forest'"):
        read_rollouts(path, scheme="forest")
    with pytest.raises(ValueError, match=r"data.limit must be >= 0"):
        read_rollouts(path, limit=-1)


def test_large_lists_fixed_lists_and_small_types(tmp_path):
    table = pa.table(
        {
            "tokens": pa.array([[1, 2, 3], [4, 5, 6]], pa.list_(pa.uint16(), 3)),
            "loss_mask": pa.array([[0, 1, 1], [0, 0, 1]], pa.large_list(pa.int8())),
            "logprobs": pa.array([[0, -1, -2], [0, 0, -1]], pa.list_(pa.float16())),
        }
    )
    pq.write_table(pa.concat_tables([table, table]), tmp_path / "t.parquet", row_group_size=1)
    batch = read_rollouts(tmp_path / "t.parquet")
    assert batch.tokens.tolist() == [1, 2, 3, 4, 5, 6] * 2
    assert batch.logprobs.dtype == np.float32 and batch.logprobs.tolist() == [0, -1, -2, 0, 0, -1] * 2


def test_an_all_null_optional_column_is_absent(tmp_path):
    for kind in KINDS:
        assert read_rollouts(write(tmp_path, kind, rows(logprobs=[None] * 3))).logprobs is None


@pytest.mark.parametrize("kind", KINDS)
def test_written_files_read_back_equal(tmp_path, kind):
    batch = generate(SyntheticConfig(trajectories=12, logprobs=True))
    write_rollouts(batch, tmp_path / f"r.{kind}")
    back = read_rollouts(tmp_path / f"r.{kind}")
    for name in ("tokens", "offsets", "loss_mask", "logprobs", "reward", "group_id", "step"):
        assert np.array_equal(getattr(back, name), getattr(batch, name)), name
    assert back.episode_id == batch.episode_id
    assert [p.name for p in tmp_path.iterdir()] == [f"r.{kind}"]


def test_writing_refuses_other_suffixes_and_nothing(tmp_path):
    batch = RolloutBatch.from_lists([[1, 2]], [[0, 1]])
    with pytest.raises(ValueError, match=r"needed: .parquet or .jsonl"):
        write_rollouts(batch, tmp_path / "r.csv")
    with pytest.raises(ValueError, match="no trajectory to write"):
        write_rollouts(batch.select([]), tmp_path / "r.jsonl")
