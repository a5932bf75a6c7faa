"""Router losses and counts on shared rows equal their definitions on the expanded positions."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from ling_cases import calls_of, rollouts

from harts_titan.models.common import router_losses
from harts_titan.models.common.moe import RouterOutput
from harts_titan.models.common.tree_inputs import TreeInputs

NUM_EXPERTS, TOP_K, LAYERS = 8, 3, 2


def random_router(num_rows: int, seed: int) -> list[RouterOutput]:
    generator = torch.Generator().manual_seed(seed)
    router = []
    for _ in range(LAYERS):
        logits = torch.randn(num_rows, NUM_EXPERTS, generator=generator, dtype=torch.float64)
        choice = torch.rand(num_rows, NUM_EXPERTS, generator=generator).argsort(dim=1)[:, :TOP_K]
        router.append(RouterOutput(logits.requires_grad_(), choice))
    return router


def by_hand(router, rows_by_trajectory: list[list[int]]) -> tuple[float, float, float, list[list[int]]]:
    """(z, consumer balance, trajectory balance, counts), straight from the definitions, position by position."""
    positions = [row for rows in rows_by_trajectory for row in rows]
    size = len(positions)
    z = consumer = trajectory = 0.0
    counts = []
    for layer in router:
        logits, chosen = layer.logits_TE.tolist(), layer.topk_TA.tolist()

        def balance(rows):
            count, mass = [0] * NUM_EXPERTS, [0.0] * NUM_EXPERTS
            for row in rows:
                for e in chosen[row]:
                    count[e] += 1
                score = [1 / (1 + math.exp(-v)) for v in logits[row]]
                mass = [m + s / sum(score) for m, s in zip(mass, score)]
            n = len(rows)
            return NUM_EXPERTS / (TOP_K * n) * sum(c * m / n for c, m in zip(count, mass)), count

        z += sum(math.log(sum(math.exp(v) for v in logits[row])) ** 2 for row in positions) / size
        value, count = balance(positions)
        consumer += value
        counts.append(count)
        trajectory += sum(balance(rows)[0] * len(rows) / size for rows in rows_by_trajectory)
    return z, consumer, trajectory, counts


@pytest.fixture(params=["compact", "nodewise", "depthwise"])
def case(request):
    tokens, offsets = rollouts(3)
    (layout,) = calls_of(tokens, offsets, request.param)
    inputs = TreeInputs.from_layout(layout)
    bounds = layout.position_offset_N1.tolist()
    rows = layout.row_of_position_S.tolist()
    return inputs, [rows[a:b] for a, b in itertools.pairwise(bounds)]


def test_definitions(case):
    inputs, rows_by_trajectory = case
    router = random_router(inputs.num_rows, 0)
    z, consumer, trajectory, counts = by_hand(router, rows_by_trajectory)
    size = inputs.num_positions
    got = (
        router_losses.z_loss(router, inputs.multiplicity_T, num_positions=size),
        router_losses.load_balancing_loss(router, inputs.multiplicity_T, num_positions=size),
        router_losses.trajectory_load_balancing_loss(router, inputs.statistics, num_positions=size),
    )
    for value, expected in zip(got, (z, consumer, trajectory)):
        assert value.item() == pytest.approx(expected, abs=1e-12)
    counts_LE = router_losses.expert_counts(router, inputs.multiplicity_T)
    assert counts_LE.tolist() == counts
    assert counts_LE.dtype == torch.int64
    assert (counts_LE.sum(dim=1) == TOP_K * size).all()


def test_gradients_equal_those_of_the_expanded_positions(case):
    inputs, rows_by_trajectory = case
    router = random_router(inputs.num_rows, 1)
    logits = [layer.logits_TE for layer in router]
    size = inputs.num_positions

    def expanded(rows):
        index = torch.tensor(rows)
        return [RouterOutput(r.logits_TE[index], r.topk_TA[index]) for r in router], torch.ones_like(index)

    everything, ones = expanded([row for rows in rows_by_trajectory for row in rows])
    single = [(expanded(rows), len(rows)) for rows in rows_by_trajectory]
    pairs = [
        (
            router_losses.z_loss(router, inputs.multiplicity_T, num_positions=size),
            router_losses.z_loss(everything, ones, num_positions=size),
        ),
        (
            router_losses.load_balancing_loss(router, inputs.multiplicity_T, num_positions=size),
            router_losses.load_balancing_loss(everything, ones, num_positions=size),
        ),
        (
            router_losses.trajectory_load_balancing_loss(router, inputs.statistics, num_positions=size),
            sum(router_losses.load_balancing_loss(*rows, num_positions=n) * n / size for rows, n in single),
        ),
    ]
    for got, expected in pairs:
        wanted = torch.autograd.grad(expected, logits, retain_graph=True)
        for g, e in zip(torch.autograd.grad(got, logits), wanted):
            torch.testing.assert_close(g, e, rtol=0, atol=1e-14)


def test_calls_of_one_consumer_add_up():
    tokens, offsets = rollouts(4)
    (whole,) = calls_of(tokens, offsets, "expanded")
    parts = calls_of(tokens, offsets, "expanded", call_capacity=64, reverse=True)
    assert len(parts) > 2
    router = random_router(whole.num_rows, 2)
    at = torch.empty(len(tokens), dtype=torch.int64)
    at[whole.source_position_S] = whole.row_of_position_S
    calls = []
    for layout in parts:
        source = torch.empty(layout.num_rows, dtype=torch.int64)
        source[layout.row_of_position_S] = layout.source_position_S
        index = at[source]
        calls.append(
            (
                [RouterOutput(r.logits_TE[index], r.topk_TA[index]) for r in router],
                TreeInputs.from_layout(layout),
            )
        )
    inputs, size = TreeInputs.from_layout(whole), len(tokens)
    counts = sum(router_losses.expert_counts(r, i.multiplicity_T) for r, i in calls)
    assert torch.equal(counts, router_losses.expert_counts(router, inputs.multiplicity_T))
    summed = [
        sum(router_losses.z_loss(r, i.multiplicity_T, num_positions=size) for r, i in calls),
        sum(
            router_losses.load_balancing_loss(r, i.multiplicity_T, num_positions=size, counts_LE=counts)
            for r, i in calls
        ),
        sum(router_losses.trajectory_load_balancing_loss(r, i.statistics, num_positions=size) for r, i in calls),
    ]
    expected = [
        router_losses.z_loss(router, inputs.multiplicity_T, num_positions=size),
        router_losses.load_balancing_loss(router, inputs.multiplicity_T, num_positions=size),
        router_losses.trajectory_load_balancing_loss(router, inputs.statistics, num_positions=size),
    ]
    for got, value in zip(summed, expected):
        assert got.item() == pytest.approx(value.item(), abs=1e-13)


def test_without_moe_layers_everything_is_zero():
    tokens, offsets = rollouts(5)
    (layout,) = calls_of(tokens, offsets, "compact")
    inputs = TreeInputs.from_layout(layout)
    assert router_losses.z_loss([], inputs.multiplicity_T, num_positions=1).item() == 0
    assert router_losses.load_balancing_loss([], inputs.multiplicity_T, num_positions=1).item() == 0
    assert router_losses.trajectory_load_balancing_loss([], inputs.statistics, num_positions=1).item() == 0
    assert router_losses.expert_counts([], inputs.multiplicity_T, num_experts=4).shape == (0, 4)


def test_bias_moves_against_the_load_and_uses_exact_counts():
    bias = torch.zeros(4)
    # One apart at a size where float32 sees no difference.
    counts = torch.tensor([[2**40 + 1, 2**40, 2**40, 2**40 - 1]])
    router_losses.update_expert_bias([bias], counts, rate=0.5)
    assert bias.tolist() == [-0.5, 0.0, 0.0, 0.5]
    counts = torch.tensor([[10, 20, 30, 20]])
    bias.zero_()
    router_losses.update_expert_bias([bias], counts, rate=0.001)
    torch.testing.assert_close(bias, torch.tensor([0.001, 0.0, -0.001, 0.0]), rtol=0, atol=0)
    with pytest.raises(ValueError, match="int64"):
        router_losses.update_expert_bias([bias], counts.float(), rate=0.001)
