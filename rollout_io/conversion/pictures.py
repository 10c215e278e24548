"""The column `pictures`: the parts of a row's messages that are not text, and their tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec
import numpy as np

from rollout_io.dataset.blobs import Blobs
from rollout_io.dataset.storage import Location
from rollout_io.formats.base import Ids, Step, note
from rollout_io.formats.parsing.media import stored_content, stored_messages, storing
from rollout_io.formats.parsing.tokens import parse_ids
from schemas.messages import RETOKENIZED, media_in

if TYPE_CHECKING:
    from rollout_io.retokenize import ChatTokenizer
    from rollout_io.retokenize.processor import Expansion

Part = Mapping[str, Any]
Span = tuple[int | None, int | None]

STORED = "images and other parts stored beside the dataset, in its .blobs"
_LEFT = {
    "url": "images and other parts that the log has only as a URL, which is not fetched",
    "path": "images and other parts in files that do not exist or have no known type",
    "file": "images and other parts that only the API has, under an id",
    "base64": "images and other parts with invalid base64, kept as they are",
}
CHECKED = "images whose tokens are those of the image processor"
RUNS = "images at runs of the placeholder, not checked by an image processor"
UNPLACED = "images whose tokens are unknown"


def stored_in(folder: str | None) -> AbstractContextManager[None]:
    """Store the pictures of all runs that are read in this block in a directory, if there is one."""
    return nullcontext() if folder is None else storing(Blobs(Location.of(folder)))


def entries_of(
    parts: Sequence[Part], step: Step, tokenizer: Callable[[], ChatTokenizer | None]
) -> list[dict[str, Any]]:
    """Return the entries of the column `pictures` of a row, and count what is stored and what is not.

    Raises:
        InputError: `picture_tokens`: the row's tokens are not those of the tokenizer's image
            processor; `picture_file`: a picture cannot be decoded.
    """
    images = [part for part in parts if part["type"] == "image"]
    spans = iter(_spans(images, step, tokenizer()) if images else [])
    entries = []
    for part in parts:
        note(STORED if "blob" in part else _LEFT[_left_as(part["source"])])
        start, length = next(spans) if part["type"] == "image" else (None, None)
        entries.append({"sha256": part.get("blob"), "start": start, "length": length})
    return entries


def _spans(images: Sequence[Part], step: Step, tokenizer: ChatTokenizer | None) -> list[Span]:
    expansions = None if tokenizer is None else expansions_of(images, tokenizer, step.source)
    unknown: list[Span] = [(None, None)] * len(images)
    spans = unknown
    if tokenizer is not None and expansions is not None:
        from rollout_io.retokenize.processor import spans_in

        assert tokenizer.processor is not None
        spans = [*spans_in(_ids(step), expansions, tokenizer.processor.pads, step.source)]
        note(CHECKED, len(images))
    elif tokenizer is not None and step.token_source != RETOKENIZED:
        spans = _runs(tokenizer.placeholder_id, _ids(step), len(images)) or unknown
        note(RUNS, 0 if spans is unknown else len(images))
    note(UNPLACED, len(images) if spans is unknown else 0)
    return spans


def expansions_of(
    images: Sequence[Part], tokenizer: ChatTokenizer, where: str
) -> list[Expansion] | None:
    """Return what stands for each picture; None without a processor, or if a file is unknown."""
    contents = [stored_content(part["blob"]) if "blob" in part else None for part in images]
    if any(content is None for content in contents) or tokenizer.processor is None:
        return None
    names = (f"{where}, picture {part['blob'][:15]}" for part in images)
    pairs = zip(contents, names, strict=True)
    return [tokenizer.processor.expansion(c, name) for c, name in pairs if c is not None]


def _runs(token: int | None, ids: np.ndarray, num_images: int) -> list[Span] | None:
    """Return the runs of a placeholder; None if there are more or fewer than pictures."""
    bounds = np.flatnonzero(np.diff(np.pad(ids == token, 1).astype(np.int8)))
    runs = bounds.reshape(-1, 2).tolist()
    return [(a, b - a) for a, b in runs] if len(runs) == num_images else None


def with_pictures(step: Step, tokenizer: Callable[[], ChatTokenizer | None]) -> Step:
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
        step.pictures = entries_of(parts, step, tokenizer)
    return step


def _media_within(message: Part) -> list[Part]:
    """Return the parts of a message that are not text, those of tool results included."""
    media = [part for part in media_in(message) if "blob" in part or _has_source(part)]
    content = message.get("content")
    for part in content if isinstance(content, list) else ():
        if isinstance(part, dict) and "content" in part:
            media += _media_within(part)
    return media


def _has_source(part: Part) -> bool:
    source = part["source"]
    return isinstance(source, dict) and source.get("type") in {"url", "file", "base64"}


def _left_as(source: Part) -> str:
    if source["type"] == "url" and urlsplit(source.get("url", "")).scheme in {"", "file"}:
        return "path"
    return str(source["type"])


def _ids(step: Step) -> np.ndarray:
    """[L] Return the tokens of a step's prompt + response."""
    return np.concatenate([_parsed(step.prompt_token_ids), _parsed(step.response_ids)])


def _parsed(ids: Ids) -> np.ndarray:
    return parse_ids([ids])[0] if isinstance(ids, bytes) else np.asarray(ids)
