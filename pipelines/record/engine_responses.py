"""Read the responses of engines, whole or streamed, and reduce them to what the client requested."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from pipelines.record.engine_requests import NULL, Asked, Fields
from pipelines.record.sessions import Seen
from pipelines.record.upstreams import ANSWER_SIZE, MOST_EVENTS, check_shape, too_large
from rollout_io.formats.parsing.bodies import Answer as LoggedAnswer
from rollout_io.formats.parsing.bodies import Request, Response
from rollout_io.formats.parsing.completions import read_choices, whole_response
from rollout_io.formats.parsing.tokens import strict_ids
from schemas.errors import EngineError

LONG_BYTES = 128 << 10
_LOGGED, _CHUNKS = msgspec.json.Decoder(LoggedAnswer), msgspec.json.Decoder(list[msgspec.Raw])
_CHUNK = msgspec.json.Decoder(Response)
_ANSWER = msgspec.json.Decoder(Fields)
_CHOICES = msgspec.json.Decoder(list[Fields] | None)
_EMPTY_DELTA = msgspec.Raw(b"{}")
_NO_TOKENS = (NULL, msgspec.Raw(b"[]"))
_PROMPT = "prompt_token_ids"
_ENCODER = msgspec.json.Encoder()

DONE = b"[DONE]"
_DATA = b"data:"
_BLANK = b"\n\n"
_END_BYTES = 4
# Possessive \r\n?+: a \r\n split over two reads must not be parsed as two line ends.
_END = re.compile(rb"(?:\r\n?+|\n)(?:\r\n|\n|\r(?!\Z))")


class Unread(ValueError):
    """Error for a response that is not a completion; the response is forwarded unchanged."""


class Answer:
    """A complete response, or a chunk of one.

    Args:
        content: JSON of the response.

    Raises:
        Unread: The content is not a JSON object with choices.
        EngineError: `answer_size`: decoding the content would take too much memory.
    """

    __slots__ = ("choices", "content", "fields")

    def __init__(self, content: bytes) -> None:
        self.content = content
        try:
            check_shape(content)
            self.fields = _ANSWER.decode(content)
            self.choices = _CHOICES.decode(self.fields["choices"]) or []
        except (KeyError, msgspec.MsgspecError, RecursionError):
            raise Unread from None

    def shown(self, request: Asked) -> bytes | None:
        """Return the response to send to the client; None for a chunk that carries only tokens.

        Fields that the client did not request are null, as in the engine's own responses.
        """
        if request.model is None and not request.hidden:
            return self.content
        if request.is_text and self.choices and all(map(_is_for_tokens, self.choices)):
            return None
        changed: dict[str, object] = {
            "choices": [_hide(choice, request.hidden) for choice in self.choices]
        }
        if request.model is not None and "model" in self.fields:
            changed["model"] = request.model
        return _ENCODER.encode(_hide(self.fields, request.hidden) | changed)

    def indices(self) -> list[int]:
        """Return the indices of the choices."""
        return [_index(choice) for choice in self.choices]

    def finished(self) -> list[int]:
        """Return the indices of the choices that end in this response or chunk."""
        return [_index(c) for c in self.choices if c.get("finish_reason", NULL) != NULL]

    def num_prompt(self) -> int:
        """Return the length of the prompt, if the response or chunk has its ids; else 0."""
        holders = [self.fields, *self.choices]
        raw = next((bytes(h[_PROMPT]) for h in holders if h.get(_PROMPT, NULL) != NULL), b"")
        return raw.count(b",") + 1 if raw not in (b"", b"[]") else 0

    def sampled(self) -> list[int]:
        """Return the indices of the choices that have tokens in this response or chunk."""
        return [_index(c) for c in self.choices if c.get("token_ids", NULL) not in _NO_TOKENS]


def _hide(fields: Fields, hidden: frozenset[str]) -> Fields:
    present = hidden.intersection(fields)
    return fields | dict.fromkeys(present, NULL) if present else fields


def _is_for_tokens(choice: Fields) -> bool:
    delta, reason = choice.get("delta"), choice.get("finish_reason", NULL)
    return delta == _EMPTY_DELTA and reason == NULL


def _index(choice: Fields) -> int:
    text = bytes(choice.get("index", b"0"))
    return int(text) if text.isdigit() else 0


class Events:
    r"""Splits a stream of bytes into events at blank lines, with any line ending.

    Args:
        max_event_bytes: Maximum size of an event, and thus of a line.

    Example:
        >>> events = Events()
        >>> events.feed(b"data: {}\n\ndata: [DO"), events.feed(b"NE]\n\n")
        ([b'data: {}\n\n'], [b'data: [DONE]\n\n'])
    """

    def __init__(self, max_event_bytes: int = 16 << 20) -> None:
        self._max_event_bytes = max_event_bytes
        self._buffer = bytearray()
        self._num_seen = 0

    def feed(self, content: bytes) -> list[bytes]:
        """Add bytes; return the events that are now complete, including their terminators.

        Raises:
            EngineError: `answer_size`: the incomplete event is larger than `max_event_bytes`.
        """
        if self._buffer or b"\r" in content:
            self._buffer += content
            events = self._complete()
        else:  # fast path: whole events, as engines send them
            *contents, rest = content.split(_BLANK)
            events = [content + _BLANK for content in contents]
            self._buffer += rest
        self._num_seen = len(self._buffer)
        if self._num_seen > self._max_event_bytes:
            raise too_large("a line or an event", self._max_event_bytes)
        return events

    def _complete(self) -> list[bytes]:
        """Remove the complete events from the buffer and return them."""
        events, begin, look = list[bytes](), 0, max(self._num_seen - _END_BYTES, 0)
        while (end := _END.search(self._buffer, look)) is not None:
            look = end.end()
            events.append(bytes(self._buffer[begin:look]))
            begin = look
        del self._buffer[:begin]
        return events

    def rest(self) -> bytes:
        """Return the bytes of the incomplete event."""
        return bytes(self._buffer)


class StreamedCall:
    """A streamed response, processed as it arrives.

    Args:
        asked: The request.
        show: Function that converts a chunk for the client; returns None to hide it.

    Attributes:
        is_done: True once the engine has marked the end of the stream.
        num_prompt: Length of the prompt; 0 while it is unknown.
    """

    def __init__(self, request: Asked, show: Callable[[Answer], bytes | None]) -> None:
        self._asked, self._show = request, show
        self._content = bytearray()
        self._ends = array("q")
        self._num_events = 0
        self._finished: set[int] = set()
        self._sampled: set[int] = set()
        self.is_done, self.num_prompt = False, 0

    @property
    def is_whole(self) -> bool:
        """True once every choice has a finish reason."""
        return len(self._finished) >= self._asked.num_choices

    def take(self, event: bytes) -> bytes | None:
        """Record an event; return the event to send to the client, or None to hide it.

        Raises:
            EngineError: `answer_size`: there are too many events, or the event is too large.
        """
        self._num_events += 1
        if self._num_events > MOST_EVENTS:
            finding = f"more than {MOST_EVENTS:,} events"
            raise EngineError(ANSWER_SIZE, "engine", finding, message=f"The engine sent {finding}")
        content, others = data_of(event)
        if content == DONE:
            self.is_done = True
            return event
        try:
            answer = Answer(content)
        except Unread:
            return event
        self.num_prompt = self.num_prompt or answer.num_prompt()
        self._content += content + b","
        self._ends.append(len(self._content))
        self._finished.update(answer.finished())
        self._sampled.update(answer.sampled())
        shown = self._show(answer)
        if shown is content:
            return event
        if shown is None:
            return None
        return b"\n".join([*others, b"data: " + shown]) + _BLANK

    def recorded(self, reason: str) -> msgspec.Raw | None:
        """Return the chunks as a JSON list; None if the stream ended before a token was sampled.

        Args:
            reason: Finish reason for choices that were cut off.
        """
        if not self._sampled and not self.is_whole:
            return None
        content = bytes(self._content) if self.is_whole else self._of_sampled()
        cut = sorted(self._sampled - self._finished)
        ends = [
            msgspec.json.encode({"choices": [{"index": index, "finish_reason": reason}]})
            for index in cut
        ]
        return msgspec.Raw(b"[" + (content + b",".join(ends)).removesuffix(b",") + b"]")

    def _of_sampled(self) -> bytes:
        """Return the chunks of a cut-off call, except chunks of choices without tokens."""
        chunks = (bytes(self._content[a:b]) for a, b in pairwise([0, *self._ends]))
        return b"".join(
            chunk for chunk in chunks if self._sampled.issuperset(Answer(chunk[:-1]).indices())
        )


def data_of(event: bytes) -> tuple[bytes, list[bytes]]:
    """Return the data of an event, and its other lines."""
    if event.startswith(_DATA) and event.find(b"\n") == len(event) - 2 and b"\r" not in event:
        return event[len(_DATA) :].strip(), []  # fast path: a single line
    lines = event.splitlines()
    data = [line[len(_DATA) :] for line in lines if line.startswith(_DATA)]
    others = [line for line in lines if line and not line.startswith(_DATA)]
    return b"\n".join(data).strip(), others


def seen_in(response: msgspec.Raw, where: str) -> Seen:
    """Read the tokens of a recorded response.

    Raises:
        msgspec.MsgspecError: It is not a response.
        InputError: Its tokens are unusable.
    """
    answer = whole_response(decoded(response), where)
    steps = read_choices(answer, Request(), where)
    prompt = _ids(steps[0].prompt_token_ids)
    return Seen(answer, prompt, [_ids(step.response_ids) for step in steps])


def _ids(ids: Any) -> Any:
    return strict_ids(ids, "call", "call") if isinstance(ids, bytes) else np.asarray(ids)


def decoded(response: msgspec.Raw) -> LoggedAnswer:
    """Decode a recorded response.

    Raises:
        msgspec.MsgspecError: It is not a response.
    """
    content = memoryview(response)
    if content.nbytes > LONG_BYTES and bytes(content[:1]) == b"[":
        # Decode chunk by chunk, because msgspec holds the GIL while it decodes.
        return [_CHUNK.decode(chunk) for chunk in _CHUNKS.decode(response)]
    answer: LoggedAnswer = _LOGGED.decode(response)
    return answer
