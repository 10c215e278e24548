"""What the mini-batches of a batch consist of, counted before they train."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl

from trainer.data import Batch
from trainer.estimate import Estimates
from trainer.plan import Plan


def batch_metrics(
    plan: Plan, batch: Batch, groups: Sequence[str], estimates: Estimates
) -> list[dict[str, Any]]:
    """Counts, rewards and advantages of each mini-batch.

    Failed trajectories have no return and enter none of the means; a mean over nothing is None.

    Args:
        plan: The run's plan.
        batch: A batch of it.
        groups: The groups of the batch.
        estimates: The batch's advantages.
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
    return [
        row | {"num_rows": num_rows[number]} | _raw_advantages(batch, estimates, number)
        for row in counts.to_dicts()
        for number in [row.pop("mini_batch")]
    ]


def _passed(trajectories: pl.DataFrame) -> pl.DataFrame:
    """Of each mini-batch the share of its groups in which a trajectory has a return above 0."""
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
