"""Advantages from returns: one number per trajectory, broadcast to all its tokens.

Each function takes the returns ([n] float64, finite) and the groups ([n] int, 0..num_groups-1) of n
trajectories. Equal returns in a group give exactly 0; groups do not affect each other. A baseline
needs two trajectories: a group of one has advantage 0 and no gradient (a run warns about it).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from schemas.ragged import IntArray

FloatArray = npt.NDArray[np.float64]

EPSILON = 1e-6


def grpo(
    returns: FloatArray, group_index: IntArray, *, normalize_by_std: bool = True
) -> FloatArray:
    """Compute group-relative advantages: GRPO (arXiv:2402.03300, eq. 4.1.2), outcome supervision.

        A_i = (R_i - mean_g) / (std_g + 1e-6)        normalize_by_std
        A_i =  R_i - mean_g                          otherwise (Dr. GRPO, arXiv:2503.20783)

    std_g is the sample standard deviation of the group (divisor n - 1). Equal returns, or a
    group of one, give exactly 0.

    Args:
        returns: [n] float64, one per trajectory; finite.
        group_index: [n] group of each trajectory, 0..num_groups-1.
        normalize_by_std: Whether to divide by the standard deviation.

    Returns:
        [n] float64.

    Example:
        >>> grpo(np.array([1.0, 0.0, 3.0]), np.array([0, 0, 1]), normalize_by_std=False).tolist()
        [0.5, -0.5, 0.0]
    """
    centred, counts = _centred(returns, group_index)
    if not normalize_by_std:
        return centred
    # max(..., 1): a group of one has no sample variance; its centred return is 0 anyway.
    squares = np.bincount(group_index, centred**2)[group_index]
    std = np.sqrt(squares / np.maximum(counts - 1, 1))
    return np.asarray(centred / (std + EPSILON))


def rloo(returns: FloatArray, group_index: IntArray) -> FloatArray:
    """Compute leave-one-out advantages: RLOO (arXiv:2402.14740, section 2.2).

        A_i = R_i - mean of the group's other returns
            = (R_i - mean_g) * n / (n - 1)

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
    return np.asarray(centred * counts / np.maximum(counts - 1, 1))


def maxrl(returns: FloatArray, group_index: IntArray) -> FloatArray:
    """Compute mean-normalised advantages: MaxRL (arXiv:2602.02710).

        A_i = (R_i - mean_g(R)) / (mean_g(|R|) + 1e-6)

    For returns >= 0, for which the method was designed, mean |R| is the mean. With negative returns
    the mean can be near 0 or negative; with mean |R| instead, A keeps the sign of R_i - mean_g, and
    |A| is at most n + 1. Returns that are all 0 give 0.

    Args:
        returns: [n] float64, one per trajectory; finite.
        group_index: [n] group of each trajectory, 0..num_groups-1.

    Returns:
        [n] float64.

    Example:
        >>> maxrl(np.array([1.0, 0.0, 3.0]), np.array([0, 0, 1])).round(3).tolist()
        [1.0, -1.0, 0.0]
    """
    centred, counts = _centred(returns, group_index)
    size = np.bincount(group_index, np.abs(returns))[group_index] / counts
    return np.asarray(centred / (size + EPSILON))


def gdpo(
    separate_rewards: FloatArray, group_index: IntArray, *, reward_weights: Mapping[str, float]
) -> FloatArray:
    """Normalise several rewards separately: GDPO (arXiv:2601.05242).

        A_i = sum over k of w_k (r_ik - mean_g(r_k)) / (std_g(r_k) + 1e-6)

    Each reward is normalised like the return of `grpo`, so that a reward with a small spread counts as
    much as one with a large spread, and (0, 2) differs from (0, 1). The third step of the method, over
    the batch, is `advantage.batch_normalize`. The paper has no weights (w = 1).

    Args:
        separate_rewards: [n, K] float64, K rewards per trajectory; finite.
        group_index: [n] group of each trajectory, 0..num_groups-1.
        reward_weights: w, the weights of the K rewards, in order.

    Returns:
        [n] float64.

    Example:
        >>> gdpo(
        ...     np.array([[1.0, 0.0], [0.0, 9.0]]),
        ...     np.array([0, 0]),
        ...     reward_weights={"a": 1, "b": 1},
        ... )
        array([0., 0.])
    """
    normalised = (grpo(one, group_index) for one in separate_rewards.T)
    weighted = [w * a for w, a in zip(reward_weights.values(), normalised, strict=True)]
    return np.asarray(np.sum(weighted, axis=0))


def _centred(returns: FloatArray, group_index: IntArray) -> tuple[FloatArray, IntArray]:
    """Subtract the group's mean from each return; also return the [n] sizes of the groups.

    The difference is exactly 0 where all returns of the group are equal.
    """
    assert returns.shape == group_index.shape
    counts = np.bincount(group_index)[group_index]
    mean = np.bincount(group_index, returns)[group_index] / counts
    # The rounded mean of equal returns may differ from them; division by a tiny std amplifies that.
    return np.where(_equal_returns(returns, group_index), 0.0, returns - mean), counts


def _equal_returns(returns: FloatArray, group_index: IntArray) -> npt.NDArray[np.bool_]:
    num_groups = int(group_index.max(initial=-1)) + 1
    low, high = np.full(num_groups, np.inf), np.full(num_groups, -np.inf)
    np.minimum.at(low, group_index, returns)
    np.maximum.at(high, group_index, returns)
    return np.asarray((low == high)[group_index])
