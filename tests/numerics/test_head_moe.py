"""The head's and the experts' kernels: in Triton's interpreter here, and on a CUDA device where there is one."""

import pytest
import torch

from tests.numerics.interpreted_run import run_interpreted

pytest.importorskip("triton", reason="needs triton (pip install triton)")

CASES = (
    "head_values_and_gradients",
    "head_logits",
    "head_large_logits",
    "head_blocks_and_rows",
    "head_nothing",
    "head_shards",
    "moe_choice",
    "moe_routes",
    "moe_rows",
    "moe_experts",
    "moe_router",
    "compiled",
    "ops_are_well_formed",
)


def test_interpreted(tmp_path):
    """One process for all cases: triton reads TRITON_INTERPRET when it is imported."""
    pytest.importorskip("fla", reason="the interpreter's work-arounds need fla-core==0.6.0")
    assert run_interpreted("head_moe_checks", tmp_path / "report.json") == set(CASES)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("case", CASES)
def test_on_the_device(case, dtype):
    from tests.numerics import head_moe_checks as checks

    getattr(checks, case)(checks.Setting("cuda", dtype))
