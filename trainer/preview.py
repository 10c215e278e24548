"""What a run would do, after every check that it makes before its first update."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainer.begin import Run, begin
from trainer.config import TrainConfig
from trainer.data import read_rows, to_batch
from trainer.forest import chain_lengths
from trainer.memory import Memory, estimate_memory
from trainer.packing import cut_batch
from trainer.plan import Plan, num_planned_updates
from trainer.prefetch import one_ahead

LAYOUTS: dict[str, dict[str, Any]] = {
    "step": {"sequence_layout": "step"},
    "merge": {"sequence_layout": "merge"},
    "tree_per_trajectory": {"sequence_layout": "tree", "tree_scope": "trajectory"},
    "tree_per_group": {"sequence_layout": "tree", "tree_scope": "group"},
}
"""What a run can forward, by the settings that ask for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """What one pass over the dataset forwards with gradient in a layout.

    Attributes:
        num_sequences: Rows of which a token trains.
        num_tokens: Tokens to forward: up to the last one of each row that a target needs.
        repeated_share: Tokens forwarded over distinct ones, less 1; None: rows are chains.
        longest_tokens: Those of the longest row.
        micro_batches: Forwards of each update that has any.
        largest_micro_batch_tokens: Tokens of the largest of them.
    """

    num_sequences: int
    num_tokens: int
    repeated_share: float | None
    longest_tokens: int
    micro_batches: tuple[int, ...]
    largest_micro_batch_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DryRun:
    """What `rollouts train --dry-run` reports.

    Attributes:
        num_groups: Groups in the plan.
        num_trajectories: Their trajectories.
        num_failed: Those that failed.
        num_masked: Those that do not train: they failed, or are masked with their group.
        num_groups_without_variance: As in `Plan`.
        num_partial_groups: As in `Plan`.
        num_batches: Batches in one pass over the dataset.
        num_epochs: Passes over the dataset.
        num_mini_batches: Mini-batches of one pass over the dataset, `epochs_per_batch` counted.
        num_updates: Most optimizer steps that the run makes.
        num_updates_made: Those it has made before, if it is resumed.
        num_trained_tokens: Response tokens in the loss of one pass over the dataset.
        trained_layout: The one of `layouts` that the run trains in.
        layouts: Of one pass, by layout.
        max_row_tokens: The longest row that can be forwarded.
        memory: Of one process.
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
    trained_layout: str
    layouts: dict[str, Layout]
    max_row_tokens: int
    memory: Memory


def dry_run(config: TrainConfig, *, resume: bool = False) -> DryRun:
    """Plan, check and load a run as `train` does; count what it would forward; write nothing.

    The dataset is read once more for each layout, batch by batch, to count what it forwards.

    Raises:
        RolloutError: What `train` refuses.
    """
    run = begin(config, resume=resume)
    counts = {name: _count(run, settings) for name, settings in LAYOUTS.items()}
    layouts = {name: layout for name, (layout, _) in counts.items()}
    is_tree = config.sequence_layout == "tree"
    trained = f"tree_per_{config.tree_scope}" if is_tree else config.sequence_layout
    chosen = layouts[trained]
    return DryRun(
        **_counts(run.plan),
        num_epochs=config.num_epochs,
        num_mini_batches=len(chosen.micro_batches) * config.epochs_per_batch,
        num_updates=num_planned_updates(run.plan, config),
        num_updates_made=run.progress.global_step,
        num_trained_tokens=counts[trained][1],
        trained_layout=trained,
        layouts=layouts,
        max_row_tokens=run.limit.num_tokens,
        memory=estimate_memory(run, chosen.largest_micro_batch_tokens),
    )


def _counts(plan: Plan) -> dict[str, int]:
    table = plan.trajectories
    return {
        "num_groups": sum(map(len, plan.batches)),
        "num_trajectories": len(table),
        "num_failed": int(table["failed"].sum()),
        "num_masked": int((~table["trains"]).sum()),
        "num_groups_without_variance": plan.num_groups_without_variance,
        "num_partial_groups": plan.num_partial_groups,
        "num_batches": len(plan.batches),
    }


def _count(run: Run, settings: dict[str, Any]) -> tuple[Layout, int]:
    """What one pass forwards in a layout, and the tokens that train."""
    config = dataclasses.replace(run.learner.config, **settings)
    num_trained, lengths = 0, [np.zeros(0, np.int64)]
    parts: list[tuple[list[int], int | None]] = []
    tables = one_ahead(
        lambda groups: read_rows(run.rollouts, run.plan, groups, config.sequence_layout),
        run.plan.batches,
    )
    for batch in map(to_batch, tables):
        num_trained += int(batch.trains.sum())
        lengths.append(chain_lengths(batch.prompts, batch.responses, batch.trains))
        run.limit.check(lengths[-1], batch.names)
        found = cut_batch(batch, config, run.learner.accelerator.num_processes)
        parts += [([f.num_tokens for f in p.forests], p.num_distinct_tokens) for p in found]
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
