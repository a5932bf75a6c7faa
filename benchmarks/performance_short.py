"""The table "In short" of docs/performance.md: one line for each result, commands below it."""

from __future__ import annotations

import re
import shlex
import statistics
from collections.abc import Callable, Iterator
from pathlib import PurePath

from performance_text import PASSES, Report, number, rows_of

Line = list[str]
RATIOS = ("speedup", "flop_ratio", "share")
NO_RATIOS = ("-",) * len(RATIOS)


def short(results: dict[str, Report]) -> str:
    """The table, then the command of every ``harts-bench`` result in it.

    Args:
        results: By file name. A part that several files have is shown from the first.
    """
    lines: list[Line] = []
    commands: dict[str, str] = {}
    shown: set[str] = set()
    for name, result in results.items():
        if "sections" in result:
            found = {key: entry["result"] for key, entry in result["sections"].items() if "result" in entry}
            for part, make in PARTS.items():
                if part not in shown and (made := make(found)):
                    shown.add(part)
                    lines += made
            continue
        command = result["command"]
        commands[f"harts-bench {command} {shlex.join(result['arguments'])}"] = name
        lines += {"update": update_lines, "layer": layer_lines}[command](result)
    header = ["what", "speed-up over `expanded`", "ratio of FLOPs", "speed-up over it", "speed", "of its ceiling"]
    listed = [f"- `{command}` (`benchmarks/results/{name}`)\n" for command, name in commands.items()]
    return rows_of(header, lines) + ("\n" + "".join(listed) if listed else "")


def ratio(ratios: Report, key: str) -> str:
    value = ratios[key].get("compact/expanded")
    return "-" if value is None else f"{value:.2f}"


def update_lines(result: Report) -> list[Line]:
    """Mode ``compact``, then the modes of a call a node or a depth where the workload says where nodes begin."""
    modes, workload = result["modes"], result["workload"]
    layers = result["model"].get("layers")
    source = PurePath(workload["source"]).stem
    what = f"whole update, {f'{layers} layers' if layers else result['model']['flavor']}, {source}"
    fla = ", KDA core of fla" if result.get("ops", {}).get("kda") == "fla" else ""
    lines = []
    for mode in ("compact", *(("nodewise", "depthwise") if workload.get("nodes") else ())):
        one = modes.get(mode)
        if one is None or "hardware_utilisation" not in one:
            continue
        if mode == "compact":
            speedup, *others = (ratio(result["ratios"], key) for key in RATIOS)
            gains = [f"**{speedup}**", *others]
        else:
            gains = gain_over(modes["expanded"], one) if "expanded" in modes else [*NO_RATIOS]
        tokens = f"{one['original_tokens_per_second']:,.0f} original tokens/s"
        name = what if mode == "compact" else f"{what}, `{mode}`{fla}"
        lines.append([name, *gains, tokens, f"{one['hardware_utilisation']:.0%} of the GEMM"])
    return lines


def gain_over(expanded: Report, one: Report) -> Line:
    """Speed-up of a mode over ``expanded``, ratio of their operations, and the one over the other."""
    speedup = expanded["seconds_median"] / one["seconds_median"]
    flops = expanded["flops"]["executed"] / one["flops"]["executed"]
    return [f"{value:.2f}" for value in (speedup, flops, speedup / flops)]


def layer_lines(result: Report) -> list[Line]:
    lines = []
    for kind, found in result["kinds"].items():
        ratios, both = found["ratios"]["forward_backward"], found["modes"]["compact"]["forward_backward"]
        speed = f"{number(both['hardware_tflops_per_second'])} TFLOP/s"
        share = f"{both['hardware_utilisation']:.0%} of the GEMM"
        if moved := both.get("elementwise"):
            share += f"; elementwise {moved['share_of_copy']:.0%} of a copy"
        what = f"layer `{kind}`, forward and backward"
        lines.append([what, *(ratio(ratios, key) for key in RATIOS), speed, share])
    return lines


def kda_lines(found: Report) -> list[Line]:
    timing = found.get("timing", {})
    if not {"own compact", "fla expanded", "token_ratio"} <= set(timing):
        return []
    own = timing["own compact"]["forward_backward"]["median"]
    tokens, speed = f"{timing['token_ratio']:.2f} (tokens)", f"{number(own)} ms"
    runs = {"fla expanded": "fla-core's kernels", "own expanded": "these kernels"}
    lines = []
    for run, whose in runs.items():
        if run in timing:
            gain = timing[run]["forward_backward"]["median"] / own
            what = f"KDA core, forward and backward; expanded is {whose}"
            lines.append([what, f"{gain:.2f}", tokens, f"{gain / timing['token_ratio']:.2f}", speed, "-"])
    return lines


def attention_lines(found: Report) -> list[Line]:
    trees = {name: one for name, one in found.get("trees", {}).items() if isinstance(one, dict) and "fa4" in one}
    trees = {name: one for name, one in trees.items() if "share_of_expanded" in one}
    if not trees:
        return []
    speeds = [span((one["fa4"][part]["tflop_per_s"] for one in trees.values()), number) for part in PASSES]
    shares = [span((one["share_of_expanded"][part] for one in trees.values()), percent) for part in PASSES]
    what = f"attention, {len(trees)} trees: forward; with backward"
    return [[what, *NO_RATIOS, f"{'; '.join(speeds)} TFLOP/s", f"{'; '.join(shares)} of the expanded run's TFLOP/s"]]


def head_lines(found: Report) -> list[Line]:
    runs = {name: one for name, one in found.get("op", {}).items() if re.fullmatch(r"op(_\d+)?", name)}
    if not runs:
        return []
    # The first is the one in use.
    name, one = next(iter(runs.items()))
    what = f"log-probs and entropy, forward and backward, blocks of {name.partition('_')[2] or 'all'} words"
    speed = f"{number(one['tflop_per_s'])} TFLOP/s; memory {one['share_of_logits']:.0%} of float32 logits"
    return [[what, *NO_RATIOS, speed, f"{1 / one['over_bare']:.0%} of the speed of its bare products"]]


def moe_lines(found: Report) -> list[Line]:
    layer = found.get("layer", {}).get("kernels_forward_backward")
    if layer is None:
        return []
    speed, share = f"{number(layer['tflop_per_s'])} TFLOP/s", f"{layer['share_of_gemm']:.0%} of the dense GEMM"
    return [["MoE layer, forward and backward", *NO_RATIOS, speed, share]]


def elementwise_lines(found: Report) -> list[Line]:
    ops = {name: one for name, one in found.get("ops", {}).items() if isinstance(one, dict) and "forward" in one}
    passes = ("forward", "backward")
    shares = {f"{name}, {part}": one[part]["share_of_copy"] for name, one in ops.items() for part in passes}
    if not shares:
        return []
    low = min(shares, key=lambda name: shares[name])
    speed = f"median {percent(statistics.median(shares.values()))} of a copy, lowest {percent(shares[low])} ({low})"
    return [[f"convolution, norms, gates, rotary: {len(shares)} passes", *NO_RATIOS, "-", speed]]


def percent(value: float) -> str:
    return f"{value:.0%}"


def span(values: Iterator[float], text: Callable[[float], str]) -> str:
    """Smallest to largest."""
    known = sorted(values)
    return f"{text(known[0])} to {text(known[-1])}"


PARTS: dict[str, Callable[[Report], list[Line]]] = {
    "kda": kda_lines,
    "attention": attention_lines,
    "head": head_lines,
    "moe": moe_lines,
    "elementwise": elementwise_lines,
}
