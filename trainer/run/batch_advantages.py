"""Compute a batch's advantages, once its values are known."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trainer.algorithms.advantages.token import FloatArray, batch_normalize
from trainer.algorithms.configured import advantages_of_rewards
from trainer.batches.data import Batch
from trainer.config.functions import ADVANTAGE_ESTIMATOR, bind
from trainer.config.sections import AdvantageConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimates:
    """Result of `estimate` for a batch of T response tokens; all float32.

    Attributes:
        advantages: [T] advantages to train with, 0 at untrained tokens; all 1 if the loss uses no
            advantages.
        raw: [T] advantages before `advantage.batch_normalize`.
        value_targets: [T] target values for the critic, NaN at untrained tokens; None if there is
            no critic.
    """

    advantages: Tensor
    raw: Tensor
    value_targets: Tensor | None


def estimate(
    batch: Batch,
    advantage: AdvantageConfig,
    values: Tensor | None = None,
    *,
    is_supervised: bool = False,
) -> Estimates:
    """Estimate advantages per trained token with `advantage.estimator`.

    Args:
        batch: A complete batch: means and variances are over all its trained tokens, independent of
            mini-batches and micro-batches.
        advantage: Estimator and normalisation.
        values: [T] float32 critic values at the trained tokens; None without a critic.
        is_supervised: True if the loss uses no advantages.

    Raises:
        InputError: A user's estimator fails, or its result is invalid.
    """
    at = torch.from_numpy(batch.chains.slots)
    known = None if values is None else values[at].numpy().astype(np.float64)
    raw, targets = _along_chains(batch, advantage, known)
    advantages = batch_normalize(raw) if advantage.batch_normalize else raw

    def spread(found: FloatArray, fill: float) -> Tensor:
        tokens = torch.full((len(batch.trains),), fill)
        tokens[at] = torch.from_numpy(found).float()
        return tokens

    unused = torch.ones(len(batch.trains))
    return Estimates(
        advantages=unused if is_supervised else spread(advantages, 0.0),
        raw=spread(raw, 0.0),
        value_targets=None if targets is None else spread(targets, torch.nan),
    )


def _along_chains(
    batch: Batch, advantage: AdvantageConfig, values: FloatArray | None
) -> tuple[FloatArray, FloatArray | None]:
    """Compute advantages and critic targets ([N] each), in the order of `batch.chains`."""
    slots = batch.chains.slots
    if not advantage.by_token:
        return batch.advantages.numpy()[slots].astype(np.float64), None
    group = batch.group[batch.responses.row_of(slots)]
    rewards, trajectory = batch.chains.rewards, batch.chains.trajectory
    estimator = bind(ADVANTAGE_ESTIMATOR, advantage)
    return advantages_of_rewards(rewards, trajectory, group, values, estimator)
