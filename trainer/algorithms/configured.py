"""Call the configured policy loss, reduction and advantage estimator, built in or the user's own.

Built-in functions take arrays and numbers. Results of the user's own functions are checked.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from schemas.errors import InputError
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
        divergence: [M] nats from the teacher, with gradient; None without a teacher.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    row: Tensor
    selected: Tensor
    divergence: Tensor | None = None


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
    found = _call(loss, {name: getattr(t, name) for name in loss.inputs})
    return _checked_loss(loss, found, t.logprobs) if loss.is_own else found


def reduction_weights(units: Units, reduction: Function) -> FloatArray:
    """Compute the weight that `loss.reduction` gives to each of a mini-batch's M targets.

    Rows, trajectories and groups without targets count as a loss of 0. Targets left out of the loss
    later (by importance ratios) still count: weights are not renormalised.

    Raises:
        InputError: A user's reduction fails, or its result is invalid.
    """
    if reduction.is_own and not units.num_targets:
        return np.zeros(0)
    found = _call(reduction, {name: getattr(units, name) for name in reduction.inputs})
    if not reduction.is_own:
        return np.asarray(found)
    return _finite_array(reduction, found, units.num_targets, "weight of each target")


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
    found = _call(estimator, {name: arrays[name] for name in estimator.inputs})
    if not estimator.is_own:
        return (found.advantages, found.value_targets) if with_critic else (found, None)
    if not with_critic:
        return _finite_array(estimator, found, num, what), None
    if not isinstance(found, CriticAdvantages):
        expected = "CriticAdvantages(advantages, value_targets), because it takes `values`"
        raise _refused(estimator, f"a value of type {type(found).__name__}", expected)
    targets = _finite_array(estimator, found.value_targets, num, "value of each trained token")
    return _finite_array(estimator, found.advantages, num, what), targets


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


def _call(function: Function, arrays: Mapping[str, Any]) -> Any:
    """Call a function with its inputs and the values of its keys.

    A user's function gets copies of the arrays and tensors, in case it modifies them.
    """
    if not function.is_own:
        return function.call(**arrays, **function.values)
    given = {name: _copy(value) for name, value in arrays.items()}
    try:
        return function.call(**given, **function.values)
    except Exception as error:  # a user function may raise anything
        frames = traceback.extract_tb(error.__traceback__)[1:]
        path = function.place.rpartition(":")[0]
        own = [frame for frame in frames if frame.filename == path] or frames
        place = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
        text = " ".join(str(error).split())[:300]
        got = f"raised {type(error).__name__}: {text}".strip(": ") + place
        raise InputError(f"{function.kind.rule_id}_raised", function.name, got) from error


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return value.copy() if isinstance(value, np.ndarray) else value


def _refused(
    function: Function, got: str, expected: str, hint: str | None = None, *, part: str = ""
) -> InputError:
    """Build the error for an invalid result of a user's function, or for `part` of the result."""
    where = f"{function.name}, {part}" if part else function.name
    return InputError(function.kind.rule_id, where, got, expected, hint)


def _finite_array(function: Function, found: Any, num: int, what: str) -> FloatArray:
    """Convert a function's result to [num] float64."""
    expected = f"an array of {num} finite numbers with the {what}"
    try:
        array = np.asarray(found)
    except Exception as error:  # such as a tensor on a GPU, or with gradient
        got = f"a value of type {type(found).__name__}, which NumPy cannot convert ({error})"
        raise _refused(function, got, expected) from None
    if array.dtype.kind not in "fiu":
        got = f"a value of type {type(found).__name__}"
        got += f" and dtype {array.dtype}" if isinstance(found, np.ndarray | list) else ""
        raise _refused(function, got, expected)
    if array.shape != (num,):
        raise _refused(function, f"shape {list(array.shape)}", expected)
    array = array.astype(np.float64)
    if not np.isfinite(array).all():
        first = int(np.argmin(np.isfinite(array)))
        raise _refused(function, f"{array[first]} at element {first}", expected)
    return array


def _checked_loss(function: Function, found: Any, logprobs: Tensor) -> TokenLoss:
    """Check that a user's loss returned one finite number per target, with gradient."""
    losses, clipped, metrics = found if isinstance(found, TokenLoss) else (found, None, {})
    num = len(logprobs)
    expected = f"a tensor of shape [{num}] and dtype {logprobs.dtype} with the loss of each target,"
    expected += " or a TokenLoss"
    is_scalar = isinstance(losses, Tensor) and losses.dim() == 0
    hint = "return one loss per target; loss.reduction reduces the losses" if is_scalar else None
    _check_tensor(function, "", losses, logprobs, expected, hint, dtype=logprobs.dtype)
    if logprobs.requires_grad and not losses.requires_grad:
        raise _refused(function, "losses without a gradient", "losses computed from `logprobs`")
    if clipped is None:
        clipped = torch.zeros_like(logprobs, dtype=torch.bool)
    expected = f"a tensor of shape [{num}] and dtype torch.bool"
    _check_tensor(function, "clipped", clipped, logprobs, expected, dtype=torch.bool)
    if not isinstance(metrics, Mapping):
        raise _refused(
            function,
            f"a value of type {type(metrics).__name__}",
            "a mapping from names to tensors",
            part="metrics",
        )
    for name, values in metrics.items():
        expected = f"a finite tensor of shape [{num}], whose mean over the mini-batch is reported"
        _check_tensor(function, f"metrics[{name!r}]", values, logprobs, expected)
    named = {f"policy_loss/{name}": values for name, values in metrics.items()}
    return TokenLoss(losses, clipped, named)


def _check_tensor(
    function: Function,
    part: str,
    found: Any,
    logprobs: Tensor,
    expected: str,
    hint: str | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> None:
    if not isinstance(found, Tensor):
        got = f"a value of type {type(found).__name__}"
        raise _refused(function, got, expected, hint, part=part)
    shape, device = list(found.shape), logprobs.device
    if found.shape != logprobs.shape or (dtype and found.dtype != dtype):
        got = f"a tensor of shape {shape} and dtype {found.dtype}"
        raise _refused(function, got, expected, hint, part=part)
    if found.device != device:
        got, expected = f"a tensor on {found.device}", f"a tensor on {device}"
        raise _refused(function, got, expected, part=part)
    found, logprobs = found.detach(), logprobs.detach()
    finite = found.isfinite()
    if not finite.all():
        first = int(finite.logical_not().nonzero()[0])
        got = f"{float(found[first])} at target {first}, whose log-probability is"
        got += f" {float(logprobs[first]):.4g}"
        raise _refused(function, got, "finite numbers", part=part)
