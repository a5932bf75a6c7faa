"""``harts-bench layer CONFIG``: each kind of Ling layer and the head alone, in several modes, on the same trajectories.

Layers run at the configuration's sizes with random inputs, stored and computed in ``training.mixed_precision_param``,
without recomputation. A mode that needs several calls runs all of them; figures are sums over the calls.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from harts_titan.cli import bench_options, bench_workload, common
from harts_titan.cli.bench_breakdown import breakdown
from harts_titan.cli.bench_ceilings import measure_ceilings, time_runs
from harts_titan.cli.timing import device_name
from harts_titan.job_config import load_config
from harts_titan.models.common.tree_inputs import TreeInputs
from harts_titan.models.ling import LingArgs
from harts_titan.models.ling.cost import head_operations, layer_operations
from harts_titan.models.ling.flops import CallWork, Flops, count_flops, work_of_calls
from harts_titan.models.ling.stages import HEAD, KINDS, build_stage, layer_kinds
from harts_titan.models.ling.traffic import elementwise_bytes
from harts_titan.models.train_specs import model_args_of
from harts_titan.ops import OpsBackends
from harts_titan.tree import plan_step

ELEMENTWISE = ("short_conv", "norm", "activation", "moe", "elementwise", "copies")
"""Kinds of kernels that move memory rather than compute."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="harts-bench layer",
        description="Time forward and backward of every kind of layer of a Ling configuration, and of its head, in "
        "several tree modes. Unknown options of the form --section.field value override the configuration.",
    )
    bench_options.add_bench_options(parser)
    parser.add_argument("--kinds", metavar="A,B", help=f"of {', '.join(KINDS)} (default: all the model has)")
    return parser


@dataclass(frozen=True)
class _Calls:
    """The calls of one mode on the device."""

    inputs: list[TreeInputs]
    work: CallWork
    num_rounds: int


def _calls_of(batch: Any, mode: str, config: Any, args: LingArgs, device: torch.device) -> _Calls:
    tree = config.tree
    plan = plan_step(
        batch.tokens, batch.offsets, capacity=tree.max_tokens, chunk_size=tree.chunk_size, mode=mode,
        num_taps=args.num_taps, node_start=batch.node_start,
    )  # fmt: skip
    calls = [call for consumer in plan.consumers() for call in consumer.calls]
    backends = OpsBackends(**vars(config.ops))
    inputs = [TreeInputs.from_layout(call, device, backends) for call in calls]
    return _Calls(inputs, work_of_calls(calls), plan.stats.rounds_max)


def _read_kinds(options: argparse.Namespace, args: LingArgs) -> list[str]:
    has = [*layer_kinds(args), HEAD]
    if options.kinds is None:
        return has
    kinds = [kind for kind in options.kinds.split(",") if kind]
    for kind in kinds:
        if kind not in has:
            raise ValueError(f"--kinds: the model has no '{kind}'; it has {', '.join(has)}")
    if not kinds:
        raise ValueError(f"--kinds names nothing; the model has {', '.join(has)}")
    return kinds


class _Stage:
    """One kind of layer and what it is timed on."""

    def __init__(self, kind: str, args: LingArgs, config: Any, device: torch.device, num_rows: int) -> None:
        self.kind, self.args, self.device = kind, args, device
        self.model = build_stage(args, kind, config, device)
        dtype = getattr(torch, config.training.mixed_precision_param)
        generator = torch.Generator(device=device).manual_seed(0)
        # One buffer for all calls; the rows of a call are its first ones.
        self.x_TD = torch.randn(num_rows, args.dim, device=device, dtype=dtype, generator=generator)
        self.dy_TD = torch.randn(num_rows, args.dim, device=device, dtype=dtype, generator=generator)

    def _output(self, inputs: TreeInputs, x_TD: Tensor) -> Tensor:
        output = self.model(inputs, x_TD)
        return output.logprob_S if self.kind == HEAD else output.hidden_TD

    def forward(self, calls: _Calls) -> None:
        """Run forward as training does, with what backward would need kept until the call is done."""
        for inputs in calls.inputs:
            self._output(inputs, self.x_TD[: inputs.num_rows].detach().requires_grad_())

    def forward_backward(self, calls: _Calls) -> None:
        """Run both passes; gradients of the weights add up over the calls, as in an update."""
        for inputs in calls.inputs:
            y = self._output(inputs, self.x_TD[: inputs.num_rows].detach().requires_grad_())
            y.backward(torch.ones_like(y) if self.kind == HEAD else self.dy_TD[: inputs.num_rows])

    def flops(self, work: CallWork, *, chunk_size: int, backward: bool) -> Flops:
        one = (
            head_operations(self.args)
            if self.kind == HEAD
            else layer_operations(self.args, layer_kinds(self.args)[self.kind], chunk_size=chunk_size)
        )
        return count_flops(work, one, recompute=False, backward=backward)


def measure_stage(
    stage: _Stage,
    calls: Mapping[str, _Calls],
    *,
    repeats: Mapping[str, int],
    warmup: int,
    ceilings: Mapping[str, Any],
    chunk_size: int,
    profiled: Sequence[str],
) -> dict[str, Any]:
    """Time one kind of layer in every mode: ``modes`` by mode and pass, and ``ratios`` by pass."""
    passes: dict[str, Callable[[_Calls], None]] = {
        "forward": stage.forward,
        "forward_backward": stage.forward_backward,
    }
    out: dict[str, Any] = {"modes": {mode: {} for mode in calls}, "ratios": {}}
    for name, run in passes.items():
        medians: dict[str, float] = {}
        executed: dict[str, int] = {}
        for mode, one in calls.items():
            flops = stage.flops(one.work, chunk_size=chunk_size, backward=name != "forward")
            once = functools.partial(run, one)
            entry = bench_options.spread(
                time_runs(once, stage.device, repeats=repeats[mode], warmup=max(1, warmup), flush=True)
            )
            medians[mode], executed[mode] = entry["seconds_median"], flops.executed
            entry |= {"flops": flops.report()} | bench_options.speeds(flops, medians[mode], ceilings)
            entry["peak_memory_bytes"] = _peak(once, stage.device)
            if mode in profiled:
                entry["breakdown"] = breakdown(once, stage.device)
                entry["elementwise"] = _elementwise(stage, one.work, entry, ceilings, backward=name != "forward")
            out["modes"][mode][name] = entry
            stage.model.zero_grad(set_to_none=True)
        out["ratios"][name] = bench_options.ratios(medians, executed)
    return out


def _peak(run: Callable[[], None], device: torch.device) -> int | None:
    """Return what a run needs beside weights and inputs, None where the device does not tell."""
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    base = torch.cuda.memory_allocated(device)
    run()
    return torch.cuda.max_memory_allocated(device) - base


def _elementwise(
    stage: _Stage, work: CallWork, entry: Mapping[str, Any], ceilings: Mapping[str, Any], *, backward: bool
) -> dict[str, Any] | None:
    """Return compulsory bytes of what is no matrix product, the time of its kernels and GB/s; None for the head."""
    if stage.kind == HEAD:
        return None
    layer = layer_kinds(stage.args)[stage.kind]
    num_bytes = elementwise_bytes(stage.args, layer, element_bytes=stage.x_TD.element_size(), backward=backward)
    num_bytes *= work.rows
    kinds = entry["breakdown"]["kinds"]
    seconds = sum(kinds[kind]["ms"] for kind in ELEMENTWISE if kind in kinds) / 1e3
    speed = num_bytes / seconds if seconds else 0.0
    return {
        "bytes": num_bytes,
        "seconds": seconds,
        "gb_per_second": speed / 1e9,
        "share_of_copy": speed / ceilings["copy_bytes_per_second"],
    }


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    options, overrides = _parser().parse_known_args(argv)
    common.check_target(options.json, "--json")
    modes = bench_options.read_modes(options)
    repeats, profiled = bench_options.read_repeats(options, modes), bench_options.read_breakdown(options, modes)
    bench_workload.check_workload_options(options)
    config = load_config(options.config, [*common.config_overrides(options), *overrides])
    args = model_args_of(config)
    if not isinstance(args, LingArgs):
        raise ValueError(f"model.name = '{config.model.name}': only layers of 'ling' can be run alone; use update")
    kinds = _read_kinds(options, args)
    workload = bench_workload.load_workload(options, config, vocab_size=args.vocab_size)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if config.debug.seed is not None:
        torch.manual_seed(config.debug.seed)
    ceilings = measure_ceilings(device)
    calls = {mode: _calls_of(workload.batch, mode, config, args, device) for mode in modes}
    num_rows = max(inputs.num_rows for one in calls.values() for inputs in one.inputs)
    result: dict[str, Any] = {
        "command": "layer",
        "arguments": bench_options.arguments(argv),
        "config": options.config,
        "model": {"name": config.model.name, "flavor": config.model.flavor},
        "compute_dtype": config.training.mixed_precision_param,
        "capacity": config.tree.max_tokens,
        "chunk_size": config.tree.chunk_size,
        "compiled": config.compile.enable,
        "ops": vars(config.ops),
        "warmup": max(1, options.warmup),
        "workload": workload.report(),
        **bench_options.environment(device, device_name(device)),
        "ceilings": ceilings,
        "calls": {
            mode: vars(one.work) | {"calls": len(one.inputs), "rounds_max": one.num_rounds}
            for mode, one in calls.items()
        },
        "kinds": {},
    }
    for kind in tqdm(kinds, desc="bench", unit="kind"):
        result["kinds"][kind] = measure_stage(
            _Stage(kind, args, config, device, num_rows),
            calls,
            repeats=repeats,
            warmup=options.warmup,
            ceilings=ceilings,
            chunk_size=config.tree.chunk_size,
            profiled=profiled,
        )
        if device.type == "cuda":
            torch.cuda.empty_cache()
        bench_options.write_early(result, options)
    common.write_json(result, options.json)
    common.table("harts-bench layer", _rows(result), to_stderr=options.json == "-")
    return 0


def _rows(result: dict[str, Any]) -> list[tuple[str, Any]]:
    executed = {mode: calls["rows"] for mode, calls in result["calls"].items()}
    rows: list[tuple[str, Any]] = [
        ("device", result["device"]),
        *bench_options.workload_rows(result["workload"], executed),
        ("layers", "ms: forward / forward and backward; TFLOP/s, share and ratios: forward and backward"),
    ]
    for kind, found in result["kinds"].items():
        for mode, passes in found["modes"].items():
            text = " / ".join(f"{one['seconds_median'] * 1e3:.2f}" for one in passes.values())
            both = passes["forward_backward"]
            speed = bench_options.tflops(both["hardware_tflops_per_second"])
            share = f"{both['hardware_utilisation']:.1%} of the GEMM"
            rows.append((f"{kind}, {mode}", f"{text} ms, {speed} TFLOP/s, {share}"))
        for name, value in found["ratios"]["forward_backward"]["speedup"].items():
            share = found["ratios"]["forward_backward"]["share"][name]
            rows.append((f"{kind}, {name}", f"{value:.2f}x, {share:.3f} of the FLOP ratio"))
    return rows
