"""Advantages of a batch: the KL divergence in the reward, and estimation once values are known."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import polars as pl
import torch
from accelerate import Accelerator
from torch import Tensor

from schemas.ragged import FloatArray, IntArray
from trainer.algorithms.advantages import batch_normalize
from trainer.algorithms.kl import adapted_kl_coef, kl_estimates, rewards_less_kl
from trainer.algorithms.own_functions import call_function
from trainer.batch import Batch
from trainer.batches.plan import Plan, trajectory_advantages, trajectory_estimator
from trainer.config.functions import ADVANTAGE_ESTIMATOR, Function, bind
from trainer.config.sections import AdvantageConfig, LossConfig
from trainer.config.train_config import TrainConfig
from trainer.distributed.processes import Pooled, of_all_processes, over_processes


def estimate_advantages(
    accelerator: Accelerator,
    batch: Batch,
    advantage: AdvantageConfig,
    *,
    is_supervised: bool = False,
) -> Batch:
    """Estimate the advantages of a complete batch: `advantages`, `raw_advantages`, `value_targets`.

    Estimators of token rewards (gae, reinforce++) run here. Those of a trajectory (grpo, rloo,
    maxrl, gdpo) ran in `trainer.batches.plan`, which knows whole groups; their result passes. Means
    and variances are over all trained tokens of the batch, independent of mini-batches and
    micro-batches. If the loss uses no advantages (`is_supervised`), all are 1.

    Raises:
        InputError: A user's estimator fails, or its result is invalid.
    """
    at = torch.from_numpy(batch.chains.slots)
    values = None if batch.values is None else batch.values[at].numpy().astype(np.float64)
    gathered_places = np.arange(len(at))
    if advantage.by_token:
        raw, targets, gathered_places = _along_chains(accelerator, batch, advantage, values)
    else:
        raw, targets = batch.advantages.numpy()[batch.chains.slots].astype(np.float64), None
        if advantage.normalizes_batch:
            (raw,), gathered_places = of_all_processes(accelerator, batch.chains.trajectory, [raw])
    advantages = batch_normalize(raw) if advantage.normalizes_batch else raw

    def spread(per_target: FloatArray, fill: float) -> Tensor:
        tokens = torch.full((len(batch.trains),), fill)
        tokens[at] = torch.from_numpy(per_target[gathered_places]).float()
        return tokens

    return dataclasses.replace(
        batch,
        advantages=torch.ones(len(batch.trains)) if is_supervised else spread(advantages, 0.0),
        raw_advantages=spread(raw, 0.0),
        value_targets=None if targets is None else spread(targets, torch.nan),
    )


def _along_chains(
    accelerator: Accelerator, batch: Batch, advantage: AdvantageConfig, values: FloatArray | None
) -> tuple[FloatArray, FloatArray | None, IntArray]:
    """Compute advantages and critic targets of the chains of all processes.

    Returns:
        Advantages and targets ([N] each), and the positions of `batch.chains` in them.
    """
    trajectory, group = (
        batch.chains.trajectory,
        batch.group[batch.responses.row_of(batch.chains.slots)],
    )
    columns = [batch.chains.rewards, trajectory, group, *([] if values is None else [values])]
    (rewards, trajectory, group, *rest), gathered_places = of_all_processes(
        accelerator, trajectory, columns
    )
    estimator = bind(ADVANTAGE_ESTIMATOR, advantage)
    known = rest[0] if rest else None
    return *advantages_of_rewards(rewards, trajectory, group, known, estimator), gathered_places


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
        # Numbered without the trajectories and groups that have no trained tokens.
        "trajectory": np.unique(trajectory, return_inverse=True)[1],
        "group_index": np.unique(group_index, return_inverse=True)[1],
        "values": values,
    }
    result = call_function(estimator, **{name: arrays[name] for name in estimator.inputs})
    if "values" in estimator.inputs:
        return result.advantages, result.value_targets
    return result, None


def subtract_kl(
    accelerator: Accelerator,
    batch: Batch,
    plan: Plan,
    groups: Sequence[str],
    config: TrainConfig,
    coef: float,
) -> tuple[Batch, dict[str, float]]:
    """Subtract coef times the estimated divergence from every trained token's reward.

    A trajectory's return decreases by the sum over its trained tokens, and advantages are estimated
    again within its group. For token-level estimators, each token's reward decreases by coef
    times the token's estimate. Without `loss.kl_reward_coef`, nothing changes.

    Returns:
        The batch, and metrics of the divergence.
    """
    old_logprobs, ref_logprobs = batch.old_logprobs, batch.ref_logprobs
    if not config.loss.kl_reward_coef or old_logprobs is None or ref_logprobs is None:
        return batch, {}
    slots = batch.chains.slots
    at = torch.from_numpy(slots)
    kl = kl_estimates(
        old_logprobs[at].double(), ref_logprobs[at].double(), config.loss.kl_estimator_type
    )
    rewards = rewards_less_kl(torch.from_numpy(batch.chains.rewards), kl, coef).numpy()
    batch = dataclasses.replace(batch, chains=dataclasses.replace(batch.chains, rewards=rewards))
    if estimator := trajectory_estimator(config):
        trajectory = batch.trajectory[batch.responses.row_of(slots)]
        num = int(batch.trajectory.max(initial=-1)) + 1
        charges = rewards_less_kl(torch.zeros(len(kl)), kl, coef).numpy()
        sums = np.bincount(trajectory, charges, num).astype(np.float64)
        sums = over_processes(accelerator, sums, "sum")
        of_trajectory = _advantages_of_returns(plan, groups, estimator, sums)
        per_row = np.repeat(of_trajectory[batch.trajectory], batch.responses.lengths)
        advantages = torch.from_numpy(per_row).float()
        batch = dataclasses.replace(batch, advantages=advantages)
    pooled = Pooled(accelerator, kl)
    size = {"loss/avg_kl": pooled.mean, "loss/avg_kl_max": pooled.highest} if pooled.number else {}
    return batch, {"loss/kl_reward_coef": coef} | size


def _advantages_of_returns(
    plan: Plan, groups: Sequence[str], estimator: Function, change: FloatArray
) -> FloatArray:
    """Compute advantages of a batch's trajectories, ordered by id, from changed returns."""
    trajectories = plan.trajectories.filter(pl.col("instance_id").is_in(list(groups)))
    trajectories = trajectories.sort("trajectory_id")
    assert len(trajectories) == len(change)
    trajectories = trajectories.with_columns(pl.col("return") + pl.Series(change))
    return np.asarray(trajectory_advantages(trajectories, estimator), dtype=np.float64)


def next_kl_coef(coef: float, metrics: dict[str, float], batch: Batch, loss: LossConfig) -> float:
    """Return the coefficient of the next batch: constant, or set by the adaptive controller."""
    if loss.kl_ctrl_type == "fixed" or "loss/avg_kl" not in metrics:
        return coef
    return adapted_kl_coef(
        coef,
        kl=metrics["loss/avg_kl"],
        target=loss.kl_target,
        num_sequences=len(np.unique(batch.trajectory)),
        horizon=loss.kl_horizon,
    )
