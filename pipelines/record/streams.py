"""Server-sent events of a streamed answer: what is recorded, what is shown, and when it is over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from pipelines.record.answers import Answer, Unread
from pipelines.record.requests import Asked

DONE = b"[DONE]"
_DATA = b"data:"


class Events:
    r"""Cuts a stream of bytes into events.

    Example:
        >>> events = Events()
        >>> list(events.feed(b"data: {}\n\ndata: [DO")), list(events.feed(b"NE]\n\n"))
        ([b'data: {}\n\n'], [b'data: [DONE]\n\n'])
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, content: bytes) -> Iterator[bytes]:
        """The events that are whole now, each with its end."""
        text = self._rest + content if self._rest else content
        start = 0
        while (end := _end_of_event(text, start)) > 0:
            yield text[start:end]
            start = end
        self._rest = text[start:]

    def rest(self) -> bytes:
        """What was no whole event."""
        return self._rest


def _end_of_event(text: bytes, start: int) -> int:
    ends = [
        found + len(mark)
        for mark in (b"\n\n", b"\r\n\r\n")
        if (found := text.find(mark, start)) >= 0
    ]
    return min(ends, default=0)


class StreamedCall:
    """One streamed answer as it comes in.

    Attributes:
        is_whole: Whether every choice has its finish reason.
        is_done: Whether the engine said that nothing follows.
    """

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._chunks: list[tuple[list[int], bytes]] = []
        self._finished: set[int] = set()
        self._sampled: set[int] = set()
        self.is_done = False

    @property
    def is_whole(self) -> bool:
        """Whether every choice has its finish reason."""
        return len(self._finished) >= self._asked.num_choices

    def take(self, event: bytes) -> bytes | None:
        """Record an event; what the client is shown of it, or None."""
        if not event.startswith(_DATA):
            return event
        content = event[len(_DATA) :].strip()
        if content == DONE:
            self.is_done = True
            return event
        try:
            answer = Answer(content)
        except Unread:
            return event
        self._chunks.append((answer.indices(), content))
        self._finished.update(answer.finished())
        self._sampled.update(answer.sampled())
        shown = answer.shown(self._asked)
        if shown is content:
            return event
        return None if shown is None else b"data: " + shown + b"\n\n"

    def recorded(self, reason: str) -> msgspec.Raw | None:
        """The chunks as one JSON list; None: no token was sampled.

        Args:
            reason: The finish reason of choices that were cut off.
        """
        if not self._sampled:
            return None
        kept = [content for indices, content in self._chunks if self._is_kept(indices)]
        cut = sorted(self._sampled - self._finished)
        kept += [
            msgspec.json.encode({"choices": [{"index": index, "finish_reason": reason}]})
            for index in cut
        ]
        return msgspec.Raw(b"[" + b",".join(kept) + b"]")

    def _is_kept(self, indices: Iterable[int]) -> bool:
        """Of a call that was cut off, choices that had no token yet are left out."""
        return self.is_whole or self._sampled.issuperset(indices)
