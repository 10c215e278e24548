"""Warn, before sampling, about rows that would take too much memory or time to train on."""

from __future__ import annotations

from collections.abc import Iterator

from rollout_io.terminal import duration
from trainer.batches.forest import RowLimit
from trainer.distributed.sharding import is_sharded
from trainer.reports.memory_estimate import available_bytes, estimate_memory, seconds_per_token
from trainer.rl.config import RlConfig
from trainer.run.open_run import OpenModels
from trainer.run.passes import COST, TRAINING

GIB = 1 << 30
SLOW_UPDATE_S = 120.0
"""Minimum duration of an update, in seconds, for which a note is shown."""


def longest_row(config: RlConfig, limit: RowLimit) -> int:
    """Return the largest number of tokens that a row may have."""
    generation, training = config.generation, config.training
    most = min(limit.num_tokens, training.batch.max_row_tokens or limit.num_tokens)
    if generation.max_input_tokens is not None:
        most = min(most, generation.max_input_tokens + generation.max_response_tokens)
    return most


def notes_of_size(config: RlConfig, models: OpenModels) -> Iterator[str]:
    """Yield notes about the memory and time of an update whose rows have the maximum length.

    On a CPU, both are measured on short chains. On a GPU, where the first forward pass may compile
    for minutes, nothing is measured: the note only warns about rows longer than a micro-batch.
    """
    training, most = config.training, longest_row(config, models.limit)
    budget, device = training.batch.tokens_per_micro_batch, models.learner.accelerator.device
    if device.type != "cpu":
        if most > budget:
            yield (
                f"note: rows may have up to {most} tokens; rows longer than"
                f" batch.tokens_per_micro_batch ({budget}) are forwarded in separate micro-batches,"
                " which need more memory"
            )
        return
    if is_sharded(models.learner.policy):
        return  # autograd's memory cannot be measured
    num_rows = training.batch.groups_per_mini_batch * config.generation.group_size
    largest = min(max(most, budget), num_rows * most)
    needed = estimate_memory(models, largest).still_needed
    free = available_bytes(device)
    num_processes = models.learner.accelerator.num_processes
    seconds = num_rows * most * COST[TRAINING] * seconds_per_token(models) / num_processes
    found = []
    if free is not None and needed > free:
        found.append(
            f"a micro-batch of {largest:,} tokens needs about {needed / GIB:,.1f} GiB of memory, but"
            f" {free / GIB:,.1f} GiB are free"
        )
    if seconds > SLOW_UPDATE_S:
        rows = f"{num_rows:,} rows of that length"
        found.append(f"an update on {rows} takes at least {duration(seconds)} on this CPU")
    if not found:
        return
    keys = []
    if largest > most:
        keys.append("batch.tokens_per_micro_batch for smaller micro-batches")
    if config.generation.max_input_tokens is None:
        keys.append("generate.max_input_tokens to end longer trajectories")
    keys.append("batch.max_row_tokens to truncate rows")
    yield (
        f"note: rows may have up to {most:,} tokens ({models.limit.reason}); {', and '.join(found)}."
        f" If your rows get that long, set {', or '.join(keys)}"
    )
