"""The advantages a batch trains on, once its values are known."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trainer.advantages.token import FloatArray, batch_normalize, discounted_returns, gae, whiten
from trainer.config import TrainConfig
from trainer.data import Batch


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimates:
    """What `estimate` makes of a batch of T response tokens; all float32.

    Attributes:
        advantages: [T] what trains; 0 at tokens that do not.
        raw: [T] the same before `advantage_batch_normalize`.
        value_targets: [T] what the critic should say, NaN at tokens that do not train; None
            without a critic.
    """

    advantages: Tensor
    raw: Tensor
    value_targets: Tensor | None


def estimate(batch: Batch, config: TrainConfig, values: Tensor | None = None) -> Estimates:
    """Advantages by `config.advantage_estimator`, per trained token.

    Args:
        batch: A whole batch: means and variances are over all of its trained tokens, however it
            is cut into mini-batches and micro-batches.
        config: The run's configuration.
        values: [T] float32 of the critic at the trained tokens; for gae.
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
    """[N] advantages and targets of the critic, in the order of `batch.chains`."""
    rewards, trajectory = batch.chains.rewards, batch.chains.trajectory
    if config.advantage_estimator == "reinforce++":
        return whiten(discounted_returns(rewards, trajectory, gamma=config.gamma)), None
    if config.advantage_estimator != "gae":
        return batch.advantages.numpy()[batch.chains.slots].astype(np.float64), None
    assert values is not None
    settings = {"gamma": config.gamma, "lam": config.gae_lambda}
    advantages = gae(rewards, values, trajectory, **settings)
    return whiten(advantages), advantages + values
