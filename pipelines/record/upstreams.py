"""The engines behind a recorder: one answer's stream, from one that answers."""

from __future__ import annotations

import asyncio
import io
import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Self

import aiohttp
import msgspec
from yarl import URL

from pipelines.generation.engine import ENGINE_DOWN
from pipelines.generation.servers import Limits, by_preference
from schemas.errors import RolloutError

_KEEP_ALIVE_S = 4.0
_LARGE_BYTES = 1 << 20
_AWAY = frozenset({502, 503})
_NOT_PASSED_ON = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer"),
        *("transfer-encoding", "upgrade", "host", "content-length", "content-encoding"),
        *("accept-encoding", "date", "server", "expect"),
    }
)

BROKEN = (aiohttp.ClientError, TimeoutError, ConnectionError)

Answered = aiohttp.ClientResponse
MODELS = "/v1/models"


class Model(msgspec.Struct):
    """A model that is served."""

    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[Model]


_MODELS = msgspec.json.Decoder(_Models)


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
        self._model: Model | None = None

    async def __aenter__(self) -> Self:
        self._client = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(
                total=None,
                sock_connect=self._limits.connect_timeout_s,
                sock_read=self._limits.timeout_s,
            ),
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Accept-Encoding": "identity"},
            skip_auto_headers=("User-Agent", "Content-Type"),
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._client.close()

    @asynccontextmanager
    async def answer(
        self,
        method: str,
        path: str,
        body: bytes | None,
        headers: Mapping[str, str],
        session: str | None,
    ) -> AsyncIterator[Answered]:
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
            response.close()

    async def model(self) -> Model:
        """The model of the engines, as the first of them names it.

        Raises:
            RolloutError: engine_down: none answered, or with no list of models.
        """
        if self._model is None:
            async with self.answer("GET", MODELS, None, {}, None) as response:
                try:
                    self._model = _MODELS.decode(await response.read()).data[0]
                except (*BROKEN, msgspec.MsgspecError, IndexError):
                    got, expected = f"status {response.status}", "a list of models"
                    raise RolloutError(ENGINE_DOWN, MODELS, got, expected) from None
        return self._model

    async def _open(
        self,
        method: str,
        path: str,
        body: bytes | None,
        headers: dict[str, str],
        session: str | None,
    ) -> Answered:
        urls = by_preference(self.urls, session or "")
        attempts = max(self._limits.max_attempts, len(urls))
        for attempt in itertools.count(1):
            url = urls[(attempt - 1) % len(urls)]
            try:
                response = await self._client.request(
                    method,
                    URL(url + path, encoded=True),
                    data=_payload(body),
                    headers=headers,
                    allow_redirects=False,
                )
            except BROKEN as error:
                got = f"{type(error).__name__} {error}".strip()
            else:
                is_last = attempt >= attempts or len(urls) == 1
                if response.status not in _AWAY or is_last:
                    return response
                got = f"status {response.status}"
                response.close()
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


def passed_on(response: Answered) -> list[tuple[bytes, bytes]]:
    """The headers of an answer that the client gets."""
    return [
        (name.lower(), value)
        for name, value in response.raw_headers
        if name.lower().decode("latin-1") not in _NOT_PASSED_ON
    ]


def _payload(body: bytes | None) -> bytes | io.BytesIO | None:
    """Large bodies are sent in parts."""
    return body if body is None or len(body) < _LARGE_BYTES else io.BytesIO(body)
