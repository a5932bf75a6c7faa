"""The checks can fail: each named fault, put in on purpose, is caught by the check that is there to catch it.

A fault is a corrupted layout or a patched function. The same checks pass on the untouched product, forest by forest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

import harts_titan.ops.kda.reference as kda_reference
from harts_titan.tree import CallLayout, StepPlan, sorted_step
from tests.forests import Forest, describe, random_forest
from tests.numerics.harness import (
    SMALL,
    Differences,
    build_model,
    compare,
    core_outputs_differ,
    execute,
    plan_forest,
)
from tests.oracle import ling as oracle

CHUNK = 4
SEEDS = (1, 6, 13)


@pytest.fixture(scope="module")
def model():
    return build_model(SMALL, oracle.random_weights(SMALL, 0, decay=0.01))


@pytest.fixture(scope="module")
def reference(model):
    """Each forest with its expanded plan and the result of the expanded run, made before any fault is put in."""
    forests = [random_forest(seed, chunk_size=CHUNK) for seed in SEEDS]
    plans = [plan_forest(*forest, chunk_size=CHUNK, mode="expanded") for forest in forests]
    return [(forest, plan, execute(model, plan)) for forest, plan in zip(forests, plans)]


def failures(differences: Differences) -> set[str]:
    """Names of the checks of ``test_model_forests`` that fail."""
    bars = {"logprob": 1e-10, "entropy": 1e-10, "gradient": 1e-9, "router_loss": 1e-10}
    failed = {name for name, bar in bars.items() if not getattr(differences, name) <= bar}
    return failed if differences.counts_equal else failed | {"counts"}


def checked(
    model, forest: Forest, expanded: StepPlan, alone, *, mode="compact", mutate=None, backward=True
) -> set[str]:
    """Plan and run a forest the shared way and return the names of the checks that fail against the expanded run."""
    plan = plan_forest(*forest, chunk_size=CHUNK, mode=mode)
    shared = execute(model, plan, keep_cores=True, mutate=mutate, backward=backward)
    if not backward:
        gradients, router = alone.gradients, (alone.z, alone.balance, alone.trajectory_balance)
        shared = dataclasses.replace(shared, gradients=gradients)
        shared.z, shared.balance, shared.trajectory_balance = router
    failed = failures(compare(shared, alone))
    if core_outputs_differ(model, plan, shared, expanded):
        failed.add("core_bits")
    if plan.stats.executed_rows != describe(*forest).distinct_tokens:
        failed.add("rows")
    return failed


def test_every_check_passes_without_a_fault(model, reference):
    for forest, expanded, alone in reference:
        assert checked(model, forest, expanded, alone) == set()


# --------------------------------------------------------------------------------------------- faults of the layout
def replay_dropped(layout: CallLayout) -> CallLayout:
    """Sequences start from the state at their anchor and go on with their own tokens, without repeating the rest."""
    changed = layout.clone()
    own_P = torch.zeros(layout.packed_row_P.numel(), dtype=torch.bool)
    own_P[layout.kept_T] = True
    length_Q = torch.diff(layout.cu_seqlens_Q1) - layout.replay_Q
    changed.packed_row_P = layout.packed_row_P[own_P]
    changed.kept_T = torch.arange(layout.num_rows)
    changed.cu_seqlens_Q1 = torch.cat([torch.zeros(1, dtype=torch.int64), length_Q.cumsum(0)])
    changed.replay_Q = torch.zeros_like(layout.replay_Q)
    num_chunks_E = -(-length_Q[layout.export_sequence_E] // layout.chunk_size)
    changed.export_boundary_E = torch.minimum(layout.export_boundary_E, num_chunks_E)
    return changed


def taps_from_memory(layout: CallLayout) -> CallLayout:
    """The convolution reads the rows in front of a row in memory, whatever path they belong to."""
    changed = layout.clone()
    row_T = torch.arange(layout.num_rows)
    taps = layout.conv_tap_TW.shape[1]
    neighbours = torch.stack([row_T - j for j in range(taps - 1, -1, -1)], dim=1)
    changed.conv_tap_TW = torch.where(layout.conv_tap_TW < 0, -1, neighbours)
    return changed


def multiplicity_one(layout: CallLayout) -> CallLayout:
    """Router statistics count rows, not the positions that share them."""
    changed = layout.clone()
    changed.multiplicity_T = torch.ones_like(layout.multiplicity_T)
    return changed


def fork_positions(layout: CallLayout) -> list[list[int]]:
    """For each row followed by more than one token: its labelled positions, in position order."""
    by_row: dict[int, list[int]] = {}
    for position, (row, label) in enumerate(zip(layout.row_of_position_S.tolist(), layout.label_S.tolist())):
        if label >= 0:
            by_row.setdefault(row, []).append(position)
    return [p for p in by_row.values() if len({int(layout.label_S[i]) for i in p}) > 1]


def labels_shifted_at_fork(layout: CallLayout) -> CallLayout:
    """Every position on a fork's row gets the next one's label, as if the row were followed in another order."""
    changed = layout.clone()
    changed.label_S = layout.label_S.clone()
    for positions in fork_positions(layout):
        changed.label_S[positions] = layout.label_S[positions].roll(1)
    return changed


def one_label_per_row(layout: CallLayout) -> CallLayout:
    """A row has the label of the first trajectory through it."""
    changed = layout.clone()
    changed.label_S = layout.label_S.clone()
    for positions in fork_positions(layout):
        changed.label_S[positions] = layout.label_S[positions[0]]
    return changed


def first_token_unsupervised(layout: CallLayout) -> CallLayout:
    """The first token after a fork is not predicted by anything."""
    changed = layout.clone()
    changed.label_S = layout.label_S.clone()
    for positions in fork_positions(layout):
        changed.label_S[positions] = -100
    return changed


LAYOUT_FAULTS: dict[str, tuple[Callable[[CallLayout], CallLayout], set[str], set[str]]] = {
    # name: fault, checks that must fail, checks that must still pass
    "replay dropped": (replay_dropped, {"core_bits", "logprob", "gradient"}, set()),
    "convolution taps from the memory neighbour": (taps_from_memory, {"logprob", "gradient"}, {"core_bits"}),
    "multiplicity 1": (multiplicity_one, {"counts", "router_loss", "gradient"}, {"logprob", "core_bits"}),
    "labels shifted at a fork": (labels_shifted_at_fork, {"logprob", "gradient"}, {"entropy", "counts"}),
    "one label per row": (one_label_per_row, {"logprob", "gradient"}, {"entropy", "counts"}),
    "a fork's first token unsupervised": (first_token_unsupervised, {"logprob", "gradient"}, {"entropy", "counts"}),
}


@pytest.mark.parametrize("name", LAYOUT_FAULTS)
def test_fault_of_the_layout_is_caught(name, model, reference):
    fault, must_fail, must_pass = LAYOUT_FAULTS[name]
    for forest, expanded, alone in reference:
        failed = checked(model, forest, expanded, alone, mutate=fault)
        assert must_fail <= failed, failed
        assert not must_pass & failed, failed


def test_replay_is_what_makes_the_core_equal_to_the_bit(model, reference):
    """Handing the state over at the fork instead of replaying the chunk is right in numbers, but not to the bit."""
    for forest, expanded, alone in reference:
        failed = checked(model, forest, expanded, alone, mode="nodewise")
        assert failed == {"core_bits"}, failed


# ------------------------------------------------------------------------------------------- faults of the operations
def test_gradient_of_exported_states_cut_is_caught(model, reference, monkeypatch):
    monkeypatch.setattr(kda_reference, "_injected", lambda dpool, row, dstate: dstate)
    for forest, expanded, alone in reference:
        assert checked(model, forest, expanded, alone) == {"gradient"}


def test_state_leaked_into_the_next_sequence_is_caught(model, reference, monkeypatch):
    exact = kda_reference.next_state
    last: list[Tensor] = []

    def leaky(state_HKV, *terms):
        if last and not state_HKV.any():  # a sequence that starts at a root
            state_HKV = last[0]
        last[:] = [exact(state_HKV, *terms)]
        return last[0]

    monkeypatch.setattr(kda_reference, "next_state", leaky)
    for forest, expanded, alone in reference:
        last.clear()
        failed = checked(model, forest, expanded, alone, backward=False)
        assert {"logprob", "core_bits"} <= failed, failed


@pytest.mark.parametrize("shift", [1, -1])
def test_common_prefix_off_by_one_is_caught(shift, model, reference, monkeypatch):
    exact = sorted_step.sort_trajectories

    def shifted(tokens: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        order_N, lcp_N = exact(tokens, offsets)
        length_N = np.diff(offsets)[order_N]
        # Shared too far, or not far enough, where the shifted prefix still ends inside both trajectories.
        inside_N = (lcp_N > 0) & (lcp_N + 1 < np.minimum(length_N, np.roll(length_N, 1)))
        return order_N, lcp_N + shift * inside_N

    monkeypatch.setattr(sorted_step, "sort_trajectories", shifted)
    for (tokens, offsets), expanded, alone in reference:
        failed = checked(model, (tokens, offsets), expanded, alone)
        # A token too many gives one trajectory another's token; a token too few computes shared tokens twice.
        assert ({"logprob", "rows"} if shift > 0 else {"rows"}) <= failed, failed
        with pytest.raises(ValueError, match="invariant"):
            plan_forest(tokens, offsets, chunk_size=CHUNK).validate(tokens, offsets)
