"""Warnings before and during training, and the likely cause of a mismatch with the sampler."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor

from schemas.errors import count
from trainer.batch import Batch
from trainer.batches.forest import FILLER, Forest
from trainer.batches.plan import Plan, num_groups_of_one
from trainer.config.functions import ADVANTAGE_ESTIMATOR, LOSS_REDUCTION
from trainer.config.train_config import TrainConfig
from trainer.distributed.processes import over_processes
from trainer.loss import policy_logprobs
from trainer.run.metrics import agreement
from trainer.run.run import Run

LARGE_DIFFERENCE_NATS = 0.3
SMALL_DIFFERENCE_NATS = 0.05
"""Differences up to this size are usual for sampling in bfloat16; no cause is looked for."""


def warnings_before(rows: pl.DataFrame, plan: Plan, config: TrainConfig) -> dict[str, str]:
    """Return the warnings to show before the first update, keyed by subject.

    `rows` are the rows to train on, as stored in the dataset.
    """
    warnings = {}
    if plan.num_partial_groups and config.data.partial_groups == "train":
        warnings["partial_groups"] = (
            f"the number of trajectories is not {plan.group_size} in"
            f" {count(plan.num_partial_groups, 'group')}: baselines are biased unless trajectories are"
            " missing at random\nHint: pass --set data.partial_groups=mask to leave these groups out of the loss"
        )
    is_built_in = config.advantage.estimator in ADVANTAGE_ESTIMATOR.built_in
    if config.compares_groups and (alone := num_groups_of_one(plan)):
        warnings["groups_of_one"] = (
            f"only one trajectory is trained on in {alone} of {count(sum(map(len, plan.batches)), 'group')}:"
            f" {config.advantage.estimator} has no other trajectory to compare it with"
            + (", so its advantage is 0" if is_built_in else "")
        )
    budget = config.batch.tokens_per_micro_batch
    lengths = rows["num_forwarded_tokens"].clip(upper_bound=config.batch.max_row_tokens).to_numpy()
    if num_long := int((lengths > budget).sum()):
        warnings["long_rows"] = (
            f"rows longer than tokens_per_micro_batch ({budget}) are forwarded in separate"
            f" micro-batches, which need more memory: {count(num_long, 'row')}, up to"
            f" {lengths.max()} tokens"
        )
    loss, reduction = config.loss.policy_loss_type, config.loss.reduction
    if loss in ("gspo", "sapo") and reduction not in ("sequence_mean", "trajectory_mean"):
        warnings["loss_reduction"] = (
            f"{loss} is designed for loss.reduction sequence_mean (or trajectory_mean, where the weight"
            f" of a trajectory does not depend on its rows); with {reduction}, long rows weigh more"
        )
    if config.batch.sequence_layout != "merge":
        warnings |= warnings_about_rows(len(rows), rows["trajectory_id"].n_unique(), config)
    return warnings


def warnings_about(metrics: Mapping[str, Any], config: TrainConfig) -> dict[str, str]:
    """Return warnings about an update, keyed by subject; a run prints each subject once.

    Example:
        >>> from trainer.config.sections import DataConfig, ModelConfig, RunConfig
        >>> paths = {"data": DataConfig(dataset="ds"), "model": ModelConfig(path="m")}
        >>> paths["run"] = RunConfig(out="o")
        >>> update = {"num_trained_tokens": 9, "num_trained_groups": 0}
        >>> list(warnings_about(update, TrainConfig(**paths)))
        ['zero_gradient']
    """
    warnings = {}
    difference = metrics.get("rollout_logprobs_abs_diff_mean", 0.0)
    if difference > LARGE_DIFFERENCE_NATS:
        warnings[MISMATCH] = _differ(difference)
    if metrics["num_trained_tokens"] and not metrics["num_trained_groups"]:
        leave_out = "\nHint: pass --set data.drop_zero_variance_groups=true to leave groups with equal rewards out"
        warnings["zero_gradient"] = (
            "every advantage of the mini-batch is 0, because rewards do not vary within any group, so"
            " the gradient is zero; AdamW still moves the weights, by its momentum and weight decay"
            + ("" if config.data.drop_zero_variance_groups else leave_out)
        )
    elif metrics["num_trained_tokens"] and metrics.get("grad_norm") == 0:
        warnings["momentum"] = (
            "the gradient of an update is zero, but AdamW still moves the weights, by its momentum and"
            " weight decay"
        )
    if config.batch.sequence_layout == "merge":  # the number of rows is only known after merging
        num_rows, num_trajectories = metrics.get("num_rows", 0), metrics.get("num_trajectories", 0)
        warnings |= warnings_about_rows(num_rows, num_trajectories, config)
    return warnings


def warnings_about_rows(
    num_rows: int, num_trajectories: int, config: TrainConfig
) -> dict[str, str]:
    """Warn if splitting trajectories into several rows affects settings that work per row."""
    loss, reduction = config.loss.policy_loss_type, config.loss.reduction
    is_built_in = reduction in LOSS_REDUCTION.built_in
    by_row_weight = not config.loss.reduction_inputs.isdisjoint({"row", "num_rows"})
    by_row = {
        "policy_loss_type gspo: a ratio is the mean over a row": loss == "gspo",
        f"policy_loss_type {loss}: it uses the row of a token": config.loss.has_own_loss
        and "row" in config.loss.inputs,
        f"loss.reduction {reduction}: every row has the same weight": is_built_in and by_row_weight,
        f"loss.reduction {reduction}: it uses the row of a token": not is_built_in
        and by_row_weight,
        "tis_ratio_type sequence: a weight is the product over a row": config.loss.corrects_for_sampler
        and config.loss.importance_weights == "sequence",
        "sequence_mask_metric: rows are masked individually": config.loss.sequence_mask_metric,
        "outlier_token_is_threshold: rows are masked individually": (
            config.loss.outlier_token_is_threshold_low
            or config.loss.outlier_token_is_threshold_high
        ),
    }
    affected = "; ".join(text for text, applies in by_row.items() if applies)
    if not affected or num_rows <= num_trajectories:
        return {}
    return {
        "rows": f"trajectories ({num_trajectories}) are split into rows ({num_rows}), which changes the"
        f" effect of settings that work per row ({affected})"
        + (
            "\nHint: pass --set batch.sequence_layout=merge"
            if config.batch.sequence_layout != "merge"
            else ""
        )
    }


EXPLAINED = 1 / 3
"""A cause is reported only if undoing it reduces the difference to at most this fraction."""
TEMPERATURES = (1.0, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.5)
MISMATCH = "rollout_logprobs"
"""Subject of warnings that the policy's log-probabilities differ from the sampler's."""


def sampler_mismatch(run: Run, batch: Batch, forests: Sequence[Forest]) -> str | None:
    """Compare the policy with the sampler in one micro-batch of `forests`, before an update.

    Every process of the run must call this. If the log-probabilities differ by more than
    `SMALL_DIFFERENCE_NATS` on average, they are recomputed at other temperatures, and
    `rollout_logprobs` are shifted by one token. A cause is named if undoing it leaves at most a
    third of the difference.

    Returns:
        A warning if there is a likely cause, or if the difference exceeds `LARGE_DIFFERENCE_NATS`;
        None if not, or if a row of the micro-batch has no log-probabilities.
    """
    (first,) = [*forests, FILLER][:1]  # processes with fewer micro-batches must forward as many
    theirs = batch.rollout_logprobs
    if over_processes(run.accelerator, [int(theirs[first.target_slot].isnan().any())], "max")[0]:
        return None
    now = policy_logprobs(run, batch, [first])
    differences = agreement((now - theirs)[first.target_slot].double(), run.accelerator)
    before = differences.get("rollout_logprobs_abs_diff_mean", 0.0)
    if before <= SMALL_DIFFERENCE_NATS:
        return None
    distances = {**_misplaced(now, batch), **dict(_at_temperatures(run, batch, first))}
    cause = min(distances, key=lambda text: distances[text])
    reduced = f"undoing this reduces the difference to {distances[cause]:.2g} nats"
    if distances[cause] <= EXPLAINED * before:
        cause = f"{cause} ({reduced})"
    elif before <= LARGE_DIFFERENCE_NATS:
        return None
    else:
        cause = (
            "the weights differ from the sampler's (a different model, precision or update); neither"
            " a different temperature nor a shift by one token explains the difference"
        )
    audit = ["rollouts", "audit", run.config.data.dataset, "--weights", run.config.model.path]
    return (
        f"{_differ(before)} in one micro-batch\nlikely cause: {cause}"
        f"\nHint: `{shlex.join(audit)}` names the rows, and what is wrong with each"
    )


def _differ(nats: float) -> str:
    return (
        f"rollout_logprobs differ from the policy's log-probabilities by {nats:.2g} nats on average"
    )


def _misplaced(now: Tensor, batch: Batch) -> dict[str, float]:
    """Compute the difference that remains if log-probabilities are shifted by one token.

    Returns the mean absolute difference for each direction, by description of the cause.
    """
    row = torch.from_numpy(batch.responses.row_of(np.arange(len(now))))
    apart = torch.where(row[1:] == row[:-1], 0.0, torch.nan)
    theirs = batch.rollout_logprobs
    shifted = "rollout_logprobs are shifted by one: each belongs to the"
    return {
        f"{shifted} previous token": _distance(now[:-1] + apart, theirs[1:]),
        f"{shifted} next token": _distance(now[1:] + apart, theirs[:-1]),
    }


def _at_temperatures(run: Run, batch: Batch, forest: Forest) -> Iterator[tuple[str, float]]:
    recorded = sorted(set(batch.temperature[forest.target_slot].tolist()))
    noted = " and ".join(f"{value:g}" for value in recorded)
    for value in TEMPERATURES:
        temperature = torch.full_like(batch.temperature, value)
        other = dataclasses.replace(batch, temperature=temperature)
        logprobs = policy_logprobs(run, other, [forest])
        if recorded != [value]:
            text = f"rollout_logprobs are at temperature {value:g}, but the rows record {noted}"
            yield text, _distance(logprobs, batch.rollout_logprobs)


def _distance(ours: Tensor, theirs: Tensor) -> float:
    """Compute the mean absolute difference over tokens where both are known; infinity if none."""
    distance = (ours - theirs).abs()
    distances = distance[~distance.isnan()]
    return float(distances.mean()) if len(distances) else float("inf")
