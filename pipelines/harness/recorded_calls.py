"""Record harness calls during generation: each trajectory has its own base URL.

    harness -> /s/TOKEN/0/v1 (here) -> engine's OpenAI API
                     |
                a recorder's journal -> the trajectory's steps, built as in `rollouts record`

Calls are kept until their trajectory has ended, in a directory that is removed when the process
ends for any reason.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from pipelines.generation.config import GenerateConfig
from pipelines.generation.engines.base import ENGINE_DOWN, Engine
from pipelines.generation.process_groups import Watch
from pipelines.generation.tasks import Task
from pipelines.generation.trajectory import seed_of
from pipelines.harness.engine_api import EngineApp
from pipelines.harness.engine_upstreams import EngineGone, PolicyUpstreams
from pipelines.harness.launchers import Endpoint
from pipelines.harness.requests import completed, usual_fields
from pipelines.origin_guard import Application, Guard
from pipelines.record.engine_requests import KINDS, Asked, Fields, read_request
from pipelines.record.listening import answering, listen
from pipelines.record.model_call import Call
from pipelines.record.recorder import Recorder, losses_of
from pipelines.record.sessions import Session
from pipelines.record.settings import RecordSettings
from pipelines.record.shards import ended_of, settle
from pipelines.record.targets import target_of
from pipelines.record.upstreams import MODELS, Upstreams, passed_on
from pipelines.record.wire import STATUS, Exchange, Message, Receive, Send, respond, unless_left
from rollout_io.conversion.rewards import Outcome
from rollout_io.formats.base import Step
from rollout_io.retokenize.tokenizer import ChatTokenizer
from schemas.errors import InputError, RolloutError, count

Turn = Callable[[], AbstractAsyncContextManager[None]]

_HOST, _STOP_S = "127.0.0.1", 5
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
    """

    task: Task
    config: GenerateConfig
    session: Session
    num_calls: int = 0
    running: set[asyncio.Task[None]] = field(default_factory=set)
    failure: RolloutError | None = None

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
    ) -> None:
        self.url, self.watch, self._served = "", watch, served
        self._recorder, self._upstreams, self._engine = recorder, upstreams, engine
        self._vocab_size, self._turn = vocab_size, turn
        self._open: dict[str, OpenTrajectory] = {}

    @asynccontextmanager
    async def trajectory(
        self, task: Task, config: GenerateConfig
    ) -> AsyncIterator[tuple[OpenTrajectory, Endpoint]]:
        """Serve the calls of a trajectory inside an `async with` block."""
        session = self._recorder.open(secrets.token_hex(8), 0)
        opened = OpenTrajectory(task=task, config=config, session=session)
        self._open[session.name] = opened
        try:
            model = (await self._upstreams.model()).id
            yield opened, Endpoint(base_url=f"{self.url}/s/{session.name}/v1", model=model)
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
        settled, fault = await asyncio.to_thread(settle, ended, self._vocab_size)
        for step in settled.steps:
            step.source = opened.task.source
        if fault is None and lost is not None:
            got = f"{count(session.num_lost, 'call')} could not be written"
            fault = InputError("calls_lost", "journal", got)
        return list(settled.steps), fault

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Handle one request."""
        await respond(scope, receive, send, self._route)

    async def _route(self, exchange: Exchange) -> None:
        target = target_of(exchange.raw_path, exchange.headers)
        opened = self._open.get(target.session or "")
        if opened is None:
            got = "no running trajectory has this URL"
            raise InputError("no_session", exchange.raw_path, got)
        exchange.headers.pop("authorization", None)
        if target.rest in KINDS:
            exchange.require("POST")
            await self._call(exchange, opened, target.rest, target.agent)
        elif target.rest == MODELS:
            async with self._upstreams.answer("GET", MODELS, None, {}, None) as response:
                content = await self._upstreams.whole(response)
                await exchange.answer(response.status, content, passed_on(response))
        else:
            got = f"unknown path; available: {', '.join([*KINDS, MODELS])}"
            raise InputError("no_such_path", exchange.raw_path, got)

    async def _call(
        self, exchange: Exchange, opened: OpenTrajectory, path: str, agent: str | None
    ) -> None:
        body = await exchange.body(self._recorder.settings.max_request_bytes)
        if self._open.get(opened.session.name) is not opened:
            raise InputError("no_session", path, "the trajectory has ended")
        running = asyncio.create_task(self._in_turn(exchange, opened, path, agent, body))
        opened.running.add(running)
        running.add_done_callback(opened.running.discard)
        await unless_left(exchange, running)

    async def _in_turn(
        self, exchange: Exchange, opened: OpenTrajectory, path: str, agent: str | None, body: bytes
    ) -> None:
        """Wait for the call's turn on the engine, and serve it with the current weights."""
        async with self._turn():
            await self._upstreams.model()  # caches it, so that the code below does not wait
            self._recorder.policy_version = self._engine.policy_version
            call = Call(
                recorder=self._recorder,
                upstreams=self._upstreams,
                exchange=exchange,
                path=path,
                asked=await self._asked(path, body, opened),
                body=body,
                session=opened.session,
                agent=agent,
            )
            try:
                await call.run()
            except EngineGone as gone:
                opened.failure = gone
                raise
            if self._served is not None and exchange.status == STATUS[ENGINE_DOWN]:
                opened.failure = self._served.failure

    async def _asked(self, path: str, body: bytes, opened: OpenTrajectory) -> Asked:
        """Parse a request, and add configured defaults to it.

        Raises:
            InputError: `engine_request`: the request is invalid or its response could not be
                recorded; `request_size`: the request is too large.
        """
        try:
            fields = _DECODER.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            got = f"the request is not a JSON object: {error}"
            raise InputError("engine_request", path, got) from None
        model = (await self._upstreams.model()).id
        config, task = opened.config, opened.task
        seed = seed_of(config.seed, task.trajectory_id, opened.num_calls)
        opened.num_calls += 1
        special = getattr(self._engine, "special_tokens", ())  # a served engine decides itself
        version = self._engine.policy_version
        own = usual_fields(config, seed, version, special) | {"model": model}
        made = msgspec.json.encode(completed(fields, own, config.max_response_tokens))
        asked = read_request(KINDS[path], made)
        if asked is None or not asked.is_exact:
            got = "requests with `echo` or `use_beam_search` cannot be recorded"
            if asked is None:
                got = "the request is not JSON"
            raise InputError("engine_request", path, got)
        return asked


@asynccontextmanager
async def open_calls(
    config: GenerateConfig, engine: Engine, tokenizer: ChatTokenizer, turn: Turn
) -> AsyncIterator[Calls]:
    """Serve the calls of harnesses on loopback inside an `async with` block.

    Args:
        config: `urls` of the engine's API; if there are none, this process serves the engine.
        engine: An engine whose context has been entered.
        tokenizer: Tokenizer of the engine.
        turn: Context to enter around each call.

    Raises:
        ConfigError: `address`: there is no free port.
    """
    folder = tempfile.mkdtemp(prefix="rollouts-")
    with Watch(folder) as watch:
        async with AsyncExitStack() as serving:
            urls, served = config.urls, None
            if not urls:
                served = EngineApp(engine, tokenizer, Path(config.model).name)
                urls = (await serving.enter_async_context(answering_at_loopback(served)),)
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
            )
            calls.url = await serving.enter_async_context(answering_at_loopback(calls))
            yield calls


@asynccontextmanager
async def answering_at_loopback(app: Application) -> AsyncIterator[str]:
    """Serve an application on a free port of the loopback interface; yield its root URL."""
    with listen(_HOST, 0) as listener:
        async with answering(Guard(app, _HOST), listener, stop_s=_STOP_S):
            yield f"http://{_HOST}:{listener.getsockname()[1]}"
