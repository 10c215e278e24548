"""The viewer's ASGI application: serves the built page, and the API to clients with the token."""

from __future__ import annotations

import asyncio
import hmac
import logging
from contextlib import suppress
from urllib.parse import parse_qs

import msgspec

from pipelines.origin_guard import Guard
from pipelines.record.wire import Exchange, Message, Receive, Send
from pipelines.view.answers import Answer, json_answer
from pipelines.view.api import Api
from pipelines.view.bundle_files import Bundle
from schemas.errors import InputError, RolloutError

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Content-Security-Policy of every response."""
MAX_BODY_BYTES = 64 << 20

_HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)
_FORBIDDEN = frozenset({"foreign_host", "foreign_origin", "one_host", "view_token"})
_LOG = logging.getLogger(__name__)


class App:
    """ASGI application of the viewer.

    Args:
        api: Answers requests to `/api`.
        bundle: The built page.
        token: Secret that opens the page (`/?token=TOKEN`) and the API (header `X-Rollouts-Token`).
        host: Address that the server listens on.
    """

    def __init__(self, api: Api, bundle: Bundle, token: str, host: str = "127.0.0.1") -> None:
        self._api, self._bundle, self._token = api, bundle, token
        self._guard = Guard(self, host)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            return
        exchange = Exchange(scope, receive, send)
        with suppress(ConnectionError):
            try:
                self._guard.check(scope)
                status, answer = 200, await self._answer(exchange, scope)
            except RolloutError as error:
                status, answer = _status_of(error), _error(error)
            except Exception as error:  # a bug in one handler must not stop the viewer
                _LOG.exception("%s", exchange.raw_path)
                text = f"unexpected {type(error).__name__}: {' '.join(str(error).split())[:500]}"
                status, answer = 500, json_answer({"error": text, "hint": None})
            kind = (b"content-type", answer.kind.encode())
            content = b"" if exchange.method == "HEAD" else answer.content
            await exchange.answer(status, content, [kind, *_HEADERS])

    async def _answer(self, exchange: Exchange, scope: Message) -> Answer:
        path = exchange.raw_path
        query = scope["query_string"].decode("latin-1")
        if path in self._bundle.files:
            if path in {"/", "/index.html"}:
                self._check_token(parse_qs(query).get("token", [""])[0], path)
            content, kind = self._bundle.files[path]
            return Answer(content, kind)
        self._check_token(exchange.headers.get("x-rollouts-token", ""), path)
        if self._api.is_labels(path):
            exchange.require("POST")
            return await asyncio.to_thread(self._api.label, path, await _given(exchange))
        exchange.require("GET")
        return await asyncio.to_thread(self._api.answer, f"{path}?{query}")

    def _check_token(self, given: str, path: str) -> None:
        if not hmac.compare_digest(given.encode("utf-8", "replace"), self._token.encode()):
            hint = "open the address that `rollouts view` printed"
            raise InputError("view_token", path, "the token is missing or wrong", hint=hint)


async def _given(exchange: Exchange) -> dict[str, object]:
    kind = exchange.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        got = f"the content type must be application/json, not {kind!r}"
        raise InputError("media_type", exchange.raw_path, got)
    body = await exchange.body(MAX_BODY_BYTES)
    try:
        found = msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        raise InputError("json_line", exchange.raw_path, f"invalid JSON: {error}") from None
    if not isinstance(found, dict):
        raise InputError("json_line", exchange.raw_path, "the body is not a JSON object")
    return found


def _status_of(error: RolloutError) -> int:
    return 403 if error.rule in _FORBIDDEN else 405 if error.rule == "method" else 400


def _error(error: RolloutError) -> Answer:
    hint = "open the address that `rollouts view` printed"
    hint = hint if error.rule in _FORBIDDEN else error.hint or ""
    return json_answer({"error": str(error), "hint": hint or None})
