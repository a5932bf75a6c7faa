import logging

import pytest
import torch

from harts_titan.ops import backend
from harts_titan.ops.backend import OpsBackends, backend_names, choose


def on_cpu(op, forced="auto", dtype=torch.float32):
    return choose(op, forced, device="cpu", dtype=dtype)


def test_automatic_choice_on_the_cpu():
    assert [on_cpu(op) for op in ("kda", "short_conv", "attention", "grouped_mm")] == [
        "reference",
        "reference",
        "path",
        "grouped_mm",
    ]
    assert on_cpu("grouped_mm", dtype=torch.float64) == "loop"


def test_automatic_choice_on_cuda_prefers_kernels_and_warns_about_slow_fallbacks(monkeypatch, caplog):
    def reason(op, name, *, device, dtype):
        return "not installed" if name in missing else None

    monkeypatch.setattr(backend, "unavailable_reason", reason)
    backend._logged.clear()
    missing = ()
    cuda = {"device": "cuda", "dtype": torch.bfloat16}
    assert [choose(op, **cuda) for op in ("kda", "short_conv", "attention", "grouped_mm")] == [
        "triton",
        "triton",
        "fa4",
        "grouped_mm",
    ]
    missing = ("fa4",)
    assert choose("attention", **cuda) == "flex"
    missing = ("triton",)
    with caplog.at_level(logging.WARNING):
        assert choose("kda", **cuda) == choose("kda", **cuda) == "reference"
    assert [r.getMessage() for r in caplog.records] == [
        "kda runs its plain PyTorch backend 'reference' on CUDA, far slower than the kernels: triton: not installed"
    ]


def test_a_forced_backend_that_cannot_run_is_an_error(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match=r"'triton' of kda cannot run: it needs CUDA.*'reference'"):
        on_cpu("kda", "triton")
    with pytest.raises(ValueError, match="fa4"):
        on_cpu("attention", "fa4", torch.bfloat16)
    with pytest.raises(ValueError, match="float64"):
        on_cpu("attention", "flex", torch.float64)
    monkeypatch.setattr(backend, "_has_package", lambda name: False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ValueError, match=r"'triton' is not installed \(pip install"):
        on_cpu("kda", "triton")


def test_unknown_names_are_refused():
    for call in (lambda: on_cpu("kda", "cuda"), lambda: on_cpu("matmul"), lambda: OpsBackends(attention="fa3")):
        with pytest.raises(ValueError, match=r"fa4|triton|attention"):
            call()
    assert OpsBackends(attention="path").attention == "path"
    assert backend_names("kda") == ("triton", "reference", "fla", "recurrent")
