"""docs/performance.md: its tables are those of the results, and what is written around them is kept."""

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import make_performance as make  # noqa: E402
from performance_bench import kinds_table  # noqa: E402
from performance_scripts import KERNELS, kda_errors  # noqa: E402
from performance_short import short  # noqa: E402

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
    "workload": {"source": "data/treestep_65536.npz", "trajectories": 12, "original_tokens": 361200, "nodes": 111},
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
MODE = TIMES | SPEED | {"original_tokens_per_second": 120400.0, "rows_executed": 65096, "rounds_max": 3, "flops": FLOPS}
PASS = TIMES | SPEED | {"breakdown": BREAKDOWN, "elementwise": {"gb_per_second": 3100.0, "share_of_copy": 0.74}}
UPDATE = COMMON | {
    "command": "update",
    "note": "commit 0123456, entered by hand",
    "model": {"layers": 24},
    "modes": {"compact": MODE | {"breakdown": BREAKDOWN}},
    "ratios": RATIOS,
}
LAYER = COMMON | {
    "command": "layer",
    "kinds": {
        "kda_moe": {
            "modes": {mode: {"forward": PASS, "forward_backward": PASS} for mode in ("expanded", "compact")},
            "ratios": {"forward": RATIOS, "forward_backward": RATIOS | {"speedup": {"compact/expanded": 5.2}}},
        }
    },
}


def test_the_tables_are_those_of_the_results():
    document = make.DOCUMENT.read_text()
    assert make.render(document) == document, "run: python benchmarks/make_performance.py"
    assert document.count("<!-- tables ") + 1 == document.count("<!-- end -->") and document.count("<!-- short ") == 1
    parts = [f"gpu_{part}*.json" for part in KERNELS]
    patterns = ("bench_*.json", "verify_*.json", "limits_*.json", *parts)
    for file in (file for pattern in patterns for file in make.RESULTS.glob(pattern)):
        assert re.search(rf"`benchmarks/results/{re.escape(file.name)}`\)?: ", document), file.name


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
    assert "12 trajectories, 361,200 original tokens, 111 nodes;" in text
    assert text.count(" TFLOP/s.\nNote: commit 0123456, entered by hand.\n") == 1 == text.count("Note: ")
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    assert ["`compact`", "3.000 (2.900 to 3.250)", "120,400", "65,096", "3", "4.0", "333", "42.1%", "90.0"] in rows
    assert ["compact/expanded", "4.90", "5.00", "0.98"] in rows
    assert ["gemm", "6.0 (60%)"] in rows and ["no kernel", "2.0 (20%)"] in rows
    layer = ["3,000 / 3,000", "333 / 333 (42% / 42%)", "74% / 74%", "90.0"]
    assert ["kda_moe", "`expanded`", *layer, "4.90 / 5.20", "5.00 / 5.00", "0.98 / 0.98"] in rows
    assert ["kda_moe", "`compact`", *layer, "-", "-", "-"] in rows
    assert make.render(text, results) == text


def test_figures_in_prose_are_those_of_a_result():
    """What is written by hand beside the tables: ratios of updates, and how long other ways to run KDA take."""
    prose = re.sub(r"<!-- (tables|short) .*?<!-- end -->", "", make.DOCUMENT.read_text(), flags=re.DOTALL)
    prose = " ".join(prose.split())
    results = [json.loads(file.read_text()) for file in make.RESULTS.glob("bench_update_*.json")]
    known = {(name, f"{ratio:.2f}") for one in results for name, ratio in one["ratios"]["speedup"].items()}
    quoted = set(re.findall(r"(compact/\w+) (\d+\.\d+)", prose))
    assert quoted <= known, f"no result has {sorted(quoted - known)}"
    timing = json.loads((make.RESULTS / "kda_h200_2026_11_30.json").read_text())["sections"]["timing"]["result"]
    own = timing["own compact"]["forward_backward"]["median"]
    for pattern, run, digits in (
        (r"one call per node the KDA core takes (\S+) times as long", "node-wise", 1),
        (r"one per depth (\S+) times", "depth-wise", 2),
        (r"own kernels node by node take (\S+) times as long", "own node-wise", 2),
        (r"own kernels depth by depth (\S+) times", "own depth-wise", 2),
    ):
        figures = re.findall(pattern, prose)
        assert figures == [f"{timing[run]['forward_backward']['median'] / own:.{digits}f}"], (run, figures)
    update, stock = (
        json.loads((make.RESULTS / f"bench_update_tiny_treestep{name}.json").read_text()) for name in ("", "_fla")
    )
    compact, nodewise = update["modes"]["compact"]["seconds_median"], stock["modes"]["nodewise"]["seconds_median"]
    figures = re.findall(r"(\d+\.\d+) times the time of `compact`", prose)
    assert figures and set(figures) == {f"{nodewise / compact:.2f}"}


def test_the_table_of_the_kda_op_is_that_of_its_result():
    """harts_titan/ops/kda/README.md; a run with rows gathered outside and inside has both figures in a cell."""
    text = (ROOT / "harts_titan" / "ops" / "kda" / "README.md").read_text().partition("### Measured")[2]
    timing = json.loads((make.RESULTS / "kda_h200_2026_11_30.json").read_text())["sections"]["timing"]["result"]
    runs = {
        "own compact": ["own compact"],
        "own compact, scans in line with the other kernels": ["own compact, one stream"],
        "own expanded": ["own expanded"],
        "own, one call a depth": ["own depth-wise"],
        "own, one call a node": ["own node-wise"],
        "fla expanded (rows gathered outside, inside)": ["fla expanded", "fla expanded, gathered"],
        "fla, one call a depth": ["depth-wise"],
        "fla, one call a node": ["node-wise"],
    }
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")][2:]
    assert [row[0] for row in rows] == list(runs)
    own = timing["own compact"]["forward_backward"]["median"]
    for name, *cells in rows:
        passes = [[timing[run][part]["median"] for run in runs[name]] for part in ("forward", "forward_backward")]
        for cell, values in zip(cells, [*passes, [value / own for value in passes[1]]], strict=True):
            assert [float(one) for one in cell.split(", ")] == [float(f"{value:.3g}") for value in values], name


def test_the_headline_is_that_of_a_result():
    text = " ".join((ROOT / "README.md").read_text().split())
    pattern = (
        r"(\d+) trajectories \(([\d,]+) original, ([\d,]+) compact tokens\).* takes (\S+) s against (\S+) s expanded"
    )
    found = re.search(pattern + r", \*\*(\S+)x\*\* for (\S+)x less work", text)
    assert found is not None
    known = []
    for file in make.RESULTS.glob("bench_update_*.json"):
        result = json.loads(file.read_text())
        workload, ratios = result["workload"], result["ratios"]
        if not {"compact", "expanded"} <= set(result["modes"]):
            continue
        compact, expanded = (result["modes"][mode] for mode in ("compact", "expanded"))
        counts = (workload["original_tokens"], compact["rows_executed"])
        seconds = (f"{one['seconds_median']:.2f}" for one in (compact, expanded))
        gains = (f"{ratios[key]['compact/expanded']:.1f}" for key in ("speedup", "flop_ratio"))
        known.append((str(workload["trajectories"]), *(f"{count:,}" for count in counts), *seconds, *gains))
    assert found.groups() in known


TIMED = {"median": 0.5, "tflop_per_s": 512.0, "share_of_gemm": 0.655, "gb_per_s": 3100.0, "share_of_copy": 0.74}
COPIED = {"median": 0.25, "gb_per_s": 3100.0, "share_of_copy": 0.74}
PAIR = {"forward": TIMED, "forward_backward": TIMED | {"median": 2.0}}
TREE = {"rows": 64886, "segments": 9, "compression": 5.01}
RUNS = ("eager", "compiled")
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
    "compile": {
        "graphs": {
            "rows": [5499, 40],
            "segments": [68, 8],
            "rounds": [2, 1],
            "graphs": [2, 2],
            "errors": [1e-3, 6e-3] * 2,
        },
        "sync": {"queued_ms": 50.797, "done_ms": 50.9},
        "mla_moe": {
            "rows": 59449,
            **{f"{run} {part}": TIMED | {"host": 5.25} for run in RUNS for part in ("forward", "forward + backward")},
            **{f"{run} peak GiB": 12.41 for run in RUNS},
        },
    },
    "sanitize": {
        "kernels": {"cases": ["kda_tree"]},
        "control": {"memcheck": {"named": "ERROR SUMMARY: 9 errors", "others named": "ERROR SUMMARY: 0 errors"}},
        "racecheck": {
            **{"tool": "racecheck", "summary": "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"},
            **{"errors": 0, "kernels": 44, "launches": 120, "seconds": 31.25},
        },
        "synccheck": {
            **{"tool": "synccheck", "summary": "1 clean, 1 stopped", "kernels": 3, "launches": 9, "seconds": 80.0},
            "cases": [
                {"case": "head", "verdict": "stopped", "message": "stopped after 75 s"},
                {"case": "rotary", "verdict": "clean", "message": "ERROR SUMMARY: 0 errors"},
            ],
            "never launched": ["ops.one", "ops.two with WIDE = True"],
        },
    },
    "ops": {
        "kda_timing": {
            **{"tree": TREE | {"positions": 252668}, "compact": PAIR | {"peak_gib": 6.66}},
            "expanded_over_compact": {"forward": 2.9},
        },
        "short_conv": {"expanded": PAIR | {"peak_gib": 4.2}, "random_0": {"y": [0.1, 0.2]}},
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
    "compile": [
        ["5,499", "68", "2", "2", "6.0e-03"],
        ["40", "8", "1", "2", "6.0e-03"],
        *(["mla_moe, 59,449 rows", run, "0.5", "0.5", "5.25", "12.4"] for run in ("eager", "compiled")),
    ],
    "sanitize": [
        ["`racecheck`", "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", "44", "120", "31.2"],
        ["`synccheck`", "1 clean, 1 stopped", "3", "9", "80.0"],
    ],
    "ops": [["kda, compact", "0.5", "2.0", "6.7"], ["short_conv, expanded", "0.5", "2.0", "4.2"]],
    "moe": [
        ["kernels", "0.5", "512 TFLOP/s (66%)", "2.0", "512 TFLOP/s (66%)"],
        ["`combine`", "0.2", "3,100 GB/s (74%)"],
    ],
}


@pytest.mark.parametrize("part", KERNELS)
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
    assert kda_errors({"worst ratio over fla": {"o": 0.99, "q": 1.05}})[0].endswith("1.05 (`q`).")
    assert kda_errors({"over_fla": {"o": 0.99, "b": 1.01}})[0].endswith("1.01 (`b`).")
    assert kda_errors({}) == []


def test_results_of_a_cpu_and_of_other_models_have_what_they_have(results):
    bare = {k: v for k, v in MODE.items() if k not in ("flops", *SPEED)}
    result = UPDATE | {"modes": {"compact": bare}, "ratios": {"speedup": {}, "flop_ratio": {}, "share": {}}}
    (results / "bench_a.json").write_text(json.dumps(result))
    text = make.render("<!-- tables bench_a.json --><!-- end -->".replace("--><", "-->\n<"), results)
    assert "| `compact` | 3.000 (2.900 to 3.250) | 120,400 | 65,096 | 3 |" in text
    timeless = BREAKDOWN | {"span_ms": None, "idle_ms": None}
    assert "| gemm | 6.0 (75%) |" in kinds_table({"compact": timeless})
    assert "| no kernel | - |" in kinds_table({"compact": timeless})


def test_what_is_no_table_of_compiled_layers_sanitizer_and_limits():
    environment = {"commit": "unknown", "device": "GPU", "versions": {}}

    def text(part: str, sections: dict) -> str:
        return make.section(
            f"gpu_{part}.json",
            {"environment": environment, "sections": {name: {"result": one} for name, one in sections.items()}},
        )

    assert "queued in 50.8 ms" in text("compile", SCRIPTS["compile"])
    control = "memcheck: ERROR SUMMARY: 9 errors; with other kernels named: ERROR SUMMARY: 0 errors."
    found = text("sanitize", SCRIPTS["sanitize"])
    assert control in found and "\nsynccheck, case head: stopped: stopped after 75 s\n" in found
    assert "synccheck saw in no clean case: ops.one, ops.two with WIDE = True." in found and "rotary" not in found
    limits = {"one_token_sequences": [0.0037, 0.0056], "past_int32": [True, True, False]}
    found = text("kda", {"limits": limits})
    assert "up to 5.6e-03" in found and "2 of 3 tensors" in found


def test_in_short_has_a_line_for_each_result():
    def script(part: str) -> dict:
        return {"sections": {name: {"result": one} for name, one in SCRIPTS[part].items()}}

    timing = SCRIPTS["kda"]["timing"] | {"fla expanded": PAIR | {"forward_backward": TIMED | {"median": 12.0}}}
    elementwise = {
        "ops": SCRIPTS["elementwise"]["ops"]
        | {"conv": {"forward": COPIED, "backward": COPIED | {"share_of_copy": 0.26}}}
    }
    files = {
        "bench_update.json": UPDATE,
        "bench_layer.json": LAYER,
        "kda.json": {"sections": {"timing": {"result": timing}, "large": {"error": "Traceback"}}},
        "kda_again.json": {"sections": {"timing": {"result": timing}}},
        **{part: script(part) for part in ("attention", "head", "moe")},
        "elementwise.json": {"sections": {"ops": {"result": elementwise["ops"]}}},
    }
    nodewise = MODE | {"seconds_median": 3.25, "flops": FLOPS | {"executed": 5e15}}
    expanded = MODE | {"seconds_median": 13.0, "flops": FLOPS | {"executed": 20e15}}
    for name, modes in (("own", {"nodewise": nodewise, "expanded": expanded}), ("fla", {"nodewise": nodewise})):
        files[f"bench_{name}.json"] = UPDATE | {"modes": modes, "ops": {"kda": name}, "arguments": [name]}
    # Where the workload does not say where nodes begin, these modes ran something else.
    files["bench_old.json"] = files["bench_own.json"] | {
        "workload": COMMON["workload"] | {"nodes": None},
        "arguments": ["old"],
    }
    text = short(files)
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")][2:]
    assert rows[0] == [
        "whole update, 24 layers, treestep_65536",
        *("**4.90**", "5.00", "0.98", "120,400 original tokens/s", "42% of the GEMM"),
    ]
    assert rows[1][1:] == ["5.20", "5.00", "0.98", "333 TFLOP/s", "42% of the GEMM; elementwise 74% of a copy"]
    assert rows[2][1:] == ["6.00", "4.18 (tokens)", "1.43", "2.0 ms", "-"]
    assert rows[3] == [
        "KDA core, forward and backward; expanded is these kernels",
        *("1.00", "4.18 (tokens)", "0.24", "2.0 ms", "-"),
    ]
    assert rows[4][4:] == ["512 to 512; 512 to 512 TFLOP/s", "109% to 109%; 99% to 99% of the expanded run's TFLOP/s"]
    assert rows[5][4:] == ["512 TFLOP/s; memory 8% of float32 logits", "85% of the speed of its bare products"]
    assert rows[6][4:] == ["512 TFLOP/s", "66% of the dense GEMM"]
    assert rows[7][5] == "median 74% of a copy, lowest 26% (conv, backward)"
    speeds = ["120,400 original tokens/s", "42% of the GEMM"]
    whole = "whole update, 24 layers, treestep_65536, `nodewise`"
    assert rows[8:] == [
        [whole, "4.00", "4.00", "1.00", *speeds],
        [f"{whole}, KDA core of fla", "-", "-", "-", *speeds],
    ]
    command = "train_configs/ling_tiny_gpu.toml --tree benchmarks/data/treestep_65536.npz`"
    assert f"- `harts-bench update {command} (`benchmarks/results/bench_update.json`)" in text
    assert f"- `harts-bench layer {command} (`benchmarks/results/bench_layer.json`)" in text
