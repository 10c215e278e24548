"""Generate multi-turn trajectories of chosen size for the benchmarks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from schemas.ragged import Ragged, gather, offsets_of

VOCAB_SIZE = 49_152


def growing_trajectories(
    num_trajectories: int, num_turns: int, tokens_per_turn: int, *, seed: int = 0
) -> pa.Table:
    """Generate steps whose prompts grow by the previous response and an observation, as in a chat.

    Half of each turn's tokens are observation, and half are response; ids follow Zipf's law.
    """
    rng = np.random.default_rng(seed)
    half = tokens_per_turn // 2
    prompts, responses = [], []
    for _ in range(num_trajectories):
        chat = (rng.zipf(1.3, num_turns * tokens_per_turn) % VOCAB_SIZE).astype(np.int32)
        for turn in range(num_turns):
            split = turn * tokens_per_turn + half
            prompts.append(chat[:split])
            responses.append(chat[split : split + half])
    return _table(prompts, responses, num_trajectories, num_turns, rng)


def short_trajectories(first: int, num: int, *, seed: int = 0) -> pa.Table:
    """Generate trajectories of 1 to 3 short steps, numbered from `first`, without Python lists.

    Eight trajectories form a group. Groups have random names, so ids are not sorted.
    """
    rng = np.random.default_rng([seed, first])
    steps = rng.integers(1, 4, num)
    bounds = offsets_of(steps)
    number = np.repeat(np.arange(first, first + num), steps)
    step = np.arange(len(number)) - np.repeat(bounds[:-1], steps)
    observed, answered = rng.integers(10, 60, (2, len(number)))
    ends = offsets_of(observed + answered)
    chat = (rng.zipf(1.3, int(ends[-1])) % VOCAB_SIZE).astype(np.int32)
    begins = np.repeat(ends[bounds[:-1]], steps)
    split = ends[:-1] + observed
    valid = np.ones(len(number), np.bool_)
    prompts = Ragged(gather(chat, begins, split - begins), offsets_of(split - begins), valid)
    response = Ragged(gather(chat, split, answered), offsets_of(answered), valid)
    name = number.astype(np.uint64) // 8 * np.uint64(0x9E3779B97F4A7C15)
    ids = pl.DataFrame({"name": name, "repetition": (number % 8).astype(np.int32)}).select(
        instance_id=pl.format("task-{}", "name"),
        repetition_id="repetition",
        trajectory_id=pl.format("task-{}_{}", "name", "repetition"),
    )
    last = np.append(step[1:] == 0, True)
    return _columns(ids.to_arrow(), step.astype(np.int32), last, prompts, response, rng)


def _table(
    prompts: list, responses: list, num: int, turns: int, rng: np.random.Generator
) -> pa.Table:
    step = np.tile(np.arange(turns, dtype=np.int32), num)
    instance = [f"task-{i // 8}" for i in range(num) for _ in range(turns)]
    repetition = [i % 8 for i in range(num) for _ in range(turns)]
    ids = pa.table(
        {
            "instance_id": pa.array(instance),
            "repetition_id": pa.array(repetition, pa.int32()),
            "trajectory_id": pa.array(
                [f"{i}_{r}" for i, r in zip(instance, repetition, strict=True)]
            ),
        }
    )
    return _columns(ids, step, step == turns - 1, _ragged(prompts), _ragged(responses), rng)


def _columns(
    ids: pa.Table,
    step: np.ndarray,
    last: np.ndarray,
    prompts: Ragged,
    response: Ragged,
    rng: np.random.Generator,
) -> pa.Table:
    logprobs = -rng.exponential(0.7, len(response.values)).astype(np.float32)
    mask = np.ones(len(response.values), np.bool_)
    return pa.table(
        {
            **{name: ids.column(name) for name in ids.column_names},
            "step_index": pa.array(step),
            "is_last_step": pa.array(last),
            "prompt_token_ids": prompts.to_arrow(pa.int32()),
            "response_ids": response.to_arrow(pa.int32()),
            "loss_mask": Ragged(mask, response.offsets, response.valid).to_arrow(pa.bool_()),
            "rollout_logprobs": Ragged(logprobs, response.offsets, response.valid).to_arrow(
                pa.float32()
            ),
            "reward": pa.array(np.where(last, rng.integers(0, 2, len(step)), 0).astype(float)),
            "token_source": pa.array(["engine"] * len(step)),
        }
    )


def _ragged(rows: list) -> Ragged:
    lengths = np.array([len(row) for row in rows], np.int64)
    return Ragged(np.concatenate(rows), offsets_of(lengths), np.ones(len(rows), np.bool_))


def best_of(runs: int, action: Callable[[], Any]) -> tuple[float, Any]:
    """Run an action several times; return its shortest time in seconds, and its last result."""
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        result = action()
        times.append(time.perf_counter() - start)
    return min(times), result


def best_of_each(runs: int, actions: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """Run actions in turn, several times; return the shortest time of each in seconds."""
    best = dict.fromkeys(actions, math.inf)
    for _ in range(runs):
        for name, action in actions.items():
            best[name] = min(best[name], best_of(1, action)[0])
    return best


def num_tokens(table: pa.Table) -> int:
    return sum(
        len(Ragged.from_arrow(table.column(n)).values) for n in ("prompt_token_ids", "response_ids")
    )
