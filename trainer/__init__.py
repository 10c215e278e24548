"""Train a policy from a rollout dataset. Importing this package imports no torch.

Example:
    >>> import trainer
    >>> config = trainer.TrainConfig(dataset="ds", model="smollm2", out="run")
    >>> result = trainer.train(config)  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from schemas.errors import RolloutError
from trainer.config import TrainConfig, load_config

if TYPE_CHECKING:
    from trainer.loop import TrainResult
    from trainer.preview import DryRun

__all__ = ["TrainConfig", "dry_run", "load_config", "train"]


def train(config: TrainConfig, *, resume: bool = False) -> TrainResult:
    """Train a policy on a rollout dataset, or go on with it: see `trainer.loop.train`.

    Raises:
        RolloutError: Dataset, model or configuration cannot be trained as asked, or torch is not
            installed.
    """
    with torch_is_needed("rollouts train"):
        from trainer import loop
    return loop.train(config, resume=resume)


def dry_run(config: TrainConfig, *, resume: bool = False) -> DryRun:
    """Check a run as `train` does and say what it would do: see `trainer.preview.dry_run`.

    Raises:
        RolloutError: As `train`.
    """
    with torch_is_needed("rollouts train"):
        from trainer.preview import dry_run as plan_run
    return plan_run(config, resume=resume)


@contextmanager
def torch_is_needed(verb: str) -> Iterator[None]:
    """Say what to install where the trainer's libraries are missing.

    Raises:
        RolloutError: extra_installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in {"torch", "accelerate", "transformers"}:
            raise
        hint = 'pip install "rollout-io[train]"'
        got = f"no package {error.name!r}"
        expected = "torch, transformers and accelerate"
        raise RolloutError("extra_installed", verb, got, expected, hint) from None
