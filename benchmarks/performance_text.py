"""What the table makers of docs/performance.md share: Markdown rows and numbers."""

from __future__ import annotations

from typing import Any

Report = dict[str, Any]
PASSES = ("forward", "forward_backward")


def rows_of(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def number(value: float, digits: int = 3) -> str:
    """Significant digits, with separators."""
    if value == 0:
        return "0"
    text = f"{value:.{digits}g}"
    return f"{float(text):,.0f}" if abs(float(text)) >= 10 ** (digits - 1) else f"{float(text):,}"


def gib(value: float | None) -> str:
    return "-" if value is None else f"{value / 2**30:.1f}"


def rate_of(timed: Report) -> str:
    """Speed and its share of the ceiling."""
    if "tflop_per_s" in timed:
        speed, share = f"{number(timed['tflop_per_s'])} TFLOP/s", timed.get("share_of_gemm")
    elif "gb_per_s" in timed:
        speed, share = f"{timed['gb_per_s']:,.0f} GB/s", timed.get("share_of_copy")
    else:
        return "-"
    return speed if share is None else f"{speed} ({share:.0%})"


def ms(timed: Report) -> str:
    return number(timed["median"])
