"""Messages that APIs build of blocks (Anthropic's, OpenAI's Responses, Gemini's), in OpenAI's chat style.

Numbers in the arguments of tools stay the text they were.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

Message = dict[str, Any]
NO_JSON = msgspec.Raw(b"null")

_TEXT = msgspec.json.Decoder(str)


class Part(msgspec.Struct, gc=False):
    """A piece of a message's content; of what is no text, only its type is kept."""

    type: str = "text"
    text: str | None = None


Content = str | list[Part | str] | None


def content(found: Content) -> str | list[Message]:
    """Content as text; as a list of parts where one of them is no text (an image)."""
    if found is None or isinstance(found, str):
        return found or ""
    parts = [Part(text=part) if isinstance(part, str) else part for part in found]
    texts = [part.text for part in parts if part.text is not None]
    if len(texts) == len(parts):
        return "\n".join(texts)
    return [{"type": p.type} if p.text is None else {"type": "text", "text": p.text} for p in parts]


def tool_call(call_id: str | None, name: str | None, arguments: str) -> Message:
    """A tool call; its arguments are JSON text."""
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def json_text(raw: msgspec.Raw) -> str:
    """The text that a JSON string is, or JSON itself; {} for null."""
    text = bytes(raw)
    if text.startswith(b'"'):
        return _TEXT.decode(text)
    return "{}" if text == b"null" else text.decode()


def joined(before: str, text: str) -> str:
    """Two texts on lines of their own; no line for an empty one."""
    return f"{before}\n{text}" if before and text else before or text


def prompt_key(messages: Sequence[Message]) -> str:
    """A short name of what stands before the first answer: equal for equal prompts."""
    first = next((i for i, m in enumerate(messages) if m["role"] == "assistant"), len(messages))
    digest = hashlib.blake2b(msgspec.json.encode(messages[:first]), digest_size=6)
    return f"prompt-{digest.hexdigest()}"
