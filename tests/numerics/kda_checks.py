"""Checks of KDA's limits on a device, shared by the GPU tests and ``benchmarks/gpu_kda.py``."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from harts_titan.ops.kda import PackedSequences
from harts_titan.ops.kda.triton_op import kda_triton
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


def with_gradients(x: list[Tensor], do: Tensor, sequences: PackedSequences) -> list[Tensor]:
    """Outputs and the gradients of the seven inputs."""
    leaves = [t.detach().requires_grad_() for t in x]
    o, _ = kda_triton(*leaves, sequences)
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
