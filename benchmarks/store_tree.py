"""Store the tree of one microbatch, without its tokens: what ``harts-bench --tree`` runs.

    python benchmarks/store_tree.py STEP.npz benchmarks/data/treestep_65536.npz --dp 8 --microbatch 3

STEP.npz has the step's tokens and offsets, as harts-plan reads them. Where it says with node_start where nodes of the
rollout tree begin, the stored tree does so too. The microbatch is what replica 0 runs in a slot of the step's plan
without windows.
"""

from __future__ import annotations

import argparse
import sys
from types import SimpleNamespace

from harts_titan.cli.bench_workload import load_workload
from harts_titan.data.tree_file import tree_of, write_tree


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("step")
    parser.add_argument("out")
    parser.add_argument("--dp", type=int, default=1)
    parser.add_argument("--microbatch", type=int, default=None)
    parser.add_argument("--capacity", type=int, default=65536)
    args = parser.parse_args()
    options = SimpleNamespace(tree=None, rollouts=args.step, limit=None, dp=args.dp, microbatch=args.microbatch)
    config = SimpleNamespace(tree=SimpleNamespace(max_tokens=args.capacity, chunk_size=64))
    workload = load_workload(options, config, vocab_size=2**31 - 1)
    batch = workload.batch
    tree = tree_of(batch.tokens, batch.offsets, batch.node_start)
    write_tree(args.out, tree)
    rows = int((tree.length_N - tree.lcp_N).sum())
    total = int(tree.length_N.sum())
    nodes = "no nodes named" if workload.nodes is None else f"{workload.nodes} nodes"
    print(f"{args.out}: {len(tree.length_N)} trajectories, {total} tokens, {rows} rows, {total / rows:.3f}x, {nodes}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
