import pytest
import torch
import torch.nn.functional as F

from harts_titan.ops.short_conv import ConvTaps, tree_short_conv
from tests.numerics.ops_cases import TreeCase, random_case, relative, taps_of

# Forks after one or two tokens: some paths are shorter than the filter, and taps cross several segments.
SHORT = TreeCase([(-1, 1), (0, 1), (0, 2), (1, 1), (3, 1), (3, 5), (2, 1), (-1, 2), (7, 1)], 4)
CASES = [SHORT, random_case(0, 4, 12), random_case(1, 16, 8)]


def along_paths(x, weight, case):
    """torch's own convolution on every root-to-leaf path."""
    num_taps, y = weight.shape[1], {}
    for leaf in case.leaves:
        rows = case.rows(leaf)
        signal = F.pad(x[rows].t()[None], (num_taps - 1, 0))
        out = F.silu(F.conv1d(signal, weight[:, None], groups=weight.shape[0]))[0].t()
        y.update(zip(rows.tolist(), out))
    return torch.stack([y[r] for r in range(case.num_rows)])


@pytest.mark.parametrize("num_taps", [1, 2, 4, 5])
@pytest.mark.parametrize("case", CASES)
def test_forward_and_gradients_match_conv1d_on_each_path(case, num_taps):
    g = torch.Generator().manual_seed(0)
    x, w, dy = (torch.randn(*s, generator=g).double() for s in ((case.num_rows, 6), (6, num_taps), (case.num_rows, 6)))
    x.requires_grad_(), w.requires_grad_()
    y = tree_short_conv(x, w, ConvTaps(case.taps(num_taps), case.num_rows))
    assert torch.equal(y, tree_short_conv(x, w, case.taps(num_taps)))
    want = along_paths(x, w, case)
    assert relative(y, want) < 1e-12
    for a, b in zip(torch.autograd.grad(y, (x, w), dy), torch.autograd.grad(want, (x, w), dy)):
        assert relative(a, b) < 1e-12


def test_rows_beyond_the_own_rows_are_external_context():
    parent = torch.tensor([-1, 0, 1, 2, 3, 3])
    x, w = torch.randn(6, 3, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    taps = taps_of(parent, 4)
    whole = tree_short_conv(x, w, taps)
    assert relative(tree_short_conv(x, w, taps[2:]), whole[2:]) < 1e-14


def test_a_branch_cannot_touch_the_others():
    case = CASES[1]
    x, w = torch.randn(case.num_rows, 8), torch.randn(8, 4)
    rows = case.own(case.leaves[0])
    others = torch.ones(case.num_rows, dtype=torch.bool)
    others[rows] = False
    changed = x.clone()
    changed[rows] = 9.0
    taps = case.taps(4)
    assert torch.equal(tree_short_conv(x, w, taps)[others], tree_short_conv(changed, w, taps)[others])


def test_bfloat16_accumulates_in_float32():
    case = CASES[2]
    x, w = torch.randn(case.num_rows, 8).bfloat16(), torch.randn(8, 4)
    y = tree_short_conv(x, w, case.taps(4))
    assert y.dtype == torch.bfloat16
    assert relative(y, along_paths(x.double(), w.double(), case)) < 2**-8


def test_no_rows_and_wrong_shapes():
    x, w = torch.zeros(0, 3, requires_grad=True), torch.ones(3, 4, requires_grad=True)
    y = tree_short_conv(x, w, torch.zeros(0, 4, dtype=torch.long))
    y.sum().backward()
    assert y.shape == (0, 3) and w.grad.abs().sum() == 0
    with pytest.raises(ValueError, match="num_taps = 4"):
        tree_short_conv(x, w, torch.zeros(0, 3, dtype=torch.long))
    with pytest.raises(ValueError, match="x has 0 rows, the taps are those of 5 path rows"):
        tree_short_conv(x, w, ConvTaps(torch.zeros(0, 4, dtype=torch.long), 5))
    with pytest.raises(ValueError, match="weight"):
        tree_short_conv(x, torch.ones(2, 4), torch.zeros(0, 4, dtype=torch.long))
