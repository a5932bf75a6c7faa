"""Exact contiguous partition of sorted trajectories into microbatches (HARTS 3.2, A.1).

Shapes: N trajectories in lexicographic order, K groups (microbatches).
"""

from __future__ import annotations

from dataclasses import dataclass

import numba
import numpy as np

from harts_titan.tree.slots import assign_slots, initial_objective

_INFEASIBLE = np.iinfo(np.int64).max // 4


@dataclass(frozen=True)
class ContiguousPartition:
    """Contiguous groups of the sorted order, placed on replicas and slots.

    Attributes:
        bound_K1: int64 (K+1,) group ``g`` holds sorted places ``[bound[g], bound[g+1])``.
        rows_K: int64 compact rows of each group.
        group_SD: int64 (num_slots, dp_degree) group that replica ``d`` runs in slot ``j``.
    """

    bound_K1: np.ndarray
    rows_K: np.ndarray
    group_SD: np.ndarray

    @property
    def num_groups(self) -> int:
        """Number of microbatches over all replicas."""
        return int(self.rows_K.shape[0])

    @property
    def objective(self) -> tuple[int, int, int]:
        """``J_init``, see :func:`harts_titan.tree.slots.initial_objective`."""
        return initial_objective(self.rows_K, self.group_SD)


def contiguous_partition(
    length_N: np.ndarray, lcp_N: np.ndarray, capacity: int, dp_degree: int = 1, *, index_N: np.ndarray | None = None
) -> ContiguousPartition:
    """Return the contiguous partition of least ``J_init`` over every feasible number of groups (HARTS Eq. 1, A.1).

    ``F[k,e] = W[e] + min_s (F[k-1,s] - W[s] + lcp[s+1])`` over the ``s`` whose group fits the capacity, where
    ``W[e] = sum_{i<=e} (length_i - lcp_i)``. The feasible ``s`` form a window that only moves right, so a monotone
    queue computes a layer in O(N). Not in the paper: layers are computed for every count, until a lower bound
    (the distinct tokens plus the smallest ``k-1`` common prefixes) exceeds the best total found.

    Args:
        length_N: int64 tokens of each trajectory in lexicographic order.
        lcp_N: int64 common prefix with the trajectory before; entry 0 is taken as 0.
        capacity: compact rows a group may have.
        dp_degree: number of replicas; the number of groups is a multiple of it.
        index_N: names of the trajectories for error messages; default 0..N-1.

    Returns:
        The partition with groups in sorted order, and their places.

    Raises:
        ValueError: If a trajectory is longer than ``capacity``, there are fewer trajectories than replicas, or an
            argument is out of range.
    """
    found = search_contiguous(length_N, lcp_N, capacity, dp_degree, index_N=index_N)
    # N singletons fit whenever every trajectory does, but N need not be a multiple of dp_degree.
    if found is None:
        raise ValueError(
            f"no contiguous partition of {len(length_N)} trajectories into a multiple of {dp_degree} microbatches of "
            f"at most {capacity} rows exists; raise capacity or change the number of trajectories"
        )
    return found


def search_contiguous(
    length_N: np.ndarray, lcp_N: np.ndarray, capacity: int, dp_degree: int, *, index_N: np.ndarray | None
) -> ContiguousPartition | None:
    """Return what :func:`contiguous_partition` does, or None where that finds no partition.

    Args:
        length_N: int64 tokens of each trajectory in lexicographic order.
        lcp_N: int64 common prefix with the trajectory before; entry 0 is taken as 0.
        capacity: compact rows a group may have.
        dp_degree: number of replicas; the number of groups is a multiple of it.
        index_N: names of the trajectories for error messages; None for 0..N-1.

    Raises:
        ValueError: If a trajectory is longer than ``capacity``, there are fewer trajectories than replicas, or an
            argument is out of range.
    """
    length_N = np.ascontiguousarray(length_N, dtype=np.int64)
    lcp_N = np.array(lcp_N, dtype=np.int64)
    n = length_N.shape[0]
    if length_N.ndim != 1 or length_N.shape != lcp_N.shape:
        raise ValueError(f"length_N {length_N.shape} and lcp_N {lcp_N.shape} must be 1-D and equal in size")
    if dp_degree < 1 or capacity < 1:
        raise ValueError(f"dp_degree ({dp_degree}) and capacity ({capacity}) must be at least 1")
    if n < dp_degree:
        raise ValueError(
            f"{n} trajectories cannot give each of {dp_degree} replicas one; "
            "raise the number of trajectories in the step or lower dp_degree"
        )
    if length_N.max() > capacity:
        i = int(length_N.argmax())
        name = i if index_N is None else int(index_N[i])
        raise ValueError(
            f"trajectory {name} has {length_N[i]} tokens, more than capacity {capacity}; raise capacity, or drop or "
            "truncate over-long trajectories"
        )
    lcp_N[0] = 0
    work = np.concatenate([np.zeros(1, np.int64), np.cumsum(length_N - lcp_N)])
    lowest = _first_feasible(work, lcp_N, int(capacity))
    cut_cost = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.sort(lcp_N[1:]))])
    best: ContiguousPartition | None = None
    best_total = _INFEASIBLE
    cost, previous = np.full(n + 1, _INFEASIBLE, np.int64), np.full(n + 1, _INFEASIBLE, np.int64)
    queue, value = np.empty(n + 1, np.int32), np.empty(n + 1, np.int64)
    cost[0] = 0
    back: list[np.ndarray] = []
    reach = 0
    for k in range(1, n + 1):
        if work[n] + cut_cost[k - 1] > best_total:
            break
        previous, cost = cost, previous
        origin, reach = _layer(previous, cost, queue, value, work, lcp_N, lowest, reach)
        back.append(origin)
        if k % dp_degree or cost[n] >= _INFEASIBLE or cost[n] > best_total:
            continue
        bound = [n]
        for layer in reversed(back):
            bound.append(int(layer[bound[-1]]))
        bound_K1 = np.array(bound[::-1], np.int64)
        lo, hi = bound_K1[:-1], bound_K1[1:]
        rows_K = work[hi] - work[lo] + lcp_N[lo]
        candidate = ContiguousPartition(bound_K1, rows_K, assign_slots(rows_K, dp_degree))
        if best is None or candidate.objective < best.objective:
            best, best_total = candidate, int(cost[n])
    return best


@numba.njit(cache=True)
def _first_feasible(work, lcp_N, capacity):
    """For each end ``e`` the least ``s`` such that places ``[s, e)`` fit; it never decreases."""
    n = lcp_N.shape[0]
    lowest = np.zeros(n + 1, np.int64)
    s = 0
    for e in range(1, n + 1):
        while work[e] - work[s] + lcp_N[s] > capacity:
            s += 1
        lowest[e] = s
    return lowest


@numba.njit(cache=True)
def _layer(previous, cost, queue, value, work, lcp_N, lowest, reach):
    """One more group: set the cost of every end; return the start of the last group for each, up to the last reached.

    ``reach`` is the last end that the groups before can reach. It never decreases, so entries of ``cost`` beyond the
    ends of this layer are as they were in the beginning: infeasible.
    """
    origin = np.empty(lcp_N.shape[0] + 1, np.int32)
    head, tail, last = 0, 0, 0
    cost[0], origin[0] = _INFEASIBLE, -1
    for e in range(1, lcp_N.shape[0] + 1):
        low = lowest[e]
        if low > reach:
            break
        s = e - 1
        if previous[s] < _INFEASIBLE:
            v = previous[s] - work[s] + lcp_N[s]
            while tail > head and value[tail - 1] > v:
                tail -= 1
            queue[tail] = s
            value[tail] = v
            tail += 1
        while head < tail and queue[head] < low:
            head += 1
        if head < tail:
            origin[e] = queue[head]
            cost[e] = work[e] + value[head]
            last = e
        else:
            origin[e] = -1
            cost[e] = _INFEASIBLE
    return origin[: last + 1].copy(), last
