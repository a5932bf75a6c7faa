"""``harts-bench calibrate CONFIG``: measure the planner's cost coefficients of a model on this machine (HARTS A.2).

Work items of different rows and depths are generated, their forward and backward passes timed with the configured
model, and the coefficients fitted. Every fourth item is held out of the fit and only predicted, as are the consumers of
``--rollouts``. docs/planning_cost.md says how to read the result.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from harts_titan.cli import common
from harts_titan.cli.timing import device_name, synchronize
from harts_titan.data.source import dataset_from_config
from harts_titan.engine import Engine
from harts_titan.job_config import load_config
from harts_titan.models.common.tree_inputs import TreeInputs
from harts_titan.models.train_specs import cost_of_sizes
from harts_titan.parallel.fsdp import set_last_backward
from harts_titan.tree import plan_step
from harts_titan.tree.cost_fit import PASSES, CostFit, MeasuredItem, check_items, errors, fit_cost, fit_speed
from harts_titan.tree.sorted_step import SortedStep
from harts_titan.tree.work import Placement, measure

SHAPES = ("chain", "branches", "forest")
"""Many, some and few attended pairs per row: one path, a trunk with eight branches, sixteen paths."""
HELD_OUT = 4
"""Every so many items one is predicted, not fitted."""
MIN_ITEMS = 8
MIN_ROWS = 256
"""Of the largest item: below, items hardly differ from an empty call."""


@dataclass
class _Item:
    """A call to time."""

    name: str
    inputs: TreeInputs
    rows: int
    attended: int
    recomputed: int
    head: bool
    held_out: bool
    seconds: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))

    def measured(self) -> MeasuredItem:
        forward, backward = (statistics.median(values) for values in self.seconds)
        head_rows = self.rows if self.head else 0
        return MeasuredItem(self.name, self.rows, self.attended, self.recomputed, head_rows, forward, backward)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="harts-bench calibrate",
        description="Time forward and backward of generated work items with the configured model and fit the planner's "
        "cost coefficients. The JSON file is what tree.cost_file names. Unknown options of the form --section.field "
        "value override the configuration; tree.max_tokens is the size of the largest item.",
    )
    parser.add_argument("config", help="TOML configuration")
    parser.add_argument(
        "--rollouts", metavar="FILE", help="also predict the consumers of the first step of these rollouts"
    )
    parser.add_argument("--items", type=int, default=12, metavar="N", help="generated items (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="timed runs (default %(default)s)")
    parser.add_argument("--warmup", type=int, default=1, metavar="N", help="untimed runs (default %(default)s)")
    common.add_common_options(parser)
    return parser


def generate_trajectories(shape: str, rows: int, *, max_length: int, vocab_size: int, seed: int) -> list[np.ndarray]:
    """Return trajectories of about ``rows`` distinct prefixes.

    Args:
        shape: one of :data:`SHAPES`.
        rows: distinct prefixes (tokens).
        max_length: of a trajectory; longer ones are cut into several.
        vocab_size: ids are drawn below it.
        seed: of the ids.
    """
    rng = np.random.default_rng(seed)

    def fresh(length: int) -> np.ndarray:
        return rng.integers(0, vocab_size, length, dtype=np.int32)

    if shape == "branches":
        trunk = fresh(min(rows, max_length) // 2)
        own = max(1, (rows - trunk.size) // 8)
        return [np.concatenate([trunk, fresh(min(own, max_length - trunk.size))]) for _ in range(8)]
    length = min(max_length, rows if shape == "chain" else max(1, rows // 16))
    return [fresh(min(length, rows - done)) for done in range(0, rows, length)]


def build_item(
    engine: Engine, name: str, trajectories: list[np.ndarray], *, head: bool = True, held_out: bool = False
) -> _Item:
    """Lay one consumer out as the planner does and count its work."""
    tokens = np.concatenate(trajectories)
    offsets = np.cumsum([0, *(len(tokens) for tokens in trajectories)])
    step = SortedStep.from_tokens(tokens, offsets)
    nowhere = np.zeros(step.num_trajectories, np.int64)
    work = measure(step, Placement(nowhere, nowhere, np.array([0, 1]), nowhere), 1)
    plan = plan_step(
        tokens,
        offsets,
        capacity=step.distinct_tokens,
        chunk_size=engine.config.tree.chunk_size,
        num_taps=getattr(engine.model.model_args, "num_taps", 1),
    )
    (layout,) = plan.consumer(0, 0).calls
    return _Item(
        name,
        TreeInputs.from_layout(layout, engine.device, engine.backends),
        rows=int(work.complete_JD[0, 0]),
        attended=int(work.attended_JD[0, 0]),
        recomputed=int(work.recomputed_JD[0, 0]),
        head=head,
        held_out=held_out,
    )


def generated_items(engine: Engine, number: int) -> list[_Item]:
    """Return items from a sixth of ``tree.max_tokens`` rows up, with and without the LM head.

    Raises:
        ValueError: If ``tree.max_tokens`` is so small that items hardly differ.
    """
    largest = engine.config.tree.max_tokens
    if largest < MIN_ROWS:
        raise ValueError(f"tree.max_tokens ({largest}) must be at least {MIN_ROWS}: the rows of the largest item")
    # In an order in which sizes follow neither shapes nor the head.
    rows_I = np.random.default_rng(0).permutation(np.linspace(largest / 6, largest, number).astype(int))
    max_length = min(largest, getattr(engine.model.model_args, "max_position", largest))
    items = []
    for i, rows in enumerate(rows_I.tolist()):
        shape = SHAPES[i % len(SHAPES)]
        # The first item has the head: a sharded model learns its modules in its first call.
        head = (i // len(SHAPES)) % 2 == 0
        trajectories = generate_trajectories(
            shape, rows, max_length=max_length, vocab_size=engine.vocab_size, seed=i + 1
        )
        name = f"{shape} {rows}" + ("" if head else " without head")
        items.append(build_item(engine, name, trajectories, head=head, held_out=i % HELD_OUT == HELD_OUT - 1))
    return items


def rollout_items(engine: Engine) -> list[_Item]:
    """Return the consumers of the first configured step, all held out."""
    config = engine.config
    dataset = dataset_from_config(config, vocab_size=engine.vocab_size, hint="check --rollouts")
    batch = dataset.batch.select(dataset.steps_of_epoch(0)[0])
    plan = plan_step(batch.tokens, batch.offsets, capacity=config.tree.max_tokens, chunk_size=config.tree.chunk_size)
    items = []
    for slot in range(plan.num_slots):
        places = plan.consumer(0, slot).trajectory_N
        trajectories = [batch.tokens[batch.offsets[n] : batch.offsets[n + 1]] for n in places.tolist()]
        items.append(build_item(engine, f"rollouts slot {slot}", trajectories, held_out=True))
    return items


def time_items(engine: Engine, items: list[_Item], *, repeats: int, warmup: int) -> None:
    """Fill the seconds of the items. Items take turns, so a machine that slows down slows all of them."""
    # As all microbatches of a step but the last: gradients are added, not reduced.
    set_last_backward(engine.model, False)
    for turn in tqdm(range(warmup + repeats), desc="calibrate", unit="round"):
        for item in items:
            with contextlib.nullcontext() if item.head else _without_head(engine.model):
                seconds = _time_passes(engine, item)
            if turn >= warmup:
                for values, value in zip(item.seconds, seconds, strict=True):
                    values.append(value)
    engine.model.zero_grad()


def _time_passes(engine: Engine, item: _Item) -> tuple[float, float]:
    synchronize(engine.device)
    started = time.perf_counter()
    output = engine.model(item.inputs)
    synchronize(engine.device)
    ended = time.perf_counter()
    loss: Tensor | None = output.logprob_S if item.head else getattr(output, "hidden_TD", None)
    if loss is None:
        raise ValueError(
            f"model.name = '{engine.config.model.name}' gives no hidden_TD without its output module, so the LM head "
            "cannot be told from the layers"
        )
    loss = loss.to(torch.float32).sum()
    synchronize(engine.device)
    again = time.perf_counter()
    loss.backward()
    synchronize(engine.device)
    return ended - started, time.perf_counter() - again


@contextlib.contextmanager
def _without_head(model: Any) -> Iterator[None]:
    head, model.output = model.output, None
    try:
        yield
    finally:
        model.output = head


def compare(fits: dict[str, CostFit], items: list[_Item]) -> dict[str, Any]:
    """Return the report: every item with its predictions, and the errors of each fit inside and outside the fit."""
    listed = []
    for item in items:
        one = item.measured()
        entry: dict[str, Any] = {"item": item.name, "held_out": item.held_out}
        entry |= {name: getattr(one, name) for name in ("rows", "attended", "recomputed", "head_rows")}
        for place, name in enumerate(PASSES):
            values = item.seconds[place]
            entry[f"{name}_seconds"] = getattr(one, name)
            entry[f"{name}_spread"] = [min(values), max(values)]
            for kind, fit in fits.items():
                entry[f"{name}_{kind}_error"] = fit.predict(one)[place] / getattr(one, name) - 1
        listed.append(entry)
    sets = {
        "fitted_items": [item.measured() for item in items if not item.held_out],
        "held_out_items": [item.measured() for item in items if item.held_out],
    }
    return {
        "items": listed,
        "errors": {
            kind: {name: _plain(errors(fit, part)) for name, part in sets.items()} for kind, fit in fits.items()
        },
        "constant_seconds": dict(zip(PASSES, fits["fitted"].constant, strict=True)),
        "operations_per_second": 1 / fits["operations"].second if fits["operations"].second else None,
    }


def _plain(values: dict[str, dict[str, float]]) -> dict[str, dict[str, float | None]]:
    # JSON has no NaN.
    return {name: {k: None if math.isnan(v) else v for k, v in of.items()} for name, of in values.items()}


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    options, overrides = _parser().parse_known_args(argv)
    common.check_target(options.json, "--json")
    if options.repeats < 1 or options.warmup < 0:
        raise ValueError(f"--repeats ({options.repeats}) must be at least 1 and --warmup ({options.warmup}) at least 0")
    if options.items < MIN_ITEMS:
        raise ValueError(f"--items ({options.items}) must be at least {MIN_ITEMS}")
    config = load_config(options.config, [*common.config_overrides(options), *overrides])
    engine = Engine.from_config(config, with_optimizer=False)
    operations = cost_of_sizes(config)
    items = generated_items(engine, options.items)
    if options.rollouts is not None:
        items += rollout_items(engine)
    time_items(engine, items, repeats=options.repeats, warmup=options.warmup)
    fitted_on = [item.measured() for item in items if not item.held_out]
    check_items([item.measured() for item in items])
    device = device_name(engine.device)
    source = f"measured: {config.model.name} {config.model.flavor} on {device}, picoseconds"
    fits = {"fitted": fit_cost(fitted_on, operations, source=source), "operations": fit_speed(fitted_on, operations)}
    report = {
        "config": options.config,
        "device": device,
        "torch": torch.__version__,
        "repeats": options.repeats,
        "warmup": options.warmup,
        "operations": operations.document()["cost"],
    } | compare(fits, items)
    common.write_json(fits["fitted"].cost.document(report), options.json)
    _print(fits, report, to_stderr=options.json == "-")
    return 0


def _print(fits: dict[str, CostFit], report: dict[str, Any], *, to_stderr: bool) -> None:
    cost = fits["fitted"].cost
    rows: list[tuple[str, Any]] = [("device", report["device"])]
    rows += [(f"{name} (ps)", getattr(cost, name)) for name in vars(cost) if name.endswith(("_row", "_pair"))]
    rows += [(f"constant, {name}", f"{value * 1e3:.3f} ms") for name, value in report["constant_seconds"].items()]
    for kind in fits:
        for part, passes in report["errors"][kind].items():
            for name, figures in passes.items():
                r2 = "-" if figures["r2"] is None else f"{figures['r2']:.4f}"
                text = f"error {figures['median_relative_error']:.1%} (at most {figures['max_relative_error']:.1%})"
                rows.append((f"{kind}, {part.replace('_', ' ')}, {name}", f"{text}, R2 {r2}"))
    common.table("harts-bench calibrate", rows, to_stderr=to_stderr)
