"""Plan a run from returns: which groups train and which trajectories are masked, advantages, order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
import polars.selectors as cs

from pipelines.rewards import are_equal, fold_trajectories, trajectory_returns, with_version
from rollout_io.dataset.trajectory_facts import metric_of
from rollout_io.dataset.versions import is_version
from schemas.errors import InputError, InvariantError, first_of
from schemas.rules import fix_of
from trainer.algorithms.own_functions import call_function
from trainer.config.functions import ADVANTAGE_ESTIMATOR, Function, bind
from trainer.config.sections import BatchConfig
from trainer.config.train_config import Sections, TrainConfig

SEPARATE = "reward "
"""Prefix of the columns with separate rewards."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Plan of one pass over the dataset: its trajectories, advantages and batches.

    Attributes:
        trajectories: One row per trajectory of the planned groups: instance_id, trajectory_id,
            return (float64, null if failed), failed (bool), trains (bool: neither failed nor
            masked), advantage (float64, 0 if masked or if the estimator works per token),
            mini_batch (int64, its optimizer step within its batch).
        batches: Instance ids of each batch, in order of the groups' first appearance.
        num_groups_without_variance: Trained groups of two or more trajectories whose returns are
            all equal; `drop_zero_variance_groups` leaves them out.
        group_size: Expected number of trajectories per group.
        num_partial_groups: Number of groups of a different size; 0 if advantages are not relative
            to the group.
    """

    trajectories: pl.DataFrame
    batches: tuple[tuple[str, ...], ...]
    num_groups_without_variance: int
    group_size: int = 1
    num_partial_groups: int = 0


def dataset_returns(rollouts: pl.LazyFrame, config: Sections) -> pl.DataFrame:
    """Compute the input of `make_plan`: one row per trajectory, with the return to maximise.

    A column for each of the `separate_rewards` of the estimator follows.

    Raises:
        InputError: `reward_version`: a trajectory is not scored in one of these versions.
    """
    names, path = config.advantage.separate_rewards, config.data.dataset
    versions = [name for name in names if is_version(path, name)]
    metrics = {SEPARATE + n: metric_of(rollouts, n) for n in names if n not in versions}
    features = {name: (row, lambda v: v.drop_nulls().last()) for name, row in metrics.items()}
    returns = fold_trajectories(rollouts, config.data.outcome or "last", features)
    for name in versions:
        scores = trajectory_returns(with_version(rollouts, path, name)).select(
            "trajectory_id", pl.col("return").alias(SEPARATE + name), unscored="error"
        )
        returns = returns.join(scores, on="trajectory_id", how="left", maintain_order="left")
        returns = returns.with_columns(error=pl.coalesce("error", "unscored")).drop("unscored")
    return returns.collect()


def make_plan(returns: pl.DataFrame, config: TrainConfig) -> Plan:
    """Plan the batches of a dataset.

    A batch has `groups_per_batch` groups, and a mini-batch has `groups_per_mini_batch` of its
    batch's groups, so the number of optimizer steps depends only on the number of groups, never on
    turns or failures. The last mini-batch and the last batch may be smaller.

    Args:
        returns: From `dataset_returns`.
        config: Configuration of the run.

    Raises:
        InvariantError: No group is left to train on.
        InputError: A trajectory has neither a return nor an error, unless the loss takes no
            advantages; there are partial groups and `partial_groups` is `refuse`; or a user's
            estimator fails.
    """
    data, batch = config.data, config.batch
    separate = [SEPARATE + name for name in config.advantage.separate_rewards]
    if not config.loss.is_supervised:
        for name in ("return", *separate):
            _check_outcomes(returns, name)
    failed = pl.col("error").is_not_null()
    masked = failed.any().over("instance_id") if data.failed == "group" else failed
    group_size, partial = _partial_groups(returns, config)
    if data.partial_groups == "mask":
        masked = masked | pl.col("instance_id").is_in(partial)
    trajectories = returns.select(
        "instance_id", "trajectory_id", "return", *separate, failed=failed, trains=~masked
    )
    constant = _groups_without_variance(trajectories, separate or ["return"])
    if data.drop_zero_variance_groups:
        trajectories = trajectories.filter(~pl.col("instance_id").is_in(constant))
    elif data.mask_zero_variance_groups:
        differs = ~pl.col("instance_id").is_in(constant)
        trajectories = trajectories.with_columns(trains=pl.col("trains") & differs)
    groups = trajectories["instance_id"].unique(maintain_order=True).to_list()
    if not groups:
        finding = "there are no rows to train on"
        if constant:
            groups_text = (
                "the only group" if len(constant) == 1 else f"any of the {len(constant)} groups"
            )
            equal = f"returns do not vary within {groups_text}"
            finding = f"drop_zero_variance_groups leaves no group to train on: {equal}"
        hint = "run `rollouts stats DS` to see the rewards"
        raise InvariantError("mask_trains_something", "dataset", finding, hint=hint)
    order = {group: number for number, group in enumerate(groups)}
    number = trajectories["instance_id"].replace_strict(order, return_dtype=pl.Int64)
    mini_batch = number % batch.groups_per_batch // batch.groups_per_mini_batch
    return Plan(
        trajectories=trajectories.with_columns(
            trajectory_advantages(trajectories, trajectory_estimator(config)),
            mini_batch.alias("mini_batch"),
        ).drop(separate),
        batches=tuple(split(groups, batch.groups_per_batch)),
        num_groups_without_variance=len(constant),
        group_size=group_size,
        num_partial_groups=len(partial),
    )


def num_planned_updates(plan: Plan, sizes: BatchConfig) -> int:
    """Compute the maximum number of optimizer steps of a run.

    The run may make fewer, because it skips mini-batches without a gradient.
    """
    per_epoch = sum(math.ceil(len(b) / sizes.groups_per_mini_batch) for b in plan.batches)
    planned = per_epoch * sizes.epochs_per_batch * sizes.num_epochs
    return min(planned, sizes.max_updates or planned)


def num_groups_of_one(plan: Plan) -> int:
    """Count the groups with a single trained trajectory, which has no baseline."""
    trained = plan.trajectories.filter("trains")
    return int((trained.group_by("instance_id").len()["len"] == 1).sum())


def _partial_groups(returns: pl.DataFrame, config: TrainConfig) -> tuple[int, list[str]]:
    """Return the expected group size, and the groups whose size differs."""
    sizes = returns.group_by("instance_id", maintain_order=True).len()
    size = config.data.group_size or int(sizes.select(pl.col("len").max().fill_null(1)).item())
    partial = sizes.filter((pl.col("len") != size) & config.compares_groups)
    if len(partial) and config.data.partial_groups == "refuse":
        num = partial["len"][0]
        raise InputError(
            "partial_groups",
            first_of(f"group {partial['instance_id'][0]!r}", len(partial)),
            f"{num} trajector{'y' if num == 1 else 'ies'}",
            str(size) if config.data.group_size else f"{size}, the size of the largest group",
            fix_of("partial_groups"),
        )
    return size, partial["instance_id"].to_list()


def _check_outcomes(returns: pl.DataFrame, name: str) -> None:
    is_finite = pl.col(name).is_not_null() & pl.col(name).is_finite()
    unknown = returns.filter(pl.col("error").is_null() & ~is_finite)
    if len(unknown):
        value = unknown[name][0]
        raise InputError(
            "unknown_outcome",
            first_of(f"trajectory {unknown['trajectory_id'][0]!r}", len(unknown)),
            f"its {name} is {'unknown' if value is None else value}, and it has no `error`",
            hint=fix_of("unknown_outcome"),
        )


def _groups_without_variance(trajectories: pl.DataFrame, rewards: Sequence[str]) -> list[str]:
    groups = trajectories.filter("trains").group_by("instance_id", maintain_order=True)
    spread = groups.agg(constant=pl.all_horizontal(are_equal(pl.col(name)) for name in rewards))
    return spread.filter("constant")["instance_id"].to_list()


def trajectory_estimator(config: TrainConfig) -> Function | None:
    """Bind the estimator if it takes returns; None if it takes token rewards or is not used."""
    if config.loss.is_supervised or config.advantage.by_token:
        return None
    return bind(ADVANTAGE_ESTIMATOR, config.advantage)


def trajectory_advantages(trajectories: pl.DataFrame, estimator: Function | None) -> pl.Series:
    """Compute the advantage of each trajectory from its rewards; 0 if it is excluded from training.

    `trajectories` has instance_id, return, trains and separate rewards of complete groups. Without an estimator, all
    advantages are 0.
    """
    trains = trajectories["trains"].to_numpy()
    group = trajectories["instance_id"].rank("dense").to_numpy()[trains]
    returns = trajectories["return"].to_numpy()[trains].astype(np.float64)
    advantages = np.zeros(len(trajectories))
    if estimator:
        _, group_index = np.unique(group, return_inverse=True)
        columns = trajectories.filter(trains).select(cs.starts_with(SEPARATE))
        separate = np.array([column.to_numpy() for column in columns]).T
        arrays = {"returns": returns, "separate_rewards": separate, "group_index": group_index}
        advantages[trains] = call_function(
            estimator, **{name: arrays[name] for name in estimator.inputs}
        )
    return pl.Series("advantage", advantages)


def split(groups: Sequence[str], size: int) -> list[tuple[str, ...]]:
    """Split groups into chunks of `size`; the last one may be shorter."""
    return [tuple(groups[start : start + size]) for start in range(0, len(groups), size)]
