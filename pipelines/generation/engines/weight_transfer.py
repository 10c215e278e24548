"""New weights for vLLM servers: sent through vLLM's weight-transfer interface, or in a directory.

Each server that was started with `--weight-transfer-config` has a sender, which is opened at the
first transfer and used for all versions. During a transfer, the server's calls are paused,
because its weights are incomplete.

On a CPU, vLLM packs the weights of each linear layer, and `reload_weights` packs only layers whose
weights are in the directory. If embeddings are tied, the directory has no weights for the output
layer, which would therefore keep the packed weights of the previously loaded model; `OutputLayers`
adds them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from pipelines.generation.engines.http_pool import Body, ServerError, Servers
from rollout_io.formats.parsing.jsonl import decode_line
from schemas.errors import EngineError, RolloutError, count

Post = Callable[[str, Body], bytes]
"""Sends a request (path, and body or None for GET) to a server, and blocks until it responds."""

T = TypeVar("T")
_LOG = logging.getLogger(__name__)
_CLOSE_S = 10.0
_PAUSE = "/pause?mode=keep"
_SHUTDOWN = "/shutdown_weight_transfer_engine"
_RESUME: tuple[str, Body] = ("/resume", {})

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
OWN_FILE, INDEX = "output_layer.safetensors", "model.safetensors.index.json"
_OUTPUT = ("lm_head", "embed_out", "output.weight", "output_layer")
"""Parts of the names of output layers."""
_MOST_BYTES = 100_000_000
"""Maximum size of a header; a file with a larger header is not in safetensors format."""


class WeightSender(Protocol):
    """Sends model directories to one server. The methods block, so they are called in threads."""

    def send(self, directory: Path, policy_version: int) -> None:
        """Send all tensors in the directory's *.safetensors, and set the server's `weight_version`."""

    def close(self) -> None:
        """Close the connection, even while `send` is waiting in another thread."""


OpenSender = Callable[[str, Post], WeightSender]
"""Opens a sender to the server at this root; blocks until the server has accepted it."""


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
        openers: Functions that open a sender, keyed by vLLM's name of the backend.
    """

    def __init__(self, servers: Servers, openers: Mapping[str, OpenSender]) -> None:
        self._servers, self._openers = servers, openers
        self._backends: dict[str, str | None] = {}
        self._senders: dict[str, tuple[WeightSender, _Requests]] = {}

    async def check(self) -> None:
        """Check that no server is still waiting for the rest of a transfer.

        Raises:
            EngineError: `engine_refused`: a server is paused, so it would not respond to any call.
        """
        if not self._openers:
            return
        for url in self._servers.urls:
            with suppress(RolloutError):  # later calls report a missing route or a dead server
                answer = await self._servers.call_one(url, "/is_paused", attempts=1)
                if decode_line(_PAUSED, answer, "/is_paused").is_paused:
                    break
        else:
            return
        finding = "the server is paused, possibly because a weight transfer was interrupted"
        raise EngineError("engine_refused", url, finding, hint="restart the server")

    async def begin(self) -> None:
        """Ask each server, once, for its backend, and log how it will get weights.

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
        _LOG.info("whole models are sent %s", ", ".join(parts))

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
            return None  # VLLM_SERVER_DEV_MODE=1 is not set, or vLLM is too old
        return config.backend if config else None

    def _way(self, backend: str | None) -> str:
        if backend in self._openers:
            return f"by transfer ({backend})"
        return f"as files (the backend {backend} is not supported)" if backend else "as files"

    def takes(self, url: str) -> bool:
        """True if weights can be transferred to the server at this root; await `begin` first."""
        return self._backends.get(url) in self._openers

    def requests_after_files(self, policy_version: int) -> list[tuple[str, Body]]:
        """Return the requests that end a failed transfer once the server has loaded the files."""
        if not any(map(self.takes, self._backends)):
            return []
        return [("/update_weight_version", {"new_version": str(policy_version)}), _RESUME]

    async def send(self, url: str, directory: Path, policy_version: int) -> None:
        """Send the weights in a directory to a server, which then samples from them.

        After an error, the server is paused and its weights are incomplete.

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
            # Until the last request below, the server must not compute with its weights.
            await self._servers.call_one(url, _PAUSE, {}, attempts=1)
            await requests.run(lambda: sender.send(directory, policy_version))
            await self._check_version(url, policy_version)
            # Cached keys and values are the old weights'. They go before the calls continue.
            for path, body in (("/reset_prefix_cache", {}), _RESUME):
                await self._servers.call_one(url, path, body, attempts=1)
        except BaseException:
            self._drop(url)
            raise

    async def _check_version(self, url: str, policy_version: int) -> None:
        told = await self._servers.call_one(url, "/weight_info", attempts=1)
        version = decode_line(_VERSION, told, "/weight_info").weight_version
        if version != str(policy_version):
            finding, expected = f"weights of version {version}", f"version {policy_version}"
            raise EngineError("engine_answer", url, finding, expected)

    async def recover(self, url: str) -> None:
        """End a failed transfer on the server. The next transfer opens a new sender.

        Recovery includes an update without weights, because vLLM 0.32 keeps the weights that it
        received for incomplete layers: the next load would mistake them for its own, and fail.
        """
        with suppress(EngineError):  # the server may be down
            # Pause the server again: a server that was lost and came back was resumed.
            await self._servers.call_one(url, _PAUSE, {}, attempts=1)
            for path in ("/start_weight_update", "/finish_weight_update", _SHUTDOWN):
                with suppress(EngineError):  # the failed update may still block a new one
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
            # A connection to a server that is gone may take minutes to close; nothing depends on its end.
            threading.Thread(target=sender.close, daemon=True).start()


class _Requests:
    """Sends requests to a sender's server, from the sender's threads."""

    def __init__(self, servers: Servers, url: str) -> None:
        self._servers, self._url = servers, url
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[Any] = self._loop.create_future()

    def __call__(self, path: str, body: Body = None) -> bytes:
        """See `Post`; a failed request also ends `run`."""
        # Once only: a second request to begin or end an update would find the first one's state.
        call = self._servers.call_one(self._url, path, body, attempts=1)
        try:
            return asyncio.run_coroutine_threadsafe(call, self._loop).result()
        except Exception as error:
            self._end(error)
            raise

    async def run(self, work: Callable[[], T]) -> T:
        """Run the sender's work in a thread.

        Raises as soon as a request fails, because a sender may wait forever for a server that is
        gone. The thread is then abandoned; it is a daemon, so it does not keep the process alive.
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
        ended = self._ended  # now, not when the loop gets to it: `run` may have begun anew by then

        def set_it() -> None:
            if ended.done():
                return
            if error is not None:
                ended.set_exception(error)
            else:
                ended.set_result(result)

        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(set_it)


def lacks_output_layer(path: Path) -> bool:
    """True if a model directory has no output layer, because it is tied to the input embeddings.

    False if its files cannot be read; vLLM then reports the reason.
    """
    try:
        names = [name for file in sorted(path.glob("*.safetensors")) for name in _header(file)[0]]
    except (OSError, ValueError):
        return False
    return bool(names) and not any(part in name for name in names for part in _OUTPUT)


class OutputLayers:
    """Copies model directories and adds an explicit output layer; `close` deletes the copies.

    A copy consists of links to the model's files, and one new file that stores the embeddings as
    the weights of the output layer. Only the latest copy is kept on disk, in the directory for
    temporary files (set by the environment variable TMPDIR).
    """

    def __init__(self) -> None:
        self._folders: list[tempfile.TemporaryDirectory[str]] = []

    def add(self, path: Path) -> Path:
        """Copy a model directory, add the output layer, and return the directory of the copy.

        Raises:
            EngineError: `engine_refused`: no tensor has the usual name of the embeddings.
        """
        folder = tempfile.TemporaryDirectory(prefix="rollouts-weights-")
        self._folders.append(folder)
        target = Path(folder.name)
        for file in path.iterdir():  # but for the index, which is written again with the new layer
            if file.is_file() and file.name != INDEX:
                (target / file.name).symlink_to(file.resolve())
        source = next((f for f in path.glob("*.safetensors") if EMBEDDING in _header(f)[0]), None)
        if source is None:
            finding = "on a CPU, vLLM needs the weights of the output layer to load a model"
            expected = f"{HEAD}, or tied embeddings named {EMBEDDING}"
            hint = "save the model with tie_word_embeddings=false, and start vLLM with it"
            message = f"{path}: {finding}; expected {expected}"
            raise EngineError("engine_refused", str(path), finding, expected, hint, message=message)
        _copy_tensor(source, EMBEDDING, target / OWN_FILE, HEAD)
        if (path / INDEX).is_file():
            index = json.loads((path / INDEX).read_text(encoding="utf-8"))
            index["weight_map"] |= {HEAD: OWN_FILE}
            (target / INDEX).write_text(json.dumps(index), encoding="utf-8")
        return target

    def keep_latest(self) -> None:
        """Delete all copies except the latest."""
        for folder in self._folders[:-1]:
            folder.cleanup()
        del self._folders[:-1]

    def close(self) -> None:
        """Delete all copies."""
        for folder in self._folders:
            folder.cleanup()
        self._folders.clear()


def _header(file: Path) -> tuple[dict[str, Any], int]:
    """Read the header of a safetensors file: its tensors, and the offset of their data."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        if not 0 < size <= _MOST_BYTES:
            raise ValueError(f"{file} is not in safetensors format")
        described = json.loads(opened.read(size))
    described.pop("__metadata__", None)
    return described, 8 + size


def _copy_tensor(source: Path, name: str, target: Path, new_name: str) -> None:
    """Copy one tensor to a new file, under a new name."""
    described, start = _header(source)
    tensor = described[name]
    begin, end = tensor["data_offsets"]
    header = {new_name: tensor | {"data_offsets": [0, end - begin]}}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the data begin at a multiple of 8 bytes
    with source.open("rb") as read, target.open("wb") as written:
        written.write(len(text).to_bytes(8, "little") + text)
        read.seek(start + begin)
        for part in _parts(read, end - begin):
            written.write(part)


def _parts(opened: Any, num_bytes: int) -> Iterator[bytes]:
    while num_bytes:
        part = opened.read(min(num_bytes, 1 << 24))
        if not part:
            raise EOFError("the file of a tensor is cut off")
        num_bytes -= len(part)
        yield part
