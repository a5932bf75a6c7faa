"""Options of ``harts-plan``, and the settings that they make."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harts_titan.cli import common
from harts_titan.cli.plan_read import input_files, is_npz
from harts_titan.models.train_specs import plan_cost
from harts_titan.tree import MODES, PlanCost, StepPlan, plan_step
from harts_titan.tree.cost import LARGEST
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
    ) -> tuple[StepPlan, SortedStep, OrtoolsResult | None]:
        """Plan a step; rows are laid out for replica 0 alone, as one rank does it, or for all if it is validated.

        Returns:
            The plan, the sorted step, and how the baseline found the plan where that planned.
        """
        steps: list[SortedStep] = []
        results: list[OrtoolsResult] = []

        def sort(tokens: np.ndarray, offsets: np.ndarray) -> SortedStep:
            steps.append(SortedStep.from_tokens(tokens, offsets))
            return steps[0]

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
            sort=sort,
        )
        return plan, steps[0], results[0] if results else None

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


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="harts-plan",
        description="Plan rollouts into microbatches and sharing windows; report compression, balance, rounds, time. "
        "Every rank plans all replicas but lays out the rows of its own: times are those of replica 0.",
    )
    parser.add_argument(
        "input",
        nargs="+",
        metavar="INPUT",
        help="rollout file (parquet, JSONL, path format), or .npz with flat int32 'tokens' and int64 'offsets' (N+1), "
        "optionally int64 'node_start'; several files are several steps",
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


def check_files(options: argparse.Namespace) -> None:
    """Refuse outputs that cannot be written or would overwrite an input, and options that inputs have no use for.

    Raises:
        ValueError: Naming the option.
    """
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
