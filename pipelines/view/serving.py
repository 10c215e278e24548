"""Serve the viewer until it is stopped."""

from __future__ import annotations

import asyncio
import secrets
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from pipelines.view.api import Api
from pipelines.view.bundle_files import Bundle
from schemas.extras import requires_extra

with requires_extra("view", "rollouts view"):
    from pipelines.record.listening import answering, listen
    from pipelines.view.app import App

HOST = "127.0.0.1"
_STOP_S = 1


@dataclass(frozen=True, slots=True)
class Served:
    """A running viewer.

    Attributes:
        url: Root URL, without the token.
        token: The token that requests need.
    """

    url: str
    token: str

    @property
    def address(self) -> str:
        """The address to open in a browser."""
        return f"{self.url}/?token={self.token}"


@asynccontextmanager
async def serving(api: Api, bundle: Bundle, *, port: int = 0) -> AsyncIterator[Served]:
    """Serve the viewer to this machine only, inside an `async with` block.

    Args:
        api: Answers requests.
        bundle: The built page.
        port: Port; 0 picks a free one.

    Raises:
        ConfigError: `address`: the server cannot listen on the port.
    """
    token = secrets.token_urlsafe(24)
    with listen(HOST, port) as listener:
        url = f"http://{HOST}:{listener.getsockname()[1]}"
        async with answering(App(api, bundle, token, HOST), listener, stop_s=_STOP_S):
            yield Served(url, token)


async def serve(api: Api, bundle: Bundle, *, port: int, announce: Callable[[str], object]) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        api: Answers requests.
        bundle: The built page.
        port: Port; 0 picks a free one.
        announce: Receives the address to open once the server is ready.

    Raises:
        ConfigError: `address`: the server cannot listen on the port.
    """
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    async with serving(api, bundle, port=port) as served:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        announce(served.address)
        await stop.wait()
