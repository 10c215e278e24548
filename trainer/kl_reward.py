"""KL divergence in the reward: what a batch's trajectories earn less what they drifted."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import polars as pl
import torch
from torch import Tensor

from trainer.advantages.outcome import FloatArray
from trainer.config import TrainConfig
from trainer.data import Batch
from trainer.losses.kl import adapted_kl_coef, kl_estimates, rewards_less_kl
from trainer.plan import TOKEN_ESTIMATORS, Plan, trajectory_advantages


def charge_kl(
    batch: Batch,
    plan: Plan,
    groups: Sequence[str],
    config: TrainConfig,
    *,
    old_logprobs: Tensor,
    ref_logprobs: Tensor,
    coef: float,
) -> tuple[Batch, dict[str, float]]:
    """Take coef times the estimated divergence off every trained token's reward.

    A trajectory's return is less by the sum over its trained tokens, and its advantage is
    estimated anew among those of its group; token by token, each token's reward is less by its own.

    Args:
        batch: A whole batch.
        plan: The run's plan.
        groups: The groups of the batch.
        config: The run's configuration.
        old_logprobs: [T] of the policy at the batch's start, at the trained tokens.
        ref_logprobs: [T] of the reference, likewise.
        coef: Weight.

    Returns:
        The batch, and metrics about the estimates.
    """
    slots = batch.chains.slots
    at = torch.from_numpy(slots)
    kl = kl_estimates(
        old_logprobs[at].double(), ref_logprobs[at].double(), config.kl_estimator_type
    )
    rewards = rewards_less_kl(torch.from_numpy(batch.chains.rewards), kl, coef).numpy()
    batch = dataclasses.replace(batch, chains=dataclasses.replace(batch.chains, rewards=rewards))
    if config.advantage_estimator not in TOKEN_ESTIMATORS:
        trajectory = batch.trajectory[batch.responses.row_of(slots)]
        num = int(batch.trajectory.max(initial=-1)) + 1
        charges = rewards_less_kl(torch.zeros(len(kl)), kl, coef).numpy()
        sums = np.bincount(trajectory, charges, num).astype(np.float64)
        found = _advantages_of_returns(plan, groups, config, sums)
        per_row = np.repeat(found[batch.trajectory], batch.responses.lengths)
        advantages = torch.from_numpy(per_row).float()
        batch = dataclasses.replace(batch, advantages=advantages)
    size = {"loss/avg_kl": kl.mean(), "loss/avg_kl_max": kl.max()} if len(kl) else {}
    return batch, {"loss/kl_reward_coef": coef} | {name: float(v) for name, v in size.items()}


def _advantages_of_returns(
    plan: Plan, groups: Sequence[str], config: TrainConfig, change: FloatArray
) -> FloatArray:
    """Advantages of a batch's trajectories, in the order of their ids, after their returns change."""
    trajectories = plan.trajectories.filter(pl.col("instance_id").is_in(list(groups)))
    trajectories = trajectories.sort("trajectory_id")
    assert len(trajectories) == len(change)
    trajectories = trajectories.with_columns(pl.col("return") + pl.Series(change))
    return np.asarray(trajectory_advantages(trajectories, config), dtype=np.float64)


def next_coef(coef: float, metrics: dict[str, float], batch: Batch, config: TrainConfig) -> float:
    """The coefficient of the next batch: the same, or what the adaptive controller makes of it."""
    if config.kl_ctrl_type == "fixed" or "loss/avg_kl" not in metrics:
        return coef
    return adapted_kl_coef(
        coef,
        kl=metrics["loss/avg_kl"],
        target=config.kl_target,
        num_sequences=len(np.unique(batch.trajectory)),
        horizon=config.kl_horizon,
    )
