"""The start of an input: read once, and shown to every format that may recognize it."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Collection, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from rollout_io.dataset.opening import open_input, read_input
from rollout_io.formats.engines.containers import columns_of
from rollout_io.formats.parsing.jsonl import decoded, first_lines
from schemas.errors import RolloutError

_ANY: msgspec.json.Decoder[Any] = msgspec.json.Decoder()
_MAX_DOCUMENT_BYTES = 1 << 28
"""Largest document that detection decodes completely."""

_NO_JSON = object()
_ERRORS = (OSError, zipfile.BadZipFile, NotImplementedError, RuntimeError, ValueError, EOFError)
"""What a damaged zip archive raises."""


class Start:
    """What is at the start of a file or directory; each part is read when a format asks for it.

    Nothing here raises an error: the reader of a format reports what is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def is_file(self) -> bool:
        """True for a file."""
        return self.path.is_file()

    @cached_property
    def lines(self) -> list[bytes]:
        """The non-blank lines among the first 8."""
        return [*first_lines(self.path)]

    @cached_property
    def _line_values(self) -> list[Any]:
        return [_value(line) for line in self.lines]

    @cached_property
    def is_document(self) -> bool:
        """True if the file is one JSON document over several lines, or no JSON at all.

        A list with a record a line has lines that are JSON too, so a file whose first line is none
        is a document if all of it is one, or if that line only opens a list or an object, and is not
        the damaged first of several records.
        """
        values = self._line_values
        if not values or values[0] is not _NO_JSON:
            return not values
        first, second = self.lines[0].strip(), b"".join(self.lines[1:2]).strip()
        if first == b"{":  # what follows in an object is a key
            is_open = second[:1] in {b"", b'"', b"}"}
        else:  # what follows in a list ends with a comma, or is the last
            is_open = first == b"[" and (len(values) < 3 or _NO_JSON in values[1:3])
        is_broken = all(value is _NO_JSON for value in values)
        return is_open or is_broken or self._whole is not _NO_JSON

    @cached_property
    def _whole(self) -> Any:
        try:
            if not self.is_file or self.path.stat().st_size > _MAX_DOCUMENT_BYTES:
                return _NO_JSON
            return _value(read_input(self.path))
        except (OSError, RolloutError):
            return _NO_JSON

    @cached_property
    def values(self) -> list[Any]:
        """The lists and objects among the first 8 lines, or the document if the file is one."""
        values = [self._whole] if self.is_document else self._line_values
        return [value for value in values if value is not _NO_JSON]

    @property
    def records(self) -> Iterator[dict[str, Any]]:
        """The objects among `values`."""
        return (value for value in self.values if isinstance(value, dict))

    @cached_property
    def document(self) -> Any:
        """The only value of a file that is one JSON document, on one line or more; else None."""
        is_one_line = len(self.lines) == 1 == len(self.values)
        return self.values[0] if (self.is_document and self.values) or is_one_line else None

    @cached_property
    def tables(self) -> dict[str, set[str]]:
        """Columns of each table of a SQLite database; empty for any other file."""
        return columns_of(self.path) if self.is_file else {}

    @cached_property
    def head(self) -> bytes:
        """The first 64 KiB of a file."""
        try:
            if not self.is_file:
                return b""
            with open_input(self.path) as file:
                return file.read(1 << 16)
        except (OSError, RolloutError):
            return b""

    @cached_property
    def torch_pickle(self) -> bytes:
        """The first MiB of the pickle in a file of torch.save, which is a zip archive; else empty."""
        try:
            with zipfile.ZipFile(self.path) as archive:
                names = [n for n in archive.namelist() if n.rpartition("/")[2] == "data.pkl"]
                with archive.open(names[0]) as file:
                    return file.read(1 << 20)
        except (*_ERRORS, IndexError):
            return b""

    def below(self, pattern: str) -> list[Path]:
        """Return the files of a directory that match a pattern; empty for a file."""
        if self.is_file or not pattern:
            return []
        return sorted(self.path.glob(pattern))


def _value(content: bytes) -> Any:
    if not content.lstrip().startswith((b"{", b"[")):
        return _NO_JSON
    try:
        return decoded(_ANY, content)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return _NO_JSON


def like(*patterns: Any) -> Callable[[Any], bool]:
    """Return a test for `is_record`: a decoded value has one of these forms.

    A pattern is a type, a set of values, a dictionary with a pattern for each key (None: the key is
    absent), or a list with the pattern of all its elements; anything else is a value.

    Example:
        >>> is_head = like(
        ...     {"type": {"session", "fork"}, "id": str, "message": None, "tools": [{"name": str}]}
        ... )
        >>> (
        ...     is_head({"type": "fork", "id": "1", "tools": []}),
        ...     is_head({"type": "fork", "id": 1, "tools": []}),
        ... )
        (True, False)
    """
    return lambda value: any(_fits(value, pattern) for pattern in patterns)


def _fits(value: Any, pattern: Any) -> bool:
    if isinstance(pattern, type):
        return isinstance(value, pattern)
    if isinstance(pattern, dict):
        return isinstance(value, dict) and all(
            key not in value if part is None else key in value and _fits(value[key], part)
            for key, part in pattern.items()
        )
    if isinstance(pattern, list):
        return isinstance(value, list) and all(_fits(part, pattern[0]) for part in value)
    if isinstance(pattern, Collection) and not isinstance(pattern, str):
        return isinstance(value, str) and value in pattern
    return bool(value == pattern)
