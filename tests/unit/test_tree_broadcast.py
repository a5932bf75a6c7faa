"""One rank plans, every rank gets the identical plan (two gloo processes)."""

from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tree_oracle import flat, random_sequences

from harts_titan.tree import MODES, StepPlan, plan_step


def batch():
    return flat(random_sequences(np.random.default_rng(9), 25, chunk=4))


def make_plan(mode):
    return plan_step(*batch(), capacity=80, chunk_size=4, dp_degree=2, mode=mode)


def worker(rank, rendezvous, folder, src):
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    try:
        for mode in MODES:
            plan = StepPlan.broadcast(make_plan(mode) if rank == src else None, src)
            plan.validate(*batch())
            plan.save(f"{folder}/{mode}_{rank}.pt")
        with pytest.raises(ValueError, match=f"rank {src} has no plan"):
            StepPlan.broadcast(None, src)
    finally:
        dist.destroy_process_group()


def test_broadcast_over_two_processes(tmp_path):
    mp.spawn(worker, args=(tmp_path / "rendezvous", tmp_path, 1), nprocs=2)
    for mode in MODES:
        left, right = (torch.load(tmp_path / f"{mode}_{rank}.pt", weights_only=True) for rank in range(2))
        assert torch.equal(left["flat"], right["flat"]) and left["header"] == right["header"]
