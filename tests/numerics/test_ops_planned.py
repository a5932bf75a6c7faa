"""The ops on layouts of the real planner: runs of the same trajectories in all modes agree."""

import random

import numpy as np
import pytest
import torch

from harts_titan.models.common.tree_inputs import packed_sequences, tree_mask
from harts_titan.ops.attention import tree_attention
from harts_titan.ops.kda import kda
from harts_titan.ops.short_conv import tree_short_conv
from harts_titan.tree import plan_step
from tests.numerics.ops_cases import kda_inputs, relative


def random_trajectories(seed):
    rng, trajectories = random.Random(seed), []
    for _ in range(rng.randint(3, 12)):
        prefix = rng.choice(trajectories) if trajectories and rng.random() < 0.8 else []
        prefix = prefix[: rng.randint(0, len(prefix))]
        trajectories.append(prefix + [rng.randint(0, 3) for _ in range(rng.randint(1, 60))])
    return trajectories


@pytest.mark.parametrize("seed", range(6))
def test_modes_agree(seed):
    trajectories = random_trajectories(seed)
    tokens = np.concatenate([np.array(t, np.int32) for t in trajectories])
    offsets = np.cumsum([0] + [len(t) for t in trajectories])
    prefixes = {}
    prefix_S = torch.tensor(
        [prefixes.setdefault(tuple(t[: i + 1]), len(prefixes)) for t in trajectories for i in range(len(t))]
    )
    # One input row per distinct prefix: shared rows then have equal inputs, as in a model.
    *inputs, A_log, dt_bias = kda_inputs(len(prefixes), seed=seed, dtype=torch.float32)
    weight = torch.randn(12, 4, generator=torch.Generator().manual_seed(seed))
    results = {}
    for mode in ("compact", "expanded", "nodewise", "depthwise"):
        plan = plan_step(tokens, offsets, capacity=400, chunk_size=16, mode=mode)
        out = [torch.full((len(tokens), *shape), torch.nan) for shape in ((2, 5), (2, 5), (12,))]
        for call in (call for consumer in plan.consumers() for call in consumer.calls):
            prefix_T = torch.empty(call.num_rows, dtype=torch.long)
            prefix_T[call.row_of_position_S] = prefix_S[call.source_position_S]
            rows = [x[prefix_T] for x in inputs]
            outputs = (
                kda(*rows, A_log, dt_bias, packed_sequences(call))[0],
                tree_attention(*rows[:3], tree_mask(call), scale=0.4),
                tree_short_conv(rows[0].flatten(1), weight, call.conv_tap_TW),
            )
            for total, part in zip(out, outputs):
                total[call.source_position_S] = part[call.row_of_position_S]
        results[mode] = out
    compact, expanded, nodewise = results["compact"], results["expanded"], results["nodewise"]
    # The same sequences from the same states; only which of them run together differs.
    assert torch.equal(results["depthwise"][0], nodewise[0])
    assert torch.equal(compact[0], expanded[0])
    assert relative(nodewise[0], expanded[0]) < 1e-5
    for run in (compact, nodewise, results["depthwise"]):
        assert torch.equal(run[1], expanded[1])
        assert relative(run[2], expanded[2]) < 1e-6
