"""Relays that forward calls to an engine without reading them: `python -m benchmarks.relay KIND URL`.

`benchmarks.record` uses them as limits: `http` uses the recorder's libraries (uvicorn and aiohttp on
uvloop), and `tcp` copies bytes between two sockets.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import aiohttp
import uvicorn
import uvloop


class HttpRelay:
    """ASGI application that sends every request to an engine.

    Args:
        url: Root URL of the engine.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._client: aiohttp.ClientSession | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Forward one request, and the parts of its response as they arrive."""
        if self._client is None:
            connector = aiohttp.TCPConnector(limit=0)
            self._client = aiohttp.ClientSession(connector=connector, auto_decompress=False)
        body, has_more = b"", True
        while has_more:
            message = await receive()
            body, has_more = body + message["body"], message["more_body"]
        headers = {k.decode(): v.decode() for k, v in scope["headers"] if k == b"content-type"}
        url = self._url + scope["path"]
        async with self._client.post(url, data=body, headers=headers) as response:
            kind = (b"content-type", response.headers["content-type"].encode())
            await send(
                {"type": "http.response.start", "status": response.status, "headers": [kind]}
            )
            async for content in response.content.iter_any():
                await send({"type": "http.response.body", "body": content, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class TcpRelay(asyncio.Protocol):
    """One side of a pair of connections; it forwards all received bytes to its peer.

    Args:
        host: Host of the engine; "" for the connection to the engine.
        port: Port of the engine.
        peer: Transport of the other side, if it is connected.
    """

    def __init__(self, host: str, port: int, peer: asyncio.WriteTransport | None = None) -> None:
        self._host, self._port, self._peer = host, port, peer
        self._early = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connect the client to the engine."""
        self._transport: Any = transport
        if self._host:
            self._connecting = asyncio.ensure_future(self._connect())

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        self._peer, _ = await loop.create_connection(
            lambda: TcpRelay("", 0, self._transport), self._host, self._port
        )
        self._peer.write(self._early)

    def data_received(self, data: bytes) -> None:
        """Forward bytes."""
        if self._peer is None:
            self._early += data
        else:
            self._peer.write(data)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """Close the other side too."""
        if self._peer is not None:
            self._peer.close()


async def http(url: str) -> None:
    config = uvicorn.Config(
        HttpRelay(url), port=0, lifespan="off", log_level="critical", access_log=False
    )
    server = uvicorn.Server(config)
    serving = asyncio.ensure_future(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    _announce(server.servers[0].sockets[0].getsockname()[1])
    await serving


async def tcp(url: str) -> None:
    host, port = url.removeprefix("http://").split(":")
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: TcpRelay(host, int(port)), "127.0.0.1", 0)
    _announce(server.sockets[0].getsockname()[1])
    await server.serve_forever()


def _announce(port: int) -> None:
    print(f"http://127.0.0.1:{port}", flush=True)


if __name__ == "__main__":
    uvloop.run({"http": http, "tcp": tcp}[sys.argv[1]](sys.argv[2]))
