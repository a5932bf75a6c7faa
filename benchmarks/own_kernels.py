"""The Triton kernels of ``harts_titan``: which ones its source has, and which ones a run launched."""

from __future__ import annotations

import ast
import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parents[1] / "harts_titan"


def kernels_of(package: Path = PACKAGE) -> tuple[set[str], set[str]]:
    """Names of the functions under ``triton.jit``, from the source: kernels, and helpers that kernels call.

    A helper is called in the body of another such function and launched with a grid nowhere in the package. Whatever is
    neither called nor launched counts as a kernel.

    Args:
        package: Folder of the package.

    Returns:
        ``module.function`` of kernels and of helpers, the module relative to the package.
    """
    defined: set[str] = set()
    called: set[str] = set()
    launched: set[str] = set()
    for file in sorted(package.rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        module = ".".join(file.relative_to(package).with_suffix("").parts)
        places = {name.asname or name.name: _place(node.module, name.name) for node, name in _imports(tree)}
        jitted = [node for node in tree.body if isinstance(node, ast.FunctionDef) and _is_jitted(node)]
        places |= {node.name: f"{module}.{node.name}" for node in jitted}
        defined |= {f"{module}.{node.name}" for node in jitted}
        for function in jitted:
            called |= {places.get(name.id, "") for name in _callees(function) if isinstance(name, ast.Name)}
        launches = (one.value for one in _callees(tree) if isinstance(one, ast.Subscript))
        launched |= {places.get(name.id, "") for name in launches if isinstance(name, ast.Name)}
    helpers = defined & called - launched
    return defined - helpers, helpers


def fixed_switches(package: Path = PACKAGE) -> set[str]:
    """Switches that the package cannot set to another value: each launch has the same ``True`` or ``False``.

    Args:
        package: Folder of the package.

    Returns:
        ``module.function.option``, the module relative to the package.
    """
    values: dict[str, set[str]] = {}
    open_ended: set[str] = set()
    for file in sorted(package.rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        module = ".".join(file.relative_to(package).with_suffix("").parts)
        places = {name.asname or name.name: _place(node.module, name.name) for node, name in _imports(tree)}
        for call in ast.walk(tree):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Subscript):
                continue
            name = ast.unparse(call.func.value)
            kernel = places.get(name, f"{module}.{name}")
            for option in call.keywords:
                if option.arg is None:
                    # Whatever the dictionary holds.
                    open_ended.add(kernel)
                    continue
                values.setdefault(f"{kernel}.{option.arg}", set()).add(ast.unparse(option.value))
    fixed = {switch for switch, given in values.items() if given in ({"True"}, {"False"})}
    return {switch for switch in fixed if switch.rpartition(".")[0] not in open_ended}


def _imports(tree: ast.Module) -> Iterator[tuple[ast.ImportFrom, ast.alias]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from ((node, name) for name in node.names)


def _place(module: str | None, name: str) -> str:
    return f"{module or ''}.{name}".removeprefix(f"{PACKAGE.name}.")


def _is_jitted(function: ast.FunctionDef) -> bool:
    decorators = (one.func if isinstance(one, ast.Call) else one for one in function.decorator_list)
    return any(ast.unparse(one) in ("triton.jit", "jit") for one in decorators)


def _callees(tree: ast.AST) -> Iterator[ast.expr]:
    yield from (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))


@dataclass
class Launches:
    """What ran, by ``module.function``."""

    count: Counter[str] = field(default_factory=Counter)
    flags: dict[str, dict[str, set[bool]]] = field(default_factory=dict)
    """Values of the compile-time switches (boolean options of a launch)."""
    variants: dict[str, set[str]] = field(default_factory=dict)
    """Compile-time options of every launch."""
    last: str = ""
    """What was launched last."""

    def add(self, kernel: Any, options: dict[str, Any]) -> None:
        name = _place(kernel.fn.__module__, kernel.fn.__name__)
        self.count[name] += 1
        self.last = name
        self.variants.setdefault(name, set()).add(repr(sorted(options.items(), key=str)))
        # What Triton takes where the option is left out.
        for option, value in {"launch_pdl": False, **options}.items():
            if isinstance(value, bool):
                self.flags.setdefault(name, {}).setdefault(option, set()).add(value)

    def merge(self, other: Launches) -> None:
        """Add the launches of another run."""
        self.count.update(other.count)
        for name, variants in other.variants.items():
            self.variants.setdefault(name, set()).update(variants)
        for name, options in other.flags.items():
            for option, values in options.items():
                self.flags.setdefault(name, {}).setdefault(option, set()).update(values)

    def dumped(self) -> dict[str, Any]:
        """What :meth:`loaded` reads, for a file of JSON."""
        return {
            "count": dict(self.count),
            "flags": {name: {o: sorted(v) for o, v in options.items()} for name, options in self.flags.items()},
            "variants": {name: sorted(variants) for name, variants in self.variants.items()},
            "last": self.last,
        }

    @classmethod
    def loaded(cls, dumped: dict[str, Any]) -> Launches:
        """Launches that another process dumped."""
        return cls(
            Counter(dumped["count"]),
            {name: {o: set(v) for o, v in options.items()} for name, options in dumped["flags"].items()},
            {name: set(variants) for name, variants in dumped["variants"].items()},
            dumped["last"],
        )

    def missing(self, required: set[str], one_sided: set[str]) -> list[str]:
        """Kernels that never ran, and switches with one value only.

        Args:
            required: Kernels that have to run.
            one_sided: Switches that have one value, as ``option`` or, of one kernel, ``module.function.option``.
        """
        switches = [
            f"{name} with {option} = {not next(iter(values))}"
            for name, options in self.flags.items()
            for option, values in options.items()
            if name in required and not one_sided & {option, f"{name}.{option}"} and len(values) == 1
            # Most kernels are dependent in no launch.
            if (option, values) != ("launch_pdl", {False})
        ]
        return sorted(required - set(self.count)) + sorted(switches)

    def report(self, own: set[str]) -> dict[str, Any]:
        """Launches and number of variants of the kernels in ``own``."""
        names = sorted(own & set(self.count))
        return {name: {"launches": self.count[name], "variants": len(self.variants[name])} for name in names}


@contextlib.contextmanager
def recorded() -> Iterator[Launches]:
    """Record every launch of a Triton kernel, compiled or interpreted."""
    from triton.runtime.jit import KernelInterface

    launches, original = Launches(), KernelInterface.__getitem__

    def getitem(kernel: Any, grid: Any) -> Any:
        launch = original(kernel, grid)

        def run(*args: Any, **options: Any) -> Any:
            launches.add(kernel, options)
            return launch(*args, **options)

        return run

    KernelInterface.__getitem__ = getitem
    try:
        yield launches
    finally:
        KernelInterface.__getitem__ = original
