"""The RL loop: generate, train, load the new weights, repeat. Does not import torch.

Example:
    >>> from trainer import rl
    >>> config = rl.load_rl_config("addition.toml", ["run.out=run"])  # doctest: +SKIP
    >>> result = rl.run(config)  # doctest: +SKIP
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from schemas.imports import requires_extra
from trainer.rl.config import LoopConfig, RlConfig, load_rl_config

if TYPE_CHECKING:
    from pipelines.generation.run import OpenEngine
    from trainer.rl.loop import RlResult

__all__ = ["LoopConfig", "RlConfig", "load_rl_config", "run"]


def run(
    config: RlConfig, *, resume: bool = False, open_engine: OpenEngine | None = None
) -> RlResult:
    """Train a policy on its own samples, or resume a run: see `trainer.rl.loop.run`.

    Raises:
        RolloutError: See `trainer.rl.loop.run`; or torch is not installed.
    """
    with requires_extra("train", "rollouts rl"):
        from trainer.forensics.audit.audit import IterationAudit
        from trainer.rl import loop
    audit = IterationAudit(config=config, source=Path(config.model.path).absolute())
    checks = audit.check if config.loop.audit_rows else None
    return loop.run(config, resume=resume, open_engine=open_engine, audit=checks)
