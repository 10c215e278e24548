"""Serve a recorder until it is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from pipelines.record.exact_prefix import ExactPrefix
from pipelines.record.recorder import Recorder
from pipelines.record.settings import RecordSettings
from rollout_io.retokenize.tokenizer import load_tokenizer
from schemas.errors import RolloutError
from schemas.extras import requires_extra
from schemas.metadata import DatasetMetadata

with requires_extra("record", "rollouts record"):
    import uvicorn

    from pipelines.origin_guard import Guard
    from pipelines.record.app import App
    from pipelines.record.protocol import BoundedProtocol
    from pipelines.record.recorder_metrics import number
    from pipelines.record.upstreams import Upstreams

from pipelines.generation.engines.http_pool import Limits

_ATTEMPTS, _TIMEOUT_S, _BACKOFF_S, _STOP_S = 5, 3600.0, 0.2, 600
_LINE_S = 1.0


class _Server(uvicorn.Server):
    """A server that leaves signal handling to its caller."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers."""
        yield


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    """A running recorder.

    Attributes:
        url: Root URL.
        recorder: Its bookkeeping.
        server: Set `should_exit` on it to stop.
    """

    url: str
    recorder: Recorder
    server: uvicorn.Server


@asynccontextmanager
async def serving(
    settings: RecordSettings,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    metadata: DatasetMetadata | None = None,
    tell: Callable[[str], object] = sys.stderr.write,
) -> AsyncIterator[Serving]:
    """Serve for as long as the block lasts; on exit, wait for running calls.

    Args:
        settings: Settings.
        host: Address to listen on.
        port: 0 picks a free one.
        metadata: Metadata of the dataset.
        tell: Receives warnings for the user.

    Raises:
        RolloutError: address if it cannot be bound; out_is_free, output_file.
    """
    with listen(host, port) as listener:
        async with _serving(settings, listener, host, metadata, tell) as served:
            yield served


@asynccontextmanager
async def _serving(
    settings: RecordSettings,
    listener: socket.socket,
    host: str,
    metadata: DatasetMetadata | None,
    tell: Callable[[str], object],
) -> AsyncIterator[Serving]:
    shown = f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{listener.getsockname()[1]}"
    exact, metadata = _exact_prefix(settings, metadata or DatasetMetadata())
    recorder = Recorder(settings, metadata, tell)
    limits = Limits(timeout_s=_TIMEOUT_S, max_attempts=_ATTEMPTS, backoff_s=_BACKOFF_S)
    upstreams = Upstreams(
        settings.upstreams,
        limits,
        api_key=settings.upstream_api_key,
        retried=recorder.metrics.retries.inc,
        max_answer_bytes=settings.max_answer_bytes,
    )
    async with recorder, upstreams:
        app = App(recorder, upstreams, url, exact)
        guarded = Guard(app, host, settings.allowed_hosts, recorder.refused)
        async with answering(guarded, listener, stop_s=_STOP_S) as server:
            yield Serving(url=url, recorder=recorder, server=server)


@asynccontextmanager
async def answering(
    app: Guard, listener: socket.socket, *, stop_s: int
) -> AsyncIterator[uvicorn.Server]:
    """Answer requests for as long as the block lasts.

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


async def serve(
    settings: RecordSettings,
    *,
    host: str,
    port: int,
    metadata: DatasetMetadata,
    announce: Callable[[str], object],
) -> None:
    """Serve until SIGINT or SIGTERM; a second signal does not wait for running calls.

    Raises:
        RolloutError: As `serving`.
    """
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    async with serving(settings, host=host, port=port, metadata=metadata) as served:

        def stopped() -> None:
            served.server.force_exit = stop.is_set()
            stop.set()

        for number_ in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number_, stopped)
        announce(served.url)
        line = Line(served.recorder)
        while not stop.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), _LINE_S)
            line.show()
        line.close()


class Line:
    """Status line at the bottom of a terminal; without a terminal, prints nothing.

    Args:
        recorder: The recorder to show.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._is_shown = recorder, sys.stderr.isatty()
        self._last = (time.monotonic(), 0.0, 0.0)

    def show(self) -> None:
        """Redraw the line."""
        if self._is_shown:
            sys.stderr.write(f"\r\x1b[K{self.text()}")
            sys.stderr.flush()

    def text(self) -> str:
        """Return the line, with rates since the previous one."""
        metrics = self._recorder.metrics
        now_s, calls, tokens = time.monotonic(), number(metrics.calls), number(metrics.tokens)
        before_s, before_calls, before_tokens = self._last
        self._last = (now_s, calls, tokens)
        elapsed_s = max(now_s - before_s, 1e-9)
        parts = [
            f"{self._recorder.sessions.num_open} sessions open",
            f"{(calls - before_calls) / elapsed_s:,.1f} calls/s",
            f"{(tokens - before_tokens) / elapsed_s:,.0f} tokens/s",
            f"{number(metrics.drifts):,.0f} drifts",
            f"{self._recorder.sessions.num_written:,} trajectories",
        ]
        if unrecorded := number(metrics.unrecorded):
            parts.append(f"{unrecorded:,.0f} UNRECORDED")
        return ", ".join(parts)

    def close(self) -> None:
        """Move past the line."""
        if self._is_shown:
            sys.stderr.write("\n")


def _exact_prefix(
    settings: RecordSettings, metadata: DatasetMetadata
) -> tuple[ExactPrefix | None, DatasetMetadata]:
    """Set up exact continuation, and add the tokenizer to the metadata."""
    if settings.exact_prefix is None:
        return None, metadata
    tokenizer = load_tokenizer(settings.exact_prefix)
    known = metadata.replace(
        tokenizer=tokenizer.name,
        tokenizer_fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        chat_template_fingerprint=tokenizer.template_fingerprint,
    )
    return ExactPrefix(tokenizer), known


def listen(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address.

    Raises:
        RolloutError: address if it is in use, or not an address of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        got = (error.strerror or str(error)).lower()
        raise RolloutError("address", f"{host}:{port}", got, "a free one", "--port 0") from None
    return listener
