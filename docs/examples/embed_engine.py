"""Own an engine inside an RL loop: padded batches in, log-probs and policy updates out.

    python docs/examples/embed_engine.py [FOLDER]
    torchrun --nproc_per_node 2 docs/examples/embed_engine.py [FOLDER]

The sampler is a stand-in that writes random tokens. What an RL framework holds around it is real: a TensorDict with
``prompts``, ``responses``, ``response_mask``, response-only log-probs and advantages. See docs/embedding.md.

Letters: N rows, L columns of ``input_ids``, R columns of a response.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict

from harts_titan.data import check_vocabulary, from_padded, to_padded
from harts_titan.engine import Engine
from harts_titan.job_config import load_config

CONFIG = Path(__file__).resolve().parents[2] / "train_configs" / "ling_debug.toml"
SETTINGS = [
    "--rl.objective",
    "ppo_clip",
    "--rl.kl_coef",
    "0.1",
    "--rl.mini_batches",
    "1",
    "--tree.max_tokens",
    "512",
    "--optimizer.lr",
    "1e-3",
]
PROMPT, RESPONSE = 24, 16
"""Columns of a prompt and of a response."""


def sample(rng: np.random.Generator, *, prompts: int, trials: int, vocab_size: int) -> TensorDict:
    """Return what a framework holds after sampling: prompts padded left, responses padded right.

    The trials of a prompt share it, and the second half of them continue the first reply of the first trial, so the
    rows form a tree. Tool results inside a response are not trained.
    """
    rows: list[dict[str, torch.Tensor]] = []
    for task in range(prompts):
        prompt = rng.integers(0, vocab_size, int(rng.integers(PROMPT // 2, PROMPT + 1)))
        first = rng.integers(0, vocab_size, RESPONSE)
        for trial in range(trials):
            length = int(rng.integers(RESPONSE // 2, RESPONSE + 1))
            response = rng.integers(0, vocab_size, length)
            if trial >= trials // 2:
                response[:4] = first[:4]
            pad_left, pad_right = PROMPT - len(prompt), RESPONSE - length
            attended = np.concatenate([np.zeros(pad_left), np.ones(len(prompt) + length), np.zeros(pad_right)])
            trained = np.concatenate([np.ones(length), np.zeros(pad_right)])
            trained[4:6] = 0  # a tool result
            rows.append(
                {
                    "prompts": torch.from_numpy(np.concatenate([np.zeros(pad_left, np.int64), prompt])),
                    "responses": torch.from_numpy(np.concatenate([response, np.zeros(pad_right, np.int64)])),
                    "attention_mask": torch.from_numpy(attended.astype(np.int64)),
                    "response_mask": torch.from_numpy(trained.astype(np.int64)),
                    "rewards": torch.tensor(float(rng.integers(0, 2))),
                    "group_id": torch.tensor(task),
                }
            )
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    batch["input_ids"] = torch.cat([batch["prompts"], batch["responses"]], dim=1)
    return TensorDict(batch, batch_size=[len(rows)])


def group_advantages(rewards_N: torch.Tensor, group_N: torch.Tensor) -> torch.Tensor:
    """Return reward minus the group's mean: the framework's own estimator may be anything."""
    mean_N = torch.stack([rewards_N[group_N == group].mean() for group in group_N])
    return rewards_N - mean_N


def log_probs(engine: Engine, padded: TensorDict) -> torch.Tensor:
    """Return response-only log-probs (N, R) of the engine's current weights."""
    batch = from_padded(padded.select("input_ids", "attention_mask", "response_mask", "prompts", "responses"))
    # Ids that the model lacks are refused when a file is read; a batch in memory is checked by its owner.
    check_vocabulary(batch, engine.vocab_size)
    values_S = engine.compute_log_probs(batch)
    return to_padded(values_S, padded["attention_mask"], response_width=padded["responses"].shape[1])


def train(folder: Path, *, iterations: int = 2) -> list[dict[str, float]]:
    """Run the loop, save the weights, read them back; return the metrics of every update."""
    config = load_config(str(CONFIG), SETTINGS)
    policy = Engine.from_config(config)
    reference = Engine.from_config(config, with_optimizer=False)
    # One seed on all ranks: every rank must see the same batch.
    rng = np.random.default_rng(0)
    history = []
    for _ in range(iterations):
        padded = sample(rng, prompts=2, trials=4, vocab_size=policy.vocab_size)
        padded["old_log_probs"] = log_probs(policy, padded)
        padded["ref_log_prob"] = log_probs(reference, padded)
        advantage_N = group_advantages(padded["rewards"], padded["group_id"])
        padded["advantages"] = advantage_N[:, None] * padded["response_mask"]
        history.append(policy.update(from_padded(padded)))
    # Collective: every rank writes its shards.
    policy.save(folder / "weights")
    restored = Engine.from_config(config, checkpoint=str(folder / "weights"), with_optimizer=False)
    assert torch.equal(log_probs(restored, padded), log_probs(policy, padded))
    return history


def main() -> None:
    """Parse the arguments, join the other ranks if there are any, and train."""
    parser = argparse.ArgumentParser(description="Own an engine inside an RL loop.")
    parser.add_argument("folder", nargs="?", type=Path, default=Path("outputs/embed_engine"))
    options = parser.parse_args()
    if "WORLD_SIZE" in os.environ:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    options.folder.mkdir(parents=True, exist_ok=True)
    history = train(options.folder)
    if not dist.is_initialized() or dist.get_rank() == 0:
        for update, metrics in enumerate(history):
            text = ", ".join(f"{name} {value:.6g}" for name, value in sorted(metrics.items()))
            sys.stdout.write(f"update {update}: {text}\n")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
