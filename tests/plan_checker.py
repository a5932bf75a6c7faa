"""Recompute the figures of ``harts-plan --json`` from tokens and plan file (docs/plan_file.md); prove the plan.

Nothing of the planner is used: every position gets the number of its row (its whole prefix) in the step's trie, rows
are numbered depth first, and work items are counted row by row. A falsehood raises ``Refused``.

    python tests/plan_checker.py STEP.npz... --plan PLAN --json JSON
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np

# fmt: off
HEADER = ["dp_degree", "capacity", "chunk_size", "row_alignment", "max_window_slots", "max_live_producers"]
STEP = ["replica_N", "slot_N", "shared_N", "window_ptr_W1", "item_kind_I", "item_replica_I", "item_index_I",
        "item_rounds_I", "sequence_ptr_I1", "sequence_round_Q", "sequence_trajectory_Q", "sequence_anchor_Q",
        "sequence_start_Q", "sequence_end_Q", "events_V2"]
UNCHECKED = {"input", "planner", "mode", "steps", "cost", "l1_method", "seconds", "seconds_per_step", "compile_seconds",
             "peak_memory_bytes", "memory_before_read_bytes", "ortools", "ortools_seconds", "ortools_first"}
# fmt: on


class Refused(Exception):
    """What is wrong."""


def need(condition, what):
    if not condition:
        raise Refused(what)


def trie(tokens, offsets):
    """Return the lexicographic order, the rows of each path, and parent (-1: none) and depth of each row."""
    paths, rows = (np.split(array, offsets[1:-1]) for array in (tokens, np.empty(len(tokens), np.int64)))
    order = np.array(sorted(range(len(paths)), key=lambda x: paths[x].astype(">i4").tobytes()))
    count, last = 0, order[0]
    for x in order:
        n = min(len(paths[x]), len(paths[last])) * (count > 0)
        differs = paths[x][:n] != paths[last][:n]
        same = int(differs.argmax()) if differs.any() else n
        rows[x][:same] = rows[last][:same]
        rows[x][same:] = np.arange(count, count + len(paths[x]) - same)
        count, last = count + len(paths[x]) - same, x
    parent_G, depth_G = np.full((2, count), -1)
    for path in rows:
        parent_G[path[1:]], depth_G[path] = path[:-1], np.arange(len(path))
    return order, rows, parent_G, depth_G


def segments(own, parent_G, depth_G, cuts=()):
    """Return start, end and parent (-1: none) of the fork-free paths of a set of rows; ``cuts`` end paths too."""
    at = np.searchsorted(own[:-1], parent_G[own])
    inner = own[at] == parent_G[own]
    splits = (np.bincount(at[inner], minlength=len(own)) > 1) | np.isin(own, list(cuts))
    heads = np.flatnonzero(~inner | splits[at])  # rows of a path are neighbours
    start, up = depth_G[own[heads]], np.searchsorted(heads, at[heads], side="right") - 1
    return start, start + np.diff(np.append(heads, len(own))), np.where(inner[heads], up, -1)


def lower_bound(start, end, up, capacity, dp):
    """Return the least rows that consumers can have together (harts.md 2)."""
    rows, times = end - start, np.ones(len(start), int)
    for v in reversed(range(len(start))):
        times[v] = max(times[v], -(-(rows[v] - (end[v] - start[v]) + 1) // (capacity - end[v] + 1)))
        if up[v] >= 0:
            rows[up[v]], times[up[v]] = rows[up[v]] + rows[v], max(times[up[v]], times[v])
    if (up < 0).sum() == 1:  # in every consumer: a multiple of the replicas, and enough of them
        times[0] += -times[0] % dp
        while ((end - start) * times).sum() > times[0] * capacity:
            times[0] += dp
    return ((end - start) * times).sum()


def check_step(tokens, offsets, plan, head, cost, nodewise, node_start=()):
    """Prove one step; return its figures and what is pooled over steps."""
    replica, slot, shared, bounds, kind, item_replica, item_index, item_rounds, ptr = (plan[a] for a in STEP[:9])
    D, chunk, live_limit = head["dp_degree"], head["chunk_size"], head["max_live_producers"]
    need(min(len(bounds), len(ptr)) > 1, "windows and items")
    length, W, J = np.diff(offsets), len(bounds) - 1, int(bounds[-1])
    for size, some in ((len(length), STEP[:3]), (len(ptr) - 1, STEP[4:8]), (ptr[-1], STEP[9:14])):
        need(all(len(plan[a]) == size for a in some), f"{size} entries in {some}")
    need(J > 0 == bounds[0] == ptr[0] and min(np.diff(bounds)) > 0 <= min(np.diff(ptr)), "bounds ascend from 0")
    need(np.diff(bounds).max() <= (head["max_window_slots"] or J), "windows have at most max_window_slots slots")
    for array, end in ((replica, D), (slot, J), (shared, length + 1)):
        need(((array >= 0) & (array < end)).all(), "replicas, slots and prefixes exist")
    order, rows, parent_G, depth_G = trie(tokens, offsets)
    window = np.repeat(np.arange(W), np.diff(bounds))[slot]
    of_path = np.split(np.asarray(node_start, int), np.searchsorted(node_start, offsets[1:-1]))
    named = [positions - begin for positions, begin in zip(of_path, offsets)]
    work_JD, work_WD = np.zeros((3, J, D), int), np.zeros((3, W, D), int)  # rows, attended, recomputed pairs
    whole_JD, states_WD, figures, rounds = 0 * work_JD[0], 0 * work_WD[0], {"segments": 0, "replay_tokens": 0}, []
    seen_G, made_G, round_G = np.full((3, len(parent_G)), -1)

    def gather(members, depth, stamp_G, tag, made):
        """Stamp the members' rows; return how many they are, those not ``made``, and number and pairs of these."""
        total, recomputed, own = 0, 0, [np.zeros(0, int)]
        for x in members:
            new = rows[x][: depth[x]][stamp_G[rows[x][: depth[x]]] != tag]
            stamp_G[new] = tag
            own.append(new[made_G[new] != made])
            total, recomputed = total + len(new), recomputed + len(own[-1]) * depth[x]
        own = np.sort(np.concatenate(own))
        return total, own, (len(own), (depth_G[own] + 1).sum(), recomputed)

    def check_item(i, key, own, members, made, handed):
        """Prove that sequences make exactly the rows ``own``; add states needed of rows ``made`` to ``handed``."""
        need(i < len(kind) and (kind[i], item_replica[i], item_index[i]) == key, f"item {i} is {key}")
        ends, call, cut = set(), -1, nodewise and key[0] == 1
        round_G[own] = -2
        for q in range(ptr[i], ptr[i + 1]):
            r, x, anchor, start, end = (int(plan[a][q]) for a in STEP[9:14])
            need(x in members and 0 <= start < end <= length[x], f"sequence {q} is of a trajectory of item {i}")
            need(max(call, 0) <= r <= call + 1, f"sequence {q}: rounds follow each other")
            need(anchor == (start if nodewise else start // chunk * chunk), f"sequence {q} starts at its anchor")
            need((round_G[rows[x][start:end]] == -2).all(), f"sequence {q}: rows are those of item {i}, once")
            state = int(rows[x][anchor - 1])
            if anchor and key[0] == 0 and made_G[state] == made:
                handed.add(state)
            elif anchor:
                need(0 <= round_G[state] < r and (state in ends or not nodewise), f"sequence {q}: state made before")
            round_G[rows[x][start:end]] = call = r
            ends.add(int(rows[x][end - 1]))
            figures["replay_tokens"] += start - anchor
        need((round_G[own] >= 0).all() and item_rounds[i] == call + 1, f"item {i}: all rows, all rounds")
        need(not cut or handed <= ends, f"item {i}: states are handed over at ends")
        round_G[own] = -1
        until = shared if key[0] else length
        above = {int(rows[x][p - 1]) for x in members for p in named[x] if 0 < p < until[x]}
        need(above.isdisjoint({*own.tolist()} - ends), f"item {i}: nodes begin where the input says so")
        if len(own):
            forest = segments(own, parent_G, depth_G, (handed if cut else set()) | above)
            figures["segments"] += len(forest[0])
            rounds.append(call + 1)

    producers = 0
    for w, d in np.ndindex(W, D):
        tag, handed, gain = w * D + d, set(), 0
        members = order[(replica[order] == d) & (window[order] == w)]
        total, prefixes, work_WD[:, w, d] = gather(members, shared, made_G, tag, -2)
        need(all((made_G[rows[x]] == tag).sum() == shared[x] for x in members), f"shared is closed in {w}, {d}")
        for j in range(bounds[w], bounds[w + 1]):
            of = members[slot[members] == j]
            need(len(of), f"consumer ({d}, {j}) has a trajectory")
            whole_JD[j, d], own, work_JD[:, j, d] = gather(of, length, seen_G, j * D + d, tag)
            gain += whole_JD[j, d] - len(own)
            check_item(j * D + d, (0, d, j), own, of, tag, handed)
        need(total == 0 or gain > total, f"the producer of window {w}, replica {d} saves rows")
        states_WD[w, d] = len(handed)
        if total:
            check_item(J * D + producers, (1, d, w), prefixes, members[shared[members] > 0], tag, handed)
            producers += 1
    need(J * D + producers == len(kind), "no other items")
    need(max(whole_JD.max(), work_WD[0].max()) <= head["capacity"], "items fit the capacity")
    need(live_limit or (producers == 0 and W == J), "windows are off")

    events, used = plan["events_V2"].tolist(), np.flatnonzero(work_WD[0].any(axis=1)).tolist()
    expected = [[e, k] for e, some in enumerate((used, range(J), range(J), used)) for k in some]
    need(sorted(events) == expected, "every event once")
    consumers = [[e, j] for j in range(J) for e in (1, 2)]
    need([pair for pair in events if pair[0] in (1, 2)] == consumers, "consumers run in order, one after another")
    place = {(e, k): v for v, (e, k) in enumerate(events)}
    before = all(place[0, w] < place[1, bounds[w]] for w in used)
    need(before and all(place[3, w] > place[2, bounds[w + 1] - 1] for w in used), "producers enclose their consumers")
    change_V1 = np.array([[1, 0, 0, -1][e] for e, _ in events])[:, None]
    need(change_V1.cumsum().max() <= live_limit, "at most max_live_producers are live")
    held_WD = cost["shared_row_bytes"] * work_WD[0] + cost["handed_state_bytes"] * states_WD
    held_VD = (change_V1 * held_WD[[k * (e in (0, 3)) for e, k in events]]).cumsum(axis=0)

    n, attended, recomputed = np.concatenate([work_JD, work_WD], axis=1)
    aligned, whole = -(-n // cost["row_alignment"]) * cost["row_alignment"], np.concatenate([whole_JD, 0 * states_WD])
    phi = 0
    for way, pairs in (("forward", attended), ("backward", recomputed)):
        parts = cost[f"{way}_row"] * aligned + cost[f"{way}_pair"] * pairs + cost[f"head_{way}_row"] * whole
        phi += parts.max(axis=1).sum()
    parts = segments(np.arange(len(parent_G)), parent_G, depth_G, [path[-1] for path in rows])  # a prefix may be alone
    bound = lower_bound(*parts, head["capacity"], D)
    # fmt: off
    figures |= {
        "trajectories": len(length), "original_tokens": len(tokens), "distinct_tokens": len(parent_G),
        "compact_tokens": whole.sum(), "executed_rows": n.sum(), "decoder_tokens": aligned.sum(), "slots": J,
        "residual_tokens": work_JD[0].sum(), "producer_tokens": work_WD[0].sum(), "consumers": J * D, "phi": phi,
        "alignment_tokens": (aligned - n).sum(), "windows": W if live_limit else 0, "producers": producers,
        "work_items": len(rounds), "handed_states": states_WD.sum(), "interface_bytes": held_VD.max(),
        "producer_rows_max": work_WD[0].max(), "rounds_max": max(rounds), "l1_lower_bound": bound,
    }
    # fmt: on
    balances = (n.mean(axis=1) / n.max(axis=1).clip(1))[n.any(axis=1)]
    pooled = {"slowest": D * n.max(axis=1).sum(), "worst": n.sum(axis=0).mean() / n.sum(axis=0).max()}
    return {name: int(value) for name, value in figures.items()}, pooled | {"balances": balances, "rounds": rounds}


def combine(steps):
    """Return the figures of steps together: counts add up, ratios are of sums, percentiles of all pooled."""
    largest = ("rounds_max", "producer_rows_max", "interface_bytes")
    total = {name: (max if name in largest else sum)(one[name] for one, _ in steps) for name in steps[0][0]}
    pool = {name: [pooled[name] for _, pooled in steps] for name in steps[0][1]}
    ratios = {
        "whole_step_compression": total["original_tokens"] / total["distinct_tokens"],
        "l1_compression": total["original_tokens"] / total["l1_tokens"],
        "decoder_compression": total["original_tokens"] / total["decoder_tokens"],
        "compression": total["original_tokens"] / total["executed_rows"],
        "l1_gap": total["l1_tokens"] / total["l1_lower_bound"] - 1,
        "l1_balance": total["l1_tokens"] / sum(pool["l1_slowest"]),
        "balance": total["executed_rows"] / sum(pool["slowest"]),
        "balance_p5": np.percentile(np.concatenate(pool["balances"]), 5),
        "worst_step_balance": min(pool["worst"]),
        "rounds_mean": np.mean(np.concatenate(pool["rounds"])),
    }
    return total | {name: float(value) for name, value in ratios.items()}


def check(inputs, plan_file, json_file):
    """Check a plan file and its JSON; return the figures of all steps together."""
    found = json.loads(Path(json_file).read_text())
    with np.load(plan_file, allow_pickle=False) as file:
        content = dict(file)
    need(content.pop("format", "") == "harts_titan plan 1", "format")
    need(all(a.dtype == np.int64 for name, a in content.items() if name != "cost_source"), "integers are int64")
    need(all(a.ndim == name.startswith("s") + name.endswith("_V2") for name, a in content.items()), "dimensions")
    plans = [{name: content.pop(f"s{i}_{name}", None) for name in STEP} for i in range(content.pop("num_steps", 0))]
    need(all(array is not None for plan in plans for array in plan.values()), "all arrays of each step")
    cost = {name[5:]: content.pop(name).item() for name in [*content] if name.startswith("cost_")}
    need(content.keys() == {*HEADER} and cost == found.get("cost"), f"{HEADER} and the costs of the JSON")
    head = {name: value.item() for name, value in content.items()}
    need(all(found.get(name) == value for name, value in head.items()), f"the JSON has other settings than {head}")
    need(cost["row_alignment"] == head["row_alignment"], "one alignment")
    need(len(inputs) == len(plans) == len(found["steps"]), "as many steps as inputs")
    done = []
    nodewise = found["mode"] in ("nodewise", "depthwise")
    for path, plan, one in zip(inputs, plans, found["steps"]):
        with np.load(path) as step:
            figures, pooled = check_step(
                step["tokens"],
                step["offsets"],
                plan,
                head,
                cost,
                nodewise,
                step.get("node_start", ()) if nodewise else (),
            )
        l1 = [one.get(name, 0) for name in ("l1_tokens", "l1_slots", "l1_balance")]
        need([*map(type, l1)] == [int, int, float] and 0 < l1[2] <= 1, "level 1")
        need(l1[0] >= figures["l1_lower_bound"] >= figures["distinct_tokens"], "level 1 is above its bound")
        need(l1[1] * head["dp_degree"] * head["capacity"] >= l1[0], "slots of level 1 are enough")
        if found["planner"] != "harts":  # else level 1 is another partition
            l1 = [figures["compact_tokens"], figures["slots"], figures["executed_rows"] / pooled["slowest"]]
        pooled["l1_slowest"] = l1[0] / l1[2]
        done.append((figures | {"l1_tokens": l1[0], "l1_slots": l1[1]}, pooled))
    expected = [*(combine([step]) for step in done), combine(done)]
    for one, figures in zip([*found["steps"], found], expected):
        surplus = (one.keys() - UNCHECKED - {*HEADER}) ^ figures.keys()
        need(not surplus, f"missing or unknown: {surplus}")
        for name, value in figures.items():
            same = type(one[name]) is type(value)
            same = same and abs(one[name] - value) <= (1e-12 * abs(value) if type(value) is float else 0)
            need(same, f"{name} is {one[name]}, should be {value}")
    return combine(done)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("inputs", nargs="+", metavar="STEP.npz")
    parser.add_argument("--plan", required=True)
    parser.add_argument("--json", required=True)
    options = parser.parse_args()
    try:
        total = check(options.inputs, options.plan, options.json)
    except Refused as refusal:
        sys.exit(f"refused: {refusal}")
    print("proven:", ", ".join(f"{name} {value:.6g}" for name, value in total.items()))
