"""``harts-plan``: every option, every refusal, the figures, the plan file, the picture, and inputs at the edge."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from harts_titan.cli import common, plan_file
from harts_titan.cli import plan as plan_module
from harts_titan.cli.plan import main
from harts_titan.cli.plan_figures import ADDED, PHASES, overall_figures
from harts_titan.cli.plan_options import build_parser, settings_of
from harts_titan.cli.plan_plot import forest_lines
from harts_titan.cli.plan_read import peak_bytes, read_npz, resident_bytes
from harts_titan.data.synthetic import write_synthetic
from harts_titan.tree import PlanCost, build_forest, sort_trajectories

STEP_KEYS = {
    *("original_tokens", "distinct_tokens", "whole_step_compression", "l1_tokens", "l1_compression", "l1_balance"),
    *("l1_slots", "l1_lower_bound", "l1_gap", "decoder_tokens", "decoder_compression", "producer_tokens"),
    *("residual_tokens", "alignment_tokens", "balance", "balance_p5", "worst_step_balance", "slots", "windows"),
    *("producers", "rounds_max", "rounds_mean", "replay_tokens", "phi", "interface_bytes", "seconds"),
    *("seconds_per_step", "compact_tokens", "executed_rows", "compression", "consumers", "segments"),
}
TOP_KEYS = STEP_KEYS | {
    *("max_live_producers", "max_window_slots", "compile_seconds", "peak_memory_bytes", "memory_before_read_bytes"),
}
INTEGER_ARRAYS = {
    *("replica_N", "slot_N", "shared_N", "window_ptr_W1", "item_kind_I", "item_replica_I", "item_index_I"),
    *("item_rounds_I", "sequence_ptr_I1", "sequence_round_Q", "sequence_trajectory_Q", "sequence_anchor_Q"),
    *("sequence_start_Q", "sequence_end_Q", "events_V2"),
}


@pytest.fixture(autouse=True, scope="module")
def compiled_once():
    """Warm-up is timed by the command itself; here it would run once per test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("harts_titan.cli.plan.warm_up", lambda settings: 0.25)
        yield


def tree(seed: int, *, tasks: int = 3, children: int = 12) -> list[list[int]]:
    """Trajectories with a prefix per task, forks at several depths, some equal and some a prefix of another.

    No task fits one microbatch of 64 rows, so prefixes are worth sharing across microbatches.
    """
    rng = np.random.default_rng(seed)
    out = []
    for _ in range(tasks):
        trunk = rng.integers(0, 9, 36).tolist()
        for _ in range(children):
            out.append(trunk[: rng.integers(12, 36)] + rng.integers(0, 9, rng.integers(4, 24)).tolist())
        out += [trunk, trunk]
    return out


def write_npz(path: Path, trajectories: list[list[int]], **changes: object) -> Path:
    offsets = np.concatenate([[0], np.cumsum([len(x) for x in trajectories])])
    arrays = {"tokens": np.concatenate([np.asarray(x, np.int32) for x in trajectories]), "offsets": offsets} | changes
    np.savez(path, **{name: value for name, value in arrays.items() if value is not None})
    return path


def figures(tmp_path: Path, *arguments: object) -> dict:
    out = tmp_path / "figures.json"
    assert common.run(main, [*map(str, arguments), "--json", str(out)]) == 0
    return json.loads(out.read_text())


def refusal(capsys: pytest.CaptureFixture, *arguments: object) -> str:
    assert common.run(main, list(map(str, arguments))) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    return errors[0]


@pytest.fixture
def step(tmp_path):
    return write_npz(tmp_path / "step.npz", tree(0))


SMALL = ("--capacity", 64, "--chunk-size", 8)
WARM_UP = plan_module.warm_up


def test_figures_of_several_steps(tmp_path):
    files = [write_npz(tmp_path / f"step{i}.npz", tree(i)) for i in range(3)]
    found = figures(tmp_path, *files, "--dp", 2, *SMALL, "--max-window-slots", 4, "--max-live-producers", 3)
    steps = found["steps"]
    assert set(found) >= TOP_KEYS and all(set(one) >= STEP_KEYS for one in steps)
    assert [one["input"] for one in steps] == [str(file) for file in files]
    assert (found["max_window_slots"], found["max_live_producers"], found["dp_degree"]) == (4, 3, 2)
    assert tuple(found["seconds"]) == PHASES and found["compile_seconds"] == 0.25
    for one in steps:
        assert one["decoder_tokens"] == one["residual_tokens"] + one["producer_tokens"] + one["alignment_tokens"]
        assert one["original_tokens"] > one["l1_tokens"] >= one["l1_lower_bound"] >= one["distinct_tokens"]
        assert one["l1_gap"] == one["l1_tokens"] / one["l1_lower_bound"] - 1
        assert one["executed_rows"] == one["residual_tokens"] + one["producer_tokens"]
    for name in ("original_tokens", "distinct_tokens", "l1_tokens", "decoder_tokens", "slots", "windows", "phi"):
        assert found[name] == sum(one[name] for one in steps), name
    assert found["decoder_compression"] == found["original_tokens"] / found["decoder_tokens"]
    assert found["l1_compression"] == found["original_tokens"] / found["l1_tokens"]
    assert found["worst_step_balance"] == min(one["worst_step_balance"] for one in steps)
    assert found["seconds_per_step"] == np.median([one["seconds_per_step"] for one in steps])
    assert found["rounds_max"] == max(one["rounds_max"] for one in steps)
    assert found["interface_bytes"] == max(one["interface_bytes"] for one in steps)
    slowest = sum(one["executed_rows"] / one["balance"] for one in steps)
    assert found["balance"] == pytest.approx(found["executed_rows"] / slowest, rel=1e-12)


def test_a_step_is_sorted_once(tmp_path, step, monkeypatch):
    sorted_tokens = []

    def counted(tokens, offsets):
        sorted_tokens.append(tokens.size)
        return sort_trajectories(tokens, offsets)

    monkeypatch.setattr("harts_titan.tree.sorted_step.sort_trajectories", counted)
    result = figures(tmp_path, step, *SMALL)
    assert sorted_tokens == [result["original_tokens"]] and result["l1_gap"] >= 0


def test_percentiles_are_pooled():
    counts = dict.fromkeys(ADDED, 10)
    one = counts | {"l1_balance": 1.0, "balance": 0.5, "worst_step_balance": 0.9, "rounds_mean": 2.0}
    one |= {"rounds_max": 3, "producer_rows_max": 4, "interface_bytes": 5}
    one |= {"seconds": dict.fromkeys(PHASES, 1.0), "seconds_per_step": 5.0}
    balances = [[0.5, 1.0, 1.0], [1.0] * 7]
    found = overall_figures([one, one | {"balance": 1.0, "seconds_per_step": 7.0}], balances)
    assert found["balance_p5"] == pytest.approx(np.percentile([0.5] + [1.0] * 9, 5))
    assert found["balance"] == pytest.approx(40 / (20 / 0.5 + 20 / 1.0))
    assert found["seconds_per_step"] == 6.0 and found["seconds"]["sort"] == 2.0


def test_windows_off_and_planners(tmp_path, step):
    on = figures(tmp_path, step, "--dp", 2, *SMALL)
    off = figures(tmp_path, step, "--dp", 2, *SMALL, "--windows", "off")
    l1 = figures(tmp_path, step, "--dp", 2, *SMALL, "--planner", "l1")
    assert on["planner"] == "harts" and on["windows"] > 0
    assert on["decoder_tokens"] < off["decoder_tokens"]
    for one in (off, l1):
        assert (one["windows"], one["producers"], one["producer_tokens"], one["interface_bytes"]) == (0, 0, 0, 0)
        assert one["residual_tokens"] == one["compact_tokens"] == one["l1_tokens"]
        assert one["slots"] == one["l1_slots"]
        assert (one["max_window_slots"], one["max_live_producers"]) == (1, 0)
    assert on["l1_tokens"] == off["l1_tokens"] == l1["l1_tokens"]


@pytest.mark.parametrize("mode", ["compact", "nodewise", "depthwise", "expanded"])
def test_modes_are_validated(tmp_path, step, mode):
    found = figures(tmp_path, step, "--dp", 2, *SMALL, "--mode", mode, "--validate")
    assert found["mode"] == mode
    assert (found["executed_rows"] == found["original_tokens"]) == (mode == "expanded")
    assert (found["replay_tokens"] > 0) == (mode == "compact")
    assert (found["windows"] > 0) == (mode != "expanded")


def test_unlimited_windows(tmp_path, step):
    found = figures(tmp_path, step, *SMALL, "--max-window-slots", 0)
    narrow = figures(tmp_path, step, *SMALL, "--max-window-slots", 2)
    assert found["max_window_slots"] == 0
    assert found["windows"] <= narrow["windows"]


def test_costs_of_models_and_files(tmp_path, step):
    tiny = figures(tmp_path, step, *SMALL, "--model", "ling")
    flash = figures(tmp_path, step, *SMALL, "--model", "ling", "--flavor", "flash")
    assert "tiny" in tiny["cost"]["source"] and flash["cost"]["forward_row"] > tiny["cost"]["forward_row"]
    rows = figures(tmp_path, step, *SMALL, "--model", "rows")
    assert rows["cost"]["forward_row"] == 1 and rows["cost"]["forward_pair"] == rows["cost"]["head_forward_row"] == 0
    assert rows["cost"] == figures(tmp_path, step, *SMALL)["cost"]
    assert rows["cost"]["handed_state_bytes"] == tiny["cost"]["handed_state_bytes"] and rows["interface_bytes"] > 0
    PlanCost(forward_row=3, row_alignment=16).save(tmp_path / "cost.json")
    own = figures(tmp_path, step, *SMALL, "--cost", tmp_path / "cost.json")
    assert own["cost"]["forward_row"] == 3 and own["row_alignment"] == 16
    assert own["decoder_tokens"] % 16 == 0


def test_rollout_files_and_limit(tmp_path):
    rollouts = tmp_path / "rollouts.parquet"
    write_synthetic(rollouts, trajectories=8, seed=3)
    whole = figures(tmp_path, rollouts, "--capacity", 4096)
    part = figures(tmp_path, rollouts, "--capacity", 4096, "--limit", 3, "--scheme", "step")
    assert (whole["trajectories"], part["trajectories"]) == (8, 3)
    cut = figures(tmp_path, rollouts, "--capacity", 64, "--overlong", "truncate")
    assert cut["original_tokens"] <= 8 * 64


def test_table_and_standard_output(tmp_path, step, capsys):
    assert common.run(main, [str(step), *map(str, SMALL), "--json", "-"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["original_tokens"] > 0
    for word in ("level 1", "bound", "windows", "producers", "balance", "seconds", "layout"):
        assert word in captured.err


def test_the_command_warms_up_and_measures_memory(tmp_path, step):
    out = tmp_path / "figures.json"
    code = "from harts_titan.cli.plan import entry; entry()"
    arguments = [step, "--dp", "2", *map(str, SMALL), "--json", out]
    subprocess.run([sys.executable, "-c", code, *map(str, arguments)], check=True, timeout=600, capture_output=True)
    found = json.loads(out.read_text())
    assert found["compile_seconds"] > 0
    assert found["peak_memory_bytes"] >= found["memory_before_read_bytes"] > 2**20
    # Nothing is compiled while it is timed.
    assert found["seconds_per_step"] < 0.5


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("npz", []),
        ("jsonl", []),
        ("parquet", []),
        ("parquet", ["--mode", "nodewise"]),
        ("nodes.npz", ["--mode", "nodewise"]),
        ("nodes.npz", ["--mode", "depthwise", "--windows", "off"]),
        ("npz", ["--mode", "expanded"]),
        ("parquet", ["--windows", "off"]),
        ("npz", ["--max-window-slots", "0"]),
    ],
)
def test_nothing_is_compiled_while_it_is_timed(tmp_path, kind, arguments):
    """In a process of its own: here other tests have compiled everything."""
    path = tmp_path / f"step.{kind}"
    if kind == "npz":
        write_npz(path, tree(0))
    elif kind == "nodes.npz":
        write_npz(path, tree(0), node_start=np.arange(0, sum(map(len, tree(0))), 9))
    else:
        write_synthetic(path, trajectories=12, seed=1)
    code = (
        "import sys\n"
        "from harts_titan.cli import plan\n"
        "from harts_titan.tree.compiled import planner_signatures\n"
        "warm_up, known = plan.warm_up, {}\n"
        "def recorded(settings):\n"
        "    seconds = warm_up(settings)\n"
        "    known.update(planner_signatures())\n"
        "    return seconds\n"
        "plan.warm_up = recorded\n"
        "plan.main(sys.argv[1:])\n"
        "assert known['harts_titan.tree.sorting._merge']\n"
        "if 'off' not in sys.argv and 'expanded' not in sys.argv:\n"
        "    assert known['harts_titan.tree.levelling.deepen'] and known['harts_titan.tree.levelling.fit_producer']\n"
        "new = {name: types - known[name] for name, types in planner_signatures().items() if types - known[name]}\n"
        "assert len(known) > 20 and any(known.values())\n"
        "assert not new, new\n"
    )
    command = [sys.executable, "-c", code, str(path), "--dp", "2", *arguments]
    done = subprocess.run(command, timeout=600, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_cold_cache_is_said(capsys, monkeypatch):
    """Once per machine: as soon as the first kernels turn out not to be in numba's cache."""
    options = build_parser().parse_args(["step.npz"])
    settings = settings_of(options)
    counts = iter([0, 0, 3, 7])
    monkeypatch.setattr(plan_module, "compilations", lambda: next(counts))
    WARM_UP(settings)
    assert not capsys.readouterr().err
    WARM_UP(settings)
    assert capsys.readouterr().err == "compiling the planner (once per machine, about a minute)\n"


def test_what_the_trainer_executes_is_said(step, capsys):
    assert common.run(main, [str(step), *map(str, SMALL)]) == 0
    shown = capsys.readouterr().out
    assert "trainer today" in shown and "--windows off" in shown and "harts, compact" in shown
    assert common.run(main, [str(step), *map(str, SMALL), "--windows", "off"]) == 0
    assert "trainer today" not in capsys.readouterr().out
    assert common.run(main, [str(step), *map(str, SMALL), "--mode", "expanded"]) == 0
    shown = capsys.readouterr().out
    assert "trainer today" not in shown and "executed rows" in shown and "harts, expanded" in shown


def test_what_did_not_fit_is_counted(tmp_path, capsys):
    path = tmp_path / "rollouts.jsonl"
    rows = [{"tokens": list(range(n)), "loss_mask": [0] + [1] * (n - 1)} for n in (3, 70, 90)]
    path.write_text("\n".join(map(json.dumps, rows)))
    for policy, expected in (("drop", (2, 0, 160, 158)), ("truncate", (0, 2, 32, 32))):
        found = figures(tmp_path, path, path, *SMALL, "--overlong", policy)
        names = ("dropped", "truncated", "lost_tokens", "lost_trained_tokens")
        counts = dict(zip(names, expected, strict=True))
        assert [one["overlong"] for one in found["steps"]] == [counts, counts]
        assert found["overlong"] == {name: 2 * count for name, count in counts.items()}
        assert f"{2 * counts['lost_tokens']} tokens lost" in capsys.readouterr().out
    assert "overlong" not in figures(tmp_path, path, "--capacity", 90, "--chunk-size", 8)


# The plan file.


@pytest.mark.parametrize("mode", ["compact", "nodewise", "depthwise"])
def test_plan_file(tmp_path, mode):
    steps = [tree(0), tree(1)]
    files = [write_npz(tmp_path / f"step{i}.npz", x) for i, x in enumerate(steps)]
    found = figures(tmp_path, *files, "--dp", 2, *SMALL, "--mode", mode, "--save", tmp_path / "plan.npz")
    with np.load(tmp_path / "plan.npz", allow_pickle=False) as content:
        saved = dict(content)
    assert str(saved["format"]) == plan_file.FORMAT and saved["num_steps"] == 2
    for name in plan_file.HEADER:
        assert saved[name] == found[name] and saved[name].dtype == np.int64, name
    for name, value in found["cost"].items():
        assert saved[f"cost_{name}"] == value, name
    arrays = {f"s{i}_{name}" for i in range(2) for name in INTEGER_ARRAYS}
    costs = {f"cost_{name}" for name in found["cost"]}
    assert set(saved) == arrays | costs | set(plan_file.HEADER) | {"format", "num_steps"}
    assert all(saved[name].dtype == np.int64 for name in arrays)
    for i, trajectories in enumerate(steps):
        check_rows({name: saved[f"s{i}_{name}"] for name in INTEGER_ARRAYS}, trajectories, found["steps"][i])


def check_rows(saved, trajectories, expected):
    """Rows of every item from its definition, and from its sequences."""
    window_J = np.repeat(np.arange(len(saved["window_ptr_W1"]) - 1), np.diff(saved["window_ptr_W1"]))
    complete, produced = {}, {}
    for x, tokens in enumerate(trajectories):
        d, j = saved["replica_N"][x], saved["slot_N"][x]
        rows = [tuple(tokens[: p + 1]) for p in range(len(tokens))]
        complete.setdefault((0, d, j), set()).update(rows)
        if saved["shared_N"][x]:
            produced.setdefault((1, d, window_J[j]), set()).update(rows[: saved["shared_N"][x]])
    wanted = {key: rows - produced.get((1, key[1], window_J[key[2]]), set()) for key, rows in complete.items()}
    wanted |= produced
    replay = 0
    items = list(zip(*(saved[f"item_{name}_I"].tolist() for name in ("kind", "replica", "index")), strict=True))
    assert set(items) == set(wanted) and len(items) == len(set(items))
    for i, item in enumerate(items):
        lo, hi = saved["sequence_ptr_I1"][i : i + 2]
        got = []
        for q in range(lo, hi):
            tokens = trajectories[saved["sequence_trajectory_Q"][q]]
            start, end = saved["sequence_start_Q"][q], saved["sequence_end_Q"][q]
            got += [tuple(tokens[: p + 1]) for p in range(start, end)]
            replay += start - saved["sequence_anchor_Q"][q]
        assert len(got) == len(set(got)) and set(got) == wanted[item]
        rounds = saved["sequence_round_Q"][lo:hi]
        assert saved["item_rounds_I"][i] == (rounds.max() + 1 if len(rounds) else 0)
        assert (np.diff(rounds) >= 0).all()
    assert replay == expected["replay_tokens"]
    assert sum(map(len, wanted.values())) == expected["executed_rows"]
    events = saved["events_V2"].tolist()
    num_slots = saved["window_ptr_W1"][-1]
    assert [j for kind, j in events if kind == 1] == list(range(num_slots))
    assert sorted(w for kind, w in events if kind == 0) == sorted({item[2] for item in items if item[0] == 1})


def test_plan_files_are_reproducible(tmp_path, step):
    for name in ("a.npz", "b.npz"):
        figures(tmp_path, step, "--dp", 2, *SMALL, "--save", tmp_path / name)
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()


@pytest.mark.parametrize("kind", ["link", "file", "new"])
def test_an_interrupted_plan_file_leaves_the_old_one_and_the_figures(tmp_path, step, capsys, monkeypatch, kind):
    target, named = tmp_path / "plan.npz", tmp_path / ("link.npz" if kind == "link" else "plan.npz")
    if kind != "new":
        target.write_bytes(b"old")
    if kind == "link":
        named.symlink_to(target)

    def broken(stream, **content):
        stream.write(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(np, "savez_compressed", broken)
        assert "--save" in refusal(capsys, step, *SMALL, "--save", named, "--json", tmp_path / "figures.json")
    assert json.loads((tmp_path / "figures.json").read_text())["slots"] > 0
    assert target.read_bytes() == b"old" if kind != "new" else not target.exists()
    figures(tmp_path, step, *SMALL, "--save", named)
    assert named.is_symlink() == (kind == "link") and np.load(target)["num_steps"] == 1
    assert not list(tmp_path.glob(".plan*"))


# The picture.


@pytest.mark.parametrize("windows", ["on", "off"])
def test_plot_is_a_png(tmp_path, step, windows):
    figures(tmp_path, step, step, "--dp", 2, *SMALL, "--windows", windows, "--plot", tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_plot_without_sharing(tmp_path):
    path = write_npz(tmp_path / "one.npz", [[1, 2, 3]])
    figures(tmp_path, path, "--plot", tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 1000


@pytest.mark.parametrize("seed", range(3))
def test_forest_lines_have_every_row_once(seed):
    trajectories = tree(seed, tasks=2)
    offsets = np.concatenate([[0], np.cumsum([len(x) for x in trajectories])])
    order_N, lcp_N = sort_trajectories(np.concatenate(trajectories).astype(np.int32), offsets)
    length_N = np.diff(offsets)[order_N]
    shared_N = np.minimum(length_N, 7)
    lines = forest_lines(length_N, lcp_N, shared_N)
    count = {kind: sum(hi - lo for lo, hi, _ in lines[kind]) for kind in ("producer", "shared", "own")}
    users: dict[tuple[int, ...], int] = {}
    for x in trajectories:
        for p in range(len(x)):
            users[tuple(x[: p + 1])] = users.get(tuple(x[: p + 1]), 0) + 1
    assert sum(count.values()) == len(users) == build_forest(length_N, lcp_N).num_tokens
    assert count["producer"] == sum(len(row) <= 7 for row in users)
    assert count["own"] == sum(len(row) > 7 and n == 1 for row, n in users.items())


# Inputs at the edge.


@pytest.mark.parametrize("windows", ["on", "off"])
@pytest.mark.parametrize(
    ("trajectories", "arguments", "expected"),
    [
        ([[5, 6, 7]], [], {"l1_tokens": 3, "slots": 1, "balance": 1.0}),
        ([[5]], [], {"l1_tokens": 1, "slots": 1, "decoder_tokens": 8}),
        ([[5, 6, 7]] * 6, [], {"l1_tokens": 3, "original_tokens": 18, "replay_tokens": 0}),
        ([[5, 6, 7]] * 6, ["--dp", 2], {"l1_tokens": 6, "slots": 1, "balance": 1.0}),
        ([[i, 0, 0] for i in range(6)], ["--dp", 2], {"l1_tokens": 18, "producers": 0, "compression": 1.0}),
        ([[i, 0, 0] for i in range(6)], ["--dp", 6], {"l1_tokens": 18, "slots": 1, "balance": 1.0}),
        ([[1] * 64, [2] * 5], [], {"l1_tokens": 69}),
        ([[1] * n for n in range(1, 65)], [], {"l1_tokens": 64, "slots": 1}),
    ],
)
def test_degenerate_inputs(tmp_path, trajectories, arguments, expected, windows):
    path = write_npz(tmp_path / "step.npz", trajectories)
    found = figures(tmp_path, path, *SMALL, *arguments, "--windows", windows, "--validate")
    assert {name: found[name] for name in expected} == expected
    assert found["l1_tokens"] >= found["l1_lower_bound"] >= found["distinct_tokens"]


@pytest.mark.parametrize(
    ("trajectories", "arguments", "needles"),
    [
        ([[1] * 65, [2]], SMALL, ("step.npz", "offsets", "trajectory 0", "65 tokens", "--capacity (64)")),
        ([[1, 2], [3]], ["--dp", 3], ("step.npz", "2 trajectories", "--dp", "3")),
        ([[1, 2], [3]], ["--dp", 2, "--limit", 1], ("step.npz", "1 trajectories", "--dp")),
    ],
)
def test_what_cannot_be_planned_is_refused(tmp_path, capsys, trajectories, arguments, needles):
    message = refusal(capsys, write_npz(tmp_path / "step.npz", trajectories), *arguments)
    assert all(needle in message for needle in needles), message


@pytest.mark.parametrize(
    ("changes", "needles"),
    [
        ({"tokens": None}, ("lacks tokens", "offsets")),
        ({"offsets": None}, ("lacks offsets", "tokens")),
        ({"tokens": np.array([1.0, 2.0, 3.0])}, ("tokens", "float64")),
        ({"tokens": np.array([True, False, True])}, ("tokens", "bool")),
        ({"tokens": np.array([1, None, 3], object)}, ("tokens", "object")),
        ({"tokens": np.array([[1, 2, 3]])}, ("tokens", "(1, 3)", "1-D")),
        ({"tokens": np.array([1, 2, -5])}, ("tokens", "-5", "entry 2", "trajectory 1, token 0")),
        ({"tokens": np.array([1, 2**31, 3])}, ("tokens", "2147483648", "trajectory 0, token 1")),
        ({"offsets": np.array([0.0, 3.0])}, ("offsets", "float64")),
        ({"offsets": np.array([[0, 3]])}, ("offsets", "1-D")),
        ({"offsets": np.array([0], np.int64)}, ("offsets", "1 entries")),
        ({"offsets": np.array([1, 3])}, ("offsets", "from 1 to 3", "(3)")),
        ({"offsets": np.array([0, 2])}, ("offsets", "from 0 to 2")),
        ({"offsets": np.array([0, 2, 2, 3])}, ("offsets", "trajectory 1 is empty")),
        ({"offsets": np.array([0, 2, 1, 3], np.uint64)}, ("offsets", "trajectory 1 ends at 1, before it starts at 2")),
    ],
)
def test_npz_refusals_name_file_and_field(tmp_path, capsys, changes, needles):
    path = write_npz(tmp_path / "bad.npz", [[1, 2], [3]], **changes)
    message = refusal(capsys, path)
    assert all(needle in message for needle in ("bad.npz", *needles)), message


@pytest.mark.parametrize("damage", ["empty", "text", "cut", "flipped"])
def test_damaged_npz_is_refused(tmp_path, capsys, damage):
    path = write_npz(tmp_path / "bad.npz", tree(0))
    content = bytearray(path.read_bytes())
    if damage == "flipped":
        content[len(content) // 4] ^= 255
    path.write_bytes({"empty": b"", "text": b"tokens", "cut": content[: len(content) // 2]}.get(damage, content))
    assert "bad.npz" in refusal(capsys, path)
    assert "bad.npz" in refusal(capsys, tmp_path / "absent" / "bad.npz")


@pytest.mark.parametrize("dtype", ["int64", "uint16", "uint64", ">i4"])
def test_other_integers_are_converted(tmp_path, dtype):
    path = write_npz(
        tmp_path / "step.npz", [[1, 2], [3]], tokens=np.array([1, 2, 3], dtype), offsets=np.array([0, 2, 3], "i4")
    )
    tokens, offsets = read_npz(str(path))
    assert tokens.dtype == np.int32 and offsets.dtype == np.int64
    assert (tokens.tolist(), offsets.tolist()) == ([1, 2, 3], [0, 2, 3])
    np.savez_compressed(path, tokens=np.array([1, 2, 3], dtype), offsets=np.array([0, 2, 3]))
    tokens, offsets = read_npz(str(path), limit=1)
    assert (tokens.tolist(), offsets.tolist()) == ([1, 2], [0, 2])


@pytest.mark.slow
def test_reading_keeps_one_copy_of_the_tokens(tmp_path):
    path = tmp_path / "large.npz"
    np.savez(path, tokens=np.zeros(50_000_000, np.int32), offsets=np.array([0, 50_000_000]))
    code = (
        "import sys; from harts_titan.cli.plan_read import peak_bytes, read_npz, resident_bytes\n"
        "before = resident_bytes(); tokens, _ = read_npz(sys.argv[1]); print((peak_bytes() - before) / tokens.nbytes)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], check=True, capture_output=True, text=True)
    assert float(done.stdout) < 1.2


def test_memory_figures():
    assert peak_bytes() >= resident_bytes() > 2**20


# Options.


@pytest.mark.parametrize(
    ("arguments", "needles"),
    [
        (["--planner", "l1", "--windows", "on"], ("--windows on", "--planner l1")),
        (["--planner", "ortools", "--windows", "on"], ("--windows on", "--planner ortools")),
        (["--mode", "expanded", "--windows", "on"], ("--windows on", "--mode expanded")),
        (["--windows", "off", "--max-window-slots", "4"], ("--max-window-slots", "--windows off")),
        (["--planner", "l1", "--max-live-producers", "2"], ("--max-live-producers", "--planner l1")),
        (["--mode", "expanded", "--max-window-slots", "0"], ("--max-window-slots", "--mode expanded")),
        (["--ortools-seconds", "3"], ("--ortools-seconds", "--planner ortools")),
        (["--ortools-first", "--planner", "l1"], ("--ortools-first", "--planner ortools")),
        (["--planner", "ortools", "--ortools-seconds", "0"], ("--ortools-seconds (0.0)",)),
        (["--cost", "cost.json", "--flavor", "tiny"], ("--cost", "--flavor")),
        (["--model", "rows", "--flavor", "tiny"], ("--flavor", "--model rows")),
        (["--cost", "absent.json"], ("absent.json",)),
        (["--model", "nosuch"], ("nosuch",)),
        (["--model", "ling", "--flavor", "nosuch"], ("nosuch", "tiny")),
        (["--dp", "0"], ("--dp (0)",)),
        (["--capacity", "0"], ("--capacity (0)",)),
        (["--chunk-size", "0"], ("--chunk-size (0)",)),
        (["--max-window-slots", "-1"], ("--max-window-slots (-1)",)),
        (["--max-live-producers", "0"], ("--max-live-producers (0)",)),
        (["--limit", "0"], ("--limit (0)",)),
        (["--overlong", "drop"], ("--overlong", ".npz")),
        (["--scheme", "step"], ("--scheme", ".npz")),
        (["--capacity", str(2**63)], (f"--capacity ({2**63})", "at most")),
        (["--chunk-size", str(2**63)], (f"--chunk-size ({2**63})", "at most")),
        (["--model", "llama3"], ("llama3", "ling")),
        (["absent.npz"], ("absent.npz",)),
        (["absent.parquet"], ("absent.parquet", "check INPUT")),
        (["--json", ""], ("--json", "empty")),
        (["--json", "/dev/full"], ("--json: '/dev/full' cannot be written", "No space")),
        (["--save", "/dev/full"], ("--save: '/dev/full' cannot be written", "No space")),
        (["--save", "{tmp}/../{tmp.name}/step.npz"], ("--save", "INPUT")),
        (["--mode", "expanded", "--save", "{tmp}/plan.npz"], ("--save", "--mode expanded")),
        (["--save", "-"], ("--save",)),
        (["--save", "{tmp}"], ("--save", "folder")),
        (["--save", "{tmp}/step.npz"], ("--save", "INPUT")),
        (["--plot", "{tmp}/plan.pdf"], ("--plot", ".png")),
        (["--plot", "{tmp}/absent/plan.png"], ("--plot", "absent")),
        (["--json", "{tmp}/absent/plan.json"], ("--json", "absent")),
        (["--json", "{tmp}/same", "--save", "{tmp}/same"], ("--save", "--json")),
    ],
)
def test_option_refusals(tmp_path, step, capsys, arguments, needles):
    message = refusal(capsys, step, *(argument.format(tmp=tmp_path) for argument in arguments))
    assert all(needle in message for needle in needles), message
    assert not list(tmp_path.glob("plan*"))


def test_a_link_does_not_overwrite_an_input(tmp_path, step, capsys):
    before = step.read_bytes()
    (tmp_path / "link").symlink_to(step)
    assert "INPUT" in refusal(capsys, step, *SMALL, "--save", tmp_path / "link")
    (tmp_path / "folder").mkdir()
    inside = tmp_path / "folder" / "rollouts.jsonl"
    inside.write_text(json.dumps({"tokens": [1, 2], "loss_mask": [0, 1]}))
    assert "INPUT" in refusal(capsys, tmp_path / "folder", "--json", inside)
    assert step.read_bytes() == before


def test_messages_name_the_input_and_the_options(tmp_path, step, capsys):
    # Nine trajectories of a full microbatch each: no multiple of two.
    odd = write_npz(tmp_path / "odd.npz", [[i] * 64 for i in range(9)])
    message = refusal(capsys, step, odd, "--dp", 2, *SMALL)
    assert "odd.npz: no partition of 9 trajectories" in message
    assert "is a folder" in refusal(capsys, (tmp_path / "folder.npz").mkdir() or tmp_path / "folder.npz")
    rows = [{"tokens": list(range(n)), "loss_mask": [0] + [1] * (n - 1)} for n in (3, 90)]
    path = tmp_path / "rollouts.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    message = refusal(capsys, path, *SMALL)
    assert "--capacity (64)" in message and "tree." not in message
    assert figures(tmp_path, path, *SMALL, "--overlong", "drop")["trajectories"] == 1


def test_suffix_of_any_case(tmp_path, step):
    assert figures(tmp_path, step.rename(tmp_path / "STEP.NPZ"), *SMALL)["slots"] > 0


# The baseline.


@pytest.mark.slow
@pytest.mark.parametrize("budget", [["--ortools-first"], ["--ortools-seconds", 1]])
def test_the_ortools_baseline_is_measured_alike(tmp_path, budget):
    pytest.importorskip("ortools")
    step = write_npz(tmp_path / "step.npz", tree(0, tasks=2, children=6))
    arguments = ("--dp", 2, *SMALL, "--planner", "ortools", *budget, "--validate", "--save", tmp_path / "plan.npz")
    found = figures(tmp_path, step, *arguments)
    assert found["planner"] == "ortools" and found["windows"] == found["producers"] == 0
    assert found["l1_tokens"] == found["residual_tokens"] >= found["l1_lower_bound"]
    assert found["ortools_first"] == ("--ortools-first" in budget)
    report = found["steps"][0]["ortools"]
    assert len(report["shards"]) == 2 and report["shards"][0]["status"] in ("OPTIMAL", "FEASIBLE")
    assert found["seconds"]["l1"] >= report["seconds"] > 0


def test_without_ortools_the_extra_is_named(step, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ortools", None)
    monkeypatch.setitem(sys.modules, "ortools.sat", None)
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    assert "harts_titan[ortools]" in refusal(capsys, step, "--planner", "ortools")
