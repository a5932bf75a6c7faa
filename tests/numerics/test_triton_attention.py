"""The attention kernels on the CPU: ``attention_interpreted`` in one process with TRITON_INTERPRET=1."""

import pytest

from tests.numerics.interpreted_run import run_interpreted

pytest.importorskip("triton", reason="needs triton (pip install triton)")
pytest.importorskip("fla", reason="needs fla-core==0.6.0 (pip install 'harts_titan[dev]')")

CASES = {
    "trees",
    "forks_at_every_offset",
    "other_orders",
    "nothing_to_do",
    "views_in_place",
    "compiled",
    "unseen_rows_stay_unseen",
    "refuses",
}


def test_interpreted(tmp_path):
    """One test and one process: a start for every case would cost more than the cases."""
    assert run_interpreted("attention_interpreted", tmp_path / "report.json") == CASES
