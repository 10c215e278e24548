"""New weights into an engine that is in use."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self

from pipelines.generation.engine import Engine, Sampled, Sampling
from schemas.metadata import LogprobsMode


class Gate:
    """An `Engine` whose calls under way end before it gets new weights; others wait meanwhile.

    Args:
        engine: What samples.
        waits: False: calls under way go on with the new weights, as the engine has it.
    """

    def __init__(self, engine: Engine, *, waits: bool) -> None:
        self._engine, self._waits = engine, waits
        self._num_calls = 0
        self._changed = asyncio.Condition()
        self._is_open = True

    @property
    def logprobs_mode(self) -> LogprobsMode:
        """As `Engine.logprobs_mode`."""
        return self._engine.logprobs_mode

    @property
    def policy_version(self) -> int:
        """As `Engine.policy_version`."""
        return self._engine.policy_version

    async def __aenter__(self) -> Self:
        await self._engine.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._engine.__aexit__(*error)

    async def sample(
        self, prompt_token_ids: Sequence[int], sampling: Sampling, *, session: str | None = None
    ) -> Sampled:
        """As `Engine.sample`."""
        async with self._call():
            return await self._engine.sample(prompt_token_ids, sampling, session=session)

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling: Sampling,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        session: str | None = None,
    ) -> Sampled:
        """As `Engine.chat`."""
        async with self._call():
            return await self._engine.chat(messages, sampling, tools=tools, session=session)

    async def load_weights(self, path: str, *, policy_version: int) -> None:
        """As `Engine.load_weights`."""
        if not self._waits:
            await self._engine.load_weights(path, policy_version=policy_version)
            return
        async with self._changed:
            self._is_open = False
            try:
                await self._changed.wait_for(lambda: self._num_calls == 0)
                await self._engine.load_weights(path, policy_version=policy_version)
            finally:
                self._is_open = True
                self._changed.notify_all()

    @asynccontextmanager
    async def _call(self) -> AsyncIterator[None]:
        async with self._changed:
            await self._changed.wait_for(lambda: self._is_open)
            self._num_calls += 1
        try:
            yield
        finally:
            async with self._changed:
                self._num_calls -= 1
                self._changed.notify_all()
