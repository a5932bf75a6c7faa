"""Level 2 of the planner: replicas, slots, sharing windows and producers (HARTS 3.2, A.2).

Trajectories are dealt to *cells*, one replica's part of one window (``placement_search.py``); cells that cost
alike share a window; each producer computes what two or more consumers of its cell use, and takes over what makes a
consumer slower than its slot (``levelling.py``). Several searches from different random numbers are compared by
``Work.score``.

Not in the paper: cells are made first and then packed (``cell_packing.py``), with some slots more than Level 1
where that has filled its microbatches to the brim: with pieces of many trees, which scatters trees over cells. The
other start are Level 1's groups.

Shapes: N trajectories by sorted place, C cells, J slots, D replicas, W windows.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import numpy as np

from harts_titan.tree.cell_packing import cut_cells, pack_cells
from harts_titan.tree.cost import PlanCost
from harts_titan.tree.groups import leaves
from harts_titan.tree.levelling import deepen, fit_producer, producer_rows, shared_depths, window_levels
from harts_titan.tree.partition import Partition
from harts_titan.tree.placement_search import Moves, search_cells
from harts_titan.tree.sorted_step import SortedStep
from harts_titan.tree.work import Placement, measure

# Proposals per trajectory: exchanges between cells of whole consumers, of anything when cells are made, and of runs
# between consumers at last. Time grows with them, plans improve.
_SWAPS, _CELL_MOVES, _MOVES = 12, 200, 600
# First bound on what such a change may add, in mean costs of a trajectory.
_SWAP_HEAT, _CELL_HEAT, _HEAT = 0.3, 0.1, 0.06
# Weight of equal cells against a small sum of their tries: when they are cut, and later over the square root of the
# replicas, for the more there are the more trees equal cells cut; the last search starts with less of it and ends with
# more. Weight of complete rows, which capacity makes scarce.
_CUT_BALANCE, _BALANCE, _FIRST, _LAST, _COMPLETE = 20.0, 5.6, 0.2, 2.5, 0.4
# Share of its capacity that a consumer may need when cells are made; share of the rows too many above which packing
# gives up at once; exchanges it tries otherwise.
_FILL, _HOPELESS, _TRIALS = 0.88, 0.005, 4000
# Level 1 scatters trees where it fills microbatches to this share of all capacity, with more than so many leaves each.
# Cells then get a fifth more slots, but hardly more windows: one in eight.
_FULL, _MANY_LEAVES, _MORE_SLOTS, _MORE_WINDOWS = 0.92, 3, 5, 8
_SEEDS = (1, 2)


def place_step(
    step: SortedStep,
    partition: Partition,
    *,
    capacity: int,
    dp_degree: int,
    cost: PlanCost,
    max_window_slots: int = 6,
    chunk_size: int = 64,
) -> Placement:
    """Return a placement of small ``Phi`` (HARTS 3.2).

    Args:
        step: trajectories in lexicographic order.
        partition: microbatches of Level 1.
        capacity: rows of a complete consumer layout, and of a producer.
        dp_degree: number of replicas.
        cost: what plans are compared by, and what is levelled between replicas.
        max_window_slots: slots a sharing window may have; 0 for no limit.
        chunk_size: producers take rows over down to a multiple of it where they can, which needs no replay.

    Returns:
        The placement: a function of the arguments only. Level 1's own, where no window pays.
    """
    # A trajectory that is a prefix of the next goes where that one goes.
    leaf_N, leaf_step = leaves(step, partition.group_N)
    bounds = (leaf_step.length_N, leaf_step.minimum_LN, float(capacity), _pair(cost))
    num_slots = partition.num_groups // dp_degree
    balance = _BALANCE / dp_degree**0.5

    def finish(sizes_W: np.ndarray, cell_N: np.ndarray, label_N: np.ndarray, seed: int) -> Placement:
        consumers_C = np.tile(sizes_W, dp_degree)
        # Cells that differ early can still end in windows of their like; in a single window they cannot.
        first, last = (_FIRST, _LAST) if sizes_W.size > 1 else (1.0, 1.0)
        moves = Moves(
            _MOVES * cell_N.size,
            weight=first * balance,
            last_weight=last * balance,
            heat=_HEAT,
            complete_weight=_COMPLETE,
            seed=seed,
        )
        cost_C = search_cells(cell_N, label_N, consumers_C, *bounds, moves)
        # Cells of equal size and similar cost share a window: it waits for the slowest.
        cells_WD = np.lexsort((np.arange(cost_C.size), -cost_C, -consumers_C)).reshape(-1, dp_degree)
        places = (cell_N[leaf_N], label_N[leaf_N])
        return _level(step, cells_WD, *places, sizes_W, capacity=capacity, cost=cost, chunk_size=chunk_size)

    def from_groups(seed: int) -> list[Placement]:
        sizes_W = window_sizes(num_slots, max_window_slots)
        consumers_C = np.tile(sizes_W, dp_degree)
        cell_N, label_N = _deal(partition.group_N[leaf_step.order_N], consumers_C)
        swaps = Moves(_SWAPS * cell_N.size, whole=True, weight=balance, last_weight=balance, heat=_SWAP_HEAT, seed=seed)
        search_cells(cell_N, label_N, consumers_C, *bounds, swaps)
        return [finish(sizes_W, cell_N, label_N, seed)]

    def from_cells(seed: int) -> list[Placement]:
        sizes_W = window_sizes(
            _slots_for_cells(num_slots, max_window_slots) if scattered else num_slots, max_window_slots
        )
        consumers_C = np.tile(sizes_W, dp_degree)
        packed = _cells_first(leaf_step, consumers_C, capacity=capacity, pair=_pair(cost), balance=balance, seed=seed)
        return [] if packed is None else [finish(sizes_W, *packed, seed)]

    full = int(partition.rows_K.sum()) > _FULL * capacity * partition.num_groups
    scattered = full and leaf_step.num_trajectories > _MANY_LEAVES * partition.num_groups
    # The searches release the interpreter lock. The result does not depend on which thread ends first.
    with ThreadPoolExecutor(2) as pool:
        searches = [
            pool.submit(from_cells, _SEEDS[0]),
            pool.submit(from_cells if scattered else from_groups, _SEEDS[1]),
        ]
        placements = list(chain(*(search.result() for search in searches)))
    if not placements:
        placements = from_groups(_SEEDS[0])
    placements.append(alone(partition))
    return min(placements, key=lambda placement: measure(step, placement, dp_degree).score(cost))


def alone(partition: Partition) -> Placement:
    """Return the placement of Level 1: its slots, nothing shared between microbatches."""
    num_slots, dp_degree = partition.group_SD.shape
    replica_K, slot_K = np.empty(partition.num_groups, np.int64), np.empty(partition.num_groups, np.int64)
    replica_K[partition.group_SD] = np.arange(dp_degree)[None, :]
    slot_K[partition.group_SD] = np.arange(num_slots)[:, None]
    group_N = partition.group_N
    return Placement(replica_K[group_N], slot_K[group_N], np.arange(num_slots + 1), np.zeros_like(group_N))


def window_sizes(num_slots: int, max_window_slots: int) -> np.ndarray:
    """Return the slots of each window: as few windows as allowed, sizes that differ by one at most, larger ones first.

    Args:
        num_slots: slots of the step.
        max_window_slots: slots a window may have; 0 for no limit.

    Returns:
        int64 (W,).
    """
    windows = -(-num_slots // max_window_slots) if max_window_slots else 1
    return np.array([num_slots // windows + (w < num_slots % windows) for w in range(windows)], np.int64)


def _slots_for_cells(num_slots: int, max_window_slots: int) -> int:
    """Return a number of slots for cells that are cut first, with hardly more windows than Level 1's slots need."""
    more = num_slots + num_slots // _MORE_SLOTS
    windows = window_sizes(num_slots, max_window_slots).size
    return min(more, max_window_slots * (windows + windows // _MORE_WINDOWS)) if max_window_slots else more


def _cells_first(
    leaf_step: SortedStep, consumers_C: np.ndarray, *, capacity: int, pair: float, balance: float, seed: int
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return cell and consumer of each trajectory, or None where the trajectories do not fit the consumers found."""
    if leaf_step.num_trajectories < consumers_C.sum():
        return None
    cell_N = cut_cells(leaf_step.length_N, leaf_step.lcp_N, consumers_C, _CUT_BALANCE)
    moves = Moves(
        _CELL_MOVES * cell_N.size,
        weight=balance,
        last_weight=balance,
        heat=_CELL_HEAT,
        row_limit=float(capacity),
        fill=_FILL * capacity,
        seed=seed,
    )
    search_cells(
        cell_N, np.zeros_like(cell_N), consumers_C, leaf_step.length_N, leaf_step.minimum_LN, np.inf, pair, moves
    )
    if (np.bincount(cell_N, minlength=consumers_C.size) < consumers_C).any():
        return None
    label_N, over = pack_cells(
        cell_N,
        consumers_C,
        leaf_step.length_N,
        leaf_step.minimum_LN,
        capacity=capacity,
        pair=pair,
        trials=_TRIALS,
        weight=balance,
        hopeless=_HOPELESS,
        seed=seed,
    )
    return (cell_N, label_N) if over <= 0 else None


def _pair(cost: PlanCost) -> float:
    """Return the cost of an attended pair in rows, forward and backward together."""
    return (cost.forward_pair + cost.backward_pair) / max(1, cost.forward_row + cost.backward_row)


def _deal(group_N: np.ndarray, consumers_C: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Deal the groups of Level 1 to cells in the order of their middle trajectory; return cell and consumer of each."""
    num_groups = int(group_N.max()) + 1
    place = np.argsort(group_N, kind="stable")
    bound = np.searchsorted(group_N[place], np.arange(num_groups + 1))
    middle = place[(bound[:-1] + bound[1:]) // 2]
    rank = np.empty(num_groups, np.int64)
    rank[np.argsort(middle, kind="stable")] = np.arange(num_groups)
    cell = np.repeat(np.arange(consumers_C.size), consumers_C)
    label = np.concatenate([np.arange(n) for n in consumers_C])
    return cell[rank][group_N], label[rank][group_N]


def _level(
    step: SortedStep,
    cells_WD: np.ndarray,
    cell_N: np.ndarray,
    label_N: np.ndarray,
    sizes_W: np.ndarray,
    *,
    capacity: int,
    cost: PlanCost,
    chunk_size: int,
) -> Placement:
    """Turn cells into a placement: producers, levels, order of slots, replicas."""
    dp_degree = cells_WD.shape[1]
    window_ptr_W1 = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes_W)])
    by_cell = np.argsort(cell_N, kind="stable")
    bound = np.searchsorted(cell_N[by_cell], np.arange(cells_WD.size + 1))
    place_WD = [[by_cell[bound[c] : bound[c + 1]] for c in cells] for cells in cells_WD]
    shared_N, replica_N, slot_N = (np.zeros(step.num_trajectories, np.int64) for _ in range(3))
    room_WD = np.zeros(cells_WD.shape, np.int64)
    for w, places in enumerate(place_WD):
        for d, place in enumerate(places):
            depth = shared_depths(place, label_N[place], step.minimum_LN)
            rows = producer_rows(place, depth, step.minimum_LN)
            if rows > capacity:
                fit_producer(place, label_N[place], depth, int(sizes_W[w]), capacity, step.minimum_LN)
            elif rows > 0:
                # A row costs at least one, so that cost fits as rows, too.
                room_WD[w, d] = capacity - rows
            shared_N[place], replica_N[place], slot_N[place] = depth, d, window_ptr_W1[w] + label_N[place]

    work = measure(step, Placement(replica_N, slot_N, window_ptr_W1, shared_N), dp_degree)
    unit = max(1, cost.forward_row + cost.backward_row)
    consumer_JD = np.add(*work.consumer_costs(cost)) / unit
    producer_WD = np.add(*work.producer_costs(cost)) / unit
    load_D = np.zeros(dp_degree)
    for w, places in enumerate(place_WD):
        slots = slice(window_ptr_W1[w], window_ptr_W1[w + 1])
        cost_DK = consumer_JD[slots].T
        order_DK = np.argsort(-cost_DK, axis=1, kind="stable")
        cost_DK = np.take_along_axis(cost_DK, order_DK, axis=1)
        level_K = window_levels(np.ascontiguousarray(cost_DK), producer_WD[w], room_WD[w].astype(np.float64))
        total_D = cost_DK.sum(axis=1) + producer_WD[w]
        # The heavier cells go to the replicas with less work so far.
        replica_D = np.empty(dp_degree, np.int64)
        replica_D[np.argsort(-total_D, kind="stable")] = np.argsort(load_D, kind="stable")
        load_D[replica_D] += total_D
        for d, place in enumerate(places):
            depth, label = shared_N[place], label_N[place]
            slot_K = np.empty(order_DK.shape[1], np.int64)
            slot_K[order_DK[d]] = np.arange(window_ptr_W1[w], window_ptr_W1[w + 1])
            for k in np.flatnonzero(cost_DK[d] > level_K):
                if room_WD[w, d] > 0:
                    excess = float(cost_DK[d, k] - level_K[k])
                    deepen(
                        place, label, order_DK[d, k], depth, excess, step.length_N, step.minimum_LN, _pair(cost),
                        chunk_size,
                    )  # fmt: skip
            shared_N[place], replica_N[place], slot_N[place] = depth, replica_D[d], slot_K[label]
    return Placement(replica_N, slot_N, window_ptr_W1, shared_N)
