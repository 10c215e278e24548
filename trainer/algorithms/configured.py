"""Call the configured policy loss, reduction and advantage estimator, built in or the user's own.

Built-in functions take arrays and numbers. Results of the user's own functions are checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from schemas.ragged import IntArray
from trainer.algorithms.advantages.token import CriticAdvantages
from trainer.algorithms.losses.covariance import (
    clip_cov_selection,
    covariances,
    kl_cov_selection,
)
from trainer.algorithms.losses.policy import TokenLoss, regular
from trainer.config.functions import Function
from trainer.config.loss_config import LossConfig

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Targets:
    """M targets of complete rows, all on one device.

    Attributes:
        logprobs: [M] nats under the current policy, with gradient.
        old_logprobs: [M] nats under the policy at the start of the batch.
        rollout_logprobs: [M] nats under the sampler's policy; NaN where unknown.
        advantages: [M].
        row: [M] int64 row of each target, 0..R-1.
        selected: [M] bool, targets that clip_cov leaves out or kl_cov penalises.
        weights: [M] float32 weights of `loss.reduction`.
        entropy: [M] nats, with gradient if the loss needs it.
        divergence: [M] nats from the teacher, with gradient.
        ref_logprobs: [M] nats under the reference; None without one.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    row: Tensor
    selected: Tensor
    weights: Tensor | None = None
    entropy: Tensor | None = None
    divergence: Tensor | None = None
    ref_logprobs: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Units:
    """Row, trajectory, group and micro-batch of each target of a mini-batch, over all processes.

    Attributes:
        row: [M] int64 row of each target, from 0.
        num_rows: Number of rows in the mini-batch. This and the other totals include rows,
            trajectories and groups without a target.
        trajectory: [M] trajectory of each target, from 0.
        num_trajectories: Number of trajectories in the mini-batch.
        group: [M] group of each target, from 0.
        num_groups: Number of groups in the mini-batch.
        micro_batch: [M] micro-batch of each target, from 0.
        num_micro_batches: Number of micro-batches in the mini-batch.
    """

    row: IntArray
    num_rows: int
    trajectory: IntArray
    num_trajectories: int
    group: IntArray
    num_groups: int
    micro_batch: IntArray
    num_micro_batches: int

    @property
    def num_targets(self) -> int:
        """M, the number of targets."""
        return len(self.row)


def policy_loss(t: Targets, loss: Function) -> TokenLoss:
    """Compute the loss per target with `loss.policy_loss_type`, neither reduced nor corrected.

    Raises:
        InputError: A user's loss fails, or its result is invalid.
    """
    if loss.is_own and not len(t.logprobs):
        return TokenLoss(t.logprobs, torch.zeros_like(t.logprobs, dtype=torch.bool))
    result = loss(lambda name: getattr(t, name))
    return _checked_loss(loss, result, t.logprobs) if loss.is_own else result


def reduction_weights(units: Units, reduction: Function) -> FloatArray:
    """Compute the weight that `loss.reduction` gives to each of a mini-batch's M targets.

    Rows, trajectories and groups without targets count as a loss of 0. Targets left out of the loss
    later (by importance ratios) still count: weights are not renormalised.

    Raises:
        InputError: A user's reduction fails, or its result is invalid.
    """
    if reduction.is_own and not units.num_targets:
        return np.zeros(0)
    weights = reduction(lambda name: getattr(units, name))
    if not reduction.is_own:
        return np.asarray(weights)
    return _checked(reduction, weights, units.num_targets, "weight of each target")


def advantages_of_returns(
    returns: FloatArray,
    group_index: IntArray,
    estimator: Function,
    separate: FloatArray | None = None,
) -> FloatArray:
    """Estimate the advantages of n trajectories from their returns, or from separate rewards.

    Args:
        returns: [n] float64, finite.
        group_index: [n] int64 group of each trajectory, 0..num_groups-1.
        estimator: The run's `advantage.estimator`.
        separate: [n, K] float64, finite: the rewards that `advantage.reward_weights` names; None for
            an estimator that does not take them.

    Returns:
        [n] float64.

    Raises:
        InputError: A user's estimator fails, or its result is invalid.
    """
    given = {"returns": returns, "separate_rewards": separate, "group_index": group_index}
    return _estimated(given, len(returns), "advantage of each trajectory", estimator)[0]


def advantages_of_rewards(
    rewards: FloatArray,
    trajectory: IntArray,
    group_index: IntArray,
    values: FloatArray | None,
    estimator: Function,
) -> tuple[FloatArray, FloatArray | None]:
    """Estimate the advantages of N trained tokens from their rewards.

    Args:
        rewards: [N] float64, finite: reward of each token.
        trajectory: [N] int64 trajectory of each token, non-decreasing.
        group_index: [N] int64 group of each token.
        values: [N] float64 critic values; None without a critic.
        estimator: The run's `advantage.estimator`.

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
    arrays: Mapping[str, Any], num: int, what: str, estimator: Function
) -> tuple[FloatArray, FloatArray | None]:
    with_critic = "values" in estimator.inputs
    if estimator.is_own and not num:
        return np.zeros(0), np.zeros(0) if with_critic else None
    result = estimator(arrays.__getitem__)
    if not estimator.is_own:
        return (result.advantages, result.value_targets) if with_critic else (result, None)
    if not with_critic:
        return _checked(estimator, result, num, what), None
    if not isinstance(result, CriticAdvantages):
        expected = "CriticAdvantages(advantages, value_targets), because it takes `values`"
        raise estimator.refused(f"a value of type {type(result).__name__}", expected)
    targets = _checked(estimator, result.value_targets, num, "value of each trained token")
    return _checked(estimator, result.advantages, num, what), targets


def select(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, loss: LossConfig
) -> Tensor | None:
    """Select the targets of a mini-batch that clip_cov leaves out or kl_cov penalises ([M] bool).

    The result is None for other losses. clip_cov draws with torch's generator.
    """
    if loss.policy_loss_type == "kl_cov":
        covariance = covariances(advantages, logprobs)
        return kl_cov_selection(covariance, fraction=loss.kl_cov_frac)
    if loss.policy_loss_type != "clip_cov":
        return None
    low, high = loss.eps_clip_low, loss.eps_clip_high
    plain = regular(logprobs, old_logprobs, advantages, eps_clip_low=low, eps_clip_high=high)
    return clip_cov_selection(
        covariances(advantages, logprobs),
        plain.clipped,
        ratio=loss.clip_cov_ratio,
        low=loss.clip_cov_lb,
        high=loss.clip_cov_ub,
    )


def _checked(function: Function, result: Any, num: int, what: str) -> FloatArray:
    """Convert a result (a NumPy array, a CPU tensor or a list of numbers) to [num] finite float64.

    Raises:
        InputError: The result is not numeric, has the wrong shape, or is not finite.
    """
    expected, kind = f"an array of {num} finite numbers with the {what}", type(result).__name__
    try:
        array = np.asarray(result)
    except Exception as error:  # such as a tensor on a GPU, or with gradient
        got = f"a value of type {kind}, which NumPy cannot convert ({error})"
        raise function.refused(got, expected) from None
    if array.dtype.kind not in "fiu":
        of = f" and dtype {array.dtype}" if isinstance(result, np.ndarray | list) else ""
        raise function.refused(f"a value of type {kind}{of}", expected)
    if array.shape != (num,):
        raise function.refused(f"shape {list(array.shape)}", expected)
    array = array.astype(np.float64)
    if not np.isfinite(array).all():
        first = int(np.argmin(np.isfinite(array)))
        raise function.refused(f"{array[first]} at element {first}", expected)
    return array


def _checked_loss(function: Function, result: Any, logprobs: Tensor) -> TokenLoss:
    """Check that a user's loss returned one finite number per target, with gradient."""
    parts: tuple[Any, Any, Any] = result if isinstance(result, TokenLoss) else (result, None, {})
    losses, clipped, metrics = parts
    if clipped is None:
        clipped = torch.zeros_like(logprobs, dtype=torch.bool)
    _check_tensor(function, "", losses, logprobs, logprobs.dtype)
    if logprobs.requires_grad and not losses.requires_grad:
        raise function.refused("losses without a gradient", "losses computed from `logprobs`")
    _check_tensor(function, "clipped", clipped, logprobs, torch.bool)
    if not isinstance(metrics, Mapping):
        got = f"a value of type {type(metrics).__name__}"
        raise function.refused(got, "a mapping from names to tensors", part="metrics")
    for name, values in metrics.items():
        _check_tensor(function, f"metrics[{name!r}]", values, logprobs)
    named = {f"policy_loss/{name}": values for name, values in metrics.items()}
    return TokenLoss(losses, clipped, named)


def _check_tensor(
    function: Function, part: str, values: Any, logprobs: Tensor, dtype: torch.dtype | None = None
) -> None:
    """Check that a part of a result is finite, with one element per target and of a dtype."""
    of = f"of shape [{len(logprobs)}]" + (f" and dtype {dtype}" if dtype else "")
    expected = f"a tensor {of}, one element per target"
    expected += "" if part else ", or a TokenLoss"
    if not isinstance(values, Tensor):
        raise function.refused(f"a value of type {type(values).__name__}", expected, part=part)
    fits = values.shape == logprobs.shape and (dtype is None or values.dtype == dtype)
    if not fits or values.device != logprobs.device:
        got = f"a tensor of shape {list(values.shape)} and dtype {values.dtype}"
        if values.device != logprobs.device:
            got, expected = f"{got} on {values.device}", f"{expected}, on {logprobs.device}"
        is_reduced = not part and values.dim() == 0
        hint = (
            "return one loss per target; loss.reduction reduces the losses" if is_reduced else None
        )
        raise function.refused(got, expected, hint, part=part)
    values, logprobs = values.detach(), logprobs.detach()
    if not values.isfinite().all():
        first = int(values.isfinite().logical_not().nonzero()[0])
        got = f"{float(values[first])} at target {first}, whose log-probability is"
        got += f" {float(logprobs[first]):.4g}"
        raise function.refused(got, "finite numbers", part=part)
