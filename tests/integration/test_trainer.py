"""The trainer end to end in processes of its own: learning, resuming, objectives, bad input, profiling."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--data.synthetic_trajectories", "12", "--data.trajectories_per_step", "4", "--metrics.no-enable_tensorboard"]


def test_a_nan_stops_the_run_in_one_line(tmp_path):
    """A learning rate that blows the weights up: the step and the episodes are named, nothing is saved."""
    done = run_trainer(
        tmp_path, *SMALL, "--optimizer.lr", "1e30", "--training.max_norm", "1e30", check=False, trace=False
    )
    assert done.returncode == 1
    (line,) = [line for line in (done.stdout + done.stderr).splitlines() if "The optimizer step was not taken" in line]
    assert "step 2" in line or "step 3" in line
    assert "episodes" in line
    assert "Traceback" not in done.stderr


def run_trainer(tmp_path, *overrides, config="ling_debug", check=True, trace=True):
    module = "tests.integration.trainer_trace" if trace else "harts_titan.train"
    command = [
        sys.executable,
        "-m",
        module,
        "--job.config_file",
        str(ROOT / f"train_configs/{config}.toml"),
        "--job.dump_folder",
        str(tmp_path / "out"),
        *overrides,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, env=dict(os.environ))
    if not check:
        return done
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("TRACE "))
    return json.loads(line[len("TRACE ") :])


def losses(trace):
    return [float.fromhex(step["loss"]) for step in trace["steps"]]


@pytest.mark.slow
def test_default_run_learns(tmp_path):
    trace = run_trainer(tmp_path)
    loss = losses(trace)
    assert len(loss) == 20
    assert loss[-1] <= 0.7 * loss[0], loss
    # Sharing must be on: a default that silently expands would still learn.
    first = {name: float.fromhex(value) for name, value in trace["steps"][0].items()}
    assert first["tokens/executed"] == first["tokens/compact"] < first["tokens/original"] / 2


@pytest.mark.slow
def test_resumed_twice_equals_uninterrupted(tmp_path):
    """The loader, optimizer, scheduler and expert biases continue bit for bit, across an epoch's end."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    checkpoint = [
        "--checkpoint.enable",
        "--checkpoint.interval",
        "2",
        "--data.shuffle",
        "--lr_scheduler.total_steps",
        "6",
    ]
    whole = run_trainer(tmp_path / "a", *SMALL, *checkpoint, "--training.steps", "6")
    parts = [run_trainer(tmp_path / "b", *SMALL, *checkpoint, "--training.steps", str(n)) for n in (2, 4, 6)]
    assert [len(part["steps"]) for part in parts] == [2, 2, 2]
    ignored = ("seconds",)
    resumed = [step for part in parts for step in part["steps"]]
    for got, want in zip(resumed, whole["steps"], strict=True):
        keys = [k for k in want if not any(word in k for word in ignored)]
        assert {k: got[k] for k in keys} == {k: want[k] for k in keys}
    assert parts[-1]["weights"] == whole["weights"]


@pytest.mark.slow
def test_grpo_runs_and_its_first_ratio_is_exactly_one(tmp_path):
    trace = run_trainer(tmp_path, *SMALL, "--training.steps", "2", config="ling_debug_grpo")
    first = {name: float.fromhex(value) for name, value in trace["steps"][0].items()}
    assert first["ratio_max"] == first["ratio_min"] == 1.0


@pytest.mark.slow
def test_profiler_writes_named_ranges(tmp_path):
    profile = ["--profiling.enable_profiling", "--profiling.profile_freq", "2", "--profiling.profiler_warmup", "1"]
    run_trainer(tmp_path, *SMALL, *profile, "--training.steps", "2")
    traces = list((tmp_path / "out" / "profile_traces").rglob("*.json"))
    assert traces
    text = traces[0].read_text()
    for name in ("harts::plan", "harts::round0", "harts::forward", "harts::backward", "harts::optimizer"):
        assert f'"{name}"' in text, name


@pytest.mark.parametrize(
    ("override", "needle"),
    [
        (["--tree.max_tokens", "64"], "tree.max_tokens"),
        (["--training.seq_len", "128"], "training.seq_len"),
        (["--data.path", "nosuch.parquet"], "nosuch.parquet"),
        (["--model.flavor", "nosuch"], "model.flavor"),
        (["--tree.chunk_sise", "8"], "--tree.chunk_sise"),
        (["--rl.objective", "nosuch"], "nosuch"),
        (["--rl.objective", "grpo", "--rl.kl_coef", "0.1"], "ref_logprobs"),
        (["--parallelism.tensor_parallel_degree", "2"], "tensor_parallel_degree"),
    ],
)
def test_a_wrong_setting_ends_in_one_clear_line(tmp_path, override, needle):
    done = run_trainer(tmp_path, *SMALL, *override, check=False, trace=False)
    assert done.returncode == 2, done.stderr[-2000:]
    errors = [line for line in (done.stdout + done.stderr).splitlines() if "ERROR" in line or "error" in line.lower()]
    assert any(needle in line for line in errors), done.stderr[-2000:]
    assert "Traceback" not in done.stderr
