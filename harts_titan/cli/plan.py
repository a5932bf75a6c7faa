"""``harts-plan INPUT``: plan rollouts without a model and print what sharing saves."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from tqdm import tqdm

from harts_titan.cli import common
from harts_titan.cli.plan_figures import overall_figures, step_figures, summary
from harts_titan.cli.plan_file import HEADER, step_arrays, write_plan_file
from harts_titan.cli.plan_options import Settings, build_parser, check_files, settings_of
from harts_titan.cli.plan_plot import plot_step
from harts_titan.cli.plan_read import peak_bytes, read_step, resident_bytes
from harts_titan.tree import StepPlan, sort_trajectories
from harts_titan.tree.compiled import compilations
from harts_titan.tree.lower_bound import lower_bound
from harts_titan.tree.sorted_step import SortedStep


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    options = build_parser().parse_args(argv)
    common.config_overrides(options)
    check_files(options)
    settings = settings_of(options)
    compile_seconds = warm_up(settings)
    memory_before = resident_bytes()
    steps: list[dict[str, Any]] = []
    balances, saved = [], []
    for path in tqdm(options.input, desc="plan", unit="step", disable=len(options.input) < 2):
        figures, plan = _one_step(path, options, settings, picture=options.plot if not steps else None)
        steps.append({"input": path} | figures)
        balances.append(plan.stats.computation_balance)
        if options.save:
            saved.append(step_arrays(plan))
        # Before the next step is read.
        del plan
    total = settings.report() | overall_figures(steps, balances)
    if options.overlong != "error":
        total["overlong"] = {name: sum(one["overlong"][name] for one in steps) for name in steps[0]["overlong"]}
    total |= {
        "compile_seconds": compile_seconds,
        "peak_memory_bytes": peak_bytes(),
        "memory_before_read_bytes": memory_before,
    }
    common.write_json(total | {"steps": steps}, options.json)
    title = (
        f"harts-plan: {len(steps)} step(s), {settings.planner}, {settings.mode}, D={settings.dp_degree}, "
        f"T={settings.capacity:,}"
    )
    common.table(title, summary(total, len(steps)), to_stderr=options.json == "-")
    # Last: if it cannot be written, the figures are there.
    if options.save:
        with common.writing(options.save, "--save"):
            write_plan_file(options.save, saved, settings={name: total[name] for name in HEADER}, cost=settings.cost)
    return 0


def _one_step(
    path: str, options: argparse.Namespace, settings: Settings, *, picture: str | None
) -> tuple[dict[str, Any], StepPlan]:
    start = time.perf_counter()
    tokens, offsets, node_start, lost = read_step(
        path,
        capacity=settings.capacity,
        dp_degree=settings.dp_degree,
        overlong=options.overlong,
        scheme=options.scheme or "tree",
        limit=options.limit or 0,
    )
    # As in the warm-up: other types would be compiled while they are timed.
    tokens = frozen(tokens)
    ready = time.perf_counter()
    try:
        plan, step, baseline = settings.plan(tokens, offsets, node_start)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    done = time.perf_counter()
    if settings.validate:
        plan.validate(tokens, offsets, node_start)
    figures = step_figures(
        plan.stats,
        trajectories=len(offsets) - 1,
        work_items=int(np.count_nonzero(plan.items["item_rows_I"])),
        lower_bound=lower_bound(step, capacity=settings.capacity, dp_degree=settings.dp_degree),
        read_seconds=ready - start,
        plan_seconds=done - ready,
    )
    if options.overlong != "error":
        figures["overlong"] = asdict(lost)
    if baseline is not None:
        figures["ortools"] = {name: value for name, value in vars(baseline).items() if name != "placement"}
    if picture:
        with common.writing(picture, "--plot"):
            plot_step(picture, plan, tokens, offsets, name=path)
    return figures, plan


def warm_up(settings: Settings) -> float:
    """Plan a small synthetic step so that compiled loops exist before anything is timed; return the seconds it took."""
    start = time.perf_counter()
    # Tasks of more than 64 rows: their prefixes are worth a producer.
    rng = np.random.default_rng(0)
    tasks = [rng.integers(0, 50, 40).tolist() for _ in range(4 * settings.dp_degree)]
    paths = [task[: int(rng.integers(8, 40))] + rng.integers(0, 50, 9).tolist() for task in tasks for _ in range(8)]
    offsets = np.concatenate([[0], np.cumsum([len(path) for path in paths])]).astype(np.int64)
    # The baseline compiles nothing of its own.
    planner = "l1" if settings.planner == "ortools" else settings.planner
    small = replace(settings, capacity=64, chunk_size=4, planner=planner, validate=False)
    tokens = frozen(np.concatenate([np.asarray(path, np.int32) for path in paths]))
    nodes = np.arange(0, len(tokens), 9)
    before = compilations()
    SortedStep.from_tokens(tokens, offsets)
    # The first kernels tell about the others before most of the time has passed.
    if compilations() > before:
        sys.stderr.write("compiling the planner (once per machine, about a minute)\n")
        sys.stderr.flush()
    # As large as it takes for a second thread.
    sort_trajectories(frozen(np.zeros(2 << 20, np.int32)), np.arange(3) << 20)
    _, step, _ = small.plan(tokens, offsets, nodes)
    if small.windows:
        # Whether producers are cut to fit and prefixes deepened depends on the step; these two do one each.
        for slots in (2, 0):
            replace(small, dp_degree=2, max_window_slots=slots).plan(tokens, offsets, nodes)
    lower_bound(step, capacity=small.capacity, dp_degree=small.dp_degree)
    return time.perf_counter() - start


def frozen(array: np.ndarray) -> np.ndarray:
    """Return a read-only view: a type of its own to numba, and the one that some readers' arrays have anyway."""
    view = array.view()
    view.flags.writeable = False
    return view


def entry() -> None:
    """Console script."""
    sys.exit(common.run(main))


if __name__ == "__main__":
    entry()
