"""Planning while training runs: a process of its own plans coming steps (HARTS 4.1).

:class:`StepPlanner` owns the process; :meth:`StepPlanner.submit` hands it a step and returns the plan to come. Both
sides call :func:`make_plan`, so a step planned ahead is the step planned in place, bit for bit.

Two processes, one channel, one request at a time. A message is a pickle; its arrays and tensors lie beside it in
anonymous shared memory, of which only the file descriptor travels. Nothing large is pickled, nothing is copied on
arrival, and nothing outlives the processes, however they end. The planning process imports ``harts_titan.tree`` alone,
sees no accelerator and no process group, and ends when the other end of the channel is closed.
"""

from __future__ import annotations

import errno
import io
import mmap
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, BinaryIO

import numpy as np
import torch

from harts_titan.tree import StepPlan, expanded_forests, plan_step


class PlanningError(RuntimeError):
    """The planning process has died."""


def make_plan(tokens: np.ndarray, offsets: np.ndarray, *, validate: bool = False, **options: Any) -> StepPlan:
    """Plan a step that is going to be executed.

    Args:
        tokens: int32 (S,) token ids of the step.
        offsets: int64 (N+1,) trajectory bounds.
        validate: prove every invariant of the plan.
        **options: of :func:`harts_titan.tree.plan_step`.

    Raises:
        ValueError: If the step cannot be planned, or its plan is wrong or would hang the collectives.
    """
    plan = plan_step(tokens, offsets, **options)
    _check_equal_calls(plan, np.diff(offsets), reverse=options.get("reverse", False))
    if validate:
        plan.validate(tokens, offsets, options.get("node_start"))
    return plan


def _check_equal_calls(plan: StepPlan, length_N: np.ndarray, *, reverse: bool) -> None:
    # A microbatch is one call in the other modes.
    if plan.dp_degree == 1 or plan.mode != "expanded":
        return
    key_N = plan.slot_N * plan.dp_degree + plan.replica_N
    calls_SD = np.array(
        [
            sum(1 for _ in expanded_forests(length_N[key_N == k], call_capacity=plan.call_capacity, reverse=reverse))
            for k in range(plan.num_slots * plan.dp_degree)
        ]
    ).reshape(-1, plan.dp_degree)
    for slot, calls_D in enumerate(calls_SD.tolist()):
        if len(set(calls_D)) > 1:
            raise ValueError(
                f"replicas need different numbers of calls in slot {slot} of tree.mode = '{plan.mode}' "
                f"({sorted(set(calls_D))}), which would hang the collectives; raise tree.max_tokens"
            )


class StepPlanner:
    """A process that plans steps, one after another, in the order they are handed over. Starts at construction.

    Raises:
        ValueError: If the operating system is not Linux.
    """

    def __init__(self) -> None:
        if not hasattr(os, "memfd_create"):
            raise ValueError("planning in the background needs Linux; set tree.plan_in_background = false")
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # Not multiprocessing: its processes import the main module again, which here is a whole trainer.
            code = f"import sys; sys.path[:] = sys.argv[1:]; import {__name__} as p; p.serve({theirs.fileno()})"
            self._process = subprocess.Popen(
                [sys.executable, "-c", code, *sys.path],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
            )
        # Copies a step to the process and waits for the plan; both leave the interpreter to the training thread.
        self._thread = ThreadPoolExecutor(1, "harts_planning")
        self._started = self._thread.submit(self._read)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def ready(self) -> bool:
        """Whether the process has started, which takes seconds: until then a step is planned sooner in place.

        Raises:
            PlanningError: If the process has died.
        """
        if self._started.done():
            self.wait_until_ready()
            return True
        return False

    def wait_until_ready(self) -> None:
        """Wait until the process has started.

        Raises:
            PlanningError: If the process has died.
        """
        self._started.result()

    def submit(self, tokens: np.ndarray, offsets: np.ndarray, **options: Any) -> Future[StepPlan]:
        """Start planning a step.

        Args:
            tokens: int32 (S,) token ids of the step; must not be written to afterwards.
            offsets: int64 (N+1,) trajectory bounds; likewise.
            **options: of :func:`make_plan`.

        Returns:
            The plan to come. ``result()`` raises what :func:`make_plan` raised in the process, ``PlanningError`` if the
            process has died.
        """
        return self._thread.submit(self._ask, {"tokens": tokens, "offsets": offsets} | options)

    def close(self) -> None:
        """End the process, whatever it is doing; plans still to come are lost."""
        self._process.kill()
        self._process.wait()
        self._thread.shutdown(cancel_futures=True)
        self._channel.close()

    def _ask(self, request: dict[str, Any]) -> StepPlan:
        try:
            _send(self._channel, request)
        except ConnectionError:
            raise self._death() from None
        answer = self._read()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _read(self) -> Any:
        try:
            return _receive(self._channel)
        except (ConnectionError, EOFError):
            raise self._death() from None

    def _death(self) -> PlanningError:
        # The channel breaks an instant before the exit status is there.
        status = self._process.wait()
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        hint = " (out of memory?)" if status == -signal.SIGKILL else ""
        return PlanningError(
            f"the planning process (pid {self.pid}) {how}{hint}; "
            "tree.plan_in_background = false plans in the training process"
        )


def serve(descriptor: int) -> None:
    """Plan what arrives until the other end of the channel is closed: the body of the planning process.

    Args:
        descriptor: of the channel's end.
    """
    # Ctrl-C reaches every process of the terminal; the training process ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Loads or compiles the planner's kernels.
    make_plan(np.array([1, 2, 1, 3], np.int32), np.array([0, 2, 4]), capacity=4, chunk_size=1)
    with socket.socket(fileno=descriptor) as channel:
        _send(channel, "ready")
        while True:
            request: Any = None
            try:
                request = _receive(channel)
                answer: Any = make_plan(**request)
            except (ConnectionError, EOFError):
                return
            except Exception as error:
                error.add_note(f"In the planning process:\n{traceback.format_exc()}")
                answer = _portable(error)
            try:
                _send(channel, answer)
            except ConnectionError:
                return
            except OSError as error:
                # No memory or descriptors left for the plan; its text is small.
                _send(channel, _portable(error))
            # Else two steps and two plans are held while the next is planned.
            del request, answer


def _portable(error: Exception) -> Exception:
    """Return the error, or its text as a ``RuntimeError`` if it cannot travel."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError("".join(traceback.format_exception(error)))
    return error


class _Pickler(pickle.Pickler):
    """Writes arrays and tensors beside the pickle."""

    def __init__(self, pickled: BinaryIO, beside: BinaryIO) -> None:
        super().__init__(pickled, protocol=5)
        self._beside = beside

    def persistent_id(self, value: Any) -> Any:
        """Return where the values of an array or tensor lie; None for anything else."""
        if not isinstance(value, np.ndarray | torch.Tensor):
            return None
        array = np.asarray(value, order="C")
        start = self._beside.tell()
        self._beside.write(array.data)
        # The next one starts at a multiple of every item size.
        self._beside.write(bytes(-array.nbytes % 64))
        return isinstance(value, torch.Tensor), array.dtype.str, array.shape, start


class _Unpickler(pickle.Unpickler):
    """Gives arrays and tensors that are views of the shared memory, which lives as long as they do."""

    def __init__(self, memory: Any) -> None:
        super().__init__(memory)
        self._memory: mmap.mmap = memory

    def persistent_load(self, where: Any) -> np.ndarray | torch.Tensor:
        """Return the array or tensor that lies there."""
        is_tensor, dtype, shape, start = where
        array: np.ndarray = np.ndarray(shape, dtype, self._memory, start)
        return torch.from_numpy(array) if is_tensor else array


_PACKET = struct.Struct("<q")
"""Where the pickle starts, behind the arrays; the shared memory travels as a file descriptor beside it."""


def _send(channel: socket.socket, message: Any) -> None:
    with open(os.memfd_create("harts_planning"), "wb") as memory:
        pickled = io.BytesIO()
        _Pickler(pickled, memory).dump(message)
        packet = _PACKET.pack(memory.tell())
        memory.write(pickled.getbuffer())
        memory.flush()
        socket.send_fds(channel, [packet], [memory.fileno()])


def _receive(channel: socket.socket) -> Any:
    packet, descriptors, *_ = socket.recv_fds(channel, _PACKET.size, 1)
    if not packet:
        raise EOFError
    if not descriptors:
        # The kernel drops what this process has no descriptor for; the packet is lost, the channel is not.
        raise OSError(errno.EMFILE, "a step or plan was lost between planning and training: too many open files")
    with open(descriptors[0], "rb") as file:
        memory = mmap.mmap(file.fileno(), 0)
    memory.seek(*_PACKET.unpack(packet))
    return _Unpickler(memory).load()
