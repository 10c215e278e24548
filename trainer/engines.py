"""Which engine a configuration asks for."""

from __future__ import annotations

from pipelines.generation.config import GenerateConfig
from pipelines.generation.engine import Engine
from schemas.errors import RolloutError


def open_engine(config: GenerateConfig) -> Engine:
    """The engine of a configuration.

    Raises:
        RolloutError: As the engine's own constructor; extra_installed: its libraries are missing.
    """
    extra = "train" if config.engine == "transformers" else "generate"
    try:
        return _embedded(config) if config.engine == "transformers" else _served(config)
    except ModuleNotFoundError as error:
        hint, got = f'pip install "rollout-io[{extra}]"', f"no package {error.name!r}"
        raise RolloutError("extra_installed", f"engine {config.engine}", got, "", hint) from None


def _served(config: GenerateConfig) -> Engine:
    from pipelines.generation.servers import Limits
    from pipelines.generation.vllm_engine import VllmEngine

    limits = Limits(max_concurrent=config.max_concurrency, requests_per_s=config.requests_per_s)
    return VllmEngine(config.urls, limits=limits, policy_version=config.policy_version)


def _embedded(config: GenerateConfig) -> Engine:
    import torch

    from trainer.engine import TransformersEngine

    return TransformersEngine.load(
        config.model,
        dtype=getattr(torch, config.dtype),
        device="cuda" if torch.cuda.is_available() else "cpu",
        policy_version=config.policy_version,
        max_batch_size=config.max_concurrency,
    )
