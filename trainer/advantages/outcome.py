"""Advantages from the returns of trajectories: one number each, broadcast to all its tokens.

Each function takes the returns ([n] float64, finite) and the groups ([n] int, 0..num_groups-1) of n
trajectories. A group's equal returns give exactly 0; other groups change nothing.
"""

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
    centred, counts = _centred(returns, group_index)
    if not normalize_by_std:
        return centred
    squares = np.bincount(group_index, centred**2)[group_index]
    std = np.where(counts == 1, 1.0, np.sqrt(squares / np.maximum(counts - 1, 1)))
    return np.asarray(centred / (std + EPSILON))


def rloo(returns: FloatArray, group_index: IntArray) -> FloatArray:
    """Leave-one-out advantages: RLOO (arXiv:2402.14740, section 2.2).

        A_i = R_i - mean of the group's other returns
            = (R_i - mean_g) * n / (n - 1)

    A group of one has no others: A = 0, so it trains nothing (a run warns of such groups).

    Args:
        returns: [n] float64, one per trajectory; finite.
        group_index: [n] group of each trajectory, 0..num_groups-1.

    Returns:
        [n] float64.

    Example:
        >>> rloo(np.array([1.0, 0.0, 0.5, 3.0]), np.array([0, 0, 0, 1])).tolist()
        [0.75, -0.75, 0.0, 0.0]
    """
    centred, counts = _centred(returns, group_index)
    return np.where(counts == 1, 0.0, centred * counts / np.maximum(counts - 1, 1))


def maxrl(returns: FloatArray, group_index: IntArray) -> FloatArray:
    """Mean-normalised advantages: MaxRL (arXiv:2602.02710).

        A_i = (R_i - mean_g(R)) / (mean_g(|R|) + 1e-6)

    With returns of 0 or more, which the method is made for, mean |R| is the mean. Where a return
    is negative the mean may come near 0 or change sign; mean |R| does neither, so A keeps the sign
    of R_i - mean_g and stays within n + 1. Returns of 0 alone give 0. A group of one has no
    baseline and no divisor: A = R.

    Args:
        returns: [n] float64, one per trajectory; finite.
        group_index: [n] group of each trajectory, 0..num_groups-1.

    Returns:
        [n] float64.

    Example:
        >>> maxrl(np.array([1.0, 0.0, 3.0]), np.array([0, 0, 1])).round(3).tolist()
        [1.0, -1.0, 3.0]
    """
    centred, counts = _centred(returns, group_index)
    size = np.bincount(group_index, np.abs(returns))[group_index] / counts
    return np.where(counts == 1, returns, centred / (size + EPSILON))


def _centred(returns: FloatArray, group_index: IntArray) -> tuple[FloatArray, IntArray]:
    """Returns less their group's mean, alone in its group as it is; [n] size of its group."""
    assert returns.shape == group_index.shape
    counts = np.bincount(group_index)[group_index]
    mean = np.bincount(group_index, returns)[group_index] / counts
    centred = np.where(counts == 1, returns, returns - mean)
    centred[_equal_returns(returns, group_index) & (counts > 1)] = 0.0
    return centred, counts


def _equal_returns(returns: FloatArray, group_index: IntArray) -> npt.NDArray[np.bool_]:
    num_groups = int(group_index.max(initial=-1)) + 1
    low, high = np.full(num_groups, np.inf), np.full(num_groups, -np.inf)
    np.minimum.at(low, group_index, returns)
    np.maximum.at(high, group_index, returns)
    return np.asarray((low == high)[group_index])
