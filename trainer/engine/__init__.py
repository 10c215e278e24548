"""Engines, of which `open_engine` opens one: vLLM servers, vLLM in this process, or Transformers."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from pipelines.generation.config import GenerateConfig
from pipelines.generation.engines.base import Engine
from rollout_io.retokenize.tokenizer import load_tokenizer
from schemas.imports import requires_extra


def open_engine(config: GenerateConfig) -> Engine:
    """Open the engine of a configuration.

    Raises:
        RolloutError: The engine cannot be created.
        MissingExtra: A package that the engine needs is not installed.
    """
    if config.urls:
        extra, opened = "generate", _served
    elif config.is_colocated:
        extra, opened = "vllm", _colocated
    else:
        extra, opened = "train", _embedded
    with requires_extra(extra, f"engine {config.engine}"):
        return opened(config)


def _served(config: GenerateConfig) -> Engine:
    from pipelines.generation.engines.http_pool import Limits
    from pipelines.generation.engines.vllm import VllmEngine
    from trainer.engine.nccl_sender import open_nccl_sender

    limits = Limits(max_concurrent=config.max_concurrency, requests_per_s=config.requests_per_s)
    return VllmEngine(
        config.urls,
        limits=limits,
        policy_version=config.policy_version,
        senders={"nccl": open_nccl_sender},
        special_tokens=_inner_special_tokens(config.model),
    )


def _inner_special_tokens(model: str) -> frozenset[str]:
    """Return the special tokens that do not end a response: vLLM ends it at those before any stop."""
    tokenizer = load_tokenizer(model, needs_template=False)
    ends = {tokenizer.eos_token_id}
    file = Path(model) / "generation_config.json"
    with suppress(OSError, ValueError, AttributeError):
        named = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
        ends |= set(named) if isinstance(named, list) else {named}
    return frozenset(text for i, text in tokenizer.special_tokens.items() if i not in ends)


def _colocated(config: GenerateConfig) -> Engine:
    from trainer.config.train_config import default_dtype
    from trainer.engine.colocated import ColocatedVllm, check_arguments

    check_arguments(config.engine_args)
    return ColocatedVllm(
        config.model,
        load_tokenizer(config.model, config.chat_template, needs_template=False),
        dtype=config.dtype or default_dtype(),
        arguments=config.engine_args,
        special_tokens=_inner_special_tokens(config.model),
        policy_version=config.policy_version,
    )


def _embedded(config: GenerateConfig) -> Engine:
    import torch

    from trainer.config.train_config import default_dtype
    from trainer.engine.embedded import TransformersEngine

    return TransformersEngine.load(
        config.model,
        chat_template=config.chat_template,
        dtype=getattr(torch, config.dtype or default_dtype()),
        device="cuda" if torch.cuda.is_available() else "cpu",
        policy_version=config.policy_version,
        max_batch_size=config.max_concurrency,
    )
