"""Tables of the scripts ``benchmarks/gpu_PART.py`` in docs/performance.md."""

from __future__ import annotations

import re
from collections.abc import Callable

from performance_text import PASSES, Report, ms, number, rate_of, rows_of


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
    if limits := found.get("limits"):
        texts.append(limit_facts(limits))
    if breakdown := found.get("breakdown"):
        kernels = {name: one for name, one in breakdown.items() if isinstance(one, dict) and "gb_per_s" in one}
        rows = [[f"`{name}`", ms(one), rate_of(one)] for name, one in kernels.items()]
        texts.append(rows_of(["kernel of compact, both passes", "ms", "compulsory bytes (of the copy)"], rows))
    return texts


def kda_errors(numerics: Report) -> list[str]:
    """Say how large errors against float64 are over those of fla, in the worst case of each output and gradient."""
    if summed := numerics.get("over_fla", numerics.get("worst ratio over fla")):
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


def compile_tables(found: Report) -> list[str]:
    """Graphs after each plan, host waits, and compiled against eager layers."""
    texts = []
    if graphs := found.get("graphs"):
        plans = zip(graphs["rows"], graphs["segments"], graphs["rounds"], graphs["graphs"], strict=True)
        # Two errors a plan, one of each kind of layer.
        errors = [max(pair) for pair in zip(graphs["errors"][::2], graphs["errors"][1::2], strict=True)]
        rows = [[*(f"{value:,}" for value in plan), f"{error:.1e}"] for plan, error in zip(plans, errors, strict=True)]
        header = ["rows", "segments", "rounds", "graphs so far, both layers", "largest relative difference from eager"]
        texts.append(rows_of(header, rows))
    if sync := found.get("sync"):
        texts.append(
            "A compiled microbatch, from its plan to the gradients and with recomputation, never waits for the device "
            f'(`torch.cuda.set_sync_debug_mode("error")`): queued in {number(sync["queued_ms"])} ms.\n'
        )
    layers = {name: found[name] for name in ("kda_moe", "mla_moe") if name in found}
    rows = [
        [
            f"{name}, {one['rows']:,} rows",
            kind,
            *(ms(one[f"{kind} {part}"]) for part in ("forward", "forward + backward")),
            number(one[f"{kind} forward + backward"]["host"]),
            f"{one[f'{kind} peak GiB']:.1f}",
        ]
        for name, one in layers.items()
        for kind in ("eager", "compiled")
    ]
    if rows:
        header = ["layer", "run", "forward ms", "with backward", "host ms, with backward", "peak GiB"]
        texts.append(rows_of(header, rows))
    return texts


def sanitize_tables(found: Report) -> list[str]:
    """How the cases ended under every tool of compute-sanitizer; kernels and launches are those of the clean ones."""
    texts = []
    if control := found.get("control"):
        seen = [
            f"{tool}: {one['named']}; with other kernels named: {one['others named']}" for tool, one in control.items()
        ]
        texts.append(f"A kernel with planted faults: {'. '.join(seen)}.\n")
    runs = [one for one in found.values() if "summary" in one]
    rows = [
        [f"`{one['tool']}`", one["summary"], str(one["kernels"]), str(one["launches"]), number(one["seconds"])]
        for one in runs
    ]
    if rows:
        texts.append(rows_of(["tool", "result", "own kernels", "launches", "seconds"], rows))
    bad = [(one["tool"], case) for one in runs for case in one.get("cases", []) if case["verdict"] != "clean"]
    texts += [f"{tool}, case {case['case']}: {case['verdict']}: {case['message'][:200]}\n" for tool, case in bad]
    texts += [
        f"{one['tool']} saw in no clean case: {', '.join(one['never launched'])}.\n"
        for one in runs
        if one.get("never launched")
    ]
    return texts


def ops_tables(found: Report) -> list[str]:
    """Runs of ``gpu_ops.py`` on one tree."""
    rows, trees = [], []
    for op in ("kda", "short_conv", "attention"):
        timing = found.get(f"{op}_timing", found.get(op, {}))
        trees += [timing["tree"]] if "tree" in timing else []
        runs = {name: one for name, one in timing.items() if isinstance(one, dict) and "peak_gib" in one}
        rows += [
            [f"{op}, {name}", *(ms(one[part]) for part in PASSES), f"{one['peak_gib']:.1f}"]
            for name, one in runs.items()
        ]
    if not rows:
        return []
    facts = [
        f"{tree['rows']:,} rows ({tree['positions']:,} positions, {tree['compression']:.2f}x).\n" for tree in trees[:1]
    ]
    return [*facts, rows_of(["run", "forward ms", "with backward", "peak GiB"], rows)]


def limit_facts(limits: Report) -> str:
    """What ``gpu_kda.py`` checks beyond usual sizes."""
    same = limits["past_int32"]
    return (
        f"Sequences of one token: errors of outputs and gradients up to {max(limits['one_token_sequences']):.1e} "
        "against the closed form in float64. Rows behind more than 2^31 elements: "
        f"{sum(same)} of {len(same)} tensors (outputs, gradients) have the bits of a call of their own. Two runs of a "
        "tree: the same bits.\n"
    )


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
    "compile": compile_tables,
    "sanitize": sanitize_tables,
    "ops": ops_tables,
}
