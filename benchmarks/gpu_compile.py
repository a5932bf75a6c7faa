"""Compiled layers on a GPU: graphs over plans, times against eager, a step that never waits for the device.

    python benchmarks/gpu_compile.py OUT [--sections graphs,sync,kda_moe,mla_moe] [--dry-run]

Tiny's dimensions in bfloat16; one KDA and one MLA layer with experts, on plans of 64k rows.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace

from gpu_timing import DEVICE, DRY, Report, line, median_ms, run_sections  # isort: skip

import numpy as np
import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo.utils import counters

from harts_titan import _compat

_compat.install()

if DRY:
    # The kernels, interpreted, in the place of the CPU's own backends.
    import tests.numerics.triton_interpreter  # noqa: F401
    from harts_titan.ops import backend as registry

    for op, known in registry._BACKENDS.items():
        registry._BACKENDS[op] = tuple(replace(b, auto_cpu=b.auto_cpu or b.name == "triton") for b in known)

from harts_titan.models.common.layer_run import LayerRun  # noqa: E402
from harts_titan.models.common.rope import rope_tables  # noqa: E402
from harts_titan.models.common.tree_inputs import TreeInputs  # noqa: E402
from harts_titan.models.ling import FLAVOURS, Ling  # noqa: E402
from harts_titan.parallel.compiling import compile_layers  # noqa: E402
from harts_titan.tree import plan_step  # noqa: E402

DTYPE = torch.float32 if DRY else torch.bfloat16
BACKEND = "aot_eager" if DRY else "inductor"
ROWS = 120 if DRY else 65_536
CHUNK = 32 if DRY else 64
# One group of two layers, KDA then MLA, both with experts.
ARGS = replace(FLAVOURS["debug" if DRY else "tiny"], n_layers=2, layer_group_size=2, n_dense_layers=0, vocab_size=512)
if DRY:
    # The least that the attention kernel takes.
    ARGS = replace(ARGS, qk_rope_head_dim=16)
LAYERS = {"kda_moe": "0", "mla_moe": "1"}


def episodes(rows: int, seed: int, *, depth: int) -> tuple[np.ndarray, np.ndarray]:
    """Trajectories of ``depth`` turns that fork at every turn, with about ``rows`` distinct prefixes in all."""
    rng = np.random.default_rng(seed)
    turn = max(rows // (8 * depth), 2)
    made: list[np.ndarray] = []
    distinct = 0
    while distinct < rows * 0.9:
        path = np.empty(0, dtype=np.int64)
        for _ in range(depth):
            path = np.concatenate([path, rng.integers(0, 512, 1 + turn // 2)])
            made.append(np.concatenate([path, rng.integers(0, 512, 1 + turn // 4)]))
            distinct += 2 + turn // 2 + turn // 4
            if distinct >= rows * 0.9:
                break
    offsets = np.cumsum([0] + [len(t) for t in made]).astype(np.int64)
    return np.concatenate(made).astype(np.int32), offsets


def plan(rows: int, seed: int, *, depth: int = 6) -> TreeInputs:
    tokens, offsets = episodes(rows, seed, depth=depth)
    calls = plan_step(tokens, offsets, capacity=rows, chunk_size=CHUNK).consumer(0, 0).calls
    return TreeInputs.from_layout(calls[0], DEVICE)


def model() -> Ling:
    torch.manual_seed(0)
    with torch.device("meta"):
        made = Ling(ARGS)
    made = made.to(DTYPE).to_empty(device=DEVICE)
    made.init_weights()
    return made


def compiled(made: Ling) -> Ling:
    compile_layers(dict(made.layers.items()), num_kinds=len(made.layer_kinds()), backend=BACKEND)
    return made


class Layer:
    """One layer on one plan: hidden rows in, a gradient for its output."""

    def __init__(self, made: Ling, name: str, inputs: TreeInputs) -> None:
        self.layer, self.inputs = made.layers[name], inputs
        inputs.prepare(dtype=DTYPE, key_dim=ARGS.qk_head_dim)
        self.rope = rope_tables(inputs.position_T, dim=ARGS.qk_rope_head_dim, theta=ARGS.rope_theta, dtype=DTYPE)
        generator = torch.Generator(DEVICE).manual_seed(1)
        shape = (inputs.num_rows, ARGS.dim)
        self.x = torch.randn(shape, generator=generator, device=DEVICE).to(DTYPE).requires_grad_()
        self.dout = torch.randn(shape, generator=generator, device=DEVICE).to(DTYPE)

    def forward(self) -> Tensor:
        return self.layer(self.x, self.inputs, self.rope, LayerRun())[0]

    def quiet(self) -> Tensor:
        with torch.no_grad():
            return self.forward()

    def both(self) -> list[Tensor]:
        out = self.forward()
        return [out, *torch.autograd.grad(out, [self.x, *self.layer.parameters()], self.dout, allow_unused=True)]


def errors(got: list[Tensor], expected: list[Tensor]) -> list[float]:
    pairs = [(a.detach().double(), b.detach().double()) for a, b in zip(got, expected) if a is not None]
    return [((a - b).norm() / b.norm().clamp_min(1e-30)).item() for a, b in pairs]


def graphs() -> Report:
    """Five plans of different rows, forks and rounds: one graph per kind, results near those of eager layers."""
    torch._dynamo.reset()
    counters.clear()
    eager, fast = model(), compiled(model())
    report: Report = {"rows": [], "segments": [], "rounds": [], "graphs": [], "errors": [], "seconds": []}
    small = ROWS if DRY else 6_000
    for seed, (rows, depth) in enumerate(((small, 4), (small // 2, 1), (small * 2, 9), (40, 1), (small + 7, 20))):
        inputs = plan(rows, seed, depth=depth)
        begin = time.perf_counter()
        for kind, name in LAYERS.items():
            plain, other = Layer(eager, name, inputs), Layer(fast, name, inputs)
            if DRY and kind == "kda_moe":
                # The backward kernels take minutes in the interpreter.
                worst = max(errors([other.quiet(), other.forward()], [plain.quiet(), plain.forward()]))
            else:
                worst = max(errors(other.both(), plain.both()))
                assert torch.equal(other.quiet(), other.forward())
            report["errors"].append(worst)
        report["seconds"].append(round(time.perf_counter() - begin, 1))
        report["rows"].append(inputs.num_rows)
        report["segments"].append(inputs.attention.num_segments)
        report["rounds"].append(len(inputs.kda.rounds))
        report["graphs"].append(counters["stats"]["unique_graphs"])
    print(report, flush=True)
    # Experts of rows near a tie may differ between the two, with all that follows for these rows.
    assert max(report["errors"]) < 0.05, report
    assert report["graphs"][-1] == len(LAYERS), report
    return report


def sync() -> Report:
    """Inputs, forward with head, backward with recomputation: an error wherever the host would wait for the device."""
    made = compiled(model())
    made.recompute_layers = True
    tokens, offsets = episodes(ROWS if DRY else 6_000, 0, depth=4)
    (layout,) = plan_step(tokens, offsets, capacity=ROWS, chunk_size=CHUNK).consumer(0, 0).calls

    def microbatch() -> None:
        output = made(TreeInputs.from_layout(layout, DEVICE))
        (output.logprob_S.sum() + output.entropy_T.sum()).backward()

    if DRY:
        return {"skipped": "no device"}
    # Compilation and allocation may wait.
    microbatch()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        begin = time.perf_counter()
        microbatch()
        queued = time.perf_counter() - begin
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    return {"queued_ms": queued * 1e3, "done_ms": (time.perf_counter() - begin) * 1e3}


def timed(kind: str) -> Report:
    inputs = plan(ROWS, 0)
    report: Report = {"rows": inputs.num_rows, "positions": inputs.num_positions}
    for label, made in (("eager", model()), ("compiled", compiled(model()))):
        layer = Layer(made, LAYERS[kind], inputs)
        for what, run in (("forward", layer.quiet), ("forward + backward", layer.both)):
            if DRY and kind == "kda_moe" and run == layer.both:
                continue
            report[f"{label} {what}"] = result = median_ms(run, repeats=5)
            line(f"{kind} {label} {what}", result, host_ms=round(result["host"], 2))
        if not DRY:
            torch.cuda.reset_peak_memory_stats()
            layer.both()
            report[f"{label} peak GiB"] = torch.cuda.max_memory_allocated() / 2**30
            print(f"{kind} {label}: peak {report[f'{label} peak GiB']:.2f} GiB", flush=True)
        del layer
    return report


SECTIONS = {
    "graphs": graphs,
    "sync": sync,
    "kda_moe": lambda: timed("kda_moe"),
    "mla_moe": lambda: timed("mla_moe"),
}

if __name__ == "__main__":
    sys.exit(run_sections("gpu_compile", SECTIONS, doc=__doc__, settings={"rows": ROWS, "dtype": str(DTYPE)}))
