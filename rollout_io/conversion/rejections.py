"""Rejected records: a line of `rejected.jsonl` each, with where they were, why, and what they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from rollout_io.adapters import Place, Rejected
from schemas.errors import RolloutError

_ERROR = ("rule", "where", "got", "expected", "hint")


def encode(rejected: Rejected) -> dict[str, Any]:
    """As JSON; `decode` reads it."""
    place, error = rejected
    found = {name: getattr(error, name) for name in _ERROR}
    return {"place": [str(place.path), place.where, place.offset, place.num_bytes], "error": found}


def decode(values: dict[str, Any]) -> Rejected:
    """What `encode` wrote."""
    path, where, offset, num_bytes = values["place"]
    error = RolloutError(*(values["error"][name] for name in _ERROR))
    return Rejected(Place(Path(path), where, offset, num_bytes), error)


def lines(rejections: Iterable[Rejected]) -> Iterator[bytes]:
    r"""The lines of `rejected.jsonl`.

    `source` is the record's place, `where` that of the fault; `record` is its text, bytes that are
    not UTF-8 written as `\xNN`; null where the record is no range of bytes (a directory, a part
    of a document).
    """
    for place, error in rejections:
        record = None if place.offset is None else _bytes_of(place)
        text = None if record is None else record.decode(errors="backslashreplace")
        found = {name: getattr(error, name) for name in _ERROR}
        yield msgspec.json.encode({"source": place.where, **found, "record": text}) + b"\n"


def _bytes_of(place: Place) -> bytes:
    with place.path.open("rb") as file:
        file.seek(place.offset or 0)
        return file.read(place.num_bytes)
