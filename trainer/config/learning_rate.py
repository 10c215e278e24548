"""Usual learning rates by method, and what a run says about its own.

Sources: the defaults of TRL's GRPOTrainer (1e-6) and SFTTrainer (2e-5), documented at
huggingface.co/docs/trl; ten times the rate with LoRA, for supervised training and RL alike:
Schulman et al. (2025), "LoRA Without Regret".
"""

from __future__ import annotations

import logging
from typing import TypedDict

RL, IMITATION, LORA_FACTOR = 1e-6, 2e-5, 10
HIGHEST = 1e-2
"""Learning rate above which AdamW destroys a pretrained model, with or without LoRA."""


class Method(TypedDict):
    """What the usual learning rate of a run depends on; see `usual_learning_rate`."""

    imitates: bool
    has_adapter: bool


def usual_learning_rate(*, imitates: bool, has_adapter: bool) -> float:
    """Return the usual peak learning rate of a method.

    Args:
        imitates: Whether the loss uses no advantages, as `cross_entropy` and `distill`.
        has_adapter: Whether LoRA adapters are trained instead of all weights.

    Example:
        >>> usual_learning_rate(imitates=False, has_adapter=True)
        1e-05
    """
    rate = IMITATION if imitates else RL
    return float(f"{rate * LORA_FACTOR:g}") if has_adapter else rate


def described(rate: float, *, imitates: bool, has_adapter: bool) -> tuple[str, int]:
    """Return a remark about the learning rate of a run, and its level for `logging`."""
    method = (
        f"{'imitation' if imitates else 'RL'} {'with LoRA' if has_adapter else 'of all weights'}"
    )
    usual = usual_learning_rate(imitates=imitates, has_adapter=has_adapter)
    if rate > HIGHEST:
        text = f"learning rate {rate:g} will probably destroy the model"
        return f"{text}; usual for {method}: {usual:g} (--lr {usual:g})", logging.WARNING
    note = f"usual for {method}" if rate == usual else f"usual for {method}: {usual:g}"
    return f"learning rate {rate:g} ({note})", logging.INFO
