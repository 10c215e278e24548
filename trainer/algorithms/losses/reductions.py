"""Reduce losses per target to one number: loss = sum over targets of weight * loss."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from schemas.ragged import IntArray
from trainer.algorithms.own_functions import call_own, finite_array
from trainer.config.function_keys import BoundFunction

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Units:
    """Row, trajectory, group and micro-batch of each target of a mini-batch, over all processes.

    Attributes:
        row: [M] int64 row of each target, from 0.
        num_rows: Number of rows in the mini-batch. This and the other totals include rows,
            trajectories and groups without a target.
        trajectory: [M] trajectory of each target, from 0.
        num_trajectories: Number of trajectories in the mini-batch.
        group: [M] group of each target, from 0.
        num_groups: Number of groups in the mini-batch.
        micro_batch: [M] micro-batch of each target, from 0.
        num_micro_batches: Number of micro-batches in the mini-batch.
    """

    row: IntArray
    num_rows: int
    trajectory: IntArray
    num_trajectories: int
    group: IntArray
    num_groups: int
    micro_batch: IntArray
    num_micro_batches: int

    @property
    def num_targets(self) -> int:
        """M, the number of targets."""
        return len(self.row)


def reduction_weights(units: Units, reduction: BoundFunction) -> FloatArray:
    """Compute the weight that `loss_reduction` gives to each of a mini-batch's M targets.

    Rows, trajectories and groups without targets count as a loss of 0. Targets left out of the loss
    later (by importance ratios) still count: weights are not renormalised.

    Raises:
        InputError: A user's reduction fails, or its result is invalid.

    Example:
        Three targets in two rows; the first two belong to the first row:

        >>> names = ("row", "trajectory", "group", "micro_batch")
        >>> ids = dict.fromkeys(names, np.array([0, 0, 1]))
        >>> totals = ("num_rows", "num_trajectories", "num_groups", "num_micro_batches")
        >>> units = Units(**ids, **dict.fromkeys(totals, 2))
        >>> from trainer.config.function_keys import bind
        >>> from trainer.config.functions import LOSS_REDUCTION
        >>> from trainer.config.loss_config import LossConfig
        >>> reduction = bind(LOSS_REDUCTION, LossConfig(loss_reduction="sequence_mean"))
        >>> reduction_weights(units, reduction).tolist()
        [0.25, 0.25, 0.5]
    """
    function = reduction.function
    given = {name: getattr(units, name) for name in function.inputs} | reduction.keys
    if not function.is_own:
        return np.asarray(function.call(**given))
    if not units.num_targets:
        return np.zeros(0)
    found = call_own(function, given)
    return finite_array(function, found, units.num_targets, "weight of each target")


def token_mean(num_targets: int) -> FloatArray:
    """Give each of M targets the weight 1 / M."""
    return np.full(num_targets, 1 / max(num_targets, 1))


def sequence_mean(row: IntArray, num_rows: int) -> FloatArray:
    """Give each target the weight 1 / (num_rows * targets of its row) (arXiv:2402.03300)."""
    return _mean_of_means(row, num_rows)


def seq_mean_token_sum_norm(row: IntArray, num_rows: int, *, max_seq_len: int) -> FloatArray:
    """Give each target the weight 1 / (num_rows * max_seq_len) (arXiv:2503.20783)."""
    return np.full(len(row), 1 / (num_rows * max_seq_len)) if len(row) else np.zeros(0)


def prompt_mean(group: IntArray, num_groups: int) -> FloatArray:
    """Give each target the weight 1 / (num_groups * targets of its group)."""
    return _mean_of_means(group, num_groups)


def trajectory_mean(trajectory: IntArray, num_trajectories: int) -> FloatArray:
    """Give each target the weight 1 / (num_trajectories * targets of its trajectory)."""
    return _mean_of_means(trajectory, num_trajectories)


def token_mean_legacy(micro_batch: IntArray, num_micro_batches: int) -> FloatArray:
    """Give each target the weight 1 / (num_micro_batches * targets of its micro-batch)."""
    return _mean_of_means(micro_batch, num_micro_batches)


def _mean_of_means(index: IntArray, number: int) -> FloatArray:
    return np.asarray(1 / (number * np.bincount(index)[index].astype(np.float64)))
