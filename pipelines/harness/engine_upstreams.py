"""Engines whose weights the RL loop updates; restarted engines reload them before any call."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import msgspec

from pipelines.generation.engines.base import Engine
from pipelines.generation.engines.http_pool import BROKEN, Limits
from pipelines.generation.engines.vllm import Model, VllmEngine
from pipelines.record.upstreams import Answered, Upstreams
from schemas.errors import EngineError


class EngineGone(EngineError):
    """Error for a call that got no response on any attempt; further calls would fail too."""


class PolicyUpstreams(Upstreams):
    """Engines that serve the calls of harnesses.

    Args:
        urls: Root of each engine.
        engine: Engine that loads their weights.
    """

    gone = EngineGone

    def __init__(self, urls: Sequence[str], engine: Engine) -> None:
        super().__init__(urls, Limits())
        self._vllm = engine if isinstance(engine, VllmEngine) else None
        self._servers = self._vllm.servers if self._vllm else None

    async def model(self) -> Model:
        """See `Upstreams.model`; the id is the name of the current adapter, if there is one."""
        usual = await super().model()
        adapter = self._vllm.adapter if self._vllm else None
        return usual if adapter is None else msgspec.structs.replace(usual, id=adapter)

    async def _once(
        self, url: str, method: str, path: str, body: bytes | None, headers: dict[str, str]
    ) -> Answered:
        if self._servers is None:
            return await super()._once(url, method, path, body, headers)
        try:
            await self._servers.welcome_back(url)
            return await super()._once(url, method, path, body, headers)
        except BROKEN:
            self._servers.lose(url)
            raise

    async def parts(self, response: Answered) -> AsyncIterator[bytes]:
        """See `Upstreams.parts`."""
        try:
            async for content in super().parts(response):
                yield content
        except BROKEN:
            if self._servers is not None:
                self._servers.lose(*(u for u in self.urls if str(response.url).startswith(u)))
            raise
