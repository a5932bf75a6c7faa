"""Checks of the CUDA kernels against float64 and against fla-core, shared by the interpreter tests (CPU), the GPU tests
and ``benchmarks/gpu_ops.py``. Each returns measured numbers and raises AssertionError where a bound is broken.

A kernel's error may be at most twice that of the same-precision implementation it replaces (fla's ``chunk_kda`` on
expanded trajectories, dense PyTorch attention, plain PyTorch convolution) plus a rounding floor, both against float64.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from harts_titan.ops.attention import TreeMask
from harts_titan.ops.attention.reference import tree_attention_dense
from harts_titan.ops.kda import PackedSequences, kda
from harts_titan.ops.short_conv.reference import tree_short_conv_reference
from harts_titan.tree import plan_step
from harts_titan.tree.plan import CallLayout

Segments = list[tuple[int, int]]
KDA_INPUTS = ("q", "k", "v", "f", "b", "A_log", "dt_bias", "external")
# Mean of the gate bias: log decay per token about -0.02 (state errors stay visible), -0.6 and -4.9 (underflow).
DECAYS = {"slow": -6.0, "medium": -2.0, "strong": 4.0}


@dataclass(frozen=True)
class Setting:
    """Sizes, dtype and device of one check."""

    device: str
    dtype: torch.dtype
    num_heads: int = 2
    key_dim: int = 64
    value_dim: int = 64
    chunk_size: int = 64
    lower_bound: float = -5.0
    exact_backend: str = "recurrent"
    """float64 implementation: "recurrent" by tokens on the host, or "reference" by chunks on ``device``."""


@contextlib.contextmanager
def filled_allocations(value: float = float("nan")) -> Iterator[None]:
    """Uninitialised floating tensors hold ``value``; NaN shows reads of what no kernel wrote."""
    originals = torch.empty, torch.empty_like, torch.Tensor.new_empty

    def filled(original):
        def allocate(*args, **kwargs):
            tensor = original(*args, **kwargs)
            return tensor.fill_(value) if tensor.is_floating_point() else tensor

        return allocate

    torch.empty, torch.empty_like, torch.Tensor.new_empty = map(filled, originals)
    try:
        yield
    finally:
        torch.empty, torch.empty_like, torch.Tensor.new_empty = originals


def random_segments(rng: np.random.Generator, chunk_size: int, count: int) -> Segments:
    """(parent, length) per segment; short, long and grid-aligned ones, forks inside and at the ends of chunks."""
    segments, ends = [(-1, int(rng.integers(1, 3 * chunk_size)))], []
    ends.append(segments[0][1])
    for _ in range(count - 1):
        parent = int(rng.integers(0, len(segments)))
        length = int(rng.integers(1, chunk_size // 2 if rng.random() < 0.4 else 2 * chunk_size))
        if rng.random() < 0.3:
            length += -(ends[parent] + length) % chunk_size
        segments.append((parent, length))
        ends.append(ends[parent] + length)
    return segments


def agent_segments(rng: np.random.Generator, num_rows: int, *, prompt: int = 4096, step: int = 2500) -> Segments:
    """A long prompt, a trunk of turns, and side branches of one to three turns, until ``num_rows`` compact rows."""
    segments, trunk, total = [(-1, prompt)], 0, prompt

    def grow(parent: int) -> int:
        nonlocal total
        length = int(rng.integers(max(1, step // 8), step + 1))
        segments.append((parent, length))
        total += length
        return len(segments) - 1

    while total < num_rows:
        if rng.random() < 0.5:
            for _ in range(int(rng.integers(1, 4))):
                parent = trunk
                for _ in range(int(rng.integers(1, 4))):
                    parent = grow(parent)
        trunk = grow(trunk)
    return segments


def batch_of(segments: Segments) -> tuple[np.ndarray, np.ndarray]:
    """Flat tokens and offsets of the leaf paths; every segment starts with a token no sibling starts with."""
    tokens, children = [], {parent for parent, _ in segments}
    for index, (_, length) in enumerate(segments):
        tokens.append((np.arange(length) * 7 + index * 131) % 50_000)
        tokens[-1][0] = 50_000 + index
    paths = []
    for leaf in (i for i in range(len(segments)) if i not in children):
        path, at = [], leaf
        while at >= 0:
            path.append(tokens[at])
            at = segments[at][0]
        paths.append(np.concatenate(path[::-1]))
    return np.concatenate(paths).astype(np.int32), np.cumsum([0, *(len(p) for p in paths)])


def layout_of(segments: Segments, chunk_size: int, mode: str = "compact") -> CallLayout:
    """The one model call that runs the whole tree."""
    tokens, offsets = batch_of(segments)
    capacity = int(offsets[-1])
    extra = {"call_capacity": capacity} if mode == "expanded" else {}
    plan = plan_step(tokens, offsets, capacity=capacity, chunk_size=chunk_size, mode=mode, **extra)
    (call,) = plan.consumer(0, 0).calls
    return call


def trajectories_of(layout: CallLayout) -> list[np.ndarray]:
    """Path rows of each trajectory."""
    rows, bounds = layout.row_of_position_S.numpy(), layout.position_offset_N1.tolist()
    return [rows[a:b] for a, b in itertools.pairwise(bounds)]


def handed_in(chunk_size: int, device: str) -> PackedSequences:
    """Odd lengths, one external state, replay rows, exports at a boundary and after a last token, two rounds."""
    c = chunk_size
    first, second, fourth = c + c // 2 - 3, c // 3, 5
    lengths = [first, 7 + second, 1, fourth]
    packed = [*range(first), *range(c, c + 7), *range(first, first + second + 1 + fourth)]
    kept = [i for i in range(len(packed)) if not first <= i < first + 7]
    return PackedSequences.build(
        chunk_size=c,
        cu_seqlens=np.cumsum([0, *lengths]).tolist(),
        packed_row=packed,
        kept=kept,
        init_state=[0, 1, -1, 1],
        export_sequence=[0, 0, 1],
        export_boundary=[1, 2, 1],
        round_ptr=[0, 1, 4],
        num_external_states=1,
        num_path_rows=len(kept),
        device=device,
    )


def kda_inputs(rows: int, setting: Setting, decay: str, *, seed: int, num_external: int = 0) -> list[Tensor]:
    """The eight differentiable inputs, leaves that require gradients.

    With ``decay`` "extreme" the raw gates are 30 or -30: every row and channel decays by the lower bound or not at all.
    """
    generator = torch.Generator(setting.device).manual_seed(seed)
    H, K, V = setting.num_heads, setting.key_dim, setting.value_dim

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator, device=setting.device).to(dtype)

    x = [normal(rows, H, d, dtype=setting.dtype) for d in (K, K, V, K)] + [normal(rows, H, dtype=setting.dtype)]
    A_log = torch.rand(H, generator=generator, device=setting.device).add(0.3).log()
    if decay == "extreme":
        x[3] = 30 * torch.where(x[3] < 0, -1, 1).to(x[3])
    x += [A_log, normal(H, K) + DECAYS.get(decay, 0.0), normal(num_external, H, K, V) * 0.3]
    return [t.requires_grad_() for t in x]


def sequence_paths(sequences: PackedSequences) -> list[tuple[np.ndarray, int]]:
    """Per sequence: path rows since its zero or external state, and that state's pool row (-1: zero)."""
    packed, cu = sequences.packed_row_P.cpu().numpy(), sequences.cu_seqlens_host
    paths: list[tuple[np.ndarray, int]] = []
    for n, init in enumerate(sequences.init_state_host):
        own = packed[cu[n] : cu[n + 1]]
        if init >= sequences.num_external_states:
            e = init - sequences.num_external_states
            above, init = paths[sequences.export_sequence_host[e]]
            lead = above.size - np.diff(cu)[sequences.export_sequence_host[e]]
            end = lead + sequences.export_boundary_host[e] * sequences.chunk_size
            own = np.concatenate([above[:end], own])
        paths.append((own, init))
    return paths


def fla_expanded(x: list[Tensor], paths: list[tuple[np.ndarray, int]], setting: Setting) -> tuple[Tensor, Tensor]:
    """Outputs (one row after another) and final states of fla's ``chunk_kda`` over whole paths, one packed call."""
    from tests.numerics.fla_pinned import chunk_kda

    q, k, v, f, b, A_log, dt_bias, external = x
    device = q.device
    rows = torch.from_numpy(np.concatenate([p for p, _ in paths])).to(device)
    cu = torch.from_numpy(np.cumsum([0, *(p.size for p, _ in paths)])).to(device)
    zero = external.new_zeros((1, setting.num_heads, setting.key_dim, setting.value_dim))
    init = torch.cat([external, zero])[[i if i >= 0 else external.shape[0] for _, i in paths]]
    o, final = chunk_kda(
        *(t[rows][None] for t in (q, k, v)),
        g=f[rows][None],
        beta=b[rows][None],
        A_log=A_log,
        dt_bias=dt_bias.reshape(-1),
        initial_state=init,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        safe_gate=True,
        lower_bound=setting.lower_bound,
        cu_seqlens=cu,
        chunk_size=setting.chunk_size,
    )
    return o[0], final


def own_expanded(x: list[Tensor], paths: list[tuple[np.ndarray, int]], setting: Setting) -> tuple[Tensor, Tensor]:
    """The same from this project's kernels: every path is a sequence of its own, without gradients."""
    from harts_titan.ops.kda.triton_op import kda_triton

    lengths = [p.size for p, _ in paths]
    rows = torch.from_numpy(np.concatenate([p for p, _ in paths])).to(x[0].device)
    sequences = PackedSequences.build(
        chunk_size=setting.chunk_size,
        cu_seqlens=np.cumsum([0, *lengths]),
        packed_row=np.arange(rows.numel()),
        kept=np.arange(rows.numel()),
        init_state=[init for _, init in paths],
        export_sequence=range(len(paths)),
        export_boundary=[-(-length // setting.chunk_size) for length in lengths],
        round_ptr=[0, len(paths)],
        num_external_states=x[7].shape[0],
        num_path_rows=rows.numel(),
        device=setting.device,
    )
    with torch.no_grad():
        return kda_triton(*(t[rows] for t in x[:5]), *x[5:7], sequences, setting.lower_bound, x[7])


def relative(value: Tensor, exact: Tensor, scale: Tensor | None = None) -> float:
    """L2 error relative to ``scale`` (default ``exact``)."""
    tensors = (value, exact, exact if scale is None else scale)
    value, exact, scale = (t.detach().to(value.device, torch.float64) for t in tensors)
    assert torch.isfinite(value).all(), "non-finite values"
    return float((value - exact).norm() / scale.norm().clamp_min(1e-30))


def _bounded(name: str, kernel: float, same_precision: float, dtype: torch.dtype, factor: float = 2.0) -> None:
    floor = torch.finfo(dtype).eps if factor >= 2 else 0.0
    assert kernel <= factor * same_precision + floor, (
        f"{name}: {kernel:.2e} > {factor} x {same_precision:.2e} + {floor:.1e}"
    )


def check_kda(
    sequences: PackedSequences,
    setting: Setting,
    *,
    decay: str,
    seed: int = 0,
    trajectories: list[np.ndarray] | None = None,
    factor: float = 2.0,
) -> dict[str, object]:
    """Outputs, exports and all gradients against float64, bounded by the error of fla on whole paths.

    Outputs and states also have to equal, bit for bit, a run in which every path is a sequence of its own.

    Args:
        sequences: Packed sequences on the setting's device; states are handed over at chunk boundaries.
        setting: Sizes and dtype.
        decay: Key of ``DECAYS``, or "extreme".
        seed: Of inputs and loss weights.
        trajectories: Path rows of trajectories whose outputs are compared bit for bit with those of a run of their own,
            beside the sequences.
        factor: Bound of the error over fla's.

    Returns:
        Per tensor [kernel's error, fla's error], and which comparisons were bit-equal.
    """
    from harts_titan.ops.kda.triton_op import kda_triton

    x = kda_inputs(sequences.num_path_rows, setting, decay, seed=seed, num_external=sequences.num_external_states)
    o, exported = kda_triton(*x[:7], sequences, setting.lower_bound, x[7])
    generator = torch.Generator().manual_seed(seed + 1)
    # Rounded first: the float64 run must see the same output gradients.
    weights = [torch.randn(t.shape, generator=generator).to(t.dtype).double() for t in (o, exported)]
    weights[1] /= setting.chunk_size

    def with_gradients(o: Tensor, exported: Tensor, inputs: list[Tensor]) -> list[Tensor]:
        loss = sum((t * w.to(t)).sum() for t, w in zip((o, exported), weights))
        grads = torch.autograd.grad(loss, inputs, allow_unused=True)
        return [o, exported, *(torch.zeros_like(t) if g is None else g for g, t in zip(grads, inputs))]

    exact_device = "cpu" if setting.exact_backend == "recurrent" else setting.device
    exact_x = [t.detach().to(exact_device).double().requires_grad_() for t in x]
    exact_out = kda(
        *exact_x[:7],
        sequences.to(exact_device),
        lower_bound=setting.lower_bound,
        external_state_EHKV=exact_x[7] if sequences.num_external_states else None,
        backend=setting.exact_backend,
    )
    exact = with_gradients(*exact_out, exact_x)
    result: dict[str, object] = {}
    same_precision = with_gradients(*_path_rows(sequences, x, setting, fla_expanded), x)
    alone = _path_rows(sequences, x, setting, own_expanded)
    result["bit_equal_outputs"] = torch.equal(o, alone[0])
    result["bit_equal_exports"] = torch.equal(exported, alone[1])
    if trajectories is not None:
        alone, _ = own_expanded(x, [(t, -1) for t in trajectories], setting)
        result["bit_equal_trajectories"] = torch.equal(o[torch.from_numpy(np.concatenate(trajectories))], alone)
    kernel = with_gradients(o, exported, x)
    # Sums over rows that may cancel: their errors are measured against the sums of absolute terms.
    f, A_log, dt_bias, df = exact_x[3], exact_x[5], exact_x[6], exact[5]
    sums = {"A_log": (df * (f + dt_bias)).abs().sum((0, 2)), "dt_bias": df.abs().sum(0)}
    assert sums["A_log"].shape == A_log.shape and sums["dt_bias"].shape == dt_bias.shape
    skipped: tuple[str, ...] = ()
    if decay == "extreme":
        # At a raw gate of 30 the sigmoid's derivative is the rounding error of 1 - sigmoid; at -30 it has all its bits.
        skipped = "A_log", "dt_bias"
        for grads in (kernel, same_precision, exact):
            grads[5] = grads[5] * (x[3] < 0).to(grads[5])
    for name, ours, theirs, truth in zip(("o", "exported", *KDA_INPUTS), kernel, same_precision, exact):
        if truth.numel() and name not in skipped:
            result[name] = [relative(t, truth, sums.get(name, truth)) for t in (ours, theirs)]
    for name, errors in result.items():
        if isinstance(errors, list):
            _bounded(name, *errors, setting.dtype, factor)
    assert all(result[key] for key in result if key.startswith("bit_equal")), result
    return result


def _path_rows(
    sequences: PackedSequences,
    x: list[Tensor],
    setting: Setting,
    run: Callable[[list[Tensor], list[tuple[np.ndarray, int]], Setting], tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    """Own rows' outputs and exported states from ``run`` on whole paths: one per sequence, one more per export."""
    paths, cu = sequence_paths(sequences), np.asarray(sequences.cu_seqlens_host)
    prefixes = []
    for n, boundary in zip(sequences.export_sequence_host, sequences.export_boundary_host):
        lead = paths[n][0].size - (cu[n + 1] - cu[n])
        prefixes.append((paths[n][0][: lead + boundary * sequences.chunk_size], paths[n][1]))
    o, final = run(x, paths + prefixes, setting)
    ends = np.cumsum([path.size for path, _ in paths])
    kept = sequences.kept_T.cpu().numpy()
    n = np.searchsorted(cu, kept, side="right") - 1
    place = torch.from_numpy(ends[n] - (cu[n + 1] - kept)).to(setting.device)
    return o[place], final[len(paths) :]


def check_kda_prefix(setting: Setting, *, length: int, cuts: list[int]) -> dict[str, object]:
    """Rows never depend on later rows, and a continuation from an exported state equals the uninterrupted run."""
    from harts_titan.ops.kda.triton_op import kda_triton

    x = [t.detach() for t in kda_inputs(length, setting, "slow", seed=3)]

    def run(a: int, b: int, state: Tensor | None, boundary: int) -> tuple[Tensor, Tensor]:
        sequences = PackedSequences.build(
            chunk_size=setting.chunk_size,
            cu_seqlens=[0, b - a],
            packed_row=list(range(b - a)),
            kept=list(range(b - a)),
            init_state=[-1 if state is None else 0],
            export_sequence=[0],
            export_boundary=[boundary],
            round_ptr=[0, 1],
            num_external_states=0 if state is None else 1,
            num_path_rows=b - a,
            device=setting.device,
        )
        return kda_triton(*(t[a:b] for t in x[:5]), *x[5:7], sequences, setting.lower_bound, state)

    whole, state = run(0, length, None, 1)
    differing = [m for m in cuts if not torch.equal(run(0, m, None, 0)[0], whole[:m])]
    c = setting.chunk_size
    assert not differing, f"rows depend on later rows when cut at {differing}"
    assert torch.equal(run(c, length, state, 0)[0], whole[c:]), "continuation from an exported state differs"
    rounded = run(c, length, state.to(setting.dtype).float(), 0)[0]
    return {"cuts": len(cuts), "continuation_from_rounded_state_differs": not torch.equal(rounded, whole[c:])}


def check_conv(segments: Segments, setting: Setting, *, channels: int, seed: int = 0) -> dict[str, object]:
    """Outputs and gradients against float64 and plain PyTorch of the same precision; bits per trajectory."""
    from harts_titan.ops.short_conv.taps import chain_tables
    from harts_titan.ops.short_conv.triton_op import tree_short_conv_triton

    layout = layout_of(segments, setting.chunk_size)
    tap = layout.conv_tap_TW.to(setting.device)
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(tap.shape[0], 2 * channels, generator=generator).to(setting.device, setting.dtype)
    weight = (torch.randn(channels, tap.shape[1], generator=generator) / 2).to(setting.device).requires_grad_()
    # A slice, as a fused projection gives.
    x = wide[:, channels:].requires_grad_()
    dy = torch.randn(tap.shape[0], channels, generator=generator).to(setting.device, setting.dtype)
    y = tree_short_conv_triton(x, weight, tap, chain_tables(tap, tap.shape[0]))
    dx, dw = torch.autograd.grad(y, (x, weight), dy)
    dx_again, dw_again = torch.autograd.grad(tree_short_conv_triton(x, weight, tap), (x, weight), dy)
    assert torch.equal(dx, dx_again) and torch.equal(dw, dw_again), "gradients differ between two runs"
    result: dict[str, object] = {}
    plain = tree_short_conv_reference(x, weight, tap)
    plain_grads = torch.autograd.grad(plain, (x, weight), dy)
    x64, w64 = (t.detach().double().requires_grad_() for t in (x, weight))
    exact = tree_short_conv_reference(x64, w64, tap)
    exact_grads = torch.autograd.grad(exact, (x64, w64), dy.double())
    for name, ours, theirs, truth in zip(("y", "dx", "dw"), (y, dx, dw), (plain, *plain_grads), (exact, *exact_grads)):
        result[name] = [relative(ours, truth), relative(theirs, truth)]
        _bounded(name, *result[name], setting.dtype)
    for rows in trajectories_of(layout):
        chain = torch.arange(len(rows), device=setting.device)[:, None] + torch.arange(-3, 1, device=setting.device)
        alone = tree_short_conv_triton(x[torch.from_numpy(rows)], weight, chain.clamp_min(-1))
        assert torch.equal(alone, y[torch.from_numpy(rows)]), "a trajectory alone gives other bits"
    return result


def mask_depth_first(layout: CallLayout, device: str) -> tuple[TreeMask, Tensor]:
    """The mask with rows in depth-first order, and the present row of each of its rows."""
    order = torch.argsort(layout.tin_Y)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(order.numel())
    mask = TreeMask.build(
        tin=layout.tin_Y[order],
        tout=layout.tout_Y[order],
        seg_parent=layout.seg_parent_V,
        seg_start=layout.seg_start_V,
        seg_length=layout.seg_length_V,
        seg_row=rank[layout.seg_row_V],
        device=device,
    )
    return mask, order.to(device)


def mask_attached(layout: CallLayout, device: str) -> TreeMask:
    """The mask of everything below the first root segment, whose rows (the first ones) become external."""
    X = int(layout.seg_length_V[0])
    assert int(layout.seg_row_V[0]) == 0 and int((layout.seg_parent_V < 0).sum()) == 1
    parent = layout.seg_parent_V[1:]
    return TreeMask.build(
        tin=layout.tin_Y,
        tout=layout.tout_Y,
        seg_parent=parent - 1,
        seg_start=layout.seg_start_V[1:],
        seg_length=layout.seg_length_V[1:],
        seg_row=layout.seg_row_V[1:] - X,
        seg_attach=torch.where(parent == 0, X - 1, -1),
        num_external_rows=X,
        device=device,
    )


def attention_inputs(mask: TreeMask, setting: Setting, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator(setting.device).manual_seed(seed)
    sizes = ((mask.num_rows, setting.key_dim), (mask.num_path_rows, setting.key_dim))
    shapes = [(n, setting.num_heads, d) for n, d in (*sizes, (mask.num_path_rows, setting.value_dim))]
    tensors = (torch.randn(shape, generator=generator, device=setting.device) for shape in shapes)
    return [t.to(setting.dtype).requires_grad_() for t in tensors]


def check_attention(mask: TreeMask, setting: Setting, attention, *, gradients: bool = True) -> dict[str, object]:
    """``attention(q, k, v, mask, scale)`` and its gradients against float64 and dense PyTorch of the same precision."""
    scale = setting.key_dim**-0.5
    x = attention_inputs(mask, setting)
    generator = torch.Generator().manual_seed(1)
    do = torch.randn((mask.num_rows, setting.num_heads, setting.value_dim), generator=generator).to(setting.dtype)

    def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        number = mask.tin_Y[mask.num_external_rows :, None]
        visible = (mask.tin_Y <= number) & (number < mask.tout_Y)
        scores = torch.einsum("qhk,yhk->hqy", q, k).float() * scale
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        return torch.einsum("hqy,yhv->qhv", weights.to(v.dtype), v)

    def with_gradients(o: Tensor, inputs: list[Tensor]) -> list[Tensor]:
        if not gradients:
            return [o]
        return [o, *torch.autograd.grad(o, inputs, do.to(o))]

    exact_x = [t.detach().double().requires_grad_() for t in x]
    exact = with_gradients(tree_attention_dense(*exact_x, mask, scale), exact_x)
    same_precision = with_gradients(dense(*x), x)
    if gradients:
        kernel = with_gradients(attention(*x, mask, scale), x)
    else:
        kernel = [attention(*(t.detach() for t in x), mask, scale)]
    result: dict[str, object] = {}
    for name, ours, theirs, truth in zip(("o", "dq", "dk", "dv"), kernel, same_precision, exact):
        result[name] = [relative(ours, truth), relative(theirs, truth)]
        _bounded(name, *result[name], setting.dtype)
    return result
