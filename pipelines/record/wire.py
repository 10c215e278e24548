"""One HTTP exchange over ASGI: a bounded body in, an answer out, and whether the client is still there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

import msgspec

from schemas.errors import RolloutError

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = Sequence[tuple[bytes, bytes]]

JSON = (b"content-type", b"application/json")

STATUS = {
    "session_name": 400,
    "record_type": 400,
    "json_line": 400,
    "reward_line": 400,
    "columns_and_types": 400,
    "session_key": 403,
    "admin_key": 403,
    "no_session": 403,
    "unknown_session": 404,
    "no_such_path": 404,
    "method": 405,
    "session_open": 409,
    "session_ended": 409,
    "request_size": 413,
    "engine_down": 502,
    "journal": 507,
}


class Exchange:
    """A request and its answer.

    Args:
        scope: Of ASGI.
        receive: Of ASGI.
        send: Of ASGI.

    Attributes:
        method: "GET".
        raw_path: As it came, percent-encoded.
        headers: By lower-case name; of one that came twice, the last.
        has_begun: Whether the head of the answer is sent.
        status: Of the answer.
    """

    __slots__ = ("_receive", "_send", "has_begun", "headers", "method", "raw_path", "status")

    def __init__(self, scope: Message, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send
        self.method: str = scope["method"]
        self.raw_path: str = scope["raw_path"].decode("latin-1").partition("?")[0]
        self.headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
        self.has_begun = False
        self.status = 0

    async def body(self, most_bytes: int) -> bytes:
        """The whole body.

        Raises:
            RolloutError: request_size.
            ConnectionError: The client has gone.
        """
        parts: list[bytes] = []
        num_bytes = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ConnectionError
            parts.append(message.get("body", b""))
            num_bytes += len(parts[-1])
            if num_bytes > most_bytes:
                hint = "rollouts record --max-request-mb N"
                got, most = f"a body of more than {most_bytes:,} bytes", f"at most {most_bytes:,}"
                raise RolloutError("request_size", self.raw_path, got, most, hint)
            if not message.get("more_body"):
                return b"".join(parts)

    async def left(self) -> None:
        """Returns when the client has gone; call it once the body is read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def begin(self, status: int, headers: Headers) -> None:
        """Send the head of the answer."""
        self.has_begun, self.status = True, status
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def more(self, content: bytes) -> None:
        """Send a part of the body."""
        await self._send({"type": "http.response.body", "body": content, "more_body": True})

    async def finish(self, content: bytes = b"") -> None:
        """Send the end of the body."""
        await self._send({"type": "http.response.body", "body": content, "more_body": False})

    async def answer(self, status: int, content: bytes, headers: Headers = (JSON,)) -> None:
        """Send a whole answer."""
        length = (b"content-length", str(len(content)).encode())
        await self.begin(status, [*headers, length])
        await self.finish(content)

    async def say(self, status: int, value: Any) -> None:
        """Answer with JSON."""
        await self.answer(status, msgspec.json.encode(value))

    async def refuse(self, error: RolloutError) -> None:
        """Answer with an error; in a stream that has begun, as its last event."""
        content = error_body(error)
        if self.has_begun:
            await self.finish(b"data: " + content + b"\n\n")
        else:
            allow = [(b"allow", error.expected.encode())] if error.rule == "method" else []
            await self.answer(status_of(error), content, [JSON, *allow])


def status_of(error: RolloutError) -> int:
    """The HTTP status of an error."""
    return STATUS.get(error.rule, 400)


def error_body(error: RolloutError) -> bytes:
    """An error as OpenAI's API writes it."""
    hint = f" ({error.hint})" if error.hint else ""
    found = {"message": f"{error}{hint}", "type": error.rule, "code": status_of(error)}
    return msgspec.json.encode({"error": {**found, "param": None}})


async def unless_left(exchange: Exchange, work: Awaitable[None]) -> bool:
    """Do some work, but stop it when the client goes; whether it was done."""
    doing = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(exchange.left())
    try:
        await asyncio.wait({doing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        is_done = doing.done()
    finally:
        leaving.cancel()
        if not doing.done():
            doing.cancel()
            await asyncio.wait({doing})
    if not doing.cancelled():
        doing.result()
    return is_done
