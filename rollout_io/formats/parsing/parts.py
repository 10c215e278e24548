"""Places of records that are lines of a file or parts of a document."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import msgspec

from rollout_io.formats.base import Place
from rollout_io.formats.parsing.jsonl import decode_line, refuse_not_utf8, without_lone_surrogates
from rollout_io.formats.parsing.records import read_record

T = TypeVar("T")


def parts_of(
    place: Place, document: bytes, name: str, parts: Sequence[msgspec.Raw]
) -> Iterator[Place]:
    """Yield the location of each element of a list in a document; each element is a record.

    Args:
        place: Location of the document.
        document: Content of the document.
        name: Name of the list.
        parts: Raw elements of the list, in order.
    """
    document, end = without_lone_surrogates(document), 0  # as decoded: offsets are the same
    for i, part in enumerate(parts):
        start = document.index(bytes(part), end)
        end = start + len(bytes(part))
        yield Place(place.path, f"{place.where}, {name}[{i}]", start, end - start)


def decode_record(decoder: msgspec.json.Decoder[T], place: Place) -> T:
    """Decode a line, or part of a document.

    Raises:
        InputError: Any error of `read_record` or `decode_line`.
    """
    record = read_record(place)
    refuse_not_utf8(record, place.where)
    return decode_line(decoder, record, place.where)
