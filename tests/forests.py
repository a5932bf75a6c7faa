"""Random rollout forests for tests, and an independent description of what a forest contains.

A forest is what the planner takes: ``tokens`` int32 (S,) of all trajectories one after another and ``offsets`` int64
(N + 1,). The generator imports nothing of the package under test; the same seed gives the same forest everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Forest = tuple[np.ndarray, np.ndarray]


def pack(trajectories: list[list[int]]) -> Forest:
    """Return (tokens, offsets) of a list of token lists."""
    offsets = np.zeros(len(trajectories) + 1, dtype=np.int64)
    np.cumsum([len(t) for t in trajectories], out=offsets[1:])
    return np.array([token for t in trajectories for token in t], dtype=np.int32), offsets


def unpack(tokens: np.ndarray, offsets: np.ndarray) -> list[list[int]]:
    return [tokens[offsets[n] : offsets[n + 1]].tolist() for n in range(len(offsets) - 1)]


def random_forest(
    seed: int,
    *,
    chunk_size: int,
    vocab_size: int = 48,
    num_trajectories: int = 8,
    max_length: int | None = None,
    min_length: int = 1,
) -> Forest:
    """Return a random forest of ``num_trajectories`` trajectories of ``min_length`` to ``max_length`` tokens.

    Forest ``seed`` certainly holds a fork at offset ``seed % chunk_size`` (so consecutive seeds cover every offset),
    and trajectories are made by forking an existing one, by repeating it, by stopping early in it, by going on after
    it, by chains of forks one to three tokens apart, or from nothing (a further root). Order is shuffled.
    """
    rng = np.random.default_rng(seed)
    max_length = max_length or 4 * chunk_size + 2
    offset = seed % chunk_size
    chunks = int(rng.integers(0 if offset else 1, 3))

    def fresh(count: int, avoid: int = -1) -> list[int]:
        out = rng.integers(0, vocab_size, size=count).tolist()
        if out and out[0] == avoid:
            out[0] = (avoid + 1) % vocab_size
        return out

    def fork(source: list[int], at: int, count: int) -> list[int]:
        avoid = source[at] if at < len(source) else -1
        return source[:at] + fresh(count, avoid)

    def length(low: int) -> int:
        return int(rng.integers(low, max(low + 1, max_length + 1)))

    at = min(chunks * chunk_size + offset, max_length - 1)
    first = fresh(max(at + 1, length(at + 1)))
    made = [first, fork(first, at, int(rng.integers(1, max(2, max_length - at + 1))))]
    if seed % 3 == 0:
        # A chain: every next trajectory leaves the previous one 1 to 3 tokens after the last fork.
        depth, source = max(1, at - int(rng.integers(0, at))), first
        for _ in range(7):
            if depth >= max_length - 1 or len(made) >= num_trajectories:
                break
            source = fork(source, depth, int(rng.integers(2, 5)))
            made.append(source)
            depth += int(rng.integers(1, min(3, len(source) - depth) + 1))
    kinds = ("fork", "fork", "fork", "aligned", "one_token", "duplicate", "prefix", "extend", "root")
    while len(made) < num_trajectories:
        source = made[int(rng.integers(0, len(made)))]
        kind = kinds[int(rng.integers(0, len(kinds)))]
        at = int(rng.integers(0, len(source)))
        if kind == "aligned":
            at = at // chunk_size * chunk_size
        if kind == "root" or (kind in ("fork", "aligned", "one_token") and at == 0):
            made.append(fresh(length(1)))
        elif kind in ("fork", "aligned"):
            made.append(fork(source, at, int(rng.integers(1, max(2, max_length - at + 1)))))
        elif kind == "one_token":
            made.append(fork(source, at, 1))
        elif kind == "duplicate":
            made.append(list(source))
        elif kind == "prefix":
            made.append(source[: at + 1])
        elif kind == "extend":
            made.append(source + fresh(int(rng.integers(1, chunk_size + 1))))
    made = [(t + fresh(min_length))[: max(min_length, len(t))][: max(max_length, min_length)] for t in made]
    return pack([made[i] for i in rng.permutation(len(made))])


@dataclass
class Contents:
    """What a forest contains, counted on a plain trie of dicts."""

    num_roots: int
    depth: int  # forks on the deepest path
    fork_positions: set[int]  # tokens before the first token of a child at a fork
    one_token_segments: int
    duplicates: int
    prefixes: int  # trajectories that end inside another one
    distinct_tokens: int


def describe(tokens: np.ndarray, offsets: np.ndarray) -> Contents:
    trajectories = [tuple(t) for t in unpack(tokens, offsets)]
    children: dict[tuple[int, ...], set[int]] = {}
    for trajectory in trajectories:
        for i, token in enumerate(trajectory):
            children.setdefault(trajectory[:i], set()).add(token)
    forks = {prefix for prefix, following in children.items() if prefix and len(following) > 1}
    starts = [(*prefix, token) for prefix in forks for token in children[prefix]]
    starts += [(token,) for token in children[()]]
    one_token = sum(len(children.get(node, ())) != 1 for node in starts)
    distinct = set(trajectories)
    return Contents(
        num_roots=len(children[()]),
        depth=max(sum(t[:i] in forks for i in range(1, len(t))) for t in trajectories),
        fork_positions={len(prefix) for prefix in forks},
        one_token_segments=one_token,
        duplicates=len(trajectories) - len(distinct),
        prefixes=sum(t in children for t in distinct),
        distinct_tokens=sum(len(following) for following in children.values()),
    )


def covers_everything(forests: list[Forest], chunk_size: int) -> list[str]:
    """Return what the forests together lack of the shapes that have broken tree execution elsewhere."""
    contents = [describe(*forest) for forest in forests]
    forks = set().union(*(c.fork_positions for c in contents))
    missing = [f"fork at offset {o} of a chunk" for o in range(chunk_size) if all(p % chunk_size != o for p in forks)]
    lengths = [int(n) for _, offsets in forests for n in np.diff(offsets)]
    wanted = {
        "several roots": any(c.num_roots > 1 for c in contents),
        "depth >= 6": any(c.depth >= 6 for c in contents),
        "one-token segments": any(c.one_token_segments for c in contents),
        "duplicates": any(c.duplicates for c in contents),
        "prefixes of other trajectories": any(c.prefixes for c in contents),
        "one-token trajectories": min(lengths) == 1,
        "trajectories of more than three chunks": max(lengths) > 3 * chunk_size,
        "forks beyond the first chunk": any(p > chunk_size for p in forks),
        "sharing": all(c.distinct_tokens < len(tokens) for c, (tokens, _) in zip(contents, forests)),
    }
    return missing + [name for name, present in wanted.items() if not present]
