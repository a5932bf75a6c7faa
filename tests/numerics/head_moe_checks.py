"""Checks of the head's and the experts' kernels: on a CPU in Triton's interpreter (run as a module), or on a GPU.

The oracles are float64 and share no code with the ops. The interpreter needs float16 or float32.
"""

from __future__ import annotations

import itertools
import json
import sys
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import Tensor

if __name__ == "__main__":
    import tests.numerics.triton_interpreter  # noqa: F401
from harts_titan.ops import moe
from harts_titan.ops.logprob import VocabularyShard, linear_logprobs, recover_logprobs, triton_op
from harts_titan.ops.logprob.launches import TileStatistics
from harts_titan.ops.moe.kernels import split_parts
from tests.numerics.kernel_checks import filled_allocations
from tests.numerics.ops_cases import relative


class Setting(NamedTuple):
    device: str
    dtype: torch.dtype
    wide_words: int = 2600
    """Vocabulary of the head's checks: more than two tiles, and not a multiple of one."""
    experts: int = 16

    def randn(self, *shape: int, seed: int = 0, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        g = torch.Generator().manual_seed(seed)
        values = torch.randn(*shape, generator=g, dtype=torch.float64) * scale
        return values.to(self.device, dtype or self.dtype)

    @property
    def tolerance(self) -> float:
        return 16 * torch.finfo(self.dtype).eps


def grads_of(run: Callable[..., Any], inputs: list[Tensor], use: tuple[bool, ...] | None = None) -> list[Tensor]:
    """Outputs and gradients of ``sum(output * fixed random numbers)``, over the outputs in use."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = run(*leaves)
    outputs = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
    g = torch.Generator().manual_seed(9)
    loss: Any = 0.0
    for output, used in zip(outputs, use or (True,) * len(outputs), strict=True):
        factor = torch.randn(output.shape, generator=g, dtype=torch.float64).to(output.device)
        loss = loss + ((output.double() * factor).sum() if used else 0.0)
    return [*(o.detach() for o in outputs), *torch.autograd.grad(loss, leaves)]


def close(got: list[Tensor], want: list[Tensor], tolerance: float, what: object) -> None:
    errors = [relative(a, b) if b.numel() and float(b.abs().max()) else float(a.abs().sum()) for a, b in zip(got, want)]
    assert len(got) == len(want) and all(e <= tolerance for e in errors), (what, errors, tolerance)


def same(got: list[Tensor], want: list[Tensor], what: object) -> None:
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), what


# ---- head


def head_problem(s: Setting, rows: int = 9, words: int | None = None, width: int = 16) -> tuple[Tensor, ...]:
    """Rows with many positions, equal and different labels, ignored ones, a row without any, labels at tile edges."""
    g = torch.Generator().manual_seed(rows)
    words = words or s.wide_words
    row = torch.randint(0, rows - 1, (6 * rows,), generator=g)
    label = torch.randint(0, words, (6 * rows,), generator=g)
    label[::3] = 7
    label[::7] = -100
    edges = torch.tensor([0, 1023, 1024, 2047, 2048, words - 1]).clamp(max=words - 1)
    label[-6:], row[-8:] = edges, 2
    hidden, weight = s.randn(rows, width), s.randn(words, width, seed=1, scale=0.3)
    return hidden, weight, row.to(s.device), label.to(s.device)


def head_oracle(row: Tensor, label: Tensor) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    def run(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        logp = torch.log_softmax(hidden.double() @ weight.double().t(), -1)
        picked = logp[row].gather(1, label.clamp(min=0)[:, None])[:, 0]
        return torch.where(label >= 0, picked, 0.0), -(logp.exp() * logp).sum(-1)

    return run


def head_values_and_gradients(s: Setting) -> None:
    hidden, weight, row, label = head_problem(s)
    exact = head_oracle(row, label)
    for use in ((True, True), (True, False), (False, True)):
        want = grads_of(exact, [hidden.double(), weight.double()], use)
        for width in (1, 2048, 4096):

            def op(h: Tensor, w: Tensor, width: int = width) -> Any:
                return linear_logprobs(h, w, row, label, rows_per_chunk=width, backend="triton")

            with filled_allocations():
                got = grads_of(op, [hidden, weight], use)
            assert [t.dtype for t in got] == [torch.float32] * 2 + [s.dtype] * 2
            # The logits are float32: log-probs and entropies carry no error of 16 bits.
            close(got[:2], want[:2], 1e-5, (use, width))
            close(got[2:], want[2:], s.tolerance, (use, width))
        same(got, grads_of(op, [hidden, weight], use), "repeat")


def head_logits(s: Setting) -> None:
    _, _, row, label = head_problem(s)
    logits = s.randn(9, s.wide_words + 3, scale=3.0)[:, 3:]
    exact = head_oracle(row, label)
    eye = torch.eye(s.wide_words, dtype=torch.float64, device=s.device)
    want = grads_of(lambda z: exact(z, eye), [logits.double()])
    with filled_allocations():
        got = grads_of(lambda z: recover_logprobs(z, row, label, backend="triton"), [logits])
    close(got[:2], want[:2], 1e-5, "logits")
    close(got[2:], want[2:], s.tolerance, "dlogits")


def head_large_logits(s: Setting) -> None:
    logits = s.randn(3, 11, scale=1e4, dtype=torch.float32)
    row, label = (torch.tensor(v, device=s.device) for v in ([0, 1, 2], [1, 2, 3]))
    for t in grads_of(lambda z: recover_logprobs(z, row, label, backend="triton"), [logits]):
        assert torch.isfinite(t).all()


def head_blocks_and_rows(s: Setting) -> None:
    """Tiles start at the vocabulary's first word: a row has the same bits in any block width and beside any rows."""
    words = 5000
    logits = s.randn(7, words, scale=2.0, dtype=torch.float32)
    row, label = torch.arange(7, device=s.device), torch.arange(7, device=s.device) * 700
    whole = triton_op.logit_statistics(logits, row, label)
    for width in (1024, 2048):
        tiles = TileStatistics(logits, 7, words, label)
        for a in range(0, words, width):
            tiles.add(logits[:, a : a + width], a, row, label, 0)
        same(list(tiles.combine()), list(whole), width)

    def op(z: Tensor, row: Tensor, label: Tensor) -> list[Tensor]:
        z = z.clone().requires_grad_()
        logprob, entropy = recover_logprobs(z, row, label, backend="triton")
        (dz,) = torch.autograd.grad(logprob.sum() + 0.3 * entropy.sum(), z)
        return [logprob.detach(), entropy.detach(), dz]

    for a, b in zip(op(logits, row, label), op(logits[-2:], row[:2], label[-2:])):
        assert torch.equal(a[-2:], b)


def head_nothing(s: Setting) -> None:
    hidden, weight, row, label = head_problem(s)

    def run(h: Tensor, w: Tensor, row: Tensor, label: Tensor) -> list[Tensor]:
        return grads_of(
            lambda h, w: linear_logprobs(h, w, row, label, rows_per_chunk=1, backend="triton"), [h, w], (True, False)
        )

    ignored = run(hidden, weight, row, torch.full_like(label, -100))
    assert all(float(ignored[i].abs().sum()) == 0 for i in (0, 2, 3))
    none = run(hidden[:0], weight, row[:0], label[:0])
    assert none[0].shape == none[1].shape == (0,) and float(none[3].abs().sum()) == 0
    no_positions = grads_of(lambda h: linear_logprobs(h, weight, row[:0], label[:0], backend="triton")[1], [hidden])
    assert no_positions[0].shape == (9,)
    frozen = hidden.clone().requires_grad_()
    linear_logprobs(frozen, weight, row, label, backend="triton")[0].sum().backward()
    assert frozen.grad is not None


def head_shards(s: Setting) -> None:
    """Parts of the vocabulary, run one after the other, add up to the whole."""
    hidden, weight, row, label = head_problem(s)
    want = grads_of(head_oracle(row, label), [hidden.double(), weight.double()])
    for cuts in ((0, 1100, 2600), (0, 3, 1027, 2600)):
        parts = [(a, weight[a:b]) for a, b in itertools.pairwise(cuts)]
        runs = sharded_by_turns(parts, hidden, row, label)
        for got in runs:
            same(got[:2], runs[0][:2], "ranks differ")
        close(runs[0][:2], want[:2], 1e-5, cuts)
        close([sum(r[2].double() for r in runs), torch.cat([r[3] for r in runs])], want[2:], 2 * s.tolerance, cuts)


def sharded_by_turns(parts: list[tuple[int, Tensor]], hidden: Tensor, row: Tensor, label: Tensor) -> list[list[Tensor]]:
    """Each part's results; reductions replay what all parts have contributed. Hidden gradients stay each part's own."""
    seen: list[list[Tensor]] = []

    def contribute(first: int, part: Tensor, known: list[Tensor]) -> list[Tensor]:
        calls: list[Tensor] = []

        def reduce(t: Tensor) -> Tensor:
            calls.append(t.clone())
            if t.dim() == 2 or len(calls) > len(known):
                return t
            return known[len(calls) - 1].clone()

        shard = VocabularyShard(first, reduce, reduce)
        results = grads_of(
            lambda h, w: linear_logprobs(h, w, row, label, rows_per_chunk=1, shard=shard, backend="triton"),
            [hidden, part],
        )
        seen.append(calls)
        return results

    known: list[Tensor] = []
    for combine in (lambda t: torch.stack(t).amax(0), lambda t: torch.stack(t).sum(0)):
        seen.clear()
        for first, part in parts:
            contribute(first, part, known)
        known.append(combine([calls[len(known)] for calls in seen]))
    return [contribute(first, part, known) for first, part in parts]


# ---- mixture of experts


def choose_by_hand(biased: list[float], num_groups: int, top_groups: int, top_k: int) -> list[int]:
    size = len(biased) // num_groups
    groups = [sorted(biased[g * size : (g + 1) * size], reverse=True) for g in range(num_groups)]
    # Sums in float32, as the contract says scores are.
    score = [float(sum(torch.tensor(g[:2]), torch.zeros(()))) for g in groups]
    best = sorted(range(num_groups), key=lambda g: (-score[g], g))[:top_groups]
    return sorted((e for e in range(len(biased)) if e // size in best), key=lambda e: (-biased[e], e))[:top_k]


def moe_choice(s: Setting) -> None:
    for rows, experts, groups, top_groups, top_k in (
        (13, 16, 4, 2, 4),
        (7, 128, 8, 4, 8),
        (5, 16, 1, 1, 3),
        (6, 8, 8, 5, 5),
    ):
        shape = {"num_groups": groups, "top_groups": top_groups, "top_k": top_k}
        for ties in (False, True):
            logits = s.randn(rows, experts, dtype=torch.float32)
            bias = s.randn(experts, seed=1, scale=0.1, dtype=torch.float32)
            if ties:
                logits, bias = (logits * 1.5).round(), torch.zeros_like(bias)
            topk, _ = moe.choose_experts(logits, bias, route_scale=2.5, backend="triton", **shape)
            score = torch.sigmoid(logits)
            assert topk.tolist() == [choose_by_hand(r, **shape) for r in (score + bias).tolist()], (shape, ties)
            previous = torch.where(torch.arange(rows, device=s.device)[:, None] % 2 == 0, topk.flip(1), -1)
            again, _ = moe.choose_experts(logits, bias, previous, route_scale=2.5, backend="triton", **shape)
            assert torch.equal(again, torch.where(previous < 0, topk, previous))
        weights = [
            grads_of(run, [x])
            for run, x in (
                (lambda x: moe.choose_experts(x, bias, topk, route_scale=2.5, backend="triton", **shape)[1], logits),
                (lambda x: weights_by_hand(x, topk), logits.double()),
            )
        ]
        close(*weights, 1e-5, shape)
    empty, _ = moe.choose_experts(logits[:0], bias, route_scale=1.0, backend="triton", **shape)
    assert empty.shape == (0, top_k)


def weights_by_hand(logits: Tensor, topk: Tensor) -> Tensor:
    chosen = (1 / (1 + torch.exp(-logits))).gather(1, topk)
    return chosen / chosen.sum(1, keepdim=True) * 2.5


def random_topk(s: Setting, rows: int, top_k: int, experts: int | None = None, empty: int = 2) -> Tensor:
    """Distinct experts in each row; expert ``empty`` gets none."""
    g = torch.Generator().manual_seed(rows)
    allowed = torch.tensor([e for e in range(experts or s.experts) if e != empty])
    picks = [allowed[torch.randperm(len(allowed), generator=g)[:top_k]] for _ in range(rows)]
    return torch.stack(picks).to(s.device) if rows else torch.empty(0, top_k, dtype=torch.int64, device=s.device)


def moe_routes(s: Setting) -> None:
    for rows, experts, top_k in ((1, 16, 3), (300, 6, 3), (170, 128, 8), (0, 16, 4)):
        topk = random_topk(s, rows, top_k, experts)
        with filled_allocations():
            order, place, counts = moe.build_routes(topk, experts, backend="triton")
        pairs = sorted(range(topk.numel()), key=lambda i: (int(topk.reshape(-1)[i]), i))
        assert order.tolist() == pairs
        assert [place.reshape(-1)[i].item() for i in pairs] == list(range(len(pairs)))
        assert counts.tolist() == [int((topk == e).sum()) for e in range(experts)]


def moe_rows(s: Setting) -> None:
    """Odd widths and numbers of slots; dispatch, combine with and without base, and their gradients."""
    for rows, width, top_k in ((11, 40, 3), (1, 7, 1), (5, 600, 8), (0, 16, 4)):
        routes = moe.build_routes(random_topk(s, rows, top_k), s.experts, backend="reference")
        source = routes.order_R // top_k
        x, base = s.randn(rows, width), s.randn(rows, width, seed=1)
        y, weight = s.randn(rows * top_k, width, seed=2), s.randn(rows, top_k, seed=3, dtype=torch.float32)

        def ours(x: Tensor, y: Tensor, w: Tensor, b: Tensor, routes: moe.Routes = routes) -> tuple[Tensor, ...]:
            return (
                moe.dispatch(x, routes, backend="triton"),
                moe.combine(y, w, routes, b, backend="triton"),
                moe.combine(y, w, routes, backend="triton"),
            )

        def exact(x: Tensor, y: Tensor, w: Tensor, b: Tensor, routes: moe.Routes = routes) -> tuple[Tensor, ...]:
            total = (y[routes.place_TA] * w[:, :, None]).sum(1)
            return x[source], total + b, total

        inputs = [x, y, weight, base]
        with filled_allocations():
            got = grads_of(ours, inputs)
        close(got, grads_of(exact, [t.double() for t in inputs]), s.tolerance, (rows, width, top_k))
        same(got, grads_of(ours, inputs), "repeat")


def moe_experts(s: Setting) -> None:
    for rows, dim, hidden, limit in ((9, 40, 16, 0.0), (9, 40, 16, 0.3), (1, 8, 24, 0.0)):
        routes = moe.build_routes(random_topk(s, rows, 3), s.experts, backend="reference")
        x = s.randn(3 * rows, dim)
        weights = [
            s.randn(s.experts, *shape, seed=i, scale=0.2)
            for i, shape in enumerate(((hidden, dim), (dim, hidden), (hidden, dim)))
        ]
        expert = torch.repeat_interleave(torch.arange(s.experts, device=s.device), routes.counts_E)

        def ours(x: Tensor, *w: Tensor, routes: moe.Routes = routes, limit: float = limit) -> Tensor:
            y = moe.expert_mlp(x, w, routes.counts_E, limit=limit, backend="triton")
            assert y is not None
            return y

        def exact(x: Tensor, *w: Tensor, expert: Tensor = expert, limit: float = limit) -> Tensor:
            w1, w2, w3 = (t[expert] for t in w)
            gate, up = F.silu((w1 @ x[:, :, None])[..., 0]), (w3 @ x[:, :, None])[..., 0]
            if limit:
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            return (w2 @ (gate * up)[:, :, None])[..., 0]

        with filled_allocations():
            got = grads_of(ours, [x, *weights])
        close(got, grads_of(exact, [t.double() for t in (x, *weights)]), 2 * s.tolerance, (rows, dim, hidden, limit))
        assert all(float(g[routes.counts_E == 0].abs().sum()) == 0 for g in got[2:])
        same(got, grads_of(ours, [x, *weights]), "repeat")
    assert moe.expert_mlp(x[:0], tuple(weights), routes.counts_E * 0, backend="triton") is None


def moe_router(s: Setting) -> None:
    """bfloat16 inputs give float32 logits, and gradients of a float32 product rounded once."""
    x, gate = s.randn(9, 24, dtype=torch.bfloat16), s.randn(8, 24, seed=1, dtype=torch.bfloat16)
    got = grads_of(lambda x, w: moe.router_logits(x, w, backend="triton"), [x, gate])
    want = grads_of(lambda x, w: x @ w.t(), [x.double(), gate.double()])
    assert got[0].dtype == torch.float32 and got[1].dtype == torch.bfloat16
    close(got[:1], want[:1], 1e-6, "logits")
    close(got[1:], want[1:], 2.0**-8, "gradients")
    values = s.randn(9, 8, seed=2, scale=1e-3, dtype=torch.float32)
    parts = torch.empty(9, 24, dtype=torch.bfloat16, device=s.device)
    split_parts[(1,)](values, parts, 72, 8, B=128)
    assert torch.equal(parts.double().view(9, 3, 8).sum(1), values.double())


# ---- torch.compile


def compiled(s: Setting) -> None:
    """One graph without breaks for two sizes each, same bits."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    weight = s.randn(1100, 16, scale=0.3)
    w1, w2, w3 = (s.randn(s.experts, 16, 16, seed=i, scale=0.2) for i in range(3))
    bias = torch.zeros(s.experts, device=s.device)

    def layer(x: Tensor, logits: Tensor, row: Tensor, label: Tensor) -> tuple[Tensor, ...]:
        topk, w = moe.choose_experts(
            logits, bias, num_groups=4, top_groups=2, top_k=4, route_scale=2.5, backend="triton"
        )
        routes = moe.build_routes(topk, s.experts, backend="triton")
        y = moe.expert_mlp(moe.dispatch(x, routes, backend="triton"), (w1, w2, w3), routes.counts_E, backend="triton")
        hidden = x + moe.combine(y, w, routes, x, backend="triton")
        return linear_logprobs(hidden, weight, row, label, rows_per_chunk=1, backend="triton")

    fast = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    graphs = []
    for rows in (6, 11):
        x, logits = s.randn(rows, 16), s.randn(rows, s.experts, dtype=torch.float32)
        row = torch.arange(3 * rows, device=s.device) % rows
        label = torch.arange(3 * rows, device=s.device) * 7 % 1100
        eager, once = (grads_of(lambda x, z, f=f: f(x, z, row, label), [x, logits]) for f in (layer, fast))
        same(once, eager, rows)
        graphs.append(counter.frame_count)
    # The first may count twice: a number that an op takes makes torch.compile start over with it as a constant.
    assert graphs[0] == graphs[1], graphs


def ops_are_well_formed(s: Setting) -> None:
    """Schema, fake tensors and autograd registration of every custom op."""
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    ops = torch.ops.harts_titan

    def check(op: Any, *args: Any, tests: tuple[str, ...] = tests) -> None:
        torch.library.opcheck(op, args, test_utils=tests)

    hidden, weight, row, label = head_problem(s, rows=4, words=1030, width=8)
    leaves = [t.clone().requires_grad_() for t in (hidden, weight)]
    with filled_allocations(0.0):
        check(ops.linear_logprobs, *leaves, row, label, 1)
        check(ops.recover_logprobs, s.randn(4, 1030).requires_grad_(), row, label)
        check(ops.head_statistics, hidden, weight, row, label, 0, 1)
        topk = random_topk(s, 4, 4)
        logits = s.randn(4, s.experts, dtype=torch.float32).requires_grad_()
        # The fourth check adds up outputs, which it cannot where the first is an integer.
        check(ops.choose_experts, logits, torch.zeros(s.experts, device=s.device), topk, 4, 2, 4, 2.5, tests=tests[:3])
        check(ops.expert_routes, topk, s.experts)
        _, place, counts = moe.build_routes(topk, s.experts, backend="triton")
        x, y = s.randn(4, 8).requires_grad_(), s.randn(16, 8).requires_grad_()
        check(ops.dispatch_rows, x, place)
        check(ops.combine_rows, y, torch.rand(4, 4, device=s.device).requires_grad_(), place, x)
        w1, w2, w3 = (s.randn(s.experts, 8, 8, seed=i).requires_grad_() for i in range(3))
        check(ops.expert_mlp, y, w1, w2, w3, counts.cumsum(0).to(torch.int32), 0.0)
        bf16 = [t.detach().bfloat16().requires_grad_() for t in (x, w1[0])]
        check(ops.router_logits, *bf16)


CASES = (
    head_values_and_gradients,
    head_logits,
    head_large_logits,
    head_blocks_and_rows,
    head_nothing,
    head_shards,
    moe_choice,
    moe_routes,
    moe_rows,
    moe_experts,
    moe_router,
    compiled,
    ops_are_well_formed,
)


def main(path: str, names: list[str]) -> None:
    torch.set_num_threads(1)
    report = {}
    settings = (Setting("cpu", torch.float32), Setting("cpu", torch.float16))
    for case in CASES:
        if names and case.__name__ not in names:
            continue
        errors = ""
        # The last two do not depend on the dtype.
        for setting in settings[: 1 if case in CASES[-2:] else None]:
            try:
                case(setting)
            except Exception:
                errors += f"{setting.dtype}: {traceback.format_exc()}"
        report[case.__name__] = {"error": errors} if errors else {}
        with open(path, "w", encoding="utf-8") as out:
            json.dump(report, out, indent=1)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
