"""The independent checker proves what ``harts-plan`` writes and refuses every damage to plan file and figures."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from harts_titan.cli import common
from harts_titan.cli.plan import main
from tests import plan_checker
from tests.forests import random_forest
from tests.plan_checker import Refused, check, check_step

SMALL = ("--capacity", 64, "--chunk-size", 4)


@pytest.fixture(autouse=True, scope="module")
def compiled_once():
    """Warm-up is for timings; here it would run once per command."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("harts_titan.cli.plan.warm_up", lambda settings: 0.25)
        yield


def write(folder: Path, steps: list[tuple[np.ndarray, np.ndarray]]) -> list[Path]:
    paths = [folder / f"step{i}.npz" for i in range(len(steps))]
    for path, (tokens, offsets) in zip(paths, steps):
        np.savez(path, tokens=tokens, offsets=offsets)
    return paths


def tasks(seed: int, *, count: int = 3, children: int = 12) -> tuple[np.ndarray, np.ndarray]:
    """A prefix per task, forks at several depths; no task fits one microbatch of 64 rows."""
    rng = np.random.default_rng(seed)
    paths = []
    for _ in range(count):
        trunk = rng.integers(0, 9, 36)
        tails = [(trunk[: rng.integers(12, 36)], rng.integers(0, 9, rng.integers(4, 24))) for _ in range(children)]
        paths += [*map(np.concatenate, tails), trunk, trunk]
    return np.concatenate(paths).astype(np.int32), np.cumsum([0, *map(len, paths)])


def planned(folder: Path, inputs: list[Path], *arguments: object) -> tuple[Path, Path]:
    """Run the command; return its plan file and its JSON."""
    plan, out = folder / "plan.npz", folder / "figures.json"
    assert common.run(main, [*map(str, (*inputs, *arguments)), "--save", str(plan), "--json", str(out)]) == 0
    return plan, out


@pytest.mark.parametrize(
    "options", [(), ("--windows", "off"), ("--planner", "l1"), ("--mode", "nodewise"), ("--mode", "depthwise")]
)
@pytest.mark.parametrize("dp", [1, 2, 3, 4])
def test_plans_are_proven(tmp_path, dp, options):
    steps = [random_forest(dp + 4 * i, chunk_size=4, vocab_size=6, num_trajectories=30) for i in range(3)]
    inputs = write(tmp_path, [*steps, tasks(dp)])
    total = check(inputs, *planned(tmp_path, inputs, "--dp", dp, *SMALL, *options))
    assert total["rounds_max"] > 1 and (total["replay_tokens"] > 0) == ("--mode" not in options)
    assert (
        (total["producers"] > 0)
        == (total["windows"] > 0)
        == (total["handed_states"] > 0)
        == ("off" not in options and "l1" not in options)
    )


@pytest.mark.parametrize("windows", ["on", "off"])
@pytest.mark.parametrize("mode", ["nodewise", "depthwise", "compact"])
def test_nodes_that_the_input_names(tmp_path, mode, windows):
    """Figures follow from the definition; positions behind a limit are left out; other modes do not change."""
    tokens, offsets = tasks(7)
    nodes = np.flatnonzero(np.random.default_rng(7).random(len(tokens)) < 0.05)
    np.savez(tmp_path / "named.npz", tokens=tokens, offsets=offsets, node_start=nodes)
    np.savez(
        tmp_path / "first.npz",
        tokens=tokens[: offsets[20]],
        offsets=offsets[:21],
        node_start=nodes[nodes < offsets[20]],
    )
    (plain,) = write(tmp_path, [(tokens, offsets)])
    options = ["--dp", 2, *SMALL, "--mode", mode, "--windows", windows]
    totals = {}
    for path in (tmp_path / "named.npz", plain, tmp_path / "first.npz"):
        totals[path.stem] = check([path], *planned(tmp_path, [path], *options))
    assert (totals["named"]["segments"] > totals[plain.stem]["segments"]) == (mode != "compact")
    _, out = planned(tmp_path, [tmp_path / "named.npz"], *options, "--limit", 20)
    assert json.loads(out.read_text())["segments"] == totals["first"]["segments"]
    planned(tmp_path, [tmp_path / "named.npz"], *options, "--validate")


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        (np.array([3, 1]), "node_start[1] is 1 after 3"),
        (np.array([999]), "node_start[0] is 999; must be a position of the"),
        (np.array([-1]), "node_start[0] is -1"),
        (np.array([0.5]), "node_start: is float64"),
        (np.zeros((1, 1), int), "node_start: is int64 of shape (1, 1)"),
    ],
)
def test_nodes_that_cannot_be_are_refused(tmp_path, capsys, nodes, message):
    np.savez(tmp_path / "step.npz", tokens=np.arange(9, dtype=np.int32), offsets=np.array([0, 4, 9]), node_start=nodes)
    assert common.run(main, [str(tmp_path / "step.npz")]) == 2
    error = capsys.readouterr().err
    assert "step.npz: " in error and message in error


@pytest.mark.parametrize("dp", [2, 3, 8])
def test_prefixes_of_each_other(tmp_path, dp):
    # Microbatches of short ones do not have all rows of the path that all of them lie on.
    paths = [np.arange(n) for n in range(1, 24)]
    inputs = write(tmp_path, [(np.concatenate(paths).astype(np.int32), np.cumsum([0, *map(len, paths)]))])
    total = check(inputs, *planned(tmp_path, inputs, "--dp", dp, "--planner", "l1", *SMALL))
    assert total["l1_lower_bound"] == 23 + dp - 1 and total["slots"] == 1


@pytest.mark.parametrize("first", range(0, 64, 16))
def test_forks_at_every_offset_of_a_chunk(tmp_path, first):
    seeds = range(first, first + 16)
    inputs = write(tmp_path, [random_forest(seed, chunk_size=64, num_trajectories=24) for seed in seeds])
    # Few enough replicas for several slots each: producers serve several microbatches.
    options = ("--dp", 1 + first // 16 % 3, "--capacity", 600, "--max-window-slots", first // 16 * 2)
    total = check(inputs, *planned(tmp_path, inputs, *options))
    assert total["producers"] > 0 and total["rounds_max"] > 1


@pytest.mark.parametrize("seed", range(4))
def test_level_1_is_the_plan_of_planner_l1(tmp_path, seed):
    inputs = write(tmp_path, [tasks(seed), random_forest(seed, chunk_size=4, num_trajectories=30)])
    plan, out = planned(tmp_path, inputs, "--dp", 2, *SMALL)
    check(inputs, plan, out)
    found = json.loads(out.read_text())
    alone = check(inputs, *planned(tmp_path, inputs, "--dp", 2, *SMALL, "--planner", "l1"))
    assert {name: found[name] for name in ("l1_tokens", "l1_slots", "l1_lower_bound")} == {
        "l1_tokens": alone["compact_tokens"],
        "l1_slots": alone["slots"],
        "l1_lower_bound": alone["l1_lower_bound"],
    }
    assert found["l1_balance"] == pytest.approx(alone["balance"], rel=1e-12)


def test_the_command_itself(tmp_path):
    inputs = write(tmp_path, [tasks(0)])
    plan, out = planned(tmp_path, inputs, "--dp", 2, *SMALL)
    command = [sys.executable, plan_checker.__file__, *inputs, "--plan", plan, "--json", out]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("proven: ") and "decoder_tokens" in done.stdout
    out.write_text(out.read_text().replace('"slots": ', '"slots": 1'))
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "slots" in done.stderr


def test_the_checker_shares_no_code():
    tree = ast.parse(Path(plan_checker.__file__).read_text())
    names = [
        node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    assert sorted(names) == ["argparse", "json", "numpy", "pathlib", "sys"]


# Rounds are the fewest.


def fewest_rounds(start: np.ndarray, end: np.ndarray, up: np.ndarray, chunk: int) -> int:
    """The recursion of harts.md 4: ``pre`` if the entry anchor is ready before the call, ``within`` if made in it."""
    pre, within, children = [1] * len(start), [1] * len(start), [[] for _ in start]
    for v in reversed(range(len(start))):
        if children[v]:
            top = [0, *sorted(1 + pre[u] for u in children[v])]
            within[v] = min(max(within[u], top[-2] if 1 + pre[u] == top[-1] else top[-1]) for u in children[v])
            pre[v] = within[v] if end[v] >= start[v] // chunk * chunk + chunk else top[-1] - 1
        if up[v] >= 0:
            children[up[v]].append(v)
    return max(pre[v] for v in range(len(start)) if up[v] < 0)


@pytest.mark.parametrize("windows", ["on", "off"])
def test_rounds_are_the_fewest(tmp_path, windows):
    inputs = write(tmp_path, [random_forest(seed, chunk_size=4, num_trajectories=40) for seed in range(12)])
    plan, out = planned(tmp_path, inputs, "--dp", 2, "--capacity", 128, "--chunk-size", 4, "--windows", windows)
    check(inputs, plan, out)
    seen = set()
    with np.load(plan) as file:
        for i, path in enumerate(inputs):
            with np.load(path) as step:
                _, rows, *trie = plan_checker.trie(step["tokens"], step["offsets"])
            ptr = file[f"s{i}_sequence_ptr_I1"]
            sequences = np.stack([file[f"s{i}_sequence_{name}_Q"] for name in ("trajectory", "start", "end")], axis=1)
            for item, rounds in enumerate(file[f"s{i}_item_rounds_I"]):
                made = [rows[x][a:b] for x, a, b in sequences[ptr[item] : ptr[item + 1]]]
                assert rounds == (
                    fewest_rounds(*plan_checker.segments(np.sort(np.concatenate(made)), *trie), 4) if made else 0
                )
                seen.add(int(rounds))
    assert seen >= {1, 2, 3}


# Damage.


Arrays = dict[str, np.ndarray]
Figures = dict[str, object]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> tuple[list[Path], Arrays, Figures]:
    """Two steps with windows of several slots, producers, several rounds, replay."""
    folder = tmp_path_factory.mktemp("base")
    inputs = write(folder, [tasks(0), tasks(1, count=2)])
    plan, out = planned(folder, inputs, "--dp", 2, *SMALL, "--max-window-slots", 3, "--max-live-producers", 1)
    total = check(inputs, plan, out)
    assert total["windows"] >= 5 and total["producers"] >= 4 and total["rounds_max"] > 1 and total["replay_tokens"] > 0
    with np.load(plan) as file:
        return inputs, dict(file), json.loads(out.read_text())


def refused_at(folder: Path, inputs: list[Path], plan: Arrays, figures: Figures) -> int:
    """Return the line of the checker that refuses, 0 if none does."""
    with (folder / "plan").open("wb") as stream:
        np.savez(stream, **plan)
    (folder / "figures").write_text(json.dumps(figures))
    try:
        check(inputs, folder / "plan", folder / "figures")
    except Refused as refusal:
        return traceback.extract_tb(refusal.__traceback__)[-2].lineno
    return 0


def changed(array: np.ndarray, at: object, value: object) -> np.ndarray:
    out = array.copy()
    out[at] = value
    return out


def damaged_arrays(plan: Arrays) -> Iterator[tuple[str, Arrays]]:
    """Every array of the second step, damaged in several ways."""
    own = {name: plan[f"s1_{name}"] for name in plan_checker.STEP}

    def one(name: str, array: np.ndarray, how: str) -> tuple[str, Arrays]:
        return f"{name} {how}", plan | {f"s1_{name}": array}

    for name, array in own.items():
        yield f"{name} absent", {key: value for key, value in plan.items() if key != f"s1_{name}"}
        yield one(name, array.astype(np.int32), "int32")
        yield one(name, array.astype(np.float64), "float")
        yield one(name, array[None], "one more dimension")
        yield one(name, array[:-1], "without its last entry")
        yield one(name, array[1:], "without its first entry")
        yield one(name, np.concatenate([array, array[-1:]]), "with its last entry twice")
        yield one(name, array[:0], "empty")
        yield one(name, np.zeros_like(array), "all zero")
        yield one(name, array[::-1].copy(), "reversed")
        yield one(name, plan[f"s0_{name}"], "of the other step")
    # Trajectories with a sequence: one that adds no rows may run elsewhere at no cost.
    movers = np.unique(own["sequence_trajectory_Q"])
    for name in ("replica_N", "slot_N"):
        for x in movers[::3]:
            for by in (-1, 1):
                yield one(name, changed(own[name], x, own[name][x] + by), f"of trajectory {x} {by:+}")
    singles = ["shared_N", "item_kind_I", "item_replica_I", "item_index_I", "item_rounds_I", "sequence_ptr_I1"]
    singles += ["sequence_anchor_Q", "sequence_start_Q", "sequence_end_Q", "window_ptr_W1"]
    for name in singles:
        for k in range(0, len(own[name]), max(1, len(own[name]) // 12)):
            for by in (-4, -1, 1, 4):
                yield one(name, changed(own[name], k, own[name][k] + by), f"entry {k} {by:+}")
    of = own["sequence_trajectory_Q"]
    strangers = [np.flatnonzero(own["replica_N"] != own["replica_N"][x]) for x in of]
    for q in range(0, len(of), 5):
        for x in (-1, len(own["slot_N"]), *strangers[q][::9]):
            yield one("sequence_trajectory_Q", changed(of, q, x), f"sequence {q} to {x}")
    call, ptr = own["sequence_round_Q"], own["sequence_ptr_I1"]
    for i in np.flatnonzero(own["item_rounds_I"] > 1):
        part = slice(ptr[i], ptr[i + 1])
        yield one("sequence_round_Q", changed(call, part, 0), f"item {i} in round 0")
        yield one("sequence_round_Q", changed(call, part, call[part][::-1]), f"item {i} reversed")
        yield one("sequence_round_Q", changed(call, part, call[part] + 1), f"item {i} a round later")
        # Rounds and their number agree, but states are taken before they are made.
        rounds = changed(own["item_rounds_I"], i, 1)
        yield (
            f"item {i} in one round",
            plan | {"s1_sequence_round_Q": changed(call, part, 0), "s1_item_rounds_I": rounds},
        )
    longer = {name: np.append(own[name], own[name][-1:]) for name in plan_checker.STEP[4:9]}
    yield "an item more", plan | {f"s1_{name}": array for name, array in longer.items()}
    yield from damaged_windows(plan, own)
    events = own["events_V2"]
    for v in range(len(events)):
        yield one("events_V2", np.delete(events, v, axis=0), f"without {v}")
        yield one("events_V2", np.insert(events, v, events[v], axis=0), f"{v} twice")
        for column, by in ((0, -1), (0, 1), (0, 4), (1, -1), (1, 1)):
            yield one("events_V2", changed(events, (v, column), events[v, column] + by), f"{v}, {column}, {by:+}")
        # One producer at a time: nothing may change places here.
        if v:
            yield one("events_V2", changed(events, [v - 1, v], events[[v, v - 1]]), f"{v} exchanged")
    yield one("events_V2", events[:, :1], "of one column")
    first = events[np.argsort(events[:, 0] != 0, kind="stable")]
    yield one("events_V2", first, "all producers first")
    consumers = np.flatnonzero(events[:, 0] == 1)[:2]
    yield one("events_V2", changed(events, consumers, events[consumers[::-1]]), "consumers out of order")


def damaged_windows(plan: Arrays, own: Arrays) -> Iterator[tuple[str, Arrays]]:
    """An empty consumer beside a full one, windows cut and joined."""
    slot, bounds = own["slot_N"], own["window_ptr_W1"]
    w = int(np.flatnonzero(np.diff(bounds) > 1)[0])
    gone = (own["replica_N"] == 0) & (slot == bounds[w])
    yield "an empty consumer", plan | {"s1_slot_N": np.where(gone, bounds[w] + 1, slot)}
    yield "a window more", plan | {"s1_window_ptr_W1": np.insert(bounds, w + 1, bounds[w] + 1)}
    yield "a window less", plan | {"s1_window_ptr_W1": np.delete(bounds, 1)}
    yield "a window without slots", plan | {"s1_window_ptr_W1": np.insert(bounds, 1, bounds[1])}


def damaged_header(plan: Arrays, figures: Figures) -> Iterator[tuple[str, Arrays, Figures]]:
    """Every value of the file as a whole: alone, and with the JSON saying the same."""
    for name in [name for name in plan if not name.startswith(("s0_", "s1_"))]:
        yield f"{name} absent", {key: value for key, value in plan.items() if key != name}, figures
        if plan[name].dtype.kind == "U":
            yield f"{name} of other text", plan | {name: np.array("other")}, figures
            continue
        yield f"{name} int32", plan | {name: plan[name].astype(np.int32)}, figures
        yield f"{name} array", plan | {name: plan[name][None]}, figures
        for value in {int(plan[name]) + 1, int(plan[name]) - 1, 0} - {int(plan[name])}:
            yield f"{name} is {value}", plan | {name: np.array(value)}, figures
    yield "unknown key", plan | {"surprise": np.array(1)}, figures
    yield "unknown array", plan | {"s1_surprise": np.zeros(3, np.int64)}, figures
    yield "of a third step", plan | {"s2_slot_N": plan["s1_slot_N"]}, figures
    wrong = {"dp_degree": (1, 3), "capacity": (figures["producer_rows_max"] - 1, 40), "chunk_size": (2, 3, 8)}
    wrong |= {"row_alignment": (1, 7, 16), "max_window_slots": (1, 2), "max_live_producers": (-1, 0)}
    for name, values in wrong.items():
        for value in values:
            yield f"{name} {value} in file and JSON", plan | {name: np.array(value)}, figures | {name: value}
    # Without events of producers, windows look off.
    off = {name: array[(array[:, 0] % 3) != 0] for name, array in plan.items() if name.endswith("events_V2")}
    yield "windows off in both", plan | off | {"max_live_producers": np.array(0)}, figures | {"max_live_producers": 0}
    for name, value in figures["cost"].items():
        if name != "source":
            other = figures["cost"] | {name: value + 1}
            yield f"cost {name} in both", plan | {f"cost_{name}": np.array(value + 1)}, figures | {"cost": other}


def damaged_figures(figures: Figures) -> Iterator[tuple[str, Figures]]:
    """Every figure the checker knows, overall and of a step."""
    for where, one in (("overall", figures), ("step", figures["steps"][1])):

        def put(new: Figures, where: str = where) -> Figures:
            return new if where == "overall" else figures | {"steps": [figures["steps"][0], new]}

        checked = one.keys() - plan_checker.UNCHECKED
        assert len(checked) >= 32
        for name in sorted(checked):
            yield f"{where} {name} absent", put({key: value for key, value in one.items() if key != name})
            if isinstance(one[name], int | float):
                for value in (one[name] + 1, one[name] - 1, one[name] * (1 + 1e-9), str(one[name])):
                    if value != one[name] or type(value) is not type(one[name]):
                        yield f"{where} {name} {value}", put(one | {name: value})
        yield f"{where} surprise", put(one | {"surprise": 1})
    for name in figures["cost"]:
        yield f"cost {name}", figures | {"cost": figures["cost"] | {name: -1}}
    yield "a step less", figures | {"steps": figures["steps"][:1]}
    yield "steps exchanged", figures | {"steps": figures["steps"][::-1]}
    yield "other mode", figures | {"mode": "nodewise"}
    yield "other planner", figures | {"planner": "l1"}
    for name, value in (("l1_tokens", 1), ("l1_slots", 1), ("l1_balance", 1.5)):
        one = figures["steps"][1] | {name: value}
        yield f"impossible {name}", figures | {"steps": [figures["steps"][0], one]}


# Eight tokens and eight, the first four alike; consumers in two slots hang on one producer.
TOKENS, OFFSETS = np.array([1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 9, 9, 9, 9], np.int32), np.array([0, 8, 16])
HEAD = {"dp_degree": 1, "capacity": 16, "chunk_size": 4, "max_window_slots": 0, "max_live_producers": 1}
COST = {"forward_row": 1, "forward_pair": 1, "backward_row": 2, "backward_pair": 3, "head_forward_row": 5}
COST |= {"head_backward_row": 7, "row_alignment": 8, "shared_row_bytes": 10, "handed_state_bytes": 100}


def by_hand(
    shared: list[int], sequences: list[list[tuple[int, ...]]], *, slots: int = 2, nodewise: bool = False, nodes=()
):
    """Check a plan of consumers and one producer; a sequence is trajectory, anchor, start, end."""
    flat = np.array([sequence for item in sequences for sequence in item])
    events = [(0, 0), *((kind, j) for j in range(slots) for kind in (1, 2)), (3, 0)]
    arrays = [np.zeros(slots, int), np.arange(slots), np.array(shared), np.array([0, slots])]
    arrays += [np.array([0] * slots + [1]), np.zeros(slots + 1, int), np.array([*range(slots), 0])]
    arrays += [np.array([min(1, len(item)) for item in sequences]), np.cumsum([0, *map(len, sequences)])]
    plan = dict(zip(plan_checker.STEP, [*arrays, np.zeros(len(flat), int), *flat.T, np.array(events)]))
    size = OFFSETS[slots]
    return check_step(TOKENS[:size], OFFSETS[: slots + 1], plan, HEAD, COST, nodewise, nodes)[0]


def test_figures_by_hand():
    figures = by_hand([4, 4], [[(0, 4, 4, 8)], [(1, 4, 4, 8)], [(0, 0, 0, 4)]])
    assert figures == {
        "trajectories": 2, "original_tokens": 16, "distinct_tokens": 12, "compact_tokens": 16, "residual_tokens": 8,
        "producer_tokens": 4, "executed_rows": 12, "alignment_tokens": 12, "decoder_tokens": 24, "slots": 2,
        "consumers": 2, "windows": 1, "producers": 1, "work_items": 3, "handed_states": 1, "segments": 3,
        "replay_tokens": 0, "interface_bytes": 4 * 10 + 100, "producer_rows_max": 4, "rounds_max": 1,
        "l1_lower_bound": 12,
        # Rows; pairs 5 + 6 + 7 + 8 or 4 * 8, and 1 + 2 + 3 + 4 or 4 * 4; head.
        "phi": 3 * 8 + 2 * 26 + 10 + 2 * 8 * 5 + 2 * 3 * 8 + 3 * (2 * 32 + 16) + 2 * 8 * 7,
    }  # fmt: skip


def refused_by_hand(case: str) -> int:
    """Return the line that refuses a plan which cannot be had by damaging a good one."""
    with pytest.raises(Refused) as caught:
        if case == "no gain":
            by_hand([4], [[(0, 4, 4, 8)], [(0, 0, 0, 4)]], slots=1)
        elif case == "node inside a sequence":
            by_hand([4, 4], [[(0, 4, 4, 8)], [(1, 4, 4, 8)], [(0, 0, 0, 4)]], nodewise=True, nodes=(6,))
        else:
            by_hand([8, 4], [[], [(1, 4, 4, 8)], [(0, 0, 0, 8)]], nodewise=True)
    return caught.traceback[-2].lineno + 1


@pytest.mark.slow
def test_every_damage_is_refused_and_every_proof_refuses(tmp_path, base):
    inputs, plan, figures = base
    damages = [(name, arrays, figures) for name, arrays in damaged_arrays(plan)]
    damages += damaged_header(plan, figures)
    damages += [(name, plan, damaged) for name, damaged in damaged_figures(figures)]
    lines = {name: refused_at(tmp_path, inputs, arrays, damaged) for name, arrays, damaged in damages}
    assert len(lines) == len(damages) > 900
    lines["one input of two"] = refused_at(tmp_path, inputs[:1], plan, figures)
    lines |= {case: refused_by_hand(case) for case in ("no gain", "state inside a sequence", "node inside a sequence")}
    assert not [name for name, line in lines.items() if not line]
    tree = ast.parse(Path(plan_checker.__file__).read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    proofs = {node.lineno for node in calls if getattr(node.func, "id", "") == "need"}
    assert proofs == set(lines.values())
