"""Rejected records as lines of `rejected.jsonl`, each with location, error and content."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from rollout_io.dataset.opening import open_input
from rollout_io.formats.base import Place, Rejected
from schemas import errors

_TOLD_BYTES = 64 << 20  # longer records are not copied


def encode(rejected: Rejected) -> dict[str, Any]:
    """Return a JSON-serialisable dict; `decode` reads it."""
    place, error = rejected
    at = [str(place.path), place.where, place.offset, place.num_bytes]
    return {"place": at, "error": errors.encode(error)}


def decode(values: dict[str, Any]) -> Rejected:
    """Parse the output of `encode`."""
    path, where, offset, num_bytes = values["place"]
    place = Place(Path(path), where, offset, num_bytes)
    return Rejected(place, errors.decode(values["error"]))


def lines(rejections: Iterable[Rejected]) -> Iterator[bytes]:
    r"""Yield the lines of `rejected.jsonl`.

    `source` is the location of the record, `where` that of the error, and `record` the text of the
    record, with bytes that are not UTF-8 written as `\xNN`. `record` is null if the record is not a
    range of bytes (a directory, or part of a document), or is longer than 64 MiB.
    """
    for place, error in rejections:
        is_told = place.offset is not None and place.num_bytes <= _TOLD_BYTES
        record = _bytes_of(place) if is_told else None
        text = None if record is None else record.decode(errors="backslashreplace")
        told = {"source": place.where, **error.fields(), "record": text}
        yield msgspec.json.encode(told) + b"\n"


def _bytes_of(place: Place) -> bytes:
    with open_input(place.path) as file:
        file.seek(place.offset or 0)
        return file.read(place.num_bytes)
