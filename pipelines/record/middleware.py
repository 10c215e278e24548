r"""Record inside the engine's own server: no second port, and no connection between the two.

    ROLLOUTS_RECORD_OUT=runs/recorded vllm serve MODEL \
        --middleware pipelines.record.middleware.RecordingMiddleware

All that `rollouts record` serves is then below `/recorder` of the engine's address: sessions have the
base URL `http://HOST:PORT/recorder/s/INSTANCE/REPETITION/v1`. Other requests reach the engine untouched.

    client <---> uvicorn <---> RecordingMiddleware ---/recorder/...---> App ---> AppUpstream ---> engine's
                                      |                                                       application
                                      +----------------- other paths ---------------------------->

The settings are those of `rollouts record`: `ROLLOUTS_RECORD_MAX_CONCURRENCY=64` sets `max_concurrency`.
The engine has one server process then (`--api-server-count 1`, the default), because one recorder writes a
dataset.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any, Self
from urllib.parse import unquote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipelines.generation.engines.http_pool import Limits
from pipelines.http_server import message_of
from pipelines.record.serving import guarded_app, new_recorder
from pipelines.record.settings import RecordSettings
from pipelines.record.upstreams import Answered, Upstreams
from rollout_io.configuration import build, check_required, checked_values
from schemas.errors import ConfigError, EngineError, RolloutError

MOUNT = "/recorder"
_PREFIX = "ROLLOUTS_RECORD_"
_ANY_ADDRESS = "0.0.0.0"  # the engine chose where it listens, and the recorder cannot know
_MOST_WAITING = 64
_LOG = logging.getLogger(__name__)


class RecordingMiddleware:
    """ASGI middleware that serves a recorder below `/recorder`, with the wrapped application as its engine.

    The recorder starts and stops with the application (ASGI's lifespan).

    Args:
        app: The engine's application.

    Raises:
        ConfigError: `config_key`, `config_value`: a variable `ROLLOUTS_RECORD_*` is wrong.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._engine, self._settings = app, settings_of(os.environ)
        self._recorder: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request, or the application's lifespan."""
        if scope["type"] == "lifespan":
            await self._live(scope, receive, send)
        elif self._recorder is not None and (inner := _below(scope)) is not None:
            await self._recorder(inner, receive, send)
        else:
            await self._engine(scope, receive, send)

    async def _live(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with AsyncExitStack() as stack:

            async def told(message: Message) -> None:
                if message["type"] == "lifespan.shutdown.complete":
                    await stack.aclose()  # while the server still waits for this message
                await send(message)

            try:
                recorder, exact = new_recorder(self._settings, _LOG.warning)
                upstream = AppUpstream(self._engine, scope, self._settings)
                await stack.enter_async_context(recorder)
            except RolloutError as error:
                await receive()
                await send({"type": "lifespan.startup.failed", "message": message_of(error)})
                return
            self._recorder = guarded_app(recorder, upstream, None, exact, _ANY_ADDRESS)
            await self._engine(scope, receive, told)


def settings_of(environment: Mapping[str, str]) -> RecordSettings:
    """Read the settings of a recorder from environment variables.

    Raises:
        ConfigError: `config_key`: a variable names no setting, or `out` is missing; `config_value`: a
            value is wrong.

    Example:
        >>> found = settings_of({"ROLLOUTS_RECORD_OUT": "runs/a", "ROLLOUTS_RECORD_FLUSH_S": "0.5"})
        >>> found.out, found.flush_s
        ('runs/a', 0.5)
    """
    engine = {"upstreams": ("this process",)}
    values: dict[str, Any] = {}
    for name, text in environment.items():
        if name.startswith(_PREFIX):
            override = f"{name.removeprefix(_PREFIX).lower()}={text}"
            try:
                values |= checked_values(RecordSettings, {}, [override], "")
                build(RecordSettings, {"out": "", **engine, **values})
            except ConfigError as error:
                raise error.at(name) from None
    check_required(values, {"out": f"the dataset to append shards to: set {_PREFIX}OUT"})
    return build(RecordSettings, engine | values)


class AppUpstream(Upstreams):
    """An engine that is an ASGI application of this process.

    Args:
        app: The application.
        lifespan: Scope of its lifespan, with what its requests share.
        settings: Settings of the recorder.
    """

    def __init__(self, app: ASGIApp, lifespan: Scope, settings: RecordSettings) -> None:
        super().__init__(
            settings.upstreams,
            Limits(max_attempts=1),
            api_key=settings.upstream_api_key,
            max_answer_bytes=settings.max_answer_bytes,
        )
        self._app = app
        self._shared = {key: lifespan[key] for key in ("app", "state") if key in lifespan}

    async def __aenter__(self) -> Self:
        """Do nothing: there are no connections."""
        return self

    async def __aexit__(self, *error: object) -> None:
        """Do nothing."""

    async def _once(
        self,
        root: str,  # noqa: ARG002 there is one engine
        method: str,
        path: str,
        body: bytes | None,
        headers: dict[str, str],
    ) -> Answered:
        body = body or b""
        named = {**headers, "host": "localhost", "content-length": str(len(body))}
        scope = {
            **self._shared,
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": unquote(path),
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(k.encode("latin-1"), v.encode("latin-1")) for k, v in named.items()],
            "client": None,
            "server": None,
        }
        response = AppResponse(body)
        await response.of(self._app, scope)
        if not response.status:
            finding, hint = "the engine's application sent no response", "see the log of the server"
            raise EngineError("engine_down", path, finding, hint=hint)
        return response


class AppResponse:
    """Response of an ASGI application, part by part as it sends them.

    The application waits while `_MOST_WAITING` parts have not been read, as it would for a slow
    connection. It is told that the client has left by `close`, and ends by itself.

    Args:
        body: Body of the request.
    """

    def __init__(self, body: bytes) -> None:
        self.status, self.raw_headers, self.url = 0, list[tuple[bytes, bytes]](), "this process"
        self._request: bytes | None = body
        self._parts = asyncio.Queue[bytes | None](_MOST_WAITING)  # None: the end
        self._begun, self._left = asyncio.Event(), asyncio.Event()
        self._is_whole = False

    async def of(self, app: ASGIApp, scope: Scope) -> None:
        """Start the application, and wait for the headers of its response, or for its end."""
        self._running = asyncio.create_task(self._run(app, scope))
        try:
            await self._begun.wait()
        except asyncio.CancelledError:
            self.close()
            raise

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers, by lower-case name."""
        return {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in self.raw_headers}

    @property
    def content_length(self) -> int | None:
        """Size of the body in bytes, if the response tells it."""
        size = self.headers.get("content-length", "")
        return int(size) if size.isdecimal() else None

    @property
    def content(self) -> Self:
        """The body."""
        return self

    async def readany(self) -> bytes:
        """Wait for the next part; b"" at the end.

        Raises:
            ConnectionError: The application failed before the end of the body.
        """
        part = await self._parts.get()
        if part is None and not self._is_whole:
            raise ConnectionError("the application failed before the end of its response")
        return part or b""

    def close(self) -> None:
        """Tell the application that the client has left."""
        self._left.set()
        while not self._parts.empty():  # wakes an application that waits for room
            self._parts.get_nowait()

    async def _run(self, app: ASGIApp, scope: Scope) -> None:
        try:
            await app(scope, self._receive, self._send)
        except Exception:
            if not self._left.is_set():
                _LOG.exception("the engine's application failed")
        finally:
            self._begun.set()
            if not self._left.is_set():
                await self._parts.put(None)

    async def _receive(self) -> Message:
        if self._request is not None:
            body, self._request = self._request, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self._left.is_set():
            raise OSError("the client has left")
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.raw_headers = [(bytes(k), bytes(v)) for k, v in message.get("headers", ())]
            self._begun.set()
        elif message["type"] == "http.response.body":
            if body := message.get("body", b""):
                await self._parts.put(bytes(body))
            self._is_whole = not message.get("more_body", False)


def _below(scope: Scope) -> Scope | None:
    """Return the scope of a request to the recorder, which sees its path without `/recorder`.

    None if the request is the engine's. Servers behind a prefix (`root_path`) have it in the path or not.
    """
    root = scope.get("root_path", "")
    raw = (scope.get("raw_path") or scope["path"].encode()).decode("latin-1").partition("?")[0]
    path = raw.removeprefix(root) if raw.startswith(f"{root}/") else raw
    if path != MOUNT and not path.startswith(f"{MOUNT}/"):
        return None
    path = path.removeprefix(MOUNT) or "/"
    inner = {"path": unquote(path), "raw_path": path.encode("latin-1"), "root_path": root + MOUNT}
    return {**scope, **inner}
