"""What the configured policy loss, reduction and advantage estimator take: arrays and numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from schemas.ragged import IntArray
from trainer.algorithms.losses.covariance import (
    clip_cov_selection,
    covariances,
    kl_cov_selection,
)
from trainer.algorithms.losses.policy import regular
from trainer.algorithms.own_functions import FloatArray, call
from trainer.config.functions import Function
from trainer.config.loss_config import LossConfig


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


def reduction_weights(units: Units, reduction: Function) -> FloatArray:
    """Compute the weight that `loss.reduction` gives to each of a mini-batch's M targets.

    Rows, trajectories and groups without targets count as a loss of 0. Targets left out of the loss
    later (by importance ratios) still count: weights are not renormalised.

    Raises:
        InputError: A user's reduction fails, or its result is invalid.
    """
    inputs = {name: getattr(units, name) for name in reduction.inputs}
    return np.asarray(call(reduction, **inputs))


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
        InputError: A user's estimator fails, or its result is invalid.
    """
    arrays = {
        "rewards": rewards,
        "trajectory": _numbered(trajectory),
        "group_index": _numbered(group_index),
        "values": values,
    }
    result = call(estimator, **{name: arrays[name] for name in estimator.inputs})
    return (
        (result.advantages, result.value_targets)
        if "values" in estimator.inputs
        else (result, None)
    )


def _numbered(index: IntArray) -> IntArray:
    """Renumber indices as 0, 1, 2, ... in order, so that there are no gaps.

    Gaps arise from trajectories or groups without trained tokens.
    """
    return np.asarray(np.unique(index, return_inverse=True)[1], np.int64)


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
