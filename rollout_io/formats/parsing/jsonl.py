"""Typed JSON lines; every defect of a line becomes one error with its place."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeVar

import msgspec

from rollout_io.dataset.opening import read_input
from schemas.errors import RolloutError

T = TypeVar("T")

UNREADABLE = "unreadable_record"
MAX_LINE_BYTES = 1 << 30
"""Limit on the length of a line."""

_MISMATCH = re.compile(r"Expected (?P<expected>.+), got (?P<got>.+?)(?: - at `(?P<path>.+)`)?")


class Line(NamedTuple):
    """One line that is not blank."""

    number: int
    offset: int
    content: bytes


def read_lines(file: BinaryIO) -> Iterator[Line]:
    """Yield the lines of a file with numbers (from 1) and byte offsets; blank lines are skipped.

    A longer line than `MAX_LINE_BYTES` is cut off behind that limit, so that it is not valid JSON.
    """
    offset, number = 0, 0
    while content := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if not content.isspace():
            yield Line(number, offset, content)
        offset += len(content)
        while len(content) > MAX_LINE_BYTES and not content.endswith(b"\n"):
            content = file.readline(MAX_LINE_BYTES + 1)
            offset += len(content)


def decode_line(decoder: msgspec.json.Decoder[T], content: bytes, where: str) -> T:
    """Decode one line.

    Raises:
        RolloutError: `json_line` (not JSON, or not UTF-8) or `record_type` (a field is missing or
            has the wrong type; the message has its JSON path).
    """
    try:
        return decoder.decode(content)
    except UnicodeDecodeError:
        refuse_not_utf8(content, where)
        raise
    except msgspec.ValidationError as error:
        raise type_error(error, where) from None
    except msgspec.DecodeError as error:
        raise _syntax_error(error, content, where) from None
    except RecursionError:
        got, expected = "lists or objects nested too deeply", "one whole JSON object a line"
        hint = "no engine writes such a line: is the file a log?"
        raise RolloutError("json_line", where, got, expected, hint) from None


@contextmanager
def contained(where: str) -> Iterator[None]:
    """Convert any error that a record's content causes to an error of this record.

    Errors of the file system pass through: they do not concern a single record.

    Raises:
        RolloutError: The original one, or `unreadable_record`.
    """
    try:
        yield
    except (RolloutError, OSError):
        raise
    except Exception as error:
        got = " ".join(f"content that raises {type(error).__name__}: {error}".split())
        hint = "report it, with the record: its reader should name what is wrong"
        raise RolloutError(UNREADABLE, where, got, "a record of the format", hint) from error


def refuse_not_utf8(content: bytes, where: str) -> None:
    """Raise an error for a record that is not UTF-8; `decode_line` checks only decoded fields.

    Raises:
        RolloutError: json_line.
    """
    if content.isascii():
        return
    try:
        content.decode()
    except UnicodeDecodeError as error:
        got = f"an invalid byte 0x{content[error.start]:02x} in column {error.start + 1}"
        hint = "the file is not UTF-8: re-encode it, or write it again"
        raise RolloutError("json_line", where, got, "UTF-8 text", hint) from None


def refuse_lfs_pointer(content: bytes, where: str) -> None:
    """Raise an error for a Git LFS pointer, which replaces a large file until it is fetched."""
    if content.startswith(b"version https://git-lfs"):
        got = f"a Git LFS pointer of {len(content)} bytes, not the file itself"
        raise RolloutError("lfs_pointer", where, got, "its content", "git lfs pull")


def read_document(decoder: msgspec.json.Decoder[T], path: Path) -> tuple[T, int]:
    """Decode a file that is one JSON document; return its size in bytes as well.

    Raises:
        RolloutError: `input_file`, `lfs_pointer`, `json_document`, or `record_type`.
    """
    content = read_input(path)
    refuse_lfs_pointer(content, str(path))
    try:
        refuse_not_utf8(content, str(path))
        return decode_line(decoder, content, str(path)), len(content)
    except RolloutError as error:
        if error.rule != "json_line":
            raise
        got = error.got.replace("a line cut off", "a file cut off")
        hint = "the writer was stopped, or the file is of another format: write or copy it again"
        raise RolloutError("json_document", str(path), got, "one JSON document", hint) from None


def type_error(error: msgspec.ValidationError, where: str) -> RolloutError:
    """Return the error for a field that is missing or has the wrong type."""
    hint = "see docs/formats.md for the fields of the format"
    match = _MISMATCH.fullmatch(str(error))
    if match is None:
        text, _, path = str(error).partition(" - at ")
        got = f"{text[0].lower()}{text[1:]}" + (f" in {path}" if path else "")
        return RolloutError("record_type", where, got, hint=hint)
    place = f"{where}, {match['path'].strip('`')}" if match["path"] else where
    return RolloutError("record_type", place, match["got"], match["expected"], hint)


def _syntax_error(error: msgspec.DecodeError, content: bytes, where: str) -> RolloutError:
    expected = "one whole JSON object a line"
    if "truncated" in str(error):
        got = f"a line cut off after {len(content.rstrip())} bytes"
        hint = "the writer was stopped mid-line: repair the line from its source, or delete it"
        return RolloutError("json_line", where, got, expected, hint)
    text = re.sub(r" \(byte (\d+)\)", lambda m: f" in column {int(m[1]) + 1}", str(error))
    got = text.removeprefix("JSON is malformed: ")
    return RolloutError("json_line", where, got, expected, "JSON has no NaN and no comments")
