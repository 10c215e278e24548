"""Advantages per token, along the chain of a trajectory's trained tokens.

Every array is [N], with one element per trained token of complete trajectories, in the order of
`trainer.batches.chains`. The next token of the array is the trajectory's next trained token, which
may be in another step or row. Observations in between are not time steps. The value and the return
after a trajectory's last token are 0. Statistics are over all trained tokens of the batch.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from schemas.ragged import IntArray

FloatArray = npt.NDArray[np.float64]

VARIANCE_EPSILON = 1e-8


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
