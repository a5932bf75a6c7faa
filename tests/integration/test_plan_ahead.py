"""Planning ahead changes when plans are made and nothing else: engine and trainer, resumed, on one rank and on two."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from harts_titan import preparation
from harts_titan.data.source import rollouts_from_config
from harts_titan.engine import Engine
from harts_titan.job_config import load_config
from harts_titan.models.train_specs import model_args_of
from harts_titan.planning import PlanningError

ROOT = Path(__file__).resolve().parents[2]
CONFIG = str(ROOT / "train_configs/ling_debug.toml")
SMALL = ["--data.synthetic_trajectories", "12", "--metrics.no-enable_tensorboard", "--tree.max_tokens", "2048"]


@pytest.fixture(scope="module")
def batches(tmp_path_factory):
    config = load_config(CONFIG, SMALL)
    vocab_size = model_args_of(config).vocab_size
    whole = rollouts_from_config(config.data, vocab_size=vocab_size, folder=tmp_path_factory.mktemp("rollouts"))
    return [whole.select(np.arange(start, start + 4)) for start in (0, 4, 8)]


@pytest.fixture
def in_place(monkeypatch):
    """Plans that this process makes itself."""
    made = []
    original = preparation.make_plan
    monkeypatch.setattr(preparation, "make_plan", lambda *a, **options: made.append(a) or original(*a, **options))
    return made


@pytest.fixture
def make_engine():
    engines = []

    def make(*overrides):
        engines.append(Engine.from_config(load_config(CONFIG, [*SMALL, *overrides])))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def without_seconds(metrics):
    return {name: value for name, value in metrics.items() if "seconds" not in name}


def weights(engine):
    return {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}


@pytest.mark.parametrize("mini_batches", ["1", "2"])
def test_updates_are_the_same(make_engine, batches, in_place, mini_batches):
    settings = ("--rl.mini_batches", mini_batches, "--rl.epochs", "2")
    plain = make_engine(*settings, "--tree.no-plan_in_background")
    want = []
    for batch in batches:
        plain.plan_ahead(batch)
        want.append(plain.update(batch))
    assert len(in_place) == 3 * int(mini_batches), "switched off: every step in place"
    assert all(metrics["plan/wait_seconds"] >= metrics["plan/seconds"] for metrics in want)
    in_place.clear()
    ahead = make_engine(*settings)
    ahead.start_planner().wait_until_ready()
    got = []
    for batch, following in zip(batches, [*batches[1:], None]):
        if following is not None:
            ahead.plan_ahead(following)
        got.append(ahead.update(batch))
    assert len(in_place) == int(mini_batches), "only the first step in place"
    assert [without_seconds(metrics) for metrics in got] == [without_seconds(metrics) for metrics in want]
    assert all(metrics["plan/seconds"] > 0 and metrics["plan/wait_seconds"] > 0 for metrics in got)
    mine, theirs = weights(ahead), weights(plain)
    assert all(torch.equal(mine[name], tensor) for name, tensor in theirs.items())


def test_only_the_same_object_takes_the_plan(make_engine, batches, in_place):
    engine = make_engine()
    engine.start_planner().wait_until_ready()
    engine.plan_ahead(batches[0])
    engine.plan_ahead(batches[0])
    engine.update(batches[0].select(np.arange(4)))
    assert len(in_place) == 1, "an equal batch is another batch"
    engine.update(batches[0])
    assert len(in_place) == 1
    engine.update(batches[0])
    assert len(in_place) == 2, "a plan is taken once"
    for batch in batches:
        engine.plan_ahead(batch)
    for batch in batches:
        engine.update(batch)
    assert len(in_place) == 3, "two are kept"


def test_nothing_waits_for_the_start_of_the_process(make_engine, batches, in_place):
    engine = make_engine()
    os.kill(engine.start_planner().pid, signal.SIGSTOP)
    engine.plan_ahead(batches[0])
    engine.update(batches[0])
    assert len(in_place) == 1


def test_log_probs_are_computed_in_between(make_engine, batches, in_place):
    engine = make_engine()
    engine.start_planner().wait_until_ready()
    engine.plan_ahead(batches[0])
    got = engine.compute_log_probs(batches[0])
    assert np.isfinite(got).all() and len(in_place) == 1
    engine.update(batches[0])
    assert len(in_place) == 1


def test_a_batch_that_cannot_be_used_is_refused_as_by_update(make_engine, batches):
    engine = make_engine("--tree.max_tokens", "64")
    engine.start_planner().wait_until_ready()
    with pytest.raises(ValueError, match=r"tree.max_tokens") as ahead:
        engine.plan_ahead(batches[0])
    with pytest.raises(ValueError, match=r"tree.max_tokens") as late:
        engine.update(batches[0])
    assert str(ahead.value) == str(late.value)


def test_an_error_of_planning_is_raised_by_update(make_engine, batches):
    engine = make_engine()
    engine.config.tree.mode = "nosuch"
    engine.start_planner().wait_until_ready()
    engine.plan_ahead(batches[0])
    with pytest.raises(ValueError, match="mode is 'nosuch'"):
        engine.update(batches[0])


def test_death_of_the_process_ends_the_update(make_engine, batches):
    engine = make_engine()
    planner = engine.start_planner()
    planner.wait_until_ready()
    os.kill(planner.pid, signal.SIGSTOP)
    engine.plan_ahead(batches[0])
    os.kill(planner.pid, signal.SIGKILL)
    with pytest.raises(PlanningError, match="was killed by SIGKILL"):
        engine.update(batches[0])
    engine.close()
    assert np.isfinite(engine.update(batches[0])["loss"]), "the engine can go on without it"


# ------------------------------------------------------------------------------------------------------------- trainer
CHECKPOINT = ["--checkpoint.enable", "--checkpoint.interval", "2", "--data.shuffle", "--lr_scheduler.total_steps", "6"]
STEPS = ["--data.trajectories_per_step", "4"]


def run_trainer(folder, *overrides, ranks=1):
    command = [sys.executable, "-m"]
    if ranks > 1:
        command += ["torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks), "-m"]
    command += ["tests.integration.plan_ahead_trace", "--job.config_file", CONFIG, "--job.dump_folder", str(folder)]
    done = subprocess.run([*command, *SMALL, *STEPS, *overrides], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("TRACE "))
    assert "waited for" in done.stdout + done.stderr
    return json.loads(line[len("TRACE ") :])


def figures(traces):
    ignored = ("seconds", "planned_in_place")
    return [
        {name: value for name, value in step.items() if not any(word in name for word in ignored)}
        for trace in traces
        for step in trace["steps"]
    ]


def planned_in_place(trace):
    return float.fromhex(trace["steps"][-1]["planned_in_place"])


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", ["0", "2"])
def test_resumed_twice_equals_uninterrupted_planned_ahead_or_not(tmp_path, num_workers):
    """An epoch has three steps: the second part crosses its end, and checkpoints fall on it."""
    settings = [*CHECKPOINT, "--data.num_workers", num_workers]
    plain = run_trainer(tmp_path / "plain", *settings, "--training.steps", "6", "--tree.no-plan_in_background")
    ahead = run_trainer(tmp_path / "ahead", *settings, "--training.steps", "6")
    parts = [run_trainer(tmp_path / "parts", *settings, "--training.steps", n) for n in ("2", "3", "6")]
    assert [len(part["steps"]) for part in parts] == [2, 1, 3]
    assert planned_in_place(plain) == 6
    assert [planned_in_place(trace) for trace in (ahead, *parts)] == [1, 1, 1, 1], "the first step of a process"
    assert figures([ahead]) == figures([plain]) == figures(parts)
    assert ahead["weights"] == plain["weights"] == parts[-1]["weights"]


@pytest.mark.slow
def test_two_ranks_plan_ahead_on_their_own(tmp_path):
    settings = ["--training.steps", "3"]
    plain = run_trainer(tmp_path / "plain", *settings, "--tree.no-plan_in_background", ranks=2)
    ahead = run_trainer(tmp_path / "ahead", *settings, ranks=2)
    assert (planned_in_place(plain), planned_in_place(ahead)) == (3, 1)
    assert figures([ahead]) == figures([plain])
    assert ahead["weights"] == plain["weights"]


@pytest.mark.slow
def test_a_planning_process_that_dies_ends_the_run_in_one_line(tmp_path):
    script = """
import os, signal
from harts_titan import engine, train
plan_ahead = engine.Engine.plan_ahead
def dying(self, batch):
    planner = self.start_planner()
    planner.wait_until_ready()
    os.kill(planner.pid, signal.SIGSTOP)
    plan_ahead(self, batch)
    os.kill(planner.pid, signal.SIGKILL)
    engine.Engine.plan_ahead = plan_ahead
engine.Engine.plan_ahead = dying
train.main()
"""
    command = [sys.executable, "-c", script, "--job.config_file", CONFIG, "--job.dump_folder", str(tmp_path)]
    done = subprocess.run([*command, *SMALL, *STEPS], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1
    (line,) = [line for line in (done.stdout + done.stderr).splitlines() if "planning process" in line]
    assert "was killed by SIGKILL" in line and "tree.plan_in_background" in line
    assert "Traceback" not in done.stderr
