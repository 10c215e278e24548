"""Message elements that all APIs share: texts, parts, thoughts, tool calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import msgspec

from rollout_io.formats.parsing.jsonl import decode_line, decoded, refuse_not_utf8
from rollout_io.formats.parsing.media import is_media, media_part
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
    is_error: bool | None = None
    tool_name: str | None = None
    title: str | None = None
    refusal: str | None = None
    source: Any = None
    image_url: Any = None
    image: Any = None
    file: Any = None
    file_id: str | None = None
    file_data: str | None = None
    file_url: str | None = None
    filename: str | None = None
    input_audio: Any = None
    audio: Any = None
    audio_url: Any = None
    video: Any = None
    video_url: Any = None
    document: Any = None
    format: str | None = None
    mime_type: str | None = None

    @property
    def said(self) -> str:
        """Text of the part, whatever its type; empty for a redacted thought."""
        return self.text or self.thinking or self.reasoning or ""

    @property
    def is_media(self) -> bool:
        """True if the part is a picture or another kind of media."""
        return is_media(msgspec.structs.asdict(self))

    @property
    def media(self) -> Message | None:
        """The part as a picture or another kind of media (`parsing.media`); None if it is none."""
        return media_part(msgspec.structs.asdict(self))


Content = str | list[str | Part] | None
_CONTENT_DECODER = msgspec.json.Decoder(Content)
Parts = str | Sequence[str | Part] | None
"""Decoded `Content`, or any other sequence of its parts."""


def parts_in(content: Parts) -> list[Part]:
    """Return the parts of a message's content; a string is one part, None has no parts."""
    if content is None or isinstance(content, str):
        return [Part(text=content)] if content else []
    return [Part(text=part) if isinstance(part, str) else part for part in content]


def is_text(part: Part) -> bool:
    """True if a part is text, or becomes text: the reference to a tool, a document, a search result."""
    return bool(_text(part)) or (part.type in _TEXTS and part.text is not None)


def is_shown(part: Part) -> bool:
    """True if a part is text or media, and thus can be part of a message."""
    return is_text(part) or part.is_media


def _text(part: Part) -> str:
    if part.type == "tool_reference" and part.tool_name:
        return f"Loaded tool: {part.tool_name}"
    if part.type == "document" and isinstance(part.source, dict):
        return _document(part.source, part.title)
    if part.type == "search_result":
        source = part.source if isinstance(part.source, str) else None
        inner = parts_in(_inner(part.content))
        return "\n".join(filter(None, [part.title, source, *(_text(nested) for nested in inner)]))
    if part.type == "refusal":
        return part.refusal or ""
    return part.text or "" if part.type in _TEXTS else ""


def _document(source: dict[str, Any], title: str | None) -> str:
    """Return the text of a document; empty if it is a file, such as a PDF."""
    data, content = source.get("data"), source.get("content")
    if source.get("type") == "text" and isinstance(data, str):
        return joined(title or "", data)
    if source.get("type") == "content":
        inner = parts_in(_inner(msgspec.Raw(msgspec.json.encode(content))))
        return joined(title or "", "\n".join(_text(nested) for nested in inner))
    return ""


def _inner(raw: msgspec.Raw) -> Content:
    try:
        content: Content = _CONTENT_DECODER.decode(raw)
    except (msgspec.MsgspecError, ValueError):
        return None
    return content


def shown(parts: Sequence[Part]) -> str | list[Message]:
    """Return the text of the parts, or typed parts if any has no text (such as an image).

    Rendering typed parts other than text and media fails with an error that names the type.
    """
    if all(is_text(part) for part in parts):
        return "\n".join(_text(part) for part in parts)
    return [
        {"type": "text", "text": _text(part)}
        if is_text(part)
        else part.media or known({"type": part.type, "text": part.text})
        for part in parts
    ]


def all_text(content: Parts) -> str:
    """Return all text of a message's content, including thoughts."""
    return "\n".join(part.said for part in parts_in(content))


def tool_call(call_id: str | None, name: str, arguments: str) -> Message:
    """Build a tool call, with its JSON arguments in canonical form."""
    function = {"name": name, "arguments": canonical_json(arguments)}
    return known({"id": call_id, "type": "function", "function": function})


def calls_in(response: str) -> tuple[str, list[dict[str, Any]]]:
    """Return the text of a `response_text`, and the tool calls that its last line consists of."""
    head, _, tail = response.rpartition("\n")
    try:
        calls = json.loads(tail) if tail.startswith("[{") else []
        named = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    except (ValueError, RecursionError, TypeError, KeyError):
        return response, []
    is_called = calls and all(isinstance(name, str) for name, _ in named)
    return (head, calls) if is_called else (response, [])


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


def joined(before: str, text: str, between: str = "\n") -> str:
    """Join two texts with a newline, or another text; an empty text adds no line."""
    return f"{before}{between}{text}" if before and text else before or text


def extend(reply: Message, piece: Message, between: str = "\n") -> None:
    """Append a piece to a reply; a tool call whose id the reply already has is skipped."""
    before, text = reply["content"], piece["content"]
    if isinstance(before, str) and isinstance(text, str):
        reply["content"] = joined(before, text, between)
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


def filled(**texts: str | None) -> dict[str, str]:
    """Return the texts that are there and not empty, such as labels of a run."""
    return {name: text for name, text in texts.items() if text}


def known(fields: Message) -> Message:
    """Return the fields that have a value."""
    return {name: value for name, value in fields.items() if value is not None}


def tool_result(content: Any, call_id: str | None, *, is_error: bool | None = None) -> Message:
    """Return the message of a tool's result, marked if the log says that the call failed."""
    mark = is_error or None
    return known({"role": "tool", "content": content, "tool_call_id": call_id, "is_error": mark})


def raw_of(value: Any) -> msgspec.Raw:
    """Return the JSON of a decoded value; JSON is returned as it is."""
    if isinstance(value, msgspec.Raw):
        return value
    return msgspec.Raw(value if isinstance(value, bytes) else msgspec.json.encode(value))


def function_tool(name: str, description: Any = None, parameters: Any = None) -> Message:
    """Return a tool definition in OpenAI's format."""
    function = known({"name": name, "description": description, "parameters": parameters})
    return {"type": "function", "function": function}


def bad_message(where: str, got: str, expected: str = "") -> InputError:
    """Return the error for an invalid message."""
    return InputError("message", where, got, expected)
