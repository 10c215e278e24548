"""Advantages token by token, along the chain of a trajectory's trained tokens.

Every array is [N] float64 over the trained tokens of whole trajectories, as `trainer.chains` lays
them: the next token is the trajectory's next trained one, in the next step or row if need be, and
observations between them are no time steps. After a trajectory's last token nothing follows: value
and return are 0 there. Statistics are over these tokens alone, those of the whole batch.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from schemas.ragged import IntArray

FloatArray = npt.NDArray[np.float64]

VARIANCE_EPSILON = 1e-8


def discounted_returns(rewards: FloatArray, trajectory: IntArray, *, gamma: float) -> FloatArray:
    """What each token and all that follow it earn; whitened, these are REINFORCE++'s advantages.

        G_t = r_t + gamma * G_{t+1}

    REINFORCE++ (arXiv:2501.03262) without its KL penalty, which would be a part of the rewards: no
    group baseline, A = whiten(G).

    Args:
        rewards: [N] what each token earned.
        trajectory: [N] not decreasing.
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
    """Generalised advantage estimation (arXiv:1506.02438, eq. 16), not whitened.

        delta_t = r_t + gamma * V_{t+1} - V_t
        A_t     = delta_t + gamma * lam * A_{t+1}

    The critic's targets are A + V. With lam = 1 they are the discounted returns, whatever V is.

    Args:
        rewards: [N] what each token earned.
        values: [N] the critic's value of what stood before each token; of a step's first token that
            is the step's prompt, observations included.
        trajectory: [N] not decreasing.
        gamma: Discount per trained token, in [0, 1].
        lam: 0 (one-step differences) to 1 (returns less values).

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
    """Mean 0 and variance 1.

        (x - mean) / sqrt(var + 1e-8)        var: sample variance, divisor n - 1

    Equal values, one value among them, give exactly 0; none give none.

    Example:
        >>> whiten(np.array([1.0, 3.0])).round(4).tolist()
        [-0.7071, 0.7071]
    """
    if len(values) == 0 or values.min() == values.max():
        return np.zeros_like(values)
    deviation = np.sqrt(values.var(ddof=1) + VARIANCE_EPSILON)
    return np.asarray((values - values.mean()) / deviation)


def batch_normalize(advantages: FloatArray) -> FloatArray:
    """The advantages of a batch's trained tokens less their mean, over their deviation.

        (A - mean) / sqrt(max(var, 1e-8))    var: divisor n

    After any estimator, over every trained token of the batch, so long trajectories weigh more.
    Equal advantages, one token among them, give exactly 0: then nothing trains.

    Example:
        >>> batch_normalize(np.array([1.0, 3.0])).tolist()
        [-1.0, 1.0]
    """
    if len(advantages) == 0 or advantages.min() == advantages.max():
        return np.zeros_like(advantages)
    deviation = np.sqrt(max(advantages.var(), VARIANCE_EPSILON))
    return np.asarray((advantages - advantages.mean()) / deviation)


def _backwards(terms: FloatArray, trajectory: IntArray, factor: float) -> FloatArray:
    """x_t = terms_t + factor * x_{t+1} inside each trajectory."""
    values, owners = terms.tolist(), trajectory.tolist()
    for t in range(len(values) - 2, -1, -1):
        if owners[t] == owners[t + 1]:
            values[t] += factor * values[t + 1]
    return np.array(values, np.float64)
