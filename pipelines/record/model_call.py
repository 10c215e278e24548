"""Proxy one model call and record it with exact tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pipelines.generation.engines.http_pool import BROKEN
from pipelines.http_app import JSON, Reply
from pipelines.record.bounds import REFUSED_ANSWERS
from pipelines.record.dialects.base import DialectCall
from pipelines.record.engine_requests import Asked, value_of
from pipelines.record.engine_responses import Answer, Events, StreamedCall, Unread
from pipelines.record.exact_prefix import FIRST, PATH, ChatShown, ExactPrefix, Unsure
from pipelines.record.parsed_ids import IdParser, chunks_of, shown_chat
from pipelines.record.recorder import Recorder
from pipelines.record.sessions import Seen, Session
from pipelines.record.spoken import SpokenStream, engine_error, engine_message, whole
from pipelines.record.upstreams import Answered, Upstreams, passed_on, version_of
from rollout_io.formats.dialects.responses import ENCRYPTED_THOUGHTS
from schemas.errors import EngineError, RolloutError
from schemas.excerpts import cleaned

ABORTED, BROKEN_OFF = "abort", "error"
_SSE = "text/event-stream"
_REFUSAL_BYTES, _REFUSAL_CHARS = 1 << 16, 500
_BLANK_BYTES = 1 << 16  # blank lines to skip before a body is judged by its content type
_EVENT_FIELDS = (b"data:", b"event:", b"id:", b"retry:", b":")


@dataclass(kw_only=True, slots=True)
class Call:
    """A model call in progress.

    Attributes:
        reply: The response to the client.
        headers: The client's headers, by lower-case name.
        path: API path.
        asked: The client's request; None if it cannot be recorded.
        body: Body as received, then as sent to the engine.
        session: Session of the call.
        agent: Agent within the session.
        exact: Conversations that can be continued token by token; None if disabled.
        as_chat: Converter of the response to a chat completion; None unless the call was sent as a
            text completion.
        about: Additional fields to record.
        is_recorded: True if part of a cut-off response was recorded.
        dialect: The call in the harness's dialect; None if that is OpenAI's chat or completions.
        parser: Reads sampled ids with the engines' parsers; None if `exact` is.
        is_parsed: True if the call was sent as a text completion whose ids are to be parsed.
    """

    recorder: Recorder
    upstreams: Upstreams
    reply: Reply
    headers: Mapping[str, str]
    path: str
    asked: Asked | None
    body: bytes
    session: Session
    agent: str | None
    exact: ExactPrefix | None = None
    as_chat: ChatShown | None = None
    about: dict[str, Any] = field(default_factory=dict)
    is_recorded: bool = False
    dialect: DialectCall | None = None
    parser: IdParser | None = None
    is_parsed: bool = False

    async def run(self) -> None:
        """Send the call, record the response, and return it to the client.

        Raises:
            EngineError: `engine_down`: no engine responds or the connection breaks;
                `engine_redirect`, `answer_encoding`, `answer_size`: the response is rejected.
            InputError: `journal`: the call could not be written, and `on_full` is `refuse`.
        """
        try:
            with self.recorder.cleaning():
                await self._run()
        except RolloutError as error:
            self.session.refusal = str(error)
            if error.rule in REFUSED_ANSWERS:
                self._refused(error)
            raise

    async def _run(self) -> None:
        with self.session.calling():
            # Before anything waits: the version at which the request was written.
            began_s, version = time.monotonic(), self.recorder.policy_version
            self._count_hidden()
            await self._check_disk()
            self.about = {
                "time": self.recorder.now_s(),
                "agent": self.agent,
                "policy_version": version,
            }
            await self._choose()
            opened = self.upstreams.answer(
                "POST", self.path, self.body, self.headers, self.session.name
            )
            async with opened as response:
                self.recorder.metrics.first_token.observe(time.monotonic() - began_s)
                if (named := version_of(response)) is not None:
                    self.about["policy_version"] = named
                if self.asked is None or not self.asked.is_exact or response.status != 200:
                    await self._pass_on(response)
                else:
                    await self._recordable(response, self.asked)

    async def _recordable(self, response: Answered, request: Asked) -> None:
        """Handle a body by its content: some engines and gateways send a wrong content type."""
        parts = self.upstreams.parts(response)
        head = b""
        try:
            while len(head) < _BLANK_BYTES and not head.strip():
                if not (part := await anext(parts, b"")):
                    break
                head += part
        except BROKEN as error:
            raise self._broken(error) from None
        text = head.lstrip()
        is_stream = response.headers.get("content-type", "").startswith(_SSE)
        if text.startswith((b"{", b"[")) or not (is_stream or text.startswith(_EVENT_FIELDS)):
            await self._answer(response, request, _again(head, parts))
        else:
            await self._stream(response, request, _again(head, parts))

    async def _choose(self) -> None:
        """Choose the body: token ids if the conversation can be continued, else the client's."""
        if self.asked is None:
            return
        self.body = self.asked.body
        if self.exact is None or self.asked.kind != "chat" or not self.asked.is_exact:
            return
        room = (await self.upstreams.model()).max_model_len
        parses = (
            self.parser is not None
            and self.exact.knows(self.session, self.agent)
            and await self.parser.works(self.asked, self.headers)
        )
        continued = self.exact.body(self.session, self.agent, self.asked, room, parses=parses)
        if isinstance(continued, Unsure):
            self.session.num_fallbacks += continued.reason != FIRST
        else:
            self.path, self.body, self.is_parsed = PATH, continued.body, continued.is_parsed
            self.as_chat = None if continued.is_parsed else ChatShown(self.asked)
        sent = continued.reason if isinstance(continued, Unsure) else "tokens"
        self.about["sent"] = sent
        kind = "field" if sent.startswith("field ") else sent  # bounds the number of label values
        self.recorder.metrics.exact_prefix.labels(sent=kind).inc()

    async def _stream(
        self, response: Answered, request: Asked, parts: AsyncIterator[bytes]
    ) -> None:
        stream = StreamedCall(request, self._shown if self.as_chat is None else self.as_chat.chunk)
        spoken = None if self.dialect is None else SpokenStream(self.dialect)
        await self.reply.begin(200, self._head(response, is_stream=True))
        try:
            held = await self._forward(parts, stream, spoken)
        except asyncio.CancelledError:
            await self._record_cut(stream, ABORTED)
            raise
        except BROKEN:
            await self._record_cut(stream, BROKEN_OFF)
            return  # end without a final chunk, like the engine's response
        except RolloutError as error:
            await self._record_cut(stream, error.rule)
            raise
        if not stream.is_whole:
            self.recorder.metrics.cut_off.inc()
        recorded = stream.recorded(BROKEN_OFF)
        if recorded is None:
            self._unrecorded("streams without tokens", self.path)
        await self._record(request, recorded)
        seen = await self._read(recorded)
        await self.reply.finish(bytes(held))
        self._count(seen)

    async def _forward(
        self, parts: AsyncIterator[bytes], stream: StreamedCall, spoken: SpokenStream | None
    ) -> bytearray:
        """Forward events as they arrive, but hold back and return the end of the response."""
        # The client receives the end only once the call is on disk, so every response that it
        # receives completely is recorded.
        events, held = Events(self.recorder.settings.max_answer_bytes // 4), bytearray()

        def said(event: bytes) -> bytes:
            part = stream.take(event) or b""
            return part if spoken is None else spoken.events(part, stream.num_prompt)

        async for content in parts:
            shown = bytearray()
            for event in events.feed(content):
                part = said(event)
                to = held if stream.is_whole or stream.is_done else shown
                to += part
            if shown:
                await self.reply.more(bytes(shown))
        held += said(events.rest())  # some engines omit the end of the last event
        if spoken is not None:
            held += spoken.end(is_whole=stream.is_whole)
        return held

    async def _record_cut(self, stream: StreamedCall, reason: str) -> None:
        """Record the tokens sampled before a call was cut off; errors are reported, not raised."""
        self.recorder.metrics.cut_off.inc()
        recorded = stream.recorded(reason)
        assert self.asked is not None
        try:
            await self._record(self.asked, recorded)
        except RolloutError as error:
            self._lost(error)
        else:
            self.is_recorded = recorded is not None
            self._count(await self._read(recorded))

    async def _answer(
        self, response: Answered, request: Asked, parts: AsyncIterator[bytes]
    ) -> None:
        try:
            content = b"".join([part async for part in parts])
        except BROKEN as error:
            raise self._broken(error) from None
        headers = self._head(response)
        try:
            answer = Answer(content)
        except Unread:
            self._unrecorded("responses that are not completions", self.path)
            if self.dialect is not None:
                finding = "the engine's response is no chat completion"
                raise EngineError("engine_answer", self.path, finding) from None
            await self.reply.answer(200, content, headers)
            return
        if self.is_parsed and self.parser is not None:
            await self._parsed(response, request, answer)
            return
        recorded = msgspec.Raw(content)
        await self._record(request, recorded)
        seen = await self._read(recorded)
        shown = self._shown(answer) if self.as_chat is None else self.as_chat.whole(answer)
        content = shown or content
        if self.dialect is not None:
            content = whole(self.dialect, content)
        await self.reply.answer(200, content, headers)
        self._count(seen)

    async def _parsed(self, response: Answered, request: Asked, answer: Answer) -> None:
        """Record a text completion with the message that its ids are; the client gets it whole."""
        assert self.parser is not None
        try:
            content = await self.parser.merged(answer, request, self.headers)
        except RolloutError as error:
            self._unrecorded("answers whose ids the engine did not parse", str(error))
            raise
        recorded = msgspec.Raw(content)
        await self._record(request, recorded)
        seen = await self._read(recorded)
        chat = shown_chat(content, request.model)
        is_stream = value_of(request.fields, "stream") is True
        if is_stream:
            options = value_of(request.fields, "stream_options") or {}
            shown = chunks_of(chat, with_usage=bool(options.get("include_usage")))
            if self.dialect is not None:
                spoken = SpokenStream(self.dialect)
                shown = spoken.events(shown, len(seen.prompt) if seen is not None else 0)
                shown += spoken.end(is_whole=True)
        else:
            shown = msgspec.json.encode(chat)
            shown = shown if self.dialect is None else whole(self.dialect, shown)
        headers = self._head(response, is_stream=is_stream)
        if is_stream and self.dialect is None:
            headers = [(n, v) for n, v in headers if n != b"content-type"]
            headers.append((b"content-type", _SSE.encode()))
        await self.reply.answer(200, shown, headers)
        self._count(seen)

    def _head(self, response: Answered, *, is_stream: bool = False) -> list[tuple[bytes, bytes]]:
        """Return the headers for the client; those of a dialect have its own content type."""
        headers = passed_on(response)
        if self.dialect is None:
            return headers
        kind = self.dialect.media_type if is_stream else JSON
        others = [(name, value) for name, value in headers if name != b"content-type"]
        return [*others, (b"content-type", kind.encode())]

    def _broken(self, error: Exception) -> EngineError:
        finding = f"the connection broke before the response was complete ({type(error).__name__})"
        return EngineError("engine_down", self.path, finding)

    def _shown(self, answer: Answer) -> bytes | None:
        assert self.asked is not None
        return answer.shown(self.asked)

    async def _pass_on(self, response: Answered) -> None:
        """Forward an error, or a response that cannot be recorded."""
        if response.status == 200:
            self._unrecorded("echo, beam-search and non-JSON requests", self.path)
        if self.dialect is not None:
            try:
                content = await self.upstreams.whole(response)
            except BROKEN as error:
                raise self._broken(error) from None
            self._answered(response.status, content)
            translated = engine_error(self.dialect, response.status, content)
            await self.reply.answer(response.status, translated, self._head(response))
            return
        await self.reply.begin(response.status, passed_on(response))
        seen = b""
        try:
            async for content in self.upstreams.parts(response):
                seen += content[: _REFUSAL_BYTES - len(seen)]
                await self.reply.more(content)
        except (*BROKEN, RolloutError):
            return  # end without a final chunk
        finally:
            self._answered(response.status, seen)
        await self.reply.finish()

    def _answered(self, status: int, content: bytes) -> None:
        """Keep what the engine answered if that is an error."""
        if status != 200:
            # Cut only once it is without secrets.
            clean = cleaned(content[:_REFUSAL_BYTES].decode(errors="replace")).encode()
            text = engine_message(status, clean)[:_REFUSAL_CHARS]
            self.session.refusal = f"status {status}: {' '.join(text.split())}"

    async def _record(self, request: Asked, response: msgspec.Raw | None) -> None:
        """Record the call; if that fails, raise or report it, depending on `on_full`."""
        if response is None:
            return
        try:
            await self.recorder.record(self.session, request.recorded(), response, **self.about)
        except RolloutError as error:
            if self.recorder.settings.on_full == "refuse":
                self.recorder.warn("calls are refused", str(error))
                raise
            self._lost(error)

    def _count_hidden(self) -> None:
        number = 0 if self.dialect is None else self.dialect.num_hidden_thoughts
        if number:
            self.recorder.warn(ENCRYPTED_THOUGHTS, f"left out, in session {self.session.name}")
        self.session.num_hidden_thoughts = max(self.session.num_hidden_thoughts, number)

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
        self.recorder.warn(what, f"served without recording: {text}")

    def _refused(self, error: RolloutError) -> None:
        """Report a call whose response was rejected; count it unless part of it was recorded."""
        if not self.is_recorded:
            self.session.num_unrecorded += 1
            self.recorder.metrics.unrecorded.inc()
        self.recorder.warn(error.rule, f"session {self.session.name}: {error}")

    async def _read(self, recorded: msgspec.Raw | None) -> Seen | None:
        # Read before the client receives the end, because its next call may continue this one.
        return None if recorded is None else await self.recorder.read(self.session, recorded)

    def _count(self, seen: Seen | None) -> None:
        if seen is None:
            return
        self.recorder.count(self.session, self.agent, seen)
        if self.exact is not None and self.asked is not None:
            self.exact.remember(self.session, self.agent, self.asked, seen)


async def _again(head: bytes, parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the parts of a body, whose first bytes have been read already."""
    yield head
    async for part in parts:
        yield part
