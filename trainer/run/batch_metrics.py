"""Metrics of a batch and its mini-batches that are known before training on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import polars as pl

from pipelines.statistics.metrics import USED, rollout_metrics, trajectories
from rollout_io.dataset.reader import read_metadata
from rollout_io.formats.skyrl_rollout_metrics import ROLLOUT_METRICS, aggregated
from schemas.metadata import Outcome
from schemas.run_metrics import GENERATED, LOOP_METRICS, METRICS, OWN_LOSS
from trainer.batches.data import Batch
from trainer.batches.plan import Plan
from trainer.run.batch_advantages import Estimates

TAKEN = (OWN_LOSS, "eval/", "evaluation/")
"""Prefixes of further metrics of the trainer."""


def generated_rows(rollouts: pl.LazyFrame, groups: Sequence[str]) -> pl.DataFrame:
    """Read the rows of the given groups for `sequence_metrics`, in the order of the dataset."""
    chosen = rollouts.filter(pl.col("instance_id").is_in(list(groups)))
    used = [name for name in (*USED, ROLLOUT_METRICS) if name in rollouts.collect_schema()]
    return chosen.select(used).collect()


@lru_cache(maxsize=8)
def generated_per(dataset: str) -> Literal["step", "trajectory"]:
    """Return what SkyRL's metrics of a dataset average over: steps only if it is step-wise.

    A dataset of environments is step-wise if `history` was `step_wise`. Datasets of agents,
    harnesses, generators and logs have one row per call, and are step-wise.
    """
    configs = [made["config"] for made in read_metadata(dataset).made_by if _has_history(made)]
    own = ("agent", "harness", "generator")
    in_one_row = [
        c["history"] != "step_wise" and not any(c.get(name) for name in own) for c in configs
    ]
    return "trajectory" if in_one_row and all(in_one_row) else "step"


def _has_history(made: Mapping[str, Any]) -> bool:
    config = made.get("config")
    return isinstance(config, Mapping) and "history" in config


def sequence_metrics(
    rows: pl.DataFrame, outcome: Outcome, per: Literal["step", "trajectory"], *, merges: bool
) -> dict[str, float]:
    """Compute SkyRL's metrics of a batch as generated, before merging.

    They include `rollout_metrics` that a custom generator returned, except those that are computed
    here. If turns will be merged, the metrics include the number of turns.

    Args:
        rows: From `generated_rows`.
        outcome: How returns are computed.
        per: From `generated_per`.
        merges: True if turns will be merged.
    """
    found = rollout_metrics(rows, per=per, outcome=outcome)
    metrics = {n: v for n, v in found.items() if n.startswith(GENERATED)}
    if ROLLOUT_METRICS in rows.columns:
        theirs = aggregated(rows[ROLLOUT_METRICS].drop_nulls())
        metrics = {_free_name(name): value for name, value in theirs.items()} | metrics
    if merges:
        turns = trajectories(rows, outcome).select(pl.col("step_tokens").list.len().sum())
        metrics["generate/num_seq_before_merge"] = turns.collect().item()
    return metrics


def batch_metrics(
    plan: Plan, batch: Batch, groups: Sequence[str], estimates: Estimates
) -> list[dict[str, Any]]:
    """Compute counts and rewards of each mini-batch, and SkyRL's rewards and advantages of the batch.

    Metrics with SkyRL's names (`reward/...`, `loss/...`) are about the entire batch, as in SkyRL,
    and are the same for each of its mini-batches.

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
    )
    counts = counts.sort("mini_batch")
    whole = trajectories.select(
        value.mean().alias("reward/avg_raw_reward"),
        value.clip(lower_bound=0).mean().alias("reward/mean_positive_reward"),
        _passed(trajectories).alias("reward/avg_pass_at_n"),
        pl.col("return").filter(trains).mean().alias("loss/avg_final_rewards"),
    ).row(0, named=True) | _raw_advantages(batch, estimates)
    num_rows = np.bincount(batch.mini_batch).tolist()
    num_greedy, num_truncated = (
        np.bincount(batch.mini_batch, rows).astype(np.int64).tolist()
        for rows in (batch.greedy, batch.truncated)
    )
    return [
        row
        | {"num_rows": num_rows[number], "num_greedy_rows": num_greedy[number]}
        | {"num_truncated_rows": num_truncated[number]}
        | whole
        for row in counts.to_dicts()
        for number in [row.pop("mini_batch")]
    ]


def _passed(trajectories: pl.DataFrame) -> pl.Series:
    """[1] Compute the fraction of groups with a return above 0."""
    known = trajectories.filter(~pl.col("failed"))
    groups = known.group_by("instance_id").agg(passed=(pl.col("return") > 0).any())
    return groups.select(pl.col("passed").mean())["passed"]


def _raw_advantages(batch: Batch, estimates: Estimates) -> dict[str, float | None]:
    found = estimates.raw.numpy()[batch.trains]
    mean = float(found.mean()) if len(found) else None
    size = float(np.abs(found).mean()) if len(found) else None
    return {"loss/avg_raw_advantages": mean, "loss/avg_raw_advantages_abs": size}


def _free_name(name: str) -> str:
    """Return the name under which a generator's metric is logged: not one of the trainer's."""
    is_taken = name in METRICS or name in LOOP_METRICS or name.startswith(TAKEN)
    return f"{GENERATED[0]}{name}" if is_taken else name
