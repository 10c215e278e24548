"""One model call: ask the engine, record its exact tokens, tell the client.

    received --> asked as received, or as token ids --> the engine's answer, whole or event by event
                                                                    |
        client <-- its events, as they arrive -- speaker <----------+
           |                                                        |
           +<-- the end of the answer <-- read again <-- on disk <--+

The client gets the end only once the call is on disk, so every answer that it gets completely is
recorded. An answer that breaks off is recorded as far as its tokens go.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from pipelines.generation.engines.http_pool import BROKEN
from pipelines.http_server import JSON, Reply
from pipelines.record.engine_requests import Asked
from pipelines.record.engine_responses import Answer, Events, StreamedCall, Unread
from pipelines.record.exact_prefix import FIRST, ExactPrefix, IdParser, Sent
from pipelines.record.recorder import Recorder
from pipelines.record.sessions import Seen, Session
from pipelines.record.translation import Received, Speaker, engine_error, engine_message, with_type
from pipelines.record.upstreams import REFUSED_ANSWERS, Answered, Upstreams, passed_on, version_of
from rollout_io.formats.dialects.responses import ENCRYPTED_THOUGHTS
from schemas.errors import EngineError, RolloutError, cleaned

ABORTED, BROKEN_OFF = "abort", "error"
_SSE = "text/event-stream"
_REFUSAL_BYTES, _REFUSAL_CHARS = 1 << 16, 500
_BLANK_BYTES = 1 << 16  # blank lines to skip before a body is judged by its content type
_EVENT_FIELDS = (b"data:", b"event:", b"id:", b"retry:", b":")
Ending = tuple[msgspec.Raw | None, Callable[[], Awaitable[None]]]
"""What is recorded of an answer, and what then sends its end to the client."""


@dataclass(kw_only=True, slots=True)
class Call:
    """A model call in progress.

    Attributes:
        received: The request for the engine, in OpenAI's API.
        asked: The request as it is sent and recorded.
        session: Session of the call.
        agent: Agent within the session.
        reply: The response to the client.
        about: Further fields to record.
        is_recorded: True if part of a cut-off response was recorded.
    """

    received: Received
    asked: Asked
    session: Session
    agent: str | None
    reply: Reply
    about: dict[str, Any] = field(default_factory=dict)
    is_recorded: bool = False


class ModelCalls:
    """Serves and records the calls of clients.

    Args:
        recorder: A recorder whose context has been entered.
        upstreams: Upstreams whose context has been entered.
        exact: Conversations that can be continued token by token; None if disabled.
    """

    def __init__(
        self, recorder: Recorder, upstreams: Upstreams, exact: ExactPrefix | None = None
    ) -> None:
        self.recorder, self.upstreams, self.exact = recorder, upstreams, exact
        self._parser = None if exact is None else IdParser(upstreams, exact.eos)

    async def serve(self, call: Call) -> None:
        """Send a call to the engine, record the answer, and return it to the client.

        Raises:
            EngineError: `engine_down`: no engine responds or the connection breaks;
                `engine_redirect`, `answer_encoding`, `answer_size`: the response is rejected.
            InputError: `journal`: the call could not be written, and `on_full` is `refuse`.
        """
        session = call.session
        try:
            with self.recorder.cleaning(), session.calling():
                await self._serve(call)
        except RolloutError as error:
            session.refusal = str(error)
            if error.rule in REFUSED_ANSWERS:
                if not call.is_recorded:
                    self._count_unrecorded(session)
                self.recorder.warn(error.rule, f"session {session.name}: {error}")
            raise

    async def _serve(self, call: Call) -> None:
        # Before anything waits: the version at which the request was written.
        began_s, version = time.monotonic(), self.recorder.policy_version
        self._count_hidden(call)
        await self._check_disk()
        call.about = {
            "time": self.recorder.now_s(),
            "agent": call.agent,
            "policy_version": version,
        }
        sent = await self._choose(call)
        headers, name = call.received.headers, call.session.name
        opened = self.upstreams.answer("POST", sent.path, sent.body, headers, name)
        async with opened as response:
            self.recorder.metrics.first_token.observe(time.monotonic() - began_s)
            if (named := version_of(response)) is not None:
                call.about["policy_version"] = named
            if not call.asked.is_exact or response.status != 200:
                await self._pass_on(call, response)
                return
            ending = await self._answer(call, sent, response)
            if ending is None:  # without a final chunk, like the engine's response
                return
            recorded, tell_end = ending
            seen = await self._record(call, recorded)
            await tell_end()
            self._count(call, seen)

    async def _choose(self, call: Call) -> Sent:
        """Choose the body: token ids if the conversation can be continued, else the client's."""
        asked, exact, unchanged = call.asked, self.exact, Sent(call.received.path, call.asked.body)
        if exact is None or self._parser is None or asked.kind != "chat" or not asked.is_exact:
            return unchanged
        session, agent = call.session, call.agent
        room = (await self.upstreams.model()).max_model_len
        is_known = exact.knows(session, agent)
        parses = is_known and await self._parser.works(asked, call.received.headers)
        continued = exact.body(session, agent, asked, room, parses=parses)
        if isinstance(continued, Sent):
            label, sent = "tokens", continued
        else:
            session.num_fallbacks += continued != FIRST
            label, sent = continued, unchanged
        call.about["sent"] = label
        kind = "field" if label.startswith("field ") else label  # bounds the number of label values
        self.recorder.metrics.exact_prefix.labels(sent=kind).inc()
        return sent

    async def _answer(self, call: Call, sent: Sent, response: Answered) -> Ending | None:
        """Read a body by its content: some engines and gateways send a wrong content type."""
        parts = self.upstreams.parts(response)
        head = b""
        try:
            while len(head) < _BLANK_BYTES and not head.strip():
                if not (part := await anext(parts, b"")):
                    break
                head += part
        except BROKEN as error:
            raise _broken(call, error) from None
        text, parts = head.lstrip(), _again(head, parts)
        speaker = Speaker(
            call.asked, call.received.dialect, as_text=sent.as_text, is_parsed=sent.is_parsed
        )
        is_stream = response.headers.get("content-type", "").startswith(_SSE)
        if text.startswith((b"{", b"[")) or not (is_stream or text.startswith(_EVENT_FIELDS)):
            return await self._whole(call, response, parts, speaker)
        await call.reply.begin(200, speaker.headers(response, has_events=True))
        return await self._streamed(call, parts, speaker)

    async def _streamed(
        self, call: Call, parts: AsyncIterator[bytes], speaker: Speaker
    ) -> Ending | None:
        """Tell events as they arrive, but for the end; None if the connection broke."""
        stream = StreamedCall(call.asked, speaker.chunk)
        events, held = Events(self.recorder.settings.max_answer_bytes // 4), bytearray()

        def spoken(event: bytes) -> bytes:
            return speaker.events(stream.take(event) or b"", stream.num_prompt)

        try:
            async for content in parts:
                shown = bytearray()
                for event in events.feed(content):
                    part = spoken(event)
                    to = held if stream.is_whole or stream.is_done else shown
                    to += part
                if shown:
                    await call.reply.more(bytes(shown))
            held += spoken(events.rest())  # some engines omit the end of the last event
        except (asyncio.CancelledError, RolloutError, *BROKEN) as error:
            await self._record_cut(call, stream, error)
            if isinstance(error, BROKEN):
                return None
            raise
        if not stream.is_whole:
            self.recorder.metrics.cut_off.inc()
        recorded = stream.recorded(BROKEN_OFF)
        if recorded is None:
            self._unrecorded(call, "streams without tokens", call.received.path)
        held += speaker.end(is_whole=stream.is_whole)
        return recorded, partial(call.reply.finish, bytes(held))

    async def _record_cut(self, call: Call, stream: StreamedCall, error: BaseException) -> None:
        """Record the tokens sampled before a call was cut off; errors are reported, not raised."""
        self.recorder.metrics.cut_off.inc()
        reason = error.rule if isinstance(error, RolloutError) else BROKEN_OFF
        is_abort = isinstance(error, asyncio.CancelledError)
        recorded = stream.recorded(ABORTED if is_abort else reason)
        try:
            seen = await self._record(call, recorded)
        except RolloutError as failed:
            self._lost(call, failed)
        else:
            call.is_recorded = recorded is not None
            self._count(call, seen)

    async def _whole(
        self, call: Call, response: Answered, parts: AsyncIterator[bytes], speaker: Speaker
    ) -> Ending:
        path = call.received.path
        try:
            content = b"".join([part async for part in parts])
        except BROKEN as error:
            raise _broken(call, error) from None
        try:
            answer = Answer(content)
        except Unread:
            self._unrecorded(call, "responses that are not completions", path)
            if call.received.dialect is not None:
                finding = "the engine's response is no chat completion"
                raise EngineError("engine_answer", path, finding) from None
            return None, partial(call.reply.answer, 200, content, passed_on(response))
        if speaker.is_parsed and self._parser is not None:
            try:
                answer = await self._parser.merged(answer, call.asked, call.received.headers)
            except RolloutError as error:
                self._unrecorded(call, "answers whose ids the engine did not parse", str(error))
                raise
        shown, headers = speaker.whole(answer), speaker.headers(response)
        return msgspec.Raw(answer.content), partial(call.reply.answer, 200, shown, headers)

    async def _pass_on(self, call: Call, response: Answered) -> None:
        """Forward an error, or a response that cannot be recorded."""
        if response.status == 200:
            self._unrecorded(call, "echo, beam-search and non-JSON requests", call.received.path)
        dialect, reply = call.received.dialect, call.reply
        if dialect is not None:
            try:
                content = await self.upstreams.whole(response)
            except BROKEN as error:
                raise _broken(call, error) from None
            _keep_refusal(call.session, response.status, content)
            translated = engine_error(dialect, response.status, content)
            await reply.answer(response.status, translated, with_type(response, JSON))
            return
        await reply.begin(response.status, passed_on(response))
        seen = b""
        try:
            async for content in self.upstreams.parts(response):
                seen += content[: _REFUSAL_BYTES - len(seen)]
                await reply.more(content)
        except (*BROKEN, RolloutError):
            return  # end without a final chunk
        finally:
            _keep_refusal(call.session, response.status, seen)
        await reply.finish()

    async def _record(self, call: Call, response: msgspec.Raw | None) -> Seen | None:
        """Record the call; if that fails, raise or report it, depending on `on_full`.

        Returns:
            Its tokens, read before the client gets the end, because its next call may continue
            this one; None if there are none.
        """
        if response is None:
            return None
        recorder = self.recorder
        try:
            await recorder.record(call.session, call.asked.recorded(), response, **call.about)
        except RolloutError as error:
            if recorder.settings.on_full == "refuse":
                recorder.warn("calls are refused", str(error))
                raise
            self._lost(call, error)
        return await recorder.read(call.session, response)

    def _count(self, call: Call, seen: Seen | None) -> None:
        if seen is None:
            return
        self.recorder.count(call.session, call.agent, seen)
        if self.exact is not None:
            self.exact.remember(call.session, call.agent, call.asked, seen)

    def _count_hidden(self, call: Call) -> None:
        dialect, session = call.received.dialect, call.session
        number = 0 if dialect is None else dialect.num_hidden_thoughts
        if number:
            self.recorder.warn(ENCRYPTED_THOUGHTS, f"left out, in session {session.name}")
        session.num_hidden_thoughts = max(session.num_hidden_thoughts, number)

    async def _check_disk(self) -> None:
        try:
            await self.recorder.journal.probe()
        except RolloutError:
            if self.recorder.settings.on_full == "refuse":
                raise

    def _lost(self, call: Call, error: RolloutError) -> None:
        call.session.num_lost += 1
        self._unrecorded(call, error.rule, str(error))

    def _unrecorded(self, call: Call, what: str, text: str) -> None:
        self._count_unrecorded(call.session)
        self.recorder.warn(what, f"served without recording: {text}")

    def _count_unrecorded(self, session: Session) -> None:
        session.num_unrecorded += 1
        self.recorder.metrics.unrecorded.inc()


def _broken(call: Call, error: Exception) -> EngineError:
    finding = f"the connection broke before the response was complete ({type(error).__name__})"
    return EngineError("engine_down", call.received.path, finding)


def _keep_refusal(session: Session, status: int, content: bytes) -> None:
    """Keep what the engine answered if that is an error."""
    if status != 200:
        # Cut only once it is without secrets.
        clean = cleaned(content[:_REFUSAL_BYTES].decode(errors="replace")).encode()
        text = engine_message(status, clean)[:_REFUSAL_CHARS]
        session.refusal = f"status {status}: {' '.join(text.split())}"


async def _again(head: bytes, parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the parts of a body, whose first bytes have been read already."""
    yield head
    async for part in parts:
        yield part
