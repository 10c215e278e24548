"""Optimizers, and the learning rate of each update."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from schemas.extras import requires_extra


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSettings:
    """Configuration keys shared by the optimizers of the policy and the critic."""

    optimizer: Literal["adamw", "adamw_8bit"]
    betas: tuple[float, float]
    weight_decay: float


def make_optimizer(
    parameters: Iterable[nn.Parameter],
    settings: OptimizerSettings,
    *,
    learning_rate: float,
    device: torch.device,
) -> torch.optim.Optimizer:
    """Create the AdamW optimizer that `settings.optimizer` names, without the frozen parameters.

    On a GPU, torch's AdamW uses its fused implementation.

    Raises:
        MissingExtra: The optimizer is adamw_8bit and bitsandbytes is not installed.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    given: dict[str, Any] = {
        "lr": learning_rate,
        "betas": settings.betas,
        "weight_decay": settings.weight_decay,
    }
    if settings.optimizer == "adamw":
        return torch.optim.AdamW(trained, fused=device.type == "cuda" or None, **given)
    with requires_extra("bnb", "optimizer adamw_8bit"):
        bitsandbytes = importlib.import_module("bitsandbytes")
    eight_bit: torch.optim.Optimizer = bitsandbytes.optim.AdamW8bit(trained, **given)
    return eight_bit


@dataclass(frozen=True, kw_only=True, slots=True)
class RateSchedule:
    """Schedule of the learning rates of a run.

    Attributes:
        kind: Learning rate after the warmup: constant, or decaying to 0.
        warmup_updates: W, the number of updates over which the rate rises.
        num_planned: N, the maximum number of updates.

    Example:
        >>> linear = RateSchedule(kind="linear", warmup_updates=1, num_planned=5)
        >>> [linear.factor(global_step) for global_step in range(5)]
        [0.5, 1.0, 0.75, 0.5, 0.25]
    """

    kind: Literal["constant", "linear", "cosine"]
    warmup_updates: int
    num_planned: int

    def factor(self, global_step: int) -> float:
        """Compute the next update's learning rate as a fraction of the peak.

        After s of N planned updates, with a warmup of W updates:

            s < W     (s + 1) / (W + 1)
            constant  1
            linear    1 - p                 p = (s - W) / (N - W)
            cosine    (1 + cos(pi p)) / 2

        Thus no update has a rate of 0. After the warmup, these are the schedules of
        `transformers.get_scheduler`, whose warmup starts at a rate of 0.

        Args:
            global_step: s, the number of updates so far, not counting skipped ones.
        """
        warmup = self.warmup_updates
        if global_step < warmup:
            return (global_step + 1) / (warmup + 1)
        if self.kind == "constant":
            return 1.0
        done = (global_step - warmup) / max(self.num_planned - warmup, 1)
        if self.kind == "linear":
            return 1 - done
        return (1 + math.cos(math.pi * done)) / 2


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Set the learning rate of an optimizer for the next update."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
