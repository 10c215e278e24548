"""What messages of any API are made of: texts, parts, thoughts, calls of tools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from rollout_io.logs.jsonl import decode_line
from schemas.errors import RolloutError

Message = dict[str, Any]
NO_JSON = msgspec.Raw(b"null")
THOUGHTS = frozenset({"thinking", "redacted_thinking", "reasoning"})

_TEXTS = frozenset({"text", "input_text", "output_text", "summary_text", "reasoning_text"})
_TEXT_DECODER = msgspec.json.Decoder(str)


class Part(msgspec.Struct, gc=False):
    """A part of a message's content; in Anthropic's API, a block."""

    type: str = "text"
    text: str | None = None
    thinking: str | None = None
    reasoning: str | None = None
    id: str | None = None
    name: str | None = None
    input: msgspec.Raw = NO_JSON
    tool_use_id: str | None = None
    content: msgspec.Raw = NO_JSON

    @property
    def said(self) -> str:
        """Its text, whatever its type; of a redacted thought there is none."""
        return self.text or self.thinking or self.reasoning or ""


Content = str | list[str | Part] | None
Parts = str | Sequence[str | Part] | None
"""What is read as `Content`."""


def parts_in(content: Parts) -> list[Part]:
    """The parts of a content; of a text one, of nothing none."""
    if content is None or isinstance(content, str):
        return [Part(text=content)] if content else []
    return [Part(text=part) if isinstance(part, str) else part for part in content]


def shown(parts: Sequence[Part]) -> str | list[Message]:
    """The text of parts; themselves, with their types, where one is no text (an image).

    Who renders such a list refuses it by the type's name.
    """
    if all(part.type in _TEXTS and part.text is not None for part in parts):
        return "\n".join(part.text or "" for part in parts)
    return [known({"type": part.type, "text": part.text}) for part in parts]


def all_text(content: Parts) -> str:
    """All text of a content, thoughts or not."""
    return "\n".join(part.said for part in parts_in(content))


def tool_call(call_id: str | None, name: str, arguments: str) -> Message:
    """A call of a tool; its arguments are JSON text."""
    function = {"name": name, "arguments": arguments}
    return known({"id": call_id, "type": "function", "function": function})


def json_text(raw: msgspec.Raw, where: str) -> str:
    """The text that a JSON string is, or JSON itself; {} for null."""
    text = bytes(raw)
    if text.startswith(b'"'):
        return decode_line(_TEXT_DECODER, text, where)
    return "{}" if text == b"null" else text.decode()


def joined(before: str, text: str) -> str:
    """Two texts on lines of their own; no line for an empty one."""
    return f"{before}\n{text}" if before and text else before or text


def extend(reply: Message, piece: Message) -> None:
    """Add a piece of a message to it; a call that it has already, by its id, is a copy."""
    before, text = reply["content"], piece["content"]
    if isinstance(before, str) and isinstance(text, str):
        reply["content"] = joined(before, text)
    else:
        reply["content"] = [*_as_parts(before), *_as_parts(text)]
    thought = joined(reply.get("reasoning_content", ""), piece.get("reasoning_content", ""))
    if thought:
        reply["reasoning_content"] = thought
    calls: list[Message] = [*reply.get("tool_calls", ())]
    for call in piece.get("tool_calls", ()):
        if "id" not in call or all(call["id"] != other.get("id") for other in calls):
            calls.append(call)
    if calls:
        reply["tool_calls"] = calls


def _as_parts(content: str | list[Message]) -> list[Message]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return content


def known(fields: Message) -> Message:
    """The fields that have a value."""
    return {name: value for name, value in fields.items() if value is not None}


def bad_message(where: str, got: str, expected: str) -> RolloutError:
    """The error of what cannot be taken for a message."""
    return RolloutError("message", where, got, expected)
