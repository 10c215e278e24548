"""What deserves a warning: before a run, and once it goes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import polars as pl

from trainer.config import TrainConfig
from trainer.plan import Plan, num_groups_of_one

LARGE_DIFFERENCE_NATS = 0.3


def warnings_before(rows: pl.DataFrame, plan: Plan, config: TrainConfig) -> dict[str, str]:
    """What a person should know before the first update.

    Args:
        rows: The rows that train, one each as they lie in the dataset.
        plan: The run's plan.
        config: The run's configuration.

    Returns:
        Text for people by the name of its subject.
    """
    found = {}
    if plan.num_partial_groups and config.partial_groups == "train":
        found["partial_groups"] = (
            f"{plan.num_partial_groups} groups have another number of trajectories than"
            f" {plan.group_size}: where the lost ones are not lost by chance, baselines are biased"
            "\nhint: --set partial_groups=mask leaves such groups out of the loss"
        )
    if config.advantage_estimator == "rloo" and (alone := num_groups_of_one(plan)):
        found["groups_of_one"] = (
            f"{alone} groups of one: rloo has no others to compare with, they train nothing"
        )
    loss, reduction = config.policy_loss_type, config.loss_reduction
    if loss in ("gspo", "sapo") and reduction not in ("sequence_mean", "trajectory_mean"):
        found["loss_reduction"] = (
            f"{loss} is meant for loss_reduction sequence_mean (or trajectory_mean, which gives a"
            f" trajectory of several rows the weight of one); with {reduction} long rows weigh more"
        )
    if config.sequence_layout != "merge":
        found |= warnings_about_rows(len(rows), rows["trajectory_id"].n_unique(), config)
    return found


def differs_from_sampler(metrics: Mapping[str, Any]) -> bool:
    """Whether the policy's log-probabilities are far from the sampler's."""
    return bool(metrics.get("rollout_logprobs_abs_diff_mean", 0.0) > LARGE_DIFFERENCE_NATS)


def warnings_about(
    metrics: Mapping[str, Any], config: TrainConfig, cause: str | None = None
) -> dict[str, str]:
    """What a person should know about an update.

    Args:
        metrics: The update's metrics.
        config: The run's configuration.
        cause: What `trainer.causes.likely_cause` found, if it was asked.

    Returns:
        Text for people by the name of its subject; a run says each name once.

    Example:
        >>> update = {"num_trained_tokens": 9, "num_trained_groups": 0}
        >>> list(warnings_about(update, TrainConfig(dataset="ds", model="m", out="o")))
        ['zero_gradient']
    """
    found = {}
    if differs_from_sampler(metrics):
        found["rollout_logprobs"] = (
            "rollout_logprobs differ from the policy's own by"
            f" {metrics['rollout_logprobs_abs_diff_mean']:.2g} nats on average"
            + (f"\nlikely cause: {cause}" if cause else "")
        )
    if metrics["num_trained_tokens"] and not metrics["num_trained_groups"]:
        leave_out = "\nhint: drop_zero_variance_groups = true leaves such groups out"
        found["zero_gradient"] = (
            "every advantage of a mini-batch is 0 (no group whose rewards vary),"
            " so its update has a gradient of zero"
            + ("" if config.drop_zero_variance_groups else leave_out)
        )
    if config.sequence_layout == "merge":  # how many rows there are is known once they are merged
        found |= warnings_about_rows(
            metrics.get("num_rows", 0), metrics.get("num_trajectories", 0), config
        )
    return found


def warnings_about_rows(
    num_rows: int, num_trajectories: int, config: TrainConfig
) -> dict[str, str]:
    """What a trajectory in several rows changes, where something counts by row."""
    loss, reduction = config.policy_loss_type, config.loss_reduction
    by_row = {
        "policy_loss_type gspo: a ratio is the mean over a row": loss == "gspo",
        f"loss_reduction {reduction}: every row weighs the same": reduction
        in ("sequence_mean", "seq_mean_token_sum_norm"),
        "tis_ratio_type sequence: a weight is the product over a row": config.corrects_for_sampler
        and config.importance_weights == "sequence",
        "sequence_mask_metric: rows are left out one by one": config.sequence_mask_metric,
        "outlier_token_is_threshold: rows are left out one by one": (
            config.outlier_token_is_threshold_low or config.outlier_token_is_threshold_high
        ),
    }
    affected = "; ".join(text for text, applies in by_row.items() if applies)
    if not affected or num_rows <= num_trajectories:
        return {}
    return {
        "rows": f"{num_trajectories} trajectories are {num_rows} rows, and rows are what counts here"
        f" ({affected}): other numbers than with a trajectory in one row"
        + ("\nhint: --set sequence_layout=merge" if config.sequence_layout != "merge" else "")
    }
