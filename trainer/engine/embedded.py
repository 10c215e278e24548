"""The embedded engine: a Transformers model in this process; what engines in this process share."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from pipelines.generation.engines.base import (
    CONTEXT_LENGTH,
    Picture,
    Sampled,
    Sampling,
    contains_any,
)
from rollout_io.retokenize.chat_template import normalize
from rollout_io.retokenize.tokenizer import ChatTokenizer, load_tokenizer
from schemas.errors import EngineError, InputError
from schemas.metadata import LogprobsMode
from trainer.engine.batching import (
    Preprocess,
    Request,
    check_shown,
    continue_batch,
    preprocessor_of,
)
from trainer.models.policy import load_policy

_GATHERING_S = 0.005
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


class TransformersEngine(InProcessEngine):
    """An `Engine` that samples from a Transformers model in this process.

    It reports the exact log-probabilities of the distribution that it samples from.

    Concurrent calls are batched; later calls wait until the batch ends. The samples of a call
    with a seed do not depend on the batch, up to rounding.

    Args:
        model: A Transformers causal LM; may be the `model` of a policy, used between its updates.
        tokenizer: Tokenizer and chat template of the model.
        policy_version: Version of the weights.
        max_batch_size: Maximum number of calls per batch.
        seed: Seed for calls without one.
    """

    logprobs_mode: LogprobsMode = "processed"

    def __init__(
        self,
        model: Any,
        tokenizer: ChatTokenizer,
        *,
        policy_version: int = 0,
        max_batch_size: int = 32,
        seed: int = 0,
    ) -> None:
        super().__init__(tokenizer, policy_version)
        self.model = model
        self.max_batch_size = max_batch_size
        self._seeds = random.Random(seed)
        self._ends = _end_ids(model, tokenizer)
        self._waiting: list[tuple[Request, asyncio.Future[Sampled]]] = []
        self._runner: asyncio.Task[None] | None = None
        self._weights = asyncio.Lock()
        self._preprocess: Preprocess | None = None

    @classmethod
    def load(
        cls,
        path: str,
        *,
        chat_template: str | None = None,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        **settings: Any,
    ) -> TransformersEngine:
        """Load a model directory with its tokenizer.

        Args:
            path: A Hugging Face model directory.
            chat_template: Name or file of a chat template that replaces the tokenizer's.
            dtype: Data type of the weights.
            device: Device of the weights.
            settings: Further arguments of the constructor.

        Raises:
            InputError: See `load_policy` and `load_tokenizer`.
        """
        model = load_policy(path, logprob_chunk_tokens=1024).model
        tokenizer = load_tokenizer(path, chat_template, needs_template=False)
        return cls(model.to(device, dtype), tokenizer, **settings)

    @property
    def context_tokens(self) -> int | None:
        """See `Engine.context_tokens`."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        for _, future in self._waiting:
            future.cancel()
        if self._runner is not None:
            await self._runner

    async def sample(
        self,
        prompt_token_ids: Sequence[int],
        sampling: Sampling,
        *,
        session: str | None = None,
        pictures: Sequence[Picture] = (),
    ) -> Sampled:
        """See `Engine.sample`.

        Raises:
            EngineError: `engine_pictures`: the model does not see pictures.
            InputError: `picture_tokens`: a placeholder is at no picture; `picture_file`: a picture
                cannot be decoded; `processor`: the image processor cannot be loaded.
        """
        del session
        prompt = list(prompt_token_ids)
        check_shown(self.model, prompt, pictures)
        if pictures:
            await asyncio.to_thread(self._preprocess_all, pictures)
        request, future = self._request(prompt, sampling, pictures)
        self._waiting.append((request, future))
        if self._runner is None:
            self._runner = asyncio.create_task(self._run())
        return await future

    def _preprocess_all(self, pictures: Sequence[Picture]) -> None:
        """Preprocess pictures, so that one that cannot be shown fails its own call only."""
        if self._preprocess is None:
            self._preprocess = preprocessor_of(self.model.config.name_or_path)
        for picture in pictures:
            self._preprocess(picture.content)

    async def load_weights(self, path: str, *, policy_version: int) -> None:
        """See `Engine.load_weights`; a running batch finishes with the old weights."""
        async with self._weights:
            await asyncio.to_thread(self._load, path)
            self.policy_version = policy_version

    def _load(self, path: str) -> None:
        loaded = load_policy(path, logprob_chunk_tokens=1024).model.state_dict()
        now = self.model.state_dict()
        bad = next(
            (n for n in now.keys() | loaded.keys() if _shape(now, n) != _shape(loaded, n)), None
        )
        if bad is not None:
            shape, current = _shape(loaded, bad), _shape(now, bad)
            finding = f"weight {bad} has shape {shape}, but the engine's model has {current}"
            if shape is None or current is None:
                problem = "missing" if shape is None else "not in the engine's model"
                finding = f"weight {bad} is {problem}"
            raise InputError("model_load", path, finding)
        self.model.load_state_dict(loaded)

    def _request(
        self, prompt: list[int], sampling: Sampling, pictures: Sequence[Picture]
    ) -> tuple[Request, asyncio.Future[Sampled]]:
        if sampling.extra:
            finding = f"the embedded engine does not support {', '.join(map(repr, sampling.extra))}"
            raise EngineError("engine_refused", "extra sampling fields", finding)
        vocab_size = len(self.model.get_input_embeddings().weight)
        seed = self._seeds.getrandbits(63) if sampling.seed is None else sampling.seed
        future: asyncio.Future[Sampled] = asyncio.get_running_loop().create_future()
        request = Request(
            prompt=prompt,
            sampling=sampling,
            max_tokens=self.max_tokens(prompt, sampling, vocab_size),
            generator=torch.Generator().manual_seed(seed),
            is_wanted=lambda: not future.done(),
            pictures=pictures,
        )
        return request, future

    async def _run(self) -> None:
        """Sample one batch after another until no call is waiting."""
        try:
            while self._waiting:
                await asyncio.sleep(_GATHERING_S)
                async with self._weights:
                    batch = self._waiting[: self.max_batch_size]
                    self._waiting = self._waiting[self.max_batch_size :]
                    await self._run_batch([pair for pair in batch if not pair[1].done()])
        finally:
            self._runner = None

    async def _run_batch(self, batch: list[tuple[Request, asyncio.Future[Sampled]]]) -> None:
        if not batch:
            return
        loop, futures = asyncio.get_running_loop(), dict(batch)
        version = self.policy_version

        def finished(request: Request) -> None:
            loop.call_soon_threadsafe(self._answer, request, futures[request], version)

        try:
            await asyncio.to_thread(
                continue_batch,
                self.model,
                list(futures),
                ends=self._ends,
                decode=self._decode,
                finished=finished,
                preprocess=self._preprocess,
            )
        except Exception as error:
            for future in futures.values():
                if not future.done():
                    future.set_exception(error)

    def _answer(self, request: Request, future: asyncio.Future[Sampled], version: int) -> None:
        if future.done():
            return
        sampled = Sampled(
            prompt_token_ids=list(request.prompt),
            response_ids=request.response,
            rollout_logprobs=request.logprobs,
            stop_reason=request.stop_reason or "abort",
            text=_cut(self._decode(request.response, request.sampling), request.sampling.stop),
            policy_version=version,
            rollout_expert_indices=torch.cat(request.routes).numpy() if request.routes else None,
            sampling_support=request.support or None,
        )
        future.set_result(sampled)

    def _decode(self, ids: Sequence[int], sampling: Sampling) -> str:
        """Decode ids; special tokens are part of the text only if a stop string contains one."""
        special = (text for i, text in self.tokenizer.special_tokens.items() if i not in self._ends)
        text: str = self.tokenizer.backend.decode(
            list(ids),
            skip_special_tokens=not contains_any(sampling.stop, special),
            clean_up_tokenization_spaces=False,
        )
        return text


def _shape(weights: Mapping[str, Tensor], name: str) -> tuple[int, ...] | None:
    return tuple(weights[name].shape) if name in weights else None


def _end_ids(model: Any, tokenizer: ChatTokenizer) -> set[int]:
    named = getattr(model.generation_config, "eos_token_id", None)
    ends = {named} if isinstance(named, int) else set(named or ())
    end_of_text = tokenizer.eos_token_id
    return ends if end_of_text is None else ends | {end_of_text}


def _cut(text: str, stop: Sequence[str]) -> str:
    """Cut text after the first stop string, which is kept."""
    ends = [text.find(s) + len(s) for s in stop if s in text]
    return text[: min(ends)] if ends else text
