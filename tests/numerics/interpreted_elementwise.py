"""Elementwise kernels under Triton's interpreter; ``test_ops_elementwise.py`` runs this module as its own process."""

from __future__ import annotations

import sys

import numpy as np
import torch
import torch._dynamo.testing

import tests.numerics.triton_interpreter  # noqa: F401
from harts_titan.ops import activation, norm, rope, short_conv
from harts_titan.ops.activation import triton_op as gates
from harts_titan.ops.norm import triton_op as norms
from harts_titan.ops.rope import triton_op as ropes
from harts_titan.ops.short_conv import triton_op as convs
from harts_titan.ops.short_conv.taps import chain_tables
from tests.numerics.elementwise_checks import EPS, TREES, Numerics, parents, taps_of
from tests.numerics.interpreted_run import run_cases


def conv() -> dict[str, object]:
    # Small blocks: a tree of some dozen rows then has many.
    for config in (convs.FORWARD, convs.BACKWARD):
        config.update(BT=16, BD=16)
    result: dict[str, object] = {}
    for kind in TREES:
        result[kind] = Numerics("cpu", torch.float32).conv(kind, 61, 20)
    result["float16"] = Numerics("cpu", torch.float16).conv("bushy", 35, 8)
    for num_taps in (1, 2, 3):
        result[f"taps_{num_taps}"] = Numerics("cpu", torch.float32).conv("agent", 35, 8, num_taps)
    return result


def conv_chain_ends() -> dict[str, object]:
    """A fork at every place of a block, in front of it and behind."""
    for config in (convs.FORWARD, convs.BACKWARD):
        config.update(BT=8, BD=8)
    numerics = Numerics("cpu", torch.float32)
    for n in range(1, 13):
        chain = list(range(-1, n - 1))
        tap = torch.from_numpy(taps_of(torch.tensor([*chain, n - 2, *range(n, n + 9)]).numpy()))
        tables = chain_tables(tap, tap.shape[0])
        numerics.compare(
            lambda x, w, tap=tap, tables=tables: convs.tree_short_conv_triton(x, w, tap, tables),
            lambda x, w, tap=tap: short_conv.tree_short_conv(x, w, tap, backend="reference"),
            [numerics.randn(tap.shape[0], 5), numerics.randn(5, 4)],
        )
    return {}


def conv_shared_rows() -> dict[str, object]:
    """Segments of one token below every row of a chain, alone and together: its groups share some of their sums."""
    numerics = Numerics("cpu", torch.float32)
    for block in (8, 16):
        for config in (convs.FORWARD, convs.BACKWARD):
            config.update(BT=block, BD=8)
        for children in (*([row] for row in range(5, 15, 2 if block == 8 else 5)), [9, 9], [*range(24)]):
            tap = torch.from_numpy(taps_of(np.array([*range(-1, 23), *children])))
            tables = chain_tables(tap, tap.shape[0])
            assert (tables.backward_G < -1).any()
            numerics.compare(
                lambda x, w, tap=tap, tables=tables: convs.tree_short_conv_triton(x, w, tap, tables),
                lambda x, w, tap=tap: short_conv.tree_short_conv(x, w, tap, backend="reference"),
                [numerics.randn(tap.shape[0], 5), numerics.randn(5, 4)],
            )
    return {}


def norm_and_gates() -> dict[str, object]:
    result: dict[str, object] = {}
    for dtype in (torch.float32, torch.float16):
        numerics = Numerics("cpu", dtype)
        for rows, width in ((37, 24), (3, 1536)):
            result[f"norm {dtype} {rows} {width}"] = numerics.rms_norm(rows, width)
        for rows, heads, width in ((11, 3, 16), (1, 1, 20)):
            result[f"gated {dtype} {rows}"] = numerics.gated_rms_norm(rows, heads, width)
            result[f"head gate {dtype} {rows}"] = numerics.head_gate(rows, heads, width)
        for limit in (0.0, 0.75):
            result[f"swiglu {dtype} {limit}"] = numerics.swiglu(9, 530, limit)
    Numerics("cpu", torch.float32).no_rows()
    return result


def rotary() -> dict[str, object]:
    result: dict[str, object] = {}
    for dtype in (torch.float32, torch.float16):
        for sizes in ((7, 3, 16, 8, 16), (5, 2, 20, 12, 10)):
            result[f"{dtype} {sizes}"] = Numerics("cpu", dtype).rope(*sizes)
    return result


def well_formed() -> dict[str, object]:
    """Schema, fake tensors and autograd registration of the custom ops."""
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(shape, requires_grad=True)

    tap = torch.from_numpy(taps_of(parents("agent", 20)))
    angles = torch.rand(4, 3), torch.rand(4, 3)
    cases = (
        (convs._conv_forward, (leaf(20, 5), leaf(5, 4), tap, list(chain_tables(tap, 20)))),
        (norms._norm, (leaf(4, 6), None, leaf(6), EPS)),
        (norms._norm, (leaf(4, 6), leaf(4, 6), leaf(6), EPS)),
        (gates._swiglu, (leaf(4, 6), leaf(4, 6), 0.5)),
        (gates._head_gate, (leaf(4, 2, 6), leaf(4, 2))),
        (ropes._rope_queries, (leaf(4, 2, 8), *angles, False)),
        (ropes._rope_keys_values, (leaf(4, 2, 8), leaf(4, 6), *angles, 5)),
    )
    for op, args in cases:
        torch.library.opcheck(op, args, test_utils=tests)
    return {}


def compiled_without_breaks() -> dict[str, object]:
    """One graph through the public ops, and none more when the number of rows changes."""
    counter = torch._dynamo.testing.CompileCounter()

    def layer(x, g, w, q, k, cos, sin):
        y = norm.gated_rms_norm(x, g, w, EPS, backend="triton") + norm.rms_norm(x, w, EPS, backend="triton")
        y = activation.swiglu(y, g, 1.0, backend="triton").unflatten(1, (2, -1))
        q = rope.rope_queries(q, cos, sin, backend="triton")
        keys, values = rope.rope_keys_values(q, k, cos, sin, nope_dim=6, backend="triton")
        return activation.head_gate(y, g[:, :2], backend="triton").sum() + keys.sum() + values.sum()

    step = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    frames = []
    for rows in (5, 8, 13):
        step(
            torch.randn(rows, 12, requires_grad=True),
            torch.randn(rows, 12),
            torch.randn(12, requires_grad=True),
            torch.randn(rows, 2, 10, requires_grad=True),
            torch.randn(rows, 4),
            torch.rand(rows, 2),
            torch.rand(rows, 2),
        ).backward()
        frames.append(counter.frame_count)
    assert frames == [1, 1, 1], f"recompiled: {frames} graphs after each size"
    return {"graphs": frames}


CASES = (conv, conv_chain_ends, conv_shared_rows, norm_and_gates, rotary, well_formed, compiled_without_breaks)


if __name__ == "__main__":
    run_cases(CASES, sys.argv[1], sys.argv[2:])
