"""KDA's kernels on a GPU in bfloat16: bounds of sizes, lengths and decays, and repeatability."""

import numpy as np
import pytest
import torch

from harts_titan.models.common.tree_inputs import packed_sequences
from tests.numerics import kernel_checks as checks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SETTING = checks.Setting(
    "cuda", torch.bfloat16, num_heads=4, key_dim=128, value_dim=128, chunk_size=64, exact_backend="reference"
)


@pytest.fixture
def kda_checks():
    pytest.importorskip("triton", reason="needs triton (pip install triton)")
    from tests.numerics import kda_checks

    return kda_checks


def test_thousands_of_one_token_sequences(kda_checks):
    kda_checks.check_one_token_sequences(5000, SETTING)


@pytest.mark.parametrize("decay", ["slow", "strong"])
def test_every_length(kda_checks, decay):
    pytest.importorskip("fla", reason="needs fla-core==0.6.0 (pip install 'harts_titan[dev]')")
    sequences = kda_checks.sequences_of(list(range(1, 131)), SETTING)
    with checks.filled_allocations():
        checks.check_kda(sequences, SETTING, decay=decay)


@pytest.mark.parametrize("chunk_size", [32, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_extreme_gates(kda_checks, dtype, chunk_size):
    pytest.importorskip("fla", reason="needs fla-core==0.6.0 (pip install 'harts_titan[dev]')")
    kda_checks.check_extreme_gates(checks.Setting("cuda", dtype, value_dim=128, chunk_size=chunk_size))


@pytest.mark.parametrize("chunk_size", [32, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_constant_gates(kda_checks, dtype, chunk_size):
    kda_checks.check_constant_gates(checks.Setting("cuda", dtype, value_dim=128, chunk_size=chunk_size))


def test_offsets_past_two_to_the_31(kda_checks):
    setting = checks.Setting("cuda", torch.bfloat16, num_heads=16, key_dim=128, value_dim=128)
    if torch.cuda.mem_get_info()[0] < 130 << 30:
        pytest.skip("needs 130 GiB of free device memory")
    kda_checks.check_tail(2**31 // (16 * 128) + 327, 300, setting)


@pytest.mark.parametrize("decay", checks.DECAYS)
def test_repeats_bit_for_bit(kda_checks, decay):
    layout = checks.layout_of(checks.random_segments(np.random.default_rng(3), 64, 20), 64)
    kda_checks.check_repeat(packed_sequences(layout, "cuda"), SETTING, decay)


@pytest.mark.parametrize("mode", ["nodewise", "depthwise", "compact"])
@pytest.mark.parametrize("decay", ["slow", "strong"])
def test_a_call_of_its_own_for_every_round_gives_the_same_bits(kda_checks, mode, decay):
    layout = checks.layout_of(checks.random_segments(np.random.default_rng(4), 64, 160), 64, mode)
    assert layout.num_rounds > (100 if mode == "nodewise" else 1)
    kda_checks.check_separate_calls(layout, SETTING, decay)
    if mode != "compact":
        kda_checks.check_launch_order(layout, SETTING)
