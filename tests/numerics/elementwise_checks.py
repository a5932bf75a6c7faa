"""Checks of convolution, norms, gates and rotary embedding against float64, shared by the interpreter tests (CPU), the
GPU tests and ``benchmarks/gpu_elementwise.py``.

An error may be at most twice that of plain PyTorch in the same precision, plus a rounding.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from harts_titan.ops import activation, norm, rope
from harts_titan.ops.activation.reference import head_gate_reference, swiglu_reference
from harts_titan.ops.norm.reference import gated_rms_norm_reference, rms_norm_reference
from harts_titan.ops.rope.reference import rope_keys_values_reference, rope_queries_reference
from harts_titan.ops.short_conv.reference import tree_short_conv_reference
from harts_titan.ops.short_conv.taps import chain_tables
from tests.numerics import kernel_checks as checks

EPS = 1e-6
TREES = ("chain", "agent", "bushy", "one_token")


def parents(kind: str, num_rows: int) -> np.ndarray:
    """Previous path row of every row: one chain, an agent's tree, a bushy one, thousands of one-token segments.

    Segments have the lengths of a 65,536-row tree, scaled.
    """
    rng = np.random.default_rng(0)
    if kind == "chain":
        return np.arange(num_rows) - 1
    prompt, step = {"agent": (4096, 2500), "bushy": (1024, 340), "one_token": (4096, 2500)}[kind]
    scale = max(1, 65_536 // num_rows)
    body = num_rows - (num_rows // 13 if kind == "one_token" else 0)
    segments = checks.agent_segments(rng, body, prompt=max(2, prompt // scale), step=max(3, step // scale))
    parent, last = [], []
    for segment, length in segments:
        first = len(parent)
        parent += [last[segment] if segment >= 0 else -1, *range(first, first + length - 1)]
        last.append(len(parent) - 1)
    return np.array([*parent[:body], *rng.integers(0, body, num_rows - body).tolist()])


def taps_of(parent: np.ndarray, num_taps: int = 4) -> np.ndarray:
    """Path rows of every row's taps, oldest first."""
    tap = np.empty((parent.size, num_taps), dtype=np.int64)
    tap[:, -1] = np.arange(parent.size)
    for j in range(num_taps - 2, -1, -1):
        tap[:, j] = np.where(tap[:, j + 1] >= 0, parent[tap[:, j + 1]], -1)
    return tap


class Numerics:
    """The checks on one device in one dtype."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        # Weight gradients are float32 sums over rows; the device's exp and rsqrt are off by two units.
        self.floor = {torch.float32: 2e-6}

    def randn(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape).to(self.device, dtype or self.dtype)

    def compare(
        self,
        ours: Callable[..., object],
        theirs: Callable[..., object],
        inputs: list[Tensor],
        fixed: tuple[Tensor, ...] = (),
    ) -> list[list[float]]:
        """[kernel's error, plain PyTorch's error] of outputs and gradients; two runs of the kernel must be equal."""

        def run(fn: Callable[..., object], x: list[Tensor], more: tuple[Tensor, ...]) -> list[Tensor]:
            x = [t.detach().requires_grad_() for t in x]
            out = fn(*x, *more)
            outs = list(out) if isinstance(out, tuple) else [out]
            generator = torch.Generator().manual_seed(0)
            # Rounded first: the float64 run must see the same output gradients.
            weights = [torch.randn(o.shape, generator=generator).to(self.device, self.dtype).to(o.dtype) for o in outs]
            return [*outs, *torch.autograd.grad(outs, x, weights)]

        exact = run(theirs, [t.double() for t in inputs], tuple(t.double() for t in fixed))
        plain = run(theirs, inputs, fixed)
        with checks.filled_allocations():
            kernel = run(ours, inputs, fixed)
        again = run(ours, inputs, fixed)
        assert all(torch.equal(a, b) for a, b in zip(kernel, again)), "two runs differ"
        result = []
        for i, (a, b, c) in enumerate(zip(kernel, plain, exact)):
            assert a.shape == c.shape and a.dtype == b.dtype, (i, a.shape, c.shape, a.dtype, b.dtype)
            result.append([checks.relative(a, c), checks.relative(b, c)])
            floor = self.floor.get(a.dtype, torch.finfo(a.dtype).eps)
            assert result[-1][0] <= 2 * result[-1][1] + floor, f"tensor {i}: {result[-1]}"
        return result

    def conv(self, kind: str, rows: int, channels: int, num_taps: int = 4) -> dict[str, object]:
        """Rows of a tree, then sorted copies of them: what packed sequences with replay rows are."""
        from harts_titan.ops.short_conv.triton_op import tree_short_conv_triton

        tap = torch.from_numpy(taps_of(parents(kind, rows), num_taps)).to(self.device)
        copies = np.sort(np.random.default_rng(1).integers(0, rows, rows + rows // 4))
        result: dict[str, object] = {}
        for name, table in (("rows", tap), ("copies", tap[torch.from_numpy(copies).to(self.device)])):
            tables = chain_tables(table, rows)
            result[name] = self.compare(
                lambda x, w, table=table, tables=tables: tree_short_conv_triton(x, w, table, tables),
                lambda x, w, table=table: tree_short_conv_reference(x, w, table),
                [self.randn(rows, channels), self.randn(channels, num_taps, dtype=torch.float32)],
            )
        return result

    def rms_norm(self, rows: int, width: int) -> list[list[float]]:
        return self.compare(
            lambda x, w: norm.rms_norm(x, w, EPS, backend="triton"),
            lambda x, w: rms_norm_reference(x, w, EPS),
            # Part of a fused projection: rows with a stride.
            [self.randn(rows, width + 12)[:, 4 : 4 + width], self.randn(width, dtype=torch.float32)],
        )

    def gated_rms_norm(self, rows: int, heads: int, width: int) -> list[list[float]]:
        return self.compare(
            lambda x, g, w: norm.gated_rms_norm(x, g, w, EPS, backend="triton"),
            lambda x, g, w: gated_rms_norm_reference(x, g, w, EPS),
            [self.randn(rows, heads, width), self.randn(rows, heads, width), self.randn(width, dtype=torch.float32)],
        )

    def swiglu(self, rows: int, width: int, limit: float) -> list[list[float]]:
        wide = self.randn(rows, 2 * width)
        return self.compare(
            lambda g, u: activation.swiglu(g, u, limit, backend="triton"),
            lambda g, u: swiglu_reference(g, u, limit),
            [wide[:, :width], wide[:, width:]],
        )

    def head_gate(self, rows: int, heads: int, width: int) -> list[list[float]]:
        return self.compare(
            lambda o, g: activation.head_gate(o, g, backend="triton"),
            head_gate_reference,
            [self.randn(rows, heads, width), self.randn(rows, heads)],
        )

    def rope(self, rows: int, heads: int, nope: int, rope_dim: int, value: int) -> dict[str, object]:
        angle = torch.arange(rows)[:, None] * 3.0 / torch.arange(1, rope_dim // 2 + 1)
        cos, sin = angle.cos().to(self.device), angle.sin().to(self.device)
        latent = self.randn(rows, rope_dim + 4)
        return {
            "queries": self.compare(
                lambda q, cos, sin: rope.rope_queries(q, cos, sin, backend="triton"),
                rope_queries_reference,
                [self.randn(rows, heads, nope + rope_dim)],
                (cos, sin),
            ),
            "keys_values": self.compare(
                lambda kv, k, cos, sin: rope.rope_keys_values(kv, k, cos, sin, nope_dim=nope, backend="triton"),
                lambda kv, k, cos, sin: rope_keys_values_reference(kv, k, cos, sin, nope),
                [self.randn(rows, heads, nope + value), latent[:, 4:]],
                (cos, sin),
            ),
        }

    def no_rows(self) -> None:
        """Zero rows are legal; parameters then have zero gradients."""
        weight = self.randn(24, dtype=torch.float32).requires_grad_()
        with checks.filled_allocations():
            x, gate = self.randn(0, 24).requires_grad_(), self.randn(0, 24).requires_grad_()
            grads = torch.autograd.grad(norm.rms_norm(x, weight, EPS, backend="triton").sum(), [x, weight])
            assert grads[0].shape == x.shape and not grads[1].any()
            out = norm.gated_rms_norm(x, gate, weight, EPS, backend="triton")
            assert not torch.autograd.grad(out.sum(), [x, gate, weight])[2].any()
            out = activation.swiglu(x, gate, backend="triton")
            assert torch.autograd.grad(out.sum(), [x, gate])[0].shape == x.shape
            o, g = self.randn(0, 2, 8).requires_grad_(), self.randn(0, 2).requires_grad_()
            assert torch.autograd.grad(activation.head_gate(o, g, backend="triton").sum(), [o, g])[1].shape == g.shape
            q, k, angles = (
                self.randn(0, 2, 12).requires_grad_(),
                self.randn(0, 4),
                torch.zeros(0, 2, device=self.device),
            )
            assert rope.rope_queries(q, angles, angles, backend="triton").shape == q.shape
            keys, values = rope.rope_keys_values(q, k, angles, angles, nope_dim=8, backend="triton")
            assert keys.shape == (0, 2, 12) and values.shape == (0, 2, 4)
