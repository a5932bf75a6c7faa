"""The ops on layouts of the real planner: compact, expanded and nodewise runs of the same trajectories agree."""

import random

import numpy as np
import pytest
import torch

from harts_titan.ops.attention import TreeMask, tree_attention
from harts_titan.ops.kda import PackedSequences, kda
from harts_titan.ops.short_conv import tree_short_conv
from harts_titan.tree import plan_step
from tests.numerics.ops_cases import kda_inputs, relative


def sequences_of(call):
    return PackedSequences.build(
        chunk_size=call.chunk_size,
        cu_seqlens=call.cu_seqlens_Q1,
        packed_row=call.packed_row_P,
        kept=call.kept_T,
        init_state=call.init_state_Q,
        export_sequence=call.export_sequence_E,
        export_boundary=call.export_boundary_E,
        round_ptr=call.round_ptr_R1,
        num_external_states=call.num_external_states,
        num_path_rows=call.parent_Y.numel(),
    )


def mask_of(call):
    return TreeMask.build(
        tin=call.tin_Y,
        tout=call.tout_Y,
        seg_parent=call.seg_parent_V,
        seg_start=call.seg_start_V,
        seg_length=call.seg_length_V,
        seg_row=call.seg_row_V,
        seg_attach=call.seg_attach_V,
        num_external_rows=call.num_external_rows,
    )


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
    for mode in ("compact", "expanded", "nodewise"):
        plan = plan_step(tokens, offsets, capacity=400, chunk_size=16, mode=mode)
        out = [torch.full((len(tokens), *shape), torch.nan) for shape in ((2, 5), (2, 5), (12,))]
        for call in (call for consumer in plan.consumers() for call in consumer.calls):
            prefix_T = torch.empty(call.num_rows, dtype=torch.long)
            prefix_T[call.row_of_position_S] = prefix_S[call.source_position_S]
            rows = [x[prefix_T] for x in inputs]
            outputs = (
                kda(*rows, A_log, dt_bias, sequences_of(call))[0],
                tree_attention(*rows[:3], mask_of(call), scale=0.4),
                tree_short_conv(rows[0].flatten(1), weight, call.conv_tap_TW),
            )
            for total, part in zip(out, outputs):
                total[call.source_position_S] = part[call.row_of_position_S]
        results[mode] = out
    compact, expanded, nodewise = results["compact"], results["expanded"], results["nodewise"]
    assert torch.equal(compact[0], expanded[0])
    assert relative(nodewise[0], expanded[0]) < 1e-5
    for run in (compact, nodewise):
        assert torch.equal(run[1], expanded[1])
        assert relative(run[2], expanded[2]) < 1e-6
