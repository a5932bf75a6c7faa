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
    assert document.count("<!-- tables ") == document.count("<!-- end -->") == 2
    parts = [f"gpu_{part}*.json" for part in make.KERNELS]
    for file in (file for pattern in ("bench_*.json", *parts) for file in make.RESULTS.glob(pattern)):
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


TIMED = {"median": 0.5, "tflop_per_s": 512.0, "share_of_gemm": 0.655, "gb_per_s": 3100.0, "share_of_copy": 0.74}
COPIED = {"median": 0.25, "gb_per_s": 3100.0, "share_of_copy": 0.74}
PAIR = {"forward": TIMED, "forward_backward": TIMED | {"median": 2.0}}
TREE = {"rows": 64886, "segments": 9, "compression": 5.01}
SCRIPTS = {
    "kda": {
        "numerics": {"tree_slow": {"worst": ["q", 1.02]}, "long": {"worst": ["b", 1.2]}, "repeat": True},
        "timing": {
            **{"rows": 75328, "expanded_rows": 315264, "token_ratio": 4.185, "segments": 49, "rounds": 2},
            **{"bit_equal_to_expanded": True, "own compact": PAIR | {"peak_gib": 7.06}, "own expanded": PAIR},
        },
        "breakdown": {"chunk_forward": COPIED, "launch": {"median": 0.0}, "total_ms": 1.0},
    },
    "attention": {
        "trees": {
            "gemm_tflop_per_s": 780.0,
            "treestep": {
                **{"tree": TREE, "fa4": PAIR, "build_ms": {"fa4": {"median": 1.12}}},
                "share_of_expanded": {"forward": 1.09, "forward_backward": 0.99},
            },
        },
        "index_list": {"treestep": PAIR},
    },
    "elementwise": {"ops": {"gated norm": {"forward": COPIED, "backward": COPIED}, "copy_bytes_per_second": 4e12}},
    "head": {
        "op": {
            **{"four_products_ms": 187.71, "op_8192_forward": TIMED, "narrow_8192": TIMED},
            "op_8192": TIMED | {"over_bare": 1.17, "share_of_logits": 0.0833},
        }
    },
    "moe": {
        "layer": {f"{name}_{key}": PAIR[key] for name in ("kernels", "plain") for key in PAIR},
        "rows": {"combine_512_w2": COPIED, "combine_256_w1": COPIED | {"median": 0.2}, "plain": COPIED},
    },
}
ROWS = {
    "kda": [
        ["own compact", "0.5", "2.0", "1.00 / 1.00", "7.1"],
        ["own expanded", "0.5", "2.0", "1.00 / 1.00", "-"],
        ["`chunk_forward`", "0.25", "3,100 GB/s (74%)"],
    ],
    "attention": [
        ["treestep", "64,886", "9", "5.01", "0.5 ms, 512 (109%)", "2.0 ms, 512 (99%)", "1.12", "512 / 512"],
    ],
    "elementwise": [["gated norm", "0.25", "3,100 GB/s (74%)", "0.25", "3,100 GB/s (74%)"]],
    "head": [["8192", "0.5", "0.5", "512 TFLOP/s (66%)", "1.17", "0.083"]],
    "moe": [
        ["kernels", "0.5", "512 TFLOP/s (66%)", "2.0", "512 TFLOP/s (66%)"],
        ["`combine`", "0.2", "3,100 GB/s (74%)"],
    ],
}


@pytest.mark.parametrize("part", make.KERNELS)
def test_scripts_show_their_ops_and_what_failed(part):
    failed = {"error": "Traceback", "commit": "9876543210"}
    sections = {name: {"result": one} for name, one in SCRIPTS[part].items()} | {"large": failed}
    environment = {"commit": "0123456789", "device": "GPU", "versions": {"torch": "2.11"}, "note": "two runs"}
    text = make.section(f"gpu_{part}_gpu.json", {"environment": environment, "sections": sections})
    assert text.startswith(f"`python benchmarks/gpu_{part}.py OUT --sections {','.join(sections)}`")
    assert "GPU; torch 2.11; commit 0123456; large at 9876543; failed: large.\nNote: two runs.\n" in text
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    assert all(row in rows for row in ROWS[part])
    # Nothing else: two lines of header a table, and plain PyTorch beside the kernels of a MoE layer.
    headers = 2 * sum(row[0] == "---" for row in rows)
    assert len(rows) - headers == len(ROWS[part]) + (part == "moe")
    assert part != "kda" or "over fla's own: 1.20 (`b`, long)" in text


def test_errors_of_kda_summed_up():
    assert make.kda_errors({"worst ratio over fla": {"o": 0.99, "q": 1.05}})[0].endswith("1.05 (`q`).")
    assert make.kda_errors({}) == []


def test_results_of_a_cpu_and_of_other_models_have_what_they_have(results):
    bare = {k: v for k, v in MODE.items() if k not in ("flops", *SPEED)}
    result = UPDATE | {"modes": {"compact": bare}, "ratios": {"speedup": {}, "flop_ratio": {}, "share": {}}}
    (results / "bench_a.json").write_text(json.dumps(result))
    text = make.render("<!-- tables bench_a.json --><!-- end -->".replace("--><", "-->\n<"), results)
    assert "| `compact` | 3.000 (2.900 to 3.250) | 120,400 | 65,096 |" in text
    timeless = BREAKDOWN | {"span_ms": None, "idle_ms": None}
    assert "| gemm | 6.0 (75%) |" in make.kinds_table({"compact": timeless})
    assert "| no kernel | - |" in make.kinds_table({"compact": timeless})
