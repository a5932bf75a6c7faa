"""Floating-point operations of Ling's calls in any mode: the one formula of plans and benchmarks (docs/performance.md).

Linear work counts every executed row, linear attention every packed row (replay included), full attention the causal
pairs, the head the complete rows. Backward, its recomputations and replay are listed apart, so that useful work, work
of an update and work of the hardware can all be read from one count.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from harts_titan.models.ling.config import LingArgs
from harts_titan.models.ling.cost import AGAIN, BACKWARD, RowOperations, row_operations
from harts_titan.tree import CallLayout, StepPlan

PARTS = tuple(f.name for f in fields(RowOperations))


@dataclass(frozen=True)
class CallWork:
    """What calls execute, whatever the model's sizes."""

    rows: int = 0
    """Own rows: what every layer computes once."""
    packed_rows: int = 0
    """Rows of the linear-attention sequences; own rows and replayed ones, without what fills last chunks."""
    pairs: int = 0
    """Pairs of a row and a row it sees, itself included."""
    head_rows: int = 0
    """Rows of complete layouts, which the LM head sees."""

    def __add__(self, other: CallWork) -> CallWork:
        return CallWork(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def of(self, part: str, *, replay: bool = True) -> int:
        """Return how often an operation of :class:`RowOperations` runs in a forward pass."""
        if part == "core":
            return self.packed_rows if replay else self.rows
        return {"query_key": self.pairs, "value": self.pairs, "head": self.head_rows}.get(part, self.rows)


def work_of_calls(calls: Iterable[CallLayout]) -> CallWork:
    """Count what consumers execute: the calls of a plan in any mode."""
    work = CallWork()
    for call in calls:
        # Whoever computes the ancestors, a row sees all tokens up to its own.
        pairs = int((call.position_T + 1).sum())
        work += CallWork(call.num_rows, call.packed_row_P.shape[0], pairs, call.num_rows + call.num_external_rows)
    return work


def work_of_plan(plan: StepPlan) -> CallWork:
    """Count what all replicas of a plan execute, producers included, whether their rows are laid out or not."""
    items = plan.items
    start_G, length_G = items["segment_start_G"], items["segment_length_G"]
    rows = int(length_G.sum())
    # A row at position p sees p + 1 tokens.
    pairs = int((length_G * start_G + length_G * (length_G + 1) // 2).sum())
    head_rows = rows if plan.mode == "expanded" else plan.stats.compact_tokens
    return CallWork(rows, rows + int(items["segment_replay_G"].sum()), pairs, head_rows)


def expanded_work(offsets: np.ndarray) -> CallWork:
    """Count what mode ``expanded`` executes of trajectories, however they are placed.

    Args:
        offsets: int64 (N+1,) their bounds.
    """
    length_N = np.diff(offsets)
    tokens = int(length_N.sum())
    return CallWork(tokens, tokens, int((length_N * (length_N + 1) // 2).sum()), tokens)


@dataclass(frozen=True)
class Flops:
    """Operations of one forward and backward pass, by why they are done; each a count by :data:`PARTS`."""

    forward: dict[str, int]
    """Without replay."""
    backward: dict[str, int]
    """Products of the gradients, without replay."""
    replay: dict[str, int]
    """Forward and backward of the replayed rows, with what is computed again for them."""
    recompute: dict[str, int]
    """Forward work done again in the backward pass, by kernels and by activation recomputation."""

    def __add__(self, other: Flops) -> Flops:
        return Flops(*({p: getattr(self, f.name)[p] + getattr(other, f.name)[p] for p in PARTS} for f in fields(self)))

    @property
    def model(self) -> int:
        """Forward and backward that the mode cannot do without: no replay, no recomputation."""
        return sum(self.forward.values()) + sum(self.backward.values())

    @property
    def executed(self) -> int:
        """Everything."""
        return self.model + sum(self.replay.values()) + sum(self.recompute.values())

    def report(self) -> dict[str, Any]:
        """Return the counts as JSON: totals and parts."""
        totals = {f"{f.name}_total": sum(getattr(self, f.name).values()) for f in fields(self)}
        return {"model": self.model, "executed": self.executed, **totals} | {
            f.name: {part: count for part, count in getattr(self, f.name).items() if count} for f in fields(self)
        }


def count_flops(
    work: CallWork, one: RowOperations, *, recompute: bool, passes: int = 1, backward: bool = True
) -> Flops:
    """Count the operations of calls.

    Args:
        work: of the calls.
        one: operations of a row and a pair, of a model (``row_operations``) or a layer (``layer_operations``).
        recompute: layers run forward again in the backward pass (``activation_checkpoint.mode = "full"``).
        passes: times the work is done.
        backward: False for forward passes only.
    """
    forward, gradient, replay, again = ({} for _ in range(4))
    for part in PARTS:
        operations = passes * getattr(one, part)
        useful = work.of(part, replay=False) * operations
        # The head is no layer: its recomputation is the kernel's own.
        repeated = backward * (getattr(AGAIN, part) + (recompute and part != "head"))
        forward[part] = useful
        gradient[part] = backward * getattr(BACKWARD, part) * useful
        again[part] = repeated * useful
        extra = (work.of(part) - work.of(part, replay=False)) * operations
        replay[part] = (1 + backward * getattr(BACKWARD, part) + repeated) * extra
    return Flops(forward, gradient, replay, again)


def ling_flops(
    args: LingArgs, plan: StepPlan, offsets: np.ndarray, *, recompute: bool, passes: int = 1
) -> tuple[Flops, Flops]:
    """Count forward and backward of a step as planned, and with every trajectory on its own: both sides of a ratio.

    Args:
        args: the architecture.
        plan: of the step, in any mode.
        offsets: int64 (N+1,) bounds of its trajectories.
        recompute: as for :func:`count_flops`.
        passes: likewise.

    Returns:
        Operations over all replicas: of the plan, and of mode ``expanded``.
    """
    one = row_operations(args, chunk_size=plan.chunk_size)
    planned, expanded = work_of_plan(plan), expanded_work(offsets)
    return (
        count_flops(planned, one, recompute=recompute, passes=passes),
        count_flops(expanded, one, recompute=recompute, passes=passes),
    )
