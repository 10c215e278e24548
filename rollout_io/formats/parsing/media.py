"""Pictures and other parts of messages that are not text, in one form for all APIs.

    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "..."}}
    {"type": "image", "source": {"type": "url", "url": "https://..."}}
    {"type": "document", "source": {"type": "file", "file_id": "file-1"}, "name": "plan.pdf"}

The messages of a row keep these parts. Their tokens cannot be approximated, so that the re-tokenized
text has a mark such as `[image]` instead (`schemas.messages.marked`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_KINDS = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "document": "document",
    "input_file": "document",
    "file": "document",
    "container_upload": "document",
    "audio": "audio",
    "input_audio": "audio",
    "video": "video",
    "video_url": "video",
    "input_video": "video",
}
KINDS = frozenset(_KINDS.values())
_BY_TYPE = (("image/", "image"), ("audio/", "audio"), ("video/", "video"))
_HOLDERS = ("source", "image_url", "file", "input_audio", "audio_url", "video_url", "inlineData")
_URLS = ("url", "image_url", "file_url", "fileUri")
_DATA = ("data", "file_data", "base64")
_TYPES = ("media_type", "mimeType", "mime_type", "mediaType", "format")
_NAMES = ("title", "filename", "name", "displayName")


def media_part(part: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a part that is not text in the form of this module; None for any other part.

    Args:
        part: Part of a message, in the form of Anthropic's, OpenAI's or Gemini's API.

    Example:
        >>> media_part({"type": "input_image", "image_url": "data:image/png;base64,AAAA"})
        {'type': 'image', 'source': {'type': 'base64', 'media_type': 'image/png', 'data': 'AAAA'}}
    """
    kind = _KINDS.get(str(part.get("type")))
    if kind is None:
        return None
    fields = dict(part)
    for name in _HOLDERS:
        held = part.get(name)
        if isinstance(held, Mapping):
            fields |= held
    source = source_of(fields)
    if source is None:
        return None
    return _known({"type": kind, "source": source, "name": _first(fields, _NAMES)})


def part_of_data(data: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the part for Gemini's `inlineData` or `fileData`, whose MIME type tells the kind."""
    source = source_of(data)
    if source is None:
        return None
    mime = str(source.get("media_type", ""))
    kind = next((kind for start, kind in _BY_TYPE if mime.startswith(start)), "document")
    return _known({"type": kind, "source": source, "name": _first(data, _NAMES)})


def source_of(fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return where the bytes of a part are: in the log, at a URL, or in a file of the API."""
    url, data = _first(fields, _URLS), _first(fields, _DATA)
    mime = _first(fields, _TYPES)
    if url is not None and url.startswith("data:"):
        head, _, data = url.partition(",")
        mime, url = head.removeprefix("data:").partition(";")[0] or mime, None
    if data is not None and data.startswith("data:"):
        head, _, data = data.partition(",")
        mime = head.removeprefix("data:").partition(";")[0] or mime
    if data is not None:
        return _known({"type": "base64", "media_type": mime, "data": data})
    if url is not None:
        return _known({"type": "url", "media_type": mime, "url": url})
    file_id = _first(fields, ("file_id", "fileId"))
    return None if file_id is None else {"type": "file", "file_id": file_id}


def _known(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _first(fields: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    found = (fields.get(name) for name in names)
    return next((value for value in found if isinstance(value, str) and value), None)
