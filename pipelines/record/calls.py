"""One call of a model: asked of an engine with exact tokens, recorded, and answered as if it were not."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import httpx2
import msgspec

from pipelines.record.answers import Answer, Unread
from pipelines.record.recorder import Recorder
from pipelines.record.requests import Asked
from pipelines.record.sessions import Session
from pipelines.record.streams import Events, StreamedCall
from pipelines.record.upstreams import BROKEN, Upstreams, passed_on
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
        body: As it came.
        session: Whose call it is.
        agent: Within the session.
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
            body = self.body if self.asked is None else self.asked.body
            opened = self.upstreams.answer(
                "POST", self.path, body, self.exchange.headers, self.session.name
            )
            async with opened as response:
                self.recorder.metrics.first_token.observe(time.monotonic() - began_s)
                if self.asked is None or not self.asked.is_exact or response.status_code != 200:
                    await self._pass_on(response)
                elif response.headers.get("content-type", "").startswith(_SSE):
                    await self._stream(response, self.asked)
                else:
                    await self._answer(response, self.asked)

    async def _stream(self, response: httpx2.Response, asked: Asked) -> None:
        stream = StreamedCall(asked)
        await self.exchange.begin(200, passed_on(response.headers))
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

    async def _forward(self, response: httpx2.Response, stream: StreamedCall) -> list[bytes]:
        """Show events as they come; those from the answer's end on are kept, and returned."""
        events, held = Events(), list[bytes]()
        async for content in response.aiter_raw():
            shown: list[bytes] = []
            for event in events.feed(content):
                part = stream.take(event)
                if part is not None:
                    (held if stream.is_whole or stream.is_done else shown).append(part)
            if shown:
                await self.exchange.more(b"".join(shown))
        return [*held, events.rest()]

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

    async def _answer(self, response: httpx2.Response, asked: Asked) -> None:
        try:
            content = await response.aread()
        except BROKEN as error:
            got = f"an answer that broke off ({type(error).__name__})"
            raise RolloutError("engine_down", self.path, got, "a whole answer") from None
        headers = passed_on(response.headers)
        try:
            answer = Answer(content)
        except Unread:
            self._unrecorded("answers that are no completions", self.path)
            await self.exchange.answer(200, content, headers)
            return
        recorded = msgspec.Raw(content)
        await self._record(asked, recorded)
        await self.exchange.answer(200, answer.shown(asked) or content, headers)
        self._count(recorded)

    async def _pass_on(self, response: httpx2.Response) -> None:
        """Answer as the engine does: an error, or what cannot be recorded."""
        if response.status_code == 200:
            self._unrecorded("an echo, a beam search or no JSON", self.path)
        await self.exchange.begin(response.status_code, passed_on(response.headers))
        try:
            async for content in response.aiter_raw():
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
        if recorded is not None:
            self.recorder.count(self.session, self.agent, recorded)
