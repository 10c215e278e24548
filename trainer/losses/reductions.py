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

        >>> counts = {"num_rows": 2, "num_trajectories": 2, "num_groups": 1}
        >>> ids = {"row": [0, 0, 1], "trajectory": [0, 0, 1], "group": [0, 0, 0]}
        >>> arrays = {name: np.array(values) for name, values in ids.items()}
        >>> reduction_weights("sequence_mean", **arrays, **counts).tolist()
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
    num_targets = np.bincount(index)[index]
    return np.asarray(1 / (number * num_targets.astype(np.float64)))
