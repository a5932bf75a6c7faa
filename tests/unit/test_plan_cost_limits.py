"""Cost coefficients that cannot be compared, or whose sums do not fit into int64, are refused by name."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from harts_titan.tree import PlanCost, plan_step


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"forward_row": True}, "PlanCost.forward_row is True"),
        ({"backward_pair": 2**49}, f"PlanCost.backward_pair is {2**49}; must be at most"),
        ({"shared_row_bytes": 2**41}, f"PlanCost.shared_row_bytes is {2**41}; must be at most"),
        ({"source": None}, "PlanCost.source is None"),
        ({"forward_row": 0, "backward_row": 0}, "neither rows nor pairs cost"),
    ],
)
def test_coefficients_are_refused_with_their_file(tmp_path, change, message):
    path = tmp_path / "cost.json"
    content = PlanCost().document()
    path.write_text(json.dumps(content | {"cost": content["cost"] | change}))
    with pytest.raises(ValueError, match=f"cost file .*cost.json': .*{re.escape(message)}"):
        PlanCost.load(path)


@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize("coefficient", ["forward_row", "forward_pair", "backward_pair", "head_backward_row"])
def test_costs_that_overflow_are_refused(windows, coefficient):
    tokens, offsets = np.arange(60_000, dtype=np.int32), np.array([0, 30_000, 60_000])
    cost = PlanCost(**{coefficient: 2**48})
    with pytest.raises(ValueError, match=r"step costs .* from 'rows', more than int64 holds"):
        plan_step(tokens, offsets, capacity=30_000, chunk_size=64, windows=windows, cost=cost, replicas=())
