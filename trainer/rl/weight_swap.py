"""An engine wrapper that loads new weights while the engine is in use."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext

from pipelines.generation.engines.base import Engine, is_adapter
from pipelines.generation.engines.wrapper import WrappedEngine


class WeightSwapEngine(WrappedEngine):
    """An `Engine` that waits for running calls before it loads weights; new calls wait meanwhile.

    For an adapter, no call waits: running calls keep the adapter they started with. Only calls that
    started before the current adapter was loaded must end first, since engines keep two adapters.

    Args:
        engine: The engine to wrap.
        waits: Whether to wait for running calls. Otherwise, they continue with the new weights, if
            the engine supports it.
    """

    def __init__(self, engine: Engine, *, waits: bool) -> None:
        super().__init__(engine)
        self._waits = waits
        self._num_calls = Counter[int]()  # by the policy version at their start
        self._changed = asyncio.Condition()
        self._is_open = True

    async def load_weights(self, path: str, *, policy_version: int) -> None:
        """See `Engine.load_weights`."""
        if is_adapter(path):
            async with self._changed:
                await self._changed.wait_for(self._are_all_current)
            await super().load_weights(path, policy_version=policy_version)
            return
        async with self.idle() if self._waits else nullcontext():
            await super().load_weights(path, policy_version=policy_version)

    @asynccontextmanager
    async def idle(self) -> AsyncIterator[None]:
        """Wait for running calls; new calls wait until the end of the block."""
        async with self._changed:
            self._is_open = False
            try:
                await self._changed.wait_for(lambda: self._num_calls.total() == 0)
                yield
            finally:
                self._is_open = True
                self._changed.notify_all()

    def _are_all_current(self) -> bool:
        return self._num_calls.total() == self._num_calls[self.policy_version]

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """See `WrappedEngine.turn`."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._is_open)
            version = self.policy_version
            self._num_calls[version] += 1
        try:
            yield
        finally:
            async with self._changed:
                self._num_calls[version] -= 1
                self._changed.notify_all()
