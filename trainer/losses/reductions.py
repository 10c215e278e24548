"""From losses per target to one number: loss = sum over targets of weight * loss."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from schemas.ragged import IntArray
from trainer.loss_config import Reduction

FloatArray = npt.NDArray[np.float64]


def reduction_weights(
    reduction: Reduction,
    *,
    row: IntArray,
    num_rows: int,
    trajectory: IntArray,
    num_trajectories: int,
    group: IntArray,
    num_groups: int,
    max_seq_len: int | None = None,
) -> FloatArray:
    """Weight of each of the M targets of a mini-batch, over all its micro-batches and processes.

        token_mean               1 / M
        sequence_mean            1 / (num_rows * targets of the row)             (arXiv:2402.03300)
        seq_mean_token_sum_norm  1 / (num_rows * max_seq_len)                    (arXiv:2503.20783)
        prompt_mean              1 / (num_groups * targets of the group)
        trajectory_mean          1 / (num_trajectories * targets of the trajectory)

    Rows, trajectories and groups without a target count, as a loss of 0. Whatever is left out of
    the loss later (by importance ratios) stays counted: nothing is renormalised.

    Args:
        reduction: Which.
        row: [M] row of each target, from 0.
        num_rows: Rows of the mini-batch.
        trajectory: [M] likewise.
        num_trajectories: Likewise.
        group: [M] likewise.
        num_groups: Likewise.
        max_seq_len: Of seq_mean_token_sum_norm.

    Example:
        Three targets, of which two are the first row's, the first of two:

        >>> ids = dict.fromkeys(("row", "trajectory", "group"), np.array([0, 0, 1]))
        >>> counts = dict.fromkeys(("num_rows", "num_trajectories", "num_groups"), 2)
        >>> reduction_weights("sequence_mean", **ids, **counts).tolist()
        [0.25, 0.25, 0.5]
    """
    if reduction == "seq_mean_token_sum_norm":
        assert max_seq_len is not None
        return np.full(len(row), 1 / (num_rows * max_seq_len)) if len(row) else np.zeros(0)
    index, number = {
        "token_mean": (np.zeros_like(row), 1),
        "sequence_mean": (row, num_rows),
        "prompt_mean": (group, num_groups),
        "trajectory_mean": (trajectory, num_trajectories),
    }[reduction]
    return np.asarray(1 / (number * np.bincount(index)[index].astype(np.float64)))
