"""docs/performance.md: its tables are those of the results, and what is written around them is kept."""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("make_performance", ROOT / "benchmarks" / "make_performance.py")
make = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(make)

BREAKDOWN = {"kinds": {"gemm": {"ms": 6.0, "share": 0.75, "calls": 3}}, "busy_ms": 8.0, "span_ms": 10.0, "idle_ms": 2.0}
FLOPS = {"executed": 4e15, "model": 3e15}
SPEED = {"hardware_tflops_per_second": 333.3, "hardware_utilisation": 0.421}
TIMES = {"seconds_median": 3.0, "seconds_min": 2.9, "seconds_max": 3.25, "peak_memory_bytes": 90 * 2**30}
COMMON = {
    "arguments": ["train_configs/ling_tiny_gpu.toml", "--tree", "benchmarks/data/treestep_65536.npz"],
    "config": "train_configs/ling_tiny_gpu.toml",
    "device": "GPU",
    "torch": "2.11",
    "versions": {"triton": "3.6", "flash-attn-4": None},
    "workload": {"trajectories": 12, "original_tokens": 361200},
    "ceilings": {
        "copy_bytes_per_second": 4.2e12,
        "gemm_flops_per_second": 7.9e14,
        "grouped_gemm_flops_per_second": 6.8e14,
    },
}
RATIOS = {
    "speedup": {"compact/expanded": 4.9},
    "flop_ratio": {"compact/expanded": 5.0},
    "share": {"compact/expanded": 0.98},
}
MODE = TIMES | SPEED | {"original_tokens_per_second": 120400.0, "rows_executed": 65096, "flops": FLOPS}
PASS = TIMES | SPEED | {"breakdown": BREAKDOWN, "elementwise": {"gb_per_second": 3100.0, "share_of_copy": 0.74}}
UPDATE = COMMON | {"command": "update", "modes": {"compact": MODE | {"breakdown": BREAKDOWN}}, "ratios": RATIOS}
LAYER = COMMON | {
    "command": "layer",
    "kinds": {
        "kda_moe": {
            "modes": {"compact": {"forward": PASS, "forward_backward": PASS}},
            "ratios": {"forward_backward": RATIOS},
        }
    },
}


def test_the_tables_are_those_of_the_results():
    document = make.DOCUMENT.read_text()
    assert make.render(document) == document, "run: python benchmarks/make_performance.py"
    assert document.count("<!-- tables ") == document.count("<!-- end -->") == 1
    for file in make.RESULTS.glob("bench_*.json"):
        assert f"(`benchmarks/results/{file.name}`)" in document


@pytest.fixture
def results(tmp_path):
    (tmp_path / "bench_a.json").write_text(json.dumps(UPDATE))
    (tmp_path / "bench_b.json").write_text(json.dumps(LAYER))
    (tmp_path / "other.json").write_text("{}")
    return tmp_path


def test_tables_are_made_and_prose_is_kept(results):
    text = make.render("before\n<!-- tables bench_*.json -->\nold\n<!-- end -->\nafter\n", results)
    assert text.startswith("before\n<!-- tables bench_*.json -->\n") and text.endswith("<!-- end -->\nafter\n")
    assert "old" not in text and "other.json" not in text
    assert text.index("bench_a.json") < text.index("bench_b.json")
    command = "train_configs/ling_tiny_gpu.toml --tree benchmarks/data/treestep_65536.npz`"
    assert f"`harts-bench update {command}" in text and f"`harts-bench layer {command}" in text
    assert "copy 4.20 TB/s, GEMM 790 and grouped GEMM 680 TFLOP/s" in text
    assert "triton 3.6" in text and "flash-attn-4" not in text
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    assert ["`compact`", "3.000 (2.900 to 3.250)", "120,400", "65,096", "4.0", "333", "42.1%", "90.0"] in rows
    assert ["compact/expanded", "4.90", "5.00", "0.98"] in rows
    assert ["gemm", "6.0 (60%)"] in rows and ["no kernel", "2.0 (20%)"] in rows
    layer = ["kda_moe", "`compact`", "3,000", "3,000", "333 / 333", "42.1%", "3,100 (74%)", "90.0"]
    assert layer in rows and ["kda_moe", "compact/expanded", "4.90", "5.00", "0.98"] in rows
    assert make.render(text, results) == text


def test_results_of_a_cpu_and_of_other_models_have_what_they_have(results):
    bare = {k: v for k, v in MODE.items() if k not in ("flops", *SPEED)}
    result = UPDATE | {"modes": {"compact": bare}, "ratios": {"speedup": {}, "flop_ratio": {}, "share": {}}}
    (results / "bench_a.json").write_text(json.dumps(result))
    text = make.render("<!-- tables bench_a.json --><!-- end -->".replace("--><", "-->\n<"), results)
    assert "| `compact` | 3.000 (2.900 to 3.250) | 120,400 | 65,096 |" in text
    timeless = BREAKDOWN | {"span_ms": None, "idle_ms": None}
    assert "| gemm | 6.0 (75%) |" in make.kinds_table({"compact": timeless})
    assert "| no kernel | - |" in make.kinds_table({"compact": timeless})
