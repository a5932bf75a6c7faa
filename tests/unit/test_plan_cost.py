"""Plan cost of a model: counted operations, published interface sizes, registry and files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flop_cases import counted, tile_pairs, unseen
from ling_cases import CHUNK, calls_of, small_args

from harts_titan.job_config import load_config
from harts_titan.models import train_specs
from harts_titan.models.ling import FLAVOURS, active_parameter_count
from harts_titan.models.ling.cost import kda_core_operations, ling_plan_cost, row_operations
from harts_titan.models.ling.flops import work_of_calls
from harts_titan.models.train_specs import plan_cost
from harts_titan.ops.kda.reference import GROUP_ROWS
from harts_titan.tree.cost import PlanCost

CONFIG = str(Path(__file__).resolve().parents[2] / "train_configs" / "ling_debug.toml")
ROWS = 2 * GROUP_ROWS


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("changes", [{}, {"q_lora_rank": 0, "n_dense_layers": 4}, {"n_layers": 6}])
def test_operations_are_those_torch_counts(changes, recompute):
    """Equal as integers, after the hand count of what the counter cannot see and of what the CPU path does twice."""
    args = small_args(**changes)
    cost = ling_plan_cost(args, chunk_size=CHUNK, recompute=recompute, element_bytes=8)
    tokens = np.random.default_rng(0).integers(0, args.vocab_size, ROWS).astype(np.int32)
    calls = calls_of(tokens, np.array([0, ROWS]), "compact")
    pairs = tile_pairs(calls)
    forward, backward = counted(args, calls, recompute=recompute)
    added = unseen(args, work_of_calls(calls), recompute=recompute)
    assert forward + added[0] == (cost.forward_row + cost.head_forward_row) * ROWS + cost.forward_pair * pairs
    assert backward + added[1] == (cost.backward_row + cost.head_backward_row) * ROWS + cost.backward_pair * pairs


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_products_are_those_of_the_active_parameters(flavour):
    """Every active matrix multiplies each row once; what is left are norms, expert biases and decay parameters."""
    args = FLAVOURS[flavour]
    one = row_operations(args, chunk_size=64)
    vectors = active_parameter_count(args)[1] - (one.products + one.convolution + one.head) // 2
    expected = args.dim
    for layer in range(args.n_layers):
        kda = args.n_heads + args.n_heads * args.kda_head_dim + args.kda_head_dim
        mixer = args.q_lora_rank + args.kv_lora_rank if args.is_mla(layer) else kda
        expected += 2 * args.dim + mixer + args.is_moe(layer) * args.num_experts
    assert vectors == expected


def test_the_chunk_kernel_by_hand():
    # P, A, [W | U] (two products), P R at 64 rows; W S, (q~ exp G) S, update of S'.
    assert kda_core_operations(128, 64) == 2 * (5 * 64 * 128 + 3 * 128 * 128)


def test_published_interface_sizes():
    """18.9 and 73.4 MB a boundary state; keys and values 61.4 and 143.4 KB, router logits 11.8 and 81.9 KB a row."""
    tiny, flash = (plan_cost("ling", name) for name in ("tiny", "flash"))
    assert (tiny.handed_state_bytes, flash.handed_state_bytes) == (18_874_368, 73_400_320)
    choices = {"tiny": 23 * 8 * 8, "flash": 40 * 8 * 8}
    assert tiny.shared_row_bytes == 61_440 + 11_776 + choices["tiny"] + 2 * 1536
    assert flash.shared_row_bytes == 143_360 + 81_920 + choices["flash"] + 2 * 2560
    assert plan_cost("ling", "tiny", element_bytes=4).shared_row_bytes - tiny.shared_row_bytes == 61_440 + 2 * 1536


def test_attention_of_one_pair():
    tiny = plan_cost("ling", "tiny", recompute=False)
    layers_heads = 6 * 16
    assert tiny.forward_pair == layers_heads * 2 * (192 + 128)
    assert tiny.backward_pair == layers_heads * 2 * (3 * 192 + 2 * 128)
    again = plan_cost("ling", "tiny")
    assert again.backward_pair - tiny.backward_pair == tiny.forward_pair
    assert again.backward_row - tiny.backward_row == tiny.forward_row
    # About a fifth of the forward pass (HARTS A.2 leaves the head out).
    assert 0.19 < tiny.head_forward_row / (tiny.forward_row + tiny.head_forward_row) < 0.22
    assert again.head_backward_row == tiny.head_backward_row == 3 * tiny.head_forward_row


def test_options():
    assert [plan_cost("ling", "tiny", tensor_parallel_degree=t).row_alignment for t in (1, 2, 8)] == [8, 16, 64]
    small, large = (plan_cost("ling", "tiny", chunk_size=size) for size in (16, 64))
    assert small.forward_row < large.forward_row and small.forward_pair == large.forward_pair
    assert all(isinstance(getattr(small, name), int) for name in vars(small) if name != "source")
    assert "ling tiny" in small.source and "16" in small.source and "with recomputation" in small.source
    with pytest.raises(ValueError, match=r"tensor_parallel_degree \(0\)"):
        plan_cost("ling", "tiny", tensor_parallel_degree=0)
    with pytest.raises(ValueError, match=r"model.flavor = 'huge' is unknown"):
        plan_cost("ling", "huge")


def test_another_family_registers_its_own(monkeypatch):
    monkeypatch.setattr(train_specs, "_PLAN_COSTS", dict(train_specs._PLAN_COSTS))
    monkeypatch.setattr(train_specs, "args_of_flavor", lambda name, flavor: {"dim": 3})
    with pytest.raises(ValueError, match=r"'mine' has not said what its rows cost .* \['ling'"):
        plan_cost("mine", "only")
    seen = {}

    def formula(args, **options):
        seen.update(options, args=args)
        return PlanCost(forward_row=args["dim"])

    train_specs.register_plan_cost("mine", formula)
    assert plan_cost("mine", "only", tensor_parallel_degree=2, recompute=False) == PlanCost(
        forward_row=3, row_alignment=16, source="mine only: operations at chunk size 64, no recomputation"
    )
    assert seen == {"args": {"dim": 3}, "chunk_size": 64, "recompute": False, "element_bytes": 2}
    with pytest.raises(ValueError, match="'mine' is already registered"):
        train_specs.register_plan_cost("mine", formula)


def test_a_job_of_a_model_without_costs_counts_rows_and_says_so(monkeypatch, caplog):
    monkeypatch.setattr(train_specs, "_PLAN_COSTS", {})
    assert train_specs.plan_cost_of(load_config(CONFIG)) == PlanCost()
    assert "model.name = 'ling' has not said what its rows cost" in caplog.text


def test_sizes_of_a_checkpoint_count_instead_of_the_flavour():
    config = load_config(CONFIG, ["--tree.chunk_size", "64", "--training.mixed_precision_param", "bfloat16"])
    flash = train_specs.plan_cost_of(config, FLAVOURS["flash"])
    assert replace(flash, source="") == replace(plan_cost("ling", "flash", recompute=False), source="")
    assert flash.source.startswith("ling of given sizes")


def test_files(tmp_path):
    cost = replace(plan_cost("ling", "flash"), row_alignment=np.int64(16))
    path = tmp_path / "cost.json"
    cost.save(path, {"device": "any"})
    assert PlanCost.load(path) == cost
    assert json.loads(path.read_text())["report"] == {"device": "any"}
    cost.save(str(path))
    assert PlanCost.load(str(path)) == cost


def test_files_that_are_no_cost_are_refused(tmp_path):
    path = tmp_path / "cost.json"
    with pytest.raises(ValueError, match=r"cost.json' does not exist; harts-bench calibrate"):
        PlanCost.load(path)
    path.write_text("{")
    with pytest.raises(ValueError, match="is no JSON"):
        PlanCost.load(path)
    path.write_text("[]")
    with pytest.raises(ValueError, match="is not of format"):
        PlanCost.load(path)
    PlanCost().save(path)
    content = json.loads(path.read_text())
    for change, message in (
        ({"forward_row": -1}, "PlanCost.forward_row is -1"),
        ({"forward_pair": 0.5}, "PlanCost.forward_pair is 0.5"),
        ({"other": 1}, "must have exactly"),
    ):
        path.write_text(json.dumps(content | {"cost": content["cost"] | change}))
        with pytest.raises(ValueError, match=message):
            PlanCost.load(path)
