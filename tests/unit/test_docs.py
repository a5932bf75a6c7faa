"""The documents: every symbol, test, file, setting and link they name exists; their code and the examples run."""

from __future__ import annotations

import ast
import functools
import importlib
import json
import pkgutil
import re
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from harts_titan.cli import verify
from harts_titan.data import RolloutBatch, RolloutDataset, from_padded, read_rollouts
from harts_titan.data.source import rollouts_from_config
from harts_titan.engine import Engine
from harts_titan.job_config import load_config
from harts_titan.rl import ObjectiveConfig, build_objective

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docs" / "examples"
DOCUMENTS = sorted((ROOT / "docs").glob("*.md")) + sorted((ROOT / "harts_titan").rglob("*.md"))
CONFIGS = sorted((ROOT / "train_configs").glob("*.toml")) + sorted(EXAMPLES.glob("*.toml"))

# fmt: off
SECTIONS = {
    "tree", "data", "rl", "moe", "ops", "training", "checkpoint", "parallelism", "profiling", "optimizer",
    "lr_scheduler", "metrics", "activation_checkpoint", "experimental", "model", "job", "debug",
}
# fmt: on
"""Configuration sections; anything written ``section.field`` is looked up."""
documents = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


def fences(path: Path, language: str | None = None) -> list[str]:
    """Contents of the fenced blocks, of one language or of all."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", path.read_text(), re.DOTALL | re.MULTILINE)
    return [body for kind, body in found if language is None or kind == language]


def prose(path: Path) -> str:
    return re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)


def spans(path: Path) -> list[str]:
    """Code spans outside fenced blocks, whitespace joined."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose(path))]


@functools.cache
def names_of(file: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)}


def attribute(value: object, symbol: str) -> object:
    for name in symbol.split("."):
        # Fields of dataclasses and named slots may be annotations only.
        if not hasattr(value, name) and name in getattr(value, "__annotations__", {}):
            return None
        value = getattr(value, name)
    return value


@functools.cache
def public_classes() -> dict[str, type]:
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("harts_titan")]
    return {name: value for module in modules for name, value in vars(module).items() if isinstance(value, type)}


@documents
def test_symbols_exist(path):
    """``package.module:symbol``, a dotted ``harts_titan.name``, and ``Class.member`` of a class of the package."""
    for span in spans(path):
        for module, symbol in re.findall(r"\b((?:harts_titan|torchtitan)(?:\.\w+)*):([\w.]*\w)", span):
            attribute(importlib.import_module(module), symbol)
        if re.fullmatch(r"harts_titan(\.\w+)+", span):
            pkgutil.resolve_name(span)
        for name, member in re.findall(r"(?<![\w.:])([A-Z]\w+)\.(\w+)", span):
            if name in public_classes():
                attribute(public_classes()[name], member)


def test_the_equations_are_tied_to_code_and_tests():
    rows = [line for line in (ROOT / "docs" / "equations.md").read_text().splitlines() if line.startswith("| ")]
    body = [row for row in rows if not row.startswith(("| equation", "| statement", "| ---"))]
    assert len(body) > 50
    for row in body:
        assert re.search(r"`harts_titan[\w.]*:\w", row) and re.search(r"`tests/[\w/]+\.py::test_\w+`", row), row


@documents
def test_tests_exist(path):
    text = prose(path)
    for file, name in re.findall(r"\b(tests/[\w/]+\.py)::(\w+)", text):
        assert name in names_of(ROOT / file), f"{file}::{name}"
    everywhere = set().union(*(names_of(file) for file in (ROOT / "tests").rglob("test_*.py")))
    for name in re.findall(r"`(test_\w+)`", text):
        assert name in everywhere, name


@documents
def test_files_and_links_exist(path):
    for span in spans(path):
        for file in re.findall(r"\b((?:harts_titan|tests|docs|train_configs|benchmarks|scripts)/[\w/.]*\w)", span):
            assert (ROOT / file.split("::")[0]).exists(), file
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        file, _, anchor = target.partition("#")
        other = (path.parent / file).resolve() if file else path
        assert other.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", other.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}, target


@documents
def test_settings_and_commands_exist(path):
    config = load_config(str(ROOT / "train_configs" / "ling_debug.toml"))
    for span in spans(path) + fences(path):
        for section, name in re.findall(r"(?<![\w./])(?:--)?([a-z_]+)\.([a-z_]\w*)\b(?![(/\w])", span):
            if section in SECTIONS and not name.endswith(("py", "toml", "parquet", "jsonl")):
                name = name.removeprefix("no-")
                assert hasattr(getattr(config, section), name), f"{section}.{name}"
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    for command in re.findall(r"`(harts-[a-z]+)", path.read_text()):
        assert command in scripts, command


@documents
def test_python_blocks_run(path):
    """Blocks with assertions are executed; of the others the imports are."""
    for block in fences(path, "python"):
        tree = ast.parse(block)
        if not any(isinstance(node, ast.Assert) for node in ast.walk(tree)):
            tree.body = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        exec(compile(tree, str(path), "exec"), {})


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_configurations_parse(path):
    config = load_config(str(path))
    written = tomllib.loads(path.read_text())
    for section, fields in written.items():
        for name, value in fields.items():
            assert getattr(getattr(config, section), name) == value, f"{section}.{name}"


def test_the_bars_are_those_of_the_command():
    text = (ROOT / "docs" / "numerics.md").read_text()
    for dtype, bars in verify.BARS.items():
        (row,) = re.findall(rf"^\| {dtype} \|(.*)\|$", text, re.MULTILINE)
        cells = [cell.strip() for cell in row.split("|")]
        factor = None if bars.rerun_factor is None else f"{bars.rerun_factor} x"
        for cell, bar in zip(cells, (bars.logprob, bars.grad, bars.scalar, bars.min_cosine, factor), strict=True):
            stated = cell.split(" where")[0].split(" everywhere")[0].split(" the re-run")[0]
            if bar is None:
                assert stated in ("reported", ""), (dtype, cell)
            else:
                assert stated == bar or float(stated) == bar, (dtype, cell)


def message(function, *args, **kwargs) -> str:
    with pytest.raises(ValueError) as caught:
        function(*args, **kwargs)
    return str(caught.value)


def test_refusals_are_quoted_as_they_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    quoted = "\n".join([*spans(ROOT / "docs" / "rollout_format.md"), *fences(ROOT / "docs" / "rollout_format.md")])
    good = {"tokens": [7, 8, 9, 4], "loss_mask": [False, False, True, True], "episode_id": "ep-a", "step": 0}

    def refused(**changes) -> str:
        second = good | {"episode_id": "ep-b"} | changes
        optional = {name: [1.0] * 4 if name == "weights" else [-1.0] * 4 for name in set(changes) - set(good)}
        Path("rollouts.jsonl").write_text(json.dumps(good | optional) + "\n" + json.dumps(second) + "\n")
        return message(read_rollouts, "rollouts.jsonl", vocab_size=4096)

    found = [
        refused(loss_mask=[False, False, True]),
        refused(loss_mask=[True, False, True, True]),
        refused(tokens=[7], loss_mask=[False]),
        refused(tokens=[], loss_mask=[]),
        refused(tokens=[7, 8, 99999, 4]),
        refused(logprobs=[0, 0, float("nan"), -1]),
        refused(logprobs=[0, 0, 0.5, -1]),
        refused(weights=[1, 1, -1, 1]),
        refused(episode_id="ep-a"),
        message(read_rollouts, "absent.parquet"),
    ]
    Path("rollouts.jsonl").write_text(json.dumps({"tokens": [7, 8]}))
    found.append(message(read_rollouts, "rollouts.jsonl"))

    ids, attended = torch.tensor([[0, 7, 8, 9, 4, 0]] * 2), torch.tensor([[0, 1, 1, 1, 1, 0]] * 2)
    trained = torch.tensor([[0, 0, 0, 1, 1, 0]] * 2)
    padded = {"input_ids": ids, "attention_mask": attended, "loss_mask": trained}
    first = torch.tensor([[1], [0]])  # only row 0 is changed
    found += [
        message(from_padded, padded | {"attention_mask": attended - first * torch.tensor([0, 0, 1, 0, 0, 0])}),
        message(from_padded, padded | {"loss_mask": trained + first * torch.tensor([0, 0, 0, 0, 0, 1])}),
        message(from_padded, padded | {"response_mask": trained - first * torch.tensor([0, 0, 0, 0, 1, 0])}),
        message(from_padded, padded | {"old_log_probs": torch.zeros(2, 3)}),
        message(from_padded, padded | {"responses": ids[:, 2:5]}),
    ]
    batch = RolloutBatch.from_lists([[7, 8, 9, 4], [7, 8, 9, 5]], [[0, 0, 1, 1]] * 2, episode_id=["a", "b"])
    grpo, kl = ObjectiveConfig(objective="grpo"), ObjectiveConfig(objective="grpo", kl_coef=0.1)
    found.append(message(build_objective(kl).check_inputs, set()))
    names = {"episode_ids": batch.episode_id, "locations": batch.location}
    found.append(message(build_objective(grpo).advantages, batch.reward, batch.group_id, **names))
    for text in found:
        # The reason follows the row, if there is one.
        line = re.sub(r"^  (rollouts.jsonl:row [^,]*, )?", "", text.splitlines()[-1])
        assert line in quoted, line


@pytest.fixture
def example(monkeypatch):
    """Import a module of docs/examples as a user's own module."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module


def test_example_model_trains_and_verifies(example, tmp_path):
    overrides = ["--job.dump_folder", str(tmp_path), "--data.synthetic_trajectories", "8"]
    config = load_config(str(EXAMPLES / "tiny_attention.toml"), overrides)
    # The engine imports the module by the name in the configuration.
    engine = Engine.from_config(config)
    module = sys.modules["tiny_attention"]
    batch = rollouts_from_config(config.data, vocab_size=engine.vocab_size, folder=tmp_path)
    losses = [engine.update(batch)["loss"] for _ in range(4)]
    assert losses[-1] < 0.9 * losses[0], losses

    exact = Engine.from_config(config, dtype="float64", with_optimizer=False)
    result = verify.verify(exact, RolloutDataset(batch), steps=1, dtype="float64")
    assert result["passed"] and result["compact_tokens"] < result["original_tokens"], result

    folder = tmp_path / "published"
    folder.mkdir()
    sizes = {"dim": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 512, "rope_theta": 1e4}
    (folder / "config.json").write_text(json.dumps(sizes))
    save_file({name: p.detach().clone() for name, p in engine.model.named_parameters()}, folder / "model.safetensors")
    again = Engine.from_config(config, hf_dir=str(folder), with_optimizer=False)
    assert isinstance(again.model, module.TinyAttention)
    assert (again.compute_log_probs(batch) == engine.compute_log_probs(batch)).all()


def test_example_loop_runs(example, tmp_path):
    history = example("embed_engine").train(tmp_path)
    assert len(history) == 2
    for metrics in history:
        assert metrics["ratio_min"] == metrics["ratio_max"] == 1.0
        assert metrics["tokens/executed"] == metrics["tokens/compact"] < metrics["tokens/original"]
    # The reference is the policy before its first update.
    assert history[0]["kl_ref"] == 0.0 < history[1]["kl_ref"]
    documented = (ROOT / "docs" / "embedding.md").read_text() + (ROOT / "docs" / "objectives.md").read_text()
    for name in history[0]:
        stem = re.sub(r"^(ratio|clip_fraction)_.*", r"\1_", name)
        assert f"`{stem}" in documented, name
