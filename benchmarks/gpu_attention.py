"""Check and time ancestor attention on five trees; writes ``gpu_attention.json`` to a folder.

    python benchmarks/gpu_attention.py OUT                        # one Hopper GPU, about 100 s
    python benchmarks/gpu_attention.py OUT --sections numerics,edges,lists,trees,variants,index_list,sweep,flex
    TRITON_INTERPRET=1 python benchmarks/gpu_attention.py OUT --dry-run      # every line that needs no GPU, tiny sizes

16 heads, K = 192, V = 128, bfloat16. TFLOP/s count visible pairs only, a backward pass as 2.5 forward ones. Trees:
"agent" a long prompt, a trunk of turns, side branches of one to three turns; "treestep" and "stepwise" trajectories of
two agent workloads (``benchmarks/data/attention_trees.md``); "episode" 40 turns with a short side segment each;
"episodes" eight of 20 turns. ``sweep`` (more Triton configurations) runs only when named.
"""

from __future__ import annotations

import functools
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
from gpu_timing import DEVICE, DRY, Report, gemm_rate, line, median_ms, rate, run_sections

if DRY:
    import tests.numerics.triton_interpreter  # noqa: F401
import torch
from torch import Tensor

from harts_titan.models.common.tree_inputs import tree_mask
from harts_titan.ops.attention import TreeMask, triton_op
from harts_titan.ops.attention.flex import tree_attention_flex
from harts_titan.ops.attention.mask import packed_lists
from harts_titan.ops.attention.path_tables import path_tables
from harts_titan.ops.attention.triton_op import Configuration, Launch, tree_attention_triton
from harts_titan.tree import plan_step
from harts_titan.tree.plan import CallLayout
from tests.numerics import kernel_checks as checks

DATA = Path(__file__).parent / "data" / "attention_trees.npz"
DTYPE = torch.float16 if DRY else torch.bfloat16
H, K, V = (2, 48, 32) if DRY else (16, 192, 128)
SCALE = K**-0.5
SETTING = checks.Setting(DEVICE, DTYPE, num_heads=H, key_dim=K, value_dim=V)
SAMPLED_ROWS = 4 if DRY else 24
BUILDS = 25
Attention = Callable[..., Tensor]


# ---- trees


def agent_tree(rows: int) -> checks.Segments:
    """Long prompt, trunk of turns of 300 to 2,500 tokens, side branches of one to three turns, until ``rows`` rows."""
    rng = random.Random(1)
    prompt, shortest, longest = (40, 3, 25) if DRY else (4096, 300, 2500)
    segments, trunk, total = [(-1, prompt)], 0, prompt
    while total < rows:
        if rng.random() < 0.5:
            for _ in range(rng.randint(2, 4) - 1):
                parent = trunk
                for _ in range(rng.randint(1, 3)):
                    length = rng.randint(shortest, longest)
                    segments.append((parent, length))
                    parent = len(segments) - 1
                    total += length
        length = rng.randint(shortest, longest)
        segments.append((trunk, length))
        trunk, total = len(segments) - 1, total + length
    return segments


def episode_tree(episodes: int, turns: int, turn: int, side: int, shared: int) -> checks.Segments:
    """Turns in a row, before each a side segment that leads nowhere."""
    if DRY:
        episodes, turns, turn, side, shared = min(episodes, 2), 3, turn // 50, side // 50 + 1, shared // 100
    segments = [(-1, shared)]
    for _ in range(episodes):
        parent = 0
        for _ in range(turns):
            segments += [(parent, side), (parent, turn)]
            parent = len(segments) - 1
    return segments


def from_shared_prefixes(length: np.ndarray, shared: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and offsets of sorted trajectories that share their first tokens with the one before."""
    if DRY:
        length, shared = -(-length // 400), shared // 400
    tokens = [np.empty(0, np.int32)]
    for number, (size, same) in enumerate(zip(length, shared), start=1):
        # A token of its own at the fork, so that no longer prefix is shared.
        fresh = (np.arange(size - same) % 1000).astype(np.int32)
        fresh[:1] = 1000 + number
        tokens.append(np.concatenate([tokens[-1][:same], fresh]))
    return np.concatenate(tokens), np.cumsum([0, *length])


@dataclass(frozen=True)
class Tree:
    """One call of a plan, in this project's row order, and its trajectories."""

    layout: CallLayout
    realistic: bool

    @functools.cached_property
    def mask(self) -> TreeMask:
        return tree_mask(self.layout, DEVICE)

    @property
    def lengths(self) -> list[int]:
        return self.layout.position_offset_N1.diff().tolist()

    @functools.cached_property
    def pairs(self) -> float:
        return float((self.layout.position_T.double() + 1).sum())

    @property
    def expanded_pairs(self) -> float:
        return sum(n * (n + 1) / 2 for n in self.lengths)

    def describe(self) -> Report:
        positions = sum(self.lengths)
        return {
            "rows": self.layout.num_rows,
            "segments": self.layout.num_segments,
            "trajectories": len(self.lengths),
            "sequences": self.layout.num_sequences,
            "rounds": self.layout.num_rounds,
            "compression": positions / self.layout.num_rows,
            "pairs_expanded_over_compact": self.expanded_pairs / self.pairs,
        }


def planned(tokens: np.ndarray, offsets: np.ndarray, realistic: bool) -> Tree:
    plan = plan_step(tokens, offsets, capacity=int(offsets[-1]), chunk_size=64)
    (call,) = plan.consumer(0, 0).calls
    return Tree(call, realistic)


@functools.cache
def trees() -> dict[str, Tree]:
    stored = np.load(DATA)
    made = {"agent": planned(*checks.batch_of(agent_tree(200 if DRY else 75_000)), True)}
    for name in ("treestep", "stepwise"):
        parts = from_shared_prefixes(stored[f"{name}_length"], stored[f"{name}_shared"])
        made[name] = planned(*parts, True)
    made["episode"] = planned(*checks.batch_of(episode_tree(1, 40, 500, 120, 3000)), False)
    made["episodes"] = planned(*checks.batch_of(episode_tree(8, 20, 250, 60, 4000)), False)
    return made


def fa4() -> Attention:
    # flash-attn-4 exists for GPUs only.
    from harts_titan.ops.attention.fa4 import tree_attention_fa4

    return tree_attention_fa4


# ---- numerics


def numerics() -> Report:
    """Small trees in three forms against float64; rows of a large one against float64; bits."""
    report: Report = {}
    backends = {"triton": tree_attention_triton} | ({} if DRY else {"fa4": fa4()})
    for seed in range(1 if DRY else 3):
        layout = checks.layout_of(checks.random_segments(np.random.default_rng(seed + 3), 64, 4 if DRY else 14), 64)
        masks = {
            "sequence": tree_mask(layout, DEVICE),
            "depth_first": checks.mask_depth_first(layout, DEVICE)[0],
            "attached": checks.mask_attached(layout, DEVICE),
        }
        for form, mask in masks.items():
            for name, attention in backends.items():
                report[f"{name}_{form}_{seed}"] = checks.check_attention(mask, SETTING, attention)
            if DRY:
                break
    tree = trees()["agent"]
    x = checks.attention_inputs(tree.mask, SETTING, seed=1)
    do = torch.randn(x[0].shape[0], H, V, generator=torch.Generator(DEVICE).manual_seed(2), device=DEVICE).to(DTYPE)
    results = {}
    for name, attention in backends.items():
        o = attention(*x, tree.mask, SCALE)
        results[name] = [o.detach(), *torch.autograd.grad(o, x, do)]
        again = attention(*x, tree.mask, SCALE)
        grads = torch.autograd.grad(again, x, do)
        same = [torch.equal(a, b) for a, b in zip(results[name], [again, *grads])]
        report[f"{name}_repeats_equal"] = dict(zip(("o", "dq", "dk", "dv"), same))
        errors = sampled_errors(tree, x, do, results[name])
        report[f"{name}_large_tree_errors"] = errors
        assert max(errors.values()) < 4 * torch.finfo(DTYPE).eps, (name, errors)
    assert all(report["triton_repeats_equal"].values()), report["triton_repeats_equal"]
    if not DRY:
        # The two share no code: gradients of k and v, whose readers are too many for float64.
        between = [checks.relative(a, b) for a, b in zip(results["fa4"], results["triton"])]
        report["fa4_against_triton"] = dict(zip(("o", "dq", "dk", "dv"), between))
        assert max(between) < 4 * torch.finfo(DTYPE).eps, between
    report["triton_alone_equal"] = alone_equal(tree, x, do, results["triton"])
    return report


def sampled_errors(tree: Tree, x: list[Tensor], do: Tensor, result: list[Tensor]) -> Report:
    """Relative errors of outputs and gradients of q of a few rows, against float64 over their ancestors."""
    rng = np.random.default_rng(0)
    tin, tout = tree.mask.tin_Y, tree.mask.tout_Y
    pairs = {"o": [0.0, 0.0], "dq": [0.0, 0.0]}
    for row in rng.integers(0, tree.layout.num_rows, SAMPLED_ROWS).tolist():
        rows = torch.nonzero((tin <= tin[row]) & (tin[row] < tout))[:, 0]
        q, k, v, dout = x[0].detach()[row].double(), x[1].detach()[rows].double(), x[2].detach()[rows].double(), do[row]
        p = (torch.einsum("hk,yhk->hy", q, k) * SCALE).softmax(-1)
        o = torch.einsum("hy,yhv->hv", p, v)
        dp = torch.einsum("hv,yhv->hy", dout.double(), v)
        ds = p * (dp - (dout.double() * o).sum(-1, keepdim=True)) * SCALE
        for name, ours, exact in (
            ("o", result[0][row], o),
            ("dq", result[1][row], torch.einsum("hy,yhk->hk", ds, k)),
        ):
            pairs[name][0] += float((ours.double() - exact).square().sum())
            pairs[name][1] += float(exact.square().sum())
    return {name: (error / size) ** 0.5 for name, (error, size) in pairs.items()}


def alone_equal(tree: Tree, x: list[Tensor], do: Tensor, result: list[Tensor]) -> Report:
    """Bits of two trajectories against their runs alone."""
    trajectories = checks.trajectories_of(tree.layout)
    for number in (0, len(trajectories) - 1):
        rows = torch.from_numpy(trajectories[number]).to(DEVICE)
        size = rows.numel()
        mask = TreeMask.build(
            tin=range(size),
            tout=[size] * size,
            seg_parent=[-1],
            seg_start=[0],
            seg_length=[size],
            seg_row=[0],
            device=DEVICE,
        )
        single = [t.detach()[rows].requires_grad_() for t in x]
        o = tree_attention_triton(*single, mask, SCALE)
        (dq,) = torch.autograd.grad(o, single[:1], do[rows])
        assert torch.equal(o, result[0][rows]) and torch.equal(dq, result[1][rows]), number
    return {"trajectories": 2, "o": True, "dq": True}


def edges() -> Report:
    """Many segments of one token, every length up to 130, element offsets past 2^31."""
    report: Report = {}
    backends = {"triton": tree_attention_triton} | ({} if DRY else {"fa4": fa4()})
    count = 10 if DRY else 5000
    stars = [(-1, 20), *((0, 1) for _ in range(count))]
    # In three calls: float64 scores of all lengths at once would fill the device.
    forests = {f"every_length_{i}": [(-1, n) for n in range(1 + i, 9 if DRY else 131, 3)] for i in range(3)}
    for name, segments in {"one_token_segments": stars, **forests}.items():
        layout = checks.layout_of(segments, 64)
        for backend, attention in backends.items():
            report[f"{name}_{backend}"] = checks.check_attention(tree_mask(layout, DEVICE), SETTING, attention)
    # Trajectories of 100 rows, enough of them that q has more than 2^31 elements.
    number = 3 if DRY else 2**31 // (100 * H * K) + 2
    size = 100 * number
    first = np.arange(number) * 100
    mask = TreeMask.build(
        tin=np.arange(size),
        tout=np.repeat(first + 100, 100),
        seg_parent=np.full(number, -1),
        seg_start=np.zeros(number),
        seg_length=np.full(number, 100),
        seg_row=first,
        device=DEVICE,
    )
    x, do = inputs(size)
    o = tree_attention_triton(*x, mask, SCALE)
    grads = torch.autograd.grad(o, x, do)
    single = TreeMask.build(
        tin=range(100),
        tout=[100] * 100,
        seg_parent=[-1],
        seg_start=[0],
        seg_length=[100],
        seg_row=[0],
        device=DEVICE,
    )
    for at in (0, size - 100):
        alone = [t.detach()[at : at + 100].clone().requires_grad_() for t in x]
        o_alone = tree_attention_triton(*alone, single, SCALE)
        for ours, theirs in zip((o, *grads), (o_alone, *torch.autograd.grad(o_alone, alone, do[at : at + 100]))):
            assert torch.equal(ours[at : at + 100], theirs), at
    report["elements"] = size * H * K
    return report


# ---- timing


def build_ms(tree: Tree) -> Report:
    """Host time of a microbatch's block lists, the queued copy included; the first one also allocates pinned memory."""

    def times(build: Callable[[TreeMask], object]) -> Report:
        taken = []
        for _ in range(BUILDS + 1):
            mask = tree_mask(tree.layout, DEVICE)
            if not DRY:
                # As in a step, whose copies of the microbatch before are long done.
                torch.cuda.synchronize()
            begin = time.perf_counter()
            build(mask)
            taken.append((time.perf_counter() - begin) * 1e3)
        return {"first": taken[0], "median": median(taken[1:]), "min": min(taken[1:]), "max": max(taken[1:])}

    blocks = triton_op.configuration(DTYPE)
    key = blocks.key_gradients.block_kv

    def fa4_lists(mask: TreeMask) -> tuple[Tensor, Tensor]:
        # What ``fa4.prepare_tables`` does, which is importable on a GPU only.
        lists = packed_lists(mask, by_query=(128, 128), by_key=(128, 96))
        return lists, mask.tin_Y.long() << 32 | (mask.tout_Y - mask.tin_Y).long()

    return {
        "repeats": BUILDS,
        "fa4": times(fa4_lists),
        "index_list": times(lambda m: path_tables(m, blocks.forward.block_q, blocks.forward.block_kv, key)),
    }


def time_lists() -> Report:
    """Host time of the block lists alone, for every tree."""
    report: Report = {}
    for name, tree in trees().items():
        report[name] = {"tree": tree.describe(), "build_ms": build_ms(tree)}
        for backend in ("fa4", "index_list"):
            entry = report[name]["build_ms"][backend]
            print(f"{name} {backend} " + "  ".join(f"{key} {value:.3f} ms" for key, value in entry.items()), flush=True)
    return report


def timed(
    name: str, run: Callable[..., Tensor], x: list[Tensor], do: Tensor, pairs: float, peak: float | None = None
) -> Report:
    """Forward alone, then forward and backward; TFLOP/s over visible pairs."""
    flops = 2 * pairs * H * (K + V)
    with torch.no_grad():
        forward = median_ms(lambda: run(*x), repeats=5)
    both = median_ms(lambda: torch.autograd.grad(run(*x), x, do), repeats=5)
    report = {
        "forward": rate(forward, flops=flops, peak=peak),
        "forward_backward": rate(both, flops=3.5 * flops, peak=peak),
    }
    for part, entry in report.items():
        line(f"{name} {part}", entry)
    return report


def inputs(rows: int) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(0)
    shapes = [(rows, H, K), (rows, H, K), (rows, H, V), (rows, H, V)]
    x = [torch.randn(s, device=DEVICE, generator=generator).to(DTYPE) for s in shapes]
    return [t.requires_grad_() for t in x[:3]], x[3]


def causal_fa4(name: str, lengths: list[int], pairs: float, peak: float) -> Report:
    """flash-attn-4's packed causal attention over whole trajectories."""
    from flash_attn.cute.interface import flash_attn_varlen_func

    cu = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32, device=DEVICE)

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

    x, do = inputs(sum(lengths))
    return timed(name, run, x, do, pairs, peak)


def shares(ours: Report, theirs: Report) -> Report:
    return {part: ours[part]["tflop_per_s"] / theirs[part]["tflop_per_s"] for part in ("forward", "forward_backward")}


def time_trees() -> Report:
    """Every tree: this project's row order, depth-first order, and the packed causal run of whole trajectories."""
    peak = gemm_rate()
    report: Report = {"gemm_tflop_per_s": peak / 1e12}
    if not DRY:
        n = 16_384
        report["causal_16384"] = causal_fa4("fa4 causal 16384", [n], n * (n + 1) / 2, peak)
    for name, tree in trees().items():
        entry: Report = {"tree": tree.describe(), "build_ms": build_ms(tree)}
        print(f"{name}: {entry['tree']}", flush=True)
        print(f"{name}: block lists ms {entry['build_ms']}", flush=True)
        report[name] = entry
        x, do = inputs(tree.layout.num_rows)
        if DRY:
            continue
        lists = packed_lists(tree.mask, by_query=(128, 128))
        blocks = -(-tree.layout.num_rows // 128)
        part, full = (int(lists[at : at + blocks].sum()) for at in (0, lists.numel() // 2))
        entry["tiles"] = {"partial": part, "full": full, "waste": (part + full) * 128 * 128 / tree.pairs - 1}
        print(f"{name}: tiles {entry['tiles']}", flush=True)
        attention = fa4()
        ordered, _ = checks.mask_depth_first(tree.layout, DEVICE)
        runs = {"fa4": tree.mask, "fa4_depth_first": ordered}
        for run_name, mask in runs.items():
            run = functools.partial(attention, mask=mask, scale=SCALE)
            entry[run_name] = timed(f"{name} {run_name}", run, x, do, tree.pairs, peak)
        del x, do
        entry["expanded"] = causal_fa4(f"{name} expanded", tree.lengths, tree.expanded_pairs, peak)
        entry["share_of_expanded"] = shares(entry["fa4"], entry["expanded"])
        print(f"{name}: share of expanded {entry['share_of_expanded']}", flush=True)
    return report


def variants() -> Report:
    """Other masks, program orders and block sizes of flash-attn-4: forward and backward apart, on three trees."""
    if DRY:
        return {"skipped": "flash-attn-4 needs a GPU"}
    from fa4_variants import IN_USE, VARIANTS, Measured, Variant, depth_first

    report: Report = {}
    # Chains have a causal kernel to compare with: what is lost there is the block-sparse loop's.
    chains = {f"chain_{n}": Tree(checks.layout_of([(-1, n)], 64), False) for n in (16_384, 65_536)}
    peak = gemm_rate()
    for name, tree in chains.items():
        report[f"{name}_causal"] = causal_fa4(f"{name} causal", tree.lengths, tree.pairs, peak)
        run = functools.partial(fa4(), mask=tree.mask, scale=SCALE)
        report[f"{name}_fa4"] = timed(f"{name} fa4", run, *inputs(tree.layout.num_rows), tree.pairs, peak)
    for name, tree in (*chains.items(), *((n, trees()[n]) for n in ("stepwise", "treestep", "episodes"))):
        x, do = inputs(tree.layout.num_rows)
        x = [t.detach() for t in x]
        flops = 2 * tree.pairs * H * (K + V)
        ordered, _ = checks.mask_depth_first(tree.layout, DEVICE)
        cases = [("in_use", IN_USE, tree.mask)]
        cases += [(other, variant, tree.mask) for other, variant in VARIANTS.items()]
        cases.append(("depth_first", Variant(depth_first, lambda m: [m.tout_Y]), ordered))
        if name in chains:
            cases = [("in_use", IN_USE, tree.mask), ("lean", VARIANTS["lean"], tree.mask)]
        first: list[Tensor] | None = None
        for case, variant, mask in cases:
            try:
                measured = Measured(variant, mask, SCALE)
                result = measured(*x, do)
                if first is None:
                    first = result
                if mask is tree.mask:
                    error = max(checks.relative(a, b) for a, b in zip(result, first))
                    assert error < torch.finfo(DTYPE).eps, (case, error)
                out, lse = measured.forward(*x)
                forward = functools.partial(measured.forward, *x)
                backward = functools.partial(measured.backward, *x, out, lse, do)
                entry = {
                    "forward": rate(median_ms(forward, repeats=5), flops=flops),
                    "backward": rate(median_ms(backward, repeats=5), flops=2.5 * flops),
                }
                for part, value in entry.items():
                    line(f"{name} {case} {part}", value)
                report[f"{name}_{case}"] = entry
            except Exception as problem:
                # One form that does not compile must not hide the others.
                report[f"{name}_{case}"] = {"error": repr(problem)[-2000:]}
                print(f"{name} {case} FAILED {problem!r}"[:2000], flush=True)
    return report


def index_list() -> Report:
    """The deterministic Triton backend with its pinned configuration."""
    report: Report = {}
    for name, tree in trees().items():
        if DRY and name != "episode":
            continue
        x, do = inputs(tree.layout.num_rows)
        run = functools.partial(tree_attention_triton, mask=tree.mask, scale=SCALE)
        report[name] = timed(f"{name} index_list", run, x, do, tree.pairs)
    return report


# Query tiles of forward and of the gradient of q are the same; the gradient's key tiles divide those of forward.
SWEEP: dict[str, tuple[tuple[Launch, ...], ...]] = {
    "forward": (
        (Launch(64, 64, 4, 2), Launch(64, 32, 4, 3)),
        (Launch(64, 64, 4, 3), Launch(64, 32, 4, 2)),
        (Launch(64, 64, 8, 2), Launch(64, 64, 4, 2)),
        (Launch(64, 32, 4, 3), Launch(64, 32, 8, 3)),
        (Launch(128, 64, 8, 2), Launch(128, 64, 8, 2)),
        (Launch(128, 64, 8, 3), Launch(128, 64, 8, 3)),
        (Launch(128, 128, 8, 2), Launch(128, 32, 8, 3)),
    ),
    "key_gradients": tuple(
        (Launch(*options),)
        for options in (
            (32, 64, 4, 3),
            (32, 64, 4, 2),
            (64, 64, 4, 2),
            (64, 64, 4, 3),
            (64, 64, 8, 2),
            (32, 128, 8, 2),
            (32, 128, 8, 3),
            (64, 128, 8, 2),
        )
    ),
}


def sweep() -> Report:
    """Launches of the Triton kernels, the others pinned: forward alone, the gradient of q, the gradients of k and v.

    TFLOP/s of a gradient count its own products: three of five for q (scores, their gradient, q), four for k and v.
    """
    tree = trees()["episode" if DRY else "treestep"]
    x, do = inputs(tree.layout.num_rows)
    x = [t.detach() for t in x]
    pair = 2 * tree.pairs * H
    work = {"forward": K + V, "query_gradient": 2 * K + V, "key_gradients": 2 * K + 2 * V}
    pinned = triton_op.CONFIGURATION
    report: Report = {}
    first: list[Tensor] | None = None
    for kernel, candidates in SWEEP.items():
        for launches in candidates[:1] if DRY else candidates:
            config = pinned._replace(**{kernel: launches[0]})
            if kernel == "forward":
                config = config._replace(query_gradient=launches[1])
            try:
                triton_op.CONFIGURATION = Configuration(*config)
                mask = tree_mask(tree.layout, DEVICE)
                lists = tuple(triton_op.prepare_tables(mask, DTYPE))
                rest = (*lists, mask.num_external_rows, SCALE)
                forward = functools.partial(triton_op._attention_forward, *x, mask.tin_Y, *rest)
                out, lse = forward()
                by_query = functools.partial(triton_op.query_gradient, *x, out, lse, do, *lists, SCALE)
                dq, delta = by_query()
                by_key = functools.partial(triton_op.key_gradients, *x, lse, delta, do, mask.tin_Y, *rest)
                result = [out, dq, *by_key()]
                first = result if first is None else first
                error = max(checks.relative(a, b) for a, b in zip(result, first))
                assert error < 4 * torch.finfo(DTYPE).eps, error
                parts: dict[str, Callable[[], object]] = {"key_gradients": by_key}
                if kernel == "forward":
                    parts = {"forward": forward, "query_gradient": by_query}
                for (part, run), launch in zip(parts.items(), launches):
                    name = f"{part} {tuple(launch)}"
                    report[name] = rate(median_ms(run, repeats=3), flops=pair * work[part])
                    line(name, report[name])
            except Exception as problem:
                name = f"{kernel} {[tuple(launch) for launch in launches]}"
                report[name] = {"error": repr(problem)[-2000:]}
                print(f"{name} FAILED {problem!r}"[:1000], flush=True)
            finally:
                triton_op.CONFIGURATION = pinned
    return report


def flex() -> Report:
    """Compiled flex_attention, the fallback, on one tree."""
    tree = trees()["episode" if DRY else "treestep"]
    if DRY:
        return {"skipped": "flex_attention has no backward on the CPU"}
    x, do = inputs(tree.layout.num_rows)
    run = functools.partial(tree_attention_flex, mask=tree.mask, scale=SCALE)
    with torch.no_grad():
        error = checks.relative(run(*x), fa4()(*x, tree.mask, SCALE))
    assert error < 2 * torch.finfo(DTYPE).eps, error
    return {"against_fa4": error, **timed("treestep flex", run, x, do, tree.pairs)}


SECTIONS: dict[str, Callable[[], Report]] = {
    "numerics": numerics,
    "edges": edges,
    "lists": time_lists,
    "trees": time_trees,
    "variants": variants,
    "index_list": index_list,
    "sweep": sweep,
    "flex": flex,
}

if __name__ == "__main__":
    sys.exit(
        run_sections(
            "gpu_attention",
            SECTIONS,
            doc=__doc__,
            settings={"heads": H, "key_dim": K, "value_dim": V, "triton": str(triton_op.CONFIGURATION)},
            packages=("torch", "triton", "flash-attn-4", "nvidia-cutlass-dsl"),
            default=list(SECTIONS) if DRY else [s for s in SECTIONS if s != "sweep"],
        )
    )
