"""What a run would do, after every check that it makes before its first update."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pipelines.savings import Cost, dataset_savings
from trainer.begin import Run, begin
from trainer.config import TrainConfig
from trainer.data import Batch, read_rows, to_batch
from trainer.forest import chain_lengths, pack
from trainer.memory import Memory, estimate_memory
from trainer.plan import Plan, num_planned_updates
from trainer.prefetch import one_ahead

LAYOUTS = ("step", "merge")
TREES = ("tree_per_trajectory", "tree_per_group")


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """What one pass over the dataset forwards with gradient in a layout.

    Attributes:
        trains: Whether `sequence_layout` can be this one.
        num_sequences: Rows or trees of which a token trains.
        num_tokens: Tokens to forward: up to the last one of each row that a target needs.
        longest_tokens: Those of the longest row; None for trees.
        micro_batches: Forwards of each update that has any; empty for trees.
        largest_micro_batch_tokens: Tokens of the largest of them; None for trees.
    """

    trains: bool
    num_sequences: int
    num_tokens: int
    longest_tokens: int | None = None
    micro_batches: tuple[int, ...] = ()
    largest_micro_batch_tokens: int | None = None


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
        sequence_layout: The layout that the run trains in.
        layouts: Of one pass, by layout; the trees are estimates.
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
    sequence_layout: str
    layouts: dict[str, Layout]
    max_row_tokens: int
    memory: Memory


def dry_run(config: TrainConfig, *, resume: bool = False) -> DryRun:
    """Plan, check and load a run as `train` does; count what it would forward; write nothing.

    The dataset is read twice more, batch by batch, to count what each layout forwards, and once for
    the trees, of which the estimate is `pipelines.dataset_savings`' ratio to separate steps.

    Raises:
        RolloutError: What `train` refuses.
    """
    run = begin(config, resume=resume)
    layouts, num_trained = {}, 0
    for name in LAYOUTS:
        layouts[name], num_trained = _count(run, name)
    savings = dataset_savings(config.dataset)
    layouts |= {name: _tree(savings[name], savings["step"], layouts["step"]) for name in TREES}
    chosen = layouts[config.sequence_layout]
    return DryRun(
        **_counts(run.plan),
        num_epochs=config.num_epochs,
        num_mini_batches=len(chosen.micro_batches) * config.epochs_per_batch,
        num_updates=num_planned_updates(run.plan, config),
        num_updates_made=run.progress.global_step,
        num_trained_tokens=num_trained,
        sequence_layout=config.sequence_layout,
        layouts=layouts,
        max_row_tokens=run.limit.num_tokens,
        memory=estimate_memory(run, chosen.largest_micro_batch_tokens or 0),
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


def _count(run: Run, sequence_layout: str) -> tuple[Layout, int]:
    """What one pass forwards in a layout, and the tokens that train."""
    num_trained, lengths, forwards, largest = 0, [np.zeros(0, np.int64)], [], 0
    tables = one_ahead(
        lambda groups: read_rows(run.rollouts, run.plan, groups, sequence_layout), run.plan.batches
    )
    for batch in map(to_batch, tables):
        num_trained += int(batch.trains.sum())
        lengths.append(chain_lengths(batch.prompts, batch.responses, batch.trains))
        run.limit.check(lengths[-1], batch.names)
        for sizes in _micro_batches(batch, run.learner.config):
            forwards.append(len(sizes))
            largest = max([largest, *sizes])
    whole = np.concatenate(lengths)
    layout = Layout(
        trains=True,
        num_sequences=int((whole > 0).sum()),
        num_tokens=int(whole.sum()),
        longest_tokens=int(whole.max(initial=0)),
        micro_batches=tuple(forwards),
        largest_micro_batch_tokens=largest,
    )
    return layout, num_trained


def _micro_batches(batch: Batch, config: TrainConfig) -> list[list[int]]:
    """Tokens of each micro-batch of each mini-batch."""
    lengths = chain_lengths(batch.prompts, batch.responses, batch.trains)
    found = []
    for number in range(int(batch.mini_batch.max(initial=-1)) + 1):
        mine = lengths[batch.mini_batch == number]
        bins = pack(mine, config.tokens_per_micro_batch)
        found.append([int(mine[rows].sum()) for rows in bins])
    return found


def _tree(tree: Cost, steps: Cost, trained: Layout) -> Layout:
    share = tree.num_tokens / steps.num_tokens if steps.num_tokens else 0.0
    return Layout(
        trains=False,
        num_sequences=tree.num_sequences,
        num_tokens=math.ceil(share * trained.num_tokens),
    )
