"""The engines behind a recorder: one answer's stream, from one that answers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Self

import httpx2

from pipelines.generation.engine import ENGINE_DOWN
from pipelines.generation.servers import Limits, by_preference
from schemas.errors import RolloutError

_KEEP_ALIVE_S = 4.0
_AWAY = frozenset({502, 503})
_NOT_PASSED_ON = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer"),
        *("transfer-encoding", "upgrade", "host", "content-length", "content-encoding"),
        *("accept-encoding", "date", "server", "expect"),
    }
)

BROKEN = (httpx2.TransportError, httpx2.StreamError)


class Upstreams:
    """Engines that give the same answers.

    A call that no byte of an answer came of is repeated, on the next engine if there are several:
    sampling has no side effects.

    Args:
        urls: Their roots; a trailing "/v1" is left out.
        api_key: Sent as the bearer token in place of the client's.
        limits: Attempts, waits, timeouts.
        retried: Called at every repetition.
    """

    def __init__(
        self,
        urls: Sequence[str],
        limits: Limits,
        *,
        api_key: str | None = None,
        retried: Callable[[], object] = lambda: None,
    ) -> None:
        self.urls = tuple(url.rstrip("/").removesuffix("/v1") for url in urls)
        self._limits, self._api_key, self._retried = limits, api_key, retried

    async def __aenter__(self) -> Self:
        limits = self._limits
        self._client = httpx2.AsyncClient(
            timeout=httpx2.Timeout(limits.timeout_s, connect=limits.connect_timeout_s, pool=None),
            limits=httpx2.Limits(
                max_connections=None,
                max_keepalive_connections=None,
                keepalive_expiry=_KEEP_ALIVE_S,
            ),
            headers={"accept-encoding": "identity"},
            trust_env=False,
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._client.aclose()

    @asynccontextmanager
    async def answer(
        self,
        method: str,
        path: str,
        body: bytes | None,
        headers: Mapping[str, str],
        session: str | None,
    ) -> AsyncIterator[httpx2.Response]:
        """An answer whose head is here, and whose body is not read yet.

        Args:
            method: "POST".
            path: "/v1/chat/completions".
            body: As it is sent.
            headers: The client's, by lower-case name.
            session: Its calls go to one engine, as long as that one answers.

        Raises:
            RolloutError: engine_down: none answered.
        """
        response = await self._open(method, path, body, self._headers(headers), session)
        try:
            yield response
        finally:
            await response.aclose()

    async def _open(
        self,
        method: str,
        path: str,
        body: bytes | None,
        headers: dict[str, str],
        session: str | None,
    ) -> httpx2.Response:
        urls = by_preference(self.urls, session or "")
        attempts = max(self._limits.max_attempts, len(urls))
        for attempt in itertools.count(1):
            url = urls[(attempt - 1) % len(urls)]
            request = self._client.build_request(method, url + path, content=body, headers=headers)
            try:
                response = await self._client.send(request, stream=True)
            except httpx2.TransportError as error:
                got = f"{type(error).__name__} {error}".strip()
            else:
                is_last = attempt >= attempts or len(urls) == 1
                if response.status_code not in _AWAY or is_last:
                    return response
                got = f"status {response.status_code}"
                await response.aclose()
            if attempt >= attempts:
                break
            self._retried()
            await asyncio.sleep(0 if attempt < len(urls) else self._limits.wait_s(attempt))
        hint = f"is the server up? {url}/health"
        expected = f"an answer in one of {attempts} attempts"
        raise RolloutError(ENGINE_DOWN, url, got, expected, hint)

    def _headers(self, headers: Mapping[str, str]) -> dict[str, str]:
        kept = {
            name: value
            for name, value in headers.items()
            if name not in _NOT_PASSED_ON and not name.startswith("x-rollouts-")
        }
        if self._api_key is not None:
            kept["authorization"] = f"Bearer {self._api_key}"
        return kept


def passed_on(headers: httpx2.Headers) -> list[tuple[bytes, bytes]]:
    """The headers of an answer that the client gets."""
    return [
        (name.lower(), value)
        for name, value in headers.raw
        if name.lower().decode("latin-1") not in _NOT_PASSED_ON
    ]
