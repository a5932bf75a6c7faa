import logging

import pytest
import torch

from harts_titan.ops.grouped_mm import grouped_mm
from harts_titan.ops.grouped_mm import op as grouped_mm_op
from tests.numerics.ops_cases import relative

COUNTS = [[3, 0, 5, 2], [0, 0, 0, 7], [1, 1, 1, 1], [0, 0, 0, 0], [9, 0, 0, 0]]


def problem(counts, dtype, d=16, f=8):
    g = torch.Generator().manual_seed(sum(counts))
    x = torch.randn(sum(counts), d, generator=g, dtype=torch.float64).to(dtype)
    weight = torch.randn(len(counts), d, f, generator=g, dtype=torch.float64).to(dtype)
    return x, weight, torch.tensor(counts)


def by_row(x, weight, counts):
    expert = torch.repeat_interleave(torch.arange(len(counts)), counts)
    return torch.einsum("rd,rdf->rf", x, weight[expert])


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize(
    "backend, dtype, tolerance",
    [
        ("auto", torch.float64, 1e-13),
        ("loop", torch.float64, 1e-13),
        ("grouped_mm", torch.float32, 1e-5),
        ("loop", torch.float32, 1e-5),
        ("auto", torch.float32, 1e-5),
        ("grouped_mm", torch.bfloat16, 2e-2),
        ("loop", torch.bfloat16, 2e-2),
        ("grouped_mm", torch.float16, 2e-3),
    ],
)
def test_forward_and_gradients(counts, backend, dtype, tolerance):
    x, weight, count = problem(counts, dtype)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    y, want = grouped_mm(*leaves, count, backend=backend), by_row(*wide, count)
    assert y.dtype == dtype and y.shape == want.shape
    dy = torch.randn(want.shape, dtype=torch.float64).to(dtype)
    grads, dwant = torch.autograd.grad(y, leaves, dy), torch.autograd.grad(want, wide, dy.double())
    if sum(counts):
        assert relative(y, want) < tolerance
        for a, b in zip(grads, dwant):
            assert relative(a, b) < tolerance
    assert grads[1][count == 0].abs().sum() == 0


def test_misaligned_dims_fall_back_with_one_warning(caplog):
    grouped_mm_op._warn_misaligned.cache_clear()
    x, weight, count = problem([2, 3], torch.float32, d=6, f=8)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            y = grouped_mm(x, weight, count)
    assert relative(y, by_row(x, weight, count)) < 1e-5
    warnings = [r.getMessage() for r in caplog.records]
    assert len(warnings) == 1 and "D = 6" in warnings[0]
    with pytest.raises(ValueError, match="multiple of 16"):
        grouped_mm(x, weight, count, backend="grouped_mm")


def test_wrong_inputs_are_refused():
    x, weight, count = problem([2, 3], torch.float32)
    with pytest.raises(ValueError, match="counts must be"):
        grouped_mm(x, weight, count[:1])
    with pytest.raises(ValueError, match="cast one"):
        grouped_mm(x, weight.double(), count)
    with pytest.raises(ValueError, match="counts sum"):
        grouped_mm(x, weight, count + 1, backend="loop")
    with pytest.raises(ValueError, match="float64"):
        grouped_mm(x.double(), weight.double(), count, backend="grouped_mm")
