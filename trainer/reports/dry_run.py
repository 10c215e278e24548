"""Report what a run would do, and its peak memory, after all checks that precede its first update."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainer.batch import cut_batch, read_rows, to_batch
from trainer.batches.forest import chain_lengths
from trainer.batches.overlap import one_ahead
from trainer.config.functions import Function
from trainer.config.train_config import TrainConfig, resolved, uses
from trainer.run.memory import Memory, available_bytes, estimate_memory
from trainer.run.messages import say
from trainer.run.open_run import open_run
from trainer.run.run import Run

LAYOUTS: dict[str, dict[str, Any]] = {
    "step": {"sequence_layout": "step"},
    "merge": {"sequence_layout": "merge"},
    "tree_per_trajectory": {"sequence_layout": "tree", "tree_scope": "trajectory"},
    "tree_per_group": {"sequence_layout": "tree", "tree_scope": "group"},
}
"""Layouts in which a run can forward rows, and the settings that select them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Counts for one epoch in one layout; only forward passes with gradients are counted.

    Attributes:
        num_sequences: Rows with trained tokens.
        num_tokens: Tokens to forward: in each row, all tokens before its last trained token.
        repeated_share: Tokens to forward divided by distinct tokens, minus 1; None if rows are
            chains.
        longest_tokens: Tokens of the longest row.
        micro_batches: Number of micro-batches with trained tokens, for each update.
        largest_micro_batch_tokens: Tokens of the largest micro-batch.
    """

    num_sequences: int
    num_tokens: int
    repeated_share: float | None
    longest_tokens: int
    micro_batches: tuple[int, ...]
    largest_micro_batch_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DryRun:
    """Result of `rollouts train --dry-run`.

    Attributes:
        num_groups: Groups in the plan.
        num_trajectories: Trajectories in the plan.
        num_failed: Failed trajectories.
        num_masked: Trajectories excluded from training, because they failed or their group is
            masked.
        num_groups_without_variance: As in `Plan`.
        num_partial_groups: As in `Plan`.
        num_batches: Batches in one pass over the dataset.
        num_epochs: Passes over the dataset.
        num_mini_batches: Mini-batches in one pass over the dataset, times `epochs_per_batch`.
        num_updates: Maximum number of optimizer steps of the run.
        num_updates_made: Optimizer steps taken before resuming.
        num_trained_tokens: Response tokens in the loss in one pass over the dataset.
        record_tokens: Configured value of `record_tokens`.
        trained_layout: Key in `layouts` of the layout with which the run trains.
        layouts: Counts for one pass over the dataset, by layout.
        max_row_tokens: Maximum row length: the configured one, or the model's if that is smaller.
        memory: Memory of one process.
        available_bytes: Memory that was free on the device once the models were loaded; None if
            unknown.
        functions: Policy loss, advantage estimator and reduction, by key, with the values of their
            keys. There is no estimator if the loss uses no advantages.
    """

    num_groups: int
    num_trajectories: int
    num_failed: int
    num_masked: int
    num_groups_without_variance: int
    num_partial_groups: int
    num_batches: int
    num_epochs: int
    num_mini_batches: int
    num_updates: int
    num_updates_made: int
    num_trained_tokens: int
    record_tokens: str
    trained_layout: str
    layouts: dict[str, Layout]
    max_row_tokens: int
    memory: Memory
    available_bytes: int | None
    functions: dict[str, Function]


def dry_run(config: TrainConfig, *, resume: bool = False) -> DryRun:
    """Plan, check and load a run as `train` does, and count the tokens to forward; write nothing.

    Counting reads the dataset once per layout, batch by batch. To measure activations, three short
    chains are forwarded (`estimate_memory`). A model directory without weights will do: then only
    the shapes of its weights are used. The duration of each stage is logged.

    Raises:
        RolloutError: All errors that `train` raises before its first update.
    """
    began = time.perf_counter()
    needs_weights = resume or _has_weights(config.model.path)
    run = open_run(config, resume=resume, needs_weights=needs_weights)
    if not needs_weights:
        say(f"note: {config.model.path} has no weights: memory follows from its config.json")
    loaded = time.perf_counter()
    counts = {name: _count(run, settings) for name, settings in LAYOUTS.items()}
    layouts = {name: layout for name, (layout, _) in counts.items()}
    is_tree = config.batch.sequence_layout == "tree"
    trained = f"tree_per_{config.batch.tree_scope}" if is_tree else config.batch.sequence_layout
    chosen = layouts[trained]
    plan, trajectories = run.plan, run.plan.trajectories
    counted = time.perf_counter()
    memory = estimate_memory(run, chosen.largest_micro_batch_tokens)
    say(
        f"note: checking and loading took {loaded - began:.1f} s (as it will in training); counting"
        f" tokens in {len(LAYOUTS)} layouts took {counted - loaded:.1f} s, and measuring activations"
        f" {time.perf_counter() - counted:.1f} s"
    )
    return DryRun(
        num_groups=sum(map(len, plan.batches)),
        num_trajectories=len(trajectories),
        num_failed=int(trajectories["failed"].sum()),
        num_masked=int((~trajectories["trains"]).sum()),
        num_groups_without_variance=plan.num_groups_without_variance,
        num_partial_groups=plan.num_partial_groups,
        num_batches=len(plan.batches),
        num_epochs=config.batch.num_epochs,
        num_mini_batches=len(chosen.micro_batches) * config.batch.epochs_per_batch,
        num_updates=run.num_planned,
        num_updates_made=run.progress.global_step,
        num_trained_tokens=counts[trained][1],
        record_tokens=config.run.record_tokens,
        trained_layout=trained,
        layouts=layouts,
        max_row_tokens=min(
            run.row_limit.num_tokens, run.config.batch.max_row_tokens or run.row_limit.num_tokens
        ),
        memory=memory,
        available_bytes=available_bytes(run.accelerator.device),
        functions=uses(run.config),
    )


def _count(run: Run, settings: dict[str, Any]) -> tuple[Layout, int]:
    """Count the sequences and tokens that one pass forwards in a layout, and the trained tokens."""
    wanted = dataclasses.replace(run.config.batch, **settings)
    config = resolved(dataclasses.replace(run.config, batch=wanted)).batch
    num_trained, lengths = 0, [np.zeros(0, np.int64)]
    parts: list[tuple[list[int], int | None]] = []
    tables = one_ahead(
        lambda groups: read_rows(run.rollouts, run.plan, groups, config), run.plan.batches
    )
    imitates = run.config.loss.is_supervised
    for table in tables:
        batch = to_batch(table, config.max_row_tokens, imitates=imitates, pictures=run.pictures)
        num_trained += int(batch.trains.sum())
        lengths.append(chain_lengths(batch.prompts, batch.responses, batch.trains))
        run.row_limit.check(lengths[-1], batch.names)
        mini_batches = cut_batch(batch, config)
        parts += [([f.num_tokens for f in p.forests], p.num_distinct_tokens) for p in mini_batches]
    whole, sizes = np.concatenate(lengths), [size for part, _ in parts for size in part]
    distinct = sum(number or 0 for _, number in parts)
    layout = Layout(
        num_sequences=int((whole > 0).sum()),
        num_tokens=sum(sizes),
        repeated_share=sum(sizes) / distinct - 1 if distinct else None,
        longest_tokens=int(whole.max(initial=0)),
        micro_batches=tuple(len(part) for part, _ in parts),
        largest_micro_batch_tokens=max(sizes, default=0),
    )
    return layout, num_trained


def _has_weights(path: str) -> bool:
    """True unless a model directory has a configuration, but no file of weights."""
    names = [file.name for file in Path(path).iterdir()] if Path(path).is_dir() else []
    return "config.json" not in names or any(n.endswith((".safetensors", ".bin")) for n in names)
