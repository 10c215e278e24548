"""Advantages from a trajectory's return (`outcome`), or per token along its chain (`token`)."""

from trainer.algorithms.advantages.outcome import gdpo, grpo, maxrl, rloo
from trainer.algorithms.advantages.token import batch_normalize, discounted_returns, gae, whiten

__all__ = [
    "batch_normalize",
    "discounted_returns",
    "gae",
    "gdpo",
    "grpo",
    "maxrl",
    "rloo",
    "whiten",
]
