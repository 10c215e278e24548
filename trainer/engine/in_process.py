"""What the engines in this process share: chat templates, tool calls, and checks of prompts."""

from __future__ import annotations

import dataclasses
import json
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from pipelines.generation.engines.base import CONTEXT_LENGTH, Sampled, Sampling
from rollout_io.retokenize.chat_template import normalize
from rollout_io.retokenize.tokenizer import ChatTokenizer
from schemas.errors import EngineError

_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


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
