"""Send calls to the engines behind a recorder, with retries, and stream their responses."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

import msgspec
from starlette.responses import Response

from pipelines.generation.engines.base import ENGINE_DOWN
from pipelines.generation.engines.http_pool import (
    BROKEN,
    Failed,
    HttpClient,
    Limits,
    by_preference,
)
from pipelines.generation.engines.vllm import Model, Models
from pipelines.http_app import json_response
from pipelines.record.bounds import check_head, too_large
from schemas.errors import EngineError, count

_AWAY = frozenset({502, 503})
_NOT_PASSED_ON = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer"),
        *("transfer-encoding", "upgrade", "host", "content-length", "content-encoding"),
        *("accept-encoding", "date", "server", "expect"),
    }
)
MODELS = "/v1/models"
VERSION_HEADER = "x-rollouts-policy-version"
"""Response header with the version of the weights that sampled the response."""
_MODELS = msgspec.json.Decoder(Models)


class Body(Protocol):
    """Body of a response, part by part."""

    async def readany(self) -> bytes:
        """Wait for the next part; b"" at the end."""


class Answered(Protocol):
    """A response whose headers have arrived: aiohttp's, or that of an application in this process."""

    status: int

    @property
    def url(self) -> object:
        """URL of the request; `str` gives its text."""

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers; names in lower case are found."""

    @property
    def raw_headers(self) -> Sequence[tuple[bytes, bytes]]:
        """Headers as received."""

    @property
    def content_length(self) -> int | None:
        """Size of the body in bytes, if the response tells it."""

    @property
    def content(self) -> Body:
        """The body."""

    def close(self) -> None:
        """Cancel what has not arrived."""


class Upstreams(HttpClient):
    """Engines that return equivalent responses.

    If no byte of a response has arrived, a call is retried, on the next engine if there are
    several. This is safe because sampling has no side effects.

    Args:
        urls: Root URL of each engine; a trailing "/v1" is removed.
        limits: Attempts, waits and timeouts.
        api_key: Bearer token to send instead of the client's.
        retried: Callback for every retry.
        max_answer_bytes: Maximum size of a response's body.

    Attributes:
        gone: Type of the error raised if no attempt at a call gets a response.
    """

    gone: type[EngineError] = EngineError

    def __init__(
        self,
        urls: Sequence[str],
        limits: Limits,
        *,
        api_key: str | None = None,
        retried: Callable[[], object] = lambda: None,
        max_answer_bytes: int = 64 << 20,
    ) -> None:
        super().__init__(urls, limits, trust_env=False)
        self._api_key, self._retried = api_key, retried
        self._max_answer_bytes = max_answer_bytes
        self._model: Model | None = None

    @asynccontextmanager
    async def answer(
        self,
        method: str,
        path: str,
        body: bytes | None,
        headers: Mapping[str, str],
        session: str | None,
    ) -> AsyncIterator[Answered]:
        """Send a request; yield the response once its headers have arrived, with the body unread.

        Args:
            method: HTTP method.
            path: Path such as "/v1/chat/completions".
            body: Body to send.
            headers: The client's headers, by lower-case name.
            session: Calls with the same session go to the same engine as long as it responds.

        Raises:
            EngineError: `engine_down`: no engine responds; `engine_redirect`, `answer_encoding`:
                the response is rejected.
        """
        response = await self._open(method, path, body, self._headers(headers), session)
        try:
            check_head(response.status, response.headers)
            yield response
        finally:
            response.close()

    async def parts(self, response: Answered) -> AsyncIterator[bytes]:
        """Yield the body of a response as it arrives.

        Raises:
            EngineError: `answer_size`: the body is larger than `max_answer_bytes`.
        """
        num_bytes = response.content_length or 0
        if num_bytes <= self._max_answer_bytes:
            num_bytes = 0
            while content := await response.content.readany():
                num_bytes += len(content)
                if num_bytes > self._max_answer_bytes:
                    break
                yield content
        if num_bytes > self._max_answer_bytes:
            raise too_large("a response", self._max_answer_bytes)

    async def whole(self, response: Answered) -> bytes:
        """Read the entire body of a response.

        Raises:
            EngineError: `answer_size`: the body is larger than `max_answer_bytes`.
        """
        return b"".join([content async for content in self.parts(response)])

    async def model(self) -> Model:
        """Return the engines' model, as reported by the first engine that responds.

        Raises:
            EngineError: `engine_down`: the response is not a list of models; or any error of
                `answer` or `whole`.
        """
        if self._model is None:
            async with self.answer("GET", MODELS, None, {}, None) as response:
                try:
                    self._model = _MODELS.decode(await self.whole(response)).data[0]
                except (*BROKEN, msgspec.MsgspecError, IndexError):
                    finding = f"the engine returned no list of models (status {response.status})"
                    raise EngineError(ENGINE_DOWN, MODELS, finding) from None
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
        attempts = max(self.limits.max_attempts, len(urls))

        async def once(root: str) -> Answered | Failed:
            try:
                response: Answered = await self._once(root, method, path, body, headers)
            except BROKEN as error:
                return Failed(f"{type(error).__name__} {error}".strip())
            if response.status not in _AWAY or len(urls) == 1:
                return response
            return Failed(f"status {response.status}", response=response)

        root, result = await self.repeat(lambda: urls, attempts, once, self._retried)
        response: Answered | None = result.response if isinstance(result, Failed) else result
        if response is not None:
            return response
        assert isinstance(result, Failed)
        hint = f"check that the server is up: {root}/health"
        finding = f"no response after {count(attempts, 'attempt')} ({result.finding})"
        raise self.gone(ENGINE_DOWN, root, finding, hint=hint)

    async def _once(
        self, root: str, method: str, path: str, body: bytes | None, headers: dict[str, str]
    ) -> Answered:
        return await self.request(method, root + path, body, headers)

    def _headers(self, headers: Mapping[str, str]) -> dict[str, str]:
        passed = {
            name: value
            for name, value in headers.items()
            if name not in _NOT_PASSED_ON and not name.startswith("x-rollouts-")
        }
        if self._api_key is not None:
            passed["authorization"] = f"Bearer {self._api_key}"
        return passed


def version_of(response: Answered) -> int | None:
    """Read the version of the weights that sampled a response, if the engine reports it."""
    text = response.headers.get(VERSION_HEADER, "")
    return int(text) if text.isdecimal() and int(text) < 2**31 else None


def passed_on(response: Answered) -> list[tuple[bytes, bytes]]:
    """Select the response headers to forward to the client."""
    return [
        (name.lower(), value)
        for name, value in response.raw_headers
        if name.lower().decode("latin-1") not in _NOT_PASSED_ON
    ]


def models_response(name: str) -> Response:
    """Build the list of a single model."""
    model = {"id": name, "object": "model", "owned_by": "rollouts"}
    return json_response({"object": "list", "data": [model]})


def engine_response(response: Answered, content: bytes) -> Response:
    """Build the response to a client from an engine's, with its headers and the given body."""
    built = Response(content, response.status)
    built.raw_headers += passed_on(response)
    return built
