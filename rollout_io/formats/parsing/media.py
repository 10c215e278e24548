"""Pictures and other parts of messages that are not text, in one form for all APIs.

    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "..."}}
    {"type": "image", "source": {"type": "url", "url": "https://..."}}
    {"type": "document", "source": {"type": "file", "file_id": "file-1"}, "name": "plan.pdf"}

While a dataset is written, the bytes go to its store (`rollout_io.dataset.blobs`) as soon as a part is
read, so that no run is held in memory with its pictures:

    {"type": "image", "blob": "sha256:...", "media_type": "image/png"}

The messages of a row keep these parts. Re-tokenized text has the chat template's placeholder for a
picture, or a mark such as `[image]` (`schemas.messages.marked`).
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from rollout_io.dataset.blobs import MEDIA_TYPES, OTHER, extension_of

_MAX_FILE_BYTES = 256 << 20
_LONGEST_PATH = 4096

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
_URLS = (
    *("url", "image_url", "file_url", "fileUri", "file_uri"),
    *("image", "audio", "video", "document", "path"),
)
_DATA = ("data", "file_data", "base64")
_TYPES = ("media_type", "mimeType", "mime_type", "mediaType", "format")
READS = dict.fromkeys(
    _KINDS,
    "source image_url image file file_id file_data file_url filename input_audio audio audio_url "
    "video video_url document title name format mime_type",
)
"""Keys of each type of part that `parsing.content.Part` holds, whatever the API."""
_HINTS = ("base64", "image")  # a search for every kind would take longer than reading the log
_NESTED = frozenset({"content", "output"})
_URL_SAFE = str.maketrans("-_", "+/")
_MARK = "@rollouts-blob "
_MARKED = re.compile(f"{_MARK}(sha256:[0-9a-f]{{64}})")
_LONG = re.compile(
    rb'("(?:url|image_url|image|data|file_data|base64)"\s*:\s*"(?:data:[\w.+/-]+;base64,)?)'
    rb'([A-Za-z0-9+/]{1024,}={0,2})"'
)
_FOLDER: ContextVar[Path] = ContextVar("folder", default=Path())
_STORE: ContextVar[Store | None] = ContextVar("store", default=None)
_WITHIN: ContextVar[Path | None] = ContextVar("within", default=None)
_NAMES = ("title", "filename", "name", "displayName")


def media_part(part: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a part that is not text in the form of this module; None for any other part.

    Example:
        >>> media_part({"type": "input_image", "image_url": "data:image/png;base64,AAAA"})
        {'type': 'image', 'source': {'type': 'base64', 'media_type': 'image/png', 'data': 'AAAA'}}
    """
    parts_of = _fields_of(part)
    if parts_of is None:
        return None
    kind, fields, source = parts_of
    return part_of(kind, source, _first(fields, _NAMES))


def is_media(part: Mapping[str, Any]) -> bool:
    """True if `media_part` returns a part; nothing is stored."""
    return _fields_of(part) is not None


def _fields_of(part: Mapping[str, Any]) -> tuple[str, dict[str, Any], dict[str, Any]] | None:
    """Return the kind of a part that is not text, all its fields on one level, and its source."""
    kind, held = _KINDS.get(str(part.get("type"))), part.get("source")
    if kind is None or (isinstance(held, Mapping) and str(held.get("type")) in {"text", "content"}):
        return None  # a document of Anthropic's API may be text
    fields = dict(part)
    for name in _HOLDERS:
        held = part.get(name)
        if isinstance(held, Mapping):
            fields |= held
    source = source_of(fields)
    return None if source is None else (kind, fields, source)


def part_of_data(data: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the part for Gemini's `inlineData` or `fileData`, whose MIME type tells the kind."""
    source = source_of(data)
    if source is None:
        return None
    mime = str(source.get("media_type", ""))
    kind = next((kind for start, kind in _BY_TYPE if mime.startswith(start)), "document")
    return part_of(kind, source, _first(data, _NAMES))


def part_of(kind: str, source: Mapping[str, Any], name: str | None = None) -> dict[str, Any]:
    """Return a part with a source; its bytes go to the store of the dataset that is being written.

    A file is read only if it has the first bytes of a picture, a document or a recording: a log may
    name any file of this machine.
    """
    store = _STORE.get()
    if store is None:
        return _known({"type": kind, "source": dict(source), "name": name})
    blob = _MARKED.fullmatch(source.get("data", ""))
    content = None if blob else _content_of(source)
    if content is None and not blob:
        return _known({"type": kind, "source": dict(source), "name": name})
    reference = blob[1] if blob else store.add(content or b"")
    media_type = source.get("media_type")
    if media_type is None:
        start = (content if content is not None else store.read(reference)) or b""
        media_type = MEDIA_TYPES.get(extension_of(start))
    if media_type is not None and "/" not in media_type:  # "wav", as in OpenAI's `input_audio`
        media_type = MEDIA_TYPES.get(f".{media_type}", media_type)
    return _known({"type": kind, "blob": reference, "media_type": media_type, "name": name})


def _content_of(source: Mapping[str, Any]) -> bytes | None:
    """Return the bytes of a part; None if the log does not have them."""
    if source["type"] == "file":
        return None
    if source["type"] == "base64":
        return decoded(source["data"])
    parts = urlsplit(source["url"])
    if parts.scheme not in {"", "file"}:
        return None
    return _file(unquote(parts.path) if parts.scheme else source["url"])


def decoded(data: str) -> bytes | None:
    """Return the bytes of base64, standard or safe for URLs; None if it is invalid."""
    try:
        data = "".join(data.split()).translate(_URL_SAFE)
        return base64.b64decode(data + "=" * (-len(data) % 4), validate=True)
    except (binascii.Error, ValueError):
        return None


def _file(path: str) -> bytes | None:
    """Return the content of a local file that has one of the known media types."""
    within = _WITHIN.get()
    try:
        resolved = _FOLDER.get() / Path(path).expanduser()
        if within is not None:
            resolved = Path(os.path.realpath(resolved))
            if not resolved.is_relative_to(within):
                return None
        descriptor = os.open(resolved, os.O_RDONLY | os.O_NONBLOCK)
    except (OSError, ValueError, RuntimeError):
        return None
    with os.fdopen(descriptor, "rb") as file:
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode) or facts.st_size > _MAX_FILE_BYTES:
            return None
        start = file.read(1024)
        return None if extension_of(start) == OTHER else start + file.read()


class Store(Protocol):
    """Where the bytes of parts go; `Blobs` is one."""

    def add(self, content: bytes) -> str:
        """Store a content; return the reference to it."""
        ...

    def read(self, name: str) -> bytes | None:
        """Return the content of a reference; None if it is unknown."""
        ...


@contextmanager
def storing(store: Store, within: Path | None = None) -> Iterator[None]:
    """Store the bytes of all parts that are read in this block.

    No file that a log names is read outside the directory `within`, which has no links, if there is one.
    """
    token, other = _STORE.set(store), _WITHIN.set(within)
    try:
        yield
    finally:
        _STORE.reset(token)
        _WITHIN.reset(other)


def slimmed(record: bytes, folder: Path) -> bytes:
    """Return the JSON of a record with the pictures in the store, each replaced by a short text.

    Decoders of records then need no memory for pictures. Where such a text is not in a part that is a
    picture, `restored` puts the base64 back.
    """
    store = _STORE.get()
    if store is not None:
        _FOLDER.set(folder)
    if store is None or b"base64" not in record:
        return record

    def stored(match: re.Match[bytes]) -> bytes:
        head, data = match[1], match[2]
        if extension_of(base64.b64decode(data[:64])) == OTHER:
            return match[0]
        try:
            content = base64.b64decode(data, validate=True)
        except (binascii.Error, ValueError):
            return match[0]
        if base64.b64encode(content) != data:
            return match[0]
        return b'%s%s%s"' % (head, _MARK.encode(), store.add(content).encode())

    return _LONG.sub(stored, record)


def restored(value: Any) -> Any:
    """Return a message with base64 in place of each text of `slimmed` that is no part by itself."""
    store = _STORE.get()
    if isinstance(value, str):
        if store is None or _MARK not in value:
            return value
        return _MARKED.sub(lambda match: _base64(store.read(match[1])) or match[0], value)
    if isinstance(value, list):
        return [restored(inner) for inner in value]
    return {k: restored(v) for k, v in value.items()} if isinstance(value, dict) else value


def stored_content(name: str) -> bytes | None:
    """Return the bytes of a part in the store; None without a store, or if it lacks the part."""
    store = _STORE.get()
    return None if store is None else store.read(name)


def _base64(content: bytes | None) -> str | None:
    return None if content is None else base64.b64encode(content).decode()


def stored_messages(text: str | None) -> str | None:
    """Return the JSON of messages as sent, with their pictures in the store; other text unchanged.

    Parts that are not text get the form of this module, everything else stays as it is.
    """
    if text is None or _STORE.get() is None or not any(hint in text for hint in _HINTS):
        return text
    try:
        messages = json.loads(text)
    except (ValueError, RecursionError):
        return text
    changed = _with_parts(messages)
    return text if changed == messages else json.dumps(changed, ensure_ascii=False)


def _with_parts(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_parts(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    part = None if value.keys() & {"role", "blob"} else media_part(value)
    if part is not None:
        return part
    return {k: _with_parts(v) if k in _NESTED else v for k, v in value.items()}


def source_of(fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return where the bytes of a part are: in the log, at a URL, or in a file of the API."""
    url, data = _first(fields, _URLS), _first(fields, _DATA)
    mime = _first(fields, _TYPES)
    if data is None and url is not None and (url.startswith("data:") or _is_base64(url)):
        data, url = url, None
    if data is not None and data.startswith("data:"):
        head, _, data = data.partition(",")
        mime, *options = head.removeprefix("data:").split(";")
        mime = mime or _first(fields, _TYPES)
        if "base64" not in options:
            data = base64.b64encode(unquote_to_bytes(data)).decode()
    if data is not None:
        return _known({"type": "base64", "media_type": mime, "data": data})
    if url is not None:
        return _known({"type": "url", "media_type": mime, "url": url})
    file_id = _first(fields, ("file_id", "fileId"))
    return None if file_id is None else {"type": "file", "file_id": file_id}


def _is_base64(text: str) -> bool:
    """True for a text that is too long for a path, in the alphabet of base64."""
    return len(text) > _LONGEST_PATH and re.fullmatch(r"[A-Za-z0-9+/_=-]+", text) is not None


def _known(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _first(fields: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    values = (fields.get(name) for name in names)
    return next((value for value in values if isinstance(value, str) and value), None)
