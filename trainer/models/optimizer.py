"""Optimizers: their learning rate at each update, and their step with clipped gradients."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from schemas.imports import requires_extra
from trainer.config.sections import OptimizerConfig


def make_optimizer(
    parameters: Iterable[nn.Parameter],
    config: OptimizerConfig,
    *,
    learning_rate: float,
    device: torch.device,
) -> torch.optim.Optimizer:
    """Create the AdamW optimizer that `config.algorithm` names, without the frozen parameters.

    On a GPU, torch's AdamW uses its fused implementation.

    Raises:
        MissingExtra: The optimizer is adamw_8bit and bitsandbytes is not installed.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    arguments: dict[str, Any] = {
        "lr": learning_rate,
        "betas": config.betas,
        "weight_decay": config.weight_decay,
    }
    if config.algorithm == "adamw":
        return torch.optim.AdamW(trained, fused=device.type == "cuda" or None, **arguments)
    with requires_extra("bnb", "optimizer adamw_8bit"):
        bitsandbytes = importlib.import_module("bitsandbytes")
    eight_bit: torch.optim.Optimizer = bitsandbytes.optim.AdamW8bit(trained, **arguments)
    return eight_bit


def clip_and_step(
    parameters: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer, max_norm: float
) -> float:
    """Clip the gradient's L2 norm over the shards of all processes, step, and clear the gradient.

    No step is taken if the norm is not finite.

    Returns:
        The norm before clipping.
    """
    total_norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    norm = float(total_norm.full_tensor() if isinstance(total_norm, DTensor) else total_norm)
    if math.isfinite(norm):
        optimizer.step()
    optimizer.zero_grad()
    return norm


def rate_factor(config: OptimizerConfig, num_planned: int, global_step: int) -> float:
    """Compute the next update's learning rate as a fraction of the peak.

    After s of N planned updates, with a warmup of W updates:

        s < W     (s + 1) / (W + 1)
        constant  1
        linear    1 - p                 p = (s - W) / (N - W)
        cosine    (1 + cos(pi p)) / 2

    Thus no update has a rate of 0. After the warmup, these are the schedules of
    `transformers.get_scheduler`, whose warmup starts at a rate of 0.

    Args:
        config: Schedule and warmup.
        num_planned: N, the maximum number of updates.
        global_step: s, the number of updates so far, not counting skipped ones.

    Example:
        >>> linear = OptimizerConfig(learning_rate_schedule="linear", warmup_updates=1)
        >>> [rate_factor(linear, 5, global_step) for global_step in range(5)]
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


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Set the learning rate of an optimizer for the next update."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
