"""Device behaviour of the ops whose implementation is PyTorch's: flex attention, LM head, grouped product."""

import pytest
import torch
from torch._dynamo.utils import counters

from harts_titan.ops.attention import tree_attention
from harts_titan.ops.grouped_mm import grouped_mm
from harts_titan.ops.kda import kda
from harts_titan.ops.logprob import linear_logprobs, recover_logprobs
from tests.numerics.ops_cases import kda_inputs, random_case, relative

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def randn(*shape, seed=0, dtype=torch.bfloat16):
    g = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=g, device="cuda").to(dtype)


def with_gradients(function, inputs, doutputs):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = function(*leaves)
    grads = torch.autograd.grad(outputs, leaves, [d.to(o.dtype) for d, o in zip(doutputs, outputs)])
    return [o.detach() for o in outputs] + list(grads)


def test_flex_forward_and_gradients_without_recompiling():
    for seed in range(6):
        case = random_case(seed, 64, 20 + 7 * seed)
        mask, n = case.mask().to("cuda"), case.num_rows
        inputs = [randn(n, 4, d, seed=i) for i, d in enumerate((192, 192, 128))]
        do = randn(n, 4, 128, seed=9)

        def run(backend, dtype, mask=mask, inputs=inputs, do=do):
            def attend(*x):
                return (tree_attention(*x, mask, scale=192**-0.5, backend=backend),)

            return with_gradients(attend, [x.to(dtype) for x in inputs], [do])

        want, plain = run("dense", torch.float64), run("dense", torch.bfloat16)
        for name, a, b, c in zip(("o", "dq", "dk", "dv"), run("flex", torch.bfloat16), want, plain):
            assert relative(a, b) <= 2 * relative(c, b) + 2**-7, (seed, name, relative(a, b), relative(c, b))
        if seed == 1:
            # Size-one and size-many specialisations are over; every further shape must reuse the graph.
            compiled = counters["stats"]["unique_graphs"]
    assert counters["stats"]["unique_graphs"] == compiled


def test_linear_logprobs_accumulates_the_weight_gradient_in_float32():
    rows, width, vocab, positions = 3000, 256, 5000, 9000
    hidden, weight = randn(rows, width), randn(vocab, width, seed=1) * 0.1
    g = torch.Generator("cuda").manual_seed(2)
    row = torch.randint(0, rows, (positions,), generator=g, device="cuda")
    label = torch.randint(0, vocab, (positions,), generator=g, device="cuda")
    label[::7] = -100
    d = [randn(positions, seed=3, dtype=torch.float32), randn(rows, seed=4, dtype=torch.float32)]

    def chunked(h, w):
        return linear_logprobs(h, w, row, label, rows_per_chunk=512)

    def whole(h, w):
        return recover_logprobs(h @ w.t(), row, label)

    got = with_gradients(chunked, (hidden, weight), d)
    again = with_gradients(chunked, (hidden, weight), d)
    want = with_gradients(whole, (hidden.double(), weight.double()), d)
    plain = with_gradients(whole, (hidden, weight), d)
    for a, b, c, r in zip(got, want, plain, again):
        assert relative(a, b) <= 2 * relative(c, b) + 2**-9
        assert torch.equal(a, r)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_grouped_mm(dtype):
    counts = torch.tensor([130, 0, 7, 64, 0, 1], device="cuda")
    x, weight = randn(int(counts.sum()), 64, dtype=dtype), randn(6, 64, 48, seed=1, dtype=dtype)
    d = [randn(x.shape[0], 48, seed=2, dtype=dtype)]
    got, want, plain = (
        with_gradients(
            lambda *a, b=backend: (grouped_mm(*a, counts, backend=b),), [t.to(t_dtype) for t in (x, weight)], d
        )
        for backend, t_dtype in (("grouped_mm", dtype), ("loop", torch.float64), ("loop", dtype))
    )
    for a, b, c in zip(got, want, plain):
        assert relative(a, b) <= 2 * relative(c, b) + 1e-6


def test_kda_reference_equals_the_cpu():
    case = random_case(3, 16, 9)
    inputs = kda_inputs(case.num_rows)
    sequences = case.compact()
    d = [torch.ones(case.num_rows, 2, 5).double(), torch.ones(sequences.num_exports, 2, 6, 5).double()]
    cpu = with_gradients(lambda *x: kda(*x, sequences, backend="reference"), inputs, d)
    device = with_gradients(
        lambda *x: kda(*x, sequences.to("cuda"), backend="reference"), [x.cuda() for x in inputs], [x.cuda() for x in d]
    )
    for a, b in zip(device, cpu):
        assert relative(a.cpu(), b) < 1e-10
