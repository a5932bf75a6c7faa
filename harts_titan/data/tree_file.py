"""Trees without their tokens: lengths and common prefixes of sorted trajectories, and tokens that have exactly these.

What sharing saves is a property of the tree alone, so a benchmark needs no more of a real step than this. A file is an
``.npz`` with int64 ``length`` and ``lcp`` (N,): tokens of each trajectory in lexicographic order, and how many of them
it has in common with the one before. It may have int64 ``node_start`` (M,): ascending positions, in the trajectories
one after another, where a node of the rollout tree begins.
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harts_titan.tree import check_node_start, sort_trajectories

_FIELDS = ("length", "lcp")


@dataclass(frozen=True)
class StoredTree:
    """A tree without its tokens; checked and int64 at construction.

    Attributes:
        length_N: int64 tokens of each trajectory, in lexicographic order.
        lcp_N: int64 tokens that each has in common with the one before; entry 0 is 0.
        node_start: int64 (M,) ascending positions, in the trajectories one after another, where a node of the rollout
            tree begins; None if the tree names none.

    Raises:
        ValueError: If there is no such tree.
    """

    length_N: np.ndarray
    lcp_N: np.ndarray
    node_start: np.ndarray | None = None

    def __post_init__(self) -> None:
        check_tree(self.length_N, self.lcp_N)
        for name in ("length_N", "lcp_N"):
            object.__setattr__(self, name, np.asarray(getattr(self, name), np.int64))
        if self.node_start is not None:
            checked = check_node_start(self.node_start, int(self.length_N.sum()))
            object.__setattr__(self, "node_start", checked)

    def first(self, number: int) -> StoredTree:
        """Return the tree of the first trajectories."""
        length_N, nodes = self.length_N[:number], self.node_start
        return StoredTree(length_N, self.lcp_N[:number], None if nodes is None else nodes[nodes < int(length_N.sum())])


def tree_of(tokens: np.ndarray, offsets: np.ndarray, node_start: np.ndarray | None = None) -> StoredTree:
    """Return the tree of trajectories.

    Args:
        tokens: int32 (S,), one trajectory after another.
        offsets: int64 (N+1,) bounds.
        node_start: int64 (M,) ascending positions in ``tokens`` where a node begins.
    """
    order_N, lcp_N = sort_trajectories(tokens, offsets)
    length_N = np.diff(offsets)[order_N]
    if node_start is not None:
        moved_N = np.empty_like(length_N)
        moved_N[order_N] = np.cumsum(length_N) - length_N - offsets[order_N]
        trajectory_M = np.searchsorted(offsets, node_start, "right") - 1
        node_start = np.sort(node_start + moved_N[trajectory_M])
    return StoredTree(length_N, lcp_N, node_start)


def write_tree(path: str | Path, tree: StoredTree) -> None:
    """Write a tree file; see :func:`read_tree`."""
    nodes: dict[str, Any] = {} if tree.node_start is None else {"node_start": tree.node_start}
    np.savez_compressed(path, length=tree.length_N, lcp=tree.lcp_N, **nodes)


def read_tree(path: str | Path) -> StoredTree:
    """Read a tree file.

    Raises:
        ValueError: Naming the file and what is wrong with it.
    """
    if not Path(path).is_file():
        raise ValueError(f"{path}: no such file")
    try:
        with np.load(path, allow_pickle=False) as content:
            missing = [name for name in _FIELDS if name not in content]
            if missing:
                raise ValueError(f"lacks {' and '.join(missing)}; a tree file has {' and '.join(_FIELDS)}")
            arrays = [content[name] for name in (*_FIELDS, "node_start") if name in content]
        return StoredTree(*arrays)
    except (zipfile.BadZipFile, OSError, EOFError, ValueError) as error:
        raise ValueError(f"{path}: no usable tree file: {error}") from error


def check_tree(length_N: np.ndarray, lcp_N: np.ndarray) -> None:
    """Check that there are sorted trajectories of such lengths and common prefixes.

    Raises:
        ValueError: Naming the trajectory.
    """
    length_N, lcp_N = np.asarray(length_N), np.asarray(lcp_N)
    for name, array in (("length", length_N), ("lcp", lcp_N)):
        if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer) or array.shape != length_N.shape:
            raise ValueError(f"{name} is {array.dtype} {array.shape}; both must be 1-D integer arrays of one size")
    if not length_N.size:
        raise ValueError("no trajectories")
    previous = np.append(0, length_N[:-1])
    # A trajectory that ends at the common prefix equals the one before it, or it would come first.
    bad = (length_N < 1) | (lcp_N < 0) | (lcp_N > np.minimum(length_N, previous))
    bad |= (lcp_N == length_N) & (previous > length_N)
    if bad.any():
        n = int(bad.argmax())
        raise ValueError(
            f"trajectory {n} of {length_N[n]} tokens cannot share {lcp_N[n]} with one of {previous[n]} before it "
            "in lexicographic order"
        )


def tokens_from_tree(
    length_N: np.ndarray, lcp_N: np.ndarray, vocab_size: int, *, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Draw tokens for a tree: the same for the same arguments, with exactly these common prefixes.

    Args:
        length_N: int64 tokens of each trajectory, in lexicographic order.
        lcp_N: int64 common prefix with the trajectory before; entry 0 is 0.
        vocab_size: ids are drawn below it; where paths part, ids of siblings follow each other.
        seed: of the draws.

    Returns:
        int32 (S,) tokens and int64 (N+1,) offsets.

    Raises:
        ValueError: If there is no such tree, or the vocabulary is too small for its widest fork.
    """
    check_tree(length_N, lcp_N)
    num = len(length_N)
    # Room for as many siblings as there are trajectories, above any id drawn.
    drawn = vocab_size - num
    if drawn < 1:
        raise ValueError(f"a vocabulary of {vocab_size} ids is too small for {num} trajectories; it must have more")
    rng = np.random.default_rng(seed)
    offsets = np.concatenate([[0], np.cumsum(length_N)]).astype(np.int64)
    tokens = rng.integers(0, drawn, int(offsets[-1]), dtype=np.int32)
    for n in range(1, num):
        begin, before, common = offsets[n], offsets[n - 1], int(lcp_N[n])
        tokens[begin : begin + common] = tokens[before : before + common]
        if common < length_N[n] and common < length_N[n - 1]:
            tokens[begin + common] = tokens[before + common] + 1
    return tokens, offsets
