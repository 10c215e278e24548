"""Serve Starlette applications on a socket: errors as responses, calls that outlast no client.

The size and the arrival time of headers and bodies are limited.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import msgspec
import pyarrow as pa
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from schemas.errors import ConfigError, InputError, RolloutError

Headers = Sequence[tuple[bytes, bytes]]
Refuse = Callable[[RolloutError, str], Response]
"""Builds the response to an error of a request to a path."""
T = TypeVar("T")

BODY_TIMEOUT_S = 60.0
JSON = "application/json"

STATUS = {
    "endpoint_token": 401,
    "session_key": 403,
    "admin_key": 403,
    "no_session": 403,
    "foreign_origin": 403,
    "unknown_session": 404,
    "no_such_path": 404,
    "served_model": 404,
    "method": 405,
    "head_timeout": 408,
    "body_timeout": 408,
    "session_open": 409,
    "session_ended": 409,
    "request_size": 413,
    "media_type": 415,
    "body_encoding": 415,
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

HEAD_BYTES = 64 << 10
HEAD_TIMEOUT_S = 60.0
_REASONS = {408: b"Request Timeout", 431: b"Request Header Fields Too Large"}


def json_response(value: Any, status: int = 200) -> Response:
    """Encode a value as a JSON response."""
    return Response(msgspec.json.encode(value), status, media_type=JSON)


def status_of(error: RolloutError) -> int:
    """Return the HTTP status of an error."""
    return STATUS.get(error.rule, 400)


def message_of(error: RolloutError) -> str:
    """Return the message of an error for a client, with its hint."""
    return f"{error} Hint: {error.hint}" if error.hint else str(error)


def _error_body(error: RolloutError) -> bytes:
    """Encode an error in the format of OpenAI's API."""
    fields = {"message": message_of(error), "type": error.rule, "code": status_of(error)}
    return msgspec.json.encode({"error": {**fields, "param": None}})


def error_response(error: RolloutError, path: str = "") -> Response:  # noqa: ARG001
    """Respond with an error in the format of OpenAI's API, whatever the path."""
    return Response(_error_body(error), status_of(error), media_type=JSON)


def error_event(error: RolloutError) -> bytes:
    """Return the event that ends a stream of OpenAI's API with an error."""
    return b"data: " + _error_body(error) + b"\n\n"


def application(
    routes: Iterable[BaseRoute],
    refuse: Refuse,
    *,
    default: ASGIApp | None = None,
    available: Iterable[str] = (),
    hint: str = "",
) -> Starlette:
    """Build an application that turns every `RolloutError` into a response.

    Args:
        routes: The routes.
        refuse: Builds the response to an error, also to an unknown path and to a wrong method.
        default: Handles requests that match no route; it may use a router of its own.
        available: Paths to name if a path is unknown.
        hint: What to do then.
    """
    listed = ", ".join(available)

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, RolloutError)
        return refuse(error, request.scope["path"])

    async def unknown_path(request: Request, _: Exception) -> Response:
        finding = f"unknown path; available: {listed}" if listed else "unknown path"
        path = request.scope["path"]
        return refuse(InputError("no_such_path", path, finding, hint=hint), path)

    async def wrong_method(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        where, method = request.scope["path"], request.method
        allowed = ", ".join(sorted((error.headers or {}).get("Allow", "").split(", ")))
        message = f"{where}: method {method} is not allowed; use {allowed}"
        response = refuse(InputError("method", where, method, allowed, message=message), where)
        response.headers["allow"] = allowed
        return response

    async def left(_: Request, __: Exception) -> None:
        """Send nothing to a client that has disconnected."""

    handlers: dict[Any, Any] = {RolloutError: refused, ClientDisconnect: left}
    handlers |= {404: unknown_path, 405: wrong_method}
    app = Starlette(routes=list(routes), exception_handlers=handlers)
    app.router.redirect_slashes, app.router.default = False, default or app.router.not_found
    return app


def raw_path(scope: Scope) -> str:
    """Return a request's path as received, percent-encoded, without the query."""
    path: bytes = scope["raw_path"]
    return path.decode("latin-1").partition("?")[0]


_ENCODINGS = {"gzip": "gzip", "x-gzip": "gzip", "br": "brotli", "zstd": "zstd"}


async def read_body(request: Request, most_bytes: int) -> bytes:
    """Read the entire body of a request, and decompress it.

    Raises:
        InputError: `request_size`: the body exceeds `most_bytes`, as received or decompressed;
            `body_timeout`: no part of it arrives for a minute; `body_encoding`: its encoding is
            unknown; `compressed_body`: it is damaged.
        ClientDisconnect: The client disconnected.
    """
    where, header = request.scope["path"], request.headers.get("content-encoding", "")
    encodings = [name.strip().lower() for name in header.split(",")]
    encodings = [name for name in encodings if name not in {"", "identity"}]
    if unknown := [name for name in encodings if name not in _ENCODINGS]:
        finding, expected = f"Content-Encoding: {unknown[0][:40]!r}", "gzip, br, zstd or none"
        raise InputError("body_encoding", where, finding, expected, "send the body uncompressed")
    body = await _received(request, most_bytes)
    for name in reversed(encodings):  # the last one was applied last
        body = await asyncio.to_thread(_decompressed, body, name, most_bytes, where)
    return body


def _decompressed(body: bytes, encoding: str, most_bytes: int, where: str) -> bytes:
    try:
        with pa.CompressedInputStream(pa.BufferReader(body), _ENCODINGS[encoding]) as stream:
            content: bytes = stream.read(most_bytes + 1)  # no more: a small body may be huge
    except (OSError, pa.ArrowException) as error:
        finding = f"cannot decompress the body ({encoding}): {' '.join(str(error).split())}"
        raise InputError("compressed_body", where, finding, hint="send the request again") from None
    if len(content) > most_bytes:
        raise _too_large(where, most_bytes)
    return content


def _too_large(where: str, most_bytes: int) -> InputError:
    finding = f"the body is larger than {most_bytes:,} bytes"
    hint = "raise the limit: rollouts record --max-request-mb N"
    return InputError("request_size", where, finding, hint=hint)


async def _received(request: Request, most_bytes: int) -> bytes:
    parts, num_bytes, stream = list[bytes](), 0, request.stream()
    while True:
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                part = await anext(stream, None)
        except TimeoutError:
            finding = f"no part of the body arrived for {BODY_TIMEOUT_S:g} s"
            raise InputError("body_timeout", request.scope["path"], finding) from None
        if part is None:
            return b"".join(parts)
        parts.append(part)
        num_bytes += len(part)
        if num_bytes > most_bytes:
            raise _too_large(request.scope["path"], most_bytes)


async def unless_left(receive: Receive, work: Awaitable[T]) -> T:
    """Await some work, but cancel it if the client disconnects.

    Args:
        receive: ASGI receive of a request whose body has been read.
        work: The work.

    Raises:
        ClientDisconnect: The work was cancelled.
    """
    doing = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({doing, leaving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        leaving.cancel()
        if not doing.done():
            doing.cancel()
            await asyncio.wait({doing})
    if doing.cancelled():
        raise ClientDisconnect
    return doing.result()


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Reply:
    """A response that is sent in parts.

    Args:
        send: ASGI send.

    Attributes:
        status: Status of the response; 0 until its headers have been sent.
    """

    __slots__ = ("_send", "status")

    def __init__(self, send: Send) -> None:
        self._send, self.status = send, 0

    async def begin(self, status: int, headers: Headers) -> None:
        """Send the status and headers of the response."""
        self.status = status
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def more(self, content: bytes) -> None:
        """Send a part of the body."""
        await self._send({"type": "http.response.body", "body": content, "more_body": True})

    async def finish(self, content: bytes = b"") -> None:
        """Send the end of the body."""
        await self._send({"type": "http.response.body", "body": content, "more_body": False})

    async def answer(self, status: int, content: bytes, headers: Headers) -> None:
        """Send a complete response."""
        await self.begin(status, [*headers, (b"content-length", b"%d" % len(content))])
        await self.finish(content)


class WorkingResponse(Response):
    """A response that some work sends; the work is cancelled if the client disconnects.

    Starlette's `StreamingResponse` notices a client that left only when it sends the next part, or
    cancels in a scope in which nothing can be awaited any more: a cut-off call could not be recorded.

    Args:
        work: Sends the response. An error that it raises becomes the response, or the last event
            of a stream that has begun.
        last_event: Builds that event.
    """

    def __init__(
        self,
        work: Callable[[Reply], Awaitable[None]],
        last_event: Callable[[RolloutError], bytes] = error_event,
    ) -> None:
        self._work, self._last_event = work, last_event

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Run the work."""
        reply = Reply(send)
        try:
            await unless_left(receive, self._work(reply))
        except ClientDisconnect:
            return
        except RolloutError as error:
            if not reply.status:
                raise
            await reply.finish(self._last_event(error))


class _BoundedProtocol(HttpToolsProtocol):
    """One connection with bounded request headers."""

    _num_kept_bytes = 0
    _has_moved = False
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse data; reject endless headers or trailers, which the parser would accumulate."""
        self._has_moved = False
        super().data_received(data)
        self._num_kept_bytes = 0 if self._has_moved else self._num_kept_bytes + len(data)
        if self._num_kept_bytes > HEAD_BYTES and not self.transport.is_closing():
            finding = f"the headers are larger than {HEAD_BYTES:,} bytes"
            self._refuse(InputError("head_size", "request", finding))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._timer is None:
            self._wait()

    def on_headers_complete(self) -> None:
        """Stop the timer, and set `Host` from an absolute target (RFC 9112, section 3.2.2)."""
        self._has_moved = True
        self._stop_waiting()
        if not self.url.startswith((b"/", b"*")):
            authority = self.url.partition(b"://")[2].partition(b"/")[0].partition(b"?")[0]
            others = [(name, value) for name, value in self.headers if name != b"host"]
            self.headers[:] = [*others, (b"host", authority)]
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._has_moved = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._has_moved = True
        super().on_message_complete()

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(HEAD_TIMEOUT_S, self._late)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        finding = f"the headers did not arrive within {HEAD_TIMEOUT_S:g} s"
        self._refuse(InputError("head_timeout", "request", finding))

    def _refuse(self, error: InputError) -> None:
        self._stop_waiting()
        status, content = status_of(error), _error_body(error)
        head = b"HTTP/1.1 %d %s\r\n" % (status, _REASONS[status])
        kind = b"content-type: application/json\r\nconnection: close\r\n"
        self.transport.write(head + kind + b"content-length: %d\r\n\r\n" % len(content) + content)
        self.transport.close()


class _Server(uvicorn.Server):
    """A server that leaves signal handling to its caller."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers."""
        yield


@asynccontextmanager
async def answering(
    app: ASGIApp, listener: socket.socket, *, stop_s: int
) -> AsyncIterator[uvicorn.Server]:
    """Serve requests inside an `async with` block.

    Args:
        app: The application.
        listener: A bound socket.
        stop_s: Time limit for running requests on exit, in seconds.
    """
    config = uvicorn.Config(
        app,
        http=_BoundedProtocol,
        ws="none",
        lifespan="off",
        log_level="critical",
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=stop_s,
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started and not task.done():
        await asyncio.sleep(0.01)
    try:
        yield server
    finally:
        server.should_exit = True
        await task


def listen(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address.

    Raises:
        ConfigError: `address`: the address is in use, or does not belong to this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        reason = (error.strerror or str(error)).lower()
        finding, hint = f"cannot listen here: {reason}", "pass --port 0 to pick a free port"
        raise ConfigError("address", f"{host}:{port}", finding, hint=hint) from None
    return listener
