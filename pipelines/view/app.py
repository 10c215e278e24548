"""The viewer's server: the built page, and the API for clients with the token, on this machine only."""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import Message, Receive, Scope, Send

from pipelines.http_server import answering, application, listen
from pipelines.origin_guard import Guard
from pipelines.view.api import Api
from pipelines.view.responses import json_response
from schemas.errors import InputError, RolloutError

HOST = "127.0.0.1"
FOLDER = Path(__file__).parent / "bundle"
"""The page, as built by `make view`."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Content-Security-Policy of every response."""

_HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)
_FORBIDDEN = frozenset({"foreign_host", "foreign_origin", "one_host", "view_token"})
_STOP_S = 1
_LOG = logging.getLogger(__name__)

_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".woff2": "font/woff2",
    ".json": "application/json",
    ".txt": "text/plain; charset=utf-8",
}


@dataclass(frozen=True, slots=True)
class Bundle:
    """The files of the page, held in memory.

    Attributes:
        files: Content and media type by path, such as "/assets/index.js".
    """

    files: Mapping[str, tuple[bytes, str]]

    @classmethod
    def read(cls, folder: Path = FOLDER) -> Bundle:
        """Read the built page."""
        files = {
            f"/{path.relative_to(folder).as_posix()}": (path.read_bytes(), _KINDS[path.suffix])
            for path in sorted(folder.rglob("*"))
            if path.is_file() and path.suffix in _KINDS
        }
        return cls({**files, "/": files["/index.html"]})

    def text(self, path: str) -> str:
        """Return a file as text."""
        return self.files[path][0].decode()


class App:
    """ASGI application of the viewer.

    Args:
        api: Answers requests to `/api`.
        bundle: The built page.
        token: Secret that opens the page (`/?token=TOKEN`) and the API (header `X-Rollouts-Token`).
        host: Address that the server listens on.
    """

    def __init__(self, api: Api, bundle: Bundle, token: str, host: str = HOST) -> None:
        self._bundle, self._token = bundle, token
        self._api = Router(api.routes, redirect_slashes=False)
        files = [Route(path, self._file) for path in bundle.files]
        app = application(files, _refuse, default=self._with_token)
        app.add_exception_handler(Exception, _failed)
        self._app = Guard(app, host, _refuse)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""

        async def send_protected(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *_HEADERS]
            await send(message)

        await self._app(scope, receive, send_protected)

    async def _file(self, request: Request) -> Response:
        path = request.scope["path"]
        if path in {"/", "/index.html"}:
            self._check_token(request.query_params.get("token", ""), path)
        content, kind = self._bundle.files[path]
        return Response(content, media_type=kind)

    async def _with_token(self, scope: Scope, receive: Receive, send: Send) -> None:
        token = Headers(scope=scope).get("x-rollouts-token", "")
        self._check_token(token, scope["path"])
        await self._api(scope, receive, send)

    def _check_token(self, token: str, path: str) -> None:
        if not hmac.compare_digest(token.encode("utf-8", "replace"), self._token.encode()):
            hint = "open the address that `rollouts view` printed"
            raise InputError("view_token", path, "the token is missing or wrong", hint=hint)


def _refuse(error: RolloutError, _path: str) -> Response:
    hint = "open the address that `rollouts view` printed"
    hint = hint if error.rule in _FORBIDDEN else error.hint or ""
    response = json_response({"error": str(error), "hint": hint or None})
    response.status_code = (
        403 if error.rule in _FORBIDDEN else 405 if error.rule == "method" else 400
    )
    return response


async def _failed(request: Request, error: Exception) -> Response:
    """Respond to a bug in a handler, which must not stop the viewer."""
    _LOG.error("%s", request.scope["path"], exc_info=error)
    text = f"unexpected {type(error).__name__}: {' '.join(str(error).split())[:500]}"
    response = json_response({"error": text, "hint": None})
    response.status_code = 500
    return response


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
