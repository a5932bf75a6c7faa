"""Backend ``fla`` of KDA under Triton's interpreter; ``test_fla_op.py`` runs this module as a process of its own."""

from __future__ import annotations

import sys

import torch

import tests.numerics.kernel_checks as checks
import tests.numerics.triton_interpreter  # noqa: F401
from harts_titan.models.common.tree_inputs import TreeInputs, packed_sequences
from harts_titan.models.common.tree_ops import linear_attention
from harts_titan.ops import OpsBackends
from harts_titan.ops.kda import PackedSequences, fla_op, kda, prepare_kda
from tests.numerics.interpreted_run import run_cases

SETTING = checks.Setting("cpu", torch.float32, num_heads=2, key_dim=16, value_dim=32, chunk_size=64)
# Two roots; nodes of one token, ending inside and at a chunk's end, longer than a chunk, three deep.
NODES = [(-1, 70), (0, 7), (0, 64), (2, 1), (2, 3), (-1, 5), (4, 66), (4, 2)]
ROUNDING = 1e-5
"""Of float32: measured errors are below 1e-6."""


def errors_of(sequences: PackedSequences, decay: str) -> dict[str, float]:
    """Relative errors of outputs, states and all gradients against float64 by tokens."""
    x = checks.kda_inputs(sequences.num_path_rows, SETTING, decay, seed=1, num_external=sequences.num_external_states)
    exact_x = [t.detach().double().requires_grad_() for t in x]
    external = (x[7], exact_x[7]) if sequences.num_external_states else (None, None)
    ours = fla_op.kda_fla(*x[:7], sequences, external_state_EHKV=external[0])
    exact = kda(*exact_x[:7], sequences, external_state_EHKV=external[1], backend="recurrent")
    used = 7 + bool(sequences.num_external_states)
    # Different weights of every row and state: a swap is an error.
    generator = torch.Generator().manual_seed(2)
    weights = [torch.randn(t.shape, generator=generator) for t in ours]
    results = []
    for outputs, inputs in ((ours, x), (exact, exact_x)):
        loss = sum((t * w.to(t.dtype)).sum() for t, w in zip(outputs, weights))
        results.append([*outputs, *torch.autograd.grad(loss, inputs[:used])])
    assert [t.shape for t in results[0]] == [t.shape for t in results[1]]
    names = ("o", "exported", *checks.KDA_INPUTS)
    # Sums over rows that may cancel: their errors are measured against the sums of absolute terms.
    df, f, dt_bias = results[1][5], exact_x[3], exact_x[6]
    sums = {"A_log": (df * (f + dt_bias)).abs().sum((0, 2)), "dt_bias": df.abs().sum(0)}
    return {name: checks.relative(a, b, sums.get(name)) for name, a, b in zip(names, *results) if b.numel()}


def modes() -> dict[str, object]:
    report: dict[str, object] = {}
    for mode, rounds in (("nodewise", 8), ("depthwise", 4), ("expanded", 1)):
        layout = checks.layout_of(NODES, 64, mode)
        assert layout.num_rounds == rounds
        sequences = packed_sequences(layout, "cpu")
        calls = fla_op.prepare_calls(sequences)
        assert len(calls.rounds) == rounds and calls.packed_row is None and calls.kept is None
        report[mode] = errors = errors_of(sequences, "slow")
        assert max(errors.values()) < ROUNDING, (mode, errors)
    return report


def by_hand() -> PackedSequences:
    """Zero, external and earlier states in one round, shared by sequences; replay rows; exports in another order."""
    # (initial state, replayed path rows, own rows); path rows 0 and 1 are external, pool rows 0 and 1 as well.
    parts = [
        (1, [0, 1], 66),
        (-1, [], 9),
        (-1, [], 64),
        (-1, [77, 78], 2),
        (3, [], 5),
        (0, [], 1),
        (3, [], 2),
        (3, [143], 1),
        (4, [], 3),
    ]
    packed, kept, cu, own = [], [], [0], 2
    for _, replayed, count in parts:
        kept += range(len(packed) + len(replayed), len(packed) + len(replayed) + count)
        packed += [*replayed, *range(own, own + count)]
        own += count
        cu.append(len(packed))
    return PackedSequences.build(
        chunk_size=64,
        cu_seqlens=cu,
        packed_row=packed,
        kept=kept,
        init_state=[init for init, _, _ in parts],
        export_sequence=[2, 0, 4],
        export_boundary=[1, 2, 1],
        round_ptr=[0, 3, 3, 7, 9],
        num_external_states=2,
        num_path_rows=own,
    )


def shared_and_external_states() -> dict[str, float]:
    sequences = by_hand()
    calls = fla_op.prepare_calls(sequences)
    assert [one.starts.with_zero for one in calls.rounds] == [True, True, False]
    assert calls.packed_row is not None and calls.kept is not None
    errors = errors_of(sequences, "slow")
    assert set(errors) == {"o", "exported", *checks.KDA_INPUTS}
    assert max(errors.values()) < ROUNDING, errors
    return errors


def nothing_to_do() -> None:
    sequences = PackedSequences.build(
        chunk_size=64, cu_seqlens=[0], packed_row=[], kept=[], init_state=[], round_ptr=[0], num_path_rows=3
    )
    x = checks.kda_inputs(3, SETTING, "slow", seed=0)
    o, exported = fla_op.kda_fla(*x[:7], sequences)
    assert o.shape == (0, 2, 32) and exported.shape == (0, 2, 16, 32)
    assert (torch.autograd.grad(o.sum() + exported.sum(), x[2])[0] == 0).all()


def chosen_by_name() -> None:
    """The public entry runs it in 16 bits, and the automatic choice never does."""
    setting = checks.Setting("cpu", torch.float16, num_heads=1, key_dim=16, value_dim=16)
    sequences = packed_sequences(checks.layout_of(NODES, 64, "depthwise"), "cpu")
    x = [t.detach() for t in checks.kda_inputs(sequences.num_path_rows, setting, "slow", seed=0)[:7]]
    calls, called = fla_op.chunk_kda, []
    fla_op.chunk_kda = lambda *args, **kwargs: called.append(kwargs) or calls(*args, **kwargs)
    try:
        ours = kda(*x, sequences, backend="fla")[0]
        rounds = len(called)
        kda(*x, sequences)
    finally:
        fla_op.chunk_kda = calls
    assert rounds == len(called) == 4
    # A final state is asked for where a later round reads one.
    assert [kwargs["output_final_state"] for kwargs in called] == [True, True, True, False]
    assert ours.dtype == torch.float16
    exact = kda(*(t.double() for t in x), sequences, backend="recurrent")[0]
    assert checks.relative(ours, exact) < 3e-3


def tables_are_built_once() -> None:
    """After ``prepare_kda`` no layer builds a table of chunks, forward or backward; one sequence needs none."""
    setting = checks.Setting("cpu", torch.float32, num_heads=1, key_dim=16, value_dim=16)
    build, built = fla_op.prepare_chunk_indices.__wrapped__, []
    globals_of_index = build.__globals__
    arange = globals_of_index["_segmented_arange"]
    globals_of_index["_segmented_arange"] = lambda counts: built.append(counts.numel()) or arange(counts)
    try:
        for mode, sizes in (("nodewise", []), ("depthwise", [2, 2, 2, 2]), ("expanded", [5])):
            sequences = packed_sequences(checks.layout_of(NODES, 64, mode), "cpu")
            del built[:]
            prepare_kda(sequences, dtype=torch.float16, backend="fla")
            assert built == sizes, (mode, built)
            tables = fla_op.prepare_calls(sequences)
            x = checks.kda_inputs(sequences.num_path_rows, setting, "slow", seed=0)
            torch.autograd.grad(fla_op.kda_fla(*x[:7], sequences)[0].sum(), x[:7])
            assert built == sizes, (mode, built)
            assert fla_op.prepare_calls(sequences) is tables
    finally:
        globals_of_index["_segmented_arange"] = arange


def compiled_layers() -> None:
    """One node of a compiled layer, with the values and gradients of the layer uncompiled."""
    setting = checks.Setting("cpu", torch.float16, num_heads=1, key_dim=16, value_dim=16)
    layout = checks.layout_of([(-1, 6), (0, 3), (0, 2)], 64, "depthwise")
    inputs = TreeInputs.from_layout(layout, backends=OpsBackends(kda="fla"))
    x = checks.kda_inputs(layout.num_rows, setting, "slow", seed=0)[:7]

    def layer(*x: torch.Tensor) -> torch.Tensor:
        return linear_attention(*x, inputs=inputs, lower_bound=-5.0) * 2

    results = []
    for run in (layer, torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")):
        o = run(*x)
        results.append([o, *torch.autograd.grad(o.float().square().sum(), x)])
    for a, b in zip(*results):
        assert torch.equal(a, b)


CASES = (
    modes,
    shared_and_external_states,
    nothing_to_do,
    chosen_by_name,
    tables_are_built_once,
    compiled_layers,
)


if __name__ == "__main__":
    run_cases(CASES, sys.argv[1], sys.argv[2:])
