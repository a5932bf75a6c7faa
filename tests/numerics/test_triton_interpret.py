"""The Triton kernels on the CPU: ``interpreted_cases`` in one process with TRITON_INTERPRET=1."""

import pytest

from tests.numerics.interpreted_run import run_interpreted

pytest.importorskip("triton", reason="needs triton (pip install triton)")
pytest.importorskip("fla", reason="needs fla-core==0.6.0 (pip install 'harts_titan[dev]')")

CASES = (
    "kda_tree_equals_fla",
    "kda_handed_in_state",
    "kda_prefix_and_continuation",
    "kda_extreme_gates",
    "kda_separate_calls",
    "kda_nothing_to_do",
    "kda_refuses",
    "conv_tree",
    "conv_external_rows",
    "tables_are_built_once",
    "compiled_without_breaks",
    "ops_are_well_formed",
    "backend_is_reachable",
)


def test_interpreted(tmp_path):
    """One test and one process: a start for every case, or on every worker, would cost more than the cases."""
    assert run_interpreted("interpreted_cases", tmp_path / "report.json") == set(CASES)
