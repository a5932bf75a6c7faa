"""Check and time the CUDA backends of ``harts_titan.ops`` in one run; writes ``gpu_ops.json`` to a folder.

    python benchmarks/gpu_ops.py OUT                      # one Hopper GPU, a few minutes with kernel compilation
    python benchmarks/gpu_ops.py OUT --sections short_conv,compiled
    TRITON_INTERPRET=1 python benchmarks/gpu_ops.py OUT --dry-run        # every line that needs no GPU, tiny sizes

A section that fails is recorded with its traceback, the others still run, and the exit code is 1. Nothing is timed in
a section whose checks failed. Needs the repository's ``tests`` folder (the checks are shared with the tests).
"""

from __future__ import annotations

import functools
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch._dynamo.testing
from gpu_timing import DEVICE, DRY, Report, run_sections
from torch import Tensor

if DRY:
    import tests.numerics.triton_interpreter  # noqa: F401
from harts_titan.models.common.tree_inputs import packed_sequences, tree_mask
from harts_titan.ops.attention import TreeMask, tree_attention
from harts_titan.ops.attention.flex import tree_attention_flex
from harts_titan.ops.attention.reference import tree_attention_path
from harts_titan.ops.kda import PackedSequences
from harts_titan.ops.kda.configs import HOPPER
from harts_titan.ops.kda.triton_op import kda_triton, prepare_tables
from harts_titan.ops.short_conv.taps import chain_tables
from harts_titan.ops.short_conv.triton_op import tree_short_conv_triton
from harts_titan.tree.plan import CallLayout
from tests.numerics import kernel_checks as checks

if TYPE_CHECKING:
    from harts_titan.ops.attention.fa4 import FA4Tables

DTYPE = torch.float32 if DRY else torch.bfloat16
SETTING = checks.Setting(
    DEVICE,
    DTYPE,
    num_heads=1 if DRY else 16,
    key_dim=64 if DRY else 128,
    value_dim=64 if DRY else 128,
    chunk_size=32 if DRY else 64,
    exact_backend="recurrent" if DRY else "reference",
)
C = SETTING.chunk_size
BIG_ROWS = 90 if DRY else 65_000
PROMPT, STEP = (41, 30) if DRY else (4096, 2500)
REPEATS = 1 if DRY else 5


def median_ms(run: Callable[[], object], repeats: int = REPEATS) -> Report:
    """Median and spread of ``repeats`` timed runs after one or two warm-up runs, milliseconds."""
    if DRY:
        begin = time.perf_counter()
        run()
        return {"median": (time.perf_counter() - begin) * 1e3, "runs": 1}
    run()
    run()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    torch.cuda.synchronize()
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
    return {"median": statistics.median(times), "min": min(times), "max": max(times), "runs": repeats}


def timed_pair(run: Callable[..., Tensor], inputs: list[Tensor], do: Tensor) -> Report:
    """Forward without gradients, forward with backward, and the memory of the latter beyond what is allocated."""
    with torch.no_grad():
        forward = median_ms(lambda: run(*inputs))

    def both() -> None:
        torch.autograd.grad(run(*inputs), inputs, do)

    report: Report = {"forward": forward}
    if not DRY:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    report["forward_backward"] = median_ms(both, max(1, REPEATS - 2))
    if not DRY:
        report["peak_gib"] = (torch.cuda.max_memory_allocated() - before) / 2**30
    return report


@functools.cache
def big_tree() -> tuple[checks.Segments, dict[str, CallLayout]]:
    segments = checks.agent_segments(np.random.default_rng(1), BIG_ROWS, prompt=PROMPT, step=STEP)
    return segments, {mode: checks.layout_of(segments, C, mode) for mode in ("compact", "nodewise", "expanded")}


def describe(layouts: dict[str, CallLayout]) -> Report:
    compact = layouts["compact"]
    lengths = compact.position_offset_N1.diff().double()
    rows, positions = compact.num_rows, compact.num_positions
    depth = compact.position_T.double() + 1
    return {
        "rows": rows,
        "positions": positions,
        "compression": positions / rows,
        "segments": compact.num_segments,
        "trajectories": compact.num_trajectories,
        "rounds": compact.num_rounds,
        "sequences": compact.num_sequences,
        "exports": compact.export_sequence_E.shape[0],
        "replay_rows": compact.packed_row_P.shape[0] - rows,
        "pairs_compact": float(depth.sum()),
        "pairs_expanded": float((lengths * (lengths + 1) / 2).sum()),
    }


# ---- KDA


def compiled() -> Report:
    """Convolution, KDA and attention in one ``torch.compile`` graph, two plans: same values, one graph."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager" if DRY else "inductor")
    graphs: list[int] = []

    def layer(x: list[Tensor], tap: Tensor, weight: Tensor, sequences: PackedSequences, mask: TreeMask) -> Tensor:
        q, k, v = (tree_short_conv_triton(t.flatten(1), weight, tap).view_as(t) for t in x[:3])
        o, _ = kda_triton(q * 1.5, k, v, *x[3:], sequences)
        if DRY:
            return o * 0.5
        # Width 192, which the other sections have compiled.
        q, k = (torch.cat([t, t[..., :64]], dim=-1) for t in (q, k))
        return o * 0.5 + fa4()(q, k, o, mask, SCALE)

    fast = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    # At least two exports each: torch.compile makes graphs of their own for sizes 0 and 1.
    forests = (
        [(-1, 434), (0, 331), (0, 332), (1, 332), (1, 64), (3, 33), (3, 35)],
        [(-1, 640), (0, 233), (0, 127), (1, 105), (1, 92), (2, 88), (2, 63), (3, 9), (3, 4)],
    )
    for segments in forests:
        layout = checks.layout_of([(p, -(-n // 10)) for p, n in segments] if DRY else segments, C)
        sequences, mask = packed_sequences(layout, DEVICE), tree_mask(layout, DEVICE)
        prepare_tables(sequences)
        if not DRY:
            prepare_attention_tables(mask, ATTENTION.key_dim)
        x = checks.kda_inputs(layout.num_rows, SETTING, "medium", seed=1)[:7]
        weight = torch.randn(SETTING.num_heads * SETTING.key_dim, 4, device=DEVICE, requires_grad=True)
        args = (x, layout.conv_tap_TW.to(DEVICE), weight, sequences, mask)
        results = []
        for function in (layer, fast):
            o = function(*args)
            # Backward passes take minutes in the interpreter; the interpreter tests have smaller ones.
            grads = () if DRY else torch.autograd.grad(o.float().square().sum(), [*x, weight])
            results.append([o, *grads])
        graphs.append(counter.frame_count)
        errors = [checks.relative(a, b) for a, b in zip(*results)]
        # Inductor fuses the element-wise steps around the ops, without their roundings.
        assert max(errors) < 4 * torch.finfo(DTYPE).eps, errors
    assert graphs[0] == graphs[-1], graphs
    return {"graphs": graphs, "errors": errors}


def ratios(slow: Report, fast: Report) -> Report:
    return {part: slow[part]["median"] / fast[part]["median"] for part in ("forward", "forward_backward")}


# ---- short convolution


def short_conv() -> Report:
    report: Report = {}
    channels = 20 if DRY else 2048
    for seed in range(1 if DRY else 3):
        segments = checks.random_segments(np.random.default_rng(seed), C, 4 if DRY else 12)
        report[f"random_{seed}"] = checks.check_conv(segments, SETTING, channels=channels)
    _, layouts = big_tree()
    for mode in ("compact", "expanded"):
        tap = layouts[mode].conv_tap_TW.to(DEVICE)
        x = torch.randn(tap.shape[0], channels, device=DEVICE, dtype=DTYPE, requires_grad=True)
        weight = torch.randn(channels, tap.shape[1], device=DEVICE, requires_grad=True)
        tables = chain_tables(tap, tap.shape[0])
        report[mode] = timed_pair(
            lambda x, w, tap=tap, tables=tables: tree_short_conv_triton(x, w, tap, tables),
            [x, weight],
            torch.randn_like(x),
        )
    report["expanded_over_compact"] = ratios(report["expanded"], report["compact"])
    return report


# ---- attention

ATTENTION = checks.Setting(
    DEVICE,
    DTYPE,
    num_heads=2 if DRY else 16,
    key_dim=32 if DRY else 192,
    value_dim=32 if DRY else 128,
    chunk_size=C,
)
SCALE = ATTENTION.key_dim**-0.5


def attention_numerics() -> Report:
    """Every backend against dense float64, own rows only and below external rows, both row orders."""
    report: Report = {}
    layout = checks.layout_of(checks.random_segments(np.random.default_rng(4), C, 5 if DRY else 14), C)
    masks = {
        "sequence": tree_mask(layout, DEVICE),
        "depth_first": checks.mask_depth_first(layout, DEVICE)[0],
        "attached": checks.mask_attached(layout, DEVICE),
    }
    report["rows"] = layout.num_rows
    for name, mask in masks.items():
        report[f"path_{name}"] = checks.check_attention(mask, ATTENTION, tree_attention_path)
        if not DRY:
            report[f"fa4_{name}"] = checks.check_attention(mask, ATTENTION, fa4())
    # One mask only: another one compiles flex_attention again, which takes most of a minute.
    report["flex_sequence"] = checks.check_attention(
        masks["sequence"], ATTENTION, tree_attention_flex, gradients=not DRY
    )
    return report


def fa4() -> Callable[..., Tensor]:
    # flash-attn-4 exists for GPUs only.
    from harts_titan.ops.attention.fa4 import tree_attention_fa4

    return tree_attention_fa4


def prepare_attention_tables(mask: TreeMask, head_dim: int) -> FA4Tables:
    from harts_titan.ops.attention.fa4 import prepare_tables as prepare

    return prepare(mask, head_dim)


def attention_timing() -> Report:
    """fa4 in both row orders, flex, and fa4 varlen over the expanded trajectories; TFLOP/s over visible pairs."""
    _, layouts = big_tree()
    compact = layouts["compact"]
    tree = describe(layouts)
    report: Report = {"tree": tree}
    mask = tree_mask(compact, DEVICE)
    ordered, order = checks.mask_depth_first(compact, DEVICE)
    x = checks.attention_inputs(mask, ATTENTION)
    do = torch.randn(mask.num_rows, ATTENTION.num_heads, ATTENTION.value_dim, device=DEVICE, dtype=DTYPE)
    if DRY:
        report["path"] = timed_pair(lambda *x: tree_attention(*x, mask, scale=SCALE, backend="path"), x, do)
        return report
    rank = torch.empty_like(order)
    rank[order] = torch.arange(order.numel(), device=DEVICE)
    attention = fa4()

    def permuted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q[order], k[order], v[order], ordered, SCALE)[rank]

    def tables(mask: TreeMask) -> Report:
        begin = time.perf_counter()
        built = prepare_attention_tables(mask, ATTENTION.key_dim)
        seconds = time.perf_counter() - begin
        forward, _ = built.views(mask)
        partial, full = int(forward[0].sum()), int(forward[2].sum())
        waste = (partial + full) * 128 * 128 / tree["pairs_compact"] - 1
        return {"partial": partial, "full": full, "tile_waste": waste, "seconds": seconds}

    report["tables"] = {"sequence": tables(mask), "depth_first": tables(ordered)}
    sorted_x = [t.detach()[order].requires_grad_() for t in x]
    runs: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {
        "fa4_sequence": (lambda *x: attention(*x, mask, SCALE), x),
        "fa4_depth_first": (lambda *x: attention(*x, ordered, SCALE), sorted_x),
        "fa4_permuted": (permuted, x),
        "flex": (lambda *x: tree_attention_flex(*x, mask, SCALE), x),
    }
    with torch.no_grad():
        first = runs["fa4_sequence"][0](*x)
        report["fa4_repeat"] = torch.equal(first, runs["fa4_sequence"][0](*x))
        report["depth_first_against_sequence"] = checks.relative(permuted(*x), first)
        report["flex_against_fa4"] = checks.relative(runs["flex"][0](*x), first)
    for name, (run, inputs) in runs.items():
        report[name] = with_rate(timed_pair(run, inputs, do), tree["pairs_compact"])
    del x, sorted_x, do
    torch.cuda.empty_cache()
    report["fa4_expanded"] = with_rate(expanded_attention(compact), tree["pairs_expanded"])
    for name in ("flex", "fa4_depth_first", "fa4_permuted", "fa4_expanded"):
        report[f"{name}_over_fa4_sequence"] = ratios(report[name], report["fa4_sequence"])
    return report


def expanded_attention(compact: CallLayout) -> Report:
    from flash_attn.cute.interface import flash_attn_varlen_func

    lengths = compact.position_offset_N1.diff().tolist()
    cu = compact.position_offset_N1.to(DEVICE, torch.int32)
    shapes = [
        (sum(lengths), ATTENTION.num_heads, d) for d in (ATTENTION.key_dim, ATTENTION.key_dim, ATTENTION.value_dim)
    ]
    x = [torch.randn(s, device=DEVICE, dtype=DTYPE, requires_grad=True) for s in shapes]

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q=cu,
            cu_seqlens_k=cu,
            max_seqlen_q=max(lengths),
            max_seqlen_k=max(lengths),
            softmax_scale=SCALE,
            causal=True,
        )
        return out[0] if isinstance(out, tuple) else out

    return timed_pair(run, x, torch.randn_like(x[2]))


def with_rate(report: Report, pairs: float) -> Report:
    """Add TFLOP/s over visible pairs; backward counted as 2.5 forwards."""
    flops = 2 * pairs * ATTENTION.num_heads * (ATTENTION.key_dim + ATTENTION.value_dim)
    report["forward_tflops"] = flops / report["forward"]["median"] / 1e9
    report["forward_backward_tflops"] = 3.5 * flops / report["forward_backward"]["median"] / 1e9
    return report


SECTIONS: dict[str, Callable[[], Report]] = {
    "short_conv": short_conv,
    "attention_numerics": attention_numerics,
    "attention_timing": attention_timing,
    "compiled": compiled,
}


def main() -> int:
    settings = {"kda": str(SETTING), "attention": str(ATTENTION), "big_rows": BIG_ROWS, "repeats": REPEATS}
    pinned = {name: str(config) for name, config in HOPPER.items()}
    return run_sections(
        "gpu_ops",
        SECTIONS,
        doc=__doc__,
        settings={**settings, "pinned": pinned},
        packages=("torch", "triton", "fla-core", "flash-attn-4", "nvidia-cutlass-dsl"),
    )


if __name__ == "__main__":
    sys.exit(main())
