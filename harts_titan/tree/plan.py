"""The plan of a training step: storage, transport and checks (HARTS 3.2 to 3.4, 4.1 to 4.3).

Shapes: as in ``layout.py`` and ``tables.py``. All tensors are int64 unless said.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from harts_titan.tree.call_layout import TENSOR_FIELDS, CallLayout
from harts_titan.tree.cost import PlanCost
from harts_titan.tree.events import stage_events
from harts_titan.tree.handover import HandOver
from harts_titan.tree.invariants_plan import check_plan
from harts_titan.tree.items import PRODUCER
from harts_titan.tree.layout import RESTARTING
from harts_titan.tree.stats import PlanStats

_FORMAT = 2


@dataclass(frozen=True)
class ConsumerPlan:
    """One microbatch: complete trajectories that one replica runs in one slot.

    Attributes:
        replica: data-parallel rank.
        slot: microbatch index on the replica.
        trajectory_N: indices into the step batch.
        calls: layouts of its model calls; one, except in mode ``expanded``.
        producer: ``window * dp_degree + replica`` of the producer it attaches to, -1 for none.
        external_row_X: row of the producer's call that is path row ``x``; empty without producer.
        multiplicity_X: trajectories of this consumer whose path contains the row.
        state_row_E: external row after which each external state is taken.
        export_E: export of the producer's call that is external state ``e``.
    """

    replica: int
    slot: int
    trajectory_N: Tensor
    calls: tuple[CallLayout, ...]
    producer: int
    external_row_X: Tensor
    multiplicity_X: Tensor
    state_row_E: Tensor
    export_E: Tensor


@dataclass(frozen=True)
class ProducerPlan:
    """The prefixes that one replica computes once for all its consumers of a sharing window.

    Attributes:
        replica: data-parallel rank.
        window: sharing window.
        trajectory_N: indices into the step batch, one for each longest prefix.
        prefix_N: tokens of each that are computed.
        call: layout of its model call. Positions and labels are those of the prefixes; there is no LM head and no loss.
    """

    replica: int
    window: int
    trajectory_N: Tensor
    prefix_N: Tensor
    call: CallLayout


@dataclass(frozen=True)
class StepPlan:
    """The immutable plan of one training step.

    Attributes:
        mode: ``compact``, ``nodewise``, ``depthwise`` or ``expanded``.
        chunk_size: tokens in a linear-attention chunk.
        capacity: compact rows a complete consumer may have, and rows a producer may have.
        call_capacity: rows at which an ``expanded`` call is closed; equal to ``capacity`` in other modes.
        num_taps: width of the short convolution.
        dp_degree: replicas.
        num_slots: consumers of each replica.
        planner: ``harts``, ``l1`` or the name of the function that placed the step.
        windows: True if producers compute what several microbatches of a window share.
        max_window_slots: slots a window may have, 0 for any number; 1 where windows are off.
        max_live_producers: producers a replica may hold for backward at once; 0 where windows are off.
        replicas: replicas whose rows are laid out.
        cost: coefficients the plan was made with.
        stats: sizes and times.
        tensordict: the storage. ``placement``: ``replica_N``, ``slot_N``, ``shared_N`` by trajectory of the step batch
            and ``window_ptr_W1``; ``items``: the arrays of ``tables.TABLES``; ``events_V2``: what a replica runs, in
            order (``events.py``); rows of the replicas laid out: ``consumer_<slot * dp_degree + replica>`` with
            ``trajectory_N``, ``calls`` and, if attached, ``hand_over``, and ``producer_<window * dp_degree + replica>``
            with ``trajectory_N``, ``prefix_N`` and ``call``.
    """

    mode: str
    chunk_size: int
    capacity: int
    call_capacity: int
    num_taps: int
    dp_degree: int
    num_slots: int
    planner: str
    windows: bool
    max_window_slots: int
    max_live_producers: int
    replicas: tuple[int, ...]
    cost: PlanCost
    stats: PlanStats
    tensordict: TensorDict

    @property
    def replica_N(self) -> np.ndarray:
        """Replica of each trajectory of the step batch: int64."""
        return self._array("placement", "replica_N")

    @property
    def slot_N(self) -> np.ndarray:
        """Slot of each trajectory: int64."""
        return self._array("placement", "slot_N")

    @property
    def shared_N(self) -> np.ndarray:
        """Tokens of each trajectory that its producer computes: int64."""
        return self._array("placement", "shared_N")

    @property
    def window_ptr_W1(self) -> np.ndarray:
        """Slots of window ``w`` are ``[window_ptr[w], window_ptr[w+1])``: int64."""
        return self._array("placement", "window_ptr_W1")

    @property
    def num_windows(self) -> int:
        """Sharing windows; one a slot where windows are off."""
        return self.window_ptr_W1.shape[0] - 1

    @property
    def items(self) -> dict[str, np.ndarray]:
        """Packed segments, sequences and states of every work item, by name in ``tables.TABLES``: int64."""
        return {str(name): value.cpu().numpy() for name, value in self.tensordict["items"].items()}

    @property
    def events(self) -> np.ndarray:
        """Kind and index of what every replica runs, in order, without a pipeline: int64 (V, 2), see ``events.py``."""
        return self._array("events_V2")

    def stage_events(self, in_flight: int) -> np.ndarray:
        """Return the events of a pipeline stage that holds ``in_flight`` microbatches: int64 (V, 2).

        Raises:
            ValueError: If that needs more live producers than ``max_live_producers``.
        """
        items = self.items
        has_producer_W = np.zeros(self.num_windows, bool)
        has_producer_W[items["item_index_I"][items["item_kind_I"] == PRODUCER]] = True
        limit = max(1, self.max_live_producers)
        return stage_events(self.window_ptr_W1, has_producer_W, in_flight=in_flight, max_live_producers=limit)

    def consumer(self, replica: int, slot: int) -> ConsumerPlan:
        """Return the microbatch of a replica in a slot.

        Raises:
            ValueError: If there is no such replica or slot, or the replica's rows were not laid out.
        """
        if not (0 <= replica < self.dp_degree and 0 <= slot < self.num_slots):
            raise ValueError(
                f"no consumer (replica {replica}, slot {slot}): the plan has {self.dp_degree} replicas and "
                f"{self.num_slots} slots"
            )
        entry = self._rows(f"consumer_{slot * self.dp_degree + replica}", replica)
        calls = tuple(entry["calls", str(i)] for i in range(len(entry["calls"].keys())))
        names = [field.name for field in fields(HandOver)]
        if "hand_over" in set(entry.keys()):
            window = int(np.searchsorted(self.window_ptr_W1, slot, "right")) - 1
            producer, handed = window * self.dp_degree + replica, {name: entry["hand_over", name] for name in names}
        else:
            producer, handed = -1, {name: torch.zeros(0, dtype=torch.int64) for name in names}
        return ConsumerPlan(replica, slot, entry["trajectory_N"], calls, producer, **handed)

    def consumers(self) -> list[ConsumerPlan]:
        """Return every consumer whose rows are laid out, slot after slot."""
        return [self.consumer(d, j) for j in range(self.num_slots) for d in self.replicas]

    def producer(self, replica: int, window: int) -> ProducerPlan | None:
        """Return the producer of a replica in a window, None if it has none there.

        Raises:
            ValueError: If there is no such replica or window, or the replica's rows were not laid out.
        """
        if not (0 <= replica < self.dp_degree and 0 <= window < self.num_windows):
            raise ValueError(
                f"no producer (replica {replica}, window {window}): the plan has {self.dp_degree} replicas and "
                f"{self.num_windows} windows"
            )
        name = f"producer_{window * self.dp_degree + replica}"
        if replica in self.replicas and name not in set(self.tensordict.keys()):
            return None
        entry = self._rows(name, replica)
        return ProducerPlan(replica, window, entry["trajectory_N"], entry["prefix_N"], entry["call"])

    def producers(self) -> list[ProducerPlan]:
        """Return every producer whose rows are laid out, window after window."""
        found = [self.producer(d, w) for w in range(self.num_windows) for d in self.replicas]
        return [producer for producer in found if producer is not None]

    def _rows(self, name: str, replica: int) -> TensorDict:
        if replica not in self.replicas:
            raise ValueError(
                f"the rows of replica {replica} are not laid out; plan_step was given replicas {self.replicas}"
            )
        return self.tensordict[name]

    def _array(self, *key: str) -> np.ndarray:
        return self.tensordict[key].cpu().numpy()

    def to(self, device: torch.device | str) -> StepPlan:
        """Return the plan with its tensors on ``device``."""
        return replace(self, tensordict=self.tensordict.to(device))

    def save(self, path: str | Path) -> None:
        """Write the plan to a file that ``load`` reads without executing code."""
        header, flat = _flatten(self)
        torch.save({"header": header, "flat": flat}, path)

    @classmethod
    def load(cls, path: str | Path) -> StepPlan:
        """Read a plan that ``save`` wrote.

        Raises:
            ValueError: If the file is no plan of this format.
        """
        try:
            content = dict(torch.load(path, weights_only=True))
            header, flat = content["header"], content["flat"]
            found = header["format"]
        except OSError:
            raise
        # A file of another kind fails in many ways; torch's own text is about how to load it unsafely.
        except Exception as error:
            raise ValueError(f"{path} is no step plan of format {_FORMAT} ({type(error).__name__})") from error
        if found != _FORMAT:
            raise ValueError(f"{path} is a step plan of format {found!r}; this version reads format {_FORMAT}")
        return _unflatten(header, flat)

    @classmethod
    def broadcast(cls, plan: StepPlan | None, src: int = 0, group: dist.ProcessGroup | None = None) -> StepPlan:
        """Send the plan of one rank to all ranks of a group.

        Args:
            plan: the plan on rank ``src``; ignored elsewhere.
            src: global rank that has the plan.
            group: process group; default all ranks.

        Returns:
            The plan, on the CPU, on every rank.

        Raises:
            ValueError: On every rank alike, if ``plan`` is None on rank ``src``.
        """
        sends = dist.get_rank() == src
        header, flat = _flatten(plan) if sends and plan is not None else (None, torch.empty(0, dtype=torch.int64))
        box: list[Any] = [header]
        dist.broadcast_object_list(box, src=src, group=group)
        header = box[0]
        if header is None:
            raise ValueError(f"rank {src} has no plan to broadcast")
        device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else "cpu"
        if not sends:
            flat = torch.empty(header["numel"], dtype=torch.int64)
        flat = flat.to(device)
        dist.broadcast(flat, src=src, group=group)
        return plan if sends and plan is not None else _unflatten(header, flat.cpu())

    def validate(self, tokens: np.ndarray, offsets: np.ndarray, node_start: np.ndarray | None = None) -> None:
        """Prove every invariant of the plan against the trajectories, by checks that share no code with the planner.

        Placement, segments, states and events are proven for all replicas, rows for those laid out.

        Args:
            tokens: int32 (S,) token ids of the step.
            offsets: int64 (N+1,) trajectory bounds.
            node_start: as given to ``plan_step``.

        Raises:
            ValueError: Naming the violated invariant and the place.
        """
        check_plan(self, tokens, offsets, node_start)


def nested(arrays: dict[str, Any]) -> TensorDict:
    """Return nested dictionaries of arrays and call layouts as the storage of a plan."""
    content: dict[str, Any] = {}
    for name, value in arrays.items():
        if isinstance(value, dict):
            value = nested(value)
        elif isinstance(value, np.ndarray):
            value = torch.from_numpy(value)
        content[name] = value
    return TensorDict(content, batch_size=[])


_PLAIN_FIELDS = tuple(f.name for f in fields(StepPlan) if f.name not in ("cost", "stats", "tensordict", "replicas"))


def _leaves(storage: TensorDict, above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in storage.items():
        path = (*above, str(name))
        if isinstance(value, TensorDict):
            yield from _leaves(value, path)
        else:
            yield path, value


def _flatten(plan: StepPlan) -> tuple[dict[str, Any], Tensor]:
    """Return a header of plain values and one int64 tensor: one collective and one file entry for all fields."""
    tensors: list[Tensor] = []
    leaves: list[tuple[list[str], int]] = []
    for path, value in _leaves(plan.tensordict):
        if isinstance(value, CallLayout):
            tensors += [getattr(value, name) for name in TENSOR_FIELDS]
            leaves.append((list(path), value.num_external_states))
        else:
            tensors.append(value)
            leaves.append((list(path), -1))
    flat = torch.cat([t.reshape(-1).to("cpu", torch.int64) for t in tensors])
    header = {
        "format": _FORMAT,
        "plan": {name: getattr(plan, name) for name in _PLAIN_FIELDS},
        "replicas": list(plan.replicas),
        "cost": asdict(plan.cost),
        "stats": asdict(plan.stats),
        "leaves": leaves,
        "shapes": [list(t.shape) for t in tensors],
        "numel": flat.numel(),
    }
    return header, flat


def _unflatten(header: dict[str, Any], flat: Tensor) -> StepPlan:
    shapes = header["shapes"]
    pieces = iter(flat.split([int(np.prod(shape)) for shape in shapes]))
    shape = iter(shapes)

    def take() -> Tensor:
        return next(pieces).view(next(shape))

    content: dict[str, Any] = {}
    for path, states in header["leaves"]:
        if states < 0:
            value: Any = take()
        else:
            parts: dict[str, Any] = {name: take() for name in TENSOR_FIELDS}
            parts["seg_continues_V"] = parts["seg_continues_V"].bool()
            chunk_size, restarts = header["plan"]["chunk_size"], header["plan"]["mode"] in RESTARTING
            value = CallLayout(
                **parts, chunk_size=chunk_size, num_external_states=states, restarts_chunks=restarts, batch_size=[]
            )
        folder = content
        for name in path[:-1]:
            folder = folder.setdefault(name, {})
        folder[path[-1]] = value
    stats = header["stats"] | {"computation_balance": tuple(header["stats"]["computation_balance"])}
    return StepPlan(
        **header["plan"],
        replicas=tuple(header["replicas"]),
        cost=PlanCost(**header["cost"]),
        stats=PlanStats(**stats),
        tensordict=nested(content),
    )
