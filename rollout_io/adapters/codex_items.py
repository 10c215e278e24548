"""Items of OpenAI's Responses API, as Codex CLI logs them, to conversations in chat style.

Items of the model that follow each other (reasoning, text, tool calls) are one message; the result
of a tool, or a message of somebody else, ends it. A `developer` message is a `system` message before
the first answer, and a `user` message after it, as chat templates ask.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout_io.logs.content import Message, extend
from rollout_io.logs.items import Item, read_item


@dataclass(slots=True)
class Context:
    """What the model had before it, and said.

    Attributes:
        messages: In order.
        where: The place of the last of them.
    """

    messages: list[Message] = field(default_factory=list)
    where: str = ""


@dataclass(slots=True)
class Thread:
    """The contexts of a session, in order."""

    contexts: list[Context] = field(default_factory=lambda: [Context()])
    is_open: bool = False

    @property
    def messages(self) -> list[Message]:
        """Of the context now."""
        return self.contexts[-1].messages

    def answered(self) -> list[Context]:
        """The contexts in which the model wrote something."""
        return [context for context in self.contexts if _has_answer(context.messages)]

    def instruct(self, text: str | None) -> None:
        """Begin with a system prompt, unless something is there."""
        if text and not self.messages:
            self.messages.append({"role": "system", "content": text})

    def add(self, item: Item, where: str) -> None:
        """Add an item.

        Raises:
            RolloutError: `message`: an item of an unknown type, or a message without a role.
        """
        self.contexts[-1].where = where
        piece = read_item(item, where)
        if piece is None:
            return
        if piece["role"] == "assistant":
            extend(self._reply(), piece)
            return
        self._end()
        if piece["role"] in {"developer", "system"}:
            piece["role"] = "user" if _has_answer(self.messages) else "system"
        self.messages.append(piece)

    def compact(self, summary: str | None, history: Sequence[Item] | None, where: str) -> None:
        """Begin a new context with the history that was kept, or with a summary."""
        system = [m for m in self.messages[:1] if m["role"] == "system"]
        self._end()
        self.contexts.append(Context(list(system), where))
        for item in history or ():
            self.add(item, where)
        self._end()
        if not history and summary:
            self.messages.append({"role": "user", "content": summary})

    def roll_back(self, num_turns: int) -> None:
        """Go on before the last user messages, in a new context if the model had answered them."""
        turns = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
        if num_turns <= 0 or not turns:
            return
        start = turns[-min(num_turns, len(turns))]
        self._end()
        if _has_answer(self.messages[start:]):
            self.contexts.append(Context(self.messages[:start], self.contexts[-1].where))
        else:
            del self.messages[start:]

    def _reply(self) -> Message:
        """The model's message that is being written."""
        if not self.is_open:
            self.messages.append({"role": "assistant", "content": ""})
            self.is_open = True
        return self.messages[-1]

    def _end(self) -> None:
        self.is_open = False


def _has_answer(messages: Iterable[dict[str, Any]]) -> bool:
    return any(message["role"] == "assistant" for message in messages)
