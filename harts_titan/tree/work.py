"""Where a step's trajectories run, and what each work item then executes (HARTS 3.2, A.2).

Shapes: N trajectories by sorted place, J slots, D replicas, W sharing windows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numba
import numpy as np

from harts_titan.tree.cost import PlanCost
from harts_titan.tree.sorted_step import SortedStep, common_prefix


@dataclass(frozen=True)
class Placement:
    """The planner's decision: everything else in a step plan follows from it.

    The producer of replica ``d`` in window ``w`` computes the union of the prefixes ``x[:shared_N[x]]`` of the
    trajectories that ``d`` runs in the slots of ``w``. ``shared_N`` is closed: a trajectory's entry is the deepest of
    its rows that this union contains.

    Attributes:
        replica_N: int64 data-parallel replica of the trajectory at each sorted place.
        slot_N: int64 slot.
        window_ptr_W1: int64 slots of window ``w`` are ``[window_ptr[w], window_ptr[w+1])``; one slot each where windows
            are off.
        shared_N: int64 tokens of the trajectory that its producer computes, 0 for none.
    """

    replica_N: np.ndarray
    slot_N: np.ndarray
    window_ptr_W1: np.ndarray
    shared_N: np.ndarray

    @property
    def num_slots(self) -> int:
        """Slots of the step."""
        return int(self.window_ptr_W1[-1])

    @property
    def num_windows(self) -> int:
        """Sharing windows of the step."""
        return int(self.window_ptr_W1.shape[0]) - 1

    @property
    def window_J(self) -> np.ndarray:
        """Window of each slot: int64."""
        return np.repeat(np.arange(self.num_windows), np.diff(self.window_ptr_W1))


@dataclass(frozen=True)
class Work:
    """Rows, attended and recomputed pairs of every work item of a placement (HARTS A.2).

    A piece is what one trajectory adds to an item, members taken in sorted order: ``q`` new rows of ``k`` visible
    tokens. It attends ``q * (k - q) + q * (q + 1) / 2`` pairs and recomputes ``q * k``.

    Attributes:
        complete_JD: int64 distinct prefixes of each consumer.
        residual_JD: int64 rows a consumer executes: complete rows less those found in its producer.
        attended_JD: int64 pairs of the residual rows.
        recomputed_JD: int64 pairs.
        producer_WD: int64 rows each producer executes; 0 where a replica has none.
        producer_attended_WD: int64 pairs.
        producer_recomputed_WD: int64 pairs.
    """

    complete_JD: np.ndarray
    residual_JD: np.ndarray
    attended_JD: np.ndarray
    recomputed_JD: np.ndarray
    producer_WD: np.ndarray
    producer_attended_WD: np.ndarray
    producer_recomputed_WD: np.ndarray

    @property
    def compact_tokens(self) -> int:
        """Complete rows of all consumers."""
        return int(self.complete_JD.sum())

    def decoder_tokens(self, cost: PlanCost) -> int:
        """Return the rows that decoder layers execute: producers and residuals, alignment padding included."""
        return int(cost.align(self.residual_JD).sum() + cost.align(self.producer_WD).sum())

    def consumer_costs(self, cost: PlanCost) -> tuple[np.ndarray, np.ndarray]:
        """Return forward and backward cost of each consumer: int64 (J, D) each."""
        rows = cost.align(self.residual_JD)
        forward = cost.forward_row * rows + cost.forward_pair * self.attended_JD
        backward = cost.backward_row * rows + cost.backward_pair * self.recomputed_JD
        return (
            forward + cost.head_forward_row * self.complete_JD,
            backward + cost.head_backward_row * self.complete_JD,
        )

    def producer_costs(self, cost: PlanCost) -> tuple[np.ndarray, np.ndarray]:
        """Return forward and backward cost of each producer: int64 (W, D) each."""
        rows = cost.align(self.producer_WD)
        return (
            cost.forward_row * rows + cost.forward_pair * self.producer_attended_WD,
            cost.backward_row * rows + cost.backward_pair * self.producer_recomputed_WD,
        )

    def phi(self, cost: PlanCost) -> int:
        """Return the synchronised cost of the step: the slowest replica of every computation (HARTS Eq. 2).

        Raises:
            ValueError: If the costs of all items together do not fit into int64.
        """
        self._check_range(cost)
        parts = (*self.consumer_costs(cost), *self.producer_costs(cost))
        return sum(int(part.max(axis=1).sum()) for part in parts)

    def _check_range(self, cost: PlanCost) -> None:
        rows = float(self.decoder_tokens(cost))
        attended = float(self.attended_JD.sum() + self.producer_attended_WD.sum())
        recomputed = float(self.recomputed_JD.sum() + self.producer_recomputed_WD.sum())
        total = (
            (cost.forward_row + cost.backward_row) * rows
            + cost.forward_pair * attended
            + cost.backward_pair * recomputed
            + (cost.head_forward_row + cost.head_backward_row) * float(self.compact_tokens)
        )
        if total >= 2**63:
            raise ValueError(
                f"the step costs {total:.3g} with the coefficients from '{cost.source}', more than int64 holds "
                f"({2.0**63:.3g}); divide all of them by the same number: only their ratios matter"
            )

    def imbalance(self, cost: PlanCost) -> float:
        """Return the largest replica total over the mean, less one."""
        total_D = self._replica_costs(cost)
        return float(int(total_D.max()) * total_D.size / int(total_D.sum()) - 1)

    def score(self, cost: PlanCost) -> tuple[int, int, float, int]:
        """Return what plans are compared by, smaller first (HARTS 3.2): ``Phi``, decoder tokens, imbalance, largest."""
        return self.phi(cost), self.decoder_tokens(cost), self.imbalance(cost), int(self._replica_costs(cost).max())

    def _replica_costs(self, cost: PlanCost) -> np.ndarray:
        return sum(part.sum(axis=0) for part in (*self.consumer_costs(cost), *self.producer_costs(cost)))

    def balance(self) -> float:
        """Return mean over largest rows of all computations: ``eta`` of HARTS 5.3."""
        rows = np.concatenate([self.residual_JD, self.producer_WD])
        return float(rows.sum() / (rows.shape[1] * rows.max(axis=1).sum()))

    def computation_balance(self) -> np.ndarray:
        """Return mean over largest rows of each slot and each window with a producer: float64, slots first."""
        rows = np.concatenate([self.residual_JD, self.producer_WD])
        rows = rows[rows.max(axis=1) > 0]
        return rows.mean(axis=1) / rows.max(axis=1)

    def step_balance(self) -> float:
        """Return mean over largest of the replicas' executed rows, replay not counted."""
        total_D = self.residual_JD.sum(axis=0) + self.producer_WD.sum(axis=0)
        return float(total_D.mean() / total_D.max())


def measure(step: SortedStep, placement: Placement, dp_degree: int) -> Work:
    """Return the work items of a placement.

    Args:
        step: sorted trajectories.
        placement: where they run.
        dp_degree: number of replicas.

    Time: O(N).
    """
    consumers, producers = _measure(
        step.length_N,
        step.minimum_LN,
        np.ascontiguousarray(placement.replica_N, dtype=np.int64),
        np.ascontiguousarray(placement.slot_N, dtype=np.int64),
        placement.window_J.astype(np.int64),
        np.ascontiguousarray(placement.shared_N, dtype=np.int64),
        placement.num_slots,
        placement.num_windows,
        int(dp_degree),
    )
    return Work(*consumers, *producers)


@numba.njit(cache=True)
def _measure(length_N, minimum_LN, replica_N, slot_N, window_J, shared_N, num_slots, num_windows, dp_degree):
    consumers = np.zeros((4, num_slots, dp_degree), np.int64)
    producers = np.zeros((3, num_windows, dp_degree), np.int64)
    last_JD = np.full((num_slots, dp_degree), -1)
    last_WD = np.full((num_windows, dp_degree), -1)
    for x in range(length_N.shape[0]):
        d, j = replica_N[x], slot_N[x]
        w = window_J[j]
        seen = common_prefix(minimum_LN, last_JD[j, d], x) if last_JD[j, d] >= 0 else 0
        last_JD[j, d] = x
        consumers[0, j, d] += length_N[x] - seen
        k = length_N[x]
        q = k - max(seen, shared_N[x])
        if q > 0:
            consumers[1, j, d] += q
            consumers[2, j, d] += q * (k - q) + q * (q + 1) // 2
            consumers[3, j, d] += q * k
        k = shared_N[x]
        if k > 0:
            seen = common_prefix(minimum_LN, last_WD[w, d], x) if last_WD[w, d] >= 0 else 0
            last_WD[w, d] = x
            q = k - seen
            if q > 0:
                producers[0, w, d] += q
                producers[1, w, d] += q * (k - q) + q * (q + 1) // 2
                producers[2, w, d] += q * k
    return consumers, producers
