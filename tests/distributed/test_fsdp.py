"""Data parallelism over 2 gloo ranks equals one process; a single rank keeps float32 master weights.

One launch runs every check and saves what each rank saw; the tests below compare.
"""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from harts_titan import _compat

_compat.install()

from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402

from harts_titan.models.common import router_losses  # noqa: E402
from harts_titan.models.common.tree_inputs import TreeInputs  # noqa: E402
from harts_titan.models.ling import (  # noqa: E402
    FLAVOURS,
    Ling,
    LingStateDictAdapter,
    load_hf,
    parallelize_ling,
    save_hf,
)
from harts_titan.models.ling.attention import KDACore  # noqa: E402
from harts_titan.parallel.fsdp import set_last_backward, shard_model, single_rank_mesh  # noqa: E402
from harts_titan.tree import plan_step  # noqa: E402

ARGS = replace(FLAVOURS["debug"], vocab_size=64)
# Not a multiple of the ranks: shards of unequal size.
UNEVEN = replace(ARGS, num_experts=15, num_groups=3, vocab_size=63)


def rollouts():
    rng = np.random.default_rng(0)
    trunk = rng.integers(0, 60, 30).tolist()
    made = [trunk[:k] + rng.integers(0, 60, n).tolist() for k, n in ((30, 7), (30, 5), (17, 9), (16, 3), (3, 20))]
    made += [rng.integers(0, 60, n).tolist() for n in (25, 18, 4)]
    offsets = np.cumsum([0] + [len(t) for t in made]).astype(np.int64)
    return np.concatenate(made).astype(np.int32), offsets


def plan(dp_degree: int):
    # The capacity forces two slots of two replicas.
    tokens, offsets = rollouts()
    made = plan_step(tokens, offsets, capacity=45, chunk_size=16, dp_degree=dp_degree)
    assert made.num_slots * dp_degree >= 4
    return made


def meta_model(args, dtype=torch.float32) -> Ling:
    with torch.device("meta"):
        return Ling(args).to(dtype)


def materialise(model: Ling) -> Ling:
    torch.manual_seed(0)
    model.to_empty(device="cpu")
    model.init_weights()
    return model


def accumulate(model: Ling, layouts) -> torch.Tensor:
    """Backward of every call; returns the assignments."""
    counts = []
    for i, layout in enumerate(layouts):
        set_last_backward(model, i == len(layouts) - 1)
        inputs = TreeInputs.from_layout(layout)
        output = model(inputs)
        weight_S = torch.cos(layout.source_position_S.double()).to(output.logprob_S.dtype)
        loss = (weight_S * output.logprob_S).sum() / 100
        loss = loss + 0.1 * router_losses.z_loss(output.router, inputs.multiplicity_T, num_positions=100)
        loss.backward()
        counts.append(router_losses.expert_counts(output.router, inputs.multiplicity_T))
    return torch.stack(counts).sum(dim=0)


def full_grads(model: Ling) -> dict[str, torch.Tensor]:
    return {n: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for n, p in model.named_parameters()}


def full_state(model: Ling) -> dict[str, torch.Tensor]:
    return {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in model.state_dict().items()}


def job(**changes) -> SimpleNamespace:
    training = {"mixed_precision_param": "float32", "mixed_precision_reduce": "float32"} | changes
    return SimpleNamespace(
        training=SimpleNamespace(**training),
        activation_checkpoint=SimpleNamespace(mode="full"),
        compile=SimpleNamespace(enable=False),
        parallelism=SimpleNamespace(fsdp_reshard_after_forward="default"),
    )


def dims(**changes) -> ParallelDims:
    degrees = {"dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 1, "pp": 1, "ep": 1, "etp": 1, "world_size": 2}
    return ParallelDims(**(degrees | changes))


class Reductions(TorchDispatchMode):
    """Counts reduce-scatters."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += "_reduce_scatter" in func.name()
        return func(*args, **(kwargs or {}))


def sharded_float64(args, recompute: bool, reshard: str, layouts) -> dict:
    model = meta_model(args, torch.float64)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    shard_model(
        model,
        mesh,
        param_dtype=torch.float64,
        reduce_dtype=torch.float64,
        wide_modules=(KDACore,),
        reshard_after_forward=reshard,
    )
    materialise(model)
    model.recompute_layers = recompute
    with Reductions() as reductions:
        counts = accumulate(model, layouts)
    dist.all_reduce(counts)
    return {"grads": full_grads(model), "counts": counts, "state": full_state(model), "reductions": reductions.count}


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    made = plan(2)
    layouts = [layout for slot in range(made.num_slots) for layout in made.consumer(rank, slot).calls]
    seen = {
        "plain": sharded_float64(ARGS, False, "default", layouts),
        "recomputed": sharded_float64(ARGS, True, "always", layouts),
        "uneven": sharded_float64(UNEVEN, False, "never", layouts),
    }
    # The path of the trainer.
    model = materialise(parallelize_ling(meta_model(ARGS), dims(), job()))
    assert model.recompute_layers
    accumulate(model, layouts)
    seen["trainer"] = {"grads": full_grads(model)}
    # Checkpoints of a sharded model.
    for args, name in ((ARGS, "even"), (UNEVEN, "uneven_files")):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
        source = meta_model(args)
        shard_model(source, mesh, param_dtype=torch.float32, reduce_dtype=torch.float32)
        materialise(source)
        save_hf(source, args, f"{folder}/{name}", max_shard_bytes=100_000)
        target = meta_model(args)
        shard_model(target, mesh, param_dtype=torch.float32, reduce_dtype=torch.float32)
        target.to_empty(device="cpu")
        load_hf(target, args, f"{folder}/{name}")
        seen[name] = {"saved": full_state(source), "loaded": full_state(target)}
        adapter = LingStateDictAdapter(args, None)
        theirs = adapter.to_hf(source.state_dict())
        back = adapter.from_hf(theirs)
        seen[name]["expert_keys"] = sorted(k for k in theirs if ".experts." in k)
        seen[name]["adapter"] = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in back.items()}
    torch.save(seen, f"{folder}/rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fsdp")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    mp.spawn(worker, (str(folder),), nprocs=2)
    return folder, [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


def one_process(args, dtype=torch.float64) -> dict:
    model = materialise(meta_model(args, dtype))
    made = plan(2)
    layouts = [layout for consumer in made.consumers() for layout in consumer.calls]
    counts = accumulate(model, layouts)
    return {"grads": full_grads(model), "counts": counts, "state": full_state(model)}


def relative_difference(got: dict, expected: dict) -> float:
    assert set(got) == set(expected)
    return max(((got[n] - expected[n]).abs().max() / expected[n].abs().max()).item() for n in expected)


@pytest.mark.parametrize(("name", "args"), [("plain", ARGS), ("recomputed", ARGS), ("uneven", UNEVEN)])
def test_two_ranks_equal_one_process(ranks, name, args):
    expected = one_process(args)
    for seen in ranks[1]:
        # The start does not depend on the layout.
        assert all(torch.equal(seen[name]["state"][n], t) for n, t in expected["state"].items())
        # Gradients are sums over ranks, not means.
        assert relative_difference(seen[name]["grads"], expected["grads"]) < 1e-12
        assert torch.equal(seen[name]["counts"], expected["counts"])
        # Embeddings, four layers, head: one reduction each, however many backward calls.
        assert seen[name]["reductions"] == 6


def test_trainer_path_equals_one_process(ranks):
    expected = one_process(ARGS, torch.float32)
    for seen in ranks[1]:
        assert relative_difference(seen["trainer"]["grads"], expected["grads"]) < 1e-4


@pytest.mark.parametrize(("name", "args"), [("even", ARGS), ("uneven_files", UNEVEN)])
def test_sharded_checkpoints(ranks, name, args):
    folder, seen = ranks
    plain = materialise(meta_model(args)).state_dict()
    loaded = meta_model(args).to_empty(device="cpu")
    load_hf(loaded, args, folder / name)
    for state in (seen[0][name]["loaded"], seen[1][name]["loaded"], seen[0][name]["saved"], loaded.state_dict()):
        assert all(torch.equal(state[n], t) for n, t in plain.items())
    for rank in seen:
        assert all(torch.equal(rank[name]["adapter"][n], t) for n, t in plain.items())
    # Every rank converts the experts it owns, no others.
    keys = [set(rank[name]["expert_keys"]) for rank in seen]
    assert not keys[0] & keys[1]
    assert len(keys[0] | keys[1]) == 3 * 3 * args.num_experts


@pytest.fixture
def single_rank(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_single_rank_keeps_float32_master_weights(single_rank):
    one = dims(dp_shard=1, world_size=1)
    model = parallelize_ling(meta_model(ARGS), one, job(mixed_precision_param="bfloat16"))
    materialise(model)
    assert all(p.dtype == torch.float32 for p in model.parameters())
    seen = {}
    core = model.layers["0"].attention.core
    core.register_forward_pre_hook(lambda m, a: seen.update(q=a[0].dtype, A_log=m.A_log.dtype, bias=m.dt_bias.dtype))
    model.layers["1"].moe.register_forward_pre_hook(lambda m, a: seen.update(x=a[0].dtype, w1=m.experts.w1.dtype))
    layouts = [layout for consumer in plan(1).consumers() for layout in consumer.calls]
    accumulate(model, layouts)
    low = torch.bfloat16
    assert seen == {"q": low, "A_log": torch.float32, "bias": torch.float32, "x": low, "w1": low}
    expected = one_process(ARGS, torch.float32)["grads"]
    grads = full_grads(model)
    assert all(g.dtype == torch.float32 for g in grads.values())
    cosine = {
        n: torch.nn.functional.cosine_similarity(grads[n].flatten(), g.flatten(), dim=0) for n, g in expected.items()
    }
    assert min(cosine.values()) > 0.9, cosine
    # Small updates are not lost to rounding.
    before = full_state(model)["norm.weight"].clone()
    torch.optim.SGD(model.parameters(), lr=1e-5).step()
    after = full_state(model)["norm.weight"]
    assert (before - after).abs().max() > 0
    assert torch.equal(before.bfloat16(), after.bfloat16())


def test_a_single_rank_starts_its_own_process_group():
    if dist.is_initialized():
        dist.destroy_process_group()
    mesh = single_rank_mesh("cpu")
    try:
        assert mesh.size() == dist.get_world_size() == 1
    finally:
        dist.destroy_process_group()


def test_no_sharding_when_nothing_is_gained():
    model = parallelize_ling(meta_model(ARGS), dims(dp_shard=1, world_size=1), job())
    assert not any(isinstance(p, DTensor) for p in model.parameters())


@pytest.mark.parametrize("degree", ["tp", "pp", "ep", "cp", "dp_replicate"])
def test_unsupported_parallelism_is_refused(degree):
    with pytest.raises(ValueError, match="not supported yet"):
        parallelize_ling(meta_model(ARGS), SimpleNamespace(**(vars(dims()) | {degree: 2})), job())


def test_other_refusals():
    config = job()
    config.activation_checkpoint.mode = "selective"
    with pytest.raises(ValueError, match="activation_checkpoint"):
        parallelize_ling(meta_model(ARGS), dims(), config)
    with pytest.raises(ValueError, match="fsdp_reshard_after_forward"):
        shard_model(
            meta_model(ARGS), None, param_dtype=torch.float32, reduce_dtype=torch.float32, reshard_after_forward="x"
        )
