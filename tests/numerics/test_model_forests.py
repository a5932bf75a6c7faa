"""Two hundred random forests: the shared execution equals the expanded one, in numbers and, for the core, in bits."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from tests.forests import Forest, covers_everything, describe, random_forest
from tests.numerics.harness import SMALL, Result, build_model, compare, core_outputs_differ, execute, plan_forest
from tests.oracle import ling as oracle

NUM_FORESTS, GROUP = 200, 10


def case(seed: int) -> tuple[Forest, int]:
    """Forest and chunk size: half of the forests for each, with forks at every offset of a chunk."""
    chunk_size = 4 if seed < NUM_FORESTS // 2 else 8
    # Chains of forks (every third seed) need more trajectories to become deep.
    return random_forest(seed, chunk_size=chunk_size, num_trajectories=9 if seed % 12 == 0 else 6), chunk_size


@pytest.fixture(scope="module")
def models():
    weights = oracle.random_weights(SMALL, 0, decay=0.01)
    return build_model(SMALL, weights), build_model(SMALL, weights, torch.float32)


def routed_alike(one: Result, two: Result, offsets: np.ndarray) -> tuple[torch.Tensor, int]:
    """Positions that, with everything before them, chose the same experts in every layer; number of flips."""
    flipped_S = torch.zeros(int(offsets[-1]), dtype=torch.bool)
    for ours, theirs in zip(one.topk_LSA, two.topk_LSA, strict=True):
        flipped_S |= (ours != theirs).any(1)
    alike_S = torch.ones_like(flipped_S)
    for begin, end in itertools.pairwise(offsets.tolist()):
        alike_S[begin:end] = flipped_S[begin:end].cumsum(0) == 0
    return alike_S, int(flipped_S.sum())


def test_what_follows_a_flipped_choice_is_set_aside():
    topk = torch.tensor([[0, 1], [0, 1], [0, 1], [2, 3], [2, 3]])
    one = Result(torch.zeros(5), torch.zeros(5), topk_LSA=[topk, topk])
    flipped = topk.clone()
    flipped[1] = torch.tensor([0, 2])
    two = Result(torch.zeros(5), torch.zeros(5), topk_LSA=[topk, flipped])
    alike_S, flips = routed_alike(one, two, np.array([0, 3, 5]))
    assert alike_S.tolist() == [True, False, False, True, True]
    assert flips == 1


def test_the_forests_hold_every_shape_that_matters():
    for chunk_size in (4, 8):
        forests = [forest for forest, size in map(case, range(NUM_FORESTS)) if size == chunk_size]
        assert covers_everything(forests, chunk_size) == []


@pytest.mark.parametrize("first", range(0, NUM_FORESTS, GROUP))
def test_compact_equals_expanded(first, models):
    model, model32 = models
    worst = {"logprob": 0.0, "gradient": 0.0, "logprob32": 0.0}
    flips = positions = 0
    for seed in range(first, first + GROUP):
        (tokens, offsets), chunk_size = case(seed)
        compact = plan_forest(tokens, offsets, chunk_size=chunk_size)
        expanded = plan_forest(tokens, offsets, chunk_size=chunk_size, mode="expanded")
        # Sharing that is silently off would pass every comparison below.
        assert compact.stats.executed_rows == describe(tokens, offsets).distinct_tokens < len(tokens), seed

        shared, alone = execute(model, compact, keep_cores=True), execute(model, expanded)
        differences = compare(shared, alone)
        assert differences.logprob <= 1e-10, (seed, differences)
        assert differences.entropy <= 1e-10, (seed, differences)
        assert differences.gradient <= 1e-9, (seed, differences)
        assert differences.router_loss <= 1e-10, (seed, differences)
        assert differences.counts_equal, (seed, differences)
        assert core_outputs_differ(model, compact, shared, expanded) == 0, seed

        shared32 = execute(model32, compact, backward=False, keep_cores=True)
        alone32 = execute(model32, expanded, backward=False)
        alike_S, flipped = routed_alike(shared32, alone32, offsets)
        difference32 = float((shared32.logprob_S - alone32.logprob_S)[alike_S].abs().max())
        assert difference32 <= 1e-5, (seed, difference32)
        assert core_outputs_differ(model32, compact, shared32, expanded) == 0, seed

        flips, positions = flips + flipped, positions + len(tokens)
        found = (differences.logprob, differences.gradient, difference32)
        worst = {name: max(old, new) for (name, old), new in zip(worst.items(), found)}
    print(f"worst differences {worst}; {flips} of {positions} float32 positions chose other experts")  # pytest -rP
    assert flips <= 0.01 * positions
