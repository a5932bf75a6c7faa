"""Norms, gates, rotary embedding and convolution: references, kernels under the interpreter, kernels on a GPU."""

import numpy as np
import pytest
import torch

from harts_titan.ops.activation import head_gate, swiglu
from harts_titan.ops.norm import gated_rms_norm, rms_norm
from harts_titan.ops.rope import rope_keys_values, rope_queries
from harts_titan.ops.short_conv import ConvTaps, tree_short_conv
from harts_titan.ops.short_conv.taps import chain_tables
from tests.numerics.elementwise_checks import TREES, Numerics, parents, taps_of
from tests.numerics.interpreted_run import run_interpreted

CASES = (
    "conv",
    "conv_chain_ends",
    "conv_shared_rows",
    "norm_and_gates",
    "rotary",
    "well_formed",
    "compiled_without_breaks",
)
gpu = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))


def on_gpu(test):
    for mark in gpu:
        test = mark(test)
    return test


def test_interpreted(tmp_path):
    pytest.importorskip("triton", reason="needs triton (pip install triton)")
    pytest.importorskip("fla", reason="the interpreter's work-arounds patch fla-core")
    assert run_interpreted("interpreted_elementwise", tmp_path / "report.json") == set(CASES)


def test_packed_order_repeats_rows_and_adds_their_gradients():
    parent = parents("agent", 40)
    tap = torch.from_numpy(taps_of(parent))
    packed = np.concatenate([np.arange(20), np.arange(11, 40)])
    taps = ConvTaps(tap, 40)
    x, w = torch.randn(40, 3, dtype=torch.float64, requires_grad=True), torch.randn(3, 4, dtype=torch.float64)
    y, replayed = tree_short_conv(x, w, taps), tree_short_conv(x, w, taps.packed(packed))
    assert torch.equal(replayed, y[torch.from_numpy(packed)])
    weight = torch.randn_like(replayed)
    (ours,) = torch.autograd.grad((replayed * weight).sum(), x)
    (theirs,) = torch.autograd.grad((y[torch.from_numpy(packed)] * weight).sum(), x)
    torch.testing.assert_close(ours, theirs)
    with pytest.raises(ValueError, match="rows of a producer"):
        taps.packed(packed, num_external_rows=1)


@pytest.mark.parametrize("kind", TREES)
def test_every_gradient_sum_has_one_place(kind):
    """Rows of dx and slots are written once each, and each joined row owns the slots of its chains."""
    rows = 300
    tap = taps_of(parents(kind, rows))
    tables = chain_tables(tap, rows)
    target, slots = tables.target_T4.numpy(), tables.slot_S.shape[0]
    head = (tables.kind_T.numpy() & 1).astype(bool)
    sums = np.concatenate([target[:, 3], target[head, :3].reshape(-1)])
    sums = sums[sums != -1]
    assert np.unique(sums).size == sums.size
    direct, stored = sums[sums >= 0], -2 - sums[sums < -1]
    assert sorted(stored) == list(range(slots)) and int(tables.join_ptr_J1[-1]) == slots
    assert sorted([*direct, *tables.join_row_J.tolist()]) == list(range(rows))


def chains_by_sorting(tap: np.ndarray, num_path_rows: int) -> dict[str, np.ndarray]:
    """The tables of the kernels (``ChainTables``) from the whole tap table at once."""
    T, num_taps = tap.shape
    tap4 = np.full((T, 4), -1)
    tap4[:, 4 - num_taps :] = tap
    head = np.ones(T, dtype=bool)
    head[1:] = (tap[1:, :-1] != tap[:-1, 1:]).any(axis=1)
    last = np.append(head[1:], True)[:T]
    # Sums in the order of the chains: the taps before a head, oldest first, then the chain's rows.
    head_row, sum_of_row = np.flatnonzero(head), np.arange(T) + 3 * np.cumsum(head)
    path_row = np.full(T + 3 * head_row.size, -1)
    path_row[sum_of_row] = tap4[:, 3]
    path_row[(sum_of_row[head_row] - 3)[:, None] + np.arange(3)] = tap4[head_row, :3]
    count = np.bincount(path_row[path_row >= 0], minlength=num_path_rows)
    joined = np.flatnonzero(count != 1)
    goal = path_row.copy()
    shared = np.flatnonzero((path_row >= 0) & (count[path_row] > 1))
    goal[shared[np.argsort(path_row[shared], kind="stable")]] = -2 - np.arange(shared.size)
    target = goal[sum_of_row[:, None] + np.arange(-3, 1)]
    forward, backward = (np.full(-(-T // 8) + 1, -1) for _ in range(2))
    for g in range(T // 8):
        rows = slice(8 * g, 8 * g + 8)
        wanted = tap4[8 * g, 3] + np.arange(8)
        if not head[rows].any() and (tap4[rows, 3] == wanted).all():
            forward[g] = wanted[0]
            if not last[rows].any():
                direct = wanted[0] >= 3 and (target[rows, 0] == wanted - 3).all()
                backward[g] = wanted[0] if direct else -2 - wanted[0]
    return {
        "tap_T4": tap4,
        "kind_T": head + 2 * last,
        "forward_G": forward,
        "backward_G": backward,
        "target_T4": target,
        "join_row_J": joined,
        "join_ptr_J1": np.concatenate([[0], np.cumsum(count[joined])]),
        "slot_S": np.zeros(shared.size),
    }


@pytest.mark.parametrize("kind", TREES)
@pytest.mark.parametrize("num_taps", [1, 2, 3, 4])
def test_chain_tables_match_those_by_sorting(kind, num_taps):
    rng = np.random.default_rng(0)
    rows = 517
    tap = taps_of(parents(kind, rows), num_taps)
    copies = np.sort(rng.integers(0, rows, rows + 100))
    for table in (tap, tap[rows // 3 :], tap[copies], tap[rng.permutation(rows)]):
        got = chain_tables(table, rows + 3)._asdict()
        for name, want in chains_by_sorting(table, rows + 3).items():
            np.testing.assert_array_equal(got[name].numpy(), want, err_msg=name)


def test_table_errors():
    with pytest.raises(ValueError, match="1 to 4 taps"):
        chain_tables(np.zeros((1, 5), dtype=np.int64), 1)
    with pytest.raises(ValueError, match="taps must lie in"):
        chain_tables(np.array([[-1, 3]]), 3)


def test_wrong_shapes():
    x = torch.zeros(3, 2, 4)
    angles = torch.zeros(3, 2)
    calls = {
        "weight": lambda: rms_norm(x, torch.ones(3), 1e-6),
        "gate has shape": lambda: gated_rms_norm(x, x[:, :1], torch.ones(4), 1e-6),
        "gate and up": lambda: swiglu(x, x[:2]),
        r"gate \(T, H\)": lambda: head_gate(x, torch.zeros(3, 3)),
        "angles": lambda: rope_queries(x, torch.zeros(3, 3), torch.zeros(3, 3)),
        "nope_dim": lambda: rope_keys_values(x, torch.zeros(3, 4), angles, angles, nope_dim=4),
    }
    for message, call in calls.items():
        with pytest.raises(ValueError, match=message):
            call()


@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_on_a_gpu(dtype):
    torch.manual_seed(0)
    numerics = Numerics("cuda", dtype)
    for kind in TREES:
        numerics.conv(kind, 3001, 520)
    for width in (1536, 256, 512, 20):
        numerics.rms_norm(1237, width)
    for limit in (0.0, 0.75):
        numerics.swiglu(1237, 77, limit)
    numerics.gated_rms_norm(1237, 3, 128)
    numerics.head_gate(1237, 16, 128)
    numerics.rope(1237, 16, 128, 64, 128)
    numerics.no_rows()
