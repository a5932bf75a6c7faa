"""Write the tables of docs/performance.md from benchmarks/results.

    python benchmarks/make_performance.py            # rewrite the tables
    python benchmarks/make_performance.py --check    # exit 1 if they differ

A table stands between ``<!-- tables PATTERN,... -->`` and ``<!-- end -->``: one section for each file of
benchmarks/results that a pattern matches, pattern by pattern and by name. What is written around them is kept. A result
of ``harts-bench update``, ``harts-bench layer`` or a script ``benchmarks/gpu_PART.py`` (the parts of ``KERNELS``) named
like a pattern needs no more than this script to be in the document. Of the scripts' results the ops are shown, not the
sweeps of configurations.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENT = ROOT / "docs" / "performance.md"
_BLOCK = re.compile(r"(<!-- tables (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)

Report = dict[str, Any]


def rows_of(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def number(value: float, digits: int = 3) -> str:
    """Significant digits, with separators."""
    if value == 0:
        return "0"
    text = f"{value:.{digits}g}"
    return f"{float(text):,.0f}" if abs(float(text)) >= 10 ** (digits - 1) else f"{float(text):,}"


def gib(value: float | None) -> str:
    return "-" if value is None else f"{value / 2**30:.1f}"


def section(name: str, result: Report) -> str:
    """One result file: its title and tables."""
    if "sections" in result:
        return kernels_section(name, result)
    command = result.get("command", "update")
    body = {"update": update_tables, "layer": layer_tables}[command](result)
    return f"{title(name, result, command)}\n{body}"


def title(name: str, result: Report, command: str) -> str:
    # Results of before the command line was stored have its options in fields of their own.
    fields = [result["config"], "--modes", ",".join(result.get("modes", ())), "--repeats", str(result.get("repeats"))]
    arguments = shlex.join(result.get("arguments", fields))
    workload = result.get("workload", result)
    facts = [result["device"], f"torch {result['torch']}"]
    versions = result.get("versions", {})
    shown = [package for package in ("triton", "fla-core", "flash-attn-4") if versions.get(package)]
    facts += [f"{package} {versions[package]}" for package in shown]
    facts.append(f"{workload['trajectories']} trajectories, {workload['original_tokens']:,} original tokens")
    if "ceilings" in result:
        ceilings = result["ceilings"]
        facts.append(
            f"in the same call: copy {ceilings['copy_bytes_per_second'] / 1e12:.2f} TB/s, GEMM "
            f"{ceilings['gemm_flops_per_second'] / 1e12:.0f} and grouped GEMM "
            f"{ceilings['grouped_gemm_flops_per_second'] / 1e12:.0f} TFLOP/s"
        )
    return f"`harts-bench {command} {arguments}`\n(`benchmarks/results/{name}`): {'; '.join(facts)}.\n"


def update_tables(result: Report) -> str:
    modes = result["modes"]
    header = ["mode", "seconds, median (min to max)", "original tokens/s", "rows"]
    counted = all("flops" in one for one in modes.values())
    if counted:
        header += ["PFLOP", "TFLOP/s", "of the GEMM", "peak GiB"]
    rows = []
    for mode, one in modes.items():
        spread = f"{one['seconds_median']:.3f} ({one['seconds_min']:.3f} to {one['seconds_max']:.3f})"
        row = [f"`{mode}`", spread, f"{one['original_tokens_per_second']:,.0f}", f"{one['rows_executed']:,}"]
        if counted:
            row += [number(one["flops"]["executed"] / 1e15), number(one["hardware_tflops_per_second"])]
            row += [f"{one['hardware_utilisation']:.1%}", gib(one["peak_memory_bytes"])]
        rows.append(row)
    text = rows_of(header, rows)
    if (ratios := ratio_table(result)) is not None:
        text += "\n" + ratios
    if breakdowns := {mode: one["breakdown"] for mode, one in modes.items() if "breakdown" in one}:
        text += "\n" + kinds_table(breakdowns)
    return text


def ratio_table(result: Report) -> str | None:
    """Speed of one mode over another; results of before operations were counted name speed-ups over expanded only."""
    old = {f"{mode}/expanded": ratio for mode, ratio in result.get("speedup_over_expanded", {}).items()}
    ratios = result.get("ratios", {"speedup": old, "flop_ratio": {}, "share": {}})
    rows = []
    for name, speedup in ratios["speedup"].items():
        flops, share = (ratios[key].get(name) for key in ("flop_ratio", "share"))
        rows.append([name, f"{speedup:.2f}", *("-" if x is None else f"{x:.2f}" for x in (flops, share))])
    return rows_of(["ratio", "original tokens/s", "FLOPs", "speed-up over FLOPs"], rows) if rows else None


def kinds_table(breakdowns: dict[str, Report]) -> str:
    """Milliseconds and share of the span by kind of kernel, largest of the last mode first."""
    *_, last = breakdowns.values()
    kinds = list(dict.fromkeys([*last["kinds"], *(kind for one in breakdowns.values() for kind in one["kinds"])]))

    def cell(one: Report, ms: float | None) -> str:
        whole = one["busy_ms"] if one["span_ms"] is None else one["span_ms"]
        return "-" if ms is None else f"{ms:.1f} ({ms / whole:.0%})" if whole else f"{ms:.1f}"

    rows = [[k, *(cell(one, one["kinds"].get(k, {}).get("ms")) for one in breakdowns.values())] for k in kinds]
    rows.append(["no kernel", *(cell(one, one["idle_ms"]) for one in breakdowns.values())])
    return rows_of(["ms (share)", *(f"`{mode}`" for mode in breakdowns)], rows)


def layer_tables(result: Report) -> str:
    rows, ratios = [], []
    for kind, found in result["kinds"].items():
        for mode, passes in found["modes"].items():
            forward, both = passes["forward"], passes["forward_backward"]
            moved = both.get("elementwise")
            rows.append(
                [
                    kind,
                    f"`{mode}`",
                    *(number(one["seconds_median"] * 1e3) for one in (forward, both)),
                    " / ".join(number(one["hardware_tflops_per_second"]) for one in (forward, both)),
                    f"{both['hardware_utilisation']:.1%}",
                    f"{moved['gb_per_second']:,.0f} ({moved['share_of_copy']:.0%})" if moved else "-",
                    gib(both["peak_memory_bytes"]),
                ]
            )
        for name, speedup in found["ratios"]["forward_backward"]["speedup"].items():
            flops, share = (found["ratios"]["forward_backward"][key][name] for key in ("flop_ratio", "share"))
            ratios.append([kind, name, f"{speedup:.2f}", f"{flops:.2f}", f"{share:.2f}"])
    header = ["layer", "mode", "forward ms", "with backward", "TFLOP/s", "of the GEMM", "elementwise GB/s", "peak GiB"]
    text = rows_of(header, rows)
    if ratios:
        text += "\n" + rows_of(["layer", "ratio", "original tokens/s", "FLOPs", "speed-up over FLOPs"], ratios)
    return text


def kernels_section(name: str, result: Report) -> str:
    """Result of a script that times the kernels of one part: ``sections`` as gpu_timing.run_sections writes them."""
    part = next(part for part in KERNELS if part in name)
    found = {key: entry["result"] for key, entry in result["sections"].items() if "result" in entry}
    environment = result["environment"]
    versions = environment["versions"]
    facts = [environment["device"], *(f"{package} {version}" for package, version in versions.items())]
    if environment["commit"] != "unknown":
        facts.append(f"commit {environment['commit'][:7]}")
    # A file may hold sections of several runs.
    others = {key: entry["commit"] for key, entry in result["sections"].items() if "commit" in entry}
    facts += [f"{key} at {commit[:7]}" for key, commit in others.items() if commit != environment["commit"]]
    if failed := [key for key in result["sections"] if key not in found]:
        facts.append(f"failed: {', '.join(failed)}")
    command = f"python benchmarks/gpu_{part}.py OUT --sections {','.join(result['sections'])}"
    head = f"`{command}`\n(`benchmarks/results/{name}`): {'; '.join(facts)}.\n"
    if note := environment.get("note"):
        head += f"Note: {note}.\n"
    return "\n".join([head, *KERNELS[part](found)])


def rate_of(timed: Report) -> str:
    """Speed and its share of the ceiling."""
    if "tflop_per_s" in timed:
        speed, share = f"{number(timed['tflop_per_s'])} TFLOP/s", timed.get("share_of_gemm")
    elif "gb_per_s" in timed:
        speed, share = f"{timed['gb_per_s']:,.0f} GB/s", timed.get("share_of_copy")
    else:
        return "-"
    return speed if share is None else f"{speed} ({share:.0%})"


def ms(timed: Report) -> str:
    return number(timed["median"])


def kda_tables(found: Report) -> list[str]:
    texts = []
    if timing := found.get("timing"):
        runs = {name: one for name, one in timing.items() if isinstance(one, dict) and set(PASSES) <= set(one)}
        own = runs["own compact"]
        rows = [
            [
                name,
                *(ms(one[part]) for part in PASSES),
                " / ".join(f"{one[part]['median'] / own[part]['median']:.2f}" for part in PASSES),
                f"{one['peak_gib']:.1f}" if "peak_gib" in one else "-",
            ]
            for name, one in runs.items()
        ]
        facts = kda_errors(found.get("numerics", {}))
        if "rows" in timing:
            equal = "yes" if timing["bit_equal_to_expanded"] else "no"
            facts = [
                f"{timing['rows']:,} rows ({timing['expanded_rows']:,} expanded, {timing['token_ratio']:.2f}x), "
                f"{timing['segments']} segments, {timing['rounds']} rounds; "
                f"outputs bit-equal to the expanded run: {equal}.",
                *facts,
            ]
        texts += [f"{' '.join(facts)}\n"] if facts else []
        texts.append(rows_of(["run", "forward ms", "with backward", "over own compact", "peak GiB"], rows))
    if breakdown := found.get("breakdown"):
        kernels = {name: one for name, one in breakdown.items() if isinstance(one, dict) and "gb_per_s" in one}
        rows = [[f"`{name}`", ms(one), rate_of(one)] for name, one in kernels.items()]
        texts.append(rows_of(["kernel of compact, both passes", "ms", "compulsory bytes (of the copy)"], rows))
    return texts


def kda_errors(numerics: Report) -> list[str]:
    """Say how large errors against float64 are over those of fla, in the worst case of each output and gradient."""
    if summed := numerics.get("worst ratio over fla"):
        worst = {name: (ratio, "") for name, ratio in summed.items()}
    else:
        cases = {case: one for case, one in numerics.items() if isinstance(one, dict) and "worst" in one}
        worst = {one["worst"][0]: (0.0, "") for one in cases.values()}
        for case, one in cases.items():
            name, ratio = one["worst"]
            worst[name] = max(worst[name], (ratio, f", {case}"))
    if not worst:
        return []
    name = max(worst, key=lambda name: worst[name][0])
    ratio, case = worst[name]
    return [f"Largest error against float64, over fla's own: {ratio:.2f} (`{name}`{case})."]


def attention_tables(found: Report) -> list[str]:
    trees = {name: one for name, one in found.get("trees", {}).items() if isinstance(one, dict) and "tree" in one}
    listed = found.get("index_list", {})
    rows = []
    for name, one in trees.items():
        if "fa4" not in one:
            continue
        tree = one["tree"]
        row = [name, f"{tree['rows']:,}", str(tree["segments"]), f"{tree['compression']:.2f}"]
        for part in PASSES:
            share = one.get("share_of_expanded", {}).get(part)
            speed = f"{ms(one['fa4'][part])} ms, {number(one['fa4'][part]['tflop_per_s'])}"
            row.append(speed if share is None else f"{speed} ({share:.0%})")
        row.append(number(one["build_ms"]["fa4"]["median"]))
        own = listed.get(name, {})
        row.append(" / ".join(number(own[part]["tflop_per_s"]) for part in PASSES) if own else "-")
        rows.append(row)
    header = ["tree", "rows", "segments", "compression", "forward, TFLOP/s (of expanded)"]
    header += ["with backward", "block lists ms", "`triton`, TFLOP/s"]
    return [rows_of(header, rows)] if rows else []


def elementwise_tables(found: Report) -> list[str]:
    ops = {name: one for name, one in found.get("ops", {}).items() if isinstance(one, dict) and "forward" in one}
    rows = [
        [name, *(text for part in ("forward", "backward") for text in (ms(one[part]), rate_of(one[part])))]
        for name, one in ops.items()
    ]
    return [rows_of(["op", "forward ms", "of the copy", "backward ms", "of the copy"], rows)] if rows else []


def head_tables(found: Report) -> list[str]:
    op = found.get("op", {})
    rows = []
    for name, both in op.items():
        if re.fullmatch(r"op(_\d+)?", name) and f"{name}_forward" in op:
            over = f"{both['over_bare']:.2f}" if "over_bare" in both else "-"
            memory = f"{both['share_of_logits']:.3f}" if "share_of_logits" in both else "-"
            width = name.partition("_")[2] or "all"
            rows.append([width, ms(op[f"{name}_forward"]), ms(both), rate_of(both), over, memory])
    header = [
        "words a block",
        "forward ms",
        "with backward",
        "speed",
        "over bare products",
        "memory over float32 logits",
    ]
    text = [rows_of(header, rows)] if rows else []
    if rows and op.get("four_products_ms"):
        text.insert(0, f"The four bare products take {number(op['four_products_ms'], 4)} ms.\n")
    return text


def moe_tables(found: Report) -> list[str]:
    texts = []
    if layer := found.get("layer"):
        rows = [
            [name, *(text for part in PASSES for text in (ms(layer[f"{key}_{part}"]), rate_of(layer[f"{key}_{part}"])))]
            for key, name in (("kernels", "kernels"), ("plain", "plain PyTorch"))
            if all(f"{key}_{part}" in layer for part in PASSES)
        ]
        texts.append(rows_of(["whole layer", "forward ms", "of the GEMM", "with backward", "of the GEMM"], rows))
    # Alternatives are named OP_SIZE or OP_SIZE_wWARPS: the fastest of each op.
    best: dict[str, Report] = {}
    for section_name in ("rows", "router"):
        for name, one in found.get(section_name, {}).items():
            op = re.sub(r"_\d+(_w\d+)?$", "", name)
            if op in MOE_OPS and "median" in one and (op not in best or one["median"] < best[op]["median"]):
                best[op] = one
    if best:
        rows = [[f"`{op}`", ms(one), rate_of(one)] for op, one in best.items()]
        texts.append(rows_of(["op, fastest configuration", "ms", "of the copy"], rows))
    return texts


PASSES = ("forward", "forward_backward")
MOE_OPS = (
    *("logits", "logits_backward", "choose", "choose_backward", "routes"),
    *("dispatch", "dispatch_backward", "combine", "combine_base", "combine_backward"),
)
KERNELS: dict[str, Callable[[Report], list[str]]] = {
    "kda": kda_tables,
    "attention": attention_tables,
    "elementwise": elementwise_tables,
    "head": head_tables,
    "moe": moe_tables,
}


def render(document: str, results: Path = RESULTS) -> str:
    """Return the document with its tables made again."""

    def tables(match: re.Match[str]) -> str:
        files = [file for pattern in match[2].split(",") for file in sorted(results.glob(pattern))]
        sections = [section(file.name, json.loads(file.read_text())) for file in files]
        return f"{match[1]}\n" + "".join(f"{text}\n" for text in sections) + match[4]

    return _BLOCK.sub(tables, document)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if the tables are not up to date")
    args = parser.parse_args()
    before = DOCUMENT.read_text()
    after = render(before)
    if args.check:
        return int(before != after)
    DOCUMENT.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
