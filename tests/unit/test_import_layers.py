"""Imports point down, from the entry points to kernels and planner; read from the source, nothing is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import harts_titan

PACKAGE = Path(harts_titan.__file__).parent
LAYERS = (
    {"cli"},
    {"train"},
    {"engine"},
    {"preparation", "update_metrics", "job_config"},
    {"step", "overrides"},
    {"models"},
    {"parallel", "rl", "data", "planning"},
    {"ops", "tree"},
    {"_compat"},
)
"""From top to bottom; modules of one layer know nothing of each other."""
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
TITAN = {"train", "job_config", "models", "parallel", "_compat"}
"""What may have to follow a new version of torchtitan."""
TORCH_IN_TREE = {"call_layout.py", "plan.py"}
"""Where plans become tensors; the rest of the planner is plain Python and NumPy."""


def imports(file: Path) -> Iterator[tuple[str, ...]]:
    """Names of all modules that a file imports, inside of functions too, as their parts."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{file}:{node.lineno}: relative import"
            yield from ((*node.module.split("."), alias.name) for alias in node.names)


def modules() -> dict[str, list[Path]]:
    """Files of every module and folder directly in the package."""
    found = {path.name: sorted(path.rglob("*.py")) for path in PACKAGE.iterdir() if path.is_dir()}
    found |= {path.stem: [path] for path in PACKAGE.glob("*.py") if path.stem != "__init__"}
    return {name: files for name, files in found.items() if files}


def test_every_module_has_a_layer():
    assert set(modules()) == set(RANK)


def test_imports_point_down():
    wrong = [
        f"{file.relative_to(PACKAGE)} imports {'.'.join(parts)}"
        for name, files in modules().items()
        for file in files
        for parts in imports(file)
        if parts[0] == "harts_titan" and parts[1] != name and RANK.get(parts[1], -1) <= RANK[name]
    ]
    assert not wrong


def test_torchtitan_and_torch_are_known_to_few():
    for name, files in modules().items():
        for file in files:
            known = {parts[0] for parts in imports(file)}
            assert "torchtitan" not in known or name in TITAN, file
            assert "torch" not in known or name != "tree" or file.name in TORCH_IN_TREE, file
