"""Transfer of new weights to vLLM servers through vLLM's weight-transfer interface.

Each server that was started with `--weight-transfer-config` has a sender, which is opened at the
first transfer and used for all versions. During a transfer, the server's calls are paused: its
weights are incomplete.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from pipelines.generation.engines.http_pool import Body, ServerError, Servers
from rollout_io.formats.parsing.jsonl import decode_line
from schemas.errors import EngineError, RolloutError, count

Post = Callable[[str, Body], bytes]
"""Sends one request (path and body; None: GET) to a server, and blocks until its response."""

T = TypeVar("T")
_LOG = logging.getLogger(__name__)
_CLOSE_S = 10.0
_PAUSE = "/pause?mode=keep"
_SHUTDOWN = "/shutdown_weight_transfer_engine"
_RESUME: tuple[str, Body] = ("/resume", {})


class WeightSender(Protocol):
    """Sends model directories to one server; the methods block, and run in threads."""

    def send(self, directory: Path, policy_version: int) -> None:
        """Send all tensors in the directory's *.safetensors, and set the server's `weight_version`."""

    def close(self) -> None:
        """Close the connection, also while `send` waits in another thread."""


OpenSender = Callable[[str, Post], WeightSender]
"""Opens a sender to the server with this root; blocks until the server has accepted it."""


class _Config(msgspec.Struct):
    backend: str


class _VllmConfig(msgspec.Struct):
    weight_transfer_config: _Config | None = None


class _Info(msgspec.Struct):
    vllm_config: _VllmConfig


class _Version(msgspec.Struct):
    weight_version: str


class _Paused(msgspec.Struct):
    is_paused: bool


_INFO, _VERSION = msgspec.json.Decoder(_Info), msgspec.json.Decoder(_Version)
_PAUSED = msgspec.json.Decoder(_Paused)


class Transfers:
    """Senders to the servers that accept transfers.

    Args:
        servers: HTTP client of the servers.
        openers: How to open a sender, by the name of vLLM's backend.
    """

    def __init__(self, servers: Servers, openers: Mapping[str, OpenSender]) -> None:
        self._servers, self._openers = servers, openers
        self._backends: dict[str, str | None] = {}
        self._senders: dict[str, tuple[WeightSender, _Requests]] = {}

    async def check(self) -> None:
        """Check that no server waits for the rest of a transfer.

        Raises:
            EngineError: `engine_refused`: a server is paused, so it would respond to no call.
        """
        if not self._openers:
            return
        for url in self._servers.urls:
            with suppress(RolloutError):  # it has no such request, or is down: calls will show it
                answer = await self._servers.call_one(url, "/is_paused", attempts=1)
                if decode_line(_PAUSED, answer, "/is_paused").is_paused:
                    break
        else:
            return
        got = "the server is paused, maybe because a transfer of weights was broken off"
        raise EngineError("engine_refused", url, got, hint="restart the server")

    async def begin(self) -> None:
        """Ask each server, once, how it gets weights, and say so.

        Raises:
            EngineError: `engine_down`: a server does not respond.
        """
        if self._backends or not self._openers:
            return
        urls = self._servers.urls
        found = await asyncio.gather(*(self._backend(url) for url in urls))
        self._backends = dict(zip(urls, found, strict=True))
        ways = Counter(map(self._way, found))
        parts = (f"{way} to {count(number, 'server')}" for way, number in ways.items())
        _LOG.info("whole models go %s", ", ".join(parts))

    async def _backend(self, url: str) -> str | None:
        path = "/server_info?config_format=json"
        try:
            answer = await self._servers.call_one(url, path)
            config = decode_line(_INFO, answer, path).vllm_config.weight_transfer_config
            if config is not None:
                await self._servers.call_one(url, "/weight_info")
        except ServerError as error:
            if error.status is None:
                raise
            return None
        except RolloutError:
            return None  # without VLLM_SERVER_DEV_MODE=1, or of an earlier version
        return config.backend if config else None

    def _way(self, backend: str | None) -> str:
        if backend in self._openers:
            return f"by transfer ({backend})"
        return f"as files (the backend {backend} is not supported)" if backend else "as files"

    def takes(self, url: str) -> bool:
        """True if weights can be sent to the server with this root, once `begin` has ended."""
        return self._backends.get(url) in self._openers

    def requests_after_files(self, policy_version: int) -> list[tuple[str, Body]]:
        """Return requests to send after files were loaded instead, because a transfer broke."""
        if not any(map(self.takes, self._backends)):
            return []
        return [("/update_weight_version", {"new_version": str(policy_version)}), _RESUME]

    async def send(self, url: str, directory: Path, policy_version: int) -> None:
        """Send the weights in a directory to a server, which then samples from them.

        After an error, the server is paused, and its weights are incomplete.

        Raises:
            Exception: The server or the connection failed.
            MissingExtra: The trainer lacks a package.
        """
        try:
            if url not in self._senders:
                requests = _Requests(self._servers, url)
                opened = self._openers[self._backends[url] or ""]
                self._senders[url] = await requests.run(lambda: opened(url, requests)), requests
            sender, requests = self._senders[url]
            # A server between two of the requests below must not compute with its weights.
            await self._servers.call_one(url, _PAUSE, {}, attempts=1)
            await requests.run(lambda: sender.send(directory, policy_version))
            await self._check_version(url, policy_version)
            for path, body in (("/reset_prefix_cache", {}), _RESUME):
                await self._servers.call_one(url, path, body, attempts=1)
        except BaseException:
            self._drop(url)
            raise

    async def _check_version(self, url: str, policy_version: int) -> None:
        told = await self._servers.call_one(url, "/weight_info", attempts=1)
        version = decode_line(_VERSION, told, "/weight_info").weight_version
        if version != str(policy_version):
            got, expected = f"weights of version {version}", f"version {policy_version}"
            raise EngineError("engine_answer", url, got, expected)

    async def recover(self, url: str) -> None:
        """End a broken transfer on the server; its sender is opened again for the next one.

        A whole update without weights follows, because vLLM 0.32 still holds those that it received
        for incomplete layers: the next load would take them for a part of its own, and fail.
        """
        with suppress(EngineError):  # the server may be down
            # Again, because a server that came back was resumed.
            await self._servers.call_one(url, _PAUSE, {}, attempts=1)
            for path in ("/start_weight_update", "/finish_weight_update", _SHUTDOWN):
                with suppress(EngineError):  # the broken update may go on, so that none can start
                    await self._servers.call_one(url, path, {}, attempts=1)

    async def close(self) -> None:
        """Close all senders."""
        for url in list(self._senders):
            with suppress(EngineError, TimeoutError):
                async with asyncio.timeout(_CLOSE_S):
                    await self._servers.call_one(url, _SHUTDOWN, {}, attempts=1)
            self._drop(url)

    def _drop(self, url: str) -> None:
        if url in self._senders:
            sender, _ = self._senders.pop(url)
            threading.Thread(target=sender.close, daemon=True).start()


class _Requests:
    """A sender's requests to its server, from the threads of the sender."""

    def __init__(self, servers: Servers, url: str) -> None:
        self._servers, self._url = servers, url
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[Any] = self._loop.create_future()

    def __call__(self, path: str, body: Body = None) -> bytes:
        """See `Post`; a request that fails also ends `run`."""
        call = self._servers.call_one(self._url, path, body, attempts=1)
        try:
            return asyncio.run_coroutine_threadsafe(call, self._loop).result()
        except Exception as error:
            self._end(error)
            raise

    async def run(self, work: Callable[[], T]) -> T:
        """Run work of the sender in a thread.

        Returns as soon as a request failed: a sender whose server is gone may wait for it forever.
        Its thread is then abandoned; as a daemon, it does not delay the end of the process.
        """
        self._ended = self._loop.create_future()

        def run() -> None:
            try:
                self._end(None, work())
            except BaseException as error:
                self._end(error)

        threading.Thread(target=run, daemon=True, name="weight transfer").start()
        result: T = await self._ended
        return result

    def _end(self, error: BaseException | None, result: object = None) -> None:
        ended = self._ended

        def set_it() -> None:
            if ended.done():
                return
            if error is not None:
                ended.set_exception(error)
            else:
                ended.set_result(result)

        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(set_it)
