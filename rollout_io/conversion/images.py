"""The column `pictures`: the parts of a row's messages that are not text, and their tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np

from rollout_io.dataset.blobs import Blobs
from rollout_io.dataset.storage import Location
from rollout_io.formats.base import Ids, Step
from rollout_io.formats.parsing.media import stored_messages, storing
from rollout_io.formats.parsing.notes import note
from rollout_io.formats.parsing.tokens import parse_ids
from schemas.messages import media_in

MEDIA_ROWS = "re-tokenized rows with images or other parts that are not text"
STORED = "images and other parts stored beside the dataset, in its .blobs"
_LEFT = {
    "url": "images and other parts that the log has only as a URL, which is not fetched",
    "path": "images and other parts in files that do not exist or have no known type",
    "file": "images and other parts that only the API has, under an id",
    "base64": "images and other parts with invalid base64, kept as they are",
}


def stored_in(folder: str | None) -> AbstractContextManager[None]:
    """Store the pictures of all runs that are read in this block in a directory, if there is one."""
    return nullcontext() if folder is None else storing(Blobs(Location.of(folder)))


def images_of(
    parts: Sequence[Mapping[str, Any]], token: int | None, prompt: Ids, response: Ids
) -> list[dict[str, Any]]:
    """Return the entries of the column `pictures` of a row, and count what is stored and what is not."""
    pictures = [part for part in parts if part["type"] == "image"]
    places = _places(token, prompt, response) if token is not None and pictures else []
    given = iter(places if len(places) == len(pictures) else [None] * len(pictures))
    entries = []
    for part in parts:
        note(STORED if "blob" in part else _LEFT[_left_as(part["source"])])
        position = next(given) if part["type"] == "image" else None
        length = None if position is None else 1
        entries.append({"sha256": part.get("blob"), "start": position, "length": length})
    return entries


def with_images(step: Step, token: Callable[[], int | None]) -> Step:
    """Return a step with exact ids, its pictures in the store, and its column `pictures`."""
    step.messages = stored_messages(step.messages)
    if step.messages is None or ('"blob"' not in step.messages and '"source"' not in step.messages):
        return step
    try:
        messages = msgspec.json.decode(step.messages)
    except (msgspec.DecodeError, RecursionError):
        return step
    listed = messages if isinstance(messages, list) else []
    parts = [part for m in listed if isinstance(m, dict) for part in _media_within(m)]
    if parts:
        step.pictures = images_of(parts, token(), step.prompt_token_ids, step.response_ids)
    return step


def _media_within(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the parts of a message that are not text, those of tool results included."""
    found = [part for part in media_in(message) if "blob" in part or _has_source(part)]
    content = message.get("content")
    for part in content if isinstance(content, list) else ():
        if isinstance(part, dict) and "content" in part:
            found += _media_within(part)
    return found


def _has_source(part: Mapping[str, Any]) -> bool:
    source = part["source"]
    return isinstance(source, dict) and source.get("type") in {"url", "file", "base64"}


def _left_as(source: Mapping[str, Any]) -> str:
    if source["type"] == "url" and urlsplit(source.get("url", "")).scheme in {"", "file"}:
        return "path"
    return str(source["type"])


def _places(token: int, prompt: Ids, response: Ids) -> list[int]:
    """Return where each picture begins: an engine repeats the token for each patch of a picture."""
    ids = np.concatenate(
        [parse_ids([part])[0] if isinstance(part, bytes) else part for part in (prompt, response)]
    )
    is_token = ids == token
    begins = is_token & ~np.append(False, is_token[:-1])
    return [int(index) for index in np.flatnonzero(begins)]
