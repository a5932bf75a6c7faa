"""Independent oracles and generators for the planner tests: nothing here imports the planner."""

from __future__ import annotations

from itertools import pairwise, product

import numba
import numpy as np


def flat(sequences) -> tuple[np.ndarray, np.ndarray]:
    """Join token lists to (tokens int32, offsets int64)."""
    tokens = np.concatenate([np.asarray(s, dtype=np.int32) for s in sequences])
    return tokens, np.concatenate([[0], np.cumsum([len(s) for s in sequences])]).astype(np.int64)


def random_sequences(rng, count, *, chunk, vocabulary=3, short=0.4):
    """Draw trajectories with forks at any offset, prefixes, duplicates, one-token tails and several roots."""
    out = []
    for _ in range(count):
        tail = int(rng.integers(1, 3)) if rng.random() < short else int(rng.integers(1, 3 * chunk))
        kind = rng.random()
        if not out or kind < 0.08:
            out.append(rng.integers(0, vocabulary, tail))
            continue
        base = out[rng.integers(len(out))]
        if kind < 0.15:
            out.append(base.copy())
        elif kind < 0.3:
            out.append(base[: rng.integers(1, len(base) + 1)])
        elif kind < 0.5:
            # Extending a whole trajectory makes the tree deep.
            out.append(np.concatenate([base, rng.integers(0, vocabulary, tail)]))
        else:
            out.append(np.concatenate([base[: rng.integers(0, len(base) + 1)], rng.integers(0, vocabulary, tail)]))
    return out


class Trie:
    """One node per token; the plainest possible prefix tree."""

    def __init__(self, sequences):
        self.children, self.ends, self.through, self.path = [{}], [0], [0], []
        for s in sequences:
            node, path = 0, []
            for t in map(int, s):
                if t not in self.children[node]:
                    self.children[node][t] = len(self.children)
                    self.children.append({})
                    self.ends.append(0)
                    self.through.append(0)
                node = self.children[node][t]
                self.through[node] += 1
                path.append(node)
            self.ends[node] += 1
            self.path.append(path)

    def __len__(self):
        return len(self.children) - 1

    def segments(self):
        """Set of maximal fork-free token paths, each as (nodes from first to last)."""
        out, todo = set(), list(self.children[0].values())
        while todo:
            run = [todo.pop()]
            while len(self.children[run[-1]]) == 1:
                run.append(next(iter(self.children[run[-1]].values())))
            out.add(tuple(run))
            todo += self.children[run[-1]].values()
        return out


def compact_size(sequences) -> int:
    """Number of distinct non-empty prefixes."""
    return len({tuple(map(int, s[: i + 1])) for s in sequences for i in range(len(s))})


def contiguous_optimum(sizes, num_places, capacity, dp_degree):
    """Least total over all contiguous partitions into a multiple of dp_degree groups; sizes[s][e] rows of [s, e)."""
    best = None
    for cuts in product((False, True), repeat=num_places - 1):
        bound = [0, *[i + 1 for i, cut in enumerate(cuts) if cut], num_places]
        groups = [sizes[lo][hi] for lo, hi in pairwise(bound)]
        if len(groups) % dp_degree or max(groups) > capacity:
            continue
        if best is None or sum(groups) < best:
            best = sum(groups)
    return best


def forest_shapes(n):
    """Return every unordered forest of n segments once, as parent tuples (parents first)."""
    seen, out = set(), []

    def canonical(parent):
        below = [[] for _ in range(n + 1)]
        for v in range(n - 1, -1, -1):
            below[parent[v]].append("(" + "".join(sorted(below[v])) + ")")
        return "".join(sorted(below[-1]))

    for parent in product(*[range(-1, v) for v in range(n)]):
        # Preorder only: a segment's parent is the one before it or one of that segment's ancestors.
        if all(_on_path(parent, v) for v in range(1, n)):
            key = canonical(parent)
            if key not in seen:
                seen.add(key)
                out.append(parent)
    return out


def _on_path(parent, v):
    u = v - 1
    while u >= 0 and u != parent[v]:
        u = parent[u]
    return u == parent[v]


@numba.njit(cache=True)
def _starts(parent, length, root_start):
    n = parent.shape[0]
    start, handed = np.zeros(n, np.int64), np.zeros(n, np.int64)
    for v in range(n):
        p = parent[v]
        start[v] = root_start[v] if p < 0 else start[p] + length[p]
        handed[v] = root_start[v] if p < 0 else handed[p]
    return start, handed


@numba.njit(cache=True)
def _maker(v, parent, start, handed, chunk):
    """Segment in which the state at the last chunk boundary before v is made; -1 if it exists from the beginning."""
    anchor = start[v] // chunk * chunk
    if anchor <= handed[v]:
        return -1
    u = parent[v]
    while start[u] > anchor - 1:
        u = parent[u]
    return u


@numba.njit(cache=True)
def plan_error(parent, length, chunk, root_start, num_rounds, round_V, continues_V, replay_V):
    """Return 0 if the plan is executable and its fields are consistent, else a code."""
    start, handed = _starts(parent, length, root_start)
    n = parent.shape[0]
    continued, used = np.zeros(n, np.int64), np.zeros(num_rounds, np.int64)
    for v in range(n):
        if round_V[v] < 0 or round_V[v] >= num_rounds:
            return 1
        used[round_V[v]] = 1
        if continues_V[v]:
            if parent[v] < 0:
                return 2
            continued[parent[v]] += 1
            if round_V[v] != round_V[parent[v]] or replay_V[v] != 0:
                return 3
        else:
            maker = _maker(v, parent, start, handed, chunk)
            if maker >= 0 and round_V[maker] >= round_V[v]:
                return 4
            if replay_V[v] != start[v] % chunk:
                return 5
    if continued.max() > 1:
        return 6
    if used.min() == 0:
        return 7
    return 0


@numba.njit(cache=True)
def brute_force(parent, length, chunk, root_start):
    """Return (fewest rounds, fewest replayed tokens at that) over every choice of continuing children."""
    n = parent.shape[0]
    start, handed = _starts(parent, length, root_start)
    num_children = np.zeros(n, np.int64)
    ordinal = np.zeros(n, np.int64)
    for v in range(n):
        if parent[v] >= 0:
            num_children[parent[v]] += 1
            ordinal[v] = num_children[parent[v]]
    choice, round_V = np.zeros(n, np.int64), np.zeros(n, np.int64)
    best_rounds, best_replay = n + 1, 0
    while True:
        rounds, replay = 0, 0
        for v in range(n):
            if parent[v] >= 0 and choice[parent[v]] == ordinal[v]:
                round_V[v] = round_V[parent[v]]
            else:
                maker = _maker(v, parent, start, handed, chunk)
                round_V[v] = 0 if maker < 0 else round_V[maker] + 1
                replay += start[v] % chunk
            rounds = max(rounds, round_V[v] + 1)
        if rounds < best_rounds or (rounds == best_rounds and replay < best_replay):
            best_rounds, best_replay = rounds, replay
        v = 0
        while v < n and choice[v] == num_children[v]:
            choice[v] = 0
            v += 1
        if v == n:
            return best_rounds, best_replay
        choice[v] += 1
