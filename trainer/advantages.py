"""Advantages of trajectories from their returns. One number per trajectory, broadcast by the caller."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from schemas.ragged import IntArray

FloatArray = npt.NDArray[np.float64]

EPSILON = 1e-6


def grpo(
    returns: FloatArray, group_index: IntArray, *, normalize_by_std: bool = True
) -> FloatArray:
    """Group-relative advantages: GRPO (arXiv:2402.03300, eq. 4.1.2), outcome supervision.

        A_i = (R_i - mean_g) / (std_g + 1e-6)        normalize_by_std
        A_i =  R_i - mean_g                          otherwise (Dr. GRPO, arXiv:2503.20783)

    std_g is the sample standard deviation of the group (divisor n - 1). A group of one has no
    baseline: mean 0 and std 1, so A = R up to the epsilon. Equal returns give exactly 0.

    Args:
        returns: [n] float64, one per trajectory; finite.
        group_index: [n] group of each trajectory, 0..num_groups-1.
        normalize_by_std: Divide by the standard deviation.

    Returns:
        [n] float64.

    Example:
        >>> grpo(np.array([1.0, 0.0, 3.0]), np.array([0, 0, 1]), normalize_by_std=False).tolist()
        [0.5, -0.5, 3.0]
    """
    assert returns.shape == group_index.shape
    counts = np.bincount(group_index)[group_index]
    mean = np.bincount(group_index, returns)[group_index] / counts
    centred = np.where(counts == 1, returns, returns - mean)
    centred[_equal_returns(returns, group_index) & (counts > 1)] = 0.0
    if not normalize_by_std:
        return centred
    squares = np.bincount(group_index, centred**2)[group_index]
    std = np.where(counts == 1, 1.0, np.sqrt(squares / np.maximum(counts - 1, 1)))
    return np.asarray(centred / (std + EPSILON))


def _equal_returns(returns: FloatArray, group_index: IntArray) -> npt.NDArray[np.bool_]:
    num_groups = int(group_index.max(initial=-1)) + 1
    low, high = np.full(num_groups, np.inf), np.full(num_groups, -np.inf)
    np.minimum.at(low, group_index, returns)
    np.maximum.at(high, group_index, returns)
    return np.asarray((low == high)[group_index])
