"""Check and time the head (``harts_titan.ops.logprob``) beside its bare matrix products; writes ``gpu_head.json``.

    python benchmarks/gpu_head.py OUT [--sections numerics,bare,op]       # one Hopper GPU, about 90 s
    TRITON_INTERPRET=1 python benchmarks/gpu_head.py OUT --dry-run         # every line that needs no GPU, tiny sizes

``bare`` are the four products of the head (logits, logits again, gradient of hidden rows, gradient of the weight) with
nothing between them, whole and in blocks. ``op`` runs forward and backward at several block widths and in other
designs: 16-bit logits, blocks of rows instead of blocks of the vocabulary. ``kernels`` times the parts alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from gpu_timing import DEVICE, DRY, Report, copy_bandwidth, gemm_rate, line, median_ms, rate, run_sections

if DRY:
    import tests.numerics.triton_interpreter  # noqa: F401
import torch
from torch import Tensor

from harts_titan.ops.logprob import VocabularyShard, linear_logprobs, recover_logprobs, triton_op
from harts_titan.ops.logprob.kernels import logit_gradients, tile_statistics
from harts_titan.ops.logprob.launches import LabelTerms, TileStatistics, product
from harts_titan.ops.logprob.triton_op import finish

DTYPE = torch.float16 if DRY else torch.bfloat16
ROWS, DIM, WORDS = (24, 32, 3000) if DRY else (65_536, 1536, 157_184)
WIDTHS = (1024, 2048) if DRY else (11_264, 8192, 5120, 22_528)
ROW_BLOCKS = (8,) if DRY else (5632, 4096, 8192)
REPEATS = 1 if DRY else 5
_bare: dict[str, float] = {}


def problem(rows: int, words: int = WORDS, dim: int = DIM, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden rows, weight, row of each of five times as many positions, labels (mostly one per row, some ignored)."""
    g = torch.Generator(DEVICE).manual_seed(seed)
    hidden = torch.randn(rows, dim, generator=g, device=DEVICE).to(DTYPE)
    weight = (torch.randn(words, dim, generator=g, device=DEVICE) * 0.06).to(DTYPE)
    row = torch.randint(0, rows, (5 * rows,), generator=g, device=DEVICE)
    row[: rows // 8] = 1
    common = torch.randint(0, words, (rows,), generator=g, device=DEVICE)
    other = torch.randint(0, words, (5 * rows,), generator=g, device=DEVICE)
    kind = torch.rand(5 * rows, generator=g, device=DEVICE)
    return hidden, weight, row, torch.where(kind < 0.8, common[row], torch.where(kind < 0.9, other, -100))


def with_gradients(run: Callable[..., Any], hidden: Tensor, weight: Tensor, dlogprob: Tensor, dentropy: Tensor) -> Any:
    leaves = [t.detach().requires_grad_() for t in (hidden, weight)]
    outputs = run(*leaves)
    grads = torch.autograd.grad(outputs, leaves, [d.to(o.dtype) for d, o in zip((dlogprob, dentropy), outputs)])
    return [*(o.detach() for o in outputs), *grads]


def relative(got: Tensor, want: Tensor) -> float:
    """Norm of the difference over the norm: single elements of tiny gradients do not decide."""
    return float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30))


def gradients(rows: int, positions: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator(DEVICE).manual_seed(9)
    return torch.randn(positions, generator=g, device=DEVICE), torch.randn(rows, generator=g, device=DEVICE)


def numerics() -> Report:
    """Against float64 and beside the plain form; repeats, shards, offsets past 2^31, no synchronisation, compiled."""
    rows = 12 if DRY else 512
    hidden, weight, row, label = problem(rows)
    d = gradients(rows, row.numel())

    def op(h: Tensor, w: Tensor) -> Any:
        return linear_logprobs(h, w, row, label, backend="triton")

    def exact(h: Tensor, w: Tensor) -> Any:
        logp = torch.log_softmax(h @ w.t(), -1)
        picked = logp[row].gather(1, label.clamp(min=0)[:, None])[:, 0]
        return torch.where(label >= 0, picked, 0.0), -(logp.exp() * logp).sum(-1)

    got, again = (with_gradients(op, hidden, weight, *d) for _ in range(2))
    want = with_gradients(exact, hidden.double(), weight.double(), *d)
    plain = with_gradients(lambda h, w: linear_logprobs(h, w, row, label, backend="reference"), hidden, weight, *d)
    names = ("logprob", "entropy", "dhidden", "dweight")
    report: Report = {
        n: {"kernel": relative(a, b), "plain": relative(c, b)} for n, a, b, c in zip(names, got, want, plain)
    }
    assert all(torch.equal(a, b) for a, b in zip(got, again)), "two runs differ"
    for name, entry in report.items():
        assert entry["kernel"] <= 2 * entry["plain"] + 1e-5, (name, report)
    # Wide logits: the log-probs carry float32 error only.
    assert report["logprob"]["kernel"] < 1e-5, report
    report["shards"] = shards(hidden, weight, row, label, d, want)
    report["large_offsets"] = large_offsets()
    if not DRY:
        torch.cuda.set_sync_debug_mode("error")
        try:
            with_gradients(op, hidden, weight, *d)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    fast = torch.compile(op, fullgraph=True, backend="aot_eager" if DRY else "inductor")
    compiled = with_gradients(fast, hidden, weight, *d)
    assert all(torch.equal(a, b) for a, b in zip(got, compiled)), [relative(a, b) for a, b in zip(compiled, got)]
    return report


def shards(hidden: Tensor, weight: Tensor, row: Tensor, label: Tensor, d: Any, want: list[Tensor]) -> Report:
    """Two parts of the vocabulary, run one after the other on this device: statistics, sums, then gradients."""
    cut = weight.shape[0] // 2 - 3
    parts = [weight[:cut], weight[cut:]]
    statistics = [
        triton_op.head_statistics(hidden, part, row, label, first, hidden.shape[0] << 10)
        for part, first in zip(parts, (0, cut))
    ]
    row_max = torch.maximum(statistics[0].max_T, statistics[1].max_T)
    shifts = [s.max_T - row_max for s in statistics]
    totals = [
        torch.cat([s.sum_T * f.exp(), (s.slope_T + f * s.sum_T) * f.exp(), s.label_logit_S])
        for s, f in zip(statistics, shifts)
    ]
    results = []
    for part, first, other in zip(parts, (0, cut), reversed(totals)):
        shard = VocabularyShard(first, lambda t: t.copy_(row_max), sums(other, hidden.shape[0]))
        results.append(
            with_gradients(
                lambda h, w, shard=shard: linear_logprobs(h, w, row, label, shard=shard, backend="triton"),
                hidden,
                part,
                *d,
            )
        )
    (lp, h, dh0, dw0), (lp1, h1, dh1, dw1) = results
    errors = [relative(a, b) for a, b in zip((lp, h, dh0 + dh1, torch.cat([dw0, dw1])), want)]
    assert max(errors[:2]) < 1e-5 and max(errors[2:]) < 2e-2, errors
    # Not the same bits here: the other part's sums come from products of another width, for which cuBLAS may take
    # another kernel. (Ranks agree in bits: all of them get one reduced vector.) What is left is the rounding of logits
    # to float32: each of a product's D / 16 partial sums is off by up to a unit of 2^-23 of the largest. A log-prob
    # holds a logit and the log of a sum, an entropy H moves by 2 H times the logits' error at most (the sum of
    # |p (log p + H)|), and both are rounded a few times more.
    eps = 2.0**-23
    logit = hidden.shape[1] / 16 * eps * float((hidden.double() @ weight.double().t()).abs().max())
    between = [float((a - b).abs().max()) for a, b in ((lp, lp1), (h, h1))]
    lp_size, h_size = (float(t.abs().max()) for t in want[:2])
    bounds = [2 * logit + 4 * eps * lp_size, 2 * h_size * logit + 4 * eps * lp_size]
    assert all(got <= bound for got, bound in zip(between, bounds)), (between, bounds)
    return {"errors": errors, "between": between, "bounds": bounds}


def sums(other: Tensor, rows: int) -> Callable[[Tensor], Tensor]:
    # Only the first sum, of the statistics, needs the other part here; the hidden gradients are added by the caller.
    return lambda t: t + other if t.dim() == 1 else t


def large_offsets() -> Report:
    rows, words = (6, 2000) if DRY else (14_000, 157_184)
    logits = torch.randn(rows, words, device=DEVICE, dtype=DTYPE)
    row = torch.arange(rows, device=DEVICE)
    label = torch.randint(0, words, (rows,), device=DEVICE)
    tail = 5
    whole = with_gradients_of_logits(logits, row, label)
    part = with_gradients_of_logits(logits[-tail:], row[:tail], label[-tail:])
    # A row has the same bits alone and behind 2^31 other elements.
    for a, b in zip(whole, part):
        assert torch.equal(a[-tail:], b)
    return {"elements": logits.numel()}


def with_gradients_of_logits(logits: Tensor, row: Tensor, label: Tensor) -> list[Tensor]:
    leaf = logits.detach().requires_grad_()
    logprob, entropy = recover_logprobs(leaf, row, label, backend="triton")
    (dlogits,) = torch.autograd.grad(logprob.sum() + 0.3 * entropy.sum(), leaf)
    return [logprob.detach(), entropy.detach(), dlogits]


# ---- bare products


def bare() -> Report:
    """The four products whole, with 16-bit logits; and in blocks of the vocabulary or of rows."""
    hidden, weight, _, _ = problem(ROWS)
    flops = 2.0 * ROWS * DIM * WORDS
    peak = gemm_rate()
    report: Report = {"gemm_peak_tflops": peak / 1e12}

    def note(name: str, run: Callable[[], object]) -> None:
        timed = rate(median_ms(run, repeats=REPEATS, flush=False), flops=flops, peak=peak)
        report[name] = timed
        line(name, timed)

    buffer = [torch.empty(ROWS, WORDS, device=DEVICE, dtype=DTYPE)]
    note("logits", lambda: torch.mm(hidden, weight.t(), out=buffer[0]))
    buffer[0].normal_(std=1e-3)
    note("dhidden", lambda: torch.mm(buffer[0], weight))
    note("dweight", lambda: torch.mm(buffer[0].t(), hidden))
    _bare["total"] = sum(report[n]["median"] * k for n, k in (("logits", 2), ("dhidden", 1), ("dweight", 1)))
    report["four_products_ms"] = _bare["total"]
    print(f"four bare products: {_bare['total']:.2f} ms", flush=True)
    buffer.clear()
    dhidden = torch.empty(ROWS, DIM, device=DEVICE)
    dweight = torch.empty_like(weight)
    for width in WIDTHS:
        wide = torch.empty(ROWS * width, device=DEVICE)
        narrow = torch.zeros(ROWS * width, device=DEVICE, dtype=DTYPE)

        def blocks(run: Callable[[int, int, Tensor, Tensor], object], wide: Tensor, narrow: Tensor, width: int) -> None:
            for a in range(0, WORDS, width):
                b = min(a + width, WORDS)
                run(a, b, *(t[: ROWS * (b - a)].view(ROWS, b - a) for t in (wide, narrow)))

        parts: dict[str, Callable[[int, int, Tensor, Tensor], object]] = {
            "logits_float32": lambda a, b, z, dz: product(hidden, weight[a:b].t(), z),
            "logits_16": lambda a, b, z, dz: product(hidden, weight[a:b].t(), dz),
            "dhidden_added": lambda a, b, z, dz: product(dz, weight[a:b], dhidden, add=a > 0),
            "dweight": lambda a, b, z, dz: torch.mm(dz.t(), hidden, out=dweight[a:b]),
        }
        for name, run in parts.items():
            note(f"words_{width}_{name}", lambda run=run, w=wide, n=narrow, k=width: blocks(run, w, n, k))
        del wide, narrow
    return report


# ---- designs


def vocabulary_blocks(
    hidden: Tensor,
    weight: Tensor,
    row: Tensor,
    label: Tensor,
    d: tuple[Tensor, Tensor],
    *,
    width: int,
    forward: torch.dtype,
    backward: torch.dtype,
) -> list[Tensor]:
    """The op's loops with logits in other dtypes; 16-bit logits become their gradient in place."""
    blocks = [(a, min(a + width, WORDS)) for a in range(0, WORDS, width)]

    def view(flat: Tensor, a: int, b: int) -> Tensor:
        return flat[: ROWS * (b - a)].view(ROWS, b - a)

    tiles = TileStatistics(hidden, ROWS, WORDS, label)
    flat = hidden.new_empty(ROWS * width, dtype=forward)
    for a, b in blocks:
        z = view(flat, a, b)
        product(hidden, weight[a:b].t(), z)
        tiles.add(z, a, row, label, 0)
    *statistics, label_logit = tiles.combine()
    lse, entropy = finish(*statistics)
    del tiles, flat
    terms = LabelTerms(row, label, (lse, entropy, label_logit), *d)
    dhidden = hidden.new_empty(hidden.shape, dtype=torch.float32)
    dweight = torch.empty_like(weight)
    flat = hidden.new_empty(ROWS * width, dtype=backward)
    narrow = flat if backward == hidden.dtype else hidden.new_empty(ROWS * width)
    for a, b in blocks:
        z, dz = view(flat, a, b), view(narrow, a, b)
        product(hidden, weight[a:b].t(), z)
        terms.write(z, dz, a)
        product(dz, weight[a:b], dhidden, add=a > 0)
        torch.mm(dz.t(), hidden, out=dweight[a:b])
    logprob = torch.where(label >= 0, label_logit - lse[row], 0.0)
    return [logprob, entropy, dhidden.to(hidden.dtype), dweight]


def row_blocks(
    hidden: Tensor, weight: Tensor, row: Tensor, label: Tensor, d: tuple[Tensor, Tensor], *, rows: int
) -> list[Tensor]:
    """Blocks of rows over the whole vocabulary; the weight's gradient adds up in float32. Time and memory only.

    Label positions of a block are taken by masks, which costs nothing here: all of them are read for every block.
    """
    wide = hidden.new_empty(rows * WORDS, dtype=torch.float32)
    narrow = hidden.new_empty(rows * WORDS)
    dhidden, total = torch.empty_like(hidden), torch.empty_like(weight, dtype=torch.float32)
    outputs = []
    for a in range(0, ROWS, rows):
        b = min(a + rows, ROWS)
        z = wide[: (b - a) * WORDS].view(b - a, WORDS)
        product(hidden[a:b], weight.t(), z)
        tiles = TileStatistics(hidden, b - a, WORDS, label[:0])
        tiles.add(z, 0, row[:0], label[:0], 0)
        outputs.append(finish(*tiles.combine()[:3]))
    for i, a in enumerate(range(0, ROWS, rows)):
        b = min(a + rows, ROWS)
        z, dz = (t[: (b - a) * WORDS].view(b - a, WORDS) for t in (wide, narrow))
        product(hidden[a:b], weight.t(), z)
        LabelTerms(row[:0], label[:0], (*outputs[i], label[:0].float()), None, d[1][a:b]).write(z, dz, 0)
        torch.mm(dz, weight, out=dhidden[a:b])
        product(dz.t(), hidden[a:b], total, add=a > 0)
    return [torch.cat([o[1] for o in outputs]), dhidden, total.to(weight.dtype)]


def op() -> Report:
    """Forward, and forward with backward, at every width and in every design; memory beyond inputs and outputs."""
    hidden, weight, row, label = problem(ROWS)
    d = gradients(ROWS, row.numel())
    flops = 4 * 2.0 * ROWS * DIM * WORDS
    report: Report = {"limit_bytes": ROWS * WORDS * 4 / 8, "four_products_ms": _bare.get("total")}
    leaves = [t.detach().requires_grad_() for t in (hidden, weight)]
    base: list[Tensor] = []

    def forward(width: int) -> Any:
        return triton_op.linear_logprobs_triton(*leaves, row, label, width * ROWS)

    def both(width: int) -> list[Tensor]:
        outputs = forward(width)
        return [*outputs, *torch.autograd.grad(outputs, leaves, d)]

    def note(name: str, run: Callable[[], list[Tensor]], work: float = flops, compare: bool = True) -> None:
        if not DRY:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        results = [t.detach() for t in run()]
        entry: Report = {}
        if not DRY:
            torch.cuda.synchronize()
            own = sum(t.numel() * t.element_size() for t in results)
            entry["extra_bytes"] = torch.cuda.max_memory_allocated() - before - own
            entry["share_of_logits"] = entry["extra_bytes"] / (ROWS * WORDS * 4)
        if compare:
            if not base:
                base.extend(results)
            entry["difference"] = [relative(a, b) for a, b in zip(results, base)]
        del results
        timed = rate(median_ms(run, repeats=REPEATS, flush=False), flops=work)
        if _bare and work == flops:
            entry["over_bare"] = timed["median"] / _bare["total"]
        report[name] = {**timed, **entry}
        labels = {k: f"{entry[k]:.4f}" for k in ("share_of_logits", "over_bare") if k in entry}
        line(name, timed, **labels)

    for width in WIDTHS:
        with torch.no_grad():
            note(f"op_{width}_forward", lambda w=width: list(forward(w)), work=flops / 4, compare=False)
        note(f"op_{width}", lambda w=width: both(w))
    dtypes = {"wide_narrow": (torch.float32, DTYPE), "narrow": (DTYPE, DTYPE)}
    for name, (f, b) in dtypes.items():
        for width in WIDTHS[:1] + WIDTHS[3:]:
            note(
                f"{name}_{width}",
                lambda f=f, b=b, w=width: vocabulary_blocks(
                    hidden, weight, row, label, d, width=w, forward=f, backward=b
                ),
            )
    for rows in ROW_BLOCKS:
        note(f"rows_{rows}", lambda r=rows: row_blocks(hidden, weight, row, label, d, rows=r), compare=False)
    return report


def kernels() -> Report:
    """The passes over one block's logits in several configurations, and the label work."""
    copy = copy_bandwidth()
    report: Report = {"copy_gb_per_s": copy / 1e9}
    width = WIDTHS[0]
    tiles = -(-width // 1024)
    z = torch.randn(ROWS, width, device=DEVICE) * 2
    dz = torch.empty(ROWS, width, device=DEVICE, dtype=DTYPE)
    out = torch.empty(3, tiles, ROWS, device=DEVICE)
    vectors = [torch.randn(ROWS, device=DEVICE) for _ in range(4)]

    def note(name: str, num_bytes: float, run: Callable[[], object]) -> None:
        try:
            timed = rate(median_ms(run, repeats=REPEATS), num_bytes=num_bytes, bandwidth=copy)
        except Exception as error:  # a configuration that does not compile is a result
            report[name] = {"error": str(error)[:300]}
            print(name, "failed:", str(error)[:100], flush=True)
            return
        report[name] = timed
        line(name, timed)

    for rows, warps in ((4, 4), (1, 1)) if DRY else ((1, 1), (1, 2), (1, 4), (2, 4), (4, 4), (8, 4), (4, 8), (8, 8)):
        grid = (-(-ROWS // rows) * tiles,)
        options = {"BT": rows, "BW": 1024, "num_warps": warps}
        note(
            f"statistics_{rows}x1024_w{warps}",
            4.0 * z.numel(),
            lambda g=grid, o=options: tile_statistics[g](z, *out.unbind(0), ROWS, width, z.stride(0), 0, tiles, **o),
        )
        note(
            f"gradients_{rows}x1024_w{warps}",
            6.0 * z.numel(),
            lambda g=grid, o=options: logit_gradients[g](
                z, dz, *vectors, ROWS, width, z.stride(0), dz.stride(0), tiles, **o
            ),
        )
    _, _, row, label = problem(ROWS, words=width, dim=8)
    d = gradients(ROWS, row.numel())
    saved = (vectors[0], vectors[1], torch.randn(row.numel(), device=DEVICE))
    all_tiles = TileStatistics(z, ROWS, WORDS, label)
    note("label_terms", 8.0 * row.numel(), lambda: LabelTerms(row, label, saved, *d))
    terms = LabelTerms(row, label, saved, *d)
    note("statistics_with_labels", 4.0 * z.numel(), lambda: all_tiles.add(z, 0, row, label, 0))
    note("gradients_with_labels", 6.0 * z.numel(), lambda: terms.write(z, dz, 0))
    note("combine_tiles", 12.0 * ROWS * -(-WORDS // 1024), all_tiles.combine)
    return report


if __name__ == "__main__":
    sys.exit(
        run_sections(
            "gpu_head",
            {"numerics": numerics, "bare": bare, "op": op, "kernels": kernels},
            doc=__doc__,
            settings={"rows": ROWS, "dim": DIM, "words": WORDS, "positions": 5 * ROWS, "dtype": str(DTYPE)},
            packages=("torch", "triton"),
        )
    )
