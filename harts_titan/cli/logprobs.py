"""``harts-logprobs CONFIG --rollouts FILE --out FILE``: the log-probs of a model on a file of rollouts."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from harts_titan.cli import common
from harts_titan.data import RolloutBatch
from harts_titan.data.source import rollouts_from_config
from harts_titan.data.writer import write_rollouts
from harts_titan.engine import Engine, NonFiniteError
from harts_titan.job_config import load_config

_SUFFIXES = (".parquet", ".jsonl")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="harts-logprobs",
        description="Write token-aligned log-probs of every trajectory, rows in input order (entry 0 is 0.0). A "
        "'logprobs' column of the input is replaced, text group ids become numbers and unknown columns are left out. "
        "Unknown options of the form --section.field value override the configuration.",
    )
    parser.add_argument("config", help="TOML configuration; section [tree] says how rows are packed")
    parser.add_argument("--rollouts", required=True, metavar="FILE", help="rollouts to score")
    parser.add_argument("--out", required=True, metavar="FILE", help="output, .parquet or .jsonl")
    parser.add_argument("--hf-dir", default="", metavar="DIR", help="take model and weights from a Hugging Face folder")
    parser.add_argument(
        "--checkpoint", default="", metavar="DIR", help="take weights from a training checkpoint (step-N)"
    )
    parser.add_argument(
        "--dtype", choices=("float64", "float32", "bfloat16"), default="", help="default: as the configuration trains"
    )
    parser.add_argument(
        "--batch", type=int, default=256, metavar="N", help="trajectories planned together (default %(default)s)"
    )
    common.add_common_options(parser)
    return parser


def score(engine: Engine, batch: RolloutBatch, *, trajectories: int) -> np.ndarray:
    """Return token-aligned log-probs (S,), planning ``trajectories`` at a time in input order."""
    parts = []
    bounds = range(0, batch.num_trajectories, trajectories)
    for first in tqdm(bounds, desc="log-probs", unit="batch", disable=len(bounds) < 2):
        last = min(first + trajectories, batch.num_trajectories)
        parts.append(engine.compute_log_probs(batch.select(np.arange(first, last))))
    return np.concatenate(parts)


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    options, overrides = _parser().parse_known_args(argv)
    common.check_target(options.json, "--json")
    out = Path(options.out)
    if out.suffix not in _SUFFIXES:
        raise ValueError(f"--out must end in {' or '.join(_SUFFIXES)}, got '{options.out}'")
    common.check_target(options.out, "--out")
    if options.batch < 1:
        raise ValueError(f"--batch ({options.batch}) must be at least 1")
    if options.hf_dir and options.checkpoint:
        raise ValueError("--hf-dir and --checkpoint both give weights; use one")
    config = load_config(options.config, [*common.config_overrides(options), *overrides])
    engine = Engine.from_config(
        config, hf_dir=options.hf_dir, checkpoint=options.checkpoint, dtype=options.dtype, with_optimizer=False
    )
    batch = rollouts_from_config(
        config.data,
        vocab_size=engine.vocab_size,
        folder=config.job.dump_folder,
        hint=common.path_hint(options),
    )
    try:
        logprobs = score(engine, batch, trajectories=options.batch)
    except NonFiniteError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    write_rollouts(dataclasses.replace(batch, logprobs=logprobs), out)
    trained = batch.loss_mask
    result = {
        "trajectories": batch.num_trajectories,
        "tokens": batch.num_positions,
        "trained_tokens": int(trained.sum()),
        "mean_trained_logprob": float(logprobs[trained].mean()) if trained.any() else None,
        "out": str(out),
    }
    common.write_json(result, options.json)
    common.table("harts-logprobs", list(result.items()), to_stderr=options.json == "-")
    return 0


def entry() -> None:
    """Console script."""
    sys.exit(common.run(main))


if __name__ == "__main__":
    entry()
