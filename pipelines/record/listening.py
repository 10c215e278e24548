"""Serve an ASGI application on a listening socket."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn

from pipelines.record.protocol import BoundedProtocol
from pipelines.record.wire import Message, Receive, Send
from schemas.errors import ConfigError


class _Server(uvicorn.Server):
    """A server that leaves signal handling to its caller."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers."""
        yield


@asynccontextmanager
async def answering(
    app: Callable[[Message, Receive, Send], Awaitable[Any]], listener: socket.socket, *, stop_s: int
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
        got, hint = f"cannot listen here: {reason}", "pass --port 0 to pick a free port"
        raise ConfigError("address", f"{host}:{port}", got, hint=hint) from None
    return listener
