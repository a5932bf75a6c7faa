"""The CUDA backends on a GPU in bfloat16; the same checks as ``benchmarks/gpu_ops.py``, without timings."""

import numpy as np
import pytest
import torch

from harts_titan.models.common.tree_inputs import packed_sequences, tree_mask
from harts_titan.ops.attention import tree_attention
from tests.numerics import kernel_checks as checks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SETTING = checks.Setting(
    "cuda", torch.bfloat16, num_heads=4, key_dim=128, value_dim=128, chunk_size=64, exact_backend="reference"
)
ATTENTION = checks.Setting("cuda", torch.bfloat16, num_heads=4, key_dim=192, value_dim=128)


@pytest.fixture(autouse=True)
def _needs_fla():
    pytest.importorskip("fla", reason="needs fla-core==0.6.0 (pip install 'harts_titan[dev]')")


@pytest.mark.parametrize("decay", checks.DECAYS)
def test_kda_on_a_tree_equals_fla_per_trajectory(decay):
    layout = checks.layout_of(checks.random_segments(np.random.default_rng(7), 64, 9), 64)
    sequences = packed_sequences(layout, "cuda")
    checks.check_kda(sequences, SETTING, decay=decay, trajectories=checks.trajectories_of(layout))


@pytest.mark.parametrize("decay", checks.DECAYS)
@pytest.mark.parametrize("chunk_size", [32, 64])
def test_kda_from_an_external_state(decay, chunk_size):
    setting = checks.Setting(
        "cuda", torch.bfloat16, num_heads=3, key_dim=64, value_dim=128, chunk_size=chunk_size, exact_backend="reference"
    )
    with checks.filled_allocations():
        checks.check_kda(checks.handed_in(chunk_size, "cuda"), setting, decay=decay)


def test_kda_rows_never_depend_on_later_rows():
    result = checks.check_kda_prefix(SETTING, length=197, cuts=list(range(1, 130, 7)))
    assert result["continuation_from_rounded_state_differs"]


@pytest.mark.parametrize("seed", range(3))
def test_short_conv(seed):
    with checks.filled_allocations():
        checks.check_conv(checks.random_segments(np.random.default_rng(seed), 64, 12), SETTING, channels=520)


@pytest.mark.parametrize("order", ["sequence", "depth_first", "attached"])
@pytest.mark.parametrize("backend", ["fa4", "triton", "flex", "path"])
def test_attention(backend, order):
    if backend == "fa4":
        pytest.importorskip("flash_attn.cute", reason="needs flash-attn-4 (pip install 'harts_titan[gpu]')")
        if torch.cuda.get_device_capability()[0] < 9:
            pytest.skip("needs a device of compute capability 9 or newer")
    layout = checks.layout_of(checks.random_segments(np.random.default_rng(4), 64, 14), 64)
    mask = {
        "sequence": lambda: tree_mask(layout, "cuda"),
        "depth_first": lambda: checks.mask_depth_first(layout, "cuda")[0],
        "attached": lambda: checks.mask_attached(layout, "cuda"),
    }[order]()

    def attention(q, k, v, mask, scale):
        return tree_attention(q, k, v, mask, scale=scale, backend=backend)

    checks.check_attention(mask, ATTENTION, attention)
