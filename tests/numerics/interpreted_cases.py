"""Kernel checks under Triton's interpreter; ``test_triton_interpret.py`` runs this module as a process of its own."""

from __future__ import annotations

import sys

import numpy as np
import torch
import torch._dynamo.testing

import tests.numerics.kernel_checks as checks
import tests.numerics.triton_interpreter  # noqa: F401
from harts_titan.models.common.tree_inputs import packed_sequences
from harts_titan.ops.kda import PackedSequences, kda, prepare_kda
from harts_titan.ops.kda.triton_op import kda_triton, prepare_tables
from harts_titan.ops.short_conv import ConvTaps, prepare_short_conv, tree_short_conv, triton_op
from harts_titan.ops.short_conv.taps import chain_tables
from harts_titan.ops.short_conv.triton_op import tree_short_conv_triton
from tests.numerics import kda_checks
from tests.numerics.interpreted_run import run_cases

# Forks inside a chunk, at a chunk boundary and three deep; two rounds, replay rows, one exported state shared by two.
TREE = [(-1, 38), (0, 15), (0, 26), (2, 5), (2, 10), (1, 3)]
# Two roots; nodes that end inside a chunk, one token long, and longer than a chunk.
NODES = [(-1, 34), (0, 7), (0, 33), (2, 1), (2, 3), (-1, 5)]
COMPILED = [
    [(-1, 34), (0, 31), (0, 32), (1, 32), (1, 4), (3, 3), (3, 5)],
    [(-1, 32), (0, 33), (0, 2), (1, 1), (1, 2), (1, 3)],
    [(-1, 40), (0, 33), (0, 27), (1, 5), (1, 2), (2, 8), (2, 3), (3, 9), (3, 4)],
]
EXTREME = [(torch.float32, 64, -5.0), (torch.float16, 64, -5.0), (torch.float32, 32, -2.0)]
HALF = checks.Setting("cpu", torch.float16, num_heads=1, chunk_size=32)


def kda_tree_equals_fla() -> dict[str, object]:
    layout = checks.layout_of(TREE, 32)
    assert layout.num_rounds > 1 and layout.packed_row_P.shape[0] > layout.num_rows
    return checks.check_kda(
        packed_sequences(layout, "cpu"), HALF, decay="slow", trajectories=checks.trajectories_of(layout)
    )


def kda_handed_in_state() -> dict[str, object]:
    setting = checks.Setting("cpu", torch.float32, num_heads=2, key_dim=16, value_dim=32, chunk_size=32)
    with checks.filled_allocations():
        return checks.check_kda(checks.handed_in(32, "cpu"), setting, decay="slow")


def kda_prefix_and_continuation() -> dict[str, object]:
    result = checks.check_kda_prefix(HALF, length=70, cuts=[1, 31, 33])
    # The exported state is the carried one: a rounded copy would change the continuation.
    assert result["continuation_from_rounded_state_differs"]
    # Two blocks of 32 rows share a chunk.
    wide = checks.Setting("cpu", torch.float32, num_heads=1, key_dim=64, value_dim=32, chunk_size=64)
    return {"32 rows": result, "64 rows": checks.check_kda_prefix(wide, length=101, cuts=[1, 31, 32, 33, 63, 64, 65])}


def kda_extreme_gates() -> dict[str, object]:
    """Decays at both ends of the range, in turns and over whole chunks: no factor leaves the range of a float32."""
    result: dict[str, object] = {}
    for dtype, chunk, lower_bound in EXTREME:
        setting = checks.Setting(
            "cpu", dtype, num_heads=1, key_dim=64, value_dim=32, chunk_size=chunk, lower_bound=lower_bound
        )
        name = f"{dtype} {chunk} {lower_bound}"
        result[name] = kda_checks.check_extreme_gates(setting)
        kda_checks.check_constant_gates(setting)
    return result


def kda_separate_calls() -> dict[str, object]:
    """Node-wise and depth-wise runs are one call a round, with the bits of the kernels over all rounds."""
    setting = checks.Setting("cpu", torch.float32, num_heads=1, key_dim=16, value_dim=32, chunk_size=32)
    result: dict[str, object] = {}
    for mode, rounds in (("nodewise", 6), ("depthwise", 3)):
        layout = checks.layout_of(NODES, 32, mode)
        assert layout.num_rounds == rounds
        kda_checks.check_separate_calls(layout, setting, "slow")
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
            result[f"launches of {mode}"] = kda_checks.check_launch_order(layout, setting)
        ranges = {event.key for event in recorded.key_averages() if event.key.startswith("harts::")}
        assert ranges == {f"harts::round{r}{end}" for r in range(rounds) for end in ("", "_backward")}, ranges
        sequences = packed_sequences(layout, "cpu")
        x = [t.detach().requires_grad_() for t in checks.kda_inputs(sequences.num_path_rows, setting, "slow", seed=1)]
        exact_x = [t.detach().double().requires_grad_() for t in x]
        run = kda_triton(*x[:7], sequences), kda(*exact_x[:7], sequences, backend="recurrent")
        losses = [o.square().sum() + states.square().sum() for o, states in run]
        grads = [torch.autograd.grad(loss, y[:7]) for loss, y in zip(losses, (x, exact_x))]
        errors = [checks.relative(a, b) for a, b in zip((*run[0], *grads[0]), (*run[1], *grads[1]))]
        assert max(errors) < 1e-5, errors
        result[f"errors of {mode}"] = errors
    # No planner asks for separate calls with replay; the op would allow it.
    compact, expanded = (checks.layout_of(NODES, 32, mode) for mode in ("compact", "expanded"))
    assert compact.num_rounds > 1 and compact.replay_Q.any()
    kda_checks.check_separate_calls(compact, setting, "slow")
    assert not any(packed_sequences(layout, "cpu").separate_calls for layout in (compact, expanded))
    return result


def kda_nothing_to_do() -> dict[str, object]:
    sequences = PackedSequences.build(
        chunk_size=32, cu_seqlens=[0], packed_row=[], kept=[], init_state=[], round_ptr=[0], num_path_rows=3
    )
    x = checks.kda_inputs(3, HALF, "slow", seed=0)
    o, exported = kda_triton(*x[:7], sequences)
    assert o.shape == (0, 1, 64) and exported.shape == (0, 1, 64, 64)
    grads = torch.autograd.grad(o.sum() + exported.sum(), x[:7])
    assert all((g == 0).all() for g in grads)
    return {}


def kda_refuses() -> dict[str, object]:
    sequences = checks.handed_in(32, "cpu")
    x = checks.kda_inputs(sequences.num_path_rows, HALF, "slow", seed=0, num_external=1)
    wrong = {
        "lower_bound": lambda: kda_triton(*x[:7], sequences, -6.0, x[7]),
        "chunk_size": lambda: kda_triton(*x[:7], checks.handed_in(16, "cpu"), -5.0, x[7]),
        "external_state_EHKV": lambda: kda_triton(*x[:7], sequences),
        "head width K": lambda: kda_triton(
            *(t[..., :24] for t in x[:2]), x[2], x[3][..., :24], *x[4:6], x[6][:, :24], sequences, -5.0, x[7][:, :, :24]
        ),
    }
    for word, call in wrong.items():
        try:
            call()
        except ValueError as error:
            assert word in str(error) or "rows" in str(error), (word, error)
        else:
            raise AssertionError(f"{word} was accepted")
    return {}


def conv_tree() -> dict[str, object]:
    rng = np.random.default_rng(0)
    result: dict[str, object] = {"float16": checks.check_conv(TREE, HALF, channels=20)}
    single = checks.Setting("cpu", torch.float32, chunk_size=16)
    with checks.filled_allocations():
        result["float32"] = checks.check_conv(checks.random_segments(rng, 16, 7), single, channels=7)
    return result


def conv_external_rows() -> dict[str, object]:
    """Rows that nobody reads get a zero gradient; external rows are inputs only."""
    tap = torch.tensor([[-1, -1, 0, 3], [-1, 0, 3, 4], [0, 1, 2, 5]])
    x = torch.randn(8, 5, dtype=torch.float32, requires_grad=True)
    weight = torch.randn(5, 4, requires_grad=True)
    with checks.filled_allocations():
        ours = torch.autograd.grad(tree_short_conv_triton(x, weight, tap).square().sum(), (x, weight))
    theirs = torch.autograd.grad(tree_short_conv(x, weight, tap, backend="reference").square().sum(), (x, weight))
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert (ours[0][6:] == 0).all()
    assert tree_short_conv_triton(x, weight, tap[:0]).shape == (0, 5)
    return {}


def tables_are_built_once() -> dict[str, object]:
    """After ``prepare_*`` neither a forward nor a backward pass of any layer cuts chains or builds KDA tables."""
    layout = checks.layout_of([(-1, 5), (0, 3), (0, 2)], 32)
    sequences = packed_sequences(layout, "cpu")
    taps = ConvTaps(layout.conv_tap_TW, layout.num_rows)
    prepare_short_conv(taps, dtype=torch.float32, backend="triton")
    prepare_kda(sequences, dtype=torch.float32, backend="triton")
    built = taps.tables, prepare_tables(sequences)
    x, weight = torch.randn(layout.num_rows, 5, requires_grad=True), torch.randn(5, 4, requires_grad=True)

    def layers(backend: str) -> list[torch.Tensor]:
        y = tree_short_conv(tree_short_conv(x, weight, taps, backend=backend), weight, taps, backend=backend)
        return [y, *torch.autograd.grad(y.square().sum(), (x, weight))]

    build, triton_op.chain_tables = triton_op.chain_tables, None
    try:
        ours = layers("triton")
    finally:
        triton_op.chain_tables = build
    torch.testing.assert_close(ours, layers("reference"), rtol=1e-5, atol=1e-5)
    assert taps.tables is built[0] and prepare_tables(sequences) is built[1]
    return {}


def compiled_without_breaks() -> dict[str, object]:
    """One graph, and no recompilation when rows, sequences, rounds and exports change."""
    counter = torch._dynamo.testing.CompileCounter()

    def layer(x, tap, weight, sequences):
        q, k, v = (tree_short_conv_triton(t.flatten(1), weight, tap).view_as(t) for t in x[:3])
        return kda_triton(q, k, v, *x[3:7], sequences)

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    setting = checks.Setting("cpu", torch.float32, num_heads=1, key_dim=16, value_dim=16, chunk_size=32)
    frames = []
    star = [(-1, 3)] + [(0, 1)] * 40
    for segments, mode in (*((tree, "compact") for tree in COMPILED), (NODES, "nodewise"), (star, "nodewise")):
        layout = checks.layout_of(segments, 32, mode)
        sequences = packed_sequences(layout, "cpu")
        prepare_tables(sequences)
        x = [t.detach() for t in checks.kda_inputs(sequences.num_path_rows, setting, "slow", seed=0)]
        args = (x[:7], layout.conv_tap_TW, torch.randn(16, 4), sequences)
        compiled(*args)
        frames.append(counter.frame_count)
    # Two sizes of everything; the other plans, up to 41 rounds, must fit the first graph.
    assert frames == [1] * 5, f"recompiled: {frames} graphs after each of the plans"
    return {"graphs": frames}


def ops_are_well_formed() -> dict[str, object]:
    """Schema, fake tensors and autograd registration of the custom ops."""
    tap = torch.tensor([[-1, -1, -1, 0], [-1, -1, 0, 1], [-1, 0, 1, 2]])
    x, weight = torch.randn(3, 5, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    for tables in ([], list(chain_tables(tap, 3))):
        torch.library.opcheck(torch.ops.harts_titan.tree_short_conv, (x, weight, tap, tables), test_utils=tests)
    setting = checks.Setting("cpu", torch.float32, num_heads=1, key_dim=16, value_dim=16, chunk_size=32)
    sequences = PackedSequences.build(
        chunk_size=32,
        cu_seqlens=[0, 5, 7],
        packed_row=[1, 2, 3, 4, 5, 2, 6],
        kept=[0, 1, 2, 3, 4, 6],
        init_state=[0, -1],
        export_sequence=[0],
        export_boundary=[1],
        round_ptr=[0, 2],
        num_external_states=1,
        num_path_rows=7,
    )
    x = checks.kda_inputs(7, setting, "slow", seed=0, num_external=1)
    args = (*x, list(prepare_tables(sequences)), 32, -5.0)
    # The in-chunk matrices have unwritten upper blocks, and the check compares two runs.
    with checks.filled_allocations(0.0):
        torch.library.opcheck(torch.ops.harts_titan.kda_forward, args, test_utils=tests)
    return {}


def backend_is_reachable() -> dict[str, object]:
    """The public entries run the kernels when asked to."""
    sequences = packed_sequences(checks.layout_of([(-1, 5), (0, 3), (0, 2)], 32), "cpu")
    setting = checks.Setting("cpu", torch.float32, num_heads=1, key_dim=16, value_dim=16, chunk_size=32)
    x = checks.kda_inputs(sequences.num_path_rows, setting, "slow", seed=0)
    ours = kda(*x[:7], sequences, backend="triton")[0]
    torch.testing.assert_close(ours, kda(*x[:7], sequences, backend="reference")[0], rtol=1e-5, atol=1e-5)
    tap = torch.tensor([[-1, 0], [0, 1]])
    y = [
        tree_short_conv(x[0][:2, 0], x[1][0, 0, :, None].expand(16, 2), tap, backend=b) for b in ("triton", "reference")
    ]
    torch.testing.assert_close(*y, rtol=1e-5, atol=1e-5)
    return {}


CASES = (
    kda_tree_equals_fla,
    kda_handed_in_state,
    kda_prefix_and_continuation,
    kda_extreme_gates,
    kda_separate_calls,
    kda_nothing_to_do,
    kda_refuses,
    conv_tree,
    conv_external_rows,
    tables_are_built_once,
    compiled_without_breaks,
    ops_are_well_formed,
    backend_is_reachable,
)


if __name__ == "__main__":
    run_cases(CASES, sys.argv[1], sys.argv[2:])
