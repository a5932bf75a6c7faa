"""Trie-aware greedy microbatches (HARTS A.1).

Shapes: M leaves by sorted place, see :mod:`harts_titan.tree.groups`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from harts_titan.tree.compiled import kernel
from harts_titan.tree.groups import (
    GROUP,
    HEAD,
    ROWS,
    SIZE,
    cheapest,
    empty_groups,
    insert,
    put_back,
    remove,
    settle,
    take_out,
)
from harts_titan.tree.sorted_step import SortedStep


def greedy_groups(leaves: SortedStep, *, capacity: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the candidates of four orders of insertion and two rules, small groups eliminated.

    The paper names neither its orders nor a small group. Ours: sorted, reverse sorted, longest first, most shared
    first; a group of at most half the capacity is small.

    Args:
        leaves: trajectories of which none is a prefix of another, each at most ``capacity`` tokens.
        capacity: compact rows a group may have.

    Yields:
        (name, int64 (M,) group of each leaf in 0..K-1).
    """
    m = leaves.num_trajectories
    shared_M = np.maximum(leaves.lcp_N, np.append(leaves.lcp_N[1:], 0))
    orders = {
        "sorted": np.arange(m),
        "reverse": np.arange(m)[::-1].copy(),
        "longest": np.argsort(-leaves.length_N, kind="stable"),
        "most-shared": np.argsort(-shared_M, kind="stable"),
    }
    removed_M5 = np.zeros((m, 5), np.int64)
    for order, place_M in orders.items():
        for rule, tightest in (("max-shared", False), ("best-fit", True)):
            groups = empty_groups(leaves, capacity=capacity)
            _build(groups, place_M, tightest)
            used = np.flatnonzero(groups.group_K8[:, SIZE])
            by_rows = used[np.argsort(groups.group_K8[used, ROWS], kind="stable")]
            _eliminate(groups, by_rows, capacity // 2, removed_M5)
            yield (
                f"greedy {order} {rule}",
                np.unique(groups.leaf_M6[:, GROUP], return_inverse=True)[1].astype(np.int64),
            )


@kernel
def _build(groups, place_M, tightest):
    for x in place_M:
        settle(groups, x, tightest, 0)


@kernel
def _eliminate(groups, by_rows, small, removed_M5):
    """Dissolve small groups, least rows first, where all their leaves fit elsewhere for no more rows."""
    for g in by_rows:
        if groups.group_K8[g, SIZE] == 0 or groups.group_K8[g, ROWS] > small:
            continue
        n, rows = 0, 0
        while groups.group_K8[g, SIZE] > 0:
            rows -= take_out(groups, groups.group_K8[g, HEAD], removed_M5, n)
            n += 1
        done = 0
        while done < n and rows <= 0:
            x = removed_M5[done, 0]
            target, p, left, right = cheapest(groups, x, False, 0)
            if target < 0:
                break
            rows += insert(groups, x, target, p, left, right)
            done += 1
        if done < n or rows > 0:
            for i in range(done - 1, -1, -1):
                remove(groups, removed_M5[i, 0])
            put_back(groups, removed_M5, n)
