"""What ``harts-bench`` runs: rollouts, tokens, or a stored tree; a whole step or one of its microbatches."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from harts_titan.cli import common
from harts_titan.cli.plan_read import read_step
from harts_titan.data import RolloutBatch
from harts_titan.data.source import dataset_from_config
from harts_titan.data.tree_file import read_tree, tokens_from_tree
from harts_titan.tree import StepPlan, plan_step


@dataclass(frozen=True)
class Workload:
    """Trajectories to run, and where they are from."""

    batch: RolloutBatch
    source: str
    microbatch: int | None = None
    """Slot of replica 0 of the step's plan that the batch is; None = the whole step."""
    dp_degree: int = 1
    """Replicas the step was planned for."""
    nodes: int | None = None
    """Nodes of the rollout tree that modes ``nodewise`` and ``depthwise`` run, over all microbatches; None if the
    workload does not say where they begin."""

    def report(self) -> dict[str, Any]:
        """Return what identifies the workload, as JSON."""
        return {
            "source": self.source,
            "microbatch": self.microbatch,
            "dp_degree": self.dp_degree,
            "trajectories": self.batch.num_trajectories,
            "original_tokens": self.batch.num_positions,
            "nodes": self.nodes,
        }


def add_workload_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what is run."""
    parser.add_argument(
        "--rollouts",
        metavar="FILE",
        help="rollouts to use instead of data.path, or .npz with tokens and offsets, optionally node_start",
    )
    parser.add_argument(
        "--tree",
        metavar="FILE",
        help="stored tree (.npz with length and lcp, optionally node_start): random tokens with these prefixes",
    )
    parser.add_argument(
        "--microbatch", type=int, metavar="K", help="run only what replica 0 has in slot K of the planned step"
    )
    parser.add_argument(
        "--dp", type=int, default=1, metavar="D", help="replicas --microbatch plans for (default %(default)s)"
    )


def check_workload_options(options: argparse.Namespace) -> None:
    """Refuse options that contradict each other, before anything is built.

    Raises:
        ValueError: Naming the option.
    """
    if options.tree is not None and options.rollouts is not None:
        raise ValueError("--tree and --rollouts both say what to run; leave one out")
    if options.dp < 1:
        raise ValueError(f"--dp ({options.dp}) must be at least 1")
    if options.dp > 1 and options.microbatch is None:
        raise ValueError("--dp says how the step of --microbatch is planned; without it the whole step runs here")
    if options.microbatch is not None and options.microbatch < 0:
        raise ValueError(f"--microbatch ({options.microbatch}) must be at least 0")


def load_workload(options: argparse.Namespace, config: Any, *, vocab_size: int) -> Workload:
    """Read what the options name.

    Args:
        options: of :func:`add_workload_options` and :func:`harts_titan.cli.common.add_common_options`.
        config: merged ``JobConfig``, with the options' overrides.
        vocab_size: ids the model has.

    Raises:
        ValueError: If the input is unusable, or there is no such microbatch.
    """
    if options.tree is not None:
        tree = read_tree(options.tree)
        if options.limit is not None:
            tree = tree.first(options.limit)
        tokens, offsets = tokens_from_tree(tree.length_N, tree.lcp_N, vocab_size)
        workload = Workload(_trained(tokens, offsets, tree.node_start), options.tree)
    elif options.rollouts is not None and options.rollouts.endswith(".npz"):
        tokens, offsets, node_start, _ = read_step(
            options.rollouts, capacity=config.tree.max_tokens, dp_degree=options.dp, limit=options.limit or 0
        )
        workload = Workload(_trained(tokens, offsets, node_start), options.rollouts)
    else:
        dataset = dataset_from_config(
            config, vocab_size=vocab_size, min_trajectories=options.dp, hint=common.path_hint(options)
        )
        workload = Workload(dataset.batch.select(dataset.steps_of_epoch(0)[0]), options.rollouts or config.data.path)
    longest = int(np.diff(workload.batch.offsets).max())
    if longest > config.tree.max_tokens:
        raise ValueError(
            f"{workload.source}: a trajectory has {longest} tokens; raise tree.max_tokens ({config.tree.max_tokens})"
        )
    if options.microbatch is not None:
        workload = _microbatch(workload, options, config)
    if workload.batch.node_start is None:
        return workload
    return replace(workload, nodes=_plan(workload.batch, config, mode="nodewise", dp_degree=1).stats.num_segments)


def _trained(tokens: np.ndarray, offsets: np.ndarray, node_start: np.ndarray | None) -> RolloutBatch:
    """Return trajectories without metadata as a batch that trains on every token that something predicts."""
    mask = np.ones(len(tokens), bool)
    mask[offsets[:-1]] = False
    return RolloutBatch(tokens=tokens, offsets=offsets, loss_mask=mask, node_start=node_start)


def _microbatch(workload: Workload, options: argparse.Namespace, config: Any) -> Workload:
    batch = workload.batch
    plan = _plan(batch, config, mode="compact", dp_degree=options.dp)
    if options.microbatch >= plan.num_slots:
        raise ValueError(
            f"--microbatch ({options.microbatch}): the step has {plan.num_slots} slots on each of {options.dp} replicas"
        )
    chosen = np.flatnonzero((plan.replica_N == 0) & (plan.slot_N == options.microbatch))
    return Workload(batch.select(chosen), workload.source, options.microbatch, options.dp)


def _plan(batch: RolloutBatch, config: Any, *, mode: str, dp_degree: int) -> StepPlan:
    """Place a batch without laying its rows out."""
    return plan_step(
        batch.tokens,
        batch.offsets,
        capacity=config.tree.max_tokens,
        chunk_size=config.tree.chunk_size,
        dp_degree=dp_degree,
        mode=mode,
        planner="l1",
        replicas=(),
        node_start=batch.node_start,
    )
