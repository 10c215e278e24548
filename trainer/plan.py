"""What a run will train on, decided from returns alone: masks, advantages, order of groups."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from pipelines.rewards import are_equal
from schemas.errors import RolloutError
from schemas.ragged import IntArray
from trainer.advantages.outcome import FloatArray, grpo, maxrl, rloo
from trainer.config import TrainConfig

TOKEN_ESTIMATORS = frozenset({"reinforce++", "gae"})
"""Values of `advantage_estimator` that go along a trajectory token by token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One pass over the dataset.

    Attributes:
        trajectories: One row per trajectory of the planned groups: instance_id, trajectory_id,
            return (float64, null if failed), failed (bool), trains (bool: neither failed nor
            masked with its group), advantage (float64, 0 where it does not train and where the
            estimator goes token by token), mini_batch (int64, which of its batch's optimizer steps).
        batches: Instance ids of each batch, in order of the groups' first appearance.
        num_groups_without_variance: Groups of two or more that train and whose returns are all
            equal; `drop_zero_variance_groups` leaves them out.
        group_size: Trajectories that a group should have.
        num_partial_groups: Groups that have another number; 0 where groups have no baseline.
    """

    trajectories: pl.DataFrame
    batches: tuple[tuple[str, ...], ...]
    num_groups_without_variance: int
    group_size: int = 1
    num_partial_groups: int = 0


def make_plan(returns: pl.DataFrame, config: TrainConfig) -> Plan:
    """Plan the batches of a dataset.

    A batch is `groups_per_batch` groups, a mini-batch `groups_per_mini_batch` of them, so the
    number of optimizer steps depends on groups alone, never on turns or failures. What is left at
    the end makes a smaller mini-batch, and a smaller batch.

    Args:
        returns: instance_id, trajectory_id, return, error: one row per trajectory.
        config: The run's configuration.

    Raises:
        RolloutError: A trajectory with neither a return nor an error, unless the loss is
            `cross_entropy`; partial groups that are to be refused; no group is left.
    """
    if config.policy_loss_type != "cross_entropy":
        _check_outcomes(returns)
    failed = pl.col("error").is_not_null()
    masked = failed.any().over("instance_id") if config.failed == "group" else failed
    group_size, partial = _partial_groups(returns, config)
    if config.partial_groups == "mask":
        masked = masked | pl.col("instance_id").is_in(partial)
    trajectories = returns.select(
        "instance_id", "trajectory_id", "return", failed=failed, trains=~masked
    )
    constant = _groups_without_variance(trajectories)
    if config.drop_zero_variance_groups:
        trajectories = trajectories.filter(~pl.col("instance_id").is_in(constant))
    groups = trajectories["instance_id"].unique(maintain_order=True).to_list()
    if not groups:
        got = f"{len(constant)} groups, each with equal returns" if len(constant) else "no rows"
        expected, hint = "a group whose returns vary", "rollouts stats DS"
        raise RolloutError("mask_trains_something", "dataset", got, expected, hint)
    return Plan(
        trajectories=trajectories.with_columns(
            trajectory_advantages(trajectories, config),
            _mini_batches(trajectories, groups, config),
        ),
        batches=tuple(split(groups, config.groups_per_batch)),
        num_groups_without_variance=len(constant),
        group_size=group_size,
        num_partial_groups=len(partial),
    )


def num_planned_updates(plan: Plan, config: TrainConfig) -> int:
    """Most optimizer steps that a run makes: mini-batches of which nothing trains make none."""
    per_epoch = sum(math.ceil(len(b) / config.groups_per_mini_batch) for b in plan.batches)
    planned = per_epoch * config.epochs_per_batch * config.num_epochs
    return min(planned, config.max_updates or planned)


def num_groups_of_one(plan: Plan) -> int:
    """Groups of which one trajectory trains: they have no baseline."""
    trained = plan.trajectories.filter("trains")
    return int((trained.group_by("instance_id").len()["len"] == 1).sum())


def _partial_groups(returns: pl.DataFrame, config: TrainConfig) -> tuple[int, list[str]]:
    """Trajectories that a group should have, and the groups that have another number."""
    sizes = returns.group_by("instance_id", maintain_order=True).len()
    size = config.group_size or int(sizes.select(pl.col("len").max().fill_null(1)).item())
    partial = sizes.filter((pl.col("len") != size) & _compares_groups(config))
    if len(partial) and config.partial_groups == "refuse":
        raise RolloutError(
            "partial_groups",
            f"group {partial['instance_id'][0]!r} (the first of {len(partial)})",
            f"{partial['len'][0]} trajectories",
            str(size) if config.group_size else f"{size}, as the largest group has",
            "--set partial_groups=mask leaves such groups out of the loss, train takes them as they are",
        )
    return size, partial["instance_id"].to_list()


def _compares_groups(config: TrainConfig) -> bool:
    """Whether advantages come from the returns of a trajectory's group."""
    supervised = config.policy_loss_type == "cross_entropy"
    return not supervised and config.advantage_estimator not in TOKEN_ESTIMATORS


def _check_outcomes(returns: pl.DataFrame) -> None:
    known = pl.col("return").is_not_null() & pl.col("return").is_finite()
    unknown = returns.filter(pl.col("error").is_null() & ~known)
    if len(unknown):
        raise RolloutError(
            "unknown_outcome",
            f"trajectory {unknown['trajectory_id'][0]!r} (the first of {len(unknown)})",
            f"return {unknown['return'][0]} without an error",
            "a finite reward, or `error` on the trajectory",
            "convert with --rewards FILE, or leave these out:"
            ' rollouts filter DS --where "reward is not null or error is not null" --out KNOWN',
        )


def _groups_without_variance(trajectories: pl.DataFrame) -> list[str]:
    groups = trajectories.filter("trains").group_by("instance_id", maintain_order=True)
    spread = groups.agg(constant=are_equal(pl.col("return")))
    return spread.filter("constant")["instance_id"].to_list()


def trajectory_advantages(trajectories: pl.DataFrame, config: TrainConfig) -> pl.Series:
    """Advantage of each trajectory from its return: 0 where it does not train.

    Also 0 where `advantage_estimator` goes token by token, and where nothing is estimated.

    Args:
        trajectories: instance_id, return and trains of whole groups.
        config: The run's configuration.
    """
    trains = trajectories["trains"].to_numpy()
    group = trajectories["instance_id"].rank("dense").to_numpy()[trains]
    returns = trajectories["return"].to_numpy()[trains].astype(np.float64)
    advantages = np.zeros(len(trajectories))
    if _compares_groups(config):
        _, group_index = np.unique(group, return_inverse=True)
        advantages[trains] = _outcome_advantages(returns, group_index, config)
    return pl.Series("advantage", advantages)


def _outcome_advantages(
    returns: FloatArray, group_index: IntArray, config: TrainConfig
) -> FloatArray:
    if config.advantage_estimator == "grpo":
        return grpo(returns, group_index, normalize_by_std=config.normalize_by_std)
    return {"rloo": rloo, "maxrl": maxrl}[config.advantage_estimator](returns, group_index)


def _mini_batches(
    trajectories: pl.DataFrame, groups: Sequence[str], config: TrainConfig
) -> pl.Series:
    order = {group: number for number, group in enumerate(groups)}
    number = trajectories["instance_id"].replace_strict(order, return_dtype=pl.Int64)
    mini_batch = number % config.groups_per_batch // config.groups_per_mini_batch
    return mini_batch.alias("mini_batch")


def split(groups: Sequence[str], size: int) -> list[tuple[str, ...]]:
    """Cut groups into runs of `size`; the last one may be shorter."""
    return [tuple(groups[start : start + size]) for start in range(0, len(groups), size)]
