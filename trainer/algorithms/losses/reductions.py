"""Weights that reduce losses per target to one number: loss = sum over targets of weight * loss.

Rows, trajectories and groups without targets count as a loss of 0. `trainer.config.functions`
lists the reductions by their names.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from schemas.ragged import IntArray

FloatArray = npt.NDArray[np.float64]


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
