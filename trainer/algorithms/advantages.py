"""Advantages from the returns of trajectories, or per token along a trajectory's trained tokens.

Estimators of returns take the returns ([n] float64, finite) and the groups ([n] int,
0..num_groups-1) of n trajectories. Equal returns in a group give exactly 0; groups do not affect
each other. A baseline needs two trajectories: a group of one has advantage 0 and no gradient (a run
warns about it).

Estimators per token take arrays of [N], with one element per trained token of complete
trajectories, in the order of `trainer.batches.chains`. The next token of the array is the
trajectory's next trained token, which may be in another step or row. Observations in between are
not time steps. The value and the return after a trajectory's last token are 0. Statistics are over
all trained tokens of the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from schemas.ragged import BoolArray, FloatArray, IntArray

EPSILON = 1e-6
VARIANCE_EPSILON = 1e-8


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


def _equal_returns(returns: FloatArray, group_index: IntArray) -> BoolArray:
    num_groups = int(group_index.max(initial=-1)) + 1
    low, high = np.full(num_groups, np.inf), np.full(num_groups, -np.inf)
    np.minimum.at(low, group_index, returns)
    np.maximum.at(high, group_index, returns)
    return np.asarray((low == high)[group_index])


class CriticAdvantages(NamedTuple):
    """Advantages and value targets of N trained tokens, from an estimator that uses a critic.

    Attributes:
        advantages: [N] float64.
        value_targets: [N] float64: target values for the critic.
    """

    advantages: FloatArray
    value_targets: FloatArray


def reinforce_plus_plus(rewards: FloatArray, trajectory: IntArray, *, gamma: float) -> FloatArray:
    """Compute whitened `discounted_returns` ([N] float64): REINFORCE++ (arXiv:2501.03262)."""
    return whiten(discounted_returns(rewards, trajectory, gamma=gamma))


def whitened_gae(
    rewards: FloatArray,
    values: FloatArray,
    trajectory: IntArray,
    *,
    gamma: float,
    gae_lambda: float,
) -> CriticAdvantages:
    """Compute whitened `gae` advantages; value targets are unwhitened advantages plus values."""
    advantages = gae(rewards, values, trajectory, gamma=gamma, lam=gae_lambda)
    return CriticAdvantages(whiten(advantages), advantages + values)


def discounted_returns(rewards: FloatArray, trajectory: IntArray, *, gamma: float) -> FloatArray:
    """Sum the discounted rewards from each token onwards.

        G_t = r_t + gamma * G_{t+1}

    The advantages of REINFORCE++ (arXiv:2501.03262) are A = whiten(G), without a group baseline.
    Its KL penalty, if used, is part of the rewards.

    Args:
        rewards: [N] reward of each token.
        trajectory: [N] trajectory of each token, non-decreasing.
        gamma: Discount per trained token, in [0, 1].

    Returns:
        [N] float64.

    Example:
        >>> rewards, trajectory = np.array([1.0, 0.0, 4.0, 2.0]), np.array([0, 0, 0, 1])
        >>> discounted_returns(rewards, trajectory, gamma=0.5).tolist()
        [2.0, 2.0, 4.0, 2.0]
    """
    return _backwards(rewards, trajectory, gamma)


def gae(
    rewards: FloatArray, values: FloatArray, trajectory: IntArray, *, gamma: float, lam: float
) -> FloatArray:
    """Compute generalised advantage estimates (arXiv:1506.02438, eq. 16), not whitened.

        delta_t = r_t + gamma * V_{t+1} - V_t
        A_t     = delta_t + gamma * lam * A_{t+1}

    The critic's targets are A + V. With lam = 1 they are the discounted returns, for any V.

    Args:
        rewards: [N] reward of each token.
        values: [N] the critic's value of the context before each token; for a step's first token,
            that is the step's prompt including observations.
        trajectory: [N] trajectory of each token, non-decreasing.
        gamma: Discount per trained token, in [0, 1].
        lam: From 0 (one-step differences) to 1 (returns minus values).

    Returns:
        [N] float64.

    Example:
        >>> rewards, values = np.array([0.0, 1.0]), np.array([0.5, 0.25])
        >>> gae(rewards, values, np.array([0, 0]), gamma=1.0, lam=1.0).tolist()
        [0.5, 0.75]
    """
    is_last = np.append(trajectory[1:] != trajectory[:-1], np.True_)[: len(values)]
    following = np.where(is_last, 0.0, np.roll(values, -1))
    return _backwards(rewards + gamma * following - values, trajectory, gamma * lam)


def whiten(values: FloatArray) -> FloatArray:
    """Shift and scale values to mean 0 and variance 1.

        (x - mean) / sqrt(var + 1e-8)        var: sample variance, divisor n - 1

    Equal values, or a single one, give exactly 0.

    Example:
        >>> whiten(np.array([1.0, 3.0])).round(4).tolist()
        [-0.7071, 0.7071]
    """
    if len(values) == 0 or values.min() == values.max():
        return np.zeros_like(values)
    deviation = np.sqrt(values.var(ddof=1) + VARIANCE_EPSILON)
    return np.asarray((values - values.mean()) / deviation)


def batch_normalize(advantages: FloatArray) -> FloatArray:
    """Normalise the advantages of a batch's trained tokens.

        (A - mean) / sqrt(max(var, 1e-8))    var: divisor n

    Runs after any estimator, over all trained tokens of the batch, so longer trajectories weigh
    more. Equal advantages, or a single one, give exactly 0 and thus no gradient.

    Example:
        >>> batch_normalize(np.array([1.0, 3.0])).tolist()
        [-1.0, 1.0]
    """
    if len(advantages) == 0 or advantages.min() == advantages.max():
        return np.zeros_like(advantages)
    deviation = np.sqrt(max(advantages.var(), VARIANCE_EPSILON))
    return np.asarray((advantages - advantages.mean()) / deviation)


def _backwards(terms: FloatArray, trajectory: IntArray, factor: float) -> FloatArray:
    """Solve x_t = terms_t + factor * x_{t+1} backwards within each trajectory."""
    values, owners = terms.tolist(), trajectory.tolist()
    for t in range(len(values) - 2, -1, -1):
        if owners[t] == owners[t + 1]:
            values[t] += factor * values[t + 1]
    return np.array(values, np.float64)
