"""Serve applications at an address of this machine, and the engine to a custom generator."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

from starlette.types import ASGIApp

from pipelines.generation.config import GenerateConfig
from pipelines.generation.engines.base import Engine, WrappedEngine
from pipelines.harness.engine_api import EngineApp
from pipelines.harness.launchers import Endpoint
from pipelines.http_server import answering, listen
from pipelines.origin_guard import Guard
from pipelines.record.translation import refusal
from rollout_io.retokenize.tokenizer import ChatTokenizer

_LOOPBACK, _WILDCARDS, _STOP_S = "127.0.0.1", ("0.0.0.0", "::"), 5


@asynccontextmanager
async def answering_at(app: ASGIApp, host: str = _LOOPBACK, port: int = 0) -> AsyncIterator[str]:
    """Serve an application at an address; yield its root URL, as clients reach it.

    Args:
        app: The application.
        host: Address to listen on; for a wildcard (0.0.0.0, ::), the URL has the address of the
            interface with the default route.
        port: Port; 0 picks a free one.

    Raises:
        ConfigError: `address`: the address cannot be bound.
    """
    host = host.strip("[]")
    with listen(host, port) as listener:
        async with answering(Guard(app, host, refusal), listener, stop_s=_STOP_S):
            name = _own_address(listener.family) if host in _WILDCARDS else host
            shown = f"[{name}]" if ":" in name else name
            yield f"http://{shown}:{listener.getsockname()[1]}"


def _own_address(family: int) -> str:
    """Return this machine's address on its default route, else loopback; nothing is sent."""
    is_v6 = family == socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("2001:db8::1" if is_v6 else "192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return "::1" if is_v6 else _LOOPBACK


Turn = Callable[[], AbstractAsyncContextManager[None]]


class _InTurn(WrappedEngine):
    def __init__(self, engine: Engine, turn: Turn) -> None:
        super().__init__(engine)
        self._turn = turn

    def turn(self) -> AbstractAsyncContextManager[None]:
        return self._turn()


@asynccontextmanager
async def open_endpoint(
    config: GenerateConfig, engine: Engine, tokenizer: ChatTokenizer, turn: Turn
) -> AsyncIterator[Endpoint]:
    """Serve the engine to a custom generator; the arguments are those of `recorded_calls.open_calls`.

    Raises:
        ConfigError: `address`: the address cannot be bound.
    """
    name = config.served_model_name
    usual = name or Path(config.model).name
    app = EngineApp(_InTurn(engine, turn), tokenizer, usual, only=name)
    async with answering_at(app, config.host, config.port) as url:
        yield Endpoint(base_url=f"{url}/v1", model=usual)
