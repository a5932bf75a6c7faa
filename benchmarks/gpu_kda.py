"""Check and time KDA on one GPU against float64, fla-core, node-wise and depth-wise runs; writes ``gpu_kda.json``.

    python benchmarks/gpu_kda.py OUT                                     # one Hopper GPU
    python benchmarks/gpu_kda.py OUT --sections sweep                    # other configurations of each kernel
    TRITON_INTERPRET=1 python benchmarks/gpu_kda.py OUT --dry-run        # every line that needs no GPU, tiny sizes

fla's kernels run one pinned configuration each (``harts_titan/ops/kda/fla_op.py``). The phase-split prototype that the
op replaced is not part of the repository: where KDA_PROTOTYPE names the folder of its modules, it is timed as well.
"""

from __future__ import annotations

import functools
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from gpu_timing import DEVICE, DRY, ROOT, Report, copy_bandwidth, line, median_ms, rate, run_sections

if DRY:
    import tests.numerics.triton_interpreter  # noqa: F401
import numpy as np
import torch
from torch import Tensor

from harts_titan.models.common.tree_inputs import packed_sequences
from harts_titan.ops.kda import PackedSequences, launches
from harts_titan.ops.kda.configs import HOPPER, Config
from harts_titan.ops.kda.triton_op import kda_triton, prepare_tables
from harts_titan.tree.plan import CallLayout
from tests.numerics import kda_checks
from tests.numerics import kernel_checks as checks
from tests.numerics.fla_pinned import chunk_kda

DTYPE = torch.float32 if DRY else torch.bfloat16
SETTING = checks.Setting(
    DEVICE,
    DTYPE,
    num_heads=1 if DRY else 16,
    key_dim=32 if DRY else 128,
    value_dim=32 if DRY else 128,
    chunk_size=32 if DRY else 64,
    exact_backend="recurrent" if DRY else "reference",
)
C, H, K, V = SETTING.chunk_size, SETTING.num_heads, SETTING.key_dim, SETTING.value_dim
REPEATS = 5
PROTOTYPE = os.environ.get("KDA_PROTOTYPE")


def swe_tree(rows: int, *, prompt: int = 4096, step: tuple[int, int] = (300, 2500)) -> checks.Segments:
    """Rollout tree the KDA figures refer to: a long prompt, a trunk of steps, side branches of one to three steps.

    ``rows = 75000`` gives 75,328 compact rows, 49 segments, 315,264 rows expanded.
    """
    draw = random.Random(1)
    segments, trunk, total = [(-1, prompt)], 0, prompt
    while total < rows:
        if draw.random() < 0.5:
            for _ in range(draw.randint(2, 4) - 1):
                parent = trunk
                for _ in range(draw.randint(1, 3)):
                    length = draw.randint(*step)
                    segments.append((parent, length))
                    parent = len(segments) - 1
                    total += length
        length = draw.randint(*step)
        segments.append((trunk, length))
        trunk = len(segments) - 1
        total += length
    return segments


@functools.cache
def tree() -> tuple[checks.Segments, CallLayout]:
    segments = swe_tree(90, prompt=37, step=(5, 30)) if DRY else swe_tree(75_000)
    return segments, checks.layout_of(segments, C)


def own(*x: Tensor, packed: PackedSequences) -> Tensor:
    return kda_triton(*x, packed)[0]


@contextmanager
def scans_in_line() -> Iterator[None]:
    """Kernels one after another, so that each can be timed alone."""
    before, launches.OVERLAP = launches.OVERLAP, False
    try:
        yield
    finally:
        launches.OVERLAP = before


def fla(*x: Tensor, cu: Tensor, state: Tensor | None = None, final: bool = False) -> tuple[Tensor, Tensor]:
    q, k, v, f, b, A_log, dt_bias = x
    o, last = chunk_kda(
        *(t[None] for t in (q, k, v)),
        g=f[None],
        beta=b[None],
        A_log=A_log,
        dt_bias=dt_bias.reshape(-1),
        initial_state=state,
        output_final_state=final,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        safe_gate=True,
        lower_bound=SETTING.lower_bound,
        cu_seqlens=cu,
        chunk_size=C,
    )
    return o[0], last


# ---- numerics


def numerics() -> Report:
    """Every output and gradient against float64; none may exceed fla's error by more than a tenth."""
    report: Report = {}
    cases: list[tuple[str, PackedSequences, str, list[np.ndarray] | None]] = []
    for decay in ("slow",) if DRY else checks.DECAYS:
        cases.append((f"handed_in_{decay}", checks.handed_in(C, DEVICE), decay, None))
        if DRY:
            break
        layout = checks.layout_of(checks.random_segments(np.random.default_rng(7), C, 9), C)
        cases.append((f"tree_{decay}", packed_sequences(layout, DEVICE), decay, checks.trajectories_of(layout)))
        cases.append((f"long_{decay}", kda_checks.sequences_of([2000, 900], SETTING), decay, None))
    cases.append(
        ("every_length", kda_checks.sequences_of([1, 2] if DRY else list(range(1, 131)), SETTING), "slow", None)
    )
    for name, sequences, decay, trajectories in cases:
        with checks.filled_allocations():
            result = checks.check_kda(sequences, SETTING, decay=decay, trajectories=trajectories)
        report[name] = result
        print(f"{name:<24} {errors_of(result)}", flush=True)
    report["prefix"] = checks.check_kda_prefix(SETTING, length=C + 5 if DRY else 3 * C + 5, cuts=[1, C - 1, C + 1])
    report["over_fla"] = ratios = over_fla([report[name] for name, *_ in cases])
    print({name: round(ratio, 3) for name, ratio in ratios.items()}, flush=True)
    # float32 on a CPU is another arithmetic than fla's.
    assert DRY or max(ratios.values()) <= MAX_OVER_FLA, ratios
    return report


MAX_OVER_FLA = 1.1


def over_fla(results: list[Report]) -> dict[str, float]:
    """Largest error over fla's of every tensor.

    Gradients of the parameters are few numbers, each a sum over all rows whose rounding errors mostly cancel: the ratio
    of two such remainders is chance in one case, so theirs is taken over all cases together.
    """
    ratios: dict[str, float] = {}
    for name in ("o", "exported", *checks.KDA_INPUTS):
        errors = np.array([result[name] for result in results if name in result])
        if not errors.size:
            continue
        if name in ("A_log", "dt_bias"):
            errors = np.sqrt(np.square(errors).sum(0, keepdims=True))
        ratios[name] = float((errors[:, 0] / errors[:, 1]).max())
    return ratios


def errors_of(result: Report) -> str:
    return ", ".join(f"{k} {v[0]:.2e}/{v[1]:.2e}" for k, v in result.items() if isinstance(v, list))


def precision() -> Report:
    """Errors with other precisions of the pair products and of the triangular inverse."""
    report: Report = {}
    sequences = kda_checks.sequences_of([40, 20] if DRY else [2000, 900], SETTING)
    for wide, solve in ((False, "tf32"), (True, "tf32"), (False, "tf32x3"), (True, "tf32x3")):
        for decay in ("slow",) if DRY else ("slow", "medium"):
            with configured(
                chunk_forward=replaced("chunk_forward", constants={"WIDE": wide, "SOLVE": solve, "BC": 32}),
                chunk_backward_keys=replaced("chunk_backward_keys", constants={"WIDE": wide, "PARTS": 2, "BC": 32}),
            ):
                result = checks.check_kda(sequences, SETTING, decay=decay)
            key = f"wide={wide} solve={solve} {decay}"
            report[key] = result
            print(key, errors_of(result), flush=True)
        if DRY:
            break
    return report


def replaced(kernel: str, **changes: object) -> Config:
    return HOPPER[kernel]._replace(**changes)


@contextmanager
def configured(**configs: Config) -> Iterator[None]:
    """Run with other configurations of some kernels."""
    before = dict(HOPPER)
    HOPPER.update(configs)
    try:
        yield
    finally:
        HOPPER.update(before)


def limits() -> Report:
    """5,000 one-token sequences against the closed form; more than 2**31 elements in every row tensor; repeats."""
    errors = kda_checks.check_one_token_sequences(3 if DRY else 5000, SETTING)
    kda_checks.check_repeat(packed_sequences(tree()[1], DEVICE), SETTING, "strong")
    long, tail = (40, 35) if DRY else (2**31 // (H * K) + 327, 300)
    return {"one_token_sequences": errors, "past_int32": kda_checks.check_tail(long, tail, SETTING)}


# ---- timing


def timing() -> Report:
    """The tree of the prototype: bits first, then every way to run it, forward and forward with backward."""
    segments, compact = tree()
    sequences = packed_sequences(compact, DEVICE)
    x = [t.detach() for t in checks.kda_inputs(compact.num_rows, SETTING, "slow", seed=0)[:7]]
    paths = checks.trajectories_of(compact)
    rows = torch.from_numpy(np.concatenate(paths)).to(DEVICE)
    expanded = kda_checks.sequences_of([p.size for p in paths], SETTING)
    cu = expanded.cu_seqlens_Q1
    report: Report = {
        "rows": compact.num_rows,
        "packed_rows": sequences.num_packed_rows,
        "chunks": sequences.num_chunks,
        "expanded_rows": rows.numel(),
        "segments": len(segments),
        "rounds": compact.num_rounds,
        "token_ratio": rows.numel() / compact.num_rows,
    }
    print(report, flush=True)
    for packed in (sequences, expanded):
        prepare_tables(packed)
    wide = [*(t[rows] for t in x[:5]), *x[5:]]
    with torch.no_grad():
        o, alone = own(*x, packed=sequences), own(*wide, packed=expanded)
        report["bit_equal_to_expanded"] = torch.equal(o[rows], alone)
        assert report["bit_equal_to_expanded"], "compact and expanded outputs differ"
    do = torch.randn_like(o)
    first, second = (kda_checks.with_gradients(x, do, sequences) for _ in range(2))
    report["repeat"] = all(torch.equal(a, b) for a, b in zip(first, second))
    assert report["repeat"], "two runs differ"
    del first, second, o, alone
    per_node, per_depth = restarting_checked(segments, x, do, report)

    gathered = torch.randn_like(wide[2])
    runs: dict[str, tuple[Callable[..., Tensor], list[Tensor], Tensor]] = {
        "own compact": (functools.partial(own, packed=sequences), x, do),
        "own compact, one stream": (functools.partial(own, packed=sequences), x, do),
        "own expanded": (functools.partial(own, packed=expanded), wide, gathered),
        "fla expanded": (lambda *y: fla(*y, cu=cu)[0], wide, gathered),
        # As the prototype timed it: the rows are gathered inside.
        "fla expanded, gathered": (lambda *y: fla(*(t[rows] for t in y[:5]), *y[5:], cu=cu)[0], x, gathered),
        "own depth-wise": (functools.partial(own, packed=per_depth), x, do),
        "own node-wise": (functools.partial(own, packed=per_node), x, do),
        # The same calls of fla's kernels.
        "depth-wise": (depthwise(segments), x, do),
        "node-wise": (nodewise(segments), x, do),
    }
    if PROTOTYPE and not DRY:
        runs = {"prototype": (prototype(segments, PROTOTYPE), x, do), **runs}
    for name, (run, inputs, dout) in runs.items():
        with scans_in_line() if "one stream" in name else nullcontext():
            report[name] = timed_pair(name, run, inputs, dout, 3 if "node-wise" in name else REPEATS)
    report["over own compact"] = ratios = {
        name: {part: report[name][part]["median"] / report["own compact"][part]["median"] for part in TIMED}
        for name in runs
    }
    for name, ratio in ratios.items():
        print(f"{name:<28} / own compact: " + ", ".join(f"{part} {value:.2f}" for part, value in ratio.items()))
    return report


TIMED = ("forward", "forward_backward")


def timed_pair(
    name: str, run: Callable[..., Tensor], inputs: list[Tensor], do: Tensor, repeats: int = REPEATS
) -> Report:
    with torch.no_grad():
        report: Report = {"forward": median_ms(lambda: run(*inputs), repeats=repeats, flush=False)}
    leaves = [t.detach().requires_grad_() for t in inputs]
    if not DRY:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()

    def both() -> None:
        torch.autograd.grad(run(*leaves), leaves, do)

    report["forward_backward"] = median_ms(both, repeats=repeats, flush=False)
    if not DRY:
        report["peak_gib"] = (torch.cuda.max_memory_allocated() - before) / 2**30
    line(f"{name}: forward", report["forward"], host_ms=round(report["forward"]["host"], 2))
    labels = {
        "host_ms": round(report["forward_backward"]["host"], 2),
        "peak_gib": round(report.get("peak_gib", 0.0), 2),
    }
    line(f"{name}: forward + backward", report["forward_backward"], **labels)
    return report


def depths_of(segments: checks.Segments) -> list[int]:
    depth: list[int] = []
    for parent, _ in segments:
        depth.append(depth[parent] + 1 if parent >= 0 else 0)
    return depth


def restarting(segments: checks.Segments, round_of_node: list[int], *, separate_calls: bool = True) -> PackedSequences:
    """The own kernels on one sequence a node, from its parent's final state; rows lie in the order of the sequences."""
    order = np.argsort(round_of_node, kind="stable")
    rank = np.argsort(order)
    lengths = np.array([segments[n][1] for n in order])
    above = np.array([rank[segments[n][0]] if segments[n][0] >= 0 else -1 for n in order])
    makers, export = np.unique(above[above >= 0], return_inverse=True)
    init = np.full(len(segments), -1)
    init[above >= 0] = export
    rows = np.arange(lengths.sum())
    return PackedSequences.build(
        chunk_size=C,
        cu_seqlens=np.cumsum([0, *lengths]),
        packed_row=rows,
        kept=rows,
        init_state=init,
        export_sequence=makers,
        export_boundary=-(-lengths[makers] // C),
        round_ptr=np.cumsum([0, *np.bincount(round_of_node)]),
        num_path_rows=rows.size,
        separate_calls=separate_calls,
        device=DEVICE,
    )


def restarting_checked(
    segments: checks.Segments, x: list[Tensor], do: Tensor, report: Report
) -> tuple[PackedSequences, PackedSequences]:
    """The own kernels in one call a node and one a depth, once their results are known to be right."""
    per_node, per_depth = (restarting(segments, r) for r in (list(range(len(segments))), depths_of(segments)))
    together = restarting(segments, list(range(len(segments))), separate_calls=False)
    apart, at_once = (kda_checks.with_gradients(x, do, packed) for packed in (per_node, together))
    report["separate_calls_bit_equal"] = all(torch.equal(a, b) for a, b in zip(apart, at_once))
    assert report["separate_calls_bit_equal"], "one call a node and kernels over all nodes differ"
    o = apart[0]
    del apart, at_once
    starts = np.cumsum([0, *(length for _, length in segments)])
    nodes = np.argsort(depths_of(segments), kind="stable")
    rows = torch.from_numpy(np.concatenate([np.arange(starts[n], starts[n + 1]) for n in nodes])).to(DEVICE)
    with torch.no_grad():
        report["depth-wise_bit_equal_to_node-wise"] = torch.equal(
            own(*(t[rows] for t in x[:5]), *x[5:], packed=per_depth), o[rows]
        )
        report["node-wise_over_fla"] = checks.relative(o, nodewise(segments)(*x))
    assert report["depth-wise_bit_equal_to_node-wise"], "one call a depth and one call a node differ"
    # Rounding in bfloat16 is some 0.01; a wrong state or a wrong row is nearer 1.
    assert report["node-wise_over_fla"] < 0.05, report["node-wise_over_fla"]
    return per_node, per_depth


def nodewise(segments: checks.Segments) -> Callable[..., Tensor]:
    """One fla call per node from its parent's final state, no replay."""
    starts = np.cumsum([0, *(length for _, length in segments)]).tolist()
    cus = [torch.tensor([0, length], device=DEVICE) for _, length in segments]

    def run(*x: Tensor) -> Tensor:
        states: list[Tensor] = []
        out = []
        for node, (parent, _) in enumerate(segments):
            part = [t[starts[node] : starts[node + 1]] for t in x[:5]]
            o, last = fla(*part, *x[5:], cu=cus[node], state=states[parent] if parent >= 0 else None, final=True)
            states.append(last)
            out.append(o)
        return torch.cat(out)

    return run


def depthwise(segments: checks.Segments) -> Callable[..., Tensor]:
    """One packed fla call per depth from the parents' final states, no replay."""
    starts = np.cumsum([0, *(length for _, length in segments)])
    depth = depths_of(segments)
    levels = []
    for d in range(max(depth) + 1):
        nodes = [n for n, at in enumerate(depth) if at == d]
        rows = torch.from_numpy(np.concatenate([np.arange(starts[n], starts[n + 1]) for n in nodes])).to(DEVICE)
        cu = torch.tensor(np.cumsum([0, *(segments[n][1] for n in nodes)]), device=DEVICE)
        above = [n for n, at in enumerate(depth) if at == d - 1]
        levels.append((rows, cu, [above.index(segments[n][0]) for n in nodes] if d else None))
    order = torch.cat([rows for rows, _, _ in levels])
    back = torch.empty_like(order)
    back[order] = torch.arange(order.numel(), device=DEVICE)

    def run(*x: Tensor) -> Tensor:
        state, out = None, []
        for rows, cu, parents in levels:
            start = None if parents is None else state[parents]
            o, state = fla(*(t[rows] for t in x[:5]), *x[5:], cu=cu, state=start, final=True)
            out.append(o)
        return torch.cat(out)[back]

    return run


def prototype(segments: checks.Segments, folder: str) -> Callable[..., Tensor]:
    """The phase-split run of the prototype, gather and selection of rows included."""
    sys.path.insert(0, folder)
    import kda_export_triton
    from tree_plan import TreePlan

    plan = TreePlan(segments, C)
    lengths, init, exports, rounds, gather, keep = plan.packed()
    gather, keep = gather.to(DEVICE), keep.to(DEVICE)
    tables = kda_export_triton.Plan(lengths, init, exports, rounds, 0, C, DEVICE)
    none = torch.empty(0, H, K, V, device=DEVICE)

    def run(*x: Tensor) -> Tensor:
        packed = [t[None, gather] for t in x[:5]]
        o, _ = kda_export_triton.kda_export(*packed, x[5], x[6].reshape(-1), none, tables, SETTING.lower_bound)
        return o[0, keep]

    return run


# ---- kernels

# Bytes per slot and head at two bytes an element: tiles read and written once.
TRAFFIC = {
    "chunk_gates": (3 * K + 2 * K) * 2 + 4 * K,
    "chunk_forward": (2 * K + V + K + V) * 2 + 4 * K + 4 * C,
    "state_scan_forward": (2 * K + 2 * V) * 2 + 2 * K * V // C,
    "chunk_output": (K + 2 * V + C) * 2 + 2 * K * V // C,
    "chunk_output_gradient": (3 * V + C) * 2,
    "state_scan_backward": (3 * K + 3 * V) * 2 + 2 * K * V // C,
    "chunk_backward_values": (5 * V + K + 5 * C) * 2 + 4 * K + 2 * K * V // C,
    "chunk_backward_keys": (3 * V + 4 * K + 5 * C) * 2 + 12 * K + 4 * K * V // C,
    "chunk_backward_norms": (4 * K) * 2 + 8 * K,
}


def compact_case() -> tuple[PackedSequences, list[Tensor], Tensor]:
    _, compact = tree()
    x = [t.detach().requires_grad_() for t in checks.kda_inputs(compact.num_rows, SETTING, "slow", seed=0)[:7]]
    sequences = packed_sequences(compact, DEVICE)
    prepare_tables(sequences)
    return sequences, x, torch.randn_like(x[2])


@scans_in_line()
def breakdown() -> Report:
    """Device time of every kernel of one forward and backward pass, by torch.profiler."""
    sequences, x, do = compact_case()
    bandwidth = copy_bandwidth()

    def both() -> None:
        torch.autograd.grad(own(*x, packed=sequences), x, do)

    both()
    if DRY:
        return {}
    both()
    from torch.profiler import ProfilerActivity, profile

    runs = 3
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(runs):
            both()
        torch.cuda.synchronize()
    times, counts = Counter(), Counter()
    for event in recorded.key_averages():
        times[event.key] += event.device_time_total / 1e3 / runs
        counts[event.key] += event.count // runs
    report: Report = {"copy_gb_per_s": bandwidth / 1e9, "total_ms": sum(times.values())}
    slots = sequences.num_chunks * C * H
    for name, ms in times.most_common(24):
        entry: Report = {"median": ms}
        if name in TRAFFIC:
            entry = rate(entry, num_bytes=TRAFFIC[name] * slots, bandwidth=bandwidth)
        report[name] = entry
        line(name[:60], entry, launches=counts[name])
    line("all", {"median": report["total_ms"]})
    return report


SWEEP: dict[str, list[Config]] = {
    "chunk_gates": [Config({"BK": bk}, w, 1, {"WIDE": False}) for bk, w in ((32, 4), (64, 8), (128, 8))],
    "chunk_forward": [
        Config({"BK": 32, "BV": bv, "BW": bw}, 4, s, {"WIDE": wide, "SOLVE": solve, "BC": 32})
        for bv, bw, s, wide, solve in (
            (64, 32, 2, False, "tf32"),
            (128, 128, 2, False, "tf32"),
            (128, 64, 3, True, "tf32"),
            (128, 64, 3, False, "tf32x3"),
        )
    ],
    "state_scan_forward": [
        Config({"BV": bv}, w, s) for bv, w, s in ((16, 4, 3), (16, 4, 4), (64, 4, 3), (32, 8, 3), (32, 4, 2))
    ],
    "chunk_output": [
        Config({"BK": bk, "BV": bv}, w, s)
        for bk, bv, w, s in ((128, 128, 8, 1), (64, 64, 4, 1), (32, 128, 4, 1), (128, 64, 4, 1))
    ],
    "chunk_output_gradient": [Config({"BV": bv}, w, 1) for bv, w in ((64, 4), (128, 8), (32, 4))],
    "state_scan_backward": [
        Config({"BV": bv}, w, s) for bv, w, s in ((16, 4, 3), (16, 4, 4), (64, 4, 2), (32, 8, 3), (32, 4, 2))
    ],
    "chunk_backward_values": [
        *(Config({"BK": bk}, w, s) for bk, w, s in ((32, 4, 2), (64, 8, 1), (64, 4, 1))),
        Config({"BK": 64}, 4, 2, {"maxnreg": 168}),
    ],
    "chunk_backward_keys": [
        Config({"BK": 32, "BV": bv}, 4, s, {"WIDE": False, "PARTS": parts, "BC": 32})
        for bv, s, parts in ((64, 2, 2), (32, 3, 2), (128, 1, 2), (64, 3, 1))
    ],
    "chunk_backward_norms": [Config({}, w, 1, {"BS": bs}) for bs, w in ((32, 4), (64, 8), (16, 2), (8, 2))],
}


class _Timed:
    """Stands for a kernel in ``launches``: events around every launch."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.events, self.compiled = kernel, [], None

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: object, **options: object) -> None:
            pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            pair[0].record()
            self.compiled = self.kernel[grid](*args, **options)
            pair[1].record()
            self.events.append(pair)

        return launch

    def take(self) -> float:
        torch.cuda.synchronize()
        total = sum(a.elapsed_time(b) for a, b in self.events)
        self.events = []
        return total


def run_small() -> None:
    """Every kernel once: a tree with two rounds, an export and replay rows."""
    sequences = checks.handed_in(C, DEVICE)
    inputs = checks.kda_inputs(sequences.num_path_rows, SETTING, "slow", seed=0, num_external=1)
    x = [t.detach().requires_grad_() for t in inputs]
    o, exported = kda_triton(*x[:7], sequences, SETTING.lower_bound, x[7])
    torch.autograd.grad(o.float().sum() + exported.sum(), x)


def compile_worker(index: int, count: int) -> None:
    """Fill Triton's cache with every ``count``-th alternative of the sweep."""
    todo = [(name, config) for name, configs in SWEEP.items() for config in configs]
    for name, config in todo[index::count]:
        try:
            with configured(**{name: config}):
                run_small()
                torch.cuda.synchronize()
        except Exception as error:
            print(name, config, repr(error)[:200], flush=True)


def start_workers() -> list[subprocess.Popen]:
    workers = min(16, os.cpu_count() or 1)
    return [
        subprocess.Popen([sys.executable, __file__, "--compile-worker", str(i), str(workers)], cwd=ROOT)
        for i in range(workers)
    ]


@scans_in_line()
def sweep() -> Report:
    """Every alternative of every kernel on the tree, with the deviation of results from the pinned configuration's."""
    if DRY:
        name = "chunk_backward_norms"
        with configured(**{name: SWEEP[name][0]._replace(constants={"BS": 8})}):
            run_small()
        return {}
    run_small()
    for worker in start_workers():
        worker.wait()
    sequences, x, do = compact_case()
    bandwidth, slots = copy_bandwidth(), sequences.num_chunks * C * H
    keep = slice(None, None, 37)

    def both() -> list[Tensor]:
        o = own(*x, packed=sequences)
        return [t.detach()[keep].clone() for t in (o, *torch.autograd.grad(o, x, do)[:5])]

    base = both()
    report: Report = {}
    for name, alternatives in SWEEP.items():
        report[name] = []
        for config in (HOPPER[name], *alternatives):
            timed = _Timed(getattr(launches, name))
            setattr(launches, name, timed)
            try:
                with configured(**{name: config}):
                    results = both()
                    timed.take()
                    both_times = []
                    for _ in range(3):
                        both()
                        both_times.append(timed.take())
                entry = rate({"median": sorted(both_times)[1]}, num_bytes=TRAFFIC[name] * slots, bandwidth=bandwidth)
                entry |= {"config": str(config), "deviation": max(checks.relative(a, b) for a, b in zip(results, base))}
                line(name, entry, config=tuple(config), deviation=f"{entry['deviation']:.1e}")
            except Exception as error:
                entry = {"config": str(config), "error": repr(error)[:500]}
                print(name, entry, flush=True)
            finally:
                setattr(launches, name, timed.kernel)
            report[name].append(entry)
    return report


SECTIONS = {
    "numerics": numerics,
    "timing": timing,
    "breakdown": breakdown,
    "precision": precision,
    "limits": limits,
    "sweep": sweep,
}

if __name__ == "__main__":
    if "--compile-worker" in sys.argv:
        compile_worker(*map(int, sys.argv[sys.argv.index("--compile-worker") + 1 :][:2]))
    else:
        default = SECTIONS if DRY else ("numerics", "timing", "breakdown")
        sys.exit(run_sections("gpu_kda", SECTIONS, doc=__doc__, settings={"kda": str(SETTING)}, default=tuple(default)))
