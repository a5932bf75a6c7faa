"""The console commands as a user calls them: outputs, JSON keys, exit codes and one-line errors."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from harts_titan.data import read_rollouts
from harts_titan.data.synthetic import write_synthetic

ROOT = Path(__file__).resolve().parents[2]
CONFIG = str(ROOT / "train_configs/ling_debug.toml")
VERIFY_KEYS = {
    "max_logprob_diff",
    "max_entropy_diff",
    "loss_diff",
    "max_grad_rel_diff",
    "expert_counts_equal",
    "core_bit_equal",
    "mean_token_cosine",
    "original_tokens",
    "compact_tokens",
}


def command(name, *arguments):
    code = f"from harts_titan.cli.{name} import entry; entry()"
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, timeout=600
    )


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory):
    path = tmp_path_factory.mktemp("rollouts") / "rollouts.parquet"
    write_synthetic(path, trajectories=8, seed=3)
    return path


@pytest.mark.parametrize("name", ["plan", "logprobs", "verify", "bench"])
def test_help_names_the_shared_options(name):
    done = command(name, "--help")
    assert done.returncode == 0
    for option in ("--json", "--scheme", "--limit"):
        assert option in done.stdout


def test_plan_reports_compression(rollouts, tmp_path):
    out = tmp_path / "plan.json"
    done = command("plan", rollouts, "--capacity", 4096, "--chunk-size", 16, "--validate", "--json", out)
    assert done.returncode == 0, done.stderr
    figures = json.loads(out.read_text())
    assert figures["original_tokens"] == read_rollouts(rollouts).num_positions
    assert figures["distinct_tokens"] <= figures["compact_tokens"] < figures["original_tokens"]
    assert figures["l1_compression"] == figures["original_tokens"] / figures["compact_tokens"]


def test_plan_reads_npz_and_limit(tmp_path):
    path = tmp_path / "step.npz"
    np.savez(path, tokens=np.array([1, 2, 3, 1, 2, 4, 9, 9], np.int32), offsets=np.array([0, 3, 6, 8]))
    done = command("plan", path, "--limit", 2, "--json", "-")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert (figures["original_tokens"], figures["compact_tokens"]) == (6, 4)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["compact", "nodewise"])
def test_verify_passes_in_float64(rollouts, tmp_path, mode):
    out = tmp_path / "verify.json"
    grpo = str(ROOT / "train_configs/ling_debug_grpo.toml")
    done = command(
        "verify", grpo, "--rollouts", rollouts, "--dtype", "float64", "--json", out, "--tree.mode", mode, "--limit", 6
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(out.read_text())
    assert set(figures) >= VERIFY_KEYS
    assert figures["rows_executed"]["expanded"] == figures["original_tokens"] > figures["compact_tokens"]
    assert figures["rows_executed"]["shared"] == figures["compact_tokens"]
    assert figures["core_bit_equal"] == (mode == "compact")


@pytest.mark.slow
def test_logprobs_keep_rows_and_alignment(rollouts, tmp_path):
    batch = read_rollouts(rollouts)
    outputs = {}
    for suffix, size in (("jsonl", 3), ("parquet", 8)):
        out = tmp_path / f"logprobs.{suffix}"
        done = command("logprobs", CONFIG, "--rollouts", rollouts, "--out", out, "--batch", size)
        assert done.returncode == 0, done.stderr
        scored = read_rollouts(out)
        assert np.array_equal(scored.tokens, batch.tokens) and scored.episode_id == batch.episode_id
        assert (scored.logprobs[scored.offsets[:-1]] == 0.0).all()
        assert (scored.logprobs[scored.loss_mask] < 0.0).all()
        outputs[suffix] = scored.logprobs
    # Batches of another size are packed differently: equal up to float32 rounding.
    assert np.abs(outputs["jsonl"] - outputs["parquet"]).max() < 1e-5


@pytest.mark.slow
def test_bench_reports_a_ratio(rollouts, tmp_path):
    out = tmp_path / "bench.json"
    options = ("--repeats", 1, "--warmup", 0, "--breakdown", "none", "--json", out)
    done = command("bench", CONFIG, "--rollouts", rollouts, *options)
    assert done.returncode == 0, done.stderr
    figures = json.loads(out.read_text())
    assert figures["ratios"]["speedup"]["compact/expanded"] > 0
    assert figures["modes"]["expanded"]["rows_executed"] == figures["workload"]["original_tokens"]


@pytest.mark.parametrize(
    ("name", "arguments", "needle"),
    [
        ("plan", ["nosuch.parquet"], "nosuch.parquet"),
        ("plan", ["{rollouts}", "--limit", "0"], "--limit"),
        ("plan", ["{rollouts}", "--capacity", "16"], "16"),
        ("verify", ["nosuch.toml"], "nosuch.toml"),
        ("verify", [CONFIG, "--tree.mode", "expanded"], "tree.mode"),
        ("logprobs", [CONFIG, "--rollouts", "{rollouts}", "--out", "x.csv"], "--out"),
        ("logprobs", [CONFIG, "--rollouts", "nosuch.parquet", "--out", "{tmp}/x.jsonl"], "pattern; check --rollouts"),
        ("verify", [CONFIG, "--rollouts", "nosuch.parquet"], "nosuch.parquet: no such file, folder or pattern; check"),
        ("verify", [CONFIG, "--data.path", "nosuch.parquet"], "no such file, folder or pattern; set data.path"),
        ("verify", ["{rollouts}"], "the first argument is CONFIG.toml; rollouts go to --rollouts"),
        ("verify", [CONFIG, "--data.densify", "maybe"], "true or false is needed"),
        ("bench", [CONFIG, "--repeats", "0"], "--repeats"),
    ],
)
def test_a_mistake_is_one_line(rollouts, tmp_path, name, arguments, needle):
    done = command(name, *[a.format(rollouts=rollouts, tmp=tmp_path) for a in arguments])
    assert done.returncode == 2, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and needle in errors[0]
    assert "Traceback" not in done.stderr
