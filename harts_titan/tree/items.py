"""The work items of a placement, segment by segment, from sorted places alone (HARTS 3.2 to 3.4, 4.1).

A consumer computes the rows of its trajectories that its producer does not; a producer computes the prefixes of its
replica's trajectories in a sharing window. No token is read here, so every rank plans all items of a step.

Shapes: N trajectories by sorted place (of one item: by rank in the step batch), V segments, Q sequences, E states.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numba
import numpy as np

from harts_titan.tree.forest import Forest, build_forest
from harts_titan.tree.layout import RESTARTING, number_sequences, plan_forest_rounds
from harts_titan.tree.nodes import NodeStarts, cut_segments, locate
from harts_titan.tree.rounds import RoundPlan
from harts_titan.tree.sorted_step import SortedStep, common_prefix
from harts_titan.tree.work import Placement

CONSUMER, PRODUCER = 0, 1


@dataclass(frozen=True)
class WorkItem:
    """A microbatch or a producer, before its rows are laid out.

    Attributes:
        kind: ``CONSUMER`` or ``PRODUCER``.
        replica: data-parallel rank.
        index: slot of a consumer, window of a producer.
        trajectory_N: int64 trajectories in the step batch, ascending. A producer lists one for each of its longest
            prefixes, since others add no rows.
        forest: segments of its own rows; trajectory indices count in ``trajectory_N``.
        rounds: rounds of the segments.
        sequence_V: int64 packed sequence of each segment.
        head_Q: int64 first segment of each sequence.
        tail_Q: int64 last segment.
        host_N: int64 consumer: trajectory of the producer (index into its ``trajectory_N``) whose prefix contains
            this one's; -1 where nothing is shared.
        shared_N: int64 consumer: tokens that the producer computes; producer: zeros.
        taken_E: int64 consumer: state of the producer that is external state ``e``, ascending.
        root_state_V: int64 consumer: external state that a root starts from, -1 for the zero state and inner segments.
        state_segment_E: int64 producer: segment that makes each state handed over.
        state_position_E: int64 producer: tokens before the state.
    """

    kind: int
    replica: int
    index: int
    trajectory_N: np.ndarray
    forest: Forest
    rounds: RoundPlan
    sequence_V: np.ndarray
    head_Q: np.ndarray
    tail_Q: np.ndarray
    host_N: np.ndarray
    shared_N: np.ndarray
    taken_E: np.ndarray
    root_state_V: np.ndarray
    state_segment_E: np.ndarray
    state_position_E: np.ndarray

    @property
    def end_Q(self) -> np.ndarray:
        """End position of each sequence: int64."""
        return self.forest.start_V[self.tail_Q] + self.forest.length_V[self.tail_Q]


def plan_items(
    step: SortedStep,
    placement: Placement,
    *,
    dp_degree: int,
    chunk_size: int,
    mode: str,
    nodes: NodeStarts | None = None,
) -> tuple[list[WorkItem], list[WorkItem | None]]:
    """Plan every work item of a step.

    A consumer's root at position ``p > 0`` continues a prefix of its producer. It needs the state at the last chunk
    boundary ``a(p)`` and replays ``[a(p), p)``; modes ``nodewise`` and ``depthwise``, which replay nothing, need the
    state at ``p`` itself, so the producer's segments are cut there. If nodes of the rollout tree are named, segments of
    both are cut where any trajectory of the item says that one begins.

    Args:
        step: sorted trajectories.
        placement: where they run and what producers compute.
        dp_degree: number of replicas.
        chunk_size: tokens in a linear-attention chunk.
        mode: ``compact``, ``nodewise`` or ``depthwise``.
        nodes: where nodes of the rollout tree begin; modes ``nodewise`` and ``depthwise`` only.

    Returns:
        consumers: in the order ``slot * dp_degree + replica``.
        producers: in the order ``window * dp_degree + replica``; None where a replica has none.

    Raises:
        ValueError: If the placement's shared prefixes are not closed.

    Time: O(N log N).
    """
    host_N, lcp_N, prefix_lcp_N, torn = _neighbours(
        step.minimum_LN, step.length_N, placement.replica_N, placement.slot_N, placement.window_J, placement.shared_N,
        placement.num_slots, placement.num_windows, dp_degree,
    )  # fmt: skip
    if torn >= 0:
        raise ValueError(
            f"the placement's shared prefixes are not closed: trajectory {step.order_N[torn]} shares "
            f"{placement.shared_N[torn]} tokens, but its replica's producer in that window computes more or less of it"
        )
    place_N = np.empty_like(step.order_N)
    place_N[step.order_N] = np.arange(step.num_trajectories)
    consumers = [
        _consumer(step, placement, k, places, lcp_N, nodes, chunk_size=chunk_size, mode=mode, dp_degree=dp_degree)
        for k, places in enumerate(
            _grouped(placement.slot_N * dp_degree + placement.replica_N, placement.num_slots * dp_degree)
        )
    ]
    kept = np.flatnonzero(host_N == np.arange(host_N.shape[0]))
    window_N = placement.window_J[placement.slot_N]
    of_producer = _grouped((window_N * dp_degree + placement.replica_N)[kept], placement.num_windows * dp_degree)
    producers: list[WorkItem | None] = []
    for k, chosen in enumerate(of_producer):
        if not chosen.size:
            producers.append(None)
            continue
        w, d = divmod(k, dp_degree)
        slots = range(placement.window_ptr_W1[w], placement.window_ptr_W1[w + 1])
        members = [j * dp_degree + d for j in slots]
        attached, producer = _producer(
            step, placement, kept[chosen], prefix_lcp_N, [consumers[i] for i in members], nodes,
            host_N=host_N, place_N=place_N, place=(w, d), chunk_size=chunk_size, mode=mode,
        )  # fmt: skip
        producers.append(producer)
        for i, consumer in zip(members, attached, strict=True):
            consumers[i] = consumer
    return consumers, producers


@numba.njit(cache=True)
def _neighbours(minimum_LN, length_N, replica_N, slot_N, window_J, shared_N, num_slots, num_windows, dp_degree):
    """Return host place of each shared prefix, own rows shared with the consumer's member before, and with the host.

    The last value is a place whose shared prefix does not fit that of the member before it, -1 if all fit.
    """
    n, torn = length_N.shape[0], -1
    before_WD = np.full((num_windows, dp_degree), -1)
    host_N, lcp_N, prefix_lcp_N = np.full(n, -1), np.zeros(n, np.int64), np.zeros(n, np.int64)
    last_JD, last_WD = np.full((num_slots, dp_degree), -1), np.full((num_windows, dp_degree), -1)
    for x in range(n):
        d, j = replica_N[x], slot_N[x]
        w = window_J[j]
        y = before_WD[w, d]
        before_WD[w, d] = x
        if y >= 0:
            # Sorted neighbours suffice: common prefixes of others are minima over those in between.
            both = common_prefix(minimum_LN, y, x)
            if min(both, shared_N[y]) > shared_N[x] or min(both, shared_N[x]) > shared_N[y]:
                torn = x
        if length_N[x] > shared_N[x]:
            y = last_JD[j, d]
            last_JD[j, d] = x
            if y >= 0:
                lcp_N[x] = max(0, common_prefix(minimum_LN, y, x) - shared_N[x])
        if shared_N[x] > 0:
            y = last_WD[w, d]
            both = common_prefix(minimum_LN, y, x) if y >= 0 else 0
            if y >= 0 and both >= shared_N[x]:
                # Prefixes are sorted as their trajectories are, so only here a prefix may follow what it begins.
                host_N[x] = y
            else:
                host_N[x] = x
                prefix_lcp_N[x] = both
                last_WD[w, d] = x
    return host_N, lcp_N, prefix_lcp_N, torn


def _grouped(key_M: np.ndarray, num_groups: int) -> list[np.ndarray]:
    """Return the indices of each group, ascending."""
    order = np.argsort(key_M, kind="stable")
    return np.split(order, np.cumsum(np.bincount(key_M, minlength=num_groups))[:-1])


def _consumer(
    step: SortedStep,
    placement: Placement,
    number: int,
    places: np.ndarray,
    lcp_N: np.ndarray,
    nodes: NodeStarts | None,
    *,
    chunk_size: int,
    mode: str,
    dp_degree: int,
) -> WorkItem:
    shared_N = placement.shared_N[places]
    rest = np.flatnonzero(step.length_N[places] > shared_N)
    own = places[rest]
    forest = build_forest(step.length_N[own] - placement.shared_N[own], lcp_N[own])
    trajectory_N, rank = _batch_order(step, places)
    end_segment_N = np.full(places.shape[0], -1)
    end_segment_N[rank[rest]] = forest.end_segment_N
    forest = Forest(
        parent_V=forest.parent_V,
        # All members of a root tree share the same prefix with the producer: it ends where the tree begins.
        start_V=forest.start_V + placement.shared_N[own][forest.source_V],
        length_V=forest.length_V,
        source_V=rank[rest][forest.source_V],
        depth_V=forest.depth_V,
        end_segment_N=end_segment_N,
        end_position_N=_scatter(rank, step.length_N[places]),
    )
    shared_N = _scatter(rank, shared_N)
    if nodes is not None:
        trajectory_M, position_M = nodes.of(trajectory_N)
        # A root begins where the producer ends.
        own_M = position_M > shared_N[trajectory_M]
        forest = cut_segments(forest, trajectory_M[own_M], position_M[own_M])
    slot, replica = divmod(number, dp_degree)
    item = _with_rounds(CONSUMER, replica, slot, trajectory_N, forest, chunk_size=chunk_size, mode=mode)
    return replace(item, shared_N=shared_N)


def _producer(
    step: SortedStep,
    placement: Placement,
    places: np.ndarray,
    prefix_lcp_N: np.ndarray,
    consumers: list[WorkItem],
    nodes: NodeStarts | None,
    *,
    host_N: np.ndarray,
    place_N: np.ndarray,
    place: tuple[int, int],
    chunk_size: int,
    mode: str,
) -> tuple[list[WorkItem], WorkItem]:
    """Return a producer, and its consumers with their hosts and states filled in."""
    shared_N = placement.shared_N[places]
    forest = build_forest(shared_N, prefix_lcp_N[places])
    trajectory_N, rank = _batch_order(step, places)
    forest = replace(
        forest,
        source_V=rank[forest.source_V],
        end_segment_N=_scatter(rank, forest.end_segment_N),
        end_position_N=_scatter(rank, shared_N),
    )
    hosts = []
    for item in consumers:
        host = host_N[place_N[item.trajectory_N]]
        hosts.append(np.where(host >= 0, rank[np.searchsorted(places, host) % places.size], -1))
    # Where roots hang on, as (host, position before which the state is taken); position 0 needs none.
    roots = [np.flatnonzero((item.forest.parent_V < 0) & (item.forest.start_V > 0)) for item in consumers]
    start = [item.forest.start_V[v] for item, v in zip(consumers, roots, strict=True)]
    above = [h[item.forest.source_V[v]] for item, h, v in zip(consumers, hosts, roots, strict=True)]
    if mode in RESTARTING:
        forest = cut_segments(forest, np.concatenate(above), np.concatenate(start))
        if nodes is not None:
            for item, host in zip(consumers, hosts, strict=True):
                trajectory_M, position_M = nodes.of(item.trajectory_N)
                made_M = (position_M > 0) & (position_M < item.shared_N[trajectory_M])
                forest = cut_segments(forest, host[trajectory_M[made_M]], position_M[made_M])
    else:
        start = [p // chunk_size * chunk_size for p in start]
    needed = [np.stack([locate(forest, h, p - 1), p], axis=1) for h, p in zip(above, start, strict=True)]
    state_E2 = np.unique(np.concatenate(needed), axis=0)
    state_E2 = state_E2[state_E2[:, 1] > 0]
    key_E = state_E2[:, 0] * (1 + int(step.length_N.max())) + state_E2[:, 1]
    attached = []
    for item, host, v, pair in zip(consumers, hosts, roots, needed, strict=True):
        handed = pair[:, 1] > 0
        state = np.searchsorted(key_E, (pair[:, 0] * (1 + int(step.length_N.max())) + pair[:, 1])[handed])
        taken_E, index = np.unique(state, return_inverse=True)
        root_state_V = np.full(item.forest.num_segments, -1)
        root_state_V[v[handed]] = index.reshape(-1)
        attached.append(replace(item, host_N=host, taken_E=taken_E, root_state_V=root_state_V))
    w, d = place
    producer = _with_rounds(PRODUCER, d, w, trajectory_N, forest, chunk_size=chunk_size, mode=mode)
    return attached, replace(producer, state_segment_E=state_E2[:, 0], state_position_E=state_E2[:, 1])


def _with_rounds(
    kind: int, replica: int, index: int, trajectory_N: np.ndarray, forest: Forest, *, chunk_size: int, mode: str
) -> WorkItem:
    rounds = plan_forest_rounds(forest, chunk_size=chunk_size, mode=mode)
    sequence_V, head_Q, memory_order = number_sequences(forest, rounds)
    tail_Q = np.empty_like(head_Q)
    # Later segments of a sequence overwrite earlier ones.
    tail_Q[sequence_V[memory_order]] = memory_order
    none_N, none = np.zeros_like(trajectory_N), np.zeros(0, np.int64)
    return WorkItem(
        kind, replica, index, trajectory_N, forest, rounds, sequence_V, head_Q, tail_Q, none_N - 1, none_N, none,
        np.full(forest.num_segments, -1), none, none,
    )  # fmt: skip


def expanded_item(
    number: int, trajectory_N: np.ndarray, length_N: np.ndarray, *, chunk_size: int, dp_degree: int
) -> WorkItem:
    """Return the consumer of mode ``expanded``: every trajectory a root of its own, one round.

    Args:
        number: ``slot * dp_degree + replica``.
        trajectory_N: int64 trajectories in the step batch, ascending.
        length_N: int64 tokens of each.
        chunk_size: tokens in a linear-attention chunk.
        dp_degree: number of replicas.
    """
    index, none = np.arange(trajectory_N.shape[0]), np.zeros(trajectory_N.shape[0], np.int64)
    forest = Forest(none - 1, none, length_N, index, none, index, length_N)
    slot, replica = divmod(number, dp_degree)
    return _with_rounds(CONSUMER, replica, slot, trajectory_N, forest, chunk_size=chunk_size, mode="expanded")


def _batch_order(step: SortedStep, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the trajectories at sorted places in the step batch's order, and the rank of each place in it."""
    index = step.order_N[places]
    by_index = np.argsort(index)
    rank = np.empty_like(by_index)
    rank[by_index] = np.arange(by_index.shape[0])
    return index[by_index], rank


def _scatter(rank: np.ndarray, values: np.ndarray) -> np.ndarray:
    out = np.empty_like(values)
    out[rank] = values
    return out
