"""Conversion of Responses API items, as Codex CLI logs them, to chat conversations.

Consecutive items of the model (reasoning, text, tool calls) form one message; a tool result or a
message with another role ends it. A `developer` message becomes a `system` message before the first
answer, and a `user` message after it, as chat templates require.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout_io.formats.parsing.content import Message, extend
from rollout_io.formats.parsing.items import Item, read_item


@dataclass(slots=True)
class Context:
    """One context of the session.

    Attributes:
        messages: Messages in order.
        where: Location of the last message.
        num_given: Number of leading messages that a compaction or rollback kept.
    """

    messages: list[Message] = field(default_factory=list)
    where: str = ""
    num_given: int = 0

    def is_answered_after(self, start: int) -> bool:
        """True if the model wrote a message of this context at or after index `start`."""
        return _has_answer(self.messages[max(start, self.num_given) :])


@dataclass(slots=True)
class Thread:
    """The contexts of a session, in order."""

    contexts: list[Context] = field(default_factory=lambda: [Context()])
    is_open: bool = False

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
        """Add an item to the current context.

        Raises:
            InputError: `message`: the item has an unknown type, or is a message without a role.
        """
        self.contexts[-1].where = where
        piece = read_item(item, where)
        if piece is None:
            return
        if piece["role"] == "assistant":
            extend(self._reply(), piece)
            return
        self.is_open = False
        if piece["role"] in {"developer", "system"}:
            piece["role"] = "user" if _has_answer(self.messages) else "system"
        self.messages.append(piece)

    def compact(self, summary: str | None, history: Sequence[Item] | None, where: str) -> None:
        """Begin a new context with the compacted history, or with a summary."""
        system = [m for m in self.messages[:1] if m["role"] == "system"]
        self.is_open = False
        self.contexts.append(Context(list(system), where))
        for item in history or ():
            self.add(item, where)
        self.is_open = False
        if not history and summary:
            self.messages.append({"role": "user", "content": summary})
        self.contexts[-1].num_given = len(self.messages)

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
        if context.is_answered_after(start):
            self.contexts.append(Context(context.messages[:start], context.where, start))
        else:
            del context.messages[start:]
            context.num_given = min(context.num_given, start)

    def give(self) -> int:
        """Make all messages so far part of the prompt; return the number of answers in them."""
        self.is_open = False
        answers = [m for c in self.contexts for m in c.messages[c.num_given :]]
        for context in self.contexts:
            context.num_given = len(context.messages)
        return sum(message["role"] == "assistant" for message in answers)

    def _reply(self) -> Message:
        """Return the assistant message that is being extended; begin one if there is none."""
        if not self.is_open:
            self.messages.append({"role": "assistant", "content": ""})
            self.is_open = True
        return self.messages[-1]


def _has_answer(messages: Iterable[dict[str, Any]]) -> bool:
    return any(message["role"] == "assistant" for message in messages)
