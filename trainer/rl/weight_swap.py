"""An engine wrapper that loads new weights while the engine is in use."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pipelines.generation.engines.base import Engine
from pipelines.generation.engines.wrapper import WrappedEngine


class WeightSwapEngine(WrappedEngine):
    """An `Engine` that waits for running calls before it loads weights; new calls wait meanwhile.

    Args:
        engine: The engine to wrap.
        waits: Whether to wait for running calls. Otherwise, they continue with the new weights, if
            the engine supports it.
    """

    def __init__(self, engine: Engine, *, waits: bool) -> None:
        super().__init__(engine)
        self._waits = waits
        self._num_calls = 0
        self._changed = asyncio.Condition()
        self._is_open = True

    async def load_weights(self, path: str, *, policy_version: int) -> None:
        """See `Engine.load_weights`."""
        if not self._waits:
            await super().load_weights(path, policy_version=policy_version)
            return
        async with self._changed:
            self._is_open = False
            try:
                await self._changed.wait_for(lambda: self._num_calls == 0)
                await super().load_weights(path, policy_version=policy_version)
            finally:
                self._is_open = True
                self._changed.notify_all()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """See `WrappedEngine.turn`."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._is_open)
            self._num_calls += 1
        try:
            yield
        finally:
            async with self._changed:
                self._num_calls -= 1
                self._changed.notify_all()
