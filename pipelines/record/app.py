"""HTTP API of the recorder: sessions, and the engines' completions and models.

What waits for what:

    call ---> body complete ---> slot free (max_concurrency) ---> journal can be written
          (60 s for each part)                                            |
                                                                          v
    client <--- each part at once <--- response <--- engine (next one, or again, until it responds)
       |                                   |
       | leaves: cancels the engine's      | whole, or its last part held back
       v call; what was sampled is         v
      journal.append <-------------- journal.append: on disk; not cancelled with the call
                                           |
    client <--- last part <----------------+---> tokens counted, conversation remembered

    POST .../end ---> outcome on disk in the journal ---> response
    every flush_s ---> ended sessions without a running call ---> shard on disk ---> journal removed
    exit ---> running calls end (600 s; at a second signal at once) ---> last shard
"""

from __future__ import annotations

import asyncio
import hmac
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, TypeVar
from urllib.parse import unquote

import msgspec
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from pipelines.generation.engines.http_pool import BROKEN
from pipelines.http_server import (
    JSON,
    Reply,
    WorkingResponse,
    application,
    json_response,
    raw_path,
    read_body,
)
from pipelines.record.engine_requests import MODEL_APIS, ModelApi, read_request
from pipelines.record.exact_prefix import ExactPrefix
from pipelines.record.model_call import Call, ModelCalls
from pipelines.record.recorder import CONTENT_TYPE, Recorder
from pipelines.record.sessions import (
    Target,
    agent_in,
    api_key_of,
    is_session_key,
    key_of,
    path_of,
    session_in,
    target_of,
    without_key,
)
from pipelines.record.translation import count_tokens, last_event, received, refusal
from pipelines.record.upstreams import MODELS, Upstreams, engine_response
from pipelines.sampling_defaults import request_defaults
from rollout_io.formats.parsing.jsonl import decode_line
from rollout_io.formats.parsing.records import split_session
from schemas.errors import EngineError, InputError, RolloutError

_OF_SESSION = "/s/{instance}/{repetition}"
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
Repetition = Annotated[int, msgspec.Meta(ge=0, lt=10**9)]

_IN_PATH: dict[str, Any] = {"instance": Name, "repetition": Repetition, "model": Name}
_NAMED = re.compile(r"\{(\w+)\}")
_REFUSAL = {
    "description": "Rejected by the recorder or the engine: {error: {message, type, code}}.",
    "content": {JSON: {"schema": {"type": "object"}}},
}

_SMALL_BYTES = 1 << 20

T = TypeVar("T")


class NewSession(msgspec.Struct, forbid_unknown_fields=True):
    """Body of `POST /sessions`."""

    instance_id: Name
    repetition_id: Repetition | None = None


class OpenedSession(msgspec.Struct):
    """Response to `POST /sessions`."""

    session: str
    base_url: str
    url: str


class Outcome(msgspec.Struct, forbid_unknown_fields=True):
    """Body of `POST .../end`."""

    reward: float | None = None
    error: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    metrics: dict[str, float] = {}


class PolicyVersion(msgspec.Struct, forbid_unknown_fields=True):
    """Body of `POST /policy_version`, and its response."""

    policy_version: Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


_NEW_SESSION, _OUTCOME = msgspec.json.Decoder(NewSession), msgspec.json.Decoder(Outcome)
_VERSION = msgspec.json.Decoder(PolicyVersion)


class App:
    """ASGI application of the recorder.

    Args:
        recorder: A recorder whose context has been entered.
        upstreams: Upstreams whose context has been entered.
        url: Root URL for clients, such as "http://127.0.0.1:8100"; None takes that of each request.
        exact: Conversations that can be continued token by token; None if disabled.
    """

    def __init__(
        self,
        recorder: Recorder,
        upstreams: Upstreams,
        url: str | None,
        exact: ExactPrefix | None = None,
    ) -> None:
        self.recorder, self.upstreams, self._url = recorder, upstreams, url
        if exact is not None:
            recorder.ended = exact.forget
        self._calls = ModelCalls(recorder, upstreams, exact)
        self._defaults = request_defaults(recorder.settings.sampling_defaults)
        self._slots = asyncio.Semaphore(recorder.settings.max_concurrency)
        general, in_session = self._operations()
        self._operations_shown = [*general, *in_session]
        self._in_session = Router([o.route for o in in_session], redirect_slashes=False)
        paths = [*(api.path for api in MODEL_APIS), MODELS, "/s/INSTANCE/REPETITION/v1/..."]
        self._app = application(
            [o.route for o in general],
            self._refuse,
            default=self._with_session,
            available=paths,
            hint="send other requests to the engine directly",
        )

    def _operations(self) -> tuple[list[_Operation], list[_Operation]]:
        """Return the recorder's own operations, and those that may follow a session in the path."""
        get, post = partial(_Operation, "GET"), partial(_Operation, "POST")
        here, both, text = (_OF_SESSION,), ("", _OF_SESSION), ("text/plain",)
        calls = partial(post, media=(JSON, "text/event-stream"), prefixes=both)
        version = PolicyVersion
        general = [
            get("/health", self._health, "Tell whether calls are written.", statuses=(200, 507)),
            get("/metrics", self._metrics, "Get Prometheus metrics.", answer=str, media=text),
            get("/openapi.json", self._openapi, "Describe this API."),
            post("/sessions", self._open, "Open a session.", NewSession, OpenedSession, (201,)),
            post("/policy_version", self._version, "Set the version.", version, version),
        ]
        of_sessions = [
            *(
                calls(a.route, partial(self._call, a), a.summary, a.body, a.answer, shown=a.path)
                for a in MODEL_APIS
            ),
            get(MODELS, self._models, "List the engine's models."),
            get(MODELS + "/{model:path}", self._models, "Describe a model.", prefixes=()),
            post("/end", self._end, "End a session.", Outcome, prefixes=here),
            get("/", self._state, "Get the state of a session.", prefixes=here),
        ]
        return general, of_sessions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        # Routes see the path as received: decoded, the session math%2F12/3 would have three parts.
        await self._app({**scope, "path": raw_path(scope)}, receive, send)

    def _refuse(self, error: RolloutError, path: str) -> Response:
        self.recorder.metrics.refused.inc()
        return refusal(error, path)

    async def _with_session(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check the key of a request, and route it by the path that follows its session."""
        headers = dict(Headers(scope=scope).items())
        target = target_of(scope["path"], headers)
        admin = self.recorder.settings.admin_key
        is_admin = admin is not None and _is_same(api_key_of(headers), admin)
        if admin is not None and not is_admin:
            _check_key(admin, target, scope["path"])
        if is_admin or is_session_key(headers):
            headers = without_key(headers)  # a key for the recorder is none for the engine
        state = {"target": target, "headers": headers}
        inner = {**scope, "path": target.rest or "/", "state": state}
        await self._in_session(inner, receive, send)

    def _root(self, request: Request) -> str:
        return self._url or str(request.base_url).rstrip("/")

    def _check_admin(self, request: Request) -> None:
        admin = self.recorder.settings.admin_key
        if admin is not None and not _is_same(api_key_of(request.headers), admin):
            hint = "send the header Authorization: Bearer ADMIN_KEY"
            finding = "the admin key is missing or wrong"
            raise InputError("admin_key", request.scope["path"], finding, hint=hint)

    async def _call(self, api: ModelApi, request: Request) -> Response:
        settings, target, path = self.recorder.settings, request.state.target, request.scope["path"]
        headers = request.state.headers
        body = await read_body(request, settings.max_request_bytes)
        call, names = received(api, body, request), await self._models_named()
        spoken = call.dialect
        if spoken is not None and api.is_count:
            model = names[1] if names is not None and spoken.model == names[0] else None
            return await count_tokens(spoken, self.upstreams, call.headers, model)
        named = session_in(headers, None if spoken is None else spoken.session)
        name = target.session or named
        if name is None and settings.unassigned == "refuse":
            hint = f"use the base URL {self._root(request)}/s/INSTANCE/REPETITION/v1"
            raise InputError("no_session", path, "the request names no session", hint=hint)
        asked = read_request(api.kind, call.body, names, self._defaults, settings.logprobs_mode)
        agent = target.agent or agent_in(call.headers)

        async def run(reply: Reply) -> None:
            session = self.recorder.session_for(name)
            session.is_of_harness |= target.session is None
            self.recorder.metrics.under_way.inc()
            try:
                async with self._slots:
                    await self._calls.serve(
                        Call(received=call, asked=asked, session=session, agent=agent, reply=reply)
                    )
            finally:
                self.recorder.metrics.under_way.dec()
                if name is None:
                    await self.recorder.end_unassigned(session)

        def refused(error: RolloutError) -> bytes:
            self.recorder.metrics.refused.inc()
            return last_event(spoken, error)

        return WorkingResponse(run, refused)

    async def _models_named(self) -> tuple[str, str] | None:
        """Return the model's names for clients and for engines; None if no name is configured."""
        name = self.recorder.settings.served_model_name
        if name is None:
            return None
        return name, (await self.upstreams.model()).id

    async def _models(self, request: Request) -> Response:
        path, session = request.scope["path"], request.state.target.session
        if {".", ".."} & set(unquote(path).split("/")):  # they would lead out of the models
            raise HTTPException(404)
        names = await self._models_named()
        if names is not None and path == f"{MODELS}/{names[0]}":
            path = f"{MODELS}/{names[1]}"
        opened = self.upstreams.answer("GET", path, None, request.state.headers, session)
        async with opened as response:
            try:
                content = await self.upstreams.whole(response)
            except BROKEN:
                finding = "the connection broke before the response was complete"
                raise EngineError("engine_down", path, finding) from None
        if names is not None:
            ours, theirs = (msgspec.json.encode({"id": name})[1:-1] for name in names)
            content = content.replace(theirs, ours)
        return engine_response(response, content)

    async def _open(self, request: Request) -> Response:
        self._check_admin(request)
        wanted = await _given(request, _NEW_SESSION, "POST /sessions")
        split_session(f"{wanted.instance_id}/0", "POST /sessions")
        session = self.recorder.open(wanted.instance_id, wanted.repetition_id)
        admin = self.recorder.settings.admin_key
        key = None if admin is None else key_of(admin, session.name)
        url = self._root(request) + path_of(session.name, key)
        return json_response(OpenedSession(session.name, f"{url}/v1", url), 201)

    async def _end(self, request: Request) -> Response:
        name, where = _session_of(request), "POST /end"
        outcome = await _given(request, _OUTCOME, where)
        fields = {**outcome.metrics, "reward": outcome.reward, "error": outcome.error}
        clash = sorted({"session", "reward", "error"} & outcome.metrics.keys())
        if clash:
            raise InputError("reward_line", where, f"a metric must not be named {clash[0]!r}")
        return json_response((await self.recorder.end(name, fields)).state())

    async def _state(self, request: Request) -> Response:
        name = _session_of(request)
        session = self.recorder.sessions.find(name)
        if session is not None:
            return json_response(session.state())
        if self.recorder.sessions.is_written(name):
            return json_response({"session": name, "state": "written"})
        hint = "open it with POST /sessions, or send a call to its base URL"
        raise InputError("unknown_session", name, "the session does not exist", hint=hint)

    async def _version(self, request: Request) -> Response:
        self._check_admin(request)
        body = await _given(request, _VERSION, "POST /policy_version")
        await self.recorder.set_version(body.policy_version)
        return json_response(body)

    async def _health(self, _: Request) -> Response:
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
        return json_response(state, 200 if problem is None else 507)

    async def _metrics(self, _: Request) -> Response:
        self.recorder.update_gauges()
        return Response(self.recorder.metrics.text(), headers={"content-type": CONTENT_TYPE})

    async def _openapi(self, _: Request) -> Response:
        return json_response(_described("rollouts record", self._operations_shown))


def _session_of(request: Request) -> str:
    """Return the session that a request names; without one, its path is unknown."""
    target: Target = request.state.target
    if target.session is None:
        raise HTTPException(404)
    return target.session


async def _given(request: Request, decoder: msgspec.json.Decoder[T], where: str) -> T:
    """Decode the body of a request to the recorder itself; an empty body is treated as {}."""
    kind = request.headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != "application/json":
        hint = "send the header Content-Type: application/json"
        finding, expected = f"the content type {kind!r}", "application/json"
        raise InputError("media_type", where, finding, expected, hint)
    try:
        return decode_line(decoder, await read_body(request, _SMALL_BYTES) or b"{}", where)
    except RolloutError as error:
        raise error.at(error.where, "see docs/record.md for the fields") from None


def _check_key(admin_key: str, target: Target, path: str) -> None:
    """Reject a request without its session's key; lists of models need none."""
    session = target.session
    if session is None and target.rest.startswith(MODELS):
        return
    if session is None or not _is_same(target.key or "", key_of(admin_key, session)):
        finding = "the session key is missing or wrong"
        hint = "use the base_url from POST /sessions"
        raise InputError("session_key", session or path, finding, hint=hint)


def _is_same(key: str, expected: str) -> bool:
    return hmac.compare_digest(key.encode(), expected.encode())


@dataclass(frozen=True, slots=True)
class _Operation:
    """A route, and its entry in the description.

    Attributes:
        path: Path of the route, after the session if it has one, in Starlette's syntax.
        body: Type of the request's body; None if it has none.
        answer: Type of the response's body.
        statuses: Statuses of a response that is no error.
        media: Media types of the response.
        prefixes: Where the route is described: at the root, in a session, or both.
        shown: Path in the description, if it differs.
    """

    method: str
    path: str
    handle: Callable[[Request], Awaitable[Response]]
    summary: str
    body: Any = None
    answer: Any = dict
    statuses: Sequence[int] = (200,)
    media: Sequence[str] = (JSON,)
    prefixes: Sequence[str] = ("",)
    shown: str | None = None

    @property
    def route(self) -> Route:
        return Route(self.path, self.handle, methods=[self.method])

    def shown_path(self, prefix: str) -> str:
        """Return the path in the description, after a prefix."""
        path = self.shown or self.path
        return prefix + (path if path != "/" else "")


def _described(title: str, operations: Sequence[_Operation]) -> dict[str, Any]:
    """Return the OpenAPI 3.1 description of an API, generated from its operations and their types."""
    types: list[Any] = [*_IN_PATH.values()]
    types += [t for operation in operations for t in (operation.body, operation.answer) if t]
    schemas, components = msgspec.json.schema_components(
        types, ref_template="#/components/schemas/{name}"
    )
    schema_of = dict(zip(map(repr, types), schemas, strict=True))

    def content(kind: Any, media: Iterable[str] = (JSON,)) -> dict[str, Any]:
        return {name: {"schema": schema_of[repr(kind)]} for name in media}

    def entry(operation: _Operation, prefix: str) -> dict[str, Any]:
        answer = {
            "description": "The response.",
            "content": content(operation.answer, operation.media),
        }
        responses = {str(status): answer for status in operation.statuses}
        described: dict[str, Any] = {
            "summary": operation.summary,
            "responses": responses | {"default": _REFUSAL},
        }
        if operation.body is not None:
            described["requestBody"] = {"required": True, "content": content(operation.body)}
        if named := _NAMED.findall(operation.shown_path(prefix)):
            described["parameters"] = [
                {"name": n, "in": "path", "required": True, "schema": schema_of[repr(_IN_PATH[n])]}
                for n in named
            ]
        return described

    paths: dict[str, Any] = {}
    for operation in operations:
        for prefix in operation.prefixes:
            described = paths.setdefault(operation.shown_path(prefix), {})
            described[operation.method.lower()] = entry(operation, prefix)
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": "1"},
        "paths": paths,
        "components": {"schemas": components},
    }
