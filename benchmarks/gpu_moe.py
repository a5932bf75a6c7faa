"""Check and time the mixture of experts (``harts_titan.ops.moe``) at Tiny's dimensions; writes ``gpu_moe.json``.

    python benchmarks/gpu_moe.py OUT [--sections numerics,rows,router,products,layer]      # one Hopper GPU, about 80 s
    TRITON_INTERPRET=1 python benchmarks/gpu_moe.py OUT --dry-run        # every line that needs no GPU, tiny sizes

``rows`` times the movers, the gated activation and their alternatives against compulsory bytes; ``router`` the router's
product, choice and routes; ``products`` the grouped products with weights side by side or not; ``layer`` a whole MoE
layer with kernels and with the plain PyTorch forms. ``products`` also tries other layouts of the weights, and a Triton
kernel for sums over 512 with small tiles.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from gpu_timing import DEVICE, DRY, Report, copy_bandwidth, gemm_rate, line, median_ms, rate, run_sections

if DRY:
    import tests.numerics.triton_interpreter  # noqa: F401
import grouped_variants
import torch
import torch.nn.functional as F
from torch import Tensor

from harts_titan.models.common.feed_forward import FeedForward
from harts_titan.models.common.moe import GroupedExperts, MoE, Router
from harts_titan.ops import moe
from harts_titan.ops.assembler import require_sound_ptxas
from harts_titan.ops.moe import launches, triton_op

DTYPE = torch.float32 if DRY else torch.bfloat16
ROWS, DIM, HIDDEN, EXPERTS, TOP_K = (20, 64, 32, 16, 4) if DRY else (65_536, 1536, 512, 128, 8)
GROUPS, TOP_GROUPS, SCALE = (4, 2, 2.5) if DRY else (8, 4, 2.5)
ROUTED = ROWS * TOP_K
CHOICE: Any = {"num_groups": GROUPS, "top_groups": TOP_GROUPS, "top_k": TOP_K, "route_scale": SCALE}


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = DTYPE, scale: float = 1.0) -> Tensor:
    g = torch.Generator(DEVICE).manual_seed(seed)
    return (torch.randn(*shape, generator=g, device=DEVICE) * scale).to(dtype)


def choices(rows: int = ROWS) -> Tensor:
    """Skewed: an expert may get several times the mean."""
    logits = randn(rows, EXPERTS, dtype=torch.float32) + randn(EXPERTS, seed=1, dtype=torch.float32)
    bias = torch.zeros(EXPERTS, device=DEVICE)
    return moe.choose_experts(logits, bias, backend="reference", **CHOICE)[0]


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30))


def differentiate(run: Callable[..., Any], inputs: list[Tensor], seed: int = 5) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in inputs]
    outputs = run(*leaves)
    outputs = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
    douts = [randn(*o.shape, seed=seed + i, dtype=torch.float32).to(o.dtype) for i, o in enumerate(outputs)]
    return [*(o.detach() for o in outputs), *torch.autograd.grad(outputs, leaves, douts)]


def compare(name: str, run: Callable[..., Any], inputs: list[Tensor], report: Report) -> None:
    """``run(backend, *inputs)``: kernels against float64 and beside the plain form; repeats bit-equal."""
    got, again = (differentiate(lambda *x: run("triton", *x), inputs) for _ in range(2))
    want = differentiate(lambda *x: run("reference", *x), [t.double() for t in inputs])
    plain = differentiate(lambda *x: run("reference", *x), inputs)
    report[name] = [
        {"kernel": relative(a, b), "plain": relative(c, b)} for a, b, c in zip(got, want, plain, strict=True)
    ]
    assert all(torch.equal(a, b) for a, b in zip(got, again)), f"{name}: two runs differ"
    assert all(e["kernel"] <= 2 * e["plain"] + 1e-6 for e in report[name]), (name, report[name])


def experts_by_loop(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, counts: list[int], limit: float) -> Tensor:
    pieces = []
    for rows, a, b, c in zip(x.split(counts), w1, w2, w3):
        gate, up = F.silu(rows @ a.t()), rows @ c.t()
        if limit:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        pieces.append((gate * up) @ b.t())
    return torch.cat(pieces)


def numerics() -> Report:
    report: Report = {}
    rows = 20 if DRY else 3001
    topk = choices(rows)
    routes = moe.build_routes(topk, EXPERTS, backend="reference")
    for a, b in zip(moe.build_routes(topk, EXPERTS, backend="triton"), routes):
        assert torch.equal(a, b)
    report["choice"] = choice_numerics()
    compare("dispatch", lambda backend, x: moe.dispatch(x, routes, backend=backend), [randn(rows, DIM)], report)
    weight = torch.rand(rows, TOP_K, device=DEVICE)

    def combined(backend: str, y: Tensor, base: Tensor, w: Tensor) -> Tensor:
        return moe.combine(y, w, routes, base, backend=backend)

    compare("combine", combined, [randn(rows * TOP_K, DIM), randn(rows, DIM, seed=1), weight], report)
    weights = [
        randn(EXPERTS, HIDDEN, DIM, seed=2, scale=DIM**-0.5),
        randn(EXPERTS, DIM, HIDDEN, seed=3, scale=HIDDEN**-0.5),
        randn(EXPERTS, HIDDEN, DIM, seed=4, scale=DIM**-0.5),
    ]
    counts = routes.counts_E.tolist()
    for limit in (0.0, 0.5):

        def experts(backend: str, x: Tensor, *w: Tensor, limit: float = limit) -> Tensor:
            if backend == "reference":
                return experts_by_loop(x, *w, counts, limit)
            y = moe.expert_mlp(x, w, routes.counts_E, limit=limit, backend=backend)
            assert y is not None
            return y

        compare(f"experts_{limit}", experts, [randn(rows * TOP_K, DIM), *weights], report)
    gate, x = randn(EXPERTS, DIM, seed=6, scale=DIM**-0.5, dtype=torch.bfloat16), randn(rows, DIM, dtype=torch.bfloat16)
    got = differentiate(lambda x, w: moe.router_logits(x, w, backend="triton"), [x, gate])
    want = differentiate(lambda x, w: x @ w.t(), [x.double(), gate.double()])
    report["router"] = [relative(a, b) for a, b in zip(got, want)]
    report["router_plain_float32"] = relative(F.linear(x.float(), gate.float()), want[0])
    # Products of 16-bit numbers are exact in float32. Tensor cores cut the running sum off once per 16 of them: at most
    # a unit of 2^-23 each time, where plain float32 rounds D times to nearest.
    bound = DIM / 16 * 2.0**-23
    assert report["router"][0] < bound and max(report["router"]) < 2.0**-8, (report["router"], bound)
    report["router_rows_that_choose_otherwise"] = choose_otherwise(x, gate, got[0], want[0])
    print("router", {k: v for k, v in report.items() if k.startswith("router")}, flush=True)
    if not DRY:
        layer, hidden = build_layer(), randn(rows, DIM)
        torch.cuda.set_sync_debug_mode("error")
        try:
            layer(hidden)[0].sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    report["compiled"] = compiled(64 if DRY else rows)
    report["large_offsets"] = large_offsets()
    return report


def choose_otherwise(x: Tensor, gate: Tensor, logits: Tensor, exact: Tensor) -> dict[str, int]:
    """Rows whose experts differ from those of float64 logits: only where two scores differ by less than rounding."""
    bias = torch.zeros(EXPERTS, device=DEVICE)

    def chosen(logits: Tensor) -> Tensor:
        return moe.choose_experts(logits, bias, backend="reference", **CHOICE)[0].sort(1).values

    want = chosen(exact)
    count = {
        name: int((chosen(got) != want).any(1).sum())
        for name, got in (("kernel", logits), ("plain", F.linear(x.float(), gate.float())))
    }
    assert count["kernel"] <= max(1, exact.shape[0] // 1000), count
    return count


def choice_numerics() -> Report:
    """The very choices of the plain form, with ties and without; scores are the bits of ``torch.sigmoid``."""
    report: Report = {}
    rows = 40 if DRY else ROWS
    bias = randn(EXPERTS, seed=3, dtype=torch.float32, scale=0.1)
    coarse = torch.randint(0, 4, (rows, EXPERTS), device=DEVICE).float() / 2
    for name, logits, b in (
        ("random", randn(rows, EXPERTS, dtype=torch.float32), bias),
        ("ties", coarse, torch.zeros_like(bias)),
    ):
        results = [
            differentiate(lambda x, b=b, k=backend: moe.choose_experts(x, b, backend=k, **CHOICE)[1], [logits])
            for backend in ("triton", "reference")
        ]
        topk = [moe.choose_experts(logits, b, backend=k, **CHOICE)[0] for k in ("triton", "reference")]
        report[name] = {
            "rows_that_differ": int((topk[0] != topk[1]).any(1).sum()),
            "errors": [relative(a, c) for a, c in zip(*results)],
        }
        print(name, report[name], flush=True)
        again = moe.choose_experts(logits, b, topk[1].flip(1), backend="triton", **CHOICE)[0]
        assert torch.equal(again, topk[1].flip(1))
        assert report[name]["rows_that_differ"] == 0 and max(report[name]["errors"]) < 1e-5, report
    return report


def compiled(rows: int) -> Report:
    layer, x = build_layer(), randn(rows, DIM, seed=8)

    def run(x: Tensor) -> Tensor:
        return layer(x)[0]

    eager, fast = (
        differentiate(f, [x])
        for f in (run, torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager" if DRY else "inductor"))
    )
    errors = [relative(a, b) for a, b in zip(fast, eager)]
    assert max(errors) < 4 * torch.finfo(DTYPE).eps, errors
    return {"errors": errors}


def large_offsets() -> Report:
    """Row movers past 2^31 elements: the last rows equal those of a small call."""
    rows, dim = (20, 64) if DRY else (180_000, 1536)
    x = randn(rows, dim)
    topk = choices(rows)
    routes = moe.build_routes(topk, EXPERTS)
    out = triton_op.dispatch_rows(x, routes.place_TA)
    tail = slice(rows - 3, rows)
    for a in range(TOP_K):
        assert torch.equal(out[routes.place_TA[tail, a]], x[tail])
    ones = torch.ones(rows, TOP_K, device=DEVICE)
    total = triton_op.combine_rows(out, ones, routes.place_TA, None)
    assert torch.equal(total[tail], (x[tail].float() * TOP_K).to(DTYPE))
    return {"elements": out.numel()}


# ---- timing


@contextmanager
def settings(**values: int) -> Iterator[None]:
    with mock.patch.multiple(launches, **values):
        yield


def noted(report: Report, name: str, run: Callable[[], object], **work: Any) -> Report:
    try:
        timed = rate(median_ms(run), **work)
    except Exception as error:  # a configuration that does not compile is a result
        report[name] = {"error": str(error)[:300]}
        print(name, "failed:", str(error)[:200], flush=True)
        return report[name]
    report[name] = timed
    line(name, timed)
    return timed


def rows() -> Report:
    copy = copy_bandwidth()
    report: Report = {"copy_gb_per_s": copy / 1e9}
    size = torch.finfo(DTYPE).bits // 8
    small, big = ROWS * DIM * size, ROUTED * DIM * size
    routes = moe.build_routes(choices(), EXPERTS)
    place, x, y = routes.place_TA, randn(ROWS, DIM), randn(ROUTED, DIM)
    weight, base = torch.rand(ROWS, TOP_K, device=DEVICE), randn(ROWS, DIM, seed=1)
    index = 8 * ROUTED
    grid = ((32, 1),) if DRY else ((512, 2), (512, 1), (1024, 4), (2048, 4), (256, 1))
    for columns, warps in grid:
        with settings(_COLUMNS=columns, _COLUMN_WARPS=warps):
            tag = f"{columns}_w{warps}"
            noted(
                report,
                f"dispatch_{tag}",
                lambda: triton_op.dispatch_rows(x, place),
                num_bytes=small + big + index,
                bandwidth=copy,
            )
            noted(
                report,
                f"dispatch_backward_{tag}",
                lambda: triton_op._gather_rows(y, place),
                num_bytes=small + big + index,
                bandwidth=copy,
            )
            noted(
                report,
                f"combine_{tag}",
                lambda: triton_op.combine_rows(y, weight, place, None),
                num_bytes=small + big + 1.5 * index,
                bandwidth=copy,
            )
            noted(
                report,
                f"combine_base_{tag}",
                lambda: triton_op.combine_rows(y, weight, place, base),
                num_bytes=2 * small + big + 1.5 * index,
                bandwidth=copy,
            )
    for columns, warps in ((32, 1),) if DRY else ((512, 4), (512, 8), (256, 4), (256, 2), (128, 2), (2048, 8)):
        with settings(_COMBINE_COLUMNS=columns, _COMBINE_WARPS=warps):
            noted(
                report,
                f"combine_backward_{columns}_w{warps}",
                lambda: triton_op._combine_rows_backward(x, y, weight, place),
                num_bytes=small + 2 * big + 2 * index,
                bandwidth=copy,
            )
    noted(
        report,
        "plain_dispatch",
        lambda: x.index_select(0, routes.order_R // TOP_K),
        num_bytes=small + big + index,
        bandwidth=copy,
    )
    gate, up, da = (randn(ROUTED, HIDDEN, seed=i) for i in range(3))
    half = ROUTED * HIDDEN * size
    for flat, warps in ((2048, 4),) if DRY else ((2048, 4), (1024, 4), (4096, 8), (4096, 4)):
        with settings(_FLAT=flat, _FLAT_WARPS=warps):
            noted(
                report,
                f"activation_{flat}_w{warps}",
                lambda: launches.activate(gate, up, 0.0),
                num_bytes=3 * half,
                bandwidth=copy,
            )
            noted(
                report,
                f"activation_backward_{flat}_w{warps}",
                lambda: launches.activate_backward(gate, up, da, 0.0),
                num_bytes=6 * half,
                bandwidth=copy,
            )
    return report


def router() -> Report:
    copy = copy_bandwidth()
    report: Report = {"copy_gb_per_s": copy / 1e9}
    dtype = torch.bfloat16
    x, gate = randn(ROWS, DIM, dtype=dtype), randn(EXPERTS, DIM, seed=1, dtype=dtype, scale=DIM**-0.5)
    dlogits = randn(ROWS, EXPERTS, seed=2, dtype=torch.float32)
    read = ROWS * DIM * 2 + ROWS * EXPERTS * 4
    noted(report, "logits", lambda: triton_op.router_logits(x, gate), num_bytes=read, bandwidth=copy)
    noted(report, "logits_plain_float32", lambda: F.linear(x.float(), gate.float()), num_bytes=read, bandwidth=copy)
    both = 2 * ROWS * DIM * 2 + ROWS * EXPERTS * 4
    noted(
        report,
        "logits_backward",
        lambda: triton_op._router_logits_backward(x, gate, dlogits, True),
        num_bytes=both,
        bandwidth=copy,
    )

    def plain() -> list[Tensor]:
        return [(dlogits @ gate.float()).to(dtype), (dlogits.t() @ x.float()).to(dtype)]

    noted(report, "logits_backward_plain_float32", plain, num_bytes=both, bandwidth=copy)
    parts = torch.empty(ROWS, 3 * EXPERTS, dtype=dtype, device=DEVICE)
    noted(
        report,
        "split_parts",
        lambda: launches.split_parts[(-(-dlogits.numel() // 2048),)](
            dlogits, parts, dlogits.numel(), EXPERTS, B=2048, num_warps=4
        ),
        num_bytes=10 * dlogits.numel(),
        bandwidth=copy,
    )
    repeated = gate.repeat(3, 1)
    noted(report, "logits_backward_dx_product", lambda: parts @ repeated, num_bytes=both, bandwidth=copy)
    noted(
        report,
        "logits_backward_dw_product",
        lambda: triton_op._wide_product(parts.t(), x),
        num_bytes=both / 2,
        bandwidth=copy,
    )
    bias = torch.zeros(EXPERTS, device=DEVICE)
    touched = ROWS * EXPERTS * 4 + ROUTED * 12
    for rows_, warps in ((4, 4),) if DRY else ((4, 4), (8, 4), (16, 4), (1, 1), (2, 1), (4, 1), (4, 2)):
        with settings(_CHOOSE_ROWS=rows_, _CHOOSE_WARPS=warps):
            noted(
                report,
                f"choose_{rows_}_w{warps}",
                lambda: moe.choose_experts(dlogits, bias, backend="triton", **CHOICE),
                num_bytes=touched,
                bandwidth=copy,
            )
            topk, weight = moe.choose_experts(dlogits, bias, backend="triton", **CHOICE)
            noted(
                report,
                f"choose_backward_{rows_}_w{warps}",
                lambda topk=topk, weight=weight: triton_op._choose_experts_backward(dlogits, topk, weight, SCALE),
                num_bytes=touched + ROWS * EXPERTS * 4,
                bandwidth=copy,
            )
    noted(
        report,
        "choose_plain",
        lambda: moe.choose_experts(dlogits, bias, backend="reference", **CHOICE),
        num_bytes=touched,
        bandwidth=copy,
    )
    topk = choices()
    for block in (64,) if DRY else (64, 32, 128):
        with settings(_ROUTE_BLOCK=block):
            noted(
                report,
                f"routes_{block}",
                lambda: moe.build_routes(topk, EXPERTS, backend="triton"),
                num_bytes=24 * ROUTED,
                bandwidth=copy,
            )
    noted(
        report,
        "routes_plain",
        lambda: moe.build_routes(topk, EXPERTS, backend="reference"),
        num_bytes=24 * ROUTED,
        bandwidth=copy,
    )
    return report


def products() -> Report:
    """Grouped products: w1 and w3 apart or side by side; one gradient product for both or two and a sum."""
    peak = gemm_rate()
    report: Report = {"gemm_peak_tflops": peak / 1e12}
    counts = moe.build_routes(choices(), EXPERTS).counts_E
    report["largest_over_mean"] = float(counts.max() * EXPERTS / ROUTED)
    offsets = counts.cumsum(0).to(torch.int32)
    x, w1, w3 = randn(ROUTED, DIM), *(randn(EXPERTS, HIDDEN, DIM, seed=s, scale=0.03) for s in (1, 3))
    w2 = randn(EXPERTS, DIM, HIDDEN, seed=2, scale=0.05)
    dh, a, dy = randn(ROUTED, 2 * HIDDEN, seed=4), randn(ROUTED, HIDDEN, seed=5), randn(ROUTED, DIM, seed=6)
    w13 = torch.cat([w1, w3], dim=1)
    mm, one = torch._grouped_mm, 2.0 * ROUTED * DIM * HIDDEN

    def note(name: str, run: Callable[[], object], products: int) -> None:
        noted(report, name, run, flops=products * one, peak=peak)

    noted(report, "cat_w1_w3", lambda: torch.cat([w1, w3], dim=1), num_bytes=4.0 * w1.numel() * w1.element_size())
    t1, t2, t3, t13 = (w.transpose(1, 2) for w in (w1, w2, w3, w13))
    note("up_two_calls", lambda: (mm(x, t1, offs=offsets), mm(x, t3, offs=offsets)), 2)
    note("up_one_call", lambda: mm(x, t13, offs=offsets), 2)
    note("up_cat_and_one_call", lambda: mm(x, torch.cat([w1, w3], dim=1).transpose(1, 2), offs=offsets), 2)
    note("down", lambda: mm(a, t2, offs=offsets), 1)
    note("down_backward_da", lambda: mm(dy, w2, offs=offsets), 1)
    note("down_backward_dw2", lambda: mm(dy.t(), a, offs=offsets), 1)
    note("up_backward_dx_cat_and_one_call", lambda: mm(dh, torch.cat([w1, w3], dim=1), offs=offsets), 2)
    dg, du = dh[:, :HIDDEN].contiguous(), dh[:, HIDDEN:].contiguous()
    note("up_backward_dx_two_calls_and_sum", lambda: mm(dg, w1, offs=offsets) + mm(du, w3, offs=offsets), 2)
    note("up_backward_dw_strided", lambda: [mm(dh[:, i : i + HIDDEN].t(), x, offs=offsets) for i in (0, HIDDEN)], 2)
    note("up_backward_dw_contiguous", lambda: [mm(g.t(), x, offs=offsets) for g in (dg, du)], 2)
    note("up_backward_dw_one_call", lambda: mm(dh.t(), x, offs=offsets), 2)
    # Other layouts: which dimension of the weight is contiguous, and the price of making it so.
    w2t, w13t = (w.transpose(1, 2).contiguous() for w in (w2, w13))
    note("down_rows_of_f", lambda: mm(a, w2t, offs=offsets), 1)
    note("down_rows_of_f_copied", lambda: mm(a, t2.contiguous(), offs=offsets), 1)
    half = DIM // 2
    note("down_two_halves", lambda: [mm(a, w2[:, i : i + half].transpose(1, 2), offs=offsets) for i in (0, half)], 1)
    note("down_backward_da_rows_of_d", lambda: mm(dy, w2t.transpose(1, 2), offs=offsets), 1)
    note("down_backward_dw2_turned", lambda: mm(a.t(), dy, offs=offsets), 1)
    note("up_backward_dx_one_call", lambda: mm(dh, w13, offs=offsets), 2)
    note("up_backward_dx_rows_of_h", lambda: mm(dh, w13t.transpose(1, 2), offs=offsets), 2)
    note("up_backward_dw_turned", lambda: mm(x.t(), dh, offs=offsets), 2)
    report["triton_down"] = triton_down(a, w2, offsets, mm(a, t2, offs=offsets), note)
    dense = randn(ROUTED, DIM, seed=7)
    note("dense_up_one_call", lambda: dense @ w13[0].t(), 2)
    note("dense_down", lambda: a @ w2[0].t(), 1)
    return report


GROUPED = ((16, 16, 16, 1, 1),) if DRY else (
    (128, 128, 64, 8, 3),
    (128, 128, 64, 4, 3),
    (128, 128, 64, 8, 4),
    (128, 256, 64, 8, 3),
    (64, 256, 64, 4, 3),
    (128, 128, 128, 8, 2),
)  # fmt: skip


def triton_down(a: Tensor, w2: Tensor, offsets: Tensor, want: Tensor, note: Callable[..., None]) -> Report:
    """The short sums of the second product by a Triton kernel; checked first."""
    report: Report = {}
    if not DRY:
        require_sound_ptxas()
    for options in GROUPED:
        launch = grouped_variants.Launch(*options)
        try:
            error = grouped_variants.check(launch, DEVICE, DTYPE)
            assert error < 2 * torch.finfo(DTYPE).eps, error
            error = relative(grouped_variants.product(a, w2, offsets, launch, by_column=True), want)
            assert error < 2 * torch.finfo(DTYPE).eps, error
        except Exception as problem:  # a form that does not compile must not hide the others
            report[str(options)] = repr(problem)[:500]
            print(options, "failed:", repr(problem)[:300], flush=True)
            continue
        report[str(options)] = error
        for by_column in (True, False):
            name = f"down_triton_{'_'.join(map(str, options))}{'' if by_column else '_by_row_tile'}"
            run = grouped_variants.product
            note(name, lambda run=run, n=launch, c=by_column: run(a, w2, offsets, n, by_column=c), 1)
    return report


def build_layer() -> MoE:
    torch.manual_seed(0)
    router = Router(DIM, EXPERTS, top_k=TOP_K, num_groups=GROUPS, top_groups=TOP_GROUPS, route_scale=SCALE)
    layer = MoE(router, GroupedExperts(DIM, HIDDEN, EXPERTS), FeedForward(DIM, HIDDEN))
    layer = layer.to(device=DEVICE, dtype=DTYPE)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, device=DEVICE) * parameter.shape[-1] ** -0.5)
    return layer


def layer() -> Report:
    """A whole MoE layer, forward and forward with backward; share of the dense peak by its products alone."""
    peak = gemm_rate()
    report: Report = {"gemm_peak_tflops": peak / 1e12}
    module, x, dy = build_layer(), randn(ROWS, DIM).requires_grad_(), randn(ROWS, DIM, seed=1)
    flops = 6.0 * (ROUTED + ROWS) * DIM * HIDDEN + 2.0 * ROWS * DIM * EXPERTS
    inputs = [x, *module.parameters()]

    def forward() -> Tensor:
        return module(x)[0]

    def both() -> object:
        return torch.autograd.grad(forward(), inputs, dy)

    for name, kernels in (("kernels", True), ("plain", False)):
        chosen = moe.op.choose
        plain = (lambda op, *a, **k: "reference") if not kernels else chosen
        with mock.patch.object(moe.op, "choose", plain):
            with torch.no_grad():
                noted(report, f"{name}_forward", forward, flops=flops, peak=peak)
            if not DRY:
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            noted(report, f"{name}_forward_backward", both, flops=3 * flops, peak=peak)
            if not DRY:
                report[f"{name}_peak_gib"] = (torch.cuda.max_memory_allocated() - before) / 2**30
    if not DRY:
        report["profile"] = profile(both)
    return report


def profile(run: Callable[[], object]) -> list[tuple[str, float, int]]:
    """Kernels by device time, milliseconds."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        run()
        torch.cuda.synchronize()
    events = sorted(trace.key_averages(), key=lambda e: -e.self_device_time_total)
    rows_ = [(e.key[:100], e.self_device_time_total / 1e3, e.count) for e in events if e.self_device_time_total]
    for key, ms, count in itertools.islice(rows_, 25):
        print(f"{ms:9.4f} ms  x{count:<3d} {key}", flush=True)
    return rows_[:40]


if __name__ == "__main__":
    sys.exit(
        run_sections(
            "gpu_moe",
            {"numerics": numerics, "rows": rows, "router": router, "products": products, "layer": layer},
            doc=__doc__,
            settings={
                "rows": ROWS,
                "dim": DIM,
                "hidden": HIDDEN,
                "experts": EXPERTS,
                "top_k": TOP_K,
                "dtype": str(DTYPE),
            },
            packages=("torch", "triton"),
        )
    )
