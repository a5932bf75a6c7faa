"""Check and time convolution, norms, gates and rotary embedding; writes ``gpu_elementwise.json`` to a folder.

    python benchmarks/gpu_elementwise.py OUT                                   # one GPU, about two minutes
    python benchmarks/gpu_elementwise.py OUT --sections numerics,ops           # without the sweeps
    TRITON_INTERPRET=1 python benchmarks/gpu_elementwise.py OUT --dry-run      # tiny sizes on a CPU

Sizes are those of Ling-3.0-Tiny at 65,536 rows, bfloat16. Bytes are compulsory ones: every distinct input read once,
every output written once; what an op reads twice, its index tables and its partial sums are not counted. The ceiling is
a device copy (read and written bytes) timed in the same process.
"""

# ruff: noqa: I001  (first the command line, then the interpreter's work-arounds, then triton)
from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable

from gpu_timing import DEVICE, DRY, Report, copy_bandwidth, line, median_ms, rate, run_sections

import numpy as np
import torch
from torch import Tensor

if DRY:
    import tests.numerics.triton_interpreter  # noqa: F401

from norm_variants import launch_registers
from harts_titan.models.common.rope import rope_tables
from harts_titan.ops import activation, norm, rope, short_conv
from harts_titan.ops.activation import triton_op as gates
from harts_titan.ops.norm import triton_op as norms
from harts_titan.ops.rope import triton_op as ropes
from harts_titan.ops.short_conv import triton_op as convs
from harts_titan.ops.short_conv.taps import HEAD, ChainTables, chain_tables
from harts_titan.ops.row_sums import CONFIG as ROW_SUMS, NARROW as NARROW_SUMS, row_sums
from tests.numerics import kernel_checks as checks
from tests.numerics.elementwise_checks import EPS, TREES, Numerics, parents, taps_of

DTYPE = torch.float32 if DRY else torch.bfloat16
T = 40 if DRY else 65_536
HEADS, HEAD_DIM, ROPE_DIM = (2, 16, 8) if DRY else (16, 128, 64)
WIDTH = HEADS * HEAD_DIM
DIM, RANK, Q_RANK = (48, 16, 24) if DRY else (1536, 256, 512)
HIDDEN, DENSE, TOP_K = (24, 40, 2) if DRY else (512, 4608, 8)
ROW = 2 if not DRY else 4
"""Bytes of an element."""

IN_A_ROW = 2 if DRY else 8
"""Calls that are also timed one after another where they are small."""
SMALL_BYTES = 256 << 20

_cache: dict[str, float] = {}


def ceiling() -> float:
    if "copy" not in _cache:
        _cache["copy"] = max(copy_bandwidth(n << 20) for n in (256, 512, 1024))
        print(f"copy {_cache['copy'] / 1e12:.3f} TB/s", flush=True)
    return _cache["copy"]


def randn(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.float32).to(dtype)


def rope_inputs(rows: int) -> tuple[Tensor, Tensor]:
    position = torch.arange(rows, device=DEVICE) * 3
    return rope_tables(position, dim=ROPE_DIM, theta=6.0e6, dtype=DTYPE)


def numerics() -> Report:
    """Every op and gradient against float64: odd sizes, strided rows, replayed rows, no rows."""
    check = Numerics(DEVICE, DTYPE)
    report: Report = {}
    for kind in TREES:
        report[f"conv {kind}"] = check.conv(kind, *((40, 24) if DRY else (3001, 520)))
    rows = 37 if DRY else 1237
    for width in (DIM, RANK, Q_RANK, 20):
        report[f"norm {width}"] = check.rms_norm(rows, width)
    for width in (HEAD_DIM, 20):
        report[f"gated norm {width}"] = check.gated_rms_norm(rows, 3, width)
    for width in (HIDDEN, DENSE, 77):
        for limit in (0.0, 0.75):
            report[f"swiglu {width} {limit}"] = check.swiglu(rows, width, limit)
    report["head gate"] = check.head_gate(rows, HEADS, HEAD_DIM)
    report["rope"] = check.rope(rows, HEADS, HEAD_DIM, ROPE_DIM, HEAD_DIM)
    check.no_rows()
    errors = [r if isinstance(r, list) else [e for part in r.values() for e in part] for r in report.values()]
    print(f"largest error {max(e[0] for group in errors for e in group):.2e}")
    return report


def large() -> Report:
    """Offsets past 2^31 elements: the last rows of a large call equal the same rows alone."""
    rows = 300 if DRY else (1 << 31) // WIDTH + 4096
    x, weight = randn(rows, WIDTH), randn(WIDTH, 4)
    tap = torch.from_numpy(taps_of(parents("chain", rows))).to(DEVICE)
    tables = chain_tables(tap, rows)
    n = 100
    tail = x[-n - 3 :].clone()
    small = torch.from_numpy(taps_of(parents("chain", n + 3))).to(DEVICE)
    y = torch.empty_like(x)
    convs.launch_forward(x, weight, tables, y, convs.FORWARD)
    y_tail = convs.tree_short_conv_triton(tail, weight, small)
    assert torch.equal(y[-n:], y_tail[-n:])
    dx = torch.empty_like(x)
    convs.launch_backward(x, weight, tables, y, dx, convs.BACKWARD)
    dx_tail = torch.empty_like(tail)
    convs.launch_backward(tail, weight, chain_tables(small, n + 3), y[-n - 3 :], dx_tail, convs.BACKWARD)
    assert torch.equal(dx[-n:], dx_tail[-n:])
    w = randn(HEAD_DIM)
    heads = x.view(-1, HEAD_DIM)
    norms.launch_forward(heads, heads, w, y.view(-1, HEAD_DIM), EPS, norms.GATED_FORWARD)
    assert torch.equal(
        y[-n:].view(-1, HEAD_DIM), norm.gated_rms_norm(*[x[-n:].view(-1, HEAD_DIM)] * 2, w, EPS, backend="triton")
    )
    norms.launch_backward(
        heads, heads, w, heads, dx.view(-1, HEAD_DIM), y.view(-1, HEAD_DIM), EPS, norms.GATED_BACKWARD
    )
    gates.launch_swiglu(x, x, y, 0.0, gates.SWIGLU_FORWARD)
    assert torch.equal(y[-n:], activation.swiglu(x[-n:], x[-n:], backend="triton"))
    return {"rows": rows, "elements": rows * WIDTH}


# ---- timing: the ops as they are called


def op_pair(
    name: str, run: Callable[..., object], inputs: list[Tensor], forward_bytes: float, backward_bytes: float
) -> Report:
    """Forward and backward of an op, with its allocations and reductions."""
    with torch.no_grad():
        forward = rate(median_ms(lambda: run(*inputs)), num_bytes=forward_bytes, bandwidth=ceiling())
    line(f"{name} forward", forward)
    x = [t.detach().requires_grad_() for t in inputs]
    out = run(*x)
    outs = list(out) if isinstance(out, tuple) else [out]
    dys = [torch.randn_like(o) for o in outs]
    backward = rate(
        median_ms(lambda: torch.autograd.grad(outs, x, dys, retain_graph=True)),
        num_bytes=backward_bytes,
        bandwidth=ceiling(),
    )
    line(f"{name} backward", backward)
    return {"forward": forward, "backward": backward}


def in_a_row(
    name: str, run: Callable[..., object], inputs: list[Tensor], forward_bytes: float, backward_bytes: float
) -> Report:
    """A call among others of its kind, each on tensors of its own, so that none finds its inputs in the cache.

    A single call after the cache was overwritten also pays for writing back what is not its own, up to the size of the
    cache, and its start and end overlap with nothing. Where a call moves little more than the cache holds, that is not
    what it costs in a step.
    """
    sets = [[torch.randn_like(t).requires_grad_() for t in inputs] for _ in range(IN_A_ROW)]
    with torch.no_grad():
        forward = median_ms(lambda: [run(*x) for x in sets])
    outs = [run(*x) for x in sets]
    dys = [torch.randn_like(out) for out in outs]

    def backward_all() -> None:
        for out, x, dy in zip(outs, sets, dys):
            torch.autograd.grad(out, x, dy, retain_graph=True)

    report: Report = {}
    for part, timed, num_bytes in (
        ("forward", forward, forward_bytes),
        ("backward", median_ms(backward_all), backward_bytes),
    ):
        per_call = {**timed, **{key: timed[key] / IN_A_ROW for key in ("median", "min", "max", "host")}}
        report[part] = {**rate(per_call, num_bytes=num_bytes, bandwidth=ceiling()), "calls": IN_A_ROW}
        line(f"{name} {part}, {IN_A_ROW} in a row", report[part])
    return report


Case = tuple[str, Callable[..., object], list[Tensor], float, float]


def conv_case(kind: str, backend: str) -> Case:
    tap = taps_of(parents(kind, T))
    taps = short_conv.ConvTaps(torch.from_numpy(tap).to(DEVICE), T, tap)
    x, weight = randn(T, WIDTH), randn(WIDTH, 4)
    size = T * WIDTH * ROW
    return (
        f"conv {kind}",
        lambda x, w: short_conv.tree_short_conv(x, w, taps, backend=backend),
        [x, weight],
        2 * size,
        3 * size,
    )


def add_moved(name: str, entry: Report, tap: np.ndarray) -> None:
    """Bandwidth with what branching adds: inputs read again above every fork, sums that several chains share.

    Such a sum is a float32 row per chain, written once and read once. Neither is compulsory in the sense of the other
    figures, but no fixed order of sums comes without them.
    """
    host = chain_tables(tap, T)
    head = (host.kind_T.numpy() & HEAD) != 0
    again = int((host.tap_T4.numpy()[head, :3] >= 0).sum())
    slots = host.slot_S.shape[0]
    more = {"forward": again * WIDTH * ROW, "backward": again * WIDTH * ROW + 2 * slots * WIDTH * 4}
    for part, num_bytes in more.items():
        timed = entry[part]
        moved = num_bytes + timed["bytes"]
        timed |= {"moved_bytes": moved, "share_moved": moved / (timed["median"] * 1e-3) / ceiling()}
        print(f"{name} {part}: {moved / timed['bytes']:.2f} of the bytes, {100 * timed['share_moved']:.1f} % of copy")


def cases(backend: str) -> Iterable[Case]:
    """Every op but the convolution."""
    for width in (DIM, RANK, Q_RANK):
        size = T * width * ROW
        inputs = [randn(T, width), randn(width)]
        yield f"norm {width}", lambda x, w: norm.rms_norm(x, w, EPS, backend=backend), inputs, 2 * size, 3 * size
    size = T * WIDTH * ROW
    x = [randn(T, HEADS, HEAD_DIM), randn(T, HEADS, HEAD_DIM), randn(HEAD_DIM)]
    yield "gated norm", lambda x, g, w: norm.gated_rms_norm(x, g, w, EPS, backend=backend), x, 3 * size, 5 * size
    for name, rows, width in (("routed", T * TOP_K, HIDDEN), ("shared", T, HIDDEN), ("dense", T, DENSE)):
        x = [randn(rows, width), randn(rows, width)]
        size = rows * width * ROW
        yield f"swiglu {name}", lambda g, u: activation.swiglu(g, u, backend=backend), x, 3 * size, 5 * size
    size = T * WIDTH * ROW
    gate = T * HEADS * ROW
    x = [randn(T, HEADS, HEAD_DIM), randn(T, HEADS)]
    yield "head gate", lambda o, g: activation.head_gate(o, g, backend=backend), x, 2 * size + gate, 3 * size + 2 * gate
    cos, sin = rope_inputs(T)
    angles = 2 * cos.numel() * cos.element_size()
    size = T * HEADS * (HEAD_DIM + ROPE_DIM) * ROW + angles / 2
    x = [randn(T, HEADS, HEAD_DIM + ROPE_DIM)]
    yield "rope queries", lambda q: rope.rope_queries(q, cos, sin, backend=backend), x, 2 * size, 2 * size
    x = [randn(T, HEADS, 2 * HEAD_DIM), randn(T, RANK + ROPE_DIM)[:, RANK:]]
    size = T * (HEADS * (4 * HEAD_DIM + ROPE_DIM) + ROPE_DIM) * ROW + angles
    yield (
        "rope keys, values",
        lambda kv, k: rope.rope_keys_values(kv, k, cos, sin, nope_dim=HEAD_DIM, backend=backend),
        x,
        size,
        size,
    )


def ops() -> Report:
    """The public ops in their pinned configurations."""
    report: Report = {"copy_bytes_per_second": ceiling()}
    for kind in TREES:
        report[f"conv {kind}"] = entry = op_pair(*conv_case(kind, "triton"))
        add_moved(f"conv {kind}", entry, taps_of(parents(kind, T)))
    for case in cases("triton"):
        report[case[0]] = op_pair(*case)
        if case[0].startswith("norm") and case[-1] < SMALL_BYTES:
            report[f"{case[0]}, {IN_A_ROW} in a row"] = in_a_row(*case)
    if not DRY:
        tap = taps_of(parents("bushy", T))
        times = []
        for _ in range(5):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            chain_tables(tap, T, device=DEVICE)
            times.append((time.perf_counter() - begin) * 1e3)
        report["chain_tables_host_ms"] = sorted(times)[2]
        print(f"chain tables of the bushy tree on the host {report['chain_tables_host_ms']:.2f} ms")
    shares = {
        f"{name} {part}": entry[part]["share_of_copy"]
        for name, entry in report.items()
        if isinstance(entry, dict)
        for part in ("forward", "backward")
    }
    report["below_70_percent"] = {name: share for name, share in shares.items() if share < 0.7}
    print("below 70 %:", report["below_70_percent"])
    return report


def compiled() -> Report:
    """Plain PyTorch through torch.compile, the same sizes (bfloat16 roundings as written, sums by atomics)."""
    report: Report = {}
    if DRY:
        return report
    wanted = (f"norm {DIM}", "gated norm", "swiglu routed", "head gate", "rope queries", "rope keys, values")
    chosen = [conv_case("agent", "reference"), *(c for c in cases("reference") if c[0] in wanted)]
    for name, run, inputs, *num_bytes in chosen:
        torch._dynamo.reset()
        report[name] = op_pair(f"compiled {name}", torch.compile(run), inputs, *num_bytes)
    return report


# ---- sweeps of launch configurations


def sweep(
    name: str, configs: list[dict[str, int]], run: Callable[[dict[str, int]], object], num_bytes: float
) -> Report:
    results: list[Report] = []
    for config in configs:
        try:
            entry = rate(
                median_ms(lambda config=config: run(config), repeats=5), num_bytes=num_bytes, bandwidth=ceiling()
            )
            line(name, entry, **config)
        except Exception as error:
            entry = {"error": repr(error)[:300]}
            print(name, config, entry["error"], flush=True)
        results.append({**entry, "config": config})
    good = [r for r in results if "median" in r]
    best = min(good, key=lambda r: r["median"]) if good else None
    print(f"-> {name} best {best and best['config']}", flush=True)
    return {"best": best, "all": results}


def product(**options: list[int | None]) -> list[dict[str, int]]:
    configs: list[dict[str, int]] = [{}]
    for name, values in options.items():
        configs = [{**c, **({} if v is None else {name: v})} for c in configs for v in values]
    return configs[:1] if DRY else configs


def table(names: str, rows: str) -> list[dict[str, int]]:
    """Configurations as a table: names, then rows of values between commas."""
    configs = [dict(zip(names.split(), map(int, row.split()), strict=True)) for row in rows.split(",")]
    return configs[:1] if DRY else configs


def sweep_conv() -> Report:
    report: Report = {}
    size = T * WIDTH * ROW
    x, weight, dy = randn(T, WIDTH), randn(WIDTH, 4), randn(T, WIDTH)
    y, dx = torch.empty_like(x), torch.empty_like(x)
    kinds = ("agent", "bushy", "one_token")[: 1 if DRY else 3]
    chains: dict[str, ChainTables] = {k: chain_tables(taps_of(parents(k, T)), T, device=DEVICE) for k in kinds}
    forward = "64 512 4 2, 64 512 4 8, 32 512 4 4"
    backward = "128 128 2 2 96, 128 128 2 4 128, 64 128 2 4 104, 256 128 2 4 104"
    for kind, tables in chains.items():
        report[f"forward {kind}"] = sweep(
            f"conv forward {kind}",
            [convs.FORWARD, *table("BT BD num_warps ANY", forward)],
            lambda c, tables=tables: convs.launch_forward(x, weight, tables, y, c),
            2 * size,
        )
        report[f"backward {kind}"] = sweep(
            f"conv backward {kind}",
            [convs.BACKWARD, *table("BT BD num_warps ANY maxnreg", backward)],
            lambda c, tables=tables: convs.launch_backward(x, weight, tables, dy, dx, c),
            3 * size,
        )
    # The part of the backward pass that adds the sums of several chains.
    slots = torch.randn(tables.slot_S.shape[0], WIDTH, device=DEVICE)
    report[f"join {kind}"] = sweep(
        f"conv join {kind}",
        [convs.JOIN, *table("BD num_warps", "1024 4, 2048 8")],
        lambda c: convs.launch_join(slots, tables, dx, c),
        slots.numel() * 4 + tables.join_row_J.shape[0] * WIDTH * ROW,
    )
    return report


def sweep_sums() -> Report:
    report: Report = {}
    # Shares of the weight gradients: convolution, norms of 1536 and of 256.
    for blocks, taps, width in ((5, 4, WIDTH),) if DRY else ((256, 4, WIDTH), (1024, 1, DIM), (512, 1, RANK)):
        partial = torch.randn(blocks, taps, width, device=DEVICE)
        name, num_bytes = f"sum of partials {blocks} {taps * width}", partial.numel() * 4
        plain = rate(
            median_ms(lambda partial=partial: partial.sum(0).t().contiguous()), num_bytes=num_bytes, bandwidth=ceiling()
        )
        line(f"{name}, torch", plain)
        report[f"{name}, torch"] = plain
        report[name] = sweep(
            name,
            [ROW_SUMS, NARROW_SUMS, *table("BN BM num_warps", "128 16 4, 256 8 8, 512 8 8, 256 32 8, 512 32 8")],
            lambda c, partial=partial: row_sums(partial, DTYPE, c),
            num_bytes,
        )
    return report


def floors(rows: int, width: int) -> Report:
    """What plain PyTorch kernels of the same size reach: small tensors do not reach the ceiling of a large copy."""
    x, y, z = randn(rows, width), randn(rows, width), randn(rows, width)
    size = x.numel() * ROW
    report: Report = {}
    for name, run, tensors in (("copy", lambda: y.copy_(x), 2), ("add", lambda: torch.add(x, y, out=z), 3)):
        report[name] = rate(median_ms(run, repeats=9), num_bytes=tensors * size, bandwidth=ceiling())
        line(f"torch {name} of {rows} x {width}", report[name])
    return report


SMALL_FORWARD = "4096 2 0, 4096 2 1, 4096 4 0, 4096 4 1, 2048 2 1, 1024 1 1, 2048 1 1, 8192 4 1"
# Elements of a tile, rows of a program, warps, tiles on their way, whether the final sum is launched early.
SMALL_NORMS = (
    "2048 128 4 3 0, 1024 128 2 4 0, 2048 256 4 4 1, 2048 256 4 7 1, 1024 256 2 8 1, 1024 128 1 4 1, 512 128 1 7 1,"
    "512 64 1 5 1, 1024 256 4 8 1"
)
REGISTERS = "1024 128 1, 512 128 1, 512 64 1, 1024 128 2, 2048 128 4, 2048 256 4, 512 32 1"


def sweep_norm() -> Report:
    report: Report = {}
    for width, gated in ((RANK, False), (Q_RANK, False), (DIM, False), (HEAD_DIM, True)):
        rows = T * HEADS if gated else T
        size = rows * width * ROW
        x, dy, weight = randn(rows, width), randn(rows, width), randn(width)
        gate, dgate = (randn(rows, width), torch.empty_like(x)) if gated else (None, None)
        y = torch.empty_like(x)
        name = f"{'gated ' if gated else ''}norm {width}"
        small = width in (RANK, Q_RANK)
        if small:
            report[f"{name} floors"] = floors(rows, width)
        report[f"{name} forward"] = sweep(
            f"{name} forward",
            table("TILE num_warps", "4096 2, 4096 4, 2048 2, 1024 1, 2048 1, 8192 4" if small else "2048 4, 4096 2"),
            lambda c, x=x, gate=gate, weight=weight, y=y: norms.launch_forward(x, gate, weight, y, EPS, c),
            (3 if gated else 2) * size,
        )
        names = "TILE BT num_warps STAGES EARLY"
        more = "2048 512 8 3 0, 2048 1024 8 4 1" if gated else "2048 64 4 3 0, 2048 64 4 4 1, 2048 256 4 4 1"
        configs = [norms.backward_config(width, gated), *table(names, SMALL_NORMS if small else more)]
        report[f"{name} backward"] = sweep(
            f"{name} backward",
            configs,
            lambda c, x=x, gate=gate, weight=weight, y=y, dy=dy, dgate=dgate: norms.launch_backward(
                x, gate, weight, dy, y, dgate, EPS, c
            ),
            (5 if gated else 3) * size,
        )
        report[f"{name} wrong"] = wrong(x, gate, weight, dy, configs)
        if small:
            report[f"{name} backward, registers"] = sweep(
                f"{name} backward, registers",
                table("TILE BT num_warps", REGISTERS),
                lambda c, x=x, weight=weight, y=y, dy=dy: launch_registers(x, weight, dy, y, EPS, c),
                3 * size,
            )
            report[f"{name} registers, difference"] = registers_difference(x, weight, dy)
    return report


def registers_difference(x: Tensor, weight: Tensor, dy: Tensor) -> list[float]:
    """Relative difference of both forms of the backward pass: of the rows, of the scale."""
    dx, other = torch.empty_like(x), torch.empty_like(x)
    dw = norms.launch_backward(x, None, weight, dy, dx, None, EPS, norms.NARROW_BACKWARD)
    other_dw = launch_registers(x, weight, dy, other, EPS, {"TILE": 1024, "BT": 128, "num_warps": 1})
    found = [checks.relative(other, dx), checks.relative(other_dw, dw)]
    print(f"registers differ by {found}", flush=True)
    return found


def wrong(
    x: Tensor, gate: Tensor | None, weight: Tensor, dy: Tensor, configs: list[dict[str, int]]
) -> list[dict[str, int]]:
    """Configurations whose gradients differ from the pinned one's by more than sums in another order do."""
    first: list[Tensor] = []
    found = []
    for config in configs:
        dx, dgate = torch.empty_like(x), None if gate is None else torch.empty_like(x)
        dw = norms.launch_backward(x, gate, weight, dy, dx, dgate, EPS, config)
        first = first or [dx, dw]
        if max(checks.relative(a, b) for a, b in zip([dx, dw], first)) > 2 * torch.finfo(DTYPE).eps:
            found.append(config)
            print("WRONG", config, flush=True)
    return found


def sweep_gates() -> Report:
    report: Report = {}
    for name, rows, width in (("routed", T * TOP_K, HIDDEN), ("dense", T, DENSE)):
        size = rows * width * ROW
        gate, up, dy = (randn(rows, width) for _ in range(3))
        y, dup = torch.empty_like(gate), torch.empty_like(gate)
        report[f"swiglu {name} forward"] = sweep(
            f"swiglu {name} forward",
            product(TILE=[1024, 2048, 4096], BF=[512], num_warps=[4]),
            lambda c, gate=gate, up=up, y=y: gates.launch_swiglu(gate, up, y, 0.0, c),
            3 * size,
        )
        report[f"swiglu {name} backward"] = sweep(
            f"swiglu {name} backward",
            product(TILE=[1024, 2048, 4096], BF=[512], num_warps=[4]),
            lambda c, gate=gate, up=up, dy=dy, y=y, dup=dup: gates.launch_swiglu_backward(gate, up, dy, y, dup, 0.0, c),
            5 * size,
        )
        del gate, up, dy, y, dup
    o, dy, gate = randn(T, HEADS, HEAD_DIM), randn(T, HEADS, HEAD_DIM), randn(T, HEADS)
    y, dgate = torch.empty_like(o), torch.empty_like(gate)
    size = o.numel() * ROW
    configs = product(TILE=[2048, 4096, 8192], num_warps=[4])
    report["head gate forward"] = sweep(
        "head gate forward", configs, lambda c: gates.launch_head_gate(o, gate, y, c), 2 * size
    )
    report["head gate backward"] = sweep(
        "head gate backward", configs, lambda c: gates.launch_head_gate_backward(o, gate, dy, y, dgate, c), 3 * size
    )
    return report


def sweep_rope() -> Report:
    report: Report = {}
    cos, sin = rope_inputs(T)
    q = randn(T, HEADS, HEAD_DIM + ROPE_DIM)
    y = torch.empty_like(q)
    report["queries"] = sweep(
        "rope queries",
        product(BR=[8, 16, 32, 64], num_warps=[4]),
        lambda c: ropes.launch_queries(q, cos, sin, y, False, c),
        2 * q.numel() * ROW,
    )
    kv, k_rope = randn(T, HEADS, 2 * HEAD_DIM), randn(T, ROPE_DIM)
    k, v = torch.empty_like(q), randn(T, HEADS, HEAD_DIM)
    size = (kv.numel() + k.numel() + v.numel() + k_rope.numel()) * ROW
    report["keys, values forward"] = sweep(
        "rope keys, values forward",
        product(BR=[8, 16, 32], num_warps=[4]),
        lambda c: ropes.launch_keys(kv, k_rope, cos, sin, k, v, c),
        size,
    )
    report["keys, values backward"] = sweep(
        "rope keys, values backward",
        product(BT=[1, 2, 4], num_warps=[4]),
        lambda c: ropes.launch_keys_backward(k, v, cos, sin, kv, k_rope, c),
        size,
    )
    return report


SECTIONS: dict[str, Callable[[], Report]] = {
    "numerics": numerics,
    "large": large,
    "ops": ops,
    "sweep_conv": sweep_conv,
    "sweep_sums": sweep_sums,
    "sweep_norm": sweep_norm,
    "sweep_gates": sweep_gates,
    "sweep_rope": sweep_rope,
    "compiled": compiled,
}


def main() -> int:
    settings = {
        "rows": T,
        "conv": {"forward": convs.FORWARD, "backward": convs.BACKWARD, "join": convs.JOIN},
        "norm": {
            "forward": norms.FORWARD,
            "backward": norms.BACKWARD,
            "narrow_backward": norms.NARROW_BACKWARD,
            "gated_forward": norms.GATED_FORWARD,
            "gated_backward": norms.GATED_BACKWARD,
        },
        "swiglu": {"forward": gates.SWIGLU_FORWARD, "backward": gates.SWIGLU_BACKWARD},
        "head_gate": {"forward": gates.HEAD_GATE_FORWARD, "backward": gates.HEAD_GATE_BACKWARD},
        "rope": {"queries": ropes.QUERIES, "keys": ropes.KEYS_FORWARD, "keys_backward": ropes.KEYS_BACKWARD},
    }
    return run_sections("gpu_elementwise", SECTIONS, doc=__doc__, settings=settings)


if __name__ == "__main__":
    sys.exit(main())
