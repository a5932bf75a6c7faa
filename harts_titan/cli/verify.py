"""``harts-verify CONFIG``: does shared execution give every trajectory what it would have had alone?

The same steps run three times with the same weights: as configured (any mode that shares), expanded, and
expanded again but packed differently (trajectories in reverse order, half the rows per call). The third run gives the
baseline's own re-run error, the measure for 16-bit types. No optimizer step is taken.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tqdm import tqdm

from harts_titan.cli import common
from harts_titan.cli.comparison import (
    LogitFigures,
    Recorded,
    compare_logits,
    cores_bit_equal,
    execute,
    relative_difference,
    routing_agrees,
)
from harts_titan.data import RolloutDataset
from harts_titan.data.source import dataset_from_config
from harts_titan.engine import Engine
from harts_titan.job_config import load_config
from harts_titan.step import Step


@dataclass(frozen=True)
class Bars:
    """Largest differences accepted, by dtype; None = reported, not judged."""

    logprob: float | None
    grad: float | None
    scalar: float | None
    """Relative difference of loss, z-loss and load-balancing loss."""
    min_cosine: float
    rerun_factor: float | None
    """Symmetric KL, 1 - cosine and NLL difference may be at most this many times the re-run error; the gradient of all
    parameters together twice that."""


BARS = {
    # 1e-10 / 1e-9 allow for the reordered float64 sums of thousands of terms.
    "float64": Bars(logprob=1e-10, grad=1e-9, scalar=1e-9, min_cosine=0.9997, rerun_factor=None),
    # Judged on positions whose whole path routes equally; a flip near a tie is counted, not judged.
    "float32": Bars(logprob=1e-5, grad=1e-4, scalar=1e-4, min_cosine=0.9997, rerun_factor=None),
    # Rounding differs between any two packings: the baseline's own re-run error is the measure.
    "bfloat16": Bars(logprob=None, grad=None, scalar=1e-3, min_cosine=0.9997, rerun_factor=1.1),
}

# What the float32 evaluation of two equal distributions still differs by.
_FLOOR = 1e-6
# Ratios; differences are shown by their magnitude.
_DECIMALS = {"compression": 3, "mean_token_cosine": 6}


@dataclass
class Differences:
    """Worst differences between two runs over all steps."""

    logprob: float = 0.0
    logprob_same_routing: float = 0.0
    entropy: float = 0.0
    entropy_same_routing: float = 0.0
    loss: float = 0.0
    loss_rel: float = 0.0
    z_loss_rel: float = 0.0
    load_balance_loss_rel: float = 0.0
    grad_rel: float = 0.0
    grad_l2_rel: float = 0.0
    """Relative difference of the gradient of all parameters together, Euclidean norm."""
    worst_parameter: str = ""
    counts_equal: bool = True
    flipped_positions: int = 0
    logits: LogitFigures = field(default_factory=LogitFigures)

    def include(self, engine: Engine, step: Step, a: Recorded, b: Recorded, depth_S: torch.Tensor) -> None:
        """Take in the difference of run ``a`` from run ``b`` of one step."""
        offsets = step.batch.offsets
        agrees_S = routing_agrees(a, b, offsets)
        labelled_S = torch.from_numpy(step.batch.labels >= 0)
        self.flipped_positions += int((~agrees_S).sum())
        for name, left, right in (("logprob", a.logprob_S, b.logprob_S), ("entropy", a.entropy_S, b.entropy_S)):
            difference_S = (left.double() - right.double()).abs()
            setattr(self, name, _worst(getattr(self, name), difference_S))
            same = f"{name}_same_routing"
            setattr(self, same, _worst(getattr(self, same), difference_S[agrees_S]))
        self.loss = _worse(self.loss, abs(a.loss - b.loss))
        for name in ("loss", "z_loss", "load_balance_loss"):
            left, right = getattr(a, name), getattr(b, name)
            relative = abs(left - right) / max(abs(right), 1e-300) if left != right else 0.0
            setattr(self, f"{name}_rel", _worse(getattr(self, f"{name}_rel"), relative))
        error = sum(float((a.grads[name].double() - grad.double()).square().sum()) for name, grad in b.grads.items())
        norm = sum(float(grad.double().square().sum()) for grad in b.grads.values())
        relative = 0.0 if error == 0.0 else math.sqrt(error / norm) if norm != 0.0 else math.inf
        self.grad_l2_rel = _worse(self.grad_l2_rel, relative)
        for name, grad in b.grads.items():
            worse = _worse(self.grad_rel, relative_difference(a.grads[name], grad))
            # NaN differs from itself: it is named once and kept.
            if worse != self.grad_rel and not math.isnan(self.grad_rel):
                self.grad_rel, self.worst_parameter = worse, name
        if a.counts_LE is not None and b.counts_LE is not None:
            self.counts_equal &= torch.equal(a.counts_LE, b.counts_LE)
        self.logits.add(compare_logits(engine, a, b, depth_S=depth_S, labelled_S=labelled_S))


def _worse(so_far: float, difference: float) -> float:
    """Return the larger of two differences; NaN is worse than any number and stays (``max`` would lose it)."""
    return math.nan if math.isnan(so_far) or math.isnan(difference) else max(so_far, difference)


def _worst(so_far: float, difference: torch.Tensor) -> float:
    return _worse(so_far, float(difference.max())) if len(difference) else so_far


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="harts-verify",
        description="Compare shared with expanded execution on the steps of a configuration; exit status 1 when a bar "
        "fails. Unknown options of the form --section.field value override the configuration.",
    )
    parser.add_argument("config", help="TOML configuration")
    parser.add_argument("--rollouts", metavar="FILE", help="rollouts to use instead of data.path")
    parser.add_argument(
        "--dtype",
        choices=tuple(BARS),
        default="",
        help="type to compute in, which decides the bars (default: training.mixed_precision_param)",
    )
    parser.add_argument("--hf-dir", default="", metavar="DIR", help="take model and weights from a Hugging Face folder")
    parser.add_argument(
        "--steps", type=int, default=0, metavar="N", help="verify the first N steps (default: one epoch)"
    )
    common.add_common_options(parser)
    return parser


def verify(engine: Engine, dataset: RolloutDataset, *, steps: int, dtype: str) -> dict[str, Any]:
    """Compare the modes on the first ``steps`` steps of an epoch (0 = all) and judge the differences.

    Returns:
        The figures under the JSON keys of ``harts-verify``; ``passed`` and ``failures`` give the verdict.
    """
    shared, rerun = Differences(), Differences()
    core_equal, core_elements = True, 0
    rows: dict[str, int] = {"shared": 0, "expanded": 0, "rerun": 0}
    uneven: list[str] = []
    stats: dict[str, int] = {"original_tokens": 0, "compact_tokens": 0, "replay_tokens": 0}
    members = dataset.steps_of_epoch(0)[: steps or None]
    progress = tqdm(total=3 * len(members), desc="verify", unit="run")
    for idx in members:
        batch = dataset.batch.select(idx)
        step = engine.prepare_update(batch)[0]
        half = max(engine.config.tree.max_tokens // 2, int(step.batch.lengths.max()))
        step_expanded = engine.replan(step, mode="expanded")
        runs: list[Recorded] = []
        for name, one in (
            ("shared", step),
            ("expanded", step_expanded),
            ("rerun", engine.replan(step, mode="expanded", call_capacity=half, reverse=True)),
        ):
            runs.append(execute(engine, one, cores=name == "shared"))
            layers = set(runs[-1].rows_executed.values())
            if len(layers) != 1:
                uneven.append(f"{name}: layers executed {sorted(layers)} rows")
            rows[name] += max(layers)
            progress.update()
        equal, elements = cores_bit_equal(engine, runs[0], step_expanded)
        core_equal, core_elements = core_equal and equal, core_elements + elements
        shared.include(engine, step, runs[0], runs[1], runs[0].depth_S)
        rerun.include(engine, step, runs[2], runs[1], runs[0].depth_S)
        for name in stats:
            stats[name] += getattr(step.plan.stats, name)
    progress.close()
    result: dict[str, Any] = {
        "mode": engine.config.tree.mode,
        "dtype": dtype,
        "steps": len(members),
        **stats,
        "compression": stats["original_tokens"] / stats["compact_tokens"],
        "rows_executed": rows,
        **_figures(shared),
        # None: the model has no linear-attention core.
        "core_bit_equal": core_equal if core_elements else None,
        "core_elements_compared": core_elements,
        "rerun": _figures(rerun),
    }
    result["failures"] = uneven + failures(result, BARS[dtype])
    result["passed"] = not result["failures"]
    return result


def _figures(d: Differences) -> dict[str, Any]:
    return {
        "max_logprob_diff": d.logprob,
        "max_logprob_diff_same_routing": d.logprob_same_routing,
        "max_entropy_diff": d.entropy,
        "max_entropy_diff_same_routing": d.entropy_same_routing,
        "loss_diff": d.loss,
        "loss_rel_diff": d.loss_rel,
        "z_loss_rel_diff": d.z_loss_rel,
        "load_balance_loss_rel_diff": d.load_balance_loss_rel,
        "max_grad_rel_diff": d.grad_rel,
        "grad_l2_rel_diff": d.grad_l2_rel,
        "worst_parameter": d.worst_parameter,
        "expert_counts_equal": d.counts_equal,
        "positions_with_routing_flips": d.flipped_positions,
        **d.logits.summary(),
    }


@dataclass(frozen=True)
class Limit:
    """What a figure is held to."""

    met: bool
    bar: str
    """For the table, beside the figure."""
    failure: str


def limits(result: dict[str, Any], bars: Bars) -> dict[str, Limit]:
    """Return what each judged figure of :func:`verify` is held to, by its key; NaN meets no limit."""
    found: dict[str, Limit] = {}
    exact = result["dtype"] == "float64"
    flips = result["positions_with_routing_flips"] > 0

    def at_most(name: str, bar: float | None, why: str = "") -> None:
        if bar is not None:
            failure = f"{name} = {result[name]:.3g}, at most {why or f'{bar:.3g}'} is accepted"
            found[name] = Limit(result[name] <= bar, f"<= {bar:.2e}{why and f', {why}'}", failure)

    at_most("max_logprob_diff_same_routing", bars.logprob)
    at_most("max_entropy_diff_same_routing", bars.logprob)
    worst = result["max_grad_rel_diff"]
    if exact or not flips:
        # A flipped expert gives another expert's weights a gradient: not a rounding difference.
        at_most("max_grad_rel_diff", bars.grad)
    if "max_grad_rel_diff" not in found or not math.isfinite(worst):
        bar = found["max_grad_rel_diff"].bar if "max_grad_rel_diff" in found else "finite"
        differs = f"the gradient of {result['worst_parameter']} differs by {worst}"
        found["max_grad_rel_diff"] = Limit(math.isfinite(worst), bar, differs)
    for name in ("loss_rel_diff", "z_loss_rel_diff", "load_balance_loss_rel_diff"):
        at_most(name, bars.scalar)
    cosine = result["mean_token_cosine"]
    found["mean_token_cosine"] = Limit(
        cosine >= bars.min_cosine,
        f">= {bars.min_cosine}",
        f"mean_token_cosine = {cosine:.6f}, at least {bars.min_cosine} is needed",
    )
    if exact or not flips:
        failure = "expert counts differ" + ("" if flips else " although every position routed equally")
        found["expert_counts_equal"] = Limit(result["expert_counts_equal"], "True", failure)
    if exact:
        at_most("max_logprob_diff", bars.logprob)
    if result["mode"] == "compact" and result["core_bit_equal"] is not None:
        failure = "linear-attention core outputs are not bit-equal to the per-trajectory run"
        found["core_bit_equal"] = Limit(result["core_bit_equal"], "True", failure)
    if bars.rerun_factor is not None:
        for name, factor in (
            ("mean_symmetric_kl", bars.rerun_factor),
            ("mean_cosine_error", bars.rerun_factor),
            ("mean_abs_nll_diff", bars.rerun_factor),
            ("grad_l2_rel_diff", 2 * bars.rerun_factor),
        ):
            again = result["rerun"][name]
            at_most(name, factor * again + _FLOOR, f"{factor:.3g} x the re-run's {again:.3g}")
    return found


def failures(result: dict[str, Any], bars: Bars) -> list[str]:
    """Return one line per bar that the figures of :func:`verify` miss; NaN misses every bar."""
    found = [limit.failure for limit in limits(result, bars).values() if not limit.met]
    original, rows = result["original_tokens"], result["rows_executed"]
    for name, want in (("shared", result["compact_tokens"]), ("expanded", original), ("rerun", original)):
        if rows[name] != want:
            found.append(f"the {name} run executed {rows[name]} rows per layer, {want} were expected")
    return found


def table_rows(result: dict[str, Any], bars: Bars) -> list[tuple[str, Any, str]]:
    """Return the lines of the table that the command prints: figure, value, and its bar if it is judged."""
    held = limits(result, bars)
    rows: list[tuple[str, Any, str]] = []
    for name, value in result.items():
        if isinstance(value, dict | list):
            continue
        if isinstance(value, float):
            value = f"{value:.{_DECIMALS[name]}f}" if name in _DECIMALS else f"{value:.3e}"
        rows.append((name, value, held[name].bar if name in held else ""))
    wanted = {"shared": result["compact_tokens"]}
    for name, count in result["rows_executed"].items():
        rows.append((f"rows executed, {name}", count, f"{wanted.get(name, result['original_tokens']):,}"))
    return rows


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    options, overrides = _parser().parse_known_args(argv)
    common.check_target(options.json, "--json")
    if options.steps < 0:
        raise ValueError(f"--steps ({options.steps}) must not be negative")
    fixed = ["--activation_checkpoint.mode", "none", "--rl.mini_batches", "1"]
    config = load_config(options.config, [*common.config_overrides(options), *overrides, *fixed])
    # Parts of the layers are recorded and run on their own; a compiled layer has no parts.
    config.compile.enable = False
    if config.tree.mode == "expanded":
        raise ValueError("tree.mode = 'expanded' has nothing to verify; use 'compact', 'nodewise' or 'depthwise'")
    dtype = options.dtype or config.training.mixed_precision_param
    engine = Engine.from_config(config, hf_dir=options.hf_dir, dtype=dtype, with_optimizer=False)
    dataset = dataset_from_config(config, vocab_size=engine.vocab_size, hint=common.path_hint(options))
    result = verify(engine, dataset, steps=options.steps, dtype=dtype)
    common.write_json(result, options.json)
    common.table(
        f"harts-verify: {options.config}, {dtype}",
        table_rows(result, BARS[dtype]),
        header=("figure", "value", "bar"),
        to_stderr=options.json == "-",
    )
    for line in result["failures"]:
        sys.stderr.write(f"FAILED: {line}\n")
    return 0 if result["passed"] else 1


def entry() -> None:
    """Console script."""
    sys.exit(common.run(main))


if __name__ == "__main__":
    entry()
