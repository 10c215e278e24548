"""Train a policy from a rollout dataset. Importing this package does not import torch.

Example:
    >>> import trainer
    >>> paths = {"data.dataset": "ds", "model.path": "smollm2", "run.out": "run"}
    >>> config = trainer.load_config(None, ["loss.eps_clip_high=0.28"], paths)
    >>> result = trainer.train(config)  # doctest: +SKIP
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollout_io.startup import require_ours

require_ours("pipelines")

from schemas.errors import RolloutError  # noqa: E402, F401
from schemas.imports import exports, requires_extra  # noqa: E402

if TYPE_CHECKING:
    from trainer.algorithms.advantages import CriticAdvantages
    from trainer.algorithms.losses import TokenLoss
    from trainer.config.sections import (
        AdvantageConfig,
        BatchConfig,
        DataConfig,
        LossConfig,
        ModelConfig,
        OptimizerConfig,
        RunConfig,
    )
    from trainer.config.train_config import TrainConfig, load_config
    from trainer.reports.dry_run import DryRun
    from trainer.training import TrainResult

__all__ = [
    "AdvantageConfig",
    "BatchConfig",
    "CriticAdvantages",
    "DataConfig",
    "LossConfig",
    "ModelConfig",
    "OptimizerConfig",
    "RunConfig",
    "TokenLoss",
    "TrainConfig",
    "dry_run",
    "load_config",
    "train",
]

__getattr__, __dir__ = exports(__name__, __file__, __all__)


def train(config: TrainConfig, *, resume: bool = False) -> TrainResult:
    """Train a policy on a rollout dataset, or resume a run: see `trainer.training.train`.

    Raises:
        RolloutError: The dataset, the model or the configuration cannot be used for training, or
            torch is not installed.
    """
    with requires_extra("train", "rollouts train"):
        from trainer import training
    return training.train(config, resume=resume)


def dry_run(config: TrainConfig, *, resume: bool = False) -> DryRun:
    """Check a run and report what `train` would do: see `trainer.reports.dry_run.dry_run`.

    Raises:
        RolloutError: See `train`.
    """
    with requires_extra("train", "rollouts train"):
        from trainer.reports.dry_run import dry_run as plan_run
    return plan_run(config, resume=resume)
