"""One call of a model: asked of an engine with exact tokens, recorded, and answered as if it were not."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pipelines.record.answers import Answer, Unread
from pipelines.record.exact_prefix import FIRST, PATH, ChatShown, ExactPrefix, Unsure
from pipelines.record.recorder import Recorder
from pipelines.record.requests import Asked
from pipelines.record.sessions import Session
from pipelines.record.streams import Events, StreamedCall
from pipelines.record.upstreams import BROKEN, Answered, Upstreams, passed_on
from pipelines.record.wire import Exchange
from schemas.errors import RolloutError

ABORTED, BROKEN_OFF = "abort", "error"
_SSE = "text/event-stream"


@dataclass(kw_only=True, slots=True)
class Call:
    """A call under way.

    Attributes:
        path: Of the engine's API.
        asked: What the client asks for; None: it cannot be recorded.
        body: As it came, then as it is sent.
        session: Whose call it is.
        agent: Within the session.
        exact: Conversations that are continued token by token, if they are.
        as_chat: Shows the client a chat, where a text completion was asked for in its place.
        about: What else is written of it.
    """

    recorder: Recorder
    upstreams: Upstreams
    exchange: Exchange
    path: str
    asked: Asked | None
    body: bytes
    session: Session
    agent: str | None
    exact: ExactPrefix | None = None
    as_chat: ChatShown | None = None
    about: dict[str, Any] = field(default_factory=dict)

    async def run(self) -> None:
        """Ask, record, answer.

        Raises:
            RolloutError: engine_down, journal.
        """
        with self.session.calling():
            await self._check_disk()
            began_s, version = time.monotonic(), self.recorder.policy_version
            self.about = {
                "time": self.recorder.now_s(),
                "agent": self.agent,
                "policy_version": version,
            }
            await self._choose()
            opened = self.upstreams.answer(
                "POST", self.path, self.body, self.exchange.headers, self.session.name
            )
            async with opened as response:
                self.recorder.metrics.first_token.observe(time.monotonic() - began_s)
                if self.asked is None or not self.asked.is_exact or response.status != 200:
                    await self._pass_on(response)
                elif response.headers.get("content-type", "").startswith(_SSE):
                    await self._stream(response, self.asked)
                else:
                    await self._answer(response, self.asked)

    async def _choose(self) -> None:
        """Send token ids, if the conversation can be continued by them, or else the request."""
        if self.asked is None:
            return
        self.body = self.asked.body
        if self.exact is None or self.asked.kind != "chat" or not self.asked.is_exact:
            return
        room = (await self.upstreams.model()).max_model_len
        made = self.exact.body(self.session, self.agent, self.asked, room)
        if isinstance(made, Unsure):
            self.session.num_fallbacks += made.reason != FIRST
        else:
            self.path, self.body, self.as_chat = PATH, made, ChatShown(self.asked)
        sent = made.reason if isinstance(made, Unsure) else "tokens"
        self.about["sent"] = sent
        self.recorder.metrics.exact_prefix.labels(sent=sent).inc()

    async def _stream(self, response: Answered, asked: Asked) -> None:
        stream = StreamedCall(asked, self._shown if self.as_chat is None else self.as_chat.chunk)
        await self.exchange.begin(200, passed_on(response))
        try:
            held = await self._forward(response, stream)
        except asyncio.CancelledError:
            await self._record_cut(stream, ABORTED)
            raise
        except BROKEN:
            await self._record_cut(stream, BROKEN_OFF)
            return  # without an end, as the engine left it
        if not stream.is_whole:
            self.recorder.metrics.cut_off.inc()
        recorded = stream.recorded(BROKEN_OFF)
        await self._record(asked, recorded)
        await self.exchange.finish(b"".join(held))
        self._count(recorded)

    async def _forward(self, response: Answered, stream: StreamedCall) -> list[bytes]:
        """Show events as they come; those from the answer's end on are kept, and returned."""
        events, held = Events(), list[bytes]()
        async for content in response.content.iter_any():
            shown: list[bytes] = []
            for event in events.feed(content):
                part = stream.take(event)
                if part is not None:
                    (held if stream.is_whole or stream.is_done else shown).append(part)
            if shown:
                await self.exchange.more(b"".join(shown))
        last = stream.take(events.rest())  # an engine may leave out the end of its last event
        return held if last is None else [*held, last]

    async def _record_cut(self, stream: StreamedCall, reason: str) -> None:
        """Record what came of a call that was cut off: nobody is left to be told of a full disk."""
        self.recorder.metrics.cut_off.inc()
        recorded = stream.recorded(reason)
        assert self.asked is not None
        try:
            await self._record(self.asked, recorded)
        except RolloutError as error:
            self._lost(error)
        else:
            self._count(recorded)

    async def _answer(self, response: Answered, asked: Asked) -> None:
        try:
            content = await response.read()
        except BROKEN as error:
            got = f"an answer that broke off ({type(error).__name__})"
            raise RolloutError("engine_down", self.path, got, "a whole answer") from None
        headers = passed_on(response)
        try:
            answer = Answer(content)
        except Unread:
            self._unrecorded("answers that are no completions", self.path)
            await self.exchange.answer(200, content, headers)
            return
        recorded = msgspec.Raw(content)
        await self._record(asked, recorded)
        shown = self._shown(answer) if self.as_chat is None else self.as_chat.whole(answer)
        await self.exchange.answer(200, shown or content, headers)
        self._count(recorded)

    def _shown(self, answer: Answer) -> bytes | None:
        assert self.asked is not None
        return answer.shown(self.asked)

    async def _pass_on(self, response: Answered) -> None:
        """Answer as the engine does: an error, or what cannot be recorded."""
        if response.status == 200:
            self._unrecorded("an echo, a beam search or no JSON", self.path)
        await self.exchange.begin(response.status, passed_on(response))
        try:
            async for content in response.content.iter_any():
                await self.exchange.more(content)
        except BROKEN:
            return
        await self.exchange.finish()

    async def _record(self, asked: Asked, response: msgspec.Raw | None) -> None:
        """Write the call, or serve it unrecorded where the settings say so."""
        if response is None:
            return
        try:
            await self.recorder.record(self.session, asked.recorded(), response, **self.about)
        except RolloutError as error:
            if self.recorder.settings.on_full == "refuse":
                self.recorder.warn("calls are refused", str(error))
                raise
            self._lost(error)

    async def _check_disk(self) -> None:
        try:
            await self.recorder.journal.probe()
        except RolloutError:
            if self.recorder.settings.on_full == "refuse":
                raise

    def _lost(self, error: RolloutError) -> None:
        self.session.num_lost += 1
        self._unrecorded(error.rule, str(error))

    def _unrecorded(self, what: str, text: str) -> None:
        self.session.num_unrecorded += 1
        self.recorder.metrics.unrecorded.inc()
        self.recorder.warn(what, f"served unrecorded: {text}")

    def _count(self, recorded: msgspec.Raw | None) -> None:
        seen = None
        if recorded is not None:
            seen = self.recorder.count(self.session, self.agent, recorded)
        if seen is not None and self.exact is not None and self.asked is not None:
            self.exact.remember(self.session, self.agent, self.asked, seen)
