"""Small calls of every op with own kernels, forward and backward, for ``gpu_sanitize.py``.

Sizes are odd: rows, channels and words that fill no tile. Inputs come from the builders of ``tests/numerics``.
Nothing is compared here; the numerics are checked elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable

from gpu_timing import DEVICE, DRY  # isort: skip

if DRY:
    import tests.numerics.triton_interpreter  # noqa: F401
import numpy as np
import torch
from torch import Tensor

from harts_titan.models.common.tree_inputs import packed_sequences, tree_mask
from harts_titan.ops import activation, moe, norm, rope
from harts_titan.ops.attention.triton_op import tree_attention_triton
from harts_titan.ops.kda import PackedSequences
from harts_titan.ops.kda.triton_op import kda_triton
from harts_titan.ops.logprob import VocabularyShard, linear_logprobs, recover_logprobs
from harts_titan.ops.norm.triton_op import BACKWARD, launch_backward
from harts_titan.ops.short_conv.taps import chain_tables
from harts_titan.ops.short_conv.triton_op import tree_short_conv_triton
from tests.numerics import kda_checks
from tests.numerics import kernel_checks as checks
from tests.numerics.elementwise_checks import EPS, TREES, parents, taps_of
from tests.numerics.head_moe_checks import Setting as Rows
from tests.numerics.head_moe_checks import head_problem, random_topk

# The interpreter computes bfloat16 on raw integers.
DTYPE = torch.float32 if DRY else torch.bfloat16
ROWS = Rows(DEVICE, DTYPE)
# Forks inside a chunk, on its boundary and three deep, segments of one token; two rounds, states that several continue.
WIDE_CHUNK = 32 if DRY else 64
_LENGTHS = (38, 15, 1, 26, 5, 10, 3, 1, 40, 1) if DRY else (70, 15, 1, 58, 5, 10, 3, 1, 70, 1)
TREE = list(zip((-1, 0, 0, 0, 3, 3, 1, 1, 1, 8), _LENGTHS, strict=True))


def backward(outputs: object, inputs: list[Tensor]) -> None:
    """Differentiate the sum of squares of all outputs."""
    tensors = [outputs] if isinstance(outputs, Tensor) else [t for t in outputs if t.is_floating_point()]
    loss = sum(t.float().square().sum() for t in tensors)
    torch.autograd.grad(loss, [t for t in inputs if t.requires_grad], allow_unused=True)


def leaf(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype).requires_grad_()


HEADS, WIDTH = (1, 32) if DRY else (2, 128)
KDA_WIDE = checks.Setting(DEVICE, DTYPE, num_heads=HEADS, key_dim=WIDTH, value_dim=WIDTH, chunk_size=WIDE_CHUNK)
KDA_NARROW = checks.Setting(DEVICE, DTYPE, num_heads=HEADS + 1, key_dim=WIDTH // 2, value_dim=32, chunk_size=32)
KDA_HALF = checks.Setting(DEVICE, torch.float16, num_heads=1, key_dim=32, value_dim=64, chunk_size=32)


def kda(setting: checks.Setting, sequences: PackedSequences) -> None:
    external = sequences.num_external_states
    x = checks.kda_inputs(sequences.num_path_rows, setting, "medium", seed=0, num_external=external)
    backward(kda_triton(*x[:7], sequences, setting.lower_bound, x[7]), x)


def kda_tree() -> None:
    """Two rounds, replay rows, states that several sequences start from."""
    kda(KDA_WIDE, packed_sequences(checks.layout_of(TREE, WIDE_CHUNK), DEVICE))


def kda_external() -> None:
    """A given state, exports at a boundary and after a last token."""
    kda(KDA_WIDE, checks.handed_in(WIDE_CHUNK, DEVICE))


def kda_narrow() -> None:
    """Chunks of 32 rows; sequences of one token, and of one chunk and one more."""
    kda(KDA_NARROW, checks.handed_in(32, DEVICE))
    kda(KDA_NARROW, kda_checks.sequences_of([1, 1, 33, 1, 32, 1], KDA_NARROW))


def kda_half() -> None:
    """float16, whose products in a chunk are wider."""
    kda(KDA_HALF, checks.handed_in(32, DEVICE))


def short_conv() -> None:
    """Chains, trees and one-token segments, sorted copies, external rows, one to four taps, with and without tables."""
    rows, channels = (35, 20) if DRY else (333, 520)
    weight = leaf(channels, 4, dtype=torch.float32)
    for kind in TREES[::3] if DRY else TREES:
        tap = torch.from_numpy(taps_of(parents(kind, rows))).to(DEVICE)
        wide = leaf(rows, 2 * channels)
        backward(tree_short_conv_triton(wide[:, channels:], weight, tap, chain_tables(tap, rows)), [wide, weight])
    copies = np.sort(np.random.default_rng(1).integers(0, rows, rows + rows // 4))
    table = tap[torch.from_numpy(copies).to(DEVICE)]
    backward(tree_short_conv_triton(wide[:, :channels], weight, table), [wide, weight])
    x = leaf(8, 5)
    outer = torch.tensor([[-1, -1, 0, 3], [-1, 0, 3, 4], [0, 1, 2, 5]], device=DEVICE)
    for taps in (1, 2, 3, 4):
        few = leaf(5, taps, dtype=torch.float32)
        backward(tree_short_conv_triton(x, few, outer[:, 4 - taps :]), [x, few])


def norms() -> None:
    """Wide and narrow rows with a stride, and the gated norm."""
    for rows, width in ((67, 1536), (131, 256), (37, 24)):
        x, weight = leaf(rows, width + 12), leaf(width, dtype=torch.float32)
        backward(norm.rms_norm(x[:, 4 : 4 + width], weight, EPS, backend="triton"), [x, weight])
    for rows, heads, width in ((41, 3, 128), (1, 1, 20)):
        x, gate, weight = leaf(rows, heads, width), leaf(rows, heads, width), leaf(width, dtype=torch.float32)
        backward(norm.gated_rms_norm(x, gate, weight, EPS, backend="triton"), [x, gate, weight])
    if DRY:
        # The interpreter has no dependent launches.
        return
    # Alternatives that benchmarks/gpu_elementwise.py measures; devices before the H100 have no dependent launches.
    x, weight = leaf(67, 1536).detach(), leaf(1536, dtype=torch.float32).detach()
    for config in ({"EARLY": 0}, {"EARLY": 1}):
        launch_backward(x, None, weight, x, torch.empty_like(x), None, EPS, {**BACKWARD, **config})


def activations() -> None:
    """SwiGLU with and without clamp, and the head-wise gate."""
    wide = leaf(9, 2 * 530)
    for limit in (0.0, 0.75):
        backward(activation.swiglu(wide[:, :530], wide[:, 530:], limit, backend="triton"), [wide])
    for rows, heads, width in ((41, 3, 128), (1, 1, 20)):
        o, gate = leaf(rows, heads, width), leaf(rows, heads)
        backward(activation.head_gate(o, gate, backend="triton"), [o, gate])


def rotary() -> None:
    """Queries, keys and values, and their inverses; head widths of the model and odd ones."""
    for rows, heads, nope, width, value in ((37, 3, 128, 64, 128), (5, 2, 20, 12, 10)):
        angle = torch.rand(rows, width // 2, device=DEVICE)
        q, latent, kv = leaf(rows, heads, nope + width), leaf(rows, width + 4), leaf(rows, heads, nope + value)
        backward(rope.rope_queries(q, angle.cos(), angle.sin(), backend="triton"), [q])
        keys = (kv, latent[:, 4:], angle.cos(), angle.sin())
        backward(rope.rope_keys_values(*keys, nope_dim=nope, backend="triton"), [kv, latent])


def router() -> None:
    """Router product, choice with and without a given one, routes."""
    x, gate = leaf(13, 24, dtype=torch.bfloat16), leaf(8, 24, dtype=torch.bfloat16)
    backward(moe.router_logits(x, gate, backend="triton"), [x, gate])
    for rows, count, groups, top_groups, top_k in ((13, 32 if DRY else 128, 8, 4, 8), (67, 16, 1, 1, 3)):
        shape = {"num_groups": groups, "top_groups": top_groups, "top_k": top_k, "route_scale": 2.5}
        logits, bias = leaf(rows, count, dtype=torch.float32), torch.zeros(count, device=DEVICE)
        topk, weight = moe.choose_experts(logits, bias, backend="triton", **shape)
        backward(weight, [logits])
        backward(moe.choose_experts(logits, bias, topk, backend="triton", **shape)[1], [logits])
        moe.build_routes(topk, count, backend="triton")


def expert_rows() -> None:
    """Rows out to the experts and back."""
    for rows, width, top_k in ((3 if DRY else 41, 600, 8), (11, 40, 3), (1, 7, 1)):
        routes = moe.build_routes(random_topk(ROWS, rows, top_k), ROWS.experts, backend="triton")
        x, base, y = leaf(rows, width), leaf(rows, width), leaf(rows * top_k, width)
        weight = leaf(rows, top_k, dtype=torch.float32)
        backward(moe.dispatch(x, routes, backend="triton"), [x])
        for given in (base, None):
            inputs = [y, weight] if given is None else [y, weight, given]
            backward(moe.combine(y, weight, routes, given, backend="triton"), inputs)


def experts() -> None:
    """SwiGLU of the experts with and without clamp."""
    routes = moe.build_routes(random_topk(ROWS, 9, 3), ROWS.experts, backend="triton")
    weights = tuple(leaf(ROWS.experts, *shape) for shape in ((16, 40), (40, 16), (16, 40)))
    rows_in = leaf(27, 40)
    for limit in (0.0, 0.3):
        out = moe.expert_mlp(rows_in, weights, routes.counts_E, limit=limit, backend="triton")
        assert out is not None
        backward(out, [rows_in, *weights])


def head() -> None:
    """Log-probs and entropies in narrow and wide blocks, of given logits with a stride, and of a part of the words."""
    hidden, weight, row, label = head_problem(ROWS)
    inputs = [hidden.requires_grad_(), weight.requires_grad_()]
    for width in (1, 2048):
        backward(linear_logprobs(*inputs, row, label, rows_per_chunk=width, backend="triton"), inputs)
    backward(linear_logprobs(*inputs, row, label, backend="triton")[1], inputs)
    logits = leaf(9, ROWS.wide_words + 3)
    backward(recover_logprobs(logits[:, 3:], row, label, backend="triton"), [logits])
    shard = VocabularyShard(1027, lambda t: t, lambda t: t)
    part = weight.detach()[1027:].clone().requires_grad_()
    backward(
        linear_logprobs(inputs[0], part, row, label, rows_per_chunk=1, shard=shard, backend="triton"), [inputs[0], part]
    )


def attention() -> None:
    """Index lists: rows as planned, depth first, and below external rows; key widths of one and of two parts."""
    heads, width, dtype = (1, 48, torch.float16) if DRY else (2, 192, DTYPE)
    latent = checks.Setting(DEVICE, dtype, num_heads=heads, key_dim=width, value_dim=32 if DRY else 128)
    plain = checks.Setting(DEVICE, torch.float32, num_heads=1, key_dim=16, value_dim=32)
    layout = checks.layout_of(TREE, WIDE_CHUNK)
    planned, attached = tree_mask(layout, DEVICE), checks.mask_attached(layout, DEVICE)
    cases = [(planned, latent), (attached, plain)]
    if not DRY:
        cases += [(mask, latent) for mask in (checks.mask_depth_first(layout, DEVICE)[0], attached)]
    for mask, setting in cases:
        x = checks.attention_inputs(mask, setting)
        backward(tree_attention_triton(*x, mask, setting.key_dim**-0.5), x)


CASES: dict[str, Callable[[], None]] = {
    "kda_tree": kda_tree,
    "kda_narrow": kda_narrow,
    "kda_half": kda_half,
    "kda_external": kda_external,
    "attention": attention,
    "short_conv": short_conv,
    "router": router,
    "expert_rows": expert_rows,
    "experts": experts,
    "head": head,
    "norms": norms,
    "rotary": rotary,
    "activations": activations,
}
