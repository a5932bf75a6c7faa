import pytest
import torch
import torch.multiprocessing as mp

from harts_titan.ops.logprob import VocabularyShard, linear_logprobs, recover_logprobs
from tests.numerics.ops_cases import relative

ROWS, VOCAB, WIDTH, POSITIONS = 9, 13, 5, 24
USES = [(True, True), (True, False), (False, True)]


def problem(dtype=torch.float64, seed=0):
    """Several positions on a row with equal and different labels, ignored ones, a row without any (the last)."""
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(ROWS, WIDTH, generator=g, dtype=torch.float64).to(dtype)
    weight = torch.randn(VOCAB, WIDTH, generator=g, dtype=torch.float64).to(dtype)
    row = torch.randint(0, ROWS - 1, (POSITIONS,), generator=g)
    label = torch.randint(0, VOCAB, (POSITIONS,), generator=g)
    row[3], label[3] = row[17], label[17]
    label[[5, 23]] = -100
    return hidden, weight, row, label


def oracle(hidden, weight, row, label):
    logp = torch.log_softmax(hidden.double() @ weight.double().t(), -1)
    picked = logp[row].gather(1, label.clamp(min=0)[:, None])[:, 0]
    return torch.where(label >= 0, picked, 0.0), -(logp.exp() * logp).sum(-1)


def recover(hidden, weight, row, label):
    return recover_logprobs(hidden @ weight.t(), row, label)


def chunked(rows):
    return lambda *x: linear_logprobs(*x, rows_per_chunk=rows)


def with_gradients(function, hidden, weight, row, label, use=(True, True)):
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    outputs = function(hidden, weight, row, label)
    g = torch.Generator().manual_seed(9)
    factors = [torch.randn(x.shape, generator=g, dtype=torch.float64) for x in outputs]
    loss = sum((x * c).sum() for x, c, used in zip(outputs, factors, use) if used)
    return [x.detach() for x in outputs], torch.autograd.grad(loss, (hidden, weight))


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("function", [recover, chunked(1), chunked(4), chunked(9), chunked(100)])
def test_values_and_gradients_match_log_softmax(function, use):
    got, dgot = with_gradients(function, *problem(), use)
    want, dwant = with_gradients(oracle, *problem(), use)
    for a, b in zip((*got, *dgot), (*want, *dwant)):
        assert relative(a, b) < 1e-13


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("function", [recover, chunked(4)])
def test_narrow_dtypes_return_float32(function, dtype, tolerance):
    got, dgot = with_gradients(function, *problem(dtype))
    want, dwant = with_gradients(oracle, *problem(dtype))
    assert all(x.dtype == torch.float32 for x in got)
    assert all(x.dtype == dtype for x in dgot)
    for a, b in zip((*got, *dgot), (*want, *dwant)):
        assert relative(a, b) < tolerance


def test_bfloat16_logits_use_float32_softmax():
    logits = torch.randn(4, 50_000).bfloat16() * 4
    row, label = torch.tensor([0, 1, 3]), torch.tensor([7, 49_999, 0])
    logprob, entropy = recover_logprobs(logits, row, label)
    want = torch.log_softmax(logits.double(), -1)
    assert relative(logprob, want[row, label]) < 1e-6
    assert relative(entropy, -(want.exp() * want).sum(-1)) < 1e-5


def test_large_logits_stay_finite():
    logits = (torch.randn(3, 11) * 1e4).requires_grad_()
    logprob, entropy = recover_logprobs(logits, torch.tensor([0, 1, 2]), torch.tensor([1, 2, 3]))
    (logprob.sum() + entropy.sum()).backward()
    assert torch.isfinite(logprob).all() and torch.isfinite(entropy).all() and torch.isfinite(logits.grad).all()


def test_all_ignored_and_empty():
    hidden, weight, row, _ = problem()
    for function in (recover, chunked(4)):
        (logprob, _), (dhidden, dweight) = with_gradients(
            function, hidden, weight, row, torch.full_like(row, -100), (True, False)
        )
        assert logprob.abs().sum() == 0 and dhidden.abs().sum() == 0 and dweight.abs().sum() == 0
        (logprob, entropy), grads = with_gradients(function, hidden[:0], weight, row[:0], row[:0])
        assert logprob.shape == (0,) and entropy.shape == (0,) and grads[1].abs().sum() == 0


def test_no_gradient_for_a_frozen_weight():
    hidden, weight, row, label = problem()
    logprob, _ = linear_logprobs(hidden.requires_grad_(), weight, row, label)
    logprob.sum().backward()
    assert hidden.grad is not None and weight.grad is None


def test_wrong_inputs_are_refused():
    hidden, weight, row, label = problem()
    with pytest.raises(ValueError, match="label"):
        recover(hidden, weight, row, label[:-1])
    with pytest.raises(ValueError, match="rows_per_chunk"):
        chunked(0)(hidden, weight, row, label)
    with pytest.raises(ValueError, match="share the dtype"):
        linear_logprobs(hidden, weight.float(), row, label)
    with pytest.raises(ValueError, match="no rows"):
        recover(hidden[:0], weight, row, label)


# ---- the vocabulary spread over ranks


def shard_worker(rank, folder):
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)

    def reduce_with(op):
        def reduce(t):
            dist.all_reduce(t, op)
            return t

        return reduce

    shard = VocabularyShard((0, 5)[rank], reduce_with(dist.ReduceOp.MAX), reduce_with(dist.ReduceOp.SUM))
    results = {}
    for use in USES:
        hidden, weight, row, label = problem()
        part = weight[:5] if rank == 0 else weight[5:]

        def run(*x):
            return linear_logprobs(*x, rows_per_chunk=4, shard=shard)

        results[use] = with_gradients(run, hidden, part, row, label, use)
    torch.save(results, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


def test_two_gloo_ranks_of_the_vocabulary_equal_one(tmp_path):
    mp.spawn(shard_worker, (str(tmp_path),), nprocs=2)
    ranks = [torch.load(tmp_path / f"rank{r}.pt") for r in range(2)]
    for use in USES:
        want, (dhidden, dweight) = with_gradients(oracle, *problem(), use)
        for values, grads in (r[use] for r in ranks):
            # Every rank has the results and the whole gradient of the hidden rows.
            assert all(torch.equal(a, b) for a, b in zip(values, ranks[0][use][0]))
            assert torch.equal(grads[0], ranks[0][use][1][0])
            assert relative(grads[0], dhidden) < 1e-13
            for a, b in zip(values, want):
                assert relative(a, b) < 1e-13
        assert relative(torch.cat([r[use][1][1] for r in ranks]), dweight) < 1e-13


def test_a_rank_without_words_is_refused():
    hidden, weight, row, label = problem()
    shard = VocabularyShard(0, lambda t: t, lambda t: t)
    with pytest.raises(ValueError, match="without words"):
        linear_logprobs(hidden, weight[:0], row, label, shard=shard)
