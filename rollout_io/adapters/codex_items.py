"""Items of OpenAI's Responses API, as Codex CLI logs them, to conversations in chat style.

Items of the model that follow each other (reasoning, text, tool calls) are one message; the result
of a tool, or a message of somebody else, ends it. Reasoning is its text where that is there, else
its summary. A `developer` message is a `system` message before the first answer, and a `user`
message after it, as chat templates ask.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rollout_io.adapters.blocks import (
    NO_JSON,
    Content,
    Message,
    content,
    joined,
    json_text,
    tool_call,
)
from schemas.errors import RolloutError

_OUTPUTS = frozenset({"function_call_output", "custom_tool_call_output"})
_ACTIONS = frozenset({"local_shell_call", "web_search_call"})
_UNREADABLE = frozenset({"compaction", "compaction_summary", "ghost_snapshot", "other"})


class _Output(msgspec.Struct, gc=False):
    content: Content = None


class Item(msgspec.Struct, gc=False):
    """An item of any type."""

    type: str = "message"
    role: str | None = None
    content: Content = None
    summary: Content = None
    id: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: msgspec.Raw = NO_JSON
    input: str | None = None
    action: msgspec.Raw = NO_JSON
    output: msgspec.Raw = NO_JSON


_OUTPUT_DECODER = msgspec.json.Decoder(_Output)
_CONTENT_DECODER = msgspec.json.Decoder(Content)


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
        if item.type == "message":
            self._add_message(item, where)
        elif item.type == "reasoning":
            reply = self._reply()
            text = _text(item.content) or _text(item.summary)
            if text:
                reply["reasoning_content"] = joined(reply.get("reasoning_content", ""), text)
        elif item.type in _OUTPUTS:
            self._end()
            result = {"role": "tool", "tool_call_id": item.call_id}
            self.messages.append({**result, "content": _output(item.output)})
        elif item.type not in _UNREADABLE:
            self._reply().setdefault("tool_calls", []).append(_call(item, where))

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

    def _add_message(self, item: Item, where: str) -> None:
        if item.role == "assistant":
            reply = self._reply()
            reply["content"] = joined(reply["content"], _text(item.content))
            return
        if item.role is None:
            raise RolloutError("message", where, "a message without a role", "its role")
        self._end()
        instructs = {"developer", "system"}
        later = "user" if _has_answer(self.messages) else "system"
        role = later if item.role in instructs else item.role
        self.messages.append({"role": role, "content": content(item.content)})

    def _reply(self) -> Message:
        """The model's message that is being written."""
        if not self.is_open:
            self.messages.append({"role": "assistant", "content": ""})
            self.is_open = True
        return self.messages[-1]

    def _end(self) -> None:
        self.is_open = False


def _call(item: Item, where: str) -> Message:
    """A call of a tool: a function's, a custom tool's (its input is text), or a built-in one's."""
    call_id = item.call_id or item.id
    if item.type == "function_call" and item.name is not None:
        return tool_call(call_id, item.name, json_text(item.arguments))
    if item.type == "custom_tool_call" and item.name is not None:
        arguments = msgspec.json.encode({"input": item.input or ""}).decode()
        return tool_call(call_id, item.name, arguments)
    if item.type in _ACTIONS:
        return tool_call(call_id, item.type.removesuffix("_call"), json_text(item.action))
    got, expected = f"an item of type {item.type!r}", "a message, reasoning or the call of a tool"
    raise RolloutError("message", where, got, expected)


def _output(raw: msgspec.Raw) -> str | list[Message]:
    """What a tool answered: text, parts, or an object with `content`."""
    try:
        return content(_CONTENT_DECODER.decode(raw))
    except (msgspec.MsgspecError, ValueError):
        pass
    try:
        return content(_OUTPUT_DECODER.decode(raw).content)
    except (msgspec.MsgspecError, ValueError):
        return json_text(raw)


def _text(found: Content) -> str:
    """Text alone: what is no text is left out."""
    text = content(found)
    return text if isinstance(text, str) else "\n".join(p["text"] for p in text if "text" in p)


def _has_answer(messages: Iterable[dict[str, Any]]) -> bool:
    return any(message["role"] == "assistant" for message in messages)
