"""Time the CPU backends of ``harts_titan.ops`` on one thread: forward, and forward with backward.

    python benchmarks/cpu_ops.py --json OUT.json
    python benchmarks/cpu_ops.py --only kda --repeats 9

Every case runs a compact plan of the same random forks (``--rows`` distinct tokens). Times are medians of repeats;
``us_per_row`` divides them by the rows of the plan.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from harts_titan.models.common.tree_inputs import packed_sequences, tree_mask
from harts_titan.ops.attention import tree_attention
from harts_titan.ops.kda import kda
from harts_titan.ops.short_conv import tree_short_conv
from harts_titan.tree import plan_step
from harts_titan.tree.plan import CallLayout

HEADS, HEAD_DIM, NUM_TAPS = 2, 16, 4


def forked_call(num_rows: int, chunk_size: int) -> CallLayout:
    """Compact layout of random trajectories: each leaves an earlier one at a random point and goes on alone."""
    rng, trajectories, rows = random.Random(0), [], 0
    while rows < num_rows:
        prefix = rng.choice(trajectories) if trajectories else []
        prefix = prefix[: rng.randint(0, len(prefix))]
        tail = [rng.randint(0, 1 << 20) for _ in range(min(rng.randint(1, 300), num_rows - rows))]
        trajectories.append(prefix + tail)
        rows += len(tail)
    tokens = np.concatenate([np.array(t, dtype=np.int32) for t in trajectories])
    offsets = np.cumsum([0] + [len(t) for t in trajectories])
    plan = plan_step(tokens, offsets, capacity=2 * num_rows, chunk_size=chunk_size, num_taps=NUM_TAPS)
    return plan.consumer(0, 0).calls[0]


def kda_case(call: CallLayout, dtype: torch.dtype) -> tuple[Callable[..., Tensor], list[Tensor]]:
    sequences = packed_sequences(call)
    shapes = [(call.num_rows, HEADS, HEAD_DIM)] * 4 + [(call.num_rows, HEADS), (HEADS,), (HEADS, HEAD_DIM)]
    return lambda *x: kda(*x, sequences, backend="reference")[0], [torch.randn(s, dtype=dtype) for s in shapes]


def attention_case(call: CallLayout, dtype: torch.dtype) -> tuple[Callable[..., Tensor], list[Tensor]]:
    mask = tree_mask(call)
    inputs = [torch.randn(call.num_rows, HEADS, HEAD_DIM, dtype=dtype) for _ in range(3)]
    return lambda *x: tree_attention(*x, mask, scale=HEAD_DIM**-0.5, backend="path"), inputs


def short_conv_case(call: CallLayout, dtype: torch.dtype) -> tuple[Callable[..., Tensor], list[Tensor]]:
    width = HEADS * HEAD_DIM
    inputs = [torch.randn(call.num_rows, width, dtype=dtype), torch.randn(width, NUM_TAPS, dtype=dtype)]
    return lambda *x: tree_short_conv(*x, call.conv_tap_TW, backend="reference"), inputs


CASES = {"kda": kda_case, "attention_path": attention_case, "short_conv": short_conv_case}


def seconds(run: Callable[[], object], repeats: int) -> float:
    """Median time of ``run`` after one warm-up call."""
    times = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def measure(name: str, chunk_size: int, dtype: torch.dtype, rows: int, repeats: int) -> dict[str, object]:
    torch.manual_seed(0)
    op, inputs = CASES[name](forked_call(rows, chunk_size), dtype)
    leaves = [x.requires_grad_() for x in inputs]
    with torch.no_grad():
        forward = seconds(lambda: op(*leaves), repeats)
    both = seconds(lambda: torch.autograd.grad(op(*leaves).sum(), leaves), repeats)
    return {
        "op": name,
        "chunk_size": chunk_size,
        "dtype": str(dtype).removeprefix("torch."),
        "forward_s": forward,
        "forward_backward_s": both,
        "us_per_row": 1e6 * both / rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--only", choices=CASES, help="one op")
    parser.add_argument("--rows", type=int, default=4000, help="distinct tokens of the plan")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="intra-op threads of the process")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results = []
    for name in [args.only] if args.only else CASES:
        for chunk_size in (16, 64) if name == "kda" else (64,):
            for dtype in (torch.float32, torch.float64):
                results.append(measure(name, chunk_size, dtype, args.rows, args.repeats))
                r = results[-1]
                print(
                    f"{name:15} chunk {chunk_size:3} {r['dtype']:8} forward {1e3 * r['forward_s']:8.1f} ms   "
                    f"with backward {1e3 * r['forward_backward_s']:8.1f} ms   {r['us_per_row']:7.2f} us per row"
                )
    if args.json:
        setting = {"torch": torch.__version__, "threads": args.threads, "rows": args.rows, "repeats": args.repeats}
        report = {**setting, "heads": HEADS, "head_dim": HEAD_DIM, "results": results}
        args.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
