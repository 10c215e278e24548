"""Engines of the trainer: `open_engine` opens one, and those in this process share `InProcessEngine`."""

from __future__ import annotations

import dataclasses
import json
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipelines.generation.config import GenerateConfig
from pipelines.generation.engines.base import CONTEXT_LENGTH, Engine, Sampled, Sampling
from rollout_io.retokenize.chat_template import normalize
from rollout_io.retokenize.tokenizer import ChatTokenizer, load_tokenizer
from schemas.errors import EngineError
from schemas.imports import requires_extra

_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


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


class InProcessEngine(ABC):
    """An `Engine` that renders and parses chats itself, and gets whole models.

    Args:
        tokenizer: Tokenizer and chat template of the model.
        policy_version: Version of the weights.
    """

    def __init__(self, tokenizer: ChatTokenizer, policy_version: int) -> None:
        self.tokenizer, self.policy_version = tokenizer, policy_version

    @property
    @abstractmethod
    def context_tokens(self) -> int | None:
        """See `Engine.context_tokens`."""

    @abstractmethod
    async def sample(
        self, prompt_token_ids: Sequence[int], sampling: Sampling, *, session: str | None = None
    ) -> Sampled:
        """See `Engine.sample`."""

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling: Sampling,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        session: str | None = None,
    ) -> Sampled:
        """See `Engine.chat`; messages are normalised for the template as vLLM's server does.

        Tool calls are parsed in the Hermes format.
        """
        arguments = {**self.tokenizer.template_kwargs, **(chat_template_kwargs or {})}
        tokenizer = dataclasses.replace(self.tokenizer, template_kwargs=arguments)
        plain = [normalize(message, f"message {i}") for i, message in enumerate(messages)]
        text = tokenizer.render(plain, tools, generation_prompt=True)
        (ids,) = self.tokenizer.encode([text], ["messages"])
        sampled = await self.sample(ids, sampling, session=session)
        message: dict[str, Any] = {"role": "assistant", "content": sampled.text}
        if tools:
            message = assistant_message(sampled.text)
        called = "tool_calls" in message and sampled.stop_reason == "stop"
        reason = "tool_calls" if called else sampled.stop_reason
        return dataclasses.replace(sampled, message=message, stop_reason=reason)

    async def takes_adapters(self) -> bool:
        """Return False: `load_weights` reads a complete model, usually from the page cache."""
        return False

    def max_tokens(self, prompt: Sequence[int], sampling: Sampling, vocab_size: int) -> int:
        """Return the maximum length of a response, which the model's context may limit.

        Raises:
            EngineError: `engine_refused`: the prompt is empty or has an unknown id;
                `context_length`: it leaves no room for a response.
        """
        rule, context = "engine_refused", self.context_tokens
        if not prompt:
            raise EngineError(rule, "prompt", "0 tokens", "at least 1")
        bad = next((i for i in prompt if not 0 <= i < vocab_size), None)
        if bad is not None:
            expected = f"ids from 0 to {vocab_size - 1}"
            raise EngineError(rule, "prompt", f"token id {bad}", expected)
        if context is None:
            return sampling.max_tokens
        if len(prompt) >= context:
            expected = f"fewer than {context}, the model's context"
            raise EngineError(CONTEXT_LENGTH, "prompt", f"{len(prompt)} tokens", expected)
        return min(sampling.max_tokens, context - len(prompt))


def assistant_message(text: str) -> dict[str, Any]:
    r"""Parse a response's text into an OpenAI-style assistant message.

    Text before the first tool call becomes the content (null if empty). If any call is not a JSON
    object with a name and an object of arguments, the entire text becomes the content.

    Example:
        >>> text = 'Let me see. <tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
        >>> message = assistant_message(text)
        >>> message["content"], message["tool_calls"][0]["function"]
        ('Let me see.', {'name': 'add', 'arguments': '{"a": 2}'})
    """
    message: dict[str, Any] = {"role": "assistant", "content": text}
    calls = [_function(written) for written in _CALL.findall(text)]
    if calls and all(call is not None for call in calls):
        message["content"] = text.partition("<tool_call>")[0].strip() or None
        message["tool_calls"] = [
            {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": call}
            for call in calls
        ]
    return message


def _function(text: str) -> dict[str, str] | None:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    arguments = call.get("arguments", {})
    if not isinstance(call.get("name"), str) or not isinstance(arguments, dict):
        return None
    return {"name": call["name"], "arguments": json.dumps(arguments)}
