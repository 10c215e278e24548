"""HTTP API of the recorder: sessions, and the engines' completions and models."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Annotated, TypeVar
from urllib.parse import unquote

import msgspec

from pipelines.generation.engines.http_pool import BROKEN
from pipelines.record.engine_requests import KINDS, read_request
from pipelines.record.exact_prefix import ExactPrefix
from pipelines.record.model_call import Call
from pipelines.record.openapi import DESCRIPTION
from pipelines.record.recorder import Recorder
from pipelines.record.recorder_metrics import CONTENT_TYPE
from pipelines.record.targets import Target, api_key_of, is_session_key, key_of, path_of, target_of
from pipelines.record.upstreams import MODELS, Upstreams, passed_on
from pipelines.record.wire import Exchange, Message, Receive, Send, respond, unless_left
from pipelines.sampling_defaults import request_defaults
from rollout_io.formats.parsing.jsonl import decode_line
from rollout_io.formats.parsing.naming import split_session
from schemas.errors import EngineError, InputError, RolloutError

_SMALL_BYTES = 1 << 20

T = TypeVar("T")
Handler = Callable[[Exchange, Target], Awaitable[None]]


class _Opened(msgspec.Struct, forbid_unknown_fields=True):
    instance_id: Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
    repetition_id: Annotated[int, msgspec.Meta(ge=0, lt=10**9)] | None = None


class _Ended(msgspec.Struct, forbid_unknown_fields=True):
    reward: float | None = None
    error: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    metrics: dict[str, float] = {}


class _Version(msgspec.Struct, forbid_unknown_fields=True):
    policy_version: Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


_OPENED, _ENDED = msgspec.json.Decoder(_Opened), msgspec.json.Decoder(_Ended)
_VERSION = msgspec.json.Decoder(_Version)


class App:
    """ASGI application of the recorder.

    Args:
        recorder: A recorder whose context has been entered.
        upstreams: Upstreams whose context has been entered.
        url: Root URL for clients, such as "http://127.0.0.1:8100".
        exact: Conversations that can be continued token by token; None if disabled.
    """

    def __init__(
        self, recorder: Recorder, upstreams: Upstreams, url: str, exact: ExactPrefix | None = None
    ) -> None:
        self.recorder, self.upstreams, self.url, self.exact = recorder, upstreams, url, exact
        if exact is not None:
            recorder.ended = exact.forget
        self._defaults = request_defaults(recorder.settings.sampling_defaults)
        self._slots = asyncio.Semaphore(recorder.settings.max_concurrency)
        self._routes: dict[str, tuple[str, Handler]] = {
            "/health": ("GET", self._health),
            "/metrics": ("GET", self._metrics),
            "/openapi.json": ("GET", self._openapi),
            "/sessions": ("POST", self._open),
            "/policy_version": ("POST", self._version),
        }

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Handle one request."""
        await respond(scope, receive, send, self._counted)

    async def _counted(self, exchange: Exchange) -> None:
        try:
            await self._route(exchange)
        except RolloutError:
            self.recorder.metrics.refused.inc()
            raise

    async def _route(self, exchange: Exchange) -> None:
        if exchange.raw_path in self._routes:
            method, handler = self._routes[exchange.raw_path]
            exchange.require(method)
            return await handler(exchange, Target(None, None, None, exchange.raw_path))
        target = target_of(exchange.raw_path, exchange.headers)
        self._check_key(target, exchange)
        if target.rest in KINDS:
            exchange.require("POST")
            return await self._call(exchange, target)
        if target.rest == MODELS or _is_model(target.rest):
            exchange.require("GET")
            return await self._models(exchange, target)
        if target.session is not None and target.rest == "/end":
            exchange.require("POST")
            return await self._end(exchange, target)
        if target.session is not None and target.rest == "":
            exchange.require("GET")
            return await self._state(exchange, target)
        paths = ", ".join([*KINDS, MODELS, "/s/INSTANCE/REPETITION/v1/..."])
        got = f"unknown path; available: {paths}"
        hint = "send other requests to the engine directly"
        raise InputError("no_such_path", exchange.raw_path, got, hint=hint)

    def _check_key(self, target: Target, exchange: Exchange) -> None:
        admin = self.recorder.settings.admin_key
        if admin is None or _is_same(api_key_of(exchange.headers), admin):
            return
        session, key = target.session, target.key or ""
        if session is None and target.rest.startswith(MODELS):
            return
        if session is None or not _is_same(key, key_of(admin, session)):
            got = "the session key is missing or wrong"
            hint = "use the base_url from POST /sessions"
            raise InputError("session_key", session or exchange.raw_path, got, hint=hint)

    def _check_admin(self, exchange: Exchange) -> None:
        admin = self.recorder.settings.admin_key
        if admin is not None and not _is_same(api_key_of(exchange.headers), admin):
            hint = "send the header Authorization: Bearer ADMIN_KEY"
            got = "the admin key is missing or wrong"
            raise InputError("admin_key", exchange.raw_path, got, hint=hint)

    def _without_own_keys(self, exchange: Exchange) -> None:
        """Remove keys meant for the recorder before the request goes to the engine."""
        admin = self.recorder.settings.admin_key
        is_admin = admin is not None and _is_same(api_key_of(exchange.headers), admin)
        if is_session_key(exchange.headers) or is_admin:
            exchange.headers.pop("authorization", None)

    async def _call(self, exchange: Exchange, target: Target) -> None:
        settings = self.recorder.settings
        if target.session is None and settings.unassigned == "refuse":
            hint = f"use the base URL {self.url}/s/INSTANCE/REPETITION/v1"
            raise InputError("no_session", target.rest, "the request names no session", hint=hint)
        body = await exchange.body(settings.max_request_bytes)
        self._without_own_keys(exchange)
        asked = read_request(KINDS[target.rest], body, await self._models_named(), self._defaults)
        session = self.recorder.session_for(target.session)
        call = Call(
            recorder=self.recorder,
            upstreams=self.upstreams,
            exchange=exchange,
            path=target.rest,
            asked=asked,
            body=body,
            session=session,
            agent=target.agent,
            exact=self.exact,
        )
        self.recorder.metrics.under_way.inc()
        try:
            await unless_left(exchange, self._in_turn(call))
        finally:
            self.recorder.metrics.under_way.dec()
            if target.session is None:
                await self.recorder.end_unassigned(session)

    async def _in_turn(self, call: Call) -> None:
        async with self._slots:
            await call.run()

    async def _models_named(self) -> tuple[str, str] | None:
        """Return the model's names for clients and for engines; None if no name is configured."""
        name = self.recorder.settings.served_model_name
        if name is None:
            return None
        return name, (await self.upstreams.model()).id

    async def _models(self, exchange: Exchange, target: Target) -> None:
        self._without_own_keys(exchange)
        names = await self._models_named()
        path = target.rest
        if names is not None and path == f"{MODELS}/{names[0]}":
            path = f"{MODELS}/{names[1]}"
        opened = self.upstreams.answer("GET", path, None, exchange.headers, target.session)
        async with opened as response:
            try:
                content = await self.upstreams.whole(response)
            except BROKEN:
                got = "the connection broke before the response was complete"
                raise EngineError("engine_down", path, got) from None
            if names is not None:
                ours, theirs = (msgspec.json.encode({"id": name})[1:-1] for name in names)
                content = content.replace(theirs, ours)
            await exchange.answer(response.status, content, passed_on(response))

    async def _open(self, exchange: Exchange, _: Target) -> None:
        self._check_admin(exchange)
        given = await _given(exchange, _OPENED, "POST /sessions")
        split_session(f"{given.instance_id}/0", "POST /sessions")
        session = self.recorder.open(given.instance_id, given.repetition_id)
        admin = self.recorder.settings.admin_key
        key = None if admin is None else key_of(admin, session.name)
        url = self.url + path_of(session.name, key)
        opened = {"session": session.name, "base_url": f"{url}/v1", "url": url}
        await exchange.say(201, opened)

    async def _end(self, exchange: Exchange, target: Target) -> None:
        assert target.session is not None
        where = f"POST {target.rest}"
        given = await _given(exchange, _ENDED, where)
        said = {**given.metrics, "reward": given.reward, "error": given.error}
        clash = sorted({"session", "reward", "error"} & given.metrics.keys())
        if clash:
            raise InputError("reward_line", where, f"a metric must not be named {clash[0]!r}")
        session = await self.recorder.end(target.session, said)
        await exchange.say(200, session.state())

    async def _state(self, exchange: Exchange, target: Target) -> None:
        assert target.session is not None
        session = self.recorder.sessions.find(target.session)
        if session is not None:
            return await exchange.say(200, session.state())
        if self.recorder.sessions.is_written(target.session):
            return await exchange.say(200, {"session": target.session, "state": "written"})
        hint = "open it with POST /sessions, or send a call to its base URL"
        raise InputError("unknown_session", target.session, "the session does not exist", hint=hint)

    async def _version(self, exchange: Exchange, _: Target) -> None:
        self._check_admin(exchange)
        given = await _given(exchange, _VERSION, "POST /policy_version")
        await self.recorder.set_version(given.policy_version)
        await exchange.say(200, {"policy_version": given.policy_version})

    async def _health(self, exchange: Exchange, _: Target) -> None:
        with suppress(RolloutError):  # the state below reports the problem
            await self.recorder.journal.probe()
        is_recording = self.recorder.journal.problem is None
        problem = self.recorder.journal.problem or self.recorder.problem
        failing = "not writing shards" if is_recording else "not recording"
        state = {
            "status": "ok" if problem is None else failing,
            "problem": problem,
            "open_sessions": self.recorder.sessions.num_open,
            "policy_version": self.recorder.policy_version,
        }
        await exchange.say(200 if problem is None else 507, state)

    async def _metrics(self, exchange: Exchange, _: Target) -> None:
        self.recorder.update_gauges()
        kind = (b"content-type", CONTENT_TYPE.encode())
        await exchange.answer(200, self.recorder.metrics.text(), [kind])

    async def _openapi(self, exchange: Exchange, _: Target) -> None:
        await exchange.say(200, DESCRIPTION)


async def _given(exchange: Exchange, decoder: msgspec.json.Decoder[T], where: str) -> T:
    """Decode the body of a request to the recorder itself; an empty body is treated as {}.

    Raises:
        InputError: `media_type`: the content type is not JSON (web pages may send some other types
            to any address); `json_line`, `record_type`: the body is invalid.
    """
    kind = exchange.headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != "application/json":
        hint = "send the header Content-Type: application/json"
        got, expected = f"the content type {kind!r}", "application/json"
        raise InputError("media_type", where, got, expected, hint)
    try:
        return decode_line(decoder, await exchange.body(_SMALL_BYTES) or b"{}", where)
    except RolloutError as error:
        raise error.at(error.where, "see docs/record.md for the fields") from None


def _is_model(path: str) -> bool:
    """True if the path names a model and has no dot segments, which could escape the path."""
    named = path.startswith(f"{MODELS}/")
    return named and not {".", ".."} & set(unquote(path).split("/"))


def _is_same(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode(), expected.encode())
