"""Records of files that are JSON Lines or one JSON document, whatever their names say."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from rollout_io.dataset.opening import read_input
from rollout_io.formats.base import Found, Input, Place, Progress, Rejected
from rollout_io.formats.parsing.jsonl import (
    contained,
    decode_document,
    decode_line,
    refuse_lfs_pointer,
    refuse_not_utf8,
)
from rollout_io.formats.parsing.lines import Record, lines_of
from rollout_io.formats.start import Start
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
        if Start(given.path).is_document:
            content = read_input(given.path)
            progress(len(content))
            yield Record(Place(given.path, given.name, 0, len(content)), content)
        else:
            for place, content in lines_of([given], progress):
                yield Record(place, content)


def decode_record(record: Record, decoder: msgspec.json.Decoder[T] = _ANY) -> T:
    """Decode a record.

    Raises:
        InputError: `json_line`, or for a document `json_document`: the record is not JSON;
            `record_type`: a field is missing or has the wrong type.
    """
    decode = decode_document if Start(record.place.path).is_document else decode_line
    return decode(decoder, record.content, record.place.where)
