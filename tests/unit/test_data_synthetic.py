"""The synthetic rollouts: reproducible, tree-shaped with forks inside turns, and learnable."""

from __future__ import annotations

import hashlib
import itertools
import subprocess
import sys

import numpy as np
import pytest
import torch

from harts_titan.data import read_rollouts
from harts_titan.data.synthetic import NUM_SYMBOLS, SyntheticConfig, generate, write_synthetic

DIGEST = "53e5c06272c443c23cd34a87f9bcd3c3580fffd3e836f46a271e42c541fc3266"


def digest(batch):
    return hashlib.sha256(batch.tokens.tobytes() + batch.offsets.tobytes() + batch.loss_mask.tobytes()).hexdigest()


def lcp(a, b):
    size = min(len(a), len(b))
    return int(np.argmin(np.append(a[:size] == b[:size], False)))


def forks(batch):
    """Pairs of lexicographic neighbours that part before either ends: (trajectory, depth of the fork)."""
    order = sorted(range(batch.num_trajectories), key=lambda n: batch.trajectory(n).tolist())
    out = []
    for first, second in itertools.pairwise(order):
        depth = lcp(batch.trajectory(first), batch.trajectory(second))
        if depth < min(batch.lengths[first], batch.lengths[second]):
            out.append((second, depth))
    return order, out


def test_the_default_rollouts_never_change():
    assert digest(generate(SyntheticConfig())) == DIGEST
    assert digest(generate(SyntheticConfig(seed=1))) != DIGEST


def test_the_command_writes_the_same_file_as_the_library(tmp_path):
    command = [sys.executable, "-m", "harts_titan.data.synthetic", "--out", str(tmp_path / "a.jsonl")]
    subprocess.run([*command, "--trajectories", "9", "--seed", "3"], check=True, capture_output=True)
    write_synthetic(tmp_path / "b.jsonl", trajectories=9, seed=3)
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    assert read_rollouts(tmp_path / "a.jsonl", vocab_size=512).num_trajectories == 9


def test_shape_of_the_default_file():
    batch = generate(SyntheticConfig())
    assert batch.num_trajectories == 48 and batch.lengths.min() >= 60 and batch.lengths.max() <= 450
    order, _ = forks(batch)
    distinct = sum(len(batch.trajectory(n)) for n in order) - sum(
        lcp(batch.trajectory(a), batch.trajectory(b)) for a, b in itertools.pairwise(order)
    )
    assert 2_000 < distinct < 5_000 and batch.num_positions / distinct > 2
    assert set(batch.reward.tolist()) == {0.0, 1.0}
    for group in (0, 1, 2):
        assert 0 < batch.reward[batch.group_id == group].mean() < 1, "a group without a mixed reward teaches nothing"
    # A trajectory ends with the message it trains.
    ends = batch.offsets[1:] - 1
    assert batch.loss_mask[ends].all() and (np.add.reduceat(batch.loss_mask, batch.offsets[:-1]) >= 2).all()


def test_forks_lie_inside_trained_messages():
    batch = generate(SyntheticConfig(trajectories=200))
    _, pairs = forks(batch)
    mask = batch.loss_mask
    inside = [d for n, d in pairs if mask[batch.offsets[n] + d - 1 : batch.offsets[n] + d + 1].all()]
    assert len(inside) >= 20 and len({depth % 64 for depth in inside}) >= 10


def test_histories_of_an_episode_extend_each_other():
    batch = generate(SyntheticConfig())
    for n in range(1, batch.num_trajectories):
        if batch.episode_id[n] == batch.episode_id[n - 1]:
            before = batch.trajectory(n - 1)
            assert np.array_equal(before, batch.trajectory(n)[: len(before)])
            assert batch.step[n] == batch.step[n - 1] + 1


@pytest.mark.parametrize("vocab_size", [NUM_SYMBOLS, 512, 4096])
def test_ids_are_spread_below_the_vocabulary(vocab_size):
    batch = generate(SyntheticConfig(vocab_size=vocab_size))
    assert 0.9 * (vocab_size - vocab_size % NUM_SYMBOLS) - vocab_size // NUM_SYMBOLS < batch.tokens.max() < vocab_size


def test_settings_are_checked():
    with pytest.raises(ValueError, match=rf"vocab_size \(91\) must be at least {NUM_SYMBOLS}"):
        SyntheticConfig(vocab_size=91)
    with pytest.raises(ValueError, match="trajectories must be at least 1, got 0"):
        SyntheticConfig(trajectories=0)


def test_logprobs_are_those_of_the_process():
    batch = generate(SyntheticConfig(trajectories=400, logprobs=True))
    assert (batch.logprobs[~batch.loss_mask] == 0).all() and (batch.logprobs[batch.loss_mask] <= 0).all()
    assert 0.4 < -batch.logprobs[batch.loss_mask].mean() < 0.9
    order, _ = forks(batch)
    compared = 0
    for m, n in itertools.pairwise(order):
        depth = lcp(batch.trajectory(m), batch.trajectory(n))
        one, two = (slice(batch.offsets[k], batch.offsets[k] + depth) for k in (m, n))
        both = batch.loss_mask[one] & batch.loss_mask[two]
        assert np.array_equal(batch.logprobs[one][both], batch.logprobs[two][both]), "it depends on the history alone"
        if depth < min(batch.lengths[m], batch.lengths[n]) and both[-1]:
            # Two different continuations of one history share its probability.
            assert np.exp(batch.logprobs[[one.stop, two.stop]]).sum() <= 1 + 1e-6
            compared += 1
    assert compared >= 10


def test_twenty_steps_of_a_bigram_model_learn_most_of_it():
    batch = generate(SyntheticConfig())
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(512, 64), torch.nn.Linear(64, 512))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    token_S, label_S = torch.from_numpy(batch.tokens).long(), torch.from_numpy(batch.labels)
    mask_S = torch.from_numpy(batch.label_mask)
    losses = []
    for _ in range(21):
        loss = torch.nn.functional.cross_entropy(model(token_S[mask_S]), label_S[mask_S])
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.6 * losses[0]
