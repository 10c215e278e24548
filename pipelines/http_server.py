"""Serve an ASGI application on a socket, with limits on the size and arrival time of headers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pipelines.http_app import error_body, status_of
from schemas.errors import ConfigError, InputError

HEAD_BYTES = 64 << 10
HEAD_TIMEOUT_S = 60.0
_REASONS = {408: b"Request Timeout", 431: b"Request Header Fields Too Large"}


class BoundedProtocol(HttpToolsProtocol):
    """One connection with bounded request headers."""

    _num_kept_bytes = 0
    _has_moved = False
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the timer when a client connects."""
        super().connection_made(transport)  # type: ignore[arg-type]
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer when the client disconnects."""
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
        """Start the timer with the first byte of a request."""
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
        """Reset the size check when a part of the body arrives."""
        self._has_moved = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Reset the size check at the end of the request."""
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
        status, content = status_of(error), error_body(error)
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
        http=BoundedProtocol,
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
