"""Tables of ``harts-bench`` and ``harts-verify`` in docs/performance.md."""

from __future__ import annotations

import shlex

from performance_text import PASSES, Report, gib, number, rows_of


def bench_section(name: str, result: Report) -> str:
    """One result file: its title and tables."""
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
    nodes = f", {workload['nodes']:,} nodes" if workload.get("nodes") else ""
    facts.append(f"{workload['trajectories']} trajectories, {workload['original_tokens']:,} original tokens{nodes}")
    if "ceilings" in result:
        ceilings = result["ceilings"]
        facts.append(
            f"in the same call: copy {ceilings['copy_bytes_per_second'] / 1e12:.2f} TB/s, GEMM "
            f"{ceilings['gemm_flops_per_second'] / 1e12:.0f} and grouped GEMM "
            f"{ceilings['grouped_gemm_flops_per_second'] / 1e12:.0f} TFLOP/s"
        )
    note = f"Note: {result['note']}.\n" if "note" in result else ""
    return f"`harts-bench {command} {arguments}`\n(`benchmarks/results/{name}`): {'; '.join(facts)}.\n{note}"


def update_tables(result: Report) -> str:
    modes = result["modes"]
    header = ["mode", "seconds, median (min to max)", "original tokens/s", "rows", "rounds"]
    counted = all("flops" in one for one in modes.values())
    if counted:
        header += ["PFLOP", "TFLOP/s", "of the GEMM", "peak GiB"]
    rows = []
    for mode, one in modes.items():
        spread = f"{one['seconds_median']:.3f} ({one['seconds_min']:.3f} to {one['seconds_max']:.3f})"
        row = [f"`{mode}`", spread, f"{one['original_tokens_per_second']:,.0f}"]
        row += [f"{one['rows_executed']:,}", f"{one['rounds_max']:,}"]
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
    """A row for each kind of layer and mode: both passes, and how much faster ``compact`` is."""
    rows = []
    for kind, found in result["kinds"].items():
        for mode, passes in found["modes"].items():
            runs = [passes[part] for part in PASSES]
            utilised = " / ".join(f"{one['hardware_utilisation']:.0%}" for one in runs)
            moved = [one.get("elementwise") for one in runs]
            rows.append(
                [
                    kind,
                    f"`{mode}`",
                    " / ".join(number(one["seconds_median"] * 1e3) for one in runs),
                    " / ".join(number(one["hardware_tflops_per_second"]) for one in runs) + f" ({utilised})",
                    " / ".join(f"{one['share_of_copy']:.0%}" for one in moved) if all(moved) else "-",
                    gib(runs[-1]["peak_memory_bytes"]),
                    *compact_over(mode, found["ratios"]),
                ]
            )
    header = ["layer", "mode", "ms", "TFLOP/s (of the GEMM)", "elementwise, of the copy", "peak GiB"]
    header += ["compact is faster by", "FLOPs", "speed-up over FLOPs"]
    return "Forward / forward with backward.\n\n" + rows_of(header, rows)


def compact_over(mode: str, ratios: Report) -> list[str]:
    """Speed-up of ``compact`` over a mode, ratio of their operations, and the one over the other; by pass."""
    name = f"compact/{mode}"
    passes = [ratios[part] for part in PASSES if name in ratios.get(part, {}).get("speedup", {})]
    if not passes:
        return ["-"] * 3
    return [" / ".join(f"{one[key][name]:.2f}" for one in passes) for key in ("speedup", "flop_ratio", "share")]


VERIFIED = {
    "mean_cosine_error": "1 - mean token cosine",
    "mean_symmetric_kl": "mean symmetric KL, nats",
    "mean_abs_nll_diff": "mean NLL difference, nats",
    "grad_l2_rel_diff": "relative gradient difference (Euclidean)",
    "loss_rel_diff": "relative loss difference",
}


def verify_section(name: str, result: Report) -> str:
    """Distances from the expanded run, of ``compact`` and of the expanded run's repetition."""
    equal = "bit-equal" if result["core_bit_equal"] else "not bit-equal"
    facts = [
        f"{result['original_tokens']:,} original, {result['compact_tokens']:,} compact tokens "
        f"({result['compression']:.2f}x), {result['replay_tokens']:,} replayed, {result['dtype']}",
        f"core outputs {equal} over {result['core_elements_compared']:,} elements",
    ]
    rows = [[text, *(f"{one[key]:.3g}" for one in (result, result["rerun"]))] for key, text in VERIFIED.items()]
    table = rows_of(["figure", f"`{result['mode']}`", "re-run of `expanded`"], rows)
    return f"`benchmarks/results/{name}`: {'; '.join(facts)}.\n\n{table}"
