"""Lines of logs: reading them, reading them again, and detection of copied or damaged ones."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec

from rollout_io.dataset.opening import open_input
from rollout_io.formats.base import Input, Place, Progress, Rejected
from rollout_io.formats.parsing.jsonl import read_lines, refuse_lfs_pointer
from rollout_io.formats.parsing.media import slimmed
from schemas.errors import InputError, RolloutError

DUPLICATE = "duplicate_record"
INCOMPLETE = "incomplete_trajectory"
_BLANK_BYTES = 2  # a line end, which the last line may lack
_TOLD_BYTES = 1 << 20
"""Progress is reported per MiB: a call per line would take as long as reading the line."""

_TEXT_DECODER = msgspec.json.Decoder(str)


class Record(NamedTuple):
    """A line of a log, with its location."""

    place: Place
    content: bytes


def read_record(place: Place) -> bytes:
    """Read the bytes of a record; while a dataset is written, its pictures are stored (`slimmed`)."""
    assert place.offset is not None
    file = _descriptor(place.path)  # keeps the file open: another thread may clear the cache
    content = os.pread(file.number, place.num_bytes, place.offset)
    if len(content) != place.num_bytes:
        finding = "the file shrank while it was being read"
        hint = "convert the log after its writer has finished"
        raise InputError("input_file", place.where, finding, hint=hint)
    return slimmed(content, place.path.parent)


class _Descriptor:
    """A file that is closed when the last reference is gone."""

    def __init__(self, path: Path) -> None:
        self._file = open_input(path)
        self.number = self._file.fileno()

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()


@lru_cache(maxsize=16)
def _descriptor(path: Path) -> _Descriptor:
    return _Descriptor(path)


def close_files() -> None:
    """Close the files that `read_record` keeps open, because others may have replaced them."""
    _descriptor.cache_clear()


def lines_of(inputs: Sequence[Input], progress: Progress) -> Iterator[tuple[Place, bytes]]:
    """Yield the non-blank lines of all inputs, each with its location."""
    close_files()
    for name, path in inputs:
        num_reported = 0
        with open_input(path) as file:
            for number, offset, content in read_lines(file):
                if number == 1:
                    refuse_lfs_pointer(content, name)
                yield Place(path, f"{name}:{number}", offset, len(content)), content
                if offset - num_reported >= _TOLD_BYTES:
                    progress(offset - num_reported)
                    num_reported = offset
            progress(file.tell() - num_reported)


def without_copies(places: Sequence[Place]) -> tuple[list[Place], list[Rejected]]:
    """Separate lines from copies of an earlier line, which get a `duplicate_record` error.

    Only lines of similar size are read again; trailing whitespace is ignored.
    """
    sizes = sorted(place.num_bytes for place in places)
    twins = {size for pair in pairwise(sizes) if pair[1] - pair[0] <= _BLANK_BYTES for size in pair}
    first: dict[bytes, str] = {}
    distinct: list[Place] = []
    copies: list[Rejected] = []
    for place in places:
        try:
            if place.num_bytes in twins:
                refuse_repeated(read_record(place).rstrip(), place.where, first)
            distinct.append(place)
        except RolloutError as error:
            copies.append(Rejected(place, error))
    return distinct, copies


def refuse_repeated(content: bytes, where: str, first: dict[bytes, str]) -> None:
    """Refuse a byte-for-byte copy of a record in `first` (digest: location), and add the record."""
    other = first.setdefault(hashlib.blake2b(content, digest_size=16).digest(), where)
    if other != where:
        hint = "delete the copy, and check whether a file was appended to itself"
        raise InputError(DUPLICATE, where, f"the record is a copy of {other}", hint=hint)


def named_in(content: bytes, key: str) -> str | None:
    """Return the string under a key of a damaged record, if it is still readable."""
    match = re.search(rb'"%s"\s*:\s*("(?:[^"\\]|\\.)*")' % key.encode(), content)
    try:
        return match and _TEXT_DECODER.decode(match[1])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def incomplete(places: Iterable[Place], damage: RolloutError) -> Iterator[Rejected]:
    """Reject the intact records of a run with a damaged record: partial runs are never used."""
    finding = f"another record of the same run is damaged ({damage.rule}: {damage.where})"
    hint = "delete the damaged record if the run is complete without it"
    for place in places:
        yield Rejected(place, InputError(INCOMPLETE, place.where, finding, hint=hint))
