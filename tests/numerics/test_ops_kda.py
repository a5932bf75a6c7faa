import random
import time

import pytest
import torch

from harts_titan.ops.kda import PackedSequences, kda
from tests.numerics.ops_cases import (
    TreeCase,
    exported_oracle,
    kda_inputs,
    oracle_kda,
    packed,
    random_case,
    relative,
)

NAMES = ("q", "k", "v", "f", "b", "A_log", "dt_bias")


def weighted(outputs, seed=7):
    """A scalar with a different weight on every element of every output."""
    g = torch.Generator().manual_seed(seed)
    return sum((x.double() * torch.randn(x.shape, generator=g, dtype=torch.float64)).sum() for x in outputs)


def gradients(run, inputs):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = run(*leaves)
    return outputs, torch.autograd.grad(weighted(outputs), leaves)


def assert_close(got, want, tolerance, names=NAMES):
    for name, a, b in zip(names, got, want):
        assert relative(a, b) < tolerance, (name, relative(a, b))


def chain(num_rows):
    return [r - 1 for r in range(num_rows)]


LENGTHS = [1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 79, 95, 96, 97, 127, 128, 129, 130]


@pytest.mark.parametrize("length", LENGTHS)
def test_lengths_forward_and_gradients(length):
    chunk_size = 64 if length % 2 else 16
    inputs = kda_inputs(length, seed=length)
    boundaries = [0, -(-length // chunk_size)] if length > 1 else [1]
    sequences = packed([length], chunk_size, [(0, c) for c in boundaries])

    def oracle(*x):
        o, states = oracle_kda(*x, chain(length))
        zero = torch.zeros_like(states[0])
        return o, torch.stack([zero if c == 0 else states[-1] for c in boundaries])

    got, dgot = gradients(lambda *x: kda(*x, sequences), inputs)
    want, dwant = gradients(oracle, inputs)
    assert_close(got, want, 1e-11, ("o", "exported"))
    assert_close(dgot, dwant, 1e-9)


@pytest.mark.parametrize("backend", ["reference", "recurrent"])
@pytest.mark.parametrize("seed", range(6))
def test_trees_match_recurrence_with_all_gradients(seed, backend):
    chunk_size = (16, 4, 16, 32, 20, 64)[seed]
    case = random_case(seed, chunk_size, 7)
    sequences, parent = case.compact(), case.parent().tolist()
    inputs = kda_inputs(case.num_rows, heads=1 + seed % 3, key=8, value=8 if seed == 1 else 5, seed=seed)

    def oracle(*x):
        o, states = oracle_kda(*x, parent)
        return (o, exported_oracle(sequences, states)) if sequences.num_exports else (o,)

    got, dgot = gradients(lambda *x: kda(*x, sequences, backend=backend), inputs)
    want, dwant = gradients(oracle, inputs)
    assert_close(got, want, 1e-11, ("o", "exported"))
    assert_close(dgot, dwant, 1e-9)


def test_cases_cover_rounds_exports_and_replay():
    cases = [random_case(seed, 16, 7).compact() for seed in range(6)]
    assert max(len(c.rounds) for c in cases) >= 3
    assert sum(c.num_exports for c in cases) > 5
    assert sum(c.num_packed_rows - c.num_rows for c in cases) > 50


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", range(5))
def test_compact_is_bit_identical_to_trajectories(seed, dtype):
    chunk_size, heads, key, value = ((16, 2, 8, 8), (64, 1, 5, 7), (16, 3, 16, 12), (4, 2, 6, 5), (32, 2, 16, 16))[seed]
    case = random_case(100 + seed, chunk_size, 10)
    inputs = kda_inputs(case.num_rows, heads=heads, key=key, value=value, seed=seed, dtype=dtype)
    o, _ = kda(*inputs, case.compact())
    paths = [case.rows(v) for v in case.leaves]
    expanded = [x[torch.cat(paths)] for x in inputs[:5]]
    o_packed, _ = kda(*expanded, *inputs[5:], packed([len(p) for p in paths], chunk_size))
    assert torch.equal(o[torch.cat(paths)], o_packed)
    alone, _ = kda(*(x[paths[-1]] for x in inputs[:5]), *inputs[5:], packed([len(paths[-1])], chunk_size))
    assert torch.equal(o[paths[-1]], alone)


@pytest.mark.parametrize("offset", range(16))
def test_fork_at_every_offset_of_the_chunk(offset):
    # Side branches of one token, of two, across the next boundary; a nested fork in the same chunk.
    case = TreeCase([(-1, 16 + offset + 1), (0, 20), (0, 1), (0, 33), (2, 2), (2, 40)], 16)
    for dtype in (torch.float32, torch.float64):
        inputs = kda_inputs(case.num_rows, seed=offset, dtype=dtype)
        o, _ = kda(*inputs, case.compact())
        for v in case.leaves:
            rows = case.rows(v)
            alone, _ = kda(*(x[rows] for x in inputs[:5]), *inputs[5:], packed([len(rows)], 16))
            assert torch.equal(o[rows], alone), (offset, v, dtype)


@pytest.mark.parametrize("chunk_size, heads, key, value", [(16, 2, 16, 16), (64, 1, 5, 7), (4, 3, 8, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_prefix_rows_do_not_change_when_the_sequence_grows(chunk_size, heads, key, value, dtype):
    length = 2 * chunk_size + 3
    inputs = kda_inputs(length, heads=heads, key=key, value=value, dtype=dtype)
    o, _ = kda(*inputs, packed([length], chunk_size))
    for shorter in range(1, length):
        rows, _ = kda(*(x[:shorter] for x in inputs[:5]), *inputs[5:], packed([shorter], chunk_size))
        assert torch.equal(rows, o[:shorter]), shorter


def test_nodewise_final_state_handover_matches_recurrence():
    case = random_case(3, 16, 6)
    sequences, rows = case.nodewise()
    inputs = kda_inputs(case.num_rows, seed=3)
    arranged = [x[rows] for x in inputs[:5]] + inputs[5:]
    got, dgot = gradients(lambda *x: kda(*x, sequences)[:1], arranged)
    want, dwant = gradients(lambda *x: (oracle_kda(*x, case.parent().tolist())[0][rows],), inputs)
    assert_close(got, want, 1e-11, ("o",))
    dwant = [d[rows] for d in dwant[:5]] + list(dwant[5:])
    assert_close(dgot, dwant, 1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exported_state_continues_the_sequence_exactly(dtype):
    length, chunk_size, boundary = 75, 16, 2
    cut = boundary * chunk_size
    inputs = kda_inputs(length, seed=1, dtype=dtype)
    whole, _ = kda(*inputs, packed([length], chunk_size))
    first = [x[:cut] for x in inputs[:5]]
    _, state = kda(*first, *inputs[5:], packed([cut], chunk_size, [(0, boundary)]))
    assert state.dtype == dtype
    second = packed([length - cut], chunk_size, init=[0], num_external_states=1)
    rest, _ = kda(*(x[cut:] for x in inputs[:5]), *inputs[5:], second, external_state_EHKV=state)
    assert torch.equal(rest, whole[cut:])


def test_gradients_of_external_states_shared_by_sequences():
    lengths, chunk_size = [20, 1, 16, 5], 16
    exports, init = [(2, 1), (0, 1), (3, 0)], [1, 0, 1, -1]
    sequences = packed(lengths, chunk_size, exports, init, num_external_states=3)
    inputs = kda_inputs(sum(lengths), seed=2)
    external = torch.randn(3, 2, 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(5))

    def oracle(*x):
        *x, pool = x
        outputs, states, at = [], [], 0
        for n, length in enumerate(lengths):
            part = [t[at : at + length] for t in x[:5]]
            o, s = oracle_kda(*part, *x[5:], chain(length), initial=pool[init[n]] if init[n] >= 0 else None)
            outputs.append(o)
            states.append(s)
            at += length
        zero = torch.zeros_like(pool[0])
        return torch.cat(outputs), torch.stack([states[2][15], states[0][15], zero])

    got, dgot = gradients(lambda *x: kda(*x[:-1], sequences, external_state_EHKV=x[-1]), [*inputs, external])
    want, dwant = gradients(oracle, [*inputs, external])
    assert_close(got, want, 1e-11, ("o", "exported"))
    assert_close(dgot, dwant, 1e-9, (*NAMES, "external_state"))
    assert dgot[-1][2].abs().max() == 0


def test_dropping_export_gradients_would_be_seen():
    case = TreeCase([(-1, 40), (0, 20), (0, 20)], 16)
    sequences = case.compact()
    assert sequences.num_exports == 1
    inputs = kda_inputs(case.num_rows)
    branch = case.own(2)
    _, full = gradients(lambda *x: (kda(*x, sequences)[0][branch],), inputs)
    before_anchor = full[1][: 2 * 16].abs().max()
    assert before_anchor > 1e-3 * full[1].abs().max()


@pytest.mark.parametrize("chunk_size", [16, 64])
def test_strong_decay_is_finite_and_accurate(chunk_size):
    # Gates at the bound: 64 rows of -5 are exp(-320), far below the float32 range.
    inputs = kda_inputs(100, gate=6.0, seed=4, dtype=torch.float32)
    inputs[3] = inputs[3] * 4
    sequences = packed([100], chunk_size, [(0, 1)])
    got, dgot = gradients(lambda *x: kda(*x, sequences), inputs)

    def oracle(*x):
        o, states = oracle_kda(*x, chain(100))
        return o, states[chunk_size - 1][None]

    want, dwant = gradients(oracle, [x.double() for x in inputs])
    assert_close(got, want, 3e-6, ("o", "exported"))
    assert_close(dgot, dwant, 3e-5)


def test_repeated_keys_stay_accurate():
    # Equal keys, no decay, beta near one: the triangular system is as badly conditioned as it can be.
    inputs = kda_inputs(128, gate=-12.0, slope=0.0, dtype=torch.float32, seed=8)
    inputs[1] = inputs[1][:1].expand(128, -1, -1).contiguous()
    inputs[4] = inputs[4].abs() + 4
    o, _ = kda(*inputs, packed([128], 64))
    want, _ = oracle_kda(*inputs, chain(128))
    assert relative(o, want) < 2e-5


@pytest.mark.parametrize("seed", range(3))
def test_a_branch_cannot_touch_the_others(seed):
    case = random_case(200 + seed, 16, 8)
    sequences, leaf = case.compact(), case.leaves[seed % len(case.leaves)]
    inputs = kda_inputs(case.num_rows, seed=seed, dtype=torch.float32)
    rows = case.own(leaf)
    others = torch.ones(case.num_rows, dtype=torch.bool)
    others[rows] = False
    o, _ = kda(*inputs, sequences)
    changed = [x.clone() for x in inputs]
    for x in changed[:5]:
        x[rows] = x[rows] * -3 + 1
    o_changed, _ = kda(*changed, sequences)
    assert torch.equal(o[others], o_changed[others])
    assert not torch.equal(o[rows], o_changed[rows])
    # Nothing of another branch may receive a gradient from this branch's outputs.
    _, grads = gradients(lambda *x: (kda(*x, sequences)[0][rows],), inputs)
    foreign = torch.ones(case.num_rows, dtype=torch.bool)
    foreign[case.rows(leaf)] = False
    for g in grads[:5]:
        assert g[foreign].abs().sum() == 0


def test_gradients_are_repeatable():
    case = random_case(11, 16, 9)
    inputs = kda_inputs(case.num_rows, dtype=torch.float32)
    _, first = gradients(lambda *x: kda(*x, case.compact()), inputs)
    _, second = gradients(lambda *x: kda(*x, case.compact()), inputs)
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def test_five_thousand_one_token_sequences():
    count = 5000
    inputs = kda_inputs(count, heads=2, key=16, value=16, dtype=torch.float32)
    begin = time.perf_counter()
    o, _ = kda(*inputs, packed([1] * count, 16))
    assert time.perf_counter() - begin < 60
    q, k, v, _, b = (x.double() for x in inputs[:5])
    q, k = (x / (x.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    want = (q * k).sum(-1, keepdim=True) / 4 * torch.sigmoid(b)[..., None] * v
    assert relative(o, want) < 1e-5


def test_bfloat16_inputs_keep_float32_states():
    inputs = kda_inputs(40, dtype=torch.bfloat16, seed=6)
    inputs[5:] = [x.float() for x in inputs[5:]]
    (o, exported), grads = gradients(lambda *x: kda(*x, packed([40], 16, [(0, 2)])), inputs)
    assert o.dtype == torch.bfloat16 and exported.dtype == torch.float32
    assert [g.dtype for g in grads] == [x.dtype for x in inputs]
    want, states = oracle_kda(*inputs, chain(40))
    assert relative(o, want) < 2**-7 and relative(exported[0], states[31]) < 1e-5


def test_empty_call_has_zero_gradients():
    sequences = PackedSequences.build(
        chunk_size=16, cu_seqlens=[0], packed_row=[], kept=[], init_state=[], round_ptr=[0], num_path_rows=0
    )
    inputs = [x.requires_grad_() for x in kda_inputs(0)]
    for backend in ("reference", "recurrent"):
        o, exported = kda(*inputs, sequences, backend=backend)
        assert o.shape == (0, 2, 5) and exported.shape == (0, 2, 6, 5)
    o, exported = kda(*inputs, sequences)
    (o.sum() + exported.sum()).backward()
    assert inputs[5].grad.abs().sum() == 0


def test_fan_in_tables_list_every_reader_in_order():
    case = random_case(1, 4, 12)
    sequences = case.compact()
    ptr, readers = (x.tolist() for x in sequences.replay_fan_in)
    packed_row = sequences.packed_row_P.tolist()
    for row in range(case.num_rows):
        assert readers[ptr[row] : ptr[row + 1]] == [p for p, r in enumerate(packed_row) if r == row]
    for (first, last), table in zip(sequences.rounds, sequences.state_fan_in):
        starting = {}
        for n in range(first, last):
            if sequences.init_state_host[n] >= 0:
                starting.setdefault(sequences.init_state_host[n], []).append(n)
        if table is None:
            assert not starting
            continue
        ptr, members = table.ptr_F1.tolist(), table.sequence_M.tolist()
        got = {r: members[ptr[i] : ptr[i + 1]] for i, r in enumerate(table.pool_row_F.tolist())}
        assert got == starting
    boundary = 0
    for n, (begin, end) in enumerate(zip(sequences.cu_seqlens_host, sequences.cu_seqlens_host[1:])):
        assert sequences.chunk_offset_host[n] + n == boundary
        boundary += -(-(end - begin) // 4) + 1
    assert sequences.export_row_B.numel() == boundary
    assert sorted(r for r in sequences.export_row_host if r >= 0) == list(range(sequences.num_exports))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"chunk_size": 0}, "chunk_size"),
        ({"cu_seqlens": [0, 4, 4, 10]}, "cu_seqlens"),
        ({"packed_row": [0, 1, 2, 3, 4, 5, 6, 2, 3, 8]}, "packed_row"),
        ({"kept": [0, 1, 2, 3, 4, 5, 6, 8]}, "packed_row"),
        ({"kept": [0, 1, 2, 3, 4, 5, 9, 6]}, "kept"),
        ({"init_state": [-1, 1]}, "outside the pool"),
        ({"export_boundary": [3]}, "export_boundary"),
        ({"export_sequence": [1]}, "later"),
        ({"round_ptr": [0, 2]}, "same or a later"),
        ({"round_ptr": [0, 1]}, "round_ptr"),
    ],
)
def test_contradicting_layouts_are_refused(change, message):
    good = {
        "chunk_size": 4,
        "cu_seqlens": [0, 7, 10],
        "packed_row": [0, 1, 2, 3, 4, 5, 6, 4, 5, 7],
        "kept": [0, 1, 2, 3, 4, 5, 6, 9],
        "init_state": [-1, 0],
        "export_sequence": [0],
        "export_boundary": [1],
        "round_ptr": [0, 1, 2],
        "num_path_rows": 8,
    }
    PackedSequences.build(**good)
    with pytest.raises(ValueError, match=message):
        PackedSequences.build(**{**good, **change})


def test_wrong_inputs_are_refused():
    sequences = packed([5], 16)
    inputs = kda_inputs(5)
    with pytest.raises(ValueError, match="path rows"):
        kda(*kda_inputs(6), sequences)
    with pytest.raises(ValueError, match="dt_bias"):
        kda(*inputs[:6], inputs[6][:, :3], sequences)
    with pytest.raises(ValueError, match="lower_bound"):
        kda(*inputs, sequences, lower_bound=0.0)
    with pytest.raises(ValueError, match="external states"):
        kda(*inputs, packed([5], 16, init=[0], num_external_states=1))
    single = [x.float() for x in inputs]
    with pytest.raises(ValueError, match="never rounded"):
        external = torch.zeros(1, 2, 6, 5, dtype=torch.bfloat16)
        kda(*single, packed([5], 16, init=[0], num_external_states=1), external_state_EHKV=external)


def test_random_lengths_packed_together_are_isolated():
    rng = random.Random(0)
    lengths = [rng.randint(1, 40) for _ in range(12)]
    inputs = kda_inputs(sum(lengths), dtype=torch.float32)
    o, _ = kda(*inputs, packed(lengths, 16))
    at = 0
    for length in lengths:
        alone, _ = kda(*(x[at : at + length] for x in inputs[:5]), *inputs[5:], packed([length], 16))
        assert torch.equal(o[at : at + length], alone)
        at += length
