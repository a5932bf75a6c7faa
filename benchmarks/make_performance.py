"""Write the tables of docs/performance.md from benchmarks/results.

    python benchmarks/make_performance.py            # rewrite the tables
    python benchmarks/make_performance.py --check    # exit 1 if they differ

A table stands between ``<!-- tables PATTERN,... -->`` and ``<!-- end -->``: one section for each file of
benchmarks/results that a pattern matches, pattern by pattern and by name. Between ``<!-- short PATTERN,... -->`` and
``<!-- end -->`` stands one table of all of them, a line or two for each file. What is written around them is kept. A
result of ``harts-bench update``, ``harts-bench layer``, ``harts-verify`` or a script ``benchmarks/gpu_PART.py`` (the
parts of ``performance_scripts.KERNELS``) named like a pattern needs no more than this script to be in the document. Of
the scripts' results the ops are shown, not the sweeps of configurations.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from performance_bench import bench_section, verify_section
from performance_scripts import kernels_section
from performance_short import short
from performance_text import Report

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENT = ROOT / "docs" / "performance.md"
_BLOCK = re.compile(r"(<!-- (tables|short) (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def section(name: str, result: Report) -> str:
    """One result file: its title and tables."""
    if "sections" in result:
        return kernels_section(name, result)
    return (verify_section if "rerun" in result else bench_section)(name, result)


def render(document: str, results: Path = RESULTS) -> str:
    """Return the document with its tables made again."""

    def tables(match: re.Match[str]) -> str:
        files = [file for pattern in match[3].split(",") for file in sorted(results.glob(pattern))]
        found = {file.name: json.loads(file.read_text()) for file in files}
        if match[2] == "short":
            return f"{match[1]}\n{short(found)}\n{match[5]}"
        return f"{match[1]}\n" + "".join(f"{section(name, one)}\n" for name, one in found.items()) + match[5]

    return _BLOCK.sub(tables, document)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if the tables are not up to date")
    args = parser.parse_args()
    before = DOCUMENT.read_text()
    after = render(before)
    if args.check:
        return int(before != after)
    DOCUMENT.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
