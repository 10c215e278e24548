"""Engines that wrap another engine: the base class, and one that remembers fatal errors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Self

from pipelines.generation.engines.base import Engine, Picture, Sampled, Sampling, pictures_by
from pipelines.generation.trajectory import ENDS_THE_RUN
from schemas.errors import RolloutError
from schemas.metadata import LogprobsMode


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
