"""The picture of a step plan: what every replica executes in every slot and window, and one microbatch's forest."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from harts_titan.tree import StepPlan, build_forest
from harts_titan.tree.sorted_step import SortedStep

_PRODUCER, _SHARED, _OWN, _FORK = "#d55e00", "#0072b2", "#9a9a9a", "#c8c8c8"


@dataclass(frozen=True)
class Bars:
    """Executed rows of a step's work items.

    Attributes:
        residual_JD: int64 rows of the consumer in slot ``j`` on replica ``d``.
        producer_WD: int64 rows of the producer of window ``w`` on replica ``d``.
        window_ptr_W1: int64 slots of window ``w`` are ``[window_ptr[w], window_ptr[w+1])``.
    """

    residual_JD: np.ndarray
    producer_WD: np.ndarray
    window_ptr_W1: np.ndarray


def plot_step(path: str, plan: StepPlan, tokens: np.ndarray, offsets: np.ndarray, *, name: str) -> None:
    """Draw a step, and of its microbatches the one with the most segments.

    Args:
        path: PNG file.
        plan: of the step.
        tokens: int32 (S,) token ids of the step.
        offsets: int64 (N+1,) trajectory bounds.
        name: of the step.
    """
    items = plan.items
    kind, replica, index, rows = (items[f"item_{name}_I"] for name in ("kind", "replica", "index", "rows"))
    residual_JD = np.zeros((plan.num_slots, plan.dp_degree), np.int64)
    producer_WD = np.zeros((plan.num_windows, plan.dp_degree), np.int64)
    residual_JD[index[kind == 0], replica[kind == 0]] = rows[kind == 0]
    producer_WD[index[kind == 1], replica[kind == 1]] = rows[kind == 1]
    item = int(np.where(kind == 0, np.diff(items["segment_ptr_I1"]), -1).argmax())
    members = np.flatnonzero((plan.slot_N == index[item]) & (plan.replica_N == replica[item]))
    length_N = np.diff(offsets)[members]
    step = SortedStep.from_tokens(
        np.concatenate([tokens[offsets[x] : offsets[x + 1]] for x in members]),
        np.concatenate([[0], np.cumsum(length_N)]),
    )
    write_plot(
        path,
        Bars(residual_JD, producer_WD, plan.window_ptr_W1),
        length_N=step.length_N,
        lcp_N=step.lcp_N,
        shared_N=plan.shared_N[members][step.order_N],
        capacity=plan.capacity,
        titles=(
            f"{name}: {plan.stats.decoder_compression:.3f}x, balance {100 * plan.stats.balance:.2f} %",
            f"microbatch of replica {replica[item]} in slot {index[item]}",
        ),
    )


def write_plot(
    path: str,
    bars: Bars,
    *,
    length_N: np.ndarray,
    lcp_N: np.ndarray,
    shared_N: np.ndarray,
    capacity: int,
    titles: tuple[str, str],
) -> None:
    """Draw a step as a PNG file.

    Args:
        path: file to write.
        bars: upper picture.
        length_N: int64 tokens of the trajectories of one microbatch in lexicographic order: lower picture.
        lcp_N: int64 common prefix with the trajectory before.
        shared_N: int64 tokens of each that a producer computes.
        capacity: rows a work item may have.
        titles: of the two pictures.
    """
    columns = bars.residual_JD.size + np.count_nonzero(bars.producer_WD.max(axis=1)) * bars.residual_JD.shape[1]
    figure = Figure(figsize=(min(60.0, max(12.0, columns / 12)), 11.0), layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, height_ratios=[2, 3])
    _draw_bars(upper, bars, capacity)
    upper.set_title(titles[0])
    _draw_forest(lower, length_N, lcp_N, shared_N)
    lower.set_title(titles[1])
    figure.savefig(Path(path), format="png", dpi=110)


def _draw_bars(axes: Axes, bars: Bars, capacity: int) -> None:
    num_replicas = bars.residual_JD.shape[1]
    replica_D = np.arange(num_replicas)
    # One unit of width per group of replicas: a window's producers, then its slots.
    at, ticks, labels = 0, [], []
    for w in range(bars.producer_WD.shape[0]):
        first = at
        if bars.producer_WD[w].any():
            _group(axes, at, replica_D, bars.producer_WD[w], color=_PRODUCER, hatch="///")
            ticks.append(at + 0.5)
            labels.append(f"P{w}")
            at += 1
        for j in range(int(bars.window_ptr_W1[w]), int(bars.window_ptr_W1[w + 1])):
            _group(axes, at, replica_D, bars.residual_JD[j], color=_SHARED, hatch="")
            ticks.append(at + 0.5)
            labels.append(str(j))
            at += 1
        if w % 2:
            axes.axvspan(first, at, color="#f2f2f2", zorder=0)
        axes.axvline(at, color="black", linewidth=0.8)
    axes.axhline(capacity, color="black", linestyle=":", linewidth=0.8)
    axes.set_xlim(0, at)
    axes.set_xticks(ticks, labels, fontsize=7 if at < 150 else 4)
    axes.set_xlabel(f"slot (P = producers of a sharing window; bars: replicas 0 to {num_replicas - 1})")
    axes.set_ylabel("executed rows")
    axes.legend(
        handles=[
            Patch(facecolor=_SHARED, label="consumer"),
            Patch(facecolor=_PRODUCER, hatch="///", label="producer"),
            Line2D([], [], color="black", linewidth=0.8, label="window boundary"),
            Line2D([], [], color="black", linestyle=":", linewidth=0.8, label="capacity"),
        ],
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
    )


def _group(axes: Axes, at: int, replica_D: np.ndarray, rows_D: np.ndarray, *, color: str, hatch: str) -> None:
    width = 0.9 / replica_D.size
    place_D = at + 0.05 + (replica_D + 0.5) * width
    axes.bar(place_D, rows_D, width=0.9 * width, color=color, hatch=hatch, edgecolor="white", linewidth=0.2)


def forest_lines(
    length_N: np.ndarray, lcp_N: np.ndarray, shared_N: np.ndarray
) -> dict[str, list[tuple[int, float, float]]]:
    """Cut the segments of a forest by who computes their rows and whether paths share them.

    Args:
        length_N: int64 tokens of each trajectory, in lexicographic order.
        lcp_N: int64 common prefix with the trajectory before.
        shared_N: int64 tokens of each that a producer computes.

    Returns:
        ``producer``, ``shared`` and ``own`` lines, and ``fork`` for the verticals: (first position, end, height) and
        (position, lower height, upper height). Every row is in exactly one of the first three.
    """
    forest = build_forest(length_N, lcp_N)
    num_segments = forest.num_segments
    height_V = np.zeros(num_segments)
    children: list[list[int]] = [[] for _ in range(num_segments)]
    for v in range(num_segments):
        if forest.parent_V[v] >= 0:
            children[forest.parent_V[v]].append(v)
    leaves = 0
    for v in range(num_segments):
        if not children[v]:
            height_V[v] = leaves
            leaves += 1
    lines: dict[str, list[tuple[int, float, float]]] = {"producer": [], "shared": [], "own": [], "fork": []}
    for v in range(num_segments - 1, -1, -1):
        start, end = int(forest.start_V[v]), int(forest.start_V[v] + forest.length_V[v])
        if children[v]:
            heights = height_V[children[v]]
            height_V[v] = heights.mean()
            shared_end = end
            lines["fork"].append((end, float(heights.min()), float(heights.max())))
        else:
            # Trajectories that end in a leaf do not cut it: its rows are shared up to the second longest of them.
            ends = np.sort(forest.end_position_N[forest.end_segment_N == v])
            shared_end = max(start, int(ends[-2])) if ends.size > 1 else start
        produced = min(max(int(shared_N[forest.source_V[v]]), start), end)
        own = max(produced, shared_end)
        for kind, lo, hi in (("producer", start, produced), ("shared", produced, shared_end), ("own", own, end)):
            if lo < hi:
                lines[kind].append((lo, hi, float(height_V[v])))
    return lines


def _draw_forest(axes: Axes, length_N: np.ndarray, lcp_N: np.ndarray, shared_N: np.ndarray) -> None:
    lines = forest_lines(length_N, lcp_N, shared_N)
    forks = [[(at, lo), (at, hi)] for at, lo, hi in lines["fork"]]
    axes.add_collection(LineCollection(forks, colors=_FORK, linewidths=0.8, zorder=1))
    handles = []
    names = {"producer": "computed by the producer", "shared": "shared in this microbatch", "own": "one trajectory"}
    for (kind, name), color in zip(names.items(), (_PRODUCER, _SHARED, _OWN), strict=True):
        segments = [[(lo, at), (hi, at)] for lo, hi, at in lines[kind]]
        axes.add_collection(LineCollection(segments, colors=color, linewidths=2.2, zorder=2, capstyle="butt"))
        rows = sum(hi - lo for lo, hi, _ in lines[kind])
        handles.append(Line2D([], [], color=color, linewidth=2.2, label=f"{name}: {int(rows):,} rows"))
    axes.autoscale()
    axes.set_xlim(left=0)
    axes.margins(y=0.05)
    axes.set_yticks([])
    axes.set_xlabel("position (tokens)")
    axes.set_ylabel(f"{length_N.size} trajectories, depth first")
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0))
