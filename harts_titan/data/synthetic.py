"""Deterministic agent-like rollouts in the public file format, with something to learn.

Every episode is a shared system prompt, a task, and turns of an assistant message and a tool result. The first trial
of a task runs on its own; every later one copies the history of an earlier trial up to a random token inside one of its
assistant messages (or, sometimes, to the message's start) and goes on from there, so trajectories fork inside turns.
One row per (episode, assistant message) is written: the history up to the end of the message, with the message trained,
as step-wise sampling gives it. A message that a later trial shares whole with an earlier one was sampled once.

Assistant tokens follow a known process: mostly the successor of the previous token on a fixed cycle, sometimes a copy
of the task's key tokens in order, rarely noise. A model learns it in a few steps, and the process itself gives the
exact log-probabilities of the sampler. Reward 1 goes to the half of a task's episodes with the least noise, so that
every group is mixed.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from harts_titan.data.batch import RolloutBatch
from harts_titan.data.writer import write_rollouts

logger = logging.getLogger(__name__)

# Kinds of symbols; each kind has its own ids, so that a token says which part of an episode it belongs to.
_NUM_SYSTEM, _NUM_TASK, _NUM_TOOL, _NUM_SPOKEN = 24, 24, 24, 16
_BEGIN_ASSISTANT, _END_ASSISTANT, _BEGIN_TOOL, _BEGIN_TASK = 0, 1, 2, 3
_FIRST_SYSTEM = 4
_FIRST_TASK = _FIRST_SYSTEM + _NUM_SYSTEM
_FIRST_TOOL = _FIRST_TASK + _NUM_TASK
_FIRST_SPOKEN = _FIRST_TOOL + _NUM_TOOL
NUM_SYMBOLS = _FIRST_SPOKEN + _NUM_SPOKEN
"""Distinct tokens of the process; the least vocabulary."""

_TASK_TOKENS, _KEY_TOKENS = 12, 4
_COPY, _NOISE = 0.10, 0.05
_END_GIVEN_LONG = 0.25


@dataclass(frozen=True)
class SyntheticConfig:
    """What to generate."""

    trajectories: int = 48
    """Rows to write."""

    seed: int = 0
    """Everything follows from it."""

    vocab_size: int = 512
    """Ids are below this; the process's symbols are spread evenly over them."""

    trials: int = 4
    """Episodes per task (one group)."""

    turns: int = 5
    """Most assistant messages per episode."""

    system_tokens: int = 32
    """Length of the shared system prompt in tokens."""

    message_tokens: int = 64
    """Longest assistant message in tokens, from its opening to its end-of-turn token."""

    tool_tokens: int = 48
    """Longest tool result in tokens."""

    logprobs: bool = False
    """Write the process's own log-probabilities of the trained tokens."""

    def __post_init__(self) -> None:
        if self.vocab_size < NUM_SYMBOLS:
            raise ValueError(f"vocab_size ({self.vocab_size}) must be at least {NUM_SYMBOLS}, the process's symbols")
        for name, least in (
            ("trajectories", 1),
            ("trials", 1),
            ("turns", 1),
            ("system_tokens", 1),
            ("message_tokens", 8),
            ("tool_tokens", 2),
            ("seed", 0),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")


class _Random:
    """splitmix64: the same numbers with every NumPy and Python version."""

    def __init__(self, *key: int) -> None:
        self._state = 0x9E3779B97F4A7C15
        for part in key:
            self._state = (self._state ^ part) * 0xBF58476D1CE4E5B9 % 2**64
            self.uniform()

    def uniform(self) -> float:
        """A number in [0, 1)."""
        self._state = (self._state + 0x9E3779B97F4A7C15) % 2**64
        mixed = self._state
        mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
        return ((mixed ^ (mixed >> 31)) >> 11) / 2**53

    def integer(self, low: int, high: int) -> int:
        """An integer in [low, high]."""
        return low + int(self.uniform() * (high - low + 1))


@dataclass
class _Message:
    """One assistant message of an episode: tokens[start:end] are sampled."""

    start: int
    end: int
    new: bool


@dataclass
class _Episode:
    """The history of one trial, with the process's log-prob per token (0 where not sampled)."""

    tokens: list[int]
    logprobs: list[float]
    noise: list[bool]
    messages: list[_Message] = field(default_factory=list)


def generate(config: SyntheticConfig) -> RolloutBatch:
    """Generate rollouts; equal configurations give equal batches on every machine and version.

    Args:
        config: what to generate.

    Returns:
        ``config.trajectories`` trajectories in episode order.
    """
    rows: list[tuple[int, int, _Episode, int]] = []
    good: set[tuple[int, int]] = set()
    task = 0
    while len(rows) < config.trajectories:
        episodes = _task_episodes(config, task)
        ranked = sorted((_noise_share(episode), trial) for trial, episode in enumerate(episodes))
        good |= {(task, trial) for _, trial in ranked[: (config.trials + 1) // 2]}
        for trial, episode in enumerate(episodes):
            rows += [(task, trial, episode, step) for step, message in enumerate(episode.messages) if message.new]
        task += 1
    rows = rows[: config.trajectories]
    # Spread over the whole vocabulary, so that nothing can rely on ids being small.
    stride = config.vocab_size // NUM_SYMBOLS
    tokens, masks, logprobs = [], [], []
    for _, _, episode, step in rows:
        message = episode.messages[step]
        tokens.append(np.array(episode.tokens[: message.end], dtype=np.int32) * stride + stride // 2)
        mask = np.zeros(message.end, bool)
        mask[message.start : message.end] = True
        masks.append(mask)
        logprobs.append(np.where(mask, np.array(episode.logprobs[: message.end], dtype=np.float32), np.float32(0)))
    return RolloutBatch.from_lists(
        tokens,
        masks,
        logprobs=logprobs if config.logprobs else None,
        reward=np.array([float((t, k) in good) for t, k, _, _ in rows]),
        group_id=np.array([t for t, _, _, _ in rows]),
        episode_id=[f"task-{t:04d}/trial-{k}" for t, k, _, _ in rows],
        step=np.array([step for _, _, _, step in rows]),
    )


def write_synthetic(path: str | Path, **settings: Any) -> RolloutBatch:
    """Write generated rollouts as a public file.

    Args:
        path: ends in ``.parquet`` or ``.jsonl``.
        **settings: fields of :class:`SyntheticConfig`; the defaults otherwise.

    Returns:
        What was written.
    """
    batch = generate(SyntheticConfig(**settings))
    write_rollouts(batch, path)
    logger.info("%s: %d trajectories, %d tokens written", path, batch.num_trajectories, batch.num_positions)
    return batch


def _task_episodes(config: SyntheticConfig, task: int) -> list[_Episode]:
    random = _Random(config.seed, 1)
    system = [_FIRST_SYSTEM + random.integer(0, _NUM_SYSTEM - 1) for _ in range(config.system_tokens)]
    random = _Random(config.seed, 2, task)
    prompt = [_BEGIN_TASK] + [_FIRST_TASK + random.integer(0, _NUM_TASK - 1) for _ in range(_TASK_TOKENS)]
    # The key: which spoken tokens this task wants repeated.
    keys = [_FIRST_SPOKEN + (symbol - _FIRST_TASK) % _NUM_SPOKEN for symbol in prompt[1 : 1 + _KEY_TOKENS]]
    episodes: list[_Episode] = []
    for trial in range(config.trials):
        random = _Random(config.seed, 3, task, trial)
        if trial == 0:
            opening = system + prompt
            episode = _Episode(list(opening), [0.0] * len(opening), [False] * len(opening))
            open_at = -1
        else:
            episode, open_at = _branch(episodes[random.integer(0, trial - 1)], random)
        num_turns = max(random.integer(2, config.turns) if config.turns > 1 else 1, len(episode.messages) + 1)
        while len(episode.messages) < num_turns:
            _speak(episode, keys, config, random, open_at)
            open_at = -1
            if len(episode.messages) < num_turns:
                _answer(episode, config, random)
        episodes.append(episode)
    return episodes


def _branch(base: _Episode, random: _Random) -> tuple[_Episode, int]:
    """Copy an episode up to a random token of one of its messages; also where that message began."""
    message = base.messages[random.integer(0, len(base.messages) - 1)]
    # Three of four forks are inside the message; the others are at its start, after the shared opening token.
    cut = message.start if random.uniform() < 0.25 else random.integer(message.start + 1, message.end - 2)
    kept = [_Message(m.start, m.end, False) for m in base.messages if m.end <= cut]
    return _Episode(base.tokens[:cut], base.logprobs[:cut], base.noise[:cut], kept), message.start


def _speak(episode: _Episode, keys: list[int], config: SyntheticConfig, random: _Random, open_at: int) -> None:
    """Sample an assistant message, or the rest of one that began at ``open_at`` (-1: a new one)."""
    if open_at < 0:
        _append(episode, _BEGIN_ASSISTANT)
        open_at = len(episode.tokens)
    # How much of the key has been repeated follows from the message so far, also where it was copied from a trial.
    copied = 0
    for symbol in episode.tokens[open_at:]:
        copied += symbol == keys[copied % len(keys)]
    while True:
        length = len(episode.tokens) - open_at
        previous = episode.tokens[-1]
        end = 0.0 if length < config.message_tokens // 2 else _END_GIVEN_LONG
        end = 1.0 if length >= config.message_tokens - 1 else end
        probability = {_END_ASSISTANT: end}
        spoken = previous - _FIRST_SPOKEN if previous >= _FIRST_SPOKEN else _NUM_SPOKEN - 1
        follow, copy = _FIRST_SPOKEN + (spoken + 1) % _NUM_SPOKEN, keys[copied % len(keys)]
        shares = [(follow, 1 - _COPY - _NOISE), (copy, _COPY)]
        shares += [(_FIRST_SPOKEN + i, _NOISE / _NUM_SPOKEN) for i in range(_NUM_SPOKEN)]
        for symbol, share in shares:
            probability[symbol] = probability.get(symbol, 0.0) + (1 - end) * share
        draw, chosen = random.uniform(), _END_ASSISTANT
        for symbol, share in probability.items():
            chosen = symbol if share > 0 else chosen
            draw -= share
            if draw < 0:
                break
        copied += chosen == copy
        _append(episode, chosen, math.log(probability[chosen]), chosen not in (_END_ASSISTANT, follow, copy))
        if chosen == _END_ASSISTANT:
            episode.messages.append(_Message(open_at, len(episode.tokens), True))
            return


def _answer(episode: _Episode, config: SyntheticConfig, random: _Random) -> None:
    """Append a tool result, which is not trained."""
    _append(episode, _BEGIN_TOOL)
    for _ in range(random.integer(config.tool_tokens // 2, config.tool_tokens - 1)):
        _append(episode, _FIRST_TOOL + random.integer(0, _NUM_TOOL - 1))


def _append(episode: _Episode, symbol: int, logprob: float = 0.0, noise: bool = False) -> None:
    episode.tokens.append(symbol)
    episode.logprobs.append(logprob)
    episode.noise.append(noise)


def _noise_share(episode: _Episode) -> float:
    sampled = sum(message.end - message.start for message in episode.messages)
    return sum(episode.noise) / sampled


@dataclass(frozen=True, kw_only=True)
class _Command(SyntheticConfig):
    out: Path
    """File to write, .parquet or .jsonl."""


def main() -> None:
    """Write synthetic rollouts from the command line."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    settings = dataclasses.asdict(tyro.cli(_Command, description=__doc__))
    write_synthetic(settings.pop("out"), **settings)


if __name__ == "__main__":
    main()
