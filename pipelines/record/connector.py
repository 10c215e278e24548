"""Connections to engines that limit informational responses before the final response."""

from __future__ import annotations

import functools
from typing import Any

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.http_exceptions import HttpProcessingError

from pipelines.generation.engines.http_pool import KEEP_ALIVE_S

MOST_INFORMATIONAL = 256
_SWITCHING = 101


class BoundedConnector(aiohttp.TCPConnector):
    """A connector with any number of connections, each handled by a `BoundedHandler`."""

    def __init__(self) -> None:
        super().__init__(limit=0, keepalive_timeout=KEEP_ALIVE_S)
        handler: type[ResponseHandler] = BoundedHandler
        self._factory = functools.partial(handler, loop=self._loop)


class BoundedHandler(ResponseHandler):
    """A connection that raises an error for an endless series of informational responses (1xx).

    aiohttp skips any number of them, and each one restarts the timeout. A protocol switch (101) is
    an error too, because no request asks for one.
    """

    _num_informational = 0

    def feed_data(self, data: Any, size: int = 0) -> None:
        """Receive the status line and headers of a response."""
        status = data[0].code
        self._num_informational = self._num_informational + 1 if 100 <= status < 200 else 0
        if status == _SWITCHING:
            self._refuse("a protocol switch (status 101)")
        elif self._num_informational <= MOST_INFORMATIONAL:
            super().feed_data(data, size)
        elif self._num_informational == MOST_INFORMATIONAL + 1:
            self._refuse(f"more than {MOST_INFORMATIONAL} informational responses")

    def _refuse(self, got: str) -> None:
        self.set_exception(HttpProcessingError(code=502, message=f"{got} before the response"))
        if self.transport is not None:
            self.transport.close()
