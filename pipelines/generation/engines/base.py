"""Interface of engines (exact tokens in, exact tokens and log-probabilities out), and wrappers of one."""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt

from schemas.errors import ConfigError, RolloutError
from schemas.metadata import LogprobsMode

T = TypeVar("T")
ENGINE_DOWN = "engine_down"
"""Rule id of the error raised if an engine does not respond after all retries."""

CONTEXT_LENGTH = "context_length"
"""Rule id of the error raised if a prompt leaves no room for a response in the model's context."""

ENDS_THE_RUN = frozenset({ENGINE_DOWN, "engine_answer"})
"""Rules of errors that every trajectory would hit, because the engine is at fault."""


def contains_any(stop: Sequence[str], special_tokens: Iterable[str]) -> bool:
    """True if a stop string contains a special token, so that the text must contain them too.

    Example:
        >>> contains_any(["</a>", "<|eot|>!"], ["<|eot|>"]), contains_any([], ["<|eot|>"])
        (True, False)
    """
    return bool(stop) and any(token in text for token in special_tokens for text in stop)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Sampling settings.

    Attributes:
        temperature: Divisor of the logits; 0 takes the most likely token.
        top_p: Sample from the fewest tokens whose probabilities sum to at least this; 1: all.
        top_k: Sample from this many of the most likely tokens; None: all.
        min_p: Minimum probability of a token relative to the most likely one; 0: all.
        max_tokens: Maximum length of the response; shorter if the model's context fills up first.
        stop: Strings that end the response. `Sampled.text` includes the matched string,
            `Sampled.response_ids` the token that completed it.
        seed: Random seed; None: chosen by the engine. Requests with the same seed and prompt get
            the same response, so the repetitions of a group need different seeds.
        extra: Further fields of the request, named as in the engine's API.

    Raises:
        ConfigError: `sampling`: a value is out of range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    max_tokens: int = 1024
    stop: tuple[str, ...] = ()
    seed: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def truncates(self) -> bool:
        """True if not all tokens can be drawn; temperature 0 is not a truncation."""
        is_cut = self.top_p < 1 or self.top_k is not None or self.min_p > 0
        return is_cut and self.temperature > 0

    def __post_init__(self) -> None:
        top_k = self.top_k is None or self.top_k >= 1
        for name, holds, expected in (
            ("temperature", 0 <= self.temperature < float("inf"), "a finite number of at least 0"),
            ("top_p", 0 < self.top_p <= 1, "a number above 0, at most 1"),
            ("top_k", top_k, "at least 1, or None for all tokens"),
            ("min_p", 0 <= self.min_p < 1, "a number of at least 0, below 1"),
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("stop", all(self.stop), "non-empty strings"),
        ):
            if not holds:
                raise ConfigError("sampling", name, repr(getattr(self, name)), expected)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """One response with its exact tokens.

    Attributes:
        prompt_token_ids: [P] ids of the prompt; after `chat`, as rendered by the engine's template.
        response_ids: [R >= 1] sampled ids, including the end-of-sequence token.
        rollout_logprobs: [R] log-probabilities in nats (see `Engine.logprobs_mode`).
        stop_reason: `stop` (end of sequence, or a stop string), `length`, `tool_calls`, or another
            reason given by the engine.
        text: The response without special tokens.
        policy_version: Version of the weights when the response was started.
        message: The assistant message parsed by the engine (content, tool_calls, reasoning), to
            append for the next `chat`; None after `sample`.
        rollout_expert_indices: [1 to P + R tokens, layers, topk] int16, if the engine returns them.
        sampling_support: [R] ids that could have been drawn at each token, if sampling is truncated
            and the engine returns them; `rollout_logprobs` are then normalised over them.
    """

    prompt_token_ids: list[int]
    response_ids: list[int]
    rollout_logprobs: list[float]
    stop_reason: str
    text: str
    policy_version: int
    message: dict[str, Any] | None = None
    rollout_expert_indices: npt.NDArray[np.int16] | None = None
    sampling_support: Sequence[Sequence[int]] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """A picture at tokens of a prompt.

    Attributes:
        sha256: `sha256:` and the digest of `content`.
        content: Bytes of the picture's file.
        start: Index of its first token in the prompt.
        length: Number of its tokens.
    """

    sha256: str
    content: bytes
    start: int
    length: int


class Engine(Protocol):
    """An inference engine. Any number of calls may run concurrently, and each can be cancelled.

    An engine is an asynchronous context manager that releases its resources on exit.

    An engine that shows pictures has another argument of `sample`, which is passed only where the
    prompt shows some: `pictures`, a sequence of `Picture`, in order. See `pictures_by`.
    """

    @property
    def logprobs_mode(self) -> LogprobsMode:
        """Distribution of the log-probabilities, known once the context has been entered.

        `raw`: the model's distribution at temperature 1; `processed`: the sampled distribution,
        after temperature and truncation.
        """
        ...

    @property
    def policy_version(self) -> int:
        """Version of the current weights."""
        ...

    @property
    def context_tokens(self) -> int | None:
        """Maximum length of prompt + response, known once the context has been entered.

        None if the engine does not report it.
        """
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *error: object) -> None: ...

    async def sample(
        self, prompt_token_ids: Sequence[int], sampling: Sampling, *, session: str | None = None
    ) -> Sampled:
        """Sample a continuation of exact prompt tokens.

        Args:
            prompt_token_ids: [P >= 1] ids; returned unchanged in `Sampled.prompt_token_ids`.
            sampling: Sampling settings.
            session: Calls with the same session go to the same server, which has cached their
                prefix.

        Raises:
            EngineError: `engine_down`: the engine does not respond after all retries;
                `context_length`: the prompt leaves no room for a response; `engine_refused`: the
                request is invalid; `engine_answer`: parts of the response are missing.
        """
        ...

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling: Sampling,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        session: str | None = None,
    ) -> Sampled:
        """Sample a response to a conversation, which the engine renders with its chat template.

        Args:
            messages: OpenAI-style messages.
            sampling: Sampling settings.
            tools: OpenAI-style tool definitions.
            chat_template_kwargs: Arguments of the chat template, such as `enable_thinking`.
            session: As in `sample`.

        Raises:
            EngineError: As in `sample`.
            InputError: `chat_template`: the template does not accept the messages.
        """
        ...

    async def takes_adapters(self) -> bool:
        """True if `load_weights` accepts LoRA adapters.

        Raises:
            EngineError: `engine_down`: the engine does not respond.
        """
        ...

    async def load_weights(self, path: str, *, policy_version: int) -> None:
        """Load new weights, and sample with them from now on.

        A running call keeps the `policy_version` with which it started. When a model is loaded, the
        rest of the response may be sampled with the new weights; when an adapter is loaded, the
        call continues with the weights with which it started.

        Args:
            path: A directory that the engine can read: a Hugging Face model or, if
                `takes_adapters`, a LoRA adapter of the loaded model in peft's format.
            policy_version: Version of the new weights.

        Raises:
            EngineError: `engine_down`: the engine does not respond; `engine_refused`: it cannot
                load the weights.
            InputError: `model_directory`: `path` is not a model directory; `model_load`: its
                weights cannot be loaded.
        """
        ...


def pictures_by(engine: Engine) -> str:
    """Return the method by which an engine accepts pictures: "sample", "chat", or "" for none.

    An engine whose `sample` has no argument `pictures` may have an attribute `pictures_by`.
    """
    stated: str | None = getattr(engine, "pictures_by", None)
    if stated is not None:
        return stated
    return "sample" if "pictures" in inspect.signature(engine.sample).parameters else ""


async def to_its_end(work: Awaitable[T]) -> T:
    """Await work to completion even if cancelled, then raise the cancellation."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


def is_adapter(path: str | Path) -> bool:
    """True if a directory contains a LoRA adapter in peft's format."""
    return (Path(path) / "adapter_config.json").is_file()


class WrappedEngine(ABC):
    """An `Engine` that forwards each call to another engine, within the context from `turn`.

    Args:
        engine: The engine to wrap.

    Attributes:
        engine: The wrapped engine.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @abstractmethod
    def turn(self) -> AbstractAsyncContextManager[None]:
        """Return the context to enter around an engine call."""

    @property
    def logprobs_mode(self) -> LogprobsMode:
        """See `Engine.logprobs_mode`."""
        return self.engine.logprobs_mode

    @property
    def policy_version(self) -> int:
        """See `Engine.policy_version`."""
        return self.engine.policy_version

    @property
    def context_tokens(self) -> int | None:
        """See `Engine.context_tokens`."""
        return self.engine.context_tokens

    @property
    def pictures_by(self) -> str:
        """See `pipelines.generation.engines.base.pictures_by`."""
        return pictures_by(self.engine)

    async def __aenter__(self) -> Self:
        await self.engine.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.engine.__aexit__(*error)

    async def sample(
        self,
        prompt_token_ids: Sequence[int],
        sampling: Sampling,
        *,
        session: str | None = None,
        pictures: Sequence[Picture] = (),
    ) -> Sampled:
        """See `Engine.sample`."""
        shown: Any = {"pictures": pictures} if pictures else {}
        async with self.turn():
            return await self.engine.sample(prompt_token_ids, sampling, session=session, **shown)

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling: Sampling,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        session: str | None = None,
    ) -> Sampled:
        """See `Engine.chat`."""
        async with self.turn():
            return await self.engine.chat(
                messages,
                sampling,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
                session=session,
            )

    async def takes_adapters(self) -> bool:
        """See `Engine.takes_adapters`."""
        return await self.engine.takes_adapters()

    async def load_weights(self, path: str, *, policy_version: int) -> None:
        """See `Engine.load_weights`."""
        await self.engine.load_weights(path, policy_version=policy_version)


class Watched(WrappedEngine):
    """An `Engine` that remembers an error that ends the run, even if the caller catches it.

    Attributes:
        failure: The first such error; None if there was none.
        endpoint: OpenAI-compatible endpoint that serves the engine, if there is one.
    """

    endpoint: Any = None

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.failure: RolloutError | None = None

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """See `WrappedEngine.turn`."""
        try:
            yield
        except RolloutError as error:
            if error.rule in ENDS_THE_RUN:
                self.failure = self.failure or error
            raise
