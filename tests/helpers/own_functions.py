"""Functions of a user's: built-in ones written anew, and some that fail."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

import trainer

SEEN: list[dict[str, torch.Tensor]] = []
"""What `watched` was given and what it returned, by micro-batch; what `fails` was given."""


def regular(logprobs: Any, old_logprobs: Any, advantages: Any, low: float, high: float) -> Any:
    ratio = (logprobs - old_logprobs).clamp(-20, 20).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def rollout_is(
    logprobs: Any, rollout_logprobs: Any, advantages: Any, eps_clip_low: Any, eps_clip_high: Any
) -> trainer.TokenLoss:
    ratio = (logprobs - rollout_logprobs).clamp(-20, 20).exp().detach()
    kept = (ratio > 1 - eps_clip_low) & (ratio < 1 + eps_clip_high)
    losses = -torch.where(kept, ratio, 0.0) * advantages * logprobs
    return trainer.TokenLoss(losses, ~kept, {"ratio": ratio})


def supervised(logprobs: Any) -> Any:
    return -logprobs


def rloo(returns: Any, group_index: Any) -> Any:
    sizes = np.bincount(group_index)[group_index]
    mean = np.bincount(group_index, returns)[group_index] / sizes
    return (returns - mean) * sizes / np.maximum(sizes - 1, 1)


def gae(
    rewards: Any, values: Any, trajectory: Any, gamma: float, gae_lambda: float
) -> trainer.CriticAdvantages:
    advantages = np.zeros(len(rewards))
    for t in reversed(range(len(rewards))):
        goes_on = t + 1 < len(rewards) and trajectory[t + 1] == trajectory[t]
        following = values[t + 1] if goes_on else 0.0
        advantages[t] = rewards[t] + gamma * following - values[t]
        if goes_on:
            advantages[t] += gamma * gae_lambda * advantages[t + 1]
    deviation = np.sqrt(advantages.var(ddof=1) + 1e-8)
    whitened = (advantages - advantages.mean()) / deviation
    return trainer.CriticAdvantages(whitened, advantages + values)


def less_group_mean(rewards: Any, group_index: Any) -> Any:
    return rewards - (np.bincount(group_index, rewards) / np.bincount(group_index))[group_index]


def trajectory_mean(trajectory: Any, num_trajectories: int) -> Any:
    return 1 / (num_trajectories * np.bincount(trajectory)[trajectory])


def fails_on_rank_1(logprobs: Any, advantages: Any) -> Any:
    if os.environ.get("RANK") == "1":
        raise ZeroDivisionError("on rank 1")
    return -logprobs * advantages


def fails(logprobs: Any, advantages: Any) -> Any:
    SEEN.append({"logprobs": logprobs})
    return (-logprobs * advantages).sum()


def unlike(logprobs: Any, advantages: Any) -> trainer.TokenLoss:
    names = {f"of_{len(logprobs)}": logprobs.detach()}
    return trainer.TokenLoss(-logprobs * advantages, logprobs > 0, names)


def watched(logprobs: Any, old_logprobs: Any, advantages: Any) -> trainer.TokenLoss:
    losses = regular(logprobs, old_logprobs, advantages, 0.01, 0.01)
    clipped = (logprobs - old_logprobs).abs() > 0.01
    given = {"logprobs": logprobs, "old_logprobs": old_logprobs, "advantages": advantages}
    found = given | {"losses": losses, "clipped": clipped}
    SEEN.append({name: values.detach().clone() for name, values in found.items()})
    return trainer.TokenLoss(losses, clipped)
