"""One HTTP exchange over ASGI: read a bounded body, respond, and detect a disconnected client."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from schemas.errors import InputError, RolloutError

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = Sequence[tuple[bytes, bytes]]

BODY_TIMEOUT_S = 60.0

JSON = (b"content-type", b"application/json")

STATUS = {
    "endpoint_token": 401,
    "session_key": 403,
    "admin_key": 403,
    "no_session": 403,
    "foreign_origin": 403,
    "unknown_session": 404,
    "no_such_path": 404,
    "method": 405,
    "head_timeout": 408,
    "body_timeout": 408,
    "session_open": 409,
    "session_ended": 409,
    "request_size": 413,
    "media_type": 415,
    "foreign_host": 421,
    "too_many_sessions": 429,
    "head_size": 431,
    "engine_down": 502,
    "engine_answer": 502,
    "engine_redirect": 502,
    "answer_encoding": 502,
    "answer_size": 502,
    "answer_status": 502,
    "journal": 507,
}
"""HTTP status by rule; 400 for all other rules."""


class Exchange:
    """A request and its response.

    Args:
        scope: ASGI scope.
        receive: ASGI receive.
        send: ASGI send.

    Attributes:
        method: HTTP method, such as "GET".
        raw_path: Path as received, percent-encoded.
        headers: Headers by lower-case name; if one is repeated, the last one wins.
        has_begun: True once the response headers have been sent.
        status: Status of the response; 0 until its headers have been sent.
    """

    __slots__ = ("_receive", "_send", "has_begun", "headers", "method", "raw_path", "status")

    def __init__(self, scope: Message, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send
        self.method: str = scope["method"]
        self.raw_path: str = scope["raw_path"].decode("latin-1").partition("?")[0]
        self.headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
        self.has_begun = False
        self.status = 0

    def require(self, method: str) -> None:
        """Reject the request unless it uses this method.

        Raises:
            InputError: `method`: the request uses another method.
        """
        if self.method != method:
            message = f"{self.raw_path}: method {self.method} is not allowed; use {method}"
            raise InputError("method", self.raw_path, self.method, method, message=message)

    async def body(self, most_bytes: int) -> bytes:
        """Read the entire body.

        Raises:
            InputError: `request_size`: the body exceeds `most_bytes`; `body_timeout`: no part of it
                arrives for a minute.
            ConnectionError: The client disconnected.
        """
        parts: list[bytes] = []
        num_bytes = 0
        while True:
            try:
                async with asyncio.timeout(BODY_TIMEOUT_S):
                    message = await self._receive()
            except TimeoutError:
                got = f"no part of the body arrived for {BODY_TIMEOUT_S:g} s"
                raise InputError("body_timeout", self.raw_path, got) from None
            if message["type"] == "http.disconnect":
                raise ConnectionError
            parts.append(message.get("body", b""))
            num_bytes += len(parts[-1])
            if num_bytes > most_bytes:
                hint = "raise the limit: rollouts record --max-request-mb N"
                got = f"the body is larger than {most_bytes:,} bytes"
                raise InputError("request_size", self.raw_path, got, hint=hint)
            if not message.get("more_body"):
                return b"".join(parts)

    async def left(self) -> None:
        """Wait until the client disconnects; call this only after reading the body."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def begin(self, status: int, headers: Headers) -> None:
        """Send the status and headers of the response."""
        self.has_begun, self.status = True, status
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def more(self, content: bytes) -> None:
        """Send a part of the body."""
        await self._send({"type": "http.response.body", "body": content, "more_body": True})

    async def finish(self, content: bytes = b"") -> None:
        """Send the end of the body."""
        await self._send({"type": "http.response.body", "body": content, "more_body": False})

    async def answer(self, status: int, content: bytes, headers: Headers = (JSON,)) -> None:
        """Send a complete response."""
        length = (b"content-length", str(len(content)).encode())
        await self.begin(status, [*headers, length])
        await self.finish(content)

    async def say(self, status: int, value: Any) -> None:
        """Send a value as a JSON response."""
        await self.answer(status, msgspec.json.encode(value))

    async def refuse(self, error: RolloutError) -> None:
        """Respond with an error; in a stream that has started, send it as the last event."""
        content = error_body(error)
        if self.has_begun:
            await self.finish(b"data: " + content + b"\n\n")
        else:
            allow = [(b"allow", error.expected.encode())] if error.rule == "method" else []
            await self.answer(status_of(error), content, [JSON, *allow])


def status_of(error: RolloutError) -> int:
    """Return the HTTP status of an error."""
    return STATUS.get(error.rule, 400)


def error_body(error: RolloutError) -> bytes:
    """Encode an error in the format of OpenAI's API."""
    hint = f" Hint: {error.hint}" if error.hint else ""
    found = {"message": f"{error}{hint}", "type": error.rule, "code": status_of(error)}
    return msgspec.json.encode({"error": {**found, "param": None}})


async def unless_left(exchange: Exchange, work: Awaitable[None]) -> None:
    """Await some work, but cancel it if the client disconnects."""
    doing = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(exchange.left())
    try:
        await asyncio.wait({doing, leaving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        leaving.cancel()
        if not doing.done():
            doing.cancel()
            await asyncio.wait({doing})
    if not doing.cancelled():
        doing.result()


async def respond(
    scope: Message, receive: Receive, send: Send, route: Callable[[Exchange], Awaitable[None]]
) -> None:
    """Handle one request with `route`; a RolloutError that it raises becomes the response."""
    if scope["type"] != "http":
        return
    exchange = Exchange(scope, receive, send)
    with suppress(ConnectionError):
        try:
            await route(exchange)
        except RolloutError as error:
            await exchange.refuse(error)
