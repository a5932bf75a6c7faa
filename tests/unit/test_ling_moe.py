"""Routing, dispatch and experts against plain loops."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from harts_titan.models.common.feed_forward import FeedForward, swiglu
from harts_titan.models.common.moe import GroupedExperts, MoE, Router
from harts_titan.ops.moe import build_routes, combine, dispatch, select_experts


def choose_by_hand(biased: list[float], num_groups: int, top_groups: int, top_k: int) -> list[int]:
    size = len(biased) // num_groups
    groups = [sorted(biased[g * size : (g + 1) * size], reverse=True) for g in range(num_groups)]
    best = sorted(range(num_groups), key=lambda g: (-sum(groups[g][:2]), g))[:top_groups]
    eligible = [e for e in range(len(biased)) if e // size in best]
    return sorted(eligible, key=lambda e: (-biased[e], e))[:top_k]


@pytest.mark.parametrize(
    ("num_groups", "top_groups", "top_k"), [(4, 2, 4), (4, 4, 4), (1, 1, 3), (16, 5, 5), (2, 1, 8)]
)
def test_choice_equals_sorting_by_hand_with_ties(num_groups, top_groups, top_k):
    generator = torch.Generator().manual_seed(0)
    # Few distinct values: ties between experts and between groups in almost every row.
    biased_TE = torch.randint(0, 3, (200, 16), generator=generator).double() / 4
    got = select_experts(biased_TE, num_groups=num_groups, top_groups=top_groups, top_k=top_k)
    assert got.tolist() == [choose_by_hand(row, num_groups, top_groups, top_k) for row in biased_TE.tolist()]


def test_all_equal_scores_choose_the_lowest_indices():
    got = select_experts(torch.zeros(3, 16), num_groups=4, top_groups=2, top_k=4)
    assert got.tolist() == [[0, 1, 2, 3]] * 3


def small_moe(dtype=torch.float64, *, limit: float = 0.0, shared: bool = True) -> MoE:
    torch.manual_seed(0)
    router = Router(8, 16, top_k=4, num_groups=4, top_groups=2, route_scale=2.5)
    experts = GroupedExperts(8, 16, 16, limit=limit)
    moe = MoE(router, experts, FeedForward(8, 16, limit=limit) if shared else None).to(dtype)
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64))
        router.expert_bias.copy_(torch.randn(16) * 0.2)
    return moe


def moe_by_hand(moe: MoE, x_TD: torch.Tensor, limit: float) -> torch.Tensor:
    rows = []
    for x in x_TD:
        score = torch.sigmoid(moe.router.gate.weight @ x)
        chosen = choose_by_hand((score + moe.router.expert_bias).tolist(), 4, 2, 4)
        weight = score[chosen] / (score[chosen].sum() + 1e-20) * 2.5
        parts = []
        for w, e in zip(weight, chosen):
            gate, up = moe.experts.w1[e] @ x, moe.experts.w3[e] @ x
            act = F.silu(gate)
            if limit:
                act, up = act.clamp(max=limit), up.clamp(-limit, limit)
            parts.append(w * (moe.experts.w2[e] @ (act * up)))
        shared = moe.shared_experts(x[None])[0] if moe.shared_experts is not None else 0.0
        rows.append(sum(parts) + shared)
    return torch.stack(rows)


@pytest.mark.parametrize("limit", [0.0, 0.5])
def test_layer_and_gradients_equal_loops_over_experts(limit):
    moe = small_moe(limit=limit)
    x_TD = torch.randn(21, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(21, 8, dtype=torch.float64)
    y_TD, routed = moe(x_TD)
    inputs = [x_TD, *moe.parameters()]
    got = torch.autograd.grad((y_TD * weight).sum(), inputs)
    expected_TD = moe_by_hand(moe, x_TD, limit)
    expected = torch.autograd.grad((expected_TD * weight).sum(), inputs)
    torch.testing.assert_close(y_TD, expected_TD, rtol=0, atol=1e-11)
    for g, e in zip(got, expected):
        torch.testing.assert_close(g, e, rtol=0, atol=1e-9)
    assert routed.logits_TE.dtype == torch.float64
    assert routed.topk_TA.dtype == torch.int64


def test_clamp_is_the_published_one_and_matters():
    gate, up = torch.tensor([9.0, -9.0, 1.0]), torch.tensor([-9.0, 9.0, 0.5])
    expected = F.silu(gate).clamp(max=4.0) * up.clamp(-4.0, 4.0)
    assert torch.equal(swiglu(gate, up, 4.0), expected)
    assert not torch.equal(swiglu(gate, up, 0.0), expected)
    x = torch.randn(5, 8, dtype=torch.float64)
    assert not torch.allclose(small_moe(limit=0.5)(x)[0], small_moe()(x)[0])


def test_no_rows():
    moe = small_moe()
    x_TD = torch.zeros(0, 8, dtype=torch.float64, requires_grad=True)
    y_TD, routed = moe(x_TD)
    assert y_TD.shape == (0, 8)
    assert routed.topk_TA.shape == (0, 4)
    y_TD.sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in moe.parameters())
    assert moe.experts.w1.grad is not None, "every rank must see a gradient of every expert"


def test_rows_come_back_to_where_they_were():
    topk_TA = torch.tensor([[2, 0], [0, 2], [2, 1], [1, 0]])
    routes = build_routes(topk_TA, 4)
    assert routes.counts_E.tolist() == [3, 2, 3, 0]
    x_TD = torch.arange(4.0)[:, None]
    assert dispatch(x_TD, routes).flatten().tolist() == [0, 1, 3, 2, 3, 0, 1, 2]
    expert_R = torch.repeat_interleave(torch.arange(4), routes.counts_E).double()[:, None]
    weight_TA = torch.tensor([[1.0, 10.0], [1.0, 10.0], [1.0, 10.0], [1.0, 10.0]], dtype=torch.float64)
    assert combine(expert_R, weight_TA, routes).flatten().tolist() == [2.0, 20.0, 12.0, 1.0]


def test_dispatch_and_combine_gradients():
    topk_TA = torch.tensor([[2, 0, 5], [0, 2, 1], [2, 1, 3]])
    routes = build_routes(topk_TA, 6)
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    y = torch.randn(9, 2, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a: dispatch(a, routes), (x,))
    assert torch.autograd.gradcheck(lambda a, w: combine(a, w, routes), (y, weight))


def test_bias_stays_float32_and_steers_the_choice_only():
    moe = small_moe()
    x_TD = torch.randn(6, 8, dtype=torch.float64)
    with torch.no_grad():
        routed, weight = moe.router(x_TD)
        moe.router.expert_bias[:] = 0
        moe.router.expert_bias[13] = 10.0
        biased, biased_weight = moe.router(x_TD)
        repeated, repeated_weight = moe.router(x_TD, routed.topk_TA)
    assert (biased.topk_TA == 13).any(dim=1).all()
    assert torch.equal(biased.logits_TE, routed.logits_TE)
    assert torch.equal(repeated.topk_TA, routed.topk_TA)
    assert torch.equal(repeated_weight, weight)
    torch.testing.assert_close(biased_weight.sum(dim=1), torch.full((6,), 2.5, dtype=torch.float64))
    for dtype in (torch.bfloat16, torch.float64, torch.float32):
        moe.to(dtype)
        assert moe.router.expert_bias.dtype == torch.float32
        assert moe.router.gate.weight.dtype == dtype
    # 16-bit activations still get float32 logits.
    moe.to(torch.bfloat16)
    assert moe(x_TD.bfloat16())[1].logits_TE.dtype == torch.float32
