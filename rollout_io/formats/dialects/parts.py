"""Parts of messages of LangChain and Vercel's AI SDK, as blocks of Anthropic's API, and their values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from rollout_io.formats.parsing.content import canonical_json, known

Fields = Mapping[str, Any]


def call_block(call_id: Any, name: Any, arguments: Any) -> Fields:
    """Return a call as a block; arguments may be JSON text."""
    return {"type": "tool_use", "id": call_id, "name": name, "input": parsed(arguments)}


def media_block(kind: str, data: Any, url: Any, mime: Any) -> Fields:
    """Return a picture or a file as a block: its bytes in base64, or its URL."""
    source = {"type": "base64", "data": data} if data else {"type": "url", "url": url}
    return {"type": kind, "source": known(source | {"media_type": mime})}


def result_block(call_id: Any, result: Any) -> Fields:
    """Return the result of a call as a block; a list of parts is its content, anything else is text."""
    is_parts = isinstance(result, list) and all(
        isinstance(part, Mapping) and isinstance(part.get("type"), str) for part in result
    )
    content = result if is_parts and result else as_text(result)
    return known({"type": "tool_result", "tool_use_id": call_id, "content": content})


def word(value: Any) -> str:
    """Return a value that names a kind; damaged logs may have anything in its place."""
    return value if isinstance(value, str) else ""


def as_text(value: Any) -> str:
    """Return a text as it is, null as an empty text, and any other value as JSON."""
    if value is None or isinstance(value, str):
        return value or ""
    return as_json(value)


def as_json(value: Any) -> str:
    """Return a text as it is, and any other value as JSON."""
    return value if isinstance(value, str) else canonical_json(msgspec.json.encode(value))


def parsed(value: Any) -> Any:
    """Return the value of JSON text; any other value, and text that is no JSON, as it is."""
    if not isinstance(value, str):
        return value
    try:
        return msgspec.json.decode(value)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return value


def langchain_block(part: Any) -> Any:
    """Return a picture or a file, whose bytes LangChain has beside its type, with a `source`."""
    if not isinstance(part, Mapping) or word(part.get("type")) not in {"image", "file", "audio"}:
        return part
    data, url = part.get("data", part.get("base64")), part.get("url")
    if not isinstance(data, str) and not isinstance(url, str):
        return part
    kind = "document" if part["type"] == "file" else part["type"]
    return media_block(kind, data, url, part.get("mime_type"))


def is_of_vercel(part: Any) -> bool:
    """True for a call, a result, a picture or a file of Vercel's AI SDK."""
    return isinstance(part, Mapping) and (
        word(part.get("type")) in _OF_VERCEL or isinstance(_vercel_data(part), str)
    )


def _vercel_data(part: Fields) -> Any:
    """Return the bytes in base64, or the URL, of a picture or a file."""
    return part.get({"image": "image", "file": "data"}.get(word(part.get("type")), ""))


_OF_VERCEL = frozenset({"tool-call", "tool-result"})


def vercel_block(part: Any) -> Any:
    """Return a part of Vercel's AI SDK as a block; anything else as it is."""
    if not isinstance(part, Mapping):
        return part
    kind = word(part.get("type"))
    if kind == "tool-call":
        arguments = part.get("input", part.get("args"))
        return call_block(part.get("toolCallId"), part.get("toolName"), arguments)
    if kind == "tool-result":
        output = part.get("output", part.get("result"))
        if isinstance(output, Mapping) and {"type", "value"} <= output.keys():
            output = output["value"]
        return result_block(part.get("toolCallId"), output)
    if kind == "reasoning":
        return {"type": "thinking", "thinking": part.get("text")}
    data = _vercel_data(part)
    if isinstance(data, str):
        name = "url" if ":" in data[:16] else "data"
        block = {
            "type": kind,
            name: data,
            "mime_type": part.get("mediaType", part.get("mime_type")),
        }
        return {**part, **langchain_block(block)}
    return part
