"""Records of line logs: their bytes read again, their places noted."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from rollout_io.adapters import Found, Input, Place, Progress, Rejected
from rollout_io.logs.jsonl import open_input, refuse_lfs_pointer, refuse_not_utf8
from schemas.errors import RolloutError

_TOLD_BYTES = 1 << 20
"""Progress is told by the megabyte: a call a line would take as long as finding its end."""


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


def lines_of(inputs: Sequence[Input], progress: Progress) -> Iterator[tuple[Place, bytes]]:
    """The lines of all inputs that are not blank, each with its place.

    Raises:
        RolloutError: `input_file`, `lfs_pointer`.
    """
    _descriptor.cache_clear()  # a path may be another file by now
    for name, path in inputs:
        offset = told = 0
        with open_input(path) as file:
            for number, content in enumerate(file, 1):
                num_bytes = len(content)
                if number == 1:
                    refuse_lfs_pointer(content, name)
                if not content.isspace():
                    yield Place(path, f"{name}:{number}", offset, num_bytes), content
                offset += num_bytes
                if offset - told >= _TOLD_BYTES:
                    progress(offset - told)
                    told = offset
            progress(offset - told)


def find_lines(
    inputs: Sequence[Input], progress: Progress, find: Callable[[Record], Found]
) -> Iterator[Found]:
    """What each line is, for `Adapter.find`; one that is of no use is rejected.

    Args:
        inputs: Files of JSON lines.
        progress: Told the bytes that were read.
        find: What a line is; raises `RolloutError` where it is nothing.
    """
    for place, content in lines_of(inputs, progress):
        try:
            refuse_not_utf8(content, place.where)
            yield find(Record(place, content))
        except RolloutError as error:
            yield Rejected(place, error)
