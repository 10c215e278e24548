"""The contexts of a Codex session, built from its items in order.

Consecutive items of the model (reasoning, text, tool calls) form one message; a tool result, a
message with another role or the end of the call ends it. An item that comes too late in the order of
a chat message, such as reasoning after a call, begins another message. A compaction begins a new
context. Its summary was written in a call of its own, whose prompt is not logged: that answer is left
out, and counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout_io.formats.dialects.responses import Item, add_piece, chat_role, read_item, results_in
from rollout_io.formats.parsing.content import Message, bad_message
from schemas.errors import InputError

_KEPT_BYTES = 80_000
"""Codex keeps 20,000 tokens, which it estimates at four bytes each."""


@dataclass(slots=True)
class Context:
    """One context of the session.

    Attributes:
        messages: Messages in order.
        where: Location of the last message.
        num_given: Number of leading messages that a compaction or rollback kept.
        end: Number of leading messages before the first item that cannot be read; None if all can.
    """

    messages: list[Message] = field(default_factory=list)
    where: str = ""
    num_given: int = 0
    end: int | None = None

    @property
    def known(self) -> list[Message]:
        """Messages before the first item that cannot be read."""
        return self.messages[: self.end]

    def is_answered_after(self, start: int) -> bool:
        """True if the model wrote a known message of this context at or after index `start`."""
        return _has_answer(self.known[max(start, self.num_given) :])


@dataclass(slots=True)
class Thread:
    """The contexts of a session, in order.

    Attributes:
        contexts: The contexts; the last one is current.
        is_open: True if the last message is a reply that further items may extend.
        unread: Error of the first item that cannot be read; None if all can.
        num_lost: Number of answers that depend on such items.
    """

    contexts: list[Context] = field(default_factory=lambda: [Context()])
    is_open: bool = False
    unread: InputError | None = None
    num_lost: int = 0
    _summary: Message | None = None
    _last_call: tuple[str | None, int] = (None, 0)
    _end: int = 0
    _end_context: Context | None = None

    @property
    def messages(self) -> list[Message]:
        """Messages of the current context."""
        return self.contexts[-1].messages

    def answered(self) -> list[Context]:
        """Return the contexts in which the model wrote something."""
        return [context for context in self.contexts if context.is_answered_after(0)]

    def instruct(self, text: str | None) -> None:
        """Add a system prompt if the context is still empty."""
        if text and not self.messages:
            self.messages.append({"role": "system", "content": text})

    def add(self, item: Item, where: str) -> None:
        """Add an item to the current context."""
        context = self.contexts[-1]
        try:
            piece = read_item(item, where)
        except InputError as error:
            self.is_open = self.is_open and not item.is_of_environment
            self._lose(error, is_of_reply=self.is_open)
            return
        if context.end is None:
            context.where = where
        if piece is None:
            return
        if piece["role"] == "assistant":
            self.num_lost += not self.is_open and context.end is not None
            self.is_open = add_piece(self.messages, piece, is_open=self.is_open)
            results = results_in(item, where)
            self.messages.extend(results)
            self.is_open &= not results
            return
        self.is_open = False
        is_answered = _has_answer(self.messages)
        self.messages.append(piece | {"role": chat_role(piece["role"], is_answered=is_answered)})

    def end_call(self, name: str | None) -> None:
        """End the current call, whose answer are the messages after the last call."""
        self.is_open = False
        start = len(self.messages)
        while start and self.messages[start - 1]["role"] == "assistant":
            start -= 1
        # Without an item in between, the messages before those of the last call are of another.
        start = max(start, self._end if self._end_context is self.contexts[-1] else 0)
        self._last_call = (name, start)
        self._end, self._end_context = len(self.messages), self.contexts[-1]

    def drop_call(self, name: str | None) -> int:
        """Remove the answer of the last call if it has this name; return the number of answers."""
        last, start = self._last_call
        if name is None or name != last or self._end_context is not self.contexts[-1]:
            return 0
        del self.messages[start:]
        self._last_call, self._end = (None, 0), start
        return 1

    def compact(self, summary: str | None, history: Sequence[Item] | None, where: str) -> None:
        """Begin a new context with the compacted history, or with a summary.

        Without a history, Codex keeps the user's messages, up to `_KEPT_BYTES`, and the summary.
        """
        before = [m for m in self.messages if m is not self._summary]
        system = [m for m in before[:1] if m["role"] == "system"]
        self.is_open = False
        self.contexts.append(Context(list(system), where))
        for item in history or ():
            self.add(item, where)
        self.is_open = False
        if not history and summary:
            kept = [m for m in before[len(system) :] if m["role"] in {"system", "user"}]
            if sum(len(str(m["content"]).encode()) for m in kept) > _KEPT_BYTES:
                got = "a compaction that kept an unknown part of the user's messages"
                self._lose(bad_message(where, got), is_of_reply=False)
            self._summary = {"role": "user", "content": summary}
            self.messages.extend([*kept, self._summary])
        self.contexts[-1].num_given = len(self.messages)

    def _lose(self, error: InputError, *, is_of_reply: bool) -> None:
        """End the known part of the context before an item that cannot be read."""
        context = self.contexts[-1]
        self.unread = self.unread or error
        if context.end is None:
            context.end = len(context.messages) - is_of_reply
            self.num_lost += is_of_reply

    def roll_back(self, num_turns: int) -> None:
        """Remove the last `num_turns` user messages and everything after them.

        If the model answered in the removed part, keep the context and begin a new one.
        """
        context = self.contexts[-1]
        turns = [i for i, message in enumerate(context.messages) if message["role"] == "user"]
        if num_turns <= 0 or not turns:
            return
        start = turns[-min(num_turns, len(turns))]
        self.is_open = False
        end = context.end if context.end is not None and context.end < start else None
        if context.is_answered_after(start):
            self.contexts.append(Context(context.messages[:start], context.where, start, end))
        else:
            del context.messages[start:]
            context.num_given, context.end = min(context.num_given, start), end

    def give(self) -> int:
        """Make all messages so far part of the prompt; return the number of answers in them."""
        self.is_open = False
        answers = [m for c in self.contexts for m in c.messages[c.num_given :]]
        for context in self.contexts:
            context.num_given = len(context.messages)
        return sum(message["role"] == "assistant" for message in answers)


def _has_answer(messages: Iterable[dict[str, Any]]) -> bool:
    return any(message["role"] == "assistant" for message in messages)
