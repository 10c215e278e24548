"""Optimizers, and the learning rate of each update."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from schemas.extras import requires_extra
from trainer.config.train_config import TrainConfig


def make_optimizer(
    parameters: Iterable[nn.Parameter],
    config: TrainConfig,
    *,
    learning_rate: float,
    device: torch.device,
) -> torch.optim.Optimizer:
    """Make the AdamW of `config.optimizer` for trained parameters; torch's is fused on a GPU.

    Args:
        parameters: Parameters of a model; frozen ones are ignored.
        config: Configuration of the run.
        learning_rate: Learning rate of the policy, or of the critic.
        device: Device of the parameters.

    Raises:
        MissingExtra: If adamw_8bit is configured and bitsandbytes is not installed.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    settings: dict[str, Any] = {
        "lr": learning_rate,
        "betas": config.betas,
        "weight_decay": config.weight_decay,
    }
    if config.optimizer == "adamw":
        return torch.optim.AdamW(trained, fused=device.type == "cuda" or None, **settings)
    with requires_extra("bnb", "optimizer adamw_8bit"):
        bitsandbytes = importlib.import_module("bitsandbytes")
    eight_bit: torch.optim.Optimizer = bitsandbytes.optim.AdamW8bit(trained, **settings)
    return eight_bit


def learning_rate_factor(config: TrainConfig, *, num_planned: int, global_step: int) -> float:
    """Compute the factor of the learning rate for the next update.

    For N planned updates, of which W are warmup, after s updates:

        s < W     (s + 1) / (W + 1)
        constant  1
        linear    1 - p                 p = (s - W) / (N - W)
        cosine    (1 + cos(pi p)) / 2

    So no update has a rate of 0. After the warmup, these are the schedules of
    `transformers.get_scheduler`, whose warmup starts with an update at 0.

    Args:
        config: Configuration of the run.
        num_planned: N, the maximum number of updates.
        global_step: s, the number of updates so far, not counting skipped ones.

    Example:
        >>> paths = {"dataset": "ds", "model": "m", "out": "o"}
        >>> linear = TrainConfig(**paths, learning_rate_schedule="linear", warmup_updates=1)
        >>> [learning_rate_factor(linear, num_planned=5, global_step=s) for s in range(5)]
        [0.5, 1.0, 0.75, 0.5, 0.25]
    """
    warmup = config.warmup_updates
    if global_step < warmup:
        return (global_step + 1) / (warmup + 1)
    if config.learning_rate_schedule == "constant":
        return 1.0
    done = (global_step - warmup) / max(num_planned - warmup, 1)
    if config.learning_rate_schedule == "linear":
        return 1 - done
    return (1 + math.cos(math.pi * done)) / 2


def set_learning_rates(
    config: TrainConfig,
    policy: torch.optim.Optimizer,
    critic: torch.optim.Optimizer | None,
    *,
    num_planned: int,
    global_step: int,
) -> None:
    """Set the learning rates of the optimizers for the next update."""
    factor = learning_rate_factor(config, num_planned=num_planned, global_step=global_step)
    for optimizer, rate in (
        (policy, config.learning_rate),
        (critic, config.critic_learning_rate),
    ):
        for group in optimizer.param_groups if optimizer else ():
            group["lr"] = rate * factor
