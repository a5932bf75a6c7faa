"""``harts-bench``: measurements of a configured model, each a subcommand with a module of its own."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from harts_titan.cli import bench_layer, bench_update, calibrate, common

SUBCOMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "update": bench_update.main,
    "layer": bench_layer.main,
    "calibrate": calibrate.main,
}


def _parser() -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog="harts-bench",
        usage="harts-bench {" + ",".join(SUBCOMMANDS) + "} CONFIG [options]",
        description="Measure the model of a configuration: whole updates in several tree modes, its layers one kind at "
        "a time, or the planner's cost coefficients. Without the name of a measurement: update.",
        epilog="Every measurement has its own --help (harts-bench update --help); all have --json, --scheme, --limit.",
    )


def main(argv: Sequence[str]) -> int:
    """Run the subcommand that the first argument names (default ``update``) and return its exit status."""
    if argv and argv[0] in SUBCOMMANDS:
        return SUBCOMMANDS[argv[0]](argv[1:])
    if not argv or argv[0] in ("-h", "--help"):
        _parser().parse_args(["--help"])
    if not argv[0].startswith("-") and not argv[0].endswith(".toml"):
        raise ValueError(
            f"'{argv[0]}' is neither a measurement ({', '.join(SUBCOMMANDS)}) nor a TOML configuration; "
            "harts-bench update CONFIG"
        )
    return bench_update.main(argv)


def entry() -> None:
    """Console script."""
    sys.exit(common.run(main))


if __name__ == "__main__":
    entry()
