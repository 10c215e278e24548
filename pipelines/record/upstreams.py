"""Send calls to the engines behind a recorder, with retries, and stream their responses.

Responses are bounded in size, not compressed, and no redirects. JSON that is mostly punctuation takes
many times its size in memory once it is decoded. Therefore, the choices and fields of responses, and
the prompts and fields of requests, are bounded too.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

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
from pipelines.http_server import json_response
from schemas.errors import EngineError, InputError, cleaned, count

ANSWER_SIZE, ANSWER_ENCODING, REDIRECT = "answer_size", "answer_encoding", "engine_redirect"
ANSWER_STATUS = "answer_status"
REFUSED_ANSWERS = frozenset({ANSWER_SIZE, ANSWER_ENCODING, REDIRECT, ANSWER_STATUS})
MOST_EVENTS, MOST_ITEMS, MOST_VALUES = 1 << 20, 4096, 1 << 21

_LARGE_BYTES, _OTHER_BYTES = 1 << 20, 4 << 20
# Above _LARGE_BYTES, fields other than the known long ones may take at most _OTHER_BYTES.
_HINT = "raise the limit: rollouts record --max-answer-mb N"

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
            _check_head(response.status, response.headers)
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


class _Large(msgspec.Struct):
    """Fields of a response or a choice that may be long."""

    choices: msgspec.Raw = msgspec.Raw()
    prompt_token_ids: msgspec.Raw = msgspec.Raw()
    prompt_logprobs: msgspec.Raw = msgspec.Raw()
    prompt_text: msgspec.Raw = msgspec.Raw()
    token_ids: msgspec.Raw = msgspec.Raw()
    logprobs: msgspec.Raw = msgspec.Raw()
    text: msgspec.Raw = msgspec.Raw()
    message: msgspec.Raw = msgspec.Raw()
    delta: msgspec.Raw = msgspec.Raw()
    routed_experts: msgspec.Raw = msgspec.Raw()
    provider_specific_fields: msgspec.Raw = msgspec.Raw()


class _LargeRequest(msgspec.Struct):
    """Fields of a request that may be long."""

    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    prompt_embeds: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    documents: msgspec.Raw = msgspec.Raw()


_Items = msgspec.defstruct(
    "_Items",
    [(f"item{i}", msgspec.Raw, msgspec.Raw()) for i in range(MOST_ITEMS)],
    array_like=True,
    forbid_unknown_fields=True,  # the only way to bound a list while msgspec decodes it
)
_LARGE, _ITEMS = msgspec.json.Decoder(_Large), msgspec.json.Decoder(_Items)
_LARGE_REQUEST = msgspec.json.Decoder(_LargeRequest)


def too_large(what: str, most_bytes: int) -> EngineError:
    """Build the error for a response that exceeds a bound."""
    finding = f"{what} of more than {most_bytes:,} bytes"
    message = f"The engine sent {finding}"
    return EngineError(ANSWER_SIZE, "engine", finding, hint=_HINT, message=message)


def _check_head(status: int, headers: Mapping[str, str]) -> None:
    """Reject redirects, compressed responses and statuses that end no HTTP exchange."""
    if not 200 <= status < 600:
        finding = f"sent the HTTP status {status:03}"
        hint = "check that --upstream is the engine's URL"
        message = f"The engine {finding}; expected a status from 200 to 599"
        raise EngineError(ANSWER_STATUS, "engine", finding, hint=hint, message=message)
    if 300 <= status < 400:
        to = repr(cleaned(headers.get("location", ""))[:200])
        hint = "set --upstream to the target of the redirect"
        finding = f"redirects (status {status}) to {to}"
        raise EngineError(REDIRECT, "engine", finding, hint=hint, message=f"The engine {finding}")
    encoding = headers.get("content-encoding", "identity").strip()
    if encoding.lower() != "identity":
        finding = f"compresses its responses ({cleaned(encoding)[:40]!r})"
        hint = "turn off compression in the engine"
        raise EngineError(
            ANSWER_ENCODING, "engine", finding, hint=hint, message=f"The engine {finding}"
        )


def check_shape(content: bytes) -> None:
    """Reject a response that would take far more memory once it is decoded.

    Raises:
        EngineError: `answer_size`: the response has too many choices, or too many bytes in small
            fields.
        msgspec.MsgspecError: The response is not a completion.
    """
    if len(content) <= _LARGE_BYTES:
        return
    top = _LARGE.decode(content)
    num_other = _num_other(content, top)
    choices = _items(bytes(top.choices))
    if choices is None:
        finding = f"more than {MOST_ITEMS:,} choices"
        raise EngineError(ANSWER_SIZE, "engine", finding, message=f"The engine sent {finding}")
    for choice in choices:
        if choice[:1] == b"{":
            num_other += _num_other(choice, _LARGE.decode(choice))
    if num_other > _OTHER_BYTES:
        raise too_large("fields (other than tokens, texts and log-probabilities)", _OTHER_BYTES)


def check_request(body: bytes) -> None:
    """Reject a request that would take far more memory once it is decoded.

    Raises:
        InputError: `request_size`: the request has too many bytes in small fields.
        msgspec.MsgspecError: The request is not a JSON object.
    """
    if len(body) <= _LARGE_BYTES:
        return
    if _num_other(body, _LARGE_REQUEST.decode(body)) > _OTHER_BYTES:
        finding = f"fields other than messages, prompt and tools exceed {_OTHER_BYTES:,} bytes"
        raise InputError("request_size", "request", finding)


def check_density(body: bytes) -> None:
    """Reject a request that is mostly punctuation, before all of it is decoded.

    Raises:
        InputError: `request_size`: the request has too many lists, objects and items.
    """
    if len(body) > _LARGE_BYTES and sum(map(body.count, (b",", b"[", b"{"))) > MOST_VALUES:
        finding = f"more than {MOST_VALUES:,} values"
        raise InputError("request_size", "request", finding)


def num_prompts(prompt: bytes) -> int:
    """Count the prompts of a text completion.

    Args:
        prompt: A text, token ids, or a list of either, as JSON.

    Raises:
        InputError: `request_size`: there are too many prompts.
    """
    if not prompt.startswith(b"[") or not prompt[1:].lstrip().startswith((b'"', b"[")):
        return 1
    prompts = _items(prompt)
    if prompts is None:
        raise InputError("request_size", "request", f"more than {MOST_ITEMS:,} prompts")
    return len(prompts)


def _items(content: bytes) -> list[bytes] | None:
    """Split a JSON list into its items; [] for other values, None if there are too many items."""
    if content[:1] != b"[":
        return []
    try:
        items = _ITEMS.decode(content)
    except msgspec.ValidationError:
        return None
    return [item for raw in msgspec.structs.astuple(items) if (item := bytes(raw))]


def _num_other(content: bytes, counted: Any) -> int:
    return len(content) - sum(memoryview(raw).nbytes for raw in msgspec.structs.astuple(counted))
