"""Server-sent events of a streamed answer: what is recorded, what is shown, and when it is over."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import msgspec

from pipelines.record.answers import Answer, Unread
from pipelines.record.requests import Asked

DONE = b"[DONE]"
_DATA = b"data:"
_END = re.compile(rb"((?:\r\n?+|\n)(?:\r\n|\n|\r(?!\Z)))")


class Events:
    r"""Cuts a stream of bytes into events: at blank lines, which end as they like.

    Example:
        >>> events = Events()
        >>> events.feed(b"data: {}\n\ndata: [DO"), events.feed(b"NE]\n\n")
        ([b'data: {}\n\n'], [b'data: [DONE]\n\n'])
    """

    def __init__(self) -> None:
        self._parts = [b""]

    def feed(self, content: bytes) -> list[bytes]:
        """The events that are whole now, each with its end."""
        may_end = b"\n" in content or b"\r" in content or self._parts[-1].endswith(b"\r")
        self._parts.append(content)
        if not may_end:
            return []
        *events, rest = _END.split(self.rest())
        self._parts = [rest]
        return [b"".join(pair) for pair in zip(events[::2], events[1::2], strict=True)]

    def rest(self) -> bytes:
        """What was no whole event."""
        return b"".join(self._parts)


class StreamedCall:
    """One streamed answer as it comes in.

    Args:
        asked: The request.
        show: What the client is shown of a chunk, or None.

    Attributes:
        is_done: Whether the engine said that nothing follows.
    """

    def __init__(self, asked: Asked, show: Callable[[Answer], bytes | None]) -> None:
        self._asked, self._show = asked, show
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
        lines = event.splitlines()
        data = [line[len(_DATA) :] for line in lines if line.startswith(_DATA)]
        content = b"\n".join(data).strip()
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
        shown = self._show(answer)
        if shown is content:
            return event
        if shown is None:
            return None
        others = [line for line in lines if line and not line.startswith(_DATA)]
        return b"\n".join([*others, b"data: " + shown]) + b"\n\n"

    def recorded(self, reason: str) -> msgspec.Raw | None:
        """The chunks as one JSON list; None: it was cut off, and no token had been sampled.

        Args:
            reason: The finish reason of choices that were cut off.
        """
        if not self._sampled and not self.is_whole:
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
