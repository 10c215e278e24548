"""Serve a recorder until it is stopped, or any application at an address of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

from pipelines.record.exact_prefix import ExactPrefix
from pipelines.record.recorder import Recorder
from pipelines.record.redaction import Redaction
from pipelines.record.settings import RecordSettings
from rollout_io.retokenize.tokenizer import load_tokenizer
from schemas.errors import RolloutError
from schemas.imports import requires_extra
from schemas.metadata import DatasetMetadata

with requires_extra("record", "rollouts record"):
    import uvicorn
    from starlette.responses import Response
    from starlette.types import ASGIApp

    from pipelines.http_server import answering, listen
    from pipelines.origin_guard import Guard
    from pipelines.record.app import App
    from pipelines.record.translation import refusal
    from pipelines.record.upstreams import Upstreams

from pipelines.generation.engines.http_pool import Limits

_ATTEMPTS, _TIMEOUT_S, _BACKOFF_S, _STOP_S = 5, 3600.0, 0.2, 600
_STATUS_S = 1.0
_CONNECT_S = 3.0
_SWITCH_S = 0.0005
_LOOPBACK, _WILDCARDS, _ENDPOINT_STOP_S = "127.0.0.1", ("0.0.0.0", "::"), 5
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    """A running recorder.

    Attributes:
        url: Root URL.
        recorder: The recorder.
        server: The HTTP server; set its `should_exit` to stop.
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
    tell: Callable[[str], object] = _LOG.warning,
) -> AsyncIterator[Serving]:
    """Serve inside an `async with` block; on exit, wait for running calls.

    Args:
        settings: Settings of the recorder.
        host: Address to listen on.
        port: Port; 0 picks a free one.
        tell: Receives warnings for the user; by default, they are logged.

    Raises:
        ConfigError: `address`: the address cannot be bound.
        InputError: `out_is_free`: another recorder uses the dataset; `output_file`: the dataset's
            directory is not local or not writable.
    """
    with listen(host, port) as listener:
        url = _url(host, listener)
        recorder, exact = new_recorder(settings, tell)
        upstreams = Upstreams(
            settings.upstreams,
            Limits(timeout_s=_TIMEOUT_S, max_attempts=_ATTEMPTS, backoff_s=_BACKOFF_S),
            api_key=settings.upstream_api_key,
            retried=recorder.metrics.retries.inc,
            max_answer_bytes=settings.max_answer_bytes,
        )
        async with recorder, upstreams:
            app = guarded_app(recorder, upstreams, url, exact, host)
            async with answering(app, listener, stop_s=_STOP_S) as server:
                yield Serving(url=url, recorder=recorder, server=server)


async def serve(
    settings: RecordSettings,
    *,
    host: str,
    port: int,
    announce: Callable[[str], object],
    show: Callable[[Recorder], object],
    tell: Callable[[str], object],
) -> None:
    """Serve until SIGINT or SIGTERM; after a second signal, do not wait for running calls.

    Args:
        settings: Settings of the recorder.
        host: Address to listen on.
        port: Port; 0 picks a free one.
        announce: Receives the root URL once the recorder is ready.
        show: Callback that is called every second while the recorder runs.
        tell: Receives warnings for the user.

    Raises:
        RolloutError: As for `serving`.
    """
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    async with serving(settings, host=host, port=port, tell=tell) as served:

        def stopped() -> None:
            served.server.force_exit = stop.is_set()
            stop.set()

        for number_ in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number_, stopped)
        _shorten_pauses()
        announce(served.url)
        await asyncio.gather(*(_warn_if_silent(url, tell) for url in settings.upstreams))
        while not stop.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), _STATUS_S)
            show(served.recorder)


def _shorten_pauses() -> None:
    """Shorten the pauses in which this process delays the events of all streams."""
    gc.collect()
    gc.freeze()  # full collections then skip the imported modules, which saves 30 ms
    sys.setswitchinterval(_SWITCH_S)  # limits the delay by threads that decode long responses


async def _warn_if_silent(url: str, tell: Callable[[str], object]) -> None:
    """Warn if the URL of an engine does not accept connections."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        async with asyncio.timeout(_CONNECT_S):
            _, writer = await asyncio.open_connection(parts.hostname, port)
    except (OSError, TimeoutError) as error:
        reason = "timed out" if isinstance(error, TimeoutError) else _reason(error)
        tell(f"the engine at {url} does not respond: {reason}; calls fail until it is up")
    else:
        writer.close()


def _reason(error: OSError) -> str:
    text = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
    return text.lower()


def new_recorder(
    settings: RecordSettings, tell: Callable[[str], object]
) -> tuple[Recorder, ExactPrefix | None]:
    """Create a recorder and, if the settings ask for it, its continuation of chats by tokens."""
    redaction = Redaction.of(settings)
    metadata = DatasetMetadata(logprobs_mode=settings.logprobs_mode)
    directory = settings.exact_prefix or settings.tokenizer
    if directory is None:
        return Recorder(settings, metadata, tell, redaction), None
    is_exact = settings.exact_prefix is not None
    tokenizer = load_tokenizer(directory, needs_template=is_exact)
    with_tokenizer = metadata.replace(
        tokenizer=tokenizer.name,
        tokenizer_fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        chat_template_fingerprint=tokenizer.template_fingerprint,
    )
    recorder = Recorder(settings, with_tokenizer, tell, redaction)
    return recorder, ExactPrefix(tokenizer) if is_exact else None


def guarded_app(
    recorder: Recorder,
    upstreams: Upstreams,
    url: str | None,
    exact: ExactPrefix | None,
    host: str,
) -> Guard:
    """Build the application of a recorder, which serves no foreign `Origin` or `Host`.

    Args:
        recorder: The recorder.
        upstreams: Its engines.
        url: Root URL for clients; None takes that of each request.
        exact: Conversations that can be continued token by token; None if disabled.
        host: Address that the server listens on.
    """

    def refuse(error: RolloutError, path: str) -> Response:
        recorder.refused(error)
        return refusal(error, path)

    app = App(recorder, upstreams, url, exact)
    return Guard(app, host, refuse, recorder.settings.allowed_hosts)


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
        async with answering(Guard(app, host, refusal), listener, stop_s=_ENDPOINT_STOP_S):
            name = _own_address(listener.family) if host in _WILDCARDS else host
            yield _url(name, listener)


def _url(host: str, listener: socket.socket) -> str:
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{listener.getsockname()[1]}"


def _own_address(family: int) -> str:
    """Return this machine's address on its default route, else loopback; nothing is sent."""
    is_v6 = family == socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("2001:db8::1" if is_v6 else "192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return "::1" if is_v6 else _LOOPBACK
