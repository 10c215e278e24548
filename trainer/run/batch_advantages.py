"""Compute a batch's advantages, once its values are known."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trainer.algorithms.advantages.token import FloatArray, batch_normalize
from trainer.algorithms.estimators import advantages_of_rewards
from trainer.batches.data import Batch
from trainer.config.function_keys import bind
from trainer.config.functions import ADVANTAGE_ESTIMATOR
from trainer.config.train_config import TrainConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimates:
    """Result of `estimate` for a batch of T response tokens; all float32.

    Attributes:
        advantages: [T] advantages to train with; 0 at tokens that do not train.
        raw: [T] the same before `advantage_batch_normalize`.
        value_targets: [T] target values of the critic, NaN at tokens that do not train; None
            without a critic.
    """

    advantages: Tensor
    raw: Tensor
    value_targets: Tensor | None


def estimate(batch: Batch, config: TrainConfig, values: Tensor | None = None) -> Estimates:
    """Estimate advantages per trained token with `config.advantage_estimator`.

    Args:
        batch: A whole batch: means and variances are over all its trained tokens, independent of
            mini-batches and micro-batches.
        config: Configuration of the run.
        values: [T] float32 critic values at the trained tokens; None without a critic.

    Raises:
        RolloutError: If a user's estimator fails, or its result is invalid.
    """
    at = torch.from_numpy(batch.chains.slots)
    known = None if values is None else values[at].numpy().astype(np.float64)
    raw, targets = _along_chains(batch, config, known)
    advantages = batch_normalize(raw) if config.advantage_batch_normalize else raw

    def spread(found: FloatArray, fill: float) -> Tensor:
        tokens = torch.full((len(batch.trains),), fill)
        tokens[at] = torch.from_numpy(found).float()
        return tokens

    return Estimates(
        advantages=spread(advantages, 0.0),
        raw=spread(raw, 0.0),
        value_targets=None if targets is None else spread(targets, torch.nan),
    )


def _along_chains(
    batch: Batch, config: TrainConfig, values: FloatArray | None
) -> tuple[FloatArray, FloatArray | None]:
    """[N] Compute advantages and critic targets, in the order of `batch.chains`."""
    slots = batch.chains.slots
    if not config.estimates_by_token:
        return batch.advantages.numpy()[slots].astype(np.float64), None
    group = batch.group[batch.responses.row_of(slots)]
    rewards, trajectory = batch.chains.rewards, batch.chains.trajectory
    estimator = bind(ADVANTAGE_ESTIMATOR, config)
    return advantages_of_rewards(rewards, trajectory, group, values, estimator)
