"""Apply the configured advantage estimator to the returns or the rewards of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from schemas.ragged import IntArray
from trainer.algorithms.advantages.token import CriticAdvantages
from trainer.algorithms.own_functions import call_own, finite_array, refused
from trainer.config.function_keys import BoundFunction

FloatArray = npt.NDArray[np.float64]


def advantages_of_returns(
    returns: FloatArray, group_index: IntArray, estimator: BoundFunction
) -> FloatArray:
    """Estimate the advantages of n trajectories from their returns.

    Args:
        returns: [n] float64, finite.
        group_index: [n] int64 group of each trajectory, 0..num_groups-1.
        estimator: The run's `advantage_estimator`.

    Returns:
        [n] float64.

    Raises:
        InputError: A user's estimator fails, or its result is invalid.
    """
    given = {"returns": returns, "group_index": group_index}
    return _estimated(given, len(returns), "advantage of each trajectory", estimator)[0]


def advantages_of_rewards(
    rewards: FloatArray,
    trajectory: IntArray,
    group_index: IntArray,
    values: FloatArray | None,
    estimator: BoundFunction,
) -> tuple[FloatArray, FloatArray | None]:
    """Estimate the advantages of N trained tokens from their rewards.

    Args:
        rewards: [N] float64, finite: reward of each token.
        trajectory: [N] int64 trajectory of each token, non-decreasing.
        group_index: [N] int64 group of each token.
        values: [N] float64 critic values; None without a critic.
        estimator: The run's `advantage_estimator`.

    Returns:
        Advantages, and target values for the critic (None without a critic), [N] float64 each.

    Raises:
        InputError: See `advantages_of_returns`.
    """
    ids = {"trajectory": trajectory, "group_index": group_index}
    given = {"rewards": rewards} | {name: _numbered(index) for name, index in ids.items()}
    given |= {} if values is None else {"values": values}
    return _estimated(given, len(rewards), "advantage of each trained token", estimator)


def _numbered(index: IntArray) -> IntArray:
    """Renumber indices as 0, 1, 2, ... in order, so that there are no gaps.

    Gaps arise from trajectories or groups without trained tokens.
    """
    return np.asarray(np.unique(index, return_inverse=True)[1], np.int64)


def _estimated(
    arrays: Mapping[str, Any], num: int, what: str, estimator: BoundFunction
) -> tuple[FloatArray, FloatArray | None]:
    function = estimator.function
    given = {name: arrays[name] for name in function.inputs} | estimator.keys
    with_critic = "values" in function.inputs
    if not function.is_own:
        found = function.call(**given)
        return (found.advantages, found.value_targets) if with_critic else (found, None)
    if not num:
        return np.zeros(0), np.zeros(0) if with_critic else None
    found = call_own(function, given)
    if not with_critic:
        return finite_array(function, found, num, what), None
    if not isinstance(found, CriticAdvantages):
        expected = "CriticAdvantages(advantages, value_targets), because it takes `values`"
        raise refused(function, f"a value of type {type(found).__name__}", expected)
    targets = finite_array(function, found.value_targets, num, "value of each trained token")
    return finite_array(function, found.advantages, num, what), targets
