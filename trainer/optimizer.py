"""What steps the weights, and how far: optimizers, and the learning rate of each update."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from schemas.errors import RolloutError
from trainer.config import TrainConfig


def make_optimizer(
    parameters: Iterable[nn.Parameter],
    config: TrainConfig,
    *,
    learning_rate: float,
    device: torch.device,
) -> torch.optim.Optimizer:
    """AdamW of the parameters that train, as `config.optimizer` has it; on a GPU torch's is fused.

    Args:
        parameters: Those of a model; the frozen ones are left out.
        config: The run's configuration.
        learning_rate: Of the policy, or of the critic.
        device: Where the parameters will be.

    Raises:
        RolloutError: adamw_8bit, and bitsandbytes is not installed.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    settings: dict[str, Any] = {
        "lr": learning_rate,
        "betas": config.betas,
        "weight_decay": config.weight_decay,
    }
    if config.optimizer == "adamw":
        return torch.optim.AdamW(trained, fused=device.type == "cuda" or None, **settings)
    try:
        bitsandbytes = importlib.import_module("bitsandbytes")
    except ModuleNotFoundError as error:
        got, hint = f"no package {error.name!r}", 'pip install "rollout-io[bnb]"'
        where, expected = "optimizer adamw_8bit", "bitsandbytes"
        raise RolloutError("extra_installed", where, got, expected, hint) from None
    eight_bit: torch.optim.Optimizer = bitsandbytes.optim.AdamW8bit(trained, **settings)
    return eight_bit


def learning_rate_factor(config: TrainConfig, *, num_planned: int, global_step: int) -> float:
    """What the learning rate of the next update is multiplied by.

    Of N planned updates, W of them warmup, the one after s others has

        s < W     (s + 1) / (W + 1)
        constant  1
        linear    1 - p                 p = (s - W) / (N - W)
        cosine    (1 + cos(pi p)) / 2

    so that no update is made at a rate of 0. After the warmup these are the schedules of
    `transformers.get_scheduler`, whose warmup begins with an update at 0.

    Args:
        config: The run's configuration.
        num_planned: N, the most updates that the run can make.
        global_step: s, the updates made so far; skipped ones do not count.

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
    """Give the optimizers the learning rates of the next update."""
    factor = learning_rate_factor(config, num_planned=num_planned, global_step=global_step)
    for optimizer, rate in (
        (policy, config.learning_rate),
        (critic, config.critic_learning_rate),
    ):
        for group in optimizer.param_groups if optimizer else ():
            group["lr"] = rate * factor
