"""Records of line logs: their bytes read again, their places noted."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from rollout_io.adapters import Found, Input, Place, Progress, Rejected
from rollout_io.adapters.jsonl import open_input, read_lines, refuse_lfs_pointer, refuse_not_utf8
from schemas.errors import RolloutError


class Record(NamedTuple):
    """A line and where it is."""

    place: Place
    content: bytes


def read_record(place: Place) -> bytes:
    """The bytes of a record.

    Raises:
        RolloutError: `input_file`: it is not there any more.
    """
    assert place.offset is not None
    content = os.pread(_descriptor(place.path).number, place.num_bytes, place.offset)
    if len(content) != place.num_bytes:
        got, hint = "fewer bytes than a moment ago", "convert a log that nobody writes"
        raise RolloutError("input_file", place.where, got, "an unchanged file", hint)
    return content


class _Descriptor:
    """A file that is closed when nobody needs it."""

    def __init__(self, path: Path) -> None:
        self._file = open_input(path)
        self.number = self._file.fileno()

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()


@lru_cache(maxsize=16)
def _descriptor(path: Path) -> _Descriptor:
    return _Descriptor(path)


def lines_of(inputs: Sequence[Input], progress: Progress) -> Iterator[Record]:
    """The lines of all inputs that are not blank.

    Raises:
        RolloutError: `input_file`, `lfs_pointer`.
    """
    for given in inputs:
        with open_input(given.path) as file:
            for line in read_lines(file):
                refuse_lfs_pointer(line.content, given.name)
                progress(len(line.content))
                where = f"{given.name}:{line.number}"
                yield Record(Place(given.path, where, line.offset, len(line.content)), line.content)


def find_lines(
    inputs: Sequence[Input], progress: Progress, find: Callable[[Record], Found]
) -> Iterator[Found]:
    """What each line is, for `Adapter.find`; one that is of no use is rejected.

    Args:
        inputs: Files of JSON lines.
        progress: Told the size of each line.
        find: What a line is; raises `RolloutError` where it is nothing.
    """
    for record in lines_of(inputs, progress):
        try:
            refuse_not_utf8(record.content, record.place.where)
            yield find(record)
        except RolloutError as error:
            yield Rejected(record.place, error)
