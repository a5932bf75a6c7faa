"""``harts-bench update`` and ``layer``: every mode on a CPU, the keys of their JSON, and refusals in one line."""

import json
from pathlib import Path

import numpy as np
import pytest

from harts_titan.cli import bench, common
from harts_titan.data.synthetic import write_synthetic
from harts_titan.data.tree_file import StoredTree, tokens_from_tree, write_tree

ROOT = Path(__file__).resolve().parents[2]
CONFIG = str(ROOT / "train_configs/ling_debug.toml")
GRPO = str(ROOT / "train_configs/ling_debug_grpo.toml")
LENGTH, LCP = np.array([70, 90, 90, 40]), np.array([0, 50, 80, 30])
ROWS, TOKENS = int((LENGTH - LCP).sum()), int(LENGTH.sum())
MODES = "expanded,nodewise,depthwise,compact"

UPDATE_KEYS = {
    "command", "arguments", "config", "model", "training_dtype", "compute_dtype", "recomputation", "objective",
    "capacity", "chunk_size", "compiled", "ops", "warmup", "workload", "device", "device_type", "torch", "versions",
    "ceilings", "modes",
    "ratios",
}  # fmt: skip
MODE_KEYS = {
    "seconds_median", "seconds_min", "seconds_max", "repeats", "original_tokens_per_second", "rows_executed",
    "replay_tokens", "rounds_max", "plan_seconds", "loss", "peak_memory_bytes", "work", "flops",
    "model_tflops_per_second", "hardware_tflops_per_second", "hardware_utilisation",
}  # fmt: skip
CEILING_KEYS = {
    "copy_bytes_per_second", "gemm_flops_per_second", "gemm_shape", "grouped_gemm_flops_per_second",
    "grouped_gemm_shape", "dtype",
}  # fmt: skip
BREAKDOWN_KEYS = {"kinds", "ranges", "top", "kernels", "busy_ms", "span_ms", "idle_ms"}
PASS_KEYS = {
    "seconds_median", "seconds_min", "seconds_max", "repeats", "flops", "model_tflops_per_second",
    "hardware_tflops_per_second", "hardware_utilisation", "peak_memory_bytes",
}  # fmt: skip


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    path = tmp_path_factory.mktemp("tree") / "tree.npz"
    write_tree(path, StoredTree(LENGTH, LCP))
    return path


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    path = tmp_path_factory.mktemp("step") / "step.npz"
    tokens, offsets = tokens_from_tree(LENGTH, LCP, 4096)
    np.savez(path, tokens=tokens, offsets=offsets)
    return path


def measured(tmp_path, *arguments):
    out = tmp_path / "out.json"
    assert common.run(bench.main, [*map(str, arguments), "--json", str(out)]) == 0
    return json.loads(out.read_text())


def test_update_in_every_mode(tmp_path, tree):
    options = ["--modes", MODES, "--repeats", "1,compact=2", "--breakdown", "none"]
    found = measured(tmp_path, "update", CONFIG, "--tree", tree, *options)
    assert set(found) == UPDATE_KEYS and set(found["ceilings"]) == CEILING_KEYS
    assert found["workload"] == {
        "source": str(tree), "microbatch": None, "dp_degree": 1, "trajectories": 4, "original_tokens": TOKENS,
        "nodes": None,
    }  # fmt: skip
    modes = found["modes"]
    assert list(modes) == MODES.split(",")
    for mode, one in modes.items():
        assert set(one) == MODE_KEYS
        assert one["rows_executed"] == one["work"]["rows"] == (TOKENS if mode == "expanded" else ROWS)
        assert one["repeats"] == (2 if mode == "compact" else 1)
        assert one["original_tokens_per_second"] == pytest.approx(TOKENS / one["seconds_median"])
        assert one["hardware_tflops_per_second"] == pytest.approx(
            one["flops"]["executed"] / one["seconds_median"] / 1e12
        )
    assert modes["compact"]["rounds_max"] == 2 and modes["depthwise"]["rounds_max"] == 4
    assert modes["nodewise"]["rounds_max"] == 7 and modes["compact"]["replay_tokens"] > 0
    assert found["ratios"]["flop_ratio"]["compact/expanded"] == pytest.approx(
        modes["expanded"]["flops"]["executed"] / modes["compact"]["flops"]["executed"]
    )
    for name in ("speedup", "flop_ratio", "share"):
        assert set(found["ratios"][name]) == {"compact/expanded", "compact/nodewise", "compact/depthwise"}


@pytest.mark.parametrize("source", ["tree", "step"])
def test_nodes_that_a_workload_names(tmp_path, source):
    """Two named rows of shared paths beside the seven segments; a limit and a microbatch keep what is theirs."""
    tokens, offsets = tokens_from_tree(LENGTH, LCP, 4096)
    nodes = np.array([10, 70, 70 + 20, 160 + 60])
    write_tree(tmp_path / "tree.npz", StoredTree(LENGTH, LCP, nodes))
    np.savez(tmp_path / "step.npz", tokens=tokens, offsets=offsets, node_start=nodes)
    path = tmp_path / f"{source}.npz"
    options = [
        "--tree" if source == "tree" else "--rollouts",
        path,
        "--repeats",
        1,
        "--warmup",
        0,
        "--breakdown",
        "none",
    ]
    found = measured(tmp_path, "update", CONFIG, *options, "--modes", "nodewise,depthwise,compact,expanded")
    assert found["workload"]["nodes"] == found["modes"]["nodewise"]["rounds_max"] == 10
    # Depths of the path with most nodes: cut at 10 and 20, forks at 30, 50 and 80, cut at 60.
    assert found["modes"]["depthwise"]["rounds_max"] == 7 and found["modes"]["compact"]["rounds_max"] == 2
    found = measured(tmp_path, "layer", CONFIG, *options, "--modes", "nodewise,depthwise", "--kinds", "kda_dense")
    assert found["workload"]["nodes"] == found["calls"]["nodewise"]["rounds_max"] == 10
    assert found["calls"]["depthwise"]["rounds_max"] == 7
    found = measured(tmp_path, "update", CONFIG, *options, "--modes", "nodewise", "--limit", 2)
    assert found["workload"]["nodes"] == found["modes"]["nodewise"]["rounds_max"] == 5
    if source == "step":
        options += ["--tree.max_tokens", 100, "--dp", 2, "--microbatch", 0, "--modes", "nodewise"]
        found = measured(tmp_path, "update", CONFIG, *options)
        assert found["workload"]["nodes"] == found["modes"]["nodewise"]["rounds_max"]


def test_an_update_is_taken_apart(tmp_path, tree):
    options = ["--tree", tree, "--modes", "compact", "--repeats", 1, "--warmup", 0, "--limit", 2]
    found = measured(tmp_path, "update", CONFIG, *options)["modes"]["compact"]
    assert set(found) == MODE_KEYS | {"breakdown"} and set(found["breakdown"]) == BREAKDOWN_KEYS
    assert {"gemm", "elementwise", "optimizer"} < set(found["breakdown"]["kinds"])
    assert sum(row["share"] for row in found["breakdown"]["kinds"].values()) == pytest.approx(1)


def test_plain_call_is_update_on_rollouts(tmp_path):
    write_synthetic(tmp_path / "rollouts.parquet", trajectories=8, seed=3)
    arguments = ["--rollouts", tmp_path / "rollouts.parquet", "--limit", 4, "--modes", "compact", "expanded"]
    found = measured(tmp_path, GRPO, *arguments, "--repeats", 1, "--warmup", 0, "--breakdown", "none")
    assert found["arguments"][0] == GRPO and "--json" not in found["arguments"]
    assert found["command"] == "update" and list(found["modes"]) == ["compact", "expanded"]
    assert set(found["modes"]["compact"]) == MODE_KEYS
    assert found["modes"]["expanded"]["rows_executed"] >= found["workload"]["original_tokens"]


def test_one_microbatch_of_a_step(tmp_path, step):
    options = [
        "--rollouts",
        step,
        "--tree.max_tokens",
        100,
        "--modes",
        "compact",
        "--repeats",
        1,
        "--breakdown",
        "none",
    ]
    whole = measured(tmp_path, "update", CONFIG, *options)
    assert whole["workload"]["original_tokens"] == TOKENS and whole["modes"]["compact"]["rows_executed"] > 100
    found = measured(tmp_path, "update", CONFIG, *options, "--dp", 2, "--microbatch", 0)
    assert found["workload"]["microbatch"] == 0 and found["workload"]["dp_degree"] == 2
    assert 0 < found["workload"]["trajectories"] < 4 and found["modes"]["compact"]["rows_executed"] <= 100


def test_every_kind_of_layer(tmp_path, tree):
    options = ["--modes", "compact,depthwise,expanded", "--repeats", 1, "--breakdown", "none"]
    found = measured(tmp_path, "layer", CONFIG, "--tree", tree, *options)
    assert set(found) == UPDATE_KEYS - {"training_dtype", "recomputation", "objective", "modes", "ratios"} | {
        "calls",
        "kinds",
    }
    assert list(found["kinds"]) == ["kda_dense", "kda_moe", "mla_moe", "head"]
    assert found["calls"]["depthwise"]["rounds_max"] == 4 and found["calls"]["expanded"]["rows"] == TOKENS
    for one in found["kinds"].values():
        assert list(one["modes"]) == ["compact", "depthwise", "expanded"]
        for passes in one["modes"].values():
            assert list(passes) == ["forward", "forward_backward"]
            for entry in passes.values():
                assert set(entry) == PASS_KEYS
            assert passes["forward_backward"]["flops"]["executed"] > 2 * passes["forward"]["flops"]["executed"]
        ratio = one["ratios"]["forward_backward"]["flop_ratio"]["compact/expanded"]
        assert 1 < ratio <= TOKENS / ROWS + 1e-9
    # Attention pairs shrink less than rows: the shared ones are the shallow ones.
    rows = {kind: one["ratios"]["forward"]["flop_ratio"]["compact/expanded"] for kind, one in found["kinds"].items()}
    assert rows["mla_moe"] < rows["head"]


def test_layers_are_taken_apart(tmp_path, tree):
    options = ["--modes", "compact", "--repeats", 1, "--limit", 2, "--kinds", "mla_moe,head"]
    found = measured(tmp_path, "layer", CONFIG, "--tree", tree, *options)["kinds"]
    assert list(found) == ["mla_moe", "head"]
    for kind, one in found.items():
        entry = one["modes"]["compact"]["forward_backward"]
        assert set(entry) == PASS_KEYS | {"breakdown", "elementwise"} and set(entry["breakdown"]) == BREAKDOWN_KEYS
        if kind == "head":
            assert entry["elementwise"] is None
        else:
            moved = entry["elementwise"]
            assert moved["bytes"] > 0
            assert moved["gb_per_second"] == pytest.approx(moved["bytes"] / moved["seconds"] / 1e9)


@pytest.mark.parametrize(
    ("arguments", "needle"),
    [
        (["update", CONFIG, "--modes", "compact,shared"], "--modes: 'shared' is no mode; choose from compact"),
        (["update", CONFIG, "--modes", ","], "--modes names no mode"),
        (
            ["update", CONFIG, "--breakdown", "nodewise"],
            "--breakdown: 'nodewise' is not among --modes compact,expanded",
        ),
        (["update", CONFIG, "--repeats", "0"], "--repeats (0)"),
        (["update", CONFIG, "--repeats", "3,nodewise=2"], "'nodewise' is not among --modes compact,expanded"),
        (["update", CONFIG, "--repeats", "3,4"], "--repeats (3,4) has two numbers without a mode"),
        (["update", CONFIG, "--warmup", "-1"], "--warmup (-1)"),
        (["update", CONFIG, "--tree", "a.npz", "--rollouts", "b.npz"], "--tree and --rollouts"),
        (["update", CONFIG, "--tree", "absent.npz"], "absent.npz: no such file"),
        (["update", CONFIG, "--dp", "2"], "--dp says how the step of --microbatch is planned"),
        (["update", CONFIG, "--dp", "0"], "--dp (0)"),
        (["update", CONFIG, "--microbatch", "-1"], "--microbatch (-1)"),
        (["update", CONFIG, "--tree", "{tree}", "--microbatch", "7"], "--microbatch (7): the step has 1 slots"),
        (["update", CONFIG, "--tree", "{tree}", "--tree.max_tokens", "64"], "raise tree.max_tokens (64)"),
        (["update", CONFIG, "--tree", "{tree}", "--rl.mini_batches", "2"], "rl.mini_batches (2)"),
        (["update", GRPO, "--tree", "{tree}"], "reward"),
        (["layer", CONFIG, "--kinds", "kda_dense,mamba"], "--kinds: the model has no 'mamba'; it has kda_dense"),
        (["layer", CONFIG, "--kinds", ","], "--kinds names nothing"),
        (["speed", CONFIG], "'speed' is neither a measurement (update, layer, calibrate) nor a TOML configuration"),
    ],
)
def test_a_mistake_is_one_line(capsys, tree, arguments, needle):
    assert common.run(bench.main, [a.format(tree=tree) for a in arguments]) == 2
    assert needle in capsys.readouterr().err
