"""Records of files that are JSON Lines or one JSON document, whatever their names say."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rollout_io.dataset.opening import open_input, read_input
from rollout_io.formats.base import Found, Input, Place, Progress, Rejected
from rollout_io.formats.parsing.jsonl import (
    contained,
    decode_document,
    decode_line,
    decoded,
    first_lines,
    refuse_lfs_pointer,
    refuse_not_utf8,
)
from rollout_io.formats.parsing.lines import Record, lines_of
from schemas.errors import RolloutError

T = TypeVar("T")
_ANY: msgspec.json.Decoder[Any] = msgspec.json.Decoder()
_MAX_DOCUMENT_BYTES = 1 << 26
"""Largest document that detection decodes completely."""


def find_records(
    inputs: Sequence[Input], progress: Progress, find: Callable[[Record], Iterator[Found]]
) -> Iterator[Found]:
    """Find the runs in each line or document, for `Adapter.find`; unusable records are rejected.

    Args:
        inputs: Files of JSON Lines, or of one JSON document each.
        progress: Called with the numbers of bytes read.
        find: Yields the runs of a record; raises `RolloutError` if it cannot be used.
    """
    for record in _records(inputs, progress):
        place = record.place
        try:
            refuse_lfs_pointer(record.content, place.where)
            refuse_not_utf8(record.content, place.where)
            with contained(place.where):
                found = list(find(record))
            yield from found
        except RolloutError as error:
            yield Rejected(place, error)


def _records(inputs: Sequence[Input], progress: Progress) -> Iterator[Record]:
    for given in inputs:
        if is_document(given.path):
            content = read_input(given.path)
            progress(len(content))
            yield Record(Place(given.path, given.name, 0, len(content)), content)
        else:
            for place, content in lines_of([given], progress):
                yield Record(place, content)


def is_document(path: Path) -> bool:
    """True if a file is one JSON document over several lines, or no JSON at all."""
    return all(_value(line) is None for line in first_lines(path))


def decode_record(record: Record, decoder: msgspec.json.Decoder[T] = _ANY) -> T:
    """Decode a record.

    Raises:
        InputError: `json_line`, or for a document `json_document`: the record is not JSON;
            `record_type`: a field is missing or has the wrong type.
    """
    decode = decode_document if is_document(record.place.path) else decode_line
    return decode(decoder, record.content, record.place.where)


def first_values(path: Path) -> list[Any]:
    """Return the lines among the first 8 that are JSON, or the document; for `Adapter.recognizes`."""
    found = [value for line in first_lines(path) if (value := _value(line)) is not None]
    try:
        if found or not path.is_file() or path.stat().st_size > _MAX_DOCUMENT_BYTES:
            return found
        with open_input(path) as file:
            content = file.read()
    except (OSError, RolloutError):
        return []
    value = _value(content)
    return [] if value is None else [value]


def _value(content: bytes) -> Any:
    if not content.lstrip().startswith((b"{", b"[")):
        return None
    try:
        return decoded(_ANY, content)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
