"""``harts-plan INPUT``: plan rollouts without a model and print what sharing saves."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from harts_titan.cli import common
from harts_titan.cli.plan_figures import overall_figures, step_figures, summary
from harts_titan.cli.plan_file import HEADER, step_arrays, write_plan_file
from harts_titan.cli.plan_plot import plot_step
from harts_titan.cli.plan_read import input_files, is_npz, peak_bytes, read_step, resident_bytes
from harts_titan.models.train_specs import plan_cost
from harts_titan.tree import MODES, PlanCost, StepPlan, plan_step, sort_trajectories
from harts_titan.tree.compiled import compilations
from harts_titan.tree.cost import LARGEST
from harts_titan.tree.lower_bound import lower_bound
from harts_titan.tree.ortools_import import import_cp_model
from harts_titan.tree.ortools_partition import OrtoolsResult, ortools_partition
from harts_titan.tree.sorted_step import SortedStep
from harts_titan.tree.work import Placement

PLANNERS = ("harts", "l1", "ortools")
_MODEL, _FLAVOR, _ROWS = "ling", "tiny", "rows"


@dataclass(frozen=True)
class Settings:
    """How the steps are planned; the options of the command with their defaults filled in."""

    dp_degree: int
    capacity: int
    chunk_size: int
    mode: str
    planner: str
    windows: bool
    max_window_slots: int
    max_live_producers: int
    cost: PlanCost
    ortools_seconds: float
    ortools_first: bool
    validate: bool

    def plan(
        self, tokens: np.ndarray, offsets: np.ndarray, node_start: np.ndarray | None = None
    ) -> tuple[StepPlan, OrtoolsResult | None]:
        """Plan a step; rows are laid out for replica 0 alone, as one rank does it, or for all if it is validated.

        Returns:
            The plan, and how the baseline found it where that planned.
        """
        results: list[OrtoolsResult] = []

        def ortools(step: SortedStep) -> Placement:
            results.append(
                ortools_partition(
                    step,
                    capacity=self.capacity,
                    dp_degree=self.dp_degree,
                    seconds_per_shard=self.ortools_seconds,
                    first_feasible=self.ortools_first,
                    # Starting a process takes longer than a first solution.
                    processes=1 if self.ortools_first else os.cpu_count() or 1,
                    progress=True,
                    budget_name="--ortools-seconds",
                )
            )
            return results[0].placement

        plan = plan_step(
            tokens,
            offsets,
            capacity=self.capacity,
            chunk_size=self.chunk_size,
            dp_degree=self.dp_degree,
            mode=self.mode,
            planner=ortools if self.planner == "ortools" else self.planner,
            windows=self.windows,
            max_window_slots=self.max_window_slots,
            max_live_producers=self.max_live_producers,
            cost=self.cost,
            replicas=None if self.validate else (0,),
            node_start=node_start,
        )
        return plan, results[0] if results else None

    def report(self) -> dict[str, Any]:
        """Return the settings as the JSON has them."""
        return {
            "planner": self.planner,
            "mode": self.mode,
            "dp_degree": self.dp_degree,
            "capacity": self.capacity,
            "chunk_size": self.chunk_size,
            "max_window_slots": self.max_window_slots if self.windows else 1,
            "max_live_producers": self.max_live_producers if self.windows else 0,
            "row_alignment": self.cost.row_alignment,
            "cost": asdict(self.cost),
        } | (
            {"ortools_seconds": self.ortools_seconds, "ortools_first": self.ortools_first}
            if self.planner == "ortools"
            else {}
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="harts-plan",
        description="Plan rollouts into microbatches and sharing windows; report compression, balance, rounds, time. "
        "Every rank plans all replicas but lays out the rows of its own: times are those of replica 0.",
    )
    parser.add_argument(
        "input",
        nargs="+",
        metavar="INPUT",
        help="rollout file (parquet, JSONL, path format), or .npz with flat int32 'tokens' and int64 'offsets' (N+1); "
        "several files are several steps",
    )
    parser.add_argument("--dp", type=int, default=1, metavar="D", help="data-parallel replicas (default 1)")
    parser.add_argument(
        "--capacity", type=int, default=65536, metavar="T", help="compact rows of a microbatch (default 65536)"
    )
    parser.add_argument(
        "--chunk-size", type=int, default=64, metavar="B", help="linear-attention chunk in tokens (default 64)"
    )
    parser.add_argument(
        "--planner",
        choices=PLANNERS,
        default="harts",
        help="harts: microbatches, then placement and windows (default); l1: microbatches only; ortools: the CP-SAT "
        "baseline (extra 'ortools')",
    )
    parser.add_argument(
        "--windows",
        choices=("on", "off"),
        help="share prefixes across microbatches (default on where possible). Trainer and engine execute level 1 only "
        "today: 'off' reports what they run",
    )
    parser.add_argument(
        "--max-window-slots", type=int, metavar="n", help="slots of a sharing window, 0 = any number (default 6)"
    )
    parser.add_argument(
        "--max-live-producers", type=int, metavar="n", help="producers a replica may hold for backward (default 2)"
    )
    parser.add_argument("--mode", choices=MODES, default="compact", help="execution mode to lay out (default compact)")
    parser.add_argument(
        "--model",
        metavar="NAME",
        help=f"model whose operations are balanced (default {_ROWS}: every row costs the same, which balances rows)",
    )
    parser.add_argument("--flavor", metavar="FLAVOR", help=f"size of the model (default {_FLAVOR})")
    parser.add_argument("--cost", metavar="FILE", help="costs measured by harts-bench calibrate, instead of a model's")
    parser.add_argument(
        "--ortools-seconds", type=float, metavar="S", help="search budget of each replica's shard (default 300)"
    )
    parser.add_argument("--ortools-first", action="store_true", help="stop each shard at its first solution")
    parser.add_argument(
        "--overlong",
        choices=("error", "drop", "truncate"),
        default="error",
        help="trajectories longer than --capacity: refuse them (default error), leave them out, or keep their first "
        "tokens; counted in table and JSON",
    )
    parser.add_argument(
        "--validate", action="store_true", help="lay out every replica and prove every invariant of the plan (slow)"
    )
    parser.add_argument("--plot", metavar="PNG", help="draw the first step: rows of every slot, and one microbatch")
    parser.add_argument("--save", metavar="PLAN", help="write the plans to a file (npz, docs/plan_file.md)")
    common.add_common_options(parser, scheme="tree")
    return parser


def settings_of(options: argparse.Namespace) -> Settings:
    """Fill in defaults and refuse options that contradict each other or would do nothing.

    Raises:
        ValueError: Naming the option.
    """
    for option, value, least in (
        ("--dp", options.dp, 1),
        ("--capacity", options.capacity, 1),
        ("--chunk-size", options.chunk_size, 1),
        ("--max-window-slots", options.max_window_slots, 0),
        ("--max-live-producers", options.max_live_producers, 1),
    ):
        if value is not None and value < least:
            raise ValueError(f"{option} ({value}) must be at least {least}")
        if value is not None and value > LARGEST:
            raise ValueError(f"{option} ({value}) must be at most {LARGEST}")
    why = f"--planner {options.planner}" if options.planner != "harts" else "--mode expanded"
    possible = options.planner == "harts" and options.mode != "expanded"
    if options.windows == "on" and not possible:
        raise ValueError(f"--windows on contradicts {why}, which shares nothing across microbatches")
    windows = possible and options.windows != "off"
    for option, value in (
        ("--max-window-slots", options.max_window_slots),
        ("--max-live-producers", options.max_live_producers),
    ):
        if value is not None and not windows:
            raise ValueError(f"{option} has no effect: {why if not possible else '--windows off'} plans no windows")
    baseline = [name for name in ("ortools_seconds", "ortools_first") if getattr(options, name)]
    if baseline and options.planner != "ortools":
        raise ValueError(f"--{baseline[0].replace('_', '-')} applies to --planner ortools only")
    if options.ortools_seconds is not None and not options.ortools_seconds > 0:
        raise ValueError(f"--ortools-seconds ({options.ortools_seconds}) must be positive")
    if options.planner == "ortools":
        # Named before anything is read if it is not installed.
        import_cp_model()
    if options.cost and (options.model or options.flavor):
        raise ValueError("--cost has the coefficients already; leave out --model and --flavor")
    if options.save and options.mode == "expanded":
        raise ValueError("--save writes shared rows, which --mode expanded does not execute; use another mode")
    return Settings(
        dp_degree=options.dp,
        capacity=options.capacity,
        chunk_size=options.chunk_size,
        mode=options.mode,
        planner=options.planner,
        windows=windows,
        max_window_slots=6 if options.max_window_slots is None else options.max_window_slots,
        max_live_producers=options.max_live_producers or 2,
        cost=_cost(options),
        ortools_seconds=options.ortools_seconds or 300.0,
        ortools_first=options.ortools_first,
        validate=options.validate,
    )


def _cost(options: argparse.Namespace) -> PlanCost:
    if options.cost:
        return PlanCost.load(options.cost)
    model = options.model or _ROWS
    if model != _ROWS:
        return plan_cost(model, options.flavor or _FLAVOR, chunk_size=options.chunk_size)
    if options.flavor:
        raise ValueError(f"--flavor has no effect with --model {_ROWS}, which is the default; name a model")
    # What a producer keeps has a size even where only rows are counted.
    sizes = plan_cost(_MODEL, _FLAVOR, chunk_size=options.chunk_size)
    return PlanCost(
        shared_row_bytes=sizes.shared_row_bytes,
        handed_state_bytes=sizes.handed_state_bytes,
        source=f"rows; interface of {_MODEL} {_FLAVOR}",
    )


def _check_files(options: argparse.Namespace) -> None:
    targets = {"--json": options.json, "--plot": options.plot, "--save": options.save}
    # Links followed: another name of an input must not overwrite it.
    taken = {Path(file).resolve(): "an INPUT" for path in options.input for file in input_files(path)}
    for option, target in targets.items():
        common.check_target(target, option)
        if target is None or target == "-":
            continue
        file = Path(target).resolve()
        if file in taken:
            raise ValueError(f"{option}: '{target}' is {taken[file]} as well; name another file")
        taken[file] = f"the file of {option}"
    if options.plot and not options.plot.endswith(".png"):
        raise ValueError(f"--plot: '{options.plot}' must end in .png")
    if options.save == "-":
        raise ValueError("--save writes a file; standard output is for --json")
    if any(map(is_npz, options.input)):
        if options.overlong != "error":
            raise ValueError("--overlong applies to rollout files; an .npz must fit --capacity as it is")
        if options.scheme is not None:
            raise ValueError("--scheme applies to rollout files; an .npz holds the trajectories themselves")


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    options = _parser().parse_args(argv)
    common.config_overrides(options)
    _check_files(options)
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
        plan, baseline = settings.plan(tokens, offsets, node_start)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    done = time.perf_counter()
    if settings.validate:
        plan.validate(tokens, offsets, node_start)
    figures = step_figures(
        plan.stats,
        trajectories=len(offsets) - 1,
        work_items=int(np.count_nonzero(plan.items["item_rows_I"])),
        lower_bound=_bound(tokens, offsets, settings),
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
    before = compilations()
    SortedStep.from_tokens(tokens, offsets)
    # The first kernels tell about the others before most of the time has passed.
    if compilations() > before:
        sys.stderr.write("compiling the planner (once per machine, about a minute)\n")
        sys.stderr.flush()
    # As large as it takes for a second thread.
    sort_trajectories(frozen(np.zeros(2 << 20, np.int32)), np.arange(3) << 20)
    small.plan(tokens, offsets)
    if small.windows:
        # Whether producers are cut to fit and prefixes deepened depends on the step; these two do one each.
        for slots in (2, 0):
            replace(small, dp_degree=2, max_window_slots=slots).plan(tokens, offsets)
    _bound(tokens, offsets, small)
    return time.perf_counter() - start


def frozen(array: np.ndarray) -> np.ndarray:
    """Return a read-only view: a type of its own to numba, and the one that some readers' arrays have anyway."""
    view = array.view()
    view.flags.writeable = False
    return view


def _bound(tokens: np.ndarray, offsets: np.ndarray, settings: Settings) -> int:
    step = SortedStep.from_tokens(tokens, offsets)
    return lower_bound(step, capacity=settings.capacity, dp_degree=settings.dp_degree)


def entry() -> None:
    """Console script."""
    sys.exit(common.run(main))


if __name__ == "__main__":
    entry()
