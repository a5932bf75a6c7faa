"""The planning process: the same plans, the same errors, no hang when it dies, nothing left behind."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from harts_titan import planning
from harts_titan.planning import PlanningError, StepPlanner, make_plan
from harts_titan.tree import plan_step
from harts_titan.tree.plan import StepPlan

TIMEOUT = 120
"""Seconds after which a wait counts as a hang."""


def step(seed=0, trajectories=12):
    rng = np.random.default_rng(seed)
    trunk = rng.integers(0, 60, 40)
    made = [
        np.concatenate([trunk[: rng.integers(0, 40)], rng.integers(0, 60, rng.integers(1, 30))])
        for _ in range(trajectories)
    ]
    offsets = np.cumsum([0, *map(len, made)])
    return np.concatenate(made).astype(np.int32), offsets


def content(plan: StepPlan):
    """Everything a plan is, but for seconds."""
    header, leaves = dict(vars(plan)), {}
    header["stats"] = {name: value for name, value in vars(plan.stats).items() if name != "seconds"}
    storage = header.pop("tensordict")
    for name, value in storage.items(include_nested=True, leaves_only=True):
        leaves[name] = (value.dtype, tuple(value.shape), value.numpy().tobytes())
    assert len(leaves) > 30
    return header, leaves


@pytest.fixture(scope="module")
def planner():
    planner = StepPlanner()
    yield planner
    planner.close()


@pytest.mark.parametrize("mode", ["compact", "nodewise", "depthwise", "expanded"])
@pytest.mark.parametrize("replicas", [None, (1,), ()])
def test_the_plan_is_the_one_made_in_place(planner, mode, replicas):
    tokens, offsets = step()
    options = {"capacity": 150, "chunk_size": 8, "dp_degree": 2, "mode": mode, "replicas": replicas}
    if mode == "expanded":
        options["call_capacity"] = len(tokens)
    got = planner.submit(tokens, offsets, **options).result(TIMEOUT)
    assert content(got) == content(plan_step(tokens, offsets, **options))
    got.validate(tokens, offsets)


def test_steps_are_planned_in_order_and_plans_keep_their_memory(planner):
    steps = [step(seed) for seed in range(5)]
    pending = [planner.submit(*made, capacity=100, chunk_size=8) for made in steps]
    plans = [future.result(TIMEOUT) for future in reversed(pending)]
    del pending
    for (tokens, offsets), plan in zip(reversed(steps), plans):
        plan.validate(tokens, offsets)


def test_errors_are_those_of_planning_in_place(planner):
    tokens, offsets = step()
    wrong = {"capacity": 5, "chunk_size": 8}
    with pytest.raises(ValueError) as here:
        make_plan(tokens, offsets, **wrong)
    with pytest.raises(ValueError) as there:
        planner.submit(tokens, offsets, **wrong).result(TIMEOUT)
    assert str(there.value) == str(here.value) and type(there.value) is type(here.value)
    assert "partition" in there.value.__notes__[0], "where it happened"
    with pytest.raises(TypeError, match="no_such_option"):
        planner.submit(tokens, offsets, no_such_option=1).result(TIMEOUT)
    assert planner.submit(tokens, offsets, capacity=100, chunk_size=8).result(TIMEOUT).num_slots > 0


def test_validate_proves_the_plan(monkeypatch, planner):
    proven = []
    monkeypatch.setattr(StepPlan, "validate", lambda self, tokens, offsets, nodes: proven.append(len(tokens)))
    tokens, offsets = step()
    make_plan(tokens, offsets, capacity=100, chunk_size=8)
    assert not proven
    make_plan(tokens, offsets, capacity=100, chunk_size=8, validate=True)
    assert proven == [len(tokens)]
    planner.submit(tokens, offsets, capacity=100, chunk_size=8, validate=True).result(TIMEOUT)
    assert proven == [len(tokens)], "there, not here"


def test_nodes_are_those_of_planning_in_place(planner):
    tokens, offsets = step()
    options = {"capacity": 100, "chunk_size": 8, "mode": "nodewise", "node_start": np.arange(0, len(tokens), 3)}
    there = planner.submit(tokens, offsets, validate=True, **options).result(TIMEOUT)
    assert content(there) == content(make_plan(tokens, offsets, validate=True, **options))
    assert there.stats.num_segments > make_plan(tokens, offsets, **options | {"node_start": None}).stats.num_segments


@pytest.mark.parametrize("when", ["starting", "idle", "planning"])
def test_death_is_a_clear_error_and_no_hang(when):
    planner = StepPlanner()
    tokens, offsets = step()
    if when != "starting":
        planner.wait_until_ready()
        assert planner.ready
    if when == "planning":
        os.kill(planner.pid, signal.SIGSTOP)
        pending = planner.submit(tokens, offsets, capacity=100, chunk_size=8)
        assert not pending.done()
    os.kill(planner.pid, signal.SIGKILL)
    if when != "planning":
        pending = planner.submit(tokens, offsets, capacity=100, chunk_size=8)
    message = r"planning process \(pid \d+\) was killed by SIGKILL \(out of memory\?\); tree.plan_in_background = false"
    with pytest.raises(PlanningError, match=message):
        pending.result(TIMEOUT)
    with pytest.raises(PlanningError, match=message):
        planner.submit(tokens, offsets, capacity=100, chunk_size=8).result(TIMEOUT)
    if when == "starting":
        with pytest.raises(PlanningError, match=message):
            planner.ready
    planner.close()


def test_a_process_that_cannot_start_says_so(monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    planner = StepPlanner()
    with pytest.raises(PlanningError, match="ended with status 1"):
        planner.wait_until_ready()
    planner.close()


def test_close_ends_the_process_whatever_it_does():
    planner = StepPlanner()
    planner.wait_until_ready()
    os.kill(planner.pid, signal.SIGSTOP)
    pending = [planner.submit(*step(), capacity=100, chunk_size=8) for _ in range(2)]
    planner.close()
    assert not alive(planner.pid)
    assert all(future.cancelled() or future.done() for future in pending)
    planner.close()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[0] != "Z"


def run_script(body: str, **options):
    source = textwrap.dedent(body)
    return subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True, **options)


def test_a_script_that_forgets_to_close_ends(tmp_path):
    """The script has no main guard either: the planning process does not run it again."""
    path = tmp_path / "script.py"
    path.write_text(
        textwrap.dedent("""
        import numpy as np
        from harts_titan.planning import StepPlanner
        print("started", flush=True)
        planner = StepPlanner()
        pending = planner.submit(np.array([1, 2], np.int32), np.array([0, 2]), capacity=2, chunk_size=1)
        print(pending.result().num_slots, planner.pid, flush=True)
        planner.submit(np.array([1, 2], np.int32), np.array([0, 2]), capacity=2, chunk_size=1)
        """)
    )
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0 and not done.stderr, done.stderr
    started, numbers = done.stdout.splitlines()
    assert started == "started" and numbers.split()[0] == "1"
    wait_for_end(int(numbers.split()[1]))


def test_the_process_ends_with_a_training_process_that_is_killed():
    process = run_script("""
        import time
        from harts_titan.planning import StepPlanner
        planner = StepPlanner()
        planner.wait_until_ready()
        print(planner.pid, flush=True)
        time.sleep(1000)
        """)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    assert alive(pid)
    process.kill()
    process.wait()
    process.stdout.close()
    wait_for_end(pid)


def wait_for_end(pid: int) -> None:
    deadline = time.monotonic() + TIMEOUT
    while alive(pid):
        assert time.monotonic() < deadline, "the planning process is still there"
        time.sleep(0.05)


def test_the_planning_process_imports_the_planner_only():
    """No torchtitan, no model, no objective."""
    process = run_script("""
        import socket, sys
        import numpy as np
        from harts_titan import planning
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        tokens, offsets = np.array([1, 2, 1, 3], np.int32), np.array([0, 2, 4])
        planning._send(here, {"tokens": tokens, "offsets": offsets, "capacity": 4, "chunk_size": 1, "validate": True})
        here.shutdown(socket.SHUT_WR)
        planning.serve(there.detach())
        assert planning._receive(here) == "ready" and planning._receive(here).num_slots == 1
        print(*sys.modules)
        """)
    out, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0
    modules = out.split()
    assert not {"torchtitan", "pyarrow", "fla"} & {name.split(".")[0] for name in modules}
    ours = {name for name in modules if name.split(".")[0] == "harts_titan" and ".tree" not in name}
    assert ours == {"harts_titan", "harts_titan._compat", "harts_titan.planning"}


def test_the_planning_process_sees_no_accelerator(planner):
    planner.wait_until_ready()
    with open(f"/proc/{planner.pid}/environ", "rb") as file:
        assert b"CUDA_VISIBLE_DEVICES=" in file.read().split(b"\0")


def test_messages_carry_arrays_beside_the_pickle():
    message = {
        "int32": np.arange(1_000_000, dtype=np.int32),
        "strided": np.arange(20).reshape(4, 5)[:, ::2],
        "bool": torch.tensor([True, False, True]),
        "none": torch.empty(0, 3, dtype=torch.int64),
        "scalar": np.array(7),
        "plain": {"text": "text", "number": 1.5, "numpy": np.float64(2.5)},
        "large": "x" * 1_000_000,
    }
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here, there:
        planning._send(here, message)
        got = planning._receive(there)
        here.close()
        with pytest.raises(EOFError):
            planning._receive(there)
    assert got.keys() == message.keys() and got["plain"] == message["plain"] and got["large"] == message["large"]
    for name in ("int32", "strided", "bool", "none", "scalar"):
        assert type(got[name]) is type(message[name])
        assert got[name].dtype == message[name].dtype and got[name].shape == message[name].shape
        assert np.array_equal(np.asarray(got[name]), np.asarray(message[name]))
    got["int32"][0] = 5
    assert message["int32"][0] == 0


def test_descriptors_are_closed(planner):
    planner.submit(*step(), capacity=100, chunk_size=8).result(TIMEOUT)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        planner.submit(*step(), capacity=100, chunk_size=8).result(TIMEOUT)
    assert len(os.listdir("/proc/self/fd")) <= before + 1


def test_without_descriptors_a_step_is_refused():
    planner = StepPlanner()
    try:
        planner.submit(*step(), capacity=100, chunk_size=8).result(TIMEOUT)
        before = resource.prlimit(planner.pid, resource.RLIMIT_NOFILE)
        # Nothing can be received.
        resource.prlimit(planner.pid, resource.RLIMIT_NOFILE, (0, before[1]))
        pending = planner.submit(*step(), capacity=100, chunk_size=8)
        time.sleep(0.5)
        resource.prlimit(planner.pid, resource.RLIMIT_NOFILE, before)
        with pytest.raises((OSError, PlanningError), match=r"oo many open files|planning process"):
            pending.result(TIMEOUT)
    finally:
        planner.close()


def test_a_message_without_its_descriptor_is_an_error():
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here, there:
        here.send(planning._PACKET.pack(0))
        with pytest.raises(OSError, match="too many open files"):
            planning._receive(there)
        # The channel still works.
        planning._send(here, "next")
        assert planning._receive(there) == "next"


class Odd(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} {second}")


def test_an_error_that_cannot_travel_arrives_as_its_text():
    kept = ValueError("as it is")
    assert planning._portable(kept) is kept
    assert str(planning._portable(Odd("one", "two"))).endswith("Odd: one two\n")


@pytest.mark.parametrize("reverse", [False, True])
def test_expanded_replicas_need_the_same_number_of_calls(reverse):
    """The numbers come from lengths and membership; here they are compared with rows laid out for all replicas."""
    options = {"capacity": 120, "chunk_size": 8, "dp_degree": 2, "mode": "expanded"}
    outcomes = set()
    for seed in range(12):
        tokens, offsets = step(seed)
        for call_capacity in (60, 90, 120):
            more = {"call_capacity": call_capacity, "reverse": reverse}
            plan = plan_step(tokens, offsets, **options, **more)
            calls = [[len(plan.consumer(d, j).calls) for d in range(2)] for j in range(plan.num_slots)]
            equal = all(len(set(row)) == 1 for row in calls)
            outcomes.add(equal)
            if equal:
                make_plan(tokens, offsets, **options, **more, replicas=(0,))
            else:
                with pytest.raises(ValueError, match=r"different numbers of calls in slot .*raise tree.max_tokens"):
                    make_plan(tokens, offsets, **options, **more, replicas=(0,))
    assert outcomes == {True, False}


def test_training_threads_run_while_a_step_is_copied(planner):
    """Handing over returns at once: the copy and the wait are another thread's."""
    tokens = np.random.default_rng(0).integers(0, 60, 4_000_000).astype(np.int32)
    planner.wait_until_ready()
    os.kill(planner.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(planner.submit, tokens, np.array([0, len(tokens)]), capacity=len(tokens), chunk_size=64)
        future = pending.result(TIMEOUT)
    assert not future.done()
    os.kill(planner.pid, signal.SIGCONT)
    assert future.result(TIMEOUT).stats.original_tokens == len(tokens)
