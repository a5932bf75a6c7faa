"""Kernels by kind, and what a trace says of busy and idle time."""

import pytest

from harts_titan.cli.bench_breakdown import KINDS, Kernel, kind_of, own_kernels, read_trace, summarise


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopA_NNT", "gemm"),
        ("void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<GroupProblemShape>>", "grouped_gemm"),
        ("kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90_object", "attention"),
        ("kernel_cutlass_kernel_flash_attncuteflash_bwd_postprocessFlashAttentionBackwardPostprocess", "attention"),
        ("chunk_kda_bwd_kernel_intra", "kda"),
        ("recompute_w_u_fwd_kda_kernel", "kda"),
        ("l2norm_fwd_kernel", "kda"),
        ("fused_beta_sigmoid_bwd_kernel", "kda"),
        ("void at::native::multi_tensor_apply_kernel<LpNormFunctor>", "optimizer"),
        ("void at::native::vectorized_elementwise_kernel<4, silu>", "elementwise"),
        ("triton_poi_fused_add_mul_0", "elementwise"),
        ("void at::native::radixSortKVInPlace", "moe"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("Memset (Device)", "copies"),
        ("aten::mm", "gemm"),
        ("something_else", "other"),
    ],
)
def test_kinds(name, kind):
    assert kind_of(name) == kind


def test_own_kernels_are_known_by_their_op():
    found = own_kernels()
    assert found["conv_forward"] == "short_conv" and found["state_scan_forward"] == "kda"
    assert set(found.values()) <= set(KINDS) and len(found) > 8
    assert all(kind_of(name) == kind for name, kind in found.items())


def test_busy_idle_and_ranges():
    kernels = [
        Kernel("aten::mm", 10.0, 30.0),
        Kernel("Memcpy DtoD", 20.0, 10.0),  # beside the product, on another stream
        Kernel("aten::mm", 60.0, 40.0),
    ]
    ranges = [Kernel("harts::layer0", 0.0, 30.0), Kernel("harts::layer1", 50.0, 100.0)]
    found = summarise(reversed(kernels), ranges)
    assert (found["busy_ms"], found["span_ms"], found["idle_ms"]) == (0.07, 0.09, pytest.approx(0.02))
    assert list(found["kinds"]) == ["gemm", "copies"]
    assert found["kinds"]["gemm"] == {"ms": 0.07, "share": pytest.approx(1.0), "calls": 2}
    assert found["ranges"]["harts::layer"] == {"ms": 0.08, "share": pytest.approx(80 / 70), "calls": 3}
    assert found["top"][0]["name"] == "aten::mm" and found["kernels"] == 3
    empty = summarise([])
    assert (empty["busy_ms"], empty["idle_ms"], empty["kinds"]) == (0.0, 0.0, {})


def test_traces():
    event = {"ph": "X", "ts": 5, "dur": 2}
    events = [
        event | {"cat": "kernel", "name": "a"},
        event | {"cat": "gpu_memcpy", "name": "b"},
        event | {"cat": "gpu_user_annotation", "name": "harts::forward"},
        event | {"cat": "gpu_user_annotation", "name": "Optimizer.step"},
        event | {"cat": "cpu_op", "name": "aten::mm"},
        {"ph": "M", "name": "process_name"},
    ]
    kernels, ranges = read_trace(events)
    assert [k.name for k in kernels] == ["a", "b"] and [r.name for r in ranges] == ["harts::forward"]
