"""Checks of KDA's limits on a device, shared by the GPU tests and ``benchmarks/gpu_kda.py``."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harts_titan.models.common.tree_inputs import packed_sequences
from harts_titan.ops.kda import PackedSequences, launches
from harts_titan.ops.kda.triton_op import kda_triton
from harts_titan.tree.plan import CallLayout
from tests.numerics import kernel_checks as checks
from tests.numerics.kernel_checks import Setting


def sequences_of(lengths: list[int], setting: Setting) -> PackedSequences:
    """Independent sequences, one round."""
    bounds = np.cumsum([0, *lengths])
    return PackedSequences.build(
        chunk_size=setting.chunk_size,
        cu_seqlens=bounds,
        packed_row=np.arange(bounds[-1]),
        kept=np.arange(bounds[-1]),
        init_state=[-1] * len(lengths),
        round_ptr=[0, len(lengths)],
        num_path_rows=int(bounds[-1]),
        device=setting.device,
    )


def with_gradients(x: list[Tensor], do: Tensor, sequences: PackedSequences, lower_bound: float = -5.0) -> list[Tensor]:
    """Outputs and the gradients of the seven inputs."""
    leaves = [t.detach().requires_grad_() for t in x]
    o, _ = kda_triton(*leaves, sequences, lower_bound)
    return [o.detach(), *torch.autograd.grad(o, leaves, do)]


def check_one_token_sequences(count: int, setting: Setting) -> list[float]:
    """Errors of outputs and gradients against the closed form ``q.k beta v`` times the scale."""
    x = checks.kda_inputs(count, setting, "medium", seed=5)
    o, _ = kda_triton(*x[:7], sequences_of([1] * count, setting))
    grads = torch.autograd.grad(o.float().square().sum(), x[:3])
    exact_x = [t.detach().double().requires_grad_() for t in x]
    q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in exact_x[:2])
    weight = (q * k).sum(-1) * torch.sigmoid(exact_x[4]) * setting.key_dim**-0.5
    exact = weight[..., None] * exact_x[2]
    exact_grads = torch.autograd.grad(exact.square().sum(), exact_x[:3])
    errors = [checks.relative(a, b) for a, b in zip((o, *grads), (exact, *exact_grads))]
    assert max(errors) < 2 * torch.finfo(setting.dtype).eps, errors
    return errors


def check_tail(long: int, tail: int, setting: Setting) -> list[bool]:
    """Outputs and row gradients of the last rows of a long call are what they are in a call of their own."""
    x = [t.detach() for t in checks.kda_inputs(long + tail, setting, "slow", seed=1)[:7]]
    do = torch.randn_like(x[2])
    got = [t[long:].clone() for t in with_gradients(x, do, sequences_of([long, tail], setting))[:6]]
    alone = with_gradients([t[long:] for t in x[:5]] + x[5:], do[long:], sequences_of([tail], setting))
    same = [torch.equal(a, b) for a, b in zip(got, alone)]
    assert all(same), same
    return same


def check_repeat(sequences: PackedSequences, setting: Setting, decay: str) -> None:
    """Two runs give the same bits, parameters' gradients included."""
    x = [t.detach() for t in checks.kda_inputs(sequences.num_path_rows, setting, decay, seed=2)[:7]]
    do = torch.randn_like(x[2][: sequences.num_rows])
    first, second = (with_gradients(x, do, sequences) for _ in range(2))
    differ = [i for i, (a, b) in enumerate(zip(first, second)) if not torch.equal(a, b)]
    assert not differ, f"tensors {differ} of outputs and gradients differ between two runs"


def check_extreme_gates(setting: Setting) -> dict[str, object]:
    """Decays of 0 and of the lower bound in turns: outputs and gradients against float64 and fla, and bits."""
    c = setting.chunk_size
    with checks.filled_allocations():
        return checks.check_kda(sequences_of([2 * c - 3, 1, c // 2 + 1], setting), setting, decay="extreme")


def check_constant_gates(setting: Setting) -> None:
    """Whole chunks of the strongest and of no decay: everything is finite, and no row depends on later ones."""
    c = setting.chunk_size
    x = [t.detach() for t in checks.kda_inputs(2 * c, setting, "extreme", seed=9)[:7]]
    do, sequences = torch.ones_like(x[2]), sequences_of([2 * c], setting)
    m = c + c // 2 + 1
    for gate in (30.0, -30.0):
        x[3] = torch.full_like(x[3], gate)
        with checks.filled_allocations():
            whole = with_gradients(x, do, sequences, setting.lower_bound)
            start, _ = kda_triton(*(t[:m] for t in x[:5]), *x[5:], sequences_of([m], setting), setting.lower_bound)
        assert all(torch.isfinite(t).all() for t in whole), f"non-finite values at raw gates of {gate}"
        assert torch.equal(start, whole[0][:m]), f"rows depend on later ones at raw gates of {gate}"


def layout_as(layout: CallLayout, *, restarts_chunks: bool) -> CallLayout:
    """The same index tables, launched as in modes that restart the chunk grid, or as in the others."""
    return CallLayout.from_arrays(
        layout.arrays(),
        chunk_size=layout.chunk_size,
        num_external_states=layout.num_external_states,
        restarts_chunks=restarts_chunks,
    )


def check_separate_calls(layout: CallLayout, setting: Setting, decay: str) -> None:
    """One call a round gives the bits of kernels that run once over all rounds, exports' gradients included."""
    together, apart = (
        packed_sequences(layout_as(layout, restarts_chunks=restarts), setting.device) for restarts in (False, True)
    )
    assert apart.separate_calls and not together.separate_calls
    x = checks.kda_inputs(apart.num_path_rows, setting, decay, seed=6, num_external=apart.num_external_states)
    generator = torch.Generator().manual_seed(7)
    weights: list[Tensor] = []

    def run(sequences: PackedSequences) -> list[Tensor]:
        outputs = kda_triton(*x[:7], sequences, setting.lower_bound, x[7])
        if not weights:
            weights.extend(torch.randn(t.shape, generator=generator).to(t) for t in outputs)
        with_outputs = torch.autograd.grad(outputs, x, weights, retain_graph=True)
        # Without gradients of the outputs no kernel writes their tiles.
        states_only = torch.autograd.grad(outputs[1], x, weights[1]) if apart.num_exports else []
        return [*outputs, *with_outputs, *states_only]

    with checks.filled_allocations():
        names = ("o", "exported", *checks.KDA_INPUTS, *(f"{name} from states" for name in checks.KDA_INPUTS))
        differ = [name for name, a, b in zip(names, run(together), run(apart)) if not torch.equal(a, b)]
    assert not differ, f"{differ} differ between one call a round and kernels over all rounds"


class Launches(contextlib.AbstractContextManager):
    """Records the launches of KDA's kernels: name, first program and number of programs."""

    def __enter__(self) -> list[tuple[str, int, int]]:
        """Return the list that launches are appended to."""
        seen: list[tuple[str, int, int]] = []
        self._kernels = {name: getattr(launches, name) for name in FIRST_ARGUMENT}
        for name, kernel in self._kernels.items():
            setattr(launches, name, _Recorded(name, kernel, seen))
        return seen

    def __exit__(self, *_: object) -> None:
        """Put the kernels back."""
        for name, kernel in self._kernels.items():
            setattr(launches, name, kernel)


FIRST_ARGUMENT = {
    "chunk_gates": "first",
    "chunk_forward": "first",
    "state_scan_forward": "first_sequence",
    "chunk_output": "first",
    "chunk_output_gradient": "first",
    "state_scan_backward": "first_sequence",
    "fan_in_states": "first_fan",
    "chunk_backward_values": "first",
    "chunk_backward_keys": "first",
    "chunk_backward_norms": "first",
    "fan_in_copies": None,
}
"""Every kernel, and which argument shifts its programs."""


class _Recorded:
    def __init__(self, name: str, kernel: Any, seen: list[tuple[str, int, int]]) -> None:
        self._name, self._kernel, self._seen = name, kernel, seen

    def __getitem__(self, grid: tuple[int]) -> Callable[..., object]:
        def launch(*args: Any, **options: Any) -> object:
            first = FIRST_ARGUMENT[self._name]
            names = list(inspect.signature(self._kernel.fn).parameters)
            self._seen.append((self._name, 0 if first is None else int(args[names.index(first)]), grid[0]))
            return self._kernel[grid](*args, **options)

        return launch


def check_launch_order(layout: CallLayout, setting: Setting) -> int:
    """In modes that restart the chunk grid every kernel runs on the rows of one round before the next round starts.

    Returns:
        Launches of a forward and a backward pass.
    """
    sequences = packed_sequences(layout, setting.device)
    x = [t.detach() for t in checks.kda_inputs(sequences.num_path_rows, setting, "slow", seed=0)[:7]]
    with Launches() as seen:
        with_gradients(x, torch.ones_like(x[2]), sequences)
    chunks = -(-np.diff(layout.cu_seqlens_Q1.numpy()) // layout.chunk_size)
    round_of_sequence = np.repeat(np.arange(layout.num_rounds), np.diff(layout.round_ptr_R1.numpy()))
    round_of_chunk = np.repeat(round_of_sequence, chunks)
    starts = layout.init_state_Q.numpy() >= 0
    expected: list[tuple[str, int]] = []
    for r in range(layout.num_rounds):
        expected += [(name, r) for name in ("chunk_gates", "chunk_forward", "state_scan_forward", "chunk_output")]
    for r in reversed(range(layout.num_rounds)):
        expected += [("chunk_output_gradient", r), ("state_scan_backward", r)]
        if starts[round_of_sequence == r].any():
            expected.append(("fan_in_states", r))
        expected += [(name, r) for name in ("chunk_backward_values", "chunk_backward_keys", "chunk_backward_norms")]
    names = [name for name, *_ in seen if name != "fan_in_copies"]
    assert names == [name for name, _ in expected], names
    for (name, first, count), (_, r) in zip(seen, expected, strict=False):
        units = round_of_sequence if "scan" in name else round_of_chunk
        if name == "fan_in_states":
            continue
        # Programs per unit are whole numbers; a scan's grid starts at 0 and is shifted by sequences.
        whole = sum(c for n, _, c in seen if n == name)
        assert whole % units.size == 0
        each = whole // units.size
        begin, end = np.searchsorted(units, (r, r + 1)).tolist()
        shift = first if "scan" in name else first / each
        assert (shift, count) == (begin, (end - begin) * each), (name, r, first, count)
    return len(seen)
