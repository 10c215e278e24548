"""Serve the engine during generation: to harnesses, whose calls are recorded, or a custom generator.

Each trajectory of a harness has its own base URL:

    harness -> /s/TOKEN/0/v1 (here) -> engine's OpenAI API
                     |
                a recorder's journal -> the trajectory's steps, built as in `rollouts record`

Calls are kept until their trajectory has ended, in a directory that is removed when the process
ends for any reason.
"""

from __future__ import annotations

import asyncio
import hmac
import math
import secrets
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from pipelines.generation.config import GenerateConfig
from pipelines.generation.engines.base import ENGINE_DOWN, Engine, WrappedEngine
from pipelines.generation.processes import Watch
from pipelines.generation.tasks import Task
from pipelines.generation.trajectory import seed_of
from pipelines.harness.engine_api import (
    EngineApp,
    EngineGone,
    PolicyUpstreams,
    check_model,
    completed,
    usual_fields,
)
from pipelines.harness.launchers import NO_KEY, Endpoint, Harness
from pipelines.http_server import (
    STATUS,
    Reply,
    WorkingResponse,
    application,
    raw_path,
    read_body,
)
from pipelines.origin_guard import is_loopback
from pipelines.record.engine_requests import MODEL_APIS, Asked, Fields, Kind, ModelApi, read_request
from pipelines.record.model_call import Call, ModelCalls
from pipelines.record.recorder import Recorder
from pipelines.record.serving import answering_at
from pipelines.record.sessions import (
    Session,
    agent_in,
    api_key_of,
    losses_of,
    target_of,
    without_key,
)
from pipelines.record.settings import RecordSettings
from pipelines.record.shards import ended_of, settle
from pipelines.record.translation import (
    Received,
    count_tokens,
    last_event,
    received,
    refusal,
)
from pipelines.record.upstreams import MODELS, Upstreams, engine_response, models_response
from rollout_io.conversion.rewards import Outcome
from rollout_io.formats.base import Step
from rollout_io.retokenize.tokenizer import ChatTokenizer
from schemas.errors import InputError, RolloutError, count

Turn = Callable[[], AbstractAsyncContextManager[None]]

_DECODER = msgspec.json.Decoder(Fields)


@dataclass(kw_only=True, slots=True)
class OpenTrajectory:
    """A trajectory whose harness may send calls.

    Attributes:
        task: The task attempted.
        config: Sampling settings for fields that requests omit.
        session: Session with the recorded calls.
        num_calls: Number of calls started.
        running: Running calls.
        failure: Error that ends the entire run, not only this trajectory; None if there is none.
        token: Key that requests must send; None if none is needed.
    """

    task: Task
    config: GenerateConfig
    session: Session
    num_calls: int = 0
    running: set[asyncio.Task[None]] = field(default_factory=set)
    failure: RolloutError | None = None
    token: str | None = None

    async def end_calls(self) -> None:
        """Cancel running calls, since the harness has ended; tokens sampled so far are recorded."""
        for call in self.running:
            call.cancel()
        for pending in (self.running, self.session.writing):
            if pending:
                await asyncio.wait(pending)


class Calls:
    """ASGI application that serves calls of open trajectories and rejects all others.

    Args:
        recorder: A recorder whose context has been entered. Sessions are dropped with their calls
            after each trajectory, so none is ever written to a shard.
        upstreams: Upstreams whose context has been entered.
        engine: The engine that serves the calls; it provides the version of its weights.
        vocab_size: Vocabulary size; all token ids must be below it.
        turn: Context to enter around each call.
        watch: Kills the processes of harnesses when this process ends.
        served: The application that serves the engine, if this process serves it; else None.
        name: Name of the model for harnesses; None: the engine's.
        has_tokens: True if requests must send the token of their trajectory.

    Attributes:
        url: Root URL; set once it is known.
        watch: The watch that was passed in.
    """

    def __init__(
        self,
        *,
        recorder: Recorder,
        upstreams: Upstreams,
        engine: Engine,
        vocab_size: int,
        turn: Turn,
        watch: Watch,
        served: EngineApp | None = None,
        name: str | None = None,
        has_tokens: bool = False,
    ) -> None:
        self._name, self._has_tokens = name, has_tokens
        self.url, self.watch, self._served = "", watch, served
        self._recorder, self._upstreams, self._engine = recorder, upstreams, engine
        self._vocab_size, self._turn = vocab_size, turn
        self._calls = ModelCalls(recorder, upstreams)
        self._open: dict[str, OpenTrajectory] = {}
        calls = [Route(api.route, partial(self._call, api), methods=["POST"]) for api in MODEL_APIS]
        self._routes = Router([*calls, Route(MODELS, self._models)], redirect_slashes=False)
        self._app = application(
            *([], refusal),
            default=self._of_trajectory,
            available=[*(api.path for api in MODEL_APIS), MODELS],
        )

    @asynccontextmanager
    async def trajectory(
        self, task: Task, config: GenerateConfig
    ) -> AsyncIterator[tuple[OpenTrajectory, Endpoint]]:
        """Serve the calls of a trajectory inside an `async with` block."""
        session = self._recorder.open(secrets.token_hex(8), 0)
        token = secrets.token_urlsafe(24) if self._has_tokens else None
        opened = OpenTrajectory(task=task, config=config, session=session, token=token)
        self._open[session.name] = opened
        try:
            model = self._name or (await self._upstreams.model()).id
            url, key = f"{self.url}/s/{session.name}/v1", token or NO_KEY
            yield opened, Endpoint(base_url=url, model=model, api_key=key)
        finally:
            del self._open[session.name]
            await opened.end_calls()
            await self._recorder.forget(session)

    async def steps(
        self, opened: OpenTrajectory, outcome: Outcome
    ) -> tuple[list[Step], RolloutError | None]:
        """Build the steps of a trajectory whose calls have ended, with its outcome.

        Returns:
            The readable steps; and the error that makes some calls unusable, or None.
        """
        session = opened.session
        losses = losses_of(session, {"error": outcome.error})
        lost = losses.pop("error", None)
        metrics = outcome.metrics | {name: float(number) for name, number in losses.items()}
        ended = ended_of(session, replace(outcome, error=outcome.error or lost, metrics=metrics))
        mode = self._engine.logprobs_mode
        settled, fault = await asyncio.to_thread(settle, ended, self._vocab_size, mode)
        for step in settled.steps:
            step.source = opened.task.source
        if fault is None and lost is not None:
            finding = f"{count(session.num_lost, 'call')} could not be written"
            fault = InputError("calls_lost", "journal", finding)
        return list(settled.steps), fault

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        await self._app({**scope, "path": raw_path(scope)}, receive, send)

    async def _of_trajectory(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Find the trajectory of a request, and route it by the path that follows."""
        headers, path = dict(Headers(scope=scope).items()), scope["path"]
        target = target_of(path, headers)
        opened = self._open.get(target.session or "")
        self._check_token(headers, path, opened)
        if opened is None:
            raise InputError("no_session", path, "no running trajectory has this URL")
        headers = without_key(headers)
        state = {
            "trajectory": opened,
            "agent": target.agent or agent_in(headers),
            "headers": headers,
        }
        await self._routes({**scope, "path": target.rest, "state": state}, receive, send)

    async def _models(self, _: Request) -> Response:
        if self._name is not None:
            return models_response(self._name)
        async with self._upstreams.answer("GET", MODELS, None, {}, None) as response:
            content = await self._upstreams.whole(response)
        return engine_response(response, content)

    def _check_token(
        self, headers: Mapping[str, str], path: str, opened: OpenTrajectory | None
    ) -> None:
        """Reject a request without the token of its trajectory."""
        if not self._has_tokens:
            return
        token = opened.token if opened is not None else None
        key = api_key_of(headers).encode()
        if token is None or not hmac.compare_digest(key, token.encode()):
            finding = "the request has no valid token of a running trajectory"
            hint = "send the endpoint's api_key (OPENAI_API_KEY) as `Authorization: Bearer`"
            raise InputError("endpoint_token", path, finding, hint=hint)

    async def _call(self, api: ModelApi, request: Request) -> Response:
        opened: OpenTrajectory = request.state.trajectory
        body = await read_body(request, self._recorder.settings.max_request_bytes)
        try:
            call = received(api, body, request)
        except RolloutError as error:
            opened.session.refusal = str(error)
            raise
        if call.dialect is not None and api.is_count:
            model = (await self._upstreams.model()).id
            return await count_tokens(call.dialect, self._upstreams, call.headers, model)

        async def run(reply: Reply) -> None:
            if self._open.get(opened.session.name) is not opened:
                raise InputError("no_session", request.scope["path"], "the trajectory has ended")
            running = asyncio.current_task()
            assert running is not None
            opened.running.add(running)
            try:
                await self._in_turn(api.kind, request, call, reply)
            finally:
                opened.running.discard(running)

        return WorkingResponse(run, partial(last_event, call.dialect))

    async def _in_turn(self, kind: Kind, request: Request, call: Received, reply: Reply) -> None:
        """Wait for the call's turn on the engine, and serve it with the current weights."""
        opened: OpenTrajectory = request.state.trajectory
        async with self._turn():
            await self._upstreams.model()  # caches it, so that the code below does not wait
            self._recorder.policy_version = self._engine.policy_version
            asked = await self._asked(kind, call.path, call.body, opened)
            agent, session = request.state.agent, opened.session
            in_turn = Call(received=call, asked=asked, session=session, agent=agent, reply=reply)
            try:
                await self._calls.serve(in_turn)
            except EngineGone as gone:
                opened.failure = gone
                raise
            if self._served is not None and reply.status == STATUS[ENGINE_DOWN]:
                opened.failure = self._served.failure

    async def _asked(self, kind: Kind, path: str, body: bytes, opened: OpenTrajectory) -> Asked:
        """Parse a request, and add configured defaults to it."""
        try:
            fields = _DECODER.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            finding = f"the request is not a JSON object: {error}"
            raise InputError("engine_request", path, finding) from None
        check_model(msgspec.json.decode(fields.get("model", b"null")), self._name, path)
        model = (await self._upstreams.model()).id
        config, task = opened.config, opened.task
        seed = seed_of(config.seed, task.trajectory_id, opened.num_calls)
        opened.num_calls += 1
        special = getattr(self._engine, "special_tokens", ())  # a served engine decides itself
        version = self._engine.policy_version
        usual = usual_fields(config, seed, version, special) | {"model": model}
        completed_body = msgspec.json.encode(completed(fields, usual, config.max_response_tokens))
        # A served engine answers with the sets themselves.
        mode = None if self._served is not None else self._engine.logprobs_mode
        request = read_request(kind, completed_body, logprobs_mode=mode)
        if not request.is_exact:
            finding = "requests with `echo` or `use_beam_search` cannot be recorded"
            raise InputError("engine_request", path, finding)
        return request


@asynccontextmanager
async def open_calls(
    config: GenerateConfig, engine: Engine, tokenizer: ChatTokenizer, turn: Turn
) -> AsyncIterator[Calls]:
    """Serve the calls of harnesses at `host` and `port` inside an `async with` block.

    Args:
        config: `urls` of the engine's API; if there are none, this process serves the engine, on
            loopback.
        engine: An engine whose context has been entered.
        tokenizer: Tokenizer of the engine.
        turn: Context to enter around each call.

    Raises:
        ConfigError: `address`: the address cannot be bound.
    """
    folder = tempfile.mkdtemp(prefix="rollouts-")
    with Watch(folder) as watch:
        async with AsyncExitStack() as serving:
            urls, served = config.urls, None
            if not urls:
                name = config.served_model_name or Path(config.model).name
                served = EngineApp(engine, tokenizer, name)
                urls = (await serving.enter_async_context(answering_at(served)),)
            settings = RecordSettings(
                out=folder, upstreams=urls, idle_timeout_s=math.inf, flush_s=math.inf
            )
            calls = Calls(
                recorder=await serving.enter_async_context(Recorder(settings)),
                upstreams=await serving.enter_async_context(PolicyUpstreams(urls, engine)),
                engine=engine,
                vocab_size=tokenizer.vocab_size,
                turn=turn,
                watch=watch,
                served=served,
                name=config.served_model_name,
                has_tokens=not is_loopback(config.host),
            )
            address = config.host, config.port
            calls.url = await serving.enter_async_context(answering_at(calls, *address))
            yield calls


class _InTurn(WrappedEngine):
    def __init__(self, engine: Engine, turn: Turn) -> None:
        super().__init__(engine)
        self._turn = turn

    def turn(self) -> AbstractAsyncContextManager[None]:
        return self._turn()


@asynccontextmanager
async def open_endpoint(
    config: GenerateConfig, engine: Engine, tokenizer: ChatTokenizer, turn: Turn
) -> AsyncIterator[Endpoint]:
    """Serve the engine to a custom generator; the arguments are those of `open_calls`.

    Raises:
        ConfigError: `address`: the address cannot be bound.
    """
    name = config.served_model_name
    usual = name or Path(config.model).name
    app = EngineApp(_InTurn(engine, turn), tokenizer, usual, only=name)
    async with answering_at(app, config.host, config.port) as url:
        yield Endpoint(base_url=f"{url}/v1", model=usual)


class HarnessTrajectory:
    """One run of a harness.

    Args:
        harness: The harness to run.
        calls: Server of the harness's calls.
        task: The task to attempt.
        config: Sampling settings for fields that calls omit, and the time limit.

    Attributes:
        steps: Recorded calls, set when the harness ends; kept if the trajectory fails.
        warnings: Always empty.
    """

    def __init__(self, harness: Harness, calls: Calls, task: Task, config: GenerateConfig) -> None:
        self._harness, self._calls, self._task, self._config = harness, calls, task, config
        self.where = f"trajectory {task.trajectory_id!r}"
        self.steps: list[Step] = []
        self.warnings: list[str] = []

    async def run(self) -> None:
        """Run the harness; the last step gets its reward and stop reason, earlier steps get 0.

        Raises:
            RolloutError: `harness_error`: the harness reports a failure; `no_calls`: no call got a
                response; `engine_down`: the engine fails; or any error of `Harness.run`, or the
                error that makes the calls unusable.
        """
        failure: RolloutError | None = None
        async with self._calls.trajectory(self._task, self._config) as (opened, endpoint):
            try:
                outcome = await self._harness.run(
                    endpoint, self._task, self._config.agent_timeout_s, self._calls.watch
                )
            except RolloutError as error:
                failure = error
                outcome = _failed(self.where, error.failure)
            await opened.end_calls()
            if opened.failure is not None:
                raise opened.failure
            if opened.session.places:
                self.steps, fault = await self._calls.steps(opened, outcome)
                failure = failure or fault
                if self.steps and outcome.stop_reason is not None:
                    self.steps[-1].stop_reason = outcome.stop_reason
        if failure is None and outcome.error is not None:
            failure = InputError("harness_error", self.where, outcome.error)
        if failure is None and not self.steps:
            calls = count(opened.num_calls, "call")
            finding = f"the harness made {calls} but received no response"
            if refusal := opened.session.refusal:
                finding = f"all calls of the harness failed; the last with {refusal}"
            elif not opened.num_calls:
                finding = "the harness made no calls to the model"
            hint = f"check that the harness uses its base URL, {endpoint.base_url}"
            raise InputError("no_calls", self.where, finding, hint=hint)
        if failure is not None:
            raise failure


def _failed(where: str, error: str) -> Outcome:
    return Outcome(where=where, reward=None, error=error, metrics={}, user_values={})
