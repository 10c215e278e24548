"""Weights that reduce losses per target to one number: loss = sum over targets of weight * loss.

Denominators are counts over the global mini-batch, and never scale advantages.
`trainer.config.functions` lists the reductions by their names.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from schemas.ragged import FloatArray, IntArray
from trainer.algorithms.own_functions import call_function
from trainer.config.functions import Function


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


def reduction_weights(units: Units, reduction: Function) -> FloatArray:
    """Compute the weight that `loss.reduction` gives to each of a mini-batch's M targets.

    Rows, trajectories and groups without targets count as a loss of 0. Targets left out of the loss
    later (by importance ratios) still count: weights are not renormalised.

    Raises:
        InputError: A user's reduction fails, or its result is invalid.
    """
    inputs = {name: getattr(units, name) for name in reduction.inputs}
    return np.asarray(call_function(reduction, **inputs))


def token_mean(num_targets: int) -> FloatArray:
    """Give each of M targets the weight 1 / M."""
    return np.full(num_targets, 1 / max(num_targets, 1))


def sequence_mean(row: IntArray, num_rows: int) -> FloatArray:
    """Give each target the weight 1 / (num_rows * targets of its row) (arXiv:2402.03300).

    Example:
        Three targets in two rows; the first two belong to the first row:

        >>> sequence_mean(np.array([0, 0, 1]), num_rows=2).tolist()
        [0.25, 0.25, 0.5]
    """
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
