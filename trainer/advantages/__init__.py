"""Advantages: from a trajectory's return (`outcome`), or token by token along its chain (`token`)."""

from trainer.advantages.outcome import grpo, maxrl, rloo
from trainer.advantages.token import batch_normalize, discounted_returns, gae, whiten

__all__ = [
    "batch_normalize",
    "discounted_returns",
    "gae",
    "grpo",
    "maxrl",
    "rloo",
    "whiten",
]
