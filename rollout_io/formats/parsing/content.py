"""Message elements that all APIs share: texts, parts, thoughts, tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import msgspec

from rollout_io.formats.parsing.jsonl import decode_line, decoded, refuse_not_utf8
from schemas.errors import InputError

Message = dict[str, Any]
NO_JSON = msgspec.Raw(b"null")
THOUGHTS = frozenset({"thinking", "redacted_thinking", "reasoning"})

_TEXTS = frozenset({"text", "input_text", "output_text", "summary_text", "reasoning_text"})
_TEXT_DECODER = msgspec.json.Decoder(str)
_ANY_DECODER = msgspec.json.Decoder(float_hook=Decimal)
_ANY_ENCODER = msgspec.json.Encoder(decimal_format="number")


class Part(msgspec.Struct, gc=False):
    """A part of a message's content, called a block in Anthropic's API."""

    type: str = "text"
    text: str | None = None
    thinking: str | None = None
    reasoning: str | None = None
    id: str | None = None
    name: str | None = None
    input: msgspec.Raw = NO_JSON
    tool_use_id: str | None = None
    content: msgspec.Raw = NO_JSON
    tool_name: str | None = None

    @property
    def said(self) -> str:
        """Text of the part, whatever its type; empty for a redacted thought."""
        return self.text or self.thinking or self.reasoning or ""


Content = str | list[str | Part] | None
Parts = str | Sequence[str | Part] | None
"""Decoded `Content`, or any other sequence of its parts."""


def parts_in(content: Parts) -> list[Part]:
    """Return the parts of a message's content; a string is one part, None has no parts."""
    if content is None or isinstance(content, str):
        return [Part(text=content)] if content else []
    return [Part(text=part) if isinstance(part, str) else part for part in content]


def is_text(part: Part) -> bool:
    """True if a part is text, or the reference to a tool, which becomes a text with its name."""
    return bool(_text(part)) or (part.type in _TEXTS and part.text is not None)


def _text(part: Part) -> str:
    if part.type == "tool_reference" and part.tool_name:
        return f"Loaded tool: {part.tool_name}"
    return part.text or "" if part.type in _TEXTS else ""


def shown(parts: Sequence[Part]) -> str | list[Message]:
    """Return the text of the parts, or typed parts if any has no text (such as an image).

    Rendering typed parts fails with an error that names the type.
    """
    if all(is_text(part) for part in parts):
        return "\n".join(_text(part) for part in parts)
    return [known({"type": part.type, "text": part.text}) for part in parts]


def all_text(content: Parts) -> str:
    """Return all text of a message's content, including thoughts."""
    return "\n".join(part.said for part in parts_in(content))


def tool_call(call_id: str | None, name: str, arguments: str) -> Message:
    """Build a tool call, with its JSON arguments in canonical form."""
    function = {"name": name, "arguments": canonical_json(arguments)}
    return known({"id": call_id, "type": "function", "function": function})


def canonical_json(text: str | bytes) -> str:
    r"""Return JSON without whitespace or needless escapes, so that equal values have equal texts.

    Keys keep their order, and numbers keep all digits. Text that is not JSON is returned unchanged.

    Example:
        >>> canonical_json('{ "n" : 1.0, "who": "Zo\u00eb" }')
        '{"n":1.0,"who":"Zoë"}'
    """
    content = text.encode(errors="surrogatepass") if isinstance(text, str) else text
    try:
        return _ANY_ENCODER.encode(decoded(_ANY_DECODER, content)).decode()
    except (msgspec.MsgspecError, ValueError, ArithmeticError, RecursionError):
        return text if isinstance(text, str) else text.decode(errors="surrogateescape")


def same_json(one: bytes, other: bytes) -> bool:
    """True if two JSON texts have the same value, with keys in the same order."""
    return one == other or canonical_json(one) == canonical_json(other)


def json_text(raw: msgspec.Raw, where: str) -> str:
    """Return the value of a JSON string, or any other JSON in canonical form; {} for null.

    Raises:
        InputError: `json_line`: the text is not UTF-8.
    """
    text = bytes(raw)
    if text.startswith(b'"'):
        return decode_line(_TEXT_DECODER, text, where)
    refuse_not_utf8(text, where)
    return "{}" if text == b"null" else canonical_json(text)


def joined(before: str, text: str) -> str:
    """Join two texts with a newline; an empty text adds no line."""
    return f"{before}\n{text}" if before and text else before or text


def extend(reply: Message, piece: Message) -> None:
    """Append a piece to a reply; a tool call whose id the reply already has is skipped."""
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
    """Return the fields that have a value."""
    return {name: value for name, value in fields.items() if value is not None}


def bad_message(where: str, got: str, expected: str = "") -> InputError:
    """Return the error for an invalid message."""
    return InputError("message", where, got, expected)
