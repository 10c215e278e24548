"""uvicorn's HTTP/1.1 protocol with limits on the size and arrival time of request headers."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pipelines.record.wire import error_body, status_of
from schemas.errors import InputError

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
            got = f"the headers are larger than {HEAD_BYTES:,} bytes"
            self._refuse(InputError("head_size", "request", got))

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
        got = f"the headers did not arrive within {HEAD_TIMEOUT_S:g} s"
        self._refuse(InputError("head_timeout", "request", got))

    def _refuse(self, error: InputError) -> None:
        self._stop_waiting()
        status, content = status_of(error), error_body(error)
        head = b"HTTP/1.1 %d %s\r\n" % (status, _REASONS[status])
        kind = b"content-type: application/json\r\nconnection: close\r\n"
        self.transport.write(head + kind + b"content-length: %d\r\n\r\n" % len(content) + content)
        self.transport.close()
