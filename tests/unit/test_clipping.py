"""Clipping in two halves against torch's own, which does it in one."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from harts_titan.parallel.clipping import clip_gradients, gradient_norm

DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu])]
DTYPES = {
    "float64": [torch.float64],
    "float32": [torch.float32],
    "bfloat16": [torch.bfloat16],
    "bfloat16_and_float32": [torch.bfloat16, torch.float32],
}


def parameters(dtypes: list[torch.dtype], scale: float, device: str = "cpu") -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(5)
    out = []
    for i, shape in enumerate([(7, 33), (1,), (129,), (3, 5, 11), (64, 64)]):
        parameter = nn.Parameter(torch.zeros(shape, dtype=dtypes[i % len(dtypes)], device=device))
        grad = scale * torch.randn(shape, generator=generator, dtype=torch.float64)
        parameter.grad = grad.to(device=device, dtype=parameter.dtype)
        out.append(parameter)
    return [*out, nn.Parameter(torch.zeros(3, device=device))]


@pytest.mark.parametrize("scale", [1.0, 1e-3], ids=["above", "below"])
@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
def test_bits_of_torch_on_the_cpu(dtypes, scale):
    ours, theirs = parameters(dtypes, scale), parameters(dtypes, scale)
    before = copy.deepcopy([p.grad for p in ours])
    norm = gradient_norm(ours)
    expected = torch.nn.utils.clip_grad_norm_(theirs, 1.0)
    assert torch.equal(norm, expected)
    assert norm.dtype == expected.dtype
    clip_gradients(ours, norm, 1.0)
    for a, b in zip(ours[:-1], theirs[:-1], strict=True):
        assert torch.equal(a.grad, b.grad)
    assert ours[-1].grad is None
    unchanged = [torch.equal(p.grad, grad) for p, grad in zip(ours, before) if grad is not None]
    assert all(unchanged) if scale < 1 else not any(unchanged)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
def test_every_gradient_is_scaled_by_one_factor_and_rounded_once(dtypes, device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    ours = parameters(dtypes, 1.0, device)
    before = [p.grad.double().clone() for p in ours[:-1]]
    norm = gradient_norm(ours)
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    torch.testing.assert_close(norm.double(), torch.cat([g.flatten() for g in before]).norm(), rtol=2 * eps, atol=0.0)
    clip_gradients(ours, norm, 0.5)
    factor = float(0.5 / (norm + 1e-6))
    for parameter, grad in zip(ours, before):
        wide = torch.promote_types(parameter.dtype, torch.float32)
        assert torch.equal(parameter.grad, (grad.to(wide) * factor).to(parameter.dtype))
