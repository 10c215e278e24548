"""Metrics of a batch and its mini-batches that are known before training on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl

from pipelines.statistics.metrics import USED, rollout_metrics, trajectories
from schemas.metadata import Outcome
from schemas.run_metrics import GENERATED
from trainer.batches.data import Batch
from trainer.batches.plan import Plan
from trainer.run.batch_advantages import Estimates


def generated_rows(rollouts: pl.LazyFrame, groups: Sequence[str]) -> pl.DataFrame:
    """Read the rows of the given groups for `sequence_metrics`, in the order of the dataset."""
    chosen = rollouts.filter(pl.col("instance_id").is_in(list(groups)))
    used = [name for name in USED if name in rollouts.collect_schema()]
    return chosen.select(used).collect()


def sequence_metrics(rows: pl.DataFrame, outcome: Outcome, *, merges: bool) -> dict[str, float]:
    """Compute SkyRL's metrics of a batch as generated: per turn, before merging.

    If turns will be merged, the metrics include the number of turns.
    """
    found = rollout_metrics(rows, per="step", outcome=outcome)
    metrics = {n: v for n, v in found.items() if n.startswith(GENERATED)}
    if merges:
        turns = trajectories(rows, outcome).select(pl.col("step_tokens").list.len().sum())
        metrics["generate/num_seq_before_merge"] = turns.collect().item()
    return metrics


def batch_metrics(
    plan: Plan, batch: Batch, groups: Sequence[str], estimates: Estimates
) -> list[dict[str, Any]]:
    """Compute counts, rewards and advantages of each mini-batch of a batch.

    Failed trajectories have no return and are excluded from means; a mean of no values is None.
    """
    trajectories = plan.trajectories.filter(pl.col("instance_id").is_in(list(groups)))
    value, trains = pl.col("return").filter(~pl.col("failed")), pl.col("trains")
    counts = trajectories.group_by("mini_batch").agg(
        pl.col("instance_id").n_unique().alias("num_groups"),
        pl.len().alias("num_trajectories"),
        pl.col("failed").sum().alias("num_failed"),
        (~trains).sum().alias("num_masked"),
        value.mean().alias("return_mean"),
        value.mean().alias("reward/avg_raw_reward"),
        value.clip(lower_bound=0).mean().alias("reward/mean_positive_reward"),
        pl.col("return").filter(trains).mean().alias("loss/avg_final_rewards"),
    )
    counts = counts.join(_passed(trajectories), on="mini_batch", how="left").sort("mini_batch")
    num_rows = np.bincount(batch.mini_batch).tolist()
    num_greedy, num_truncated = (
        np.bincount(batch.mini_batch, rows).astype(np.int64).tolist()
        for rows in (batch.greedy, batch.truncated)
    )
    return [
        row
        | {"num_rows": num_rows[number], "num_greedy_rows": num_greedy[number]}
        | {"num_truncated_rows": num_truncated[number]}
        | _raw_advantages(batch, estimates, number)
        for row in counts.to_dicts()
        for number in [row.pop("mini_batch")]
    ]


def _passed(trajectories: pl.DataFrame) -> pl.DataFrame:
    """Compute the fraction of groups with a return above 0 in each mini-batch."""
    known = trajectories.filter(~pl.col("failed"))
    groups = known.group_by("mini_batch", "instance_id").agg(passed=(pl.col("return") > 0).any())
    share = pl.col("passed").mean().alias("reward/avg_pass_at_n")
    return groups.group_by("mini_batch").agg(share)


def _raw_advantages(batch: Batch, estimates: Estimates, number: int) -> dict[str, float | None]:
    row = np.repeat(np.arange(len(batch.names)), batch.responses.lengths)
    found = estimates.raw.numpy()[batch.trains & (batch.mini_batch == number)[row]]
    mean = float(found.mean()) if len(found) else None
    size = float(np.abs(found).mean()) if len(found) else None
    return {"loss/avg_raw_advantages": mean, "loss/avg_raw_advantages_abs": size}
