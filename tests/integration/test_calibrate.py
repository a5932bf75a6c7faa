"""``harts-bench calibrate`` as a user calls it, and the file it writes in a job."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from harts_titan.data.synthetic import write_synthetic
from harts_titan.job_config import load_config
from harts_titan.models.train_specs import cost_of_sizes, plan_cost_of
from harts_titan.tree.cost import PlanCost

ROOT = Path(__file__).resolve().parents[2]
CONFIG = str(ROOT / "train_configs/ling_debug.toml")
SMALL = ["--items", "8", "--repeats", "2", "--tree.max_tokens", "768", "--activation_checkpoint.mode", "full"]


def calibrate(*arguments):
    code = "from harts_titan.cli.bench import entry; entry()"
    return subprocess.run(
        [sys.executable, "-c", code, "calibrate", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("calibrate")
    write_synthetic(folder / "rollouts.parquet", trajectories=8, seed=3)
    done = calibrate(CONFIG, *SMALL, "--rollouts", folder / "rollouts.parquet", "--json", folder / "cost.json")
    assert done.returncode == 0, done.stderr
    return done, folder / "cost.json"


def test_the_file_holds_the_fit_and_how_well_it_predicts(calibrated):
    done, path = calibrated
    cost, report = PlanCost.load(path), json.loads(path.read_text())["report"]
    assert "picoseconds" in cost.source and cost.source.startswith("measured: ling debug on ")
    assert cost.forward_row > 0 and cost.backward_row > 0
    config = load_config(CONFIG, SMALL[4:])
    operations = cost_of_sizes(config)
    assert "with recomputation" in operations.source and "chunk size 16" in operations.source
    assert report["operations"] == asdict(operations)
    for name in ("row_alignment", "shared_row_bytes", "handed_state_bytes"):
        assert getattr(cost, name) == getattr(operations, name)
    items = report["items"]
    assert [item["held_out"] for item in items[:8]] == [i % 4 == 3 for i in range(8)]
    assert all(item["held_out"] and item["item"].startswith("rollouts slot ") for item in items[8:]) and len(items) > 8
    for item in items:
        for name, pairs in (("forward", "attended"), ("backward", "recomputed")):
            predicted = getattr(cost, f"{name}_row") * item["rows"] + getattr(cost, f"{name}_pair") * item[pairs]
            predicted += getattr(cost, f"head_{name}_row") * item["head_rows"]
            seconds = predicted / 1e12 + report["constant_seconds"][name]
            assert seconds / item[f"{name}_seconds"] - 1 == pytest.approx(item[f"{name}_fitted_error"], abs=1e-9)
            assert item[f"{name}_spread"][0] <= item[f"{name}_seconds"] <= item[f"{name}_spread"][1]
    for kind in ("fitted", "operations"):
        assert set(report["errors"][kind]) == {"fitted_items", "held_out_items"}
    assert "fitted, held out items, forward" in done.stdout.replace("\n", " ")


def test_a_job_plans_with_the_file(calibrated, tmp_path):
    _, path = calibrated
    assert plan_cost_of(load_config(CONFIG, ["--tree.cost_file", str(path)])) == PlanCost.load(path)
    assert plan_cost_of(load_config(CONFIG)) == cost_of_sizes(load_config(CONFIG))
    with pytest.raises(ValueError, match=r"absent\.json' does not exist"):
        plan_cost_of(load_config(CONFIG, ["--tree.cost_file", "absent.json"]))
    wider = tmp_path / "wider.json"
    PlanCost(row_alignment=16).save(wider)
    with pytest.raises(ValueError, match=r"aligns rows to 16, the job to 8 \(8 x parallelism.tensor_parallel_degree\)"):
        plan_cost_of(load_config(CONFIG, ["--tree.cost_file", str(wider)]))


def test_refusals_are_one_line(tmp_path):
    done = calibrate(CONFIG, "--tree.max_tokens", "100")
    assert done.returncode == 2
    assert "tree.max_tokens (100) must be at least 256" in done.stderr.splitlines()[-1]


def test_help_names_the_shared_options():
    done = calibrate("--help")
    assert done.returncode == 0
    for option in ("--json", "--scheme", "--limit", "--items", "--repeats", "tree.cost_file"):
        assert option in done.stdout
