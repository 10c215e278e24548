"""Train a policy from a rollout dataset. Importing this package imports no torch.

Example:
    >>> import trainer
    >>> config = trainer.TrainConfig(dataset="ds", model="smollm2", out="run")
    >>> result = trainer.train(config)  # doctest: +SKIP
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from schemas.errors import RolloutError
from trainer.config import TrainConfig, load_config

if TYPE_CHECKING:
    from trainer.loop import TrainResult

__all__ = ["TrainConfig", "load_config", "train"]


def train(config: TrainConfig, *, resume: bool = False) -> TrainResult:
    """Train a policy on a rollout dataset, or go on with it: see `trainer.loop.train`.

    Raises:
        RolloutError: Dataset, model or configuration cannot be trained as asked, or torch is not
            installed.
    """
    try:
        from trainer import loop
    except ModuleNotFoundError as error:
        if error.name not in {"torch", "accelerate", "transformers"}:
            raise
        hint = 'pip install "rollout-io[train]"'
        got = f"no package {error.name!r}"
        expected = "torch, transformers and accelerate"
        raise RolloutError("extra_installed", "rollouts train", got, expected, hint) from None
    return loop.train(config, resume=resume)
