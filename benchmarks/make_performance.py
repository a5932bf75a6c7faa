"""Write the tables of docs/performance.md from benchmarks/results.

    python benchmarks/make_performance.py            # rewrite the tables
    python benchmarks/make_performance.py --check    # exit 1 if they differ

A table stands between ``<!-- tables PATTERN -->`` and ``<!-- end -->``: one section for each file of benchmarks/results
that the pattern matches, by name. What is written around them is kept. A result of ``harts-bench update`` or
``harts-bench layer`` named like the pattern needs no more than this script to be in the document.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
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
    command = result.get("command", "update")
    body = {"update": update_tables, "layer": layer_tables}[command](result)
    return f"{title(name, result, command)}\n{body}"


def title(name: str, result: Report, command: str) -> str:
    arguments = shlex.join(result["arguments"]) if "arguments" in result else result["config"]
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
    if all("breakdown" in one for one in modes.values()):
        text += "\n" + kinds_table({mode: one["breakdown"] for mode, one in modes.items()})
    return text


def ratio_table(result: Report) -> str | None:
    """Speed of one mode over another; results of before operations were counted name speed-ups over expanded only."""
    old = {f"{mode}/expanded": ratio for mode, ratio in result.get("speedup_over_expanded", {}).items()}
    ratios = result.get("ratios", {"speedup": old, "flop_ratio": {}, "share": {}})
    rows = []
    for name, speedup in ratios["speedup"].items():
        flops, share = (ratios[key].get(name) for key in ("flop_ratio", "share"))
        rows.append([name, f"{speedup:.2f}", *("-" if x is None else f"{x:.2f}" for x in (flops, share))])
    return rows_of(["ratio", "original tokens/s", "FLOPs", "first over second"], rows) if rows else None


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
        text += "\n" + rows_of(["layer", "ratio", "original tokens/s", "FLOPs", "first over second"], ratios)
    return text


def render(document: str, results: Path = RESULTS) -> str:
    """Return the document with its tables made again."""

    def tables(match: re.Match[str]) -> str:
        files = sorted(results.glob(match[2]))
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
