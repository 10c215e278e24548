"""Metrics of a batch that are known before training on it, and metrics of an update."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import polars as pl
import torch
from accelerate import Accelerator
from torch import Tensor

from pipelines.rewards import is_above
from pipelines.statistics.metrics import USED, rollout_metrics, trajectories
from rollout_io.dataset.reader import read_metadata
from rollout_io.formats.skyrl_fields import ROLLOUT_METRICS, aggregated
from schemas.errors import InputError
from schemas.run_metrics import GENERATED, LOOP_METRICS, METRICS, OWN_LOSS
from trainer.algorithms.losses import bounded_exp
from trainer.batch import Batch
from trainer.batches.plan import Plan
from trainer.config.functions import POLICY_LOSS
from trainer.config.train_config import TrainConfig
from trainer.distributed.processes import Pooled, over_processes

SPREADS = {
    "is_ratio": "std max min",
    "cispo/ratio": "max min",
}
"""Statistics reported in addition to the mean."""
NO_SHARE = ("loss", "policy_loss", "policy_entropy", "clip_ratio")
TAKEN = (OWN_LOSS, "eval/", "evaluation/")
"""Prefixes of further metrics of the trainer."""


def generated_rows(rollouts: pl.LazyFrame, groups: Sequence[str]) -> pl.DataFrame:
    """Read the rows of the given groups for `generated_metrics`, in the order of the dataset."""
    chosen = rollouts.filter(pl.col("instance_id").is_in(list(groups)))
    used = [name for name in (*USED, ROLLOUT_METRICS) if name in rollouts.collect_schema()]
    return chosen.select(used).collect()


def generated_per(dataset: str) -> Literal["step", "trajectory"]:
    """Return what SkyRL's metrics of a dataset average over: steps only if it is step-wise.

    A dataset of environments is step-wise if `history` was `step_wise`. Datasets of agents,
    harnesses, generators and logs have one row per call, and are step-wise.
    """
    verbs = (entry.get("config") for entry in read_metadata(dataset).made_by)
    configs = [c for c in verbs if isinstance(c, Mapping) and "history" in c]
    in_steps = ("agent", "harness", "generator")
    in_one_row = [
        c["history"] != "step_wise" and not any(c.get(name) for name in in_steps) for c in configs
    ]
    return "trajectory" if in_one_row and all(in_one_row) else "step"


def generated_metrics(
    stored: pl.DataFrame, config: TrainConfig, *, num_rows: int
) -> dict[str, float]:
    """Compute SkyRL's metrics of a batch as generated, before merging.

    They include `rollout_metrics` that a custom generator returned, except those that are computed
    here. If turns were merged, the metrics include the number of turns.

    Args:
        stored: From `generated_rows`.
        config: Configuration of the run.
        num_rows: Number of rows of the batch, after merging.
    """
    outcome = config.data.outcome or "last"
    figures = rollout_metrics(stored, per=generated_per(config.data.dataset), outcome=outcome)
    metrics = {name: value for name, value in figures.items() if name.startswith(GENERATED)}
    if ROLLOUT_METRICS in stored.columns:
        theirs = aggregated(stored[ROLLOUT_METRICS].drop_nulls())
        metrics = {_free_name(name): value for name, value in theirs.items()} | metrics
    metrics["generate/batch_num_seq"] = num_rows
    if config.batch.sequence_layout == "merge":
        turns = trajectories(stored, outcome).select(pl.col("step_tokens").list.len().sum())
        metrics["generate/num_seq_before_merge"] = turns.collect().item()
        metrics["generate/num_seq_after_merge"] = num_rows
    return metrics


def batch_metrics(
    accelerator: Accelerator, plan: Plan, batch: Batch, groups: Sequence[str]
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
    ).row(0, named=True) | _raw_advantages(accelerator, batch)
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
    succeeded = trajectories.filter(~pl.col("failed"))
    groups = succeeded.group_by("instance_id").agg(passed=is_above(pl.col("return"), 0.0).any())
    return groups.select(pl.col("passed").mean())["passed"]


def _raw_advantages(accelerator: Accelerator, batch: Batch) -> dict[str, float | None]:
    assert batch.raw_advantages is not None
    raw = batch.raw_advantages.numpy()[batch.trains]
    # A mean of float32 times fewer than 2^29 tokens is exact in float64.
    sums = [float(values.mean()) * len(raw) if len(raw) else 0.0 for values in (raw, np.abs(raw))]
    mean, size, number = over_processes(accelerator, [*sums, len(raw)], "sum").tolist()
    names = {"loss/avg_raw_advantages": mean, "loss/avg_raw_advantages_abs": size}
    return {name: total / number if number else None for name, total in names.items()}


def _free_name(name: str) -> str:
    """Return the name under which a generator's metric is logged: not one of the trainer's."""
    is_taken = name in METRICS or name in LOOP_METRICS or name.startswith(TAKEN)
    return f"{GENERATED[0]}{name}" if is_taken else name


def update_metrics(
    accelerator: Accelerator, parts: Sequence[Mapping[str, Tensor]], loss_name: str
) -> dict[str, float]:
    """Combine the metrics of all micro-batches: sum the loss terms, and average other metrics.

    `parts` are the columns of this process's micro-batches.
    """
    names = parts[0] if parts else dict.fromkeys(NO_SHARE)
    for part in parts:
        if part.keys() != names.keys():
            raise _other_names(part.keys() ^ names.keys(), loss_name)
    columns = {name: torch.cat([torch.zeros(0), *(part[name] for part in parts)]) for name in names}
    _refuse_other_names(accelerator, columns, loss_name)
    metrics: dict[str, float] = {}
    for name in ("loss", "policy_loss", "policy_kl"):
        if name in columns:
            metrics[name] = Pooled(accelerator, columns.pop(name)).sum
    difference = columns.pop("rollout_logprobs_diff", torch.zeros(0, dtype=torch.float64))
    metrics |= agreement(difference, accelerator)
    for name, subject in SPREADS.items():
        values = Pooled(accelerator, columns.pop(name, torch.zeros(0)))
        if values.number and not values.has_nan:
            metrics[f"{name}_mean"] = values.mean
            spread = {"max": values.highest, "min": values.lowest, "std": values.deviation}
            metrics |= {f"{name}_{kind}": spread[kind] for kind in subject.split()}
    pools = {name: Pooled(accelerator, values) for name, values in columns.items()}
    return metrics | {name: pool.mean if pool.number else 0.0 for name, pool in pools.items()}


def _refuse_other_names(
    accelerator: Accelerator, columns: Mapping[str, Tensor], loss_name: str
) -> None:
    """Check that the processes have the same metrics; otherwise their exchanges would not match."""
    digest = zlib.crc32("\n".join(columns).encode())
    highest = over_processes(accelerator, [digest, -digest], "max")
    if highest[0] != -highest[1]:
        raise _other_names(columns, loss_name)


def _other_names(names: Iterable[str], loss_name: str) -> InputError:
    finding = (
        f"it returns the metrics {', '.join(sorted(names))} for some micro-batches, not for others"
    )
    return InputError(POLICY_LOSS.rule_id, loss_name, finding)


def agreement(difference: Tensor, accelerator: Accelerator | None = None) -> dict[str, float]:
    """Compute metrics of a mini-batch's log-probability differences; see `schemas.run_metrics`.

    The effective share of the tokens is Kish's effective sample size divided by the number of
    tokens. With the ratios r = exp(difference), it equals (sum of r)^2 / (M x sum of r^2). It is 1
    if all ratios are equal and 1/M if one token has all the weight. Source: Kish, "Survey sampling"
    (1965), section 11.2.

    Args:
        difference: [M] float64 nats, the trainer's minus the sampler's log-probability of each
            trained token of this process.
        accelerator: The Accelerator of the run; None: there is one process.

    Returns:
        Metrics by name; empty without tokens, or if any log-probability is NaN.

    Example:
        >>> found = agreement(torch.tensor([0.0, 0.0, -0.5, 0.1], dtype=torch.float64))
        >>> found["rollout_logprobs_diff_mean"], found["rollout_logprobs_abs_diff_mean"]
        (-0.1, 0.15)
    """
    signed = Pooled(accelerator, difference)
    if not signed.number or signed.has_nan:
        return {}
    distance, ratio = Pooled(accelerator, difference.abs()), bounded_exp(difference)
    share = Pooled(accelerator, ratio).sum ** 2 / (
        signed.number * Pooled(accelerator, ratio**2).sum
    )
    percentiles = (50, 90, 99)
    quantiles = distance.percentiles(percentiles)
    named = {f"p{p}": value for p, value in zip(percentiles, quantiles, strict=True)}
    named |= {"mean": distance.mean, "std": distance.deviation}
    named |= {"max": distance.highest, "min": distance.lowest}
    return {
        **{f"rollout_logprobs_abs_diff_{name}": value for name, value in named.items()},
        "rollout_logprobs_diff_mean": signed.mean,
        "is_effective_share": share,
    }
