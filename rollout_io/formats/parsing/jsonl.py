"""Decoding of typed JSON lines and documents, with errors that name the location of the defect."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from mmap import mmap
from pathlib import Path
from typing import BinaryIO, NamedTuple, Self, TypeVar

import msgspec

from rollout_io.dataset.opening import open_input, read_input
from rollout_io.formats.base import note_run
from schemas.errors import InputError, RolloutError, count

T = TypeVar("T")

_NUM_LINES = 8  # a damaged first line must not hide the format
_LINE_BYTES = 64 << 20
UNREADABLE = "unreadable_record"
MAX_LINE_BYTES = 1 << 30
"""Limit on the length of a line."""

_MISMATCH = re.compile(r"Expected (?P<expected>.+), got (?P<got>.+?)(?: - at `(?P<path>.+)`)?")

_WORDS = {
    "str": "a string",
    "int": "a number",
    "float": "a number",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
}
_ENDS_LIKE_A_LINE = re.compile(r":[0-9]+$")


class WrongType(InputError):
    """A field is missing or has the wrong type; the documentation lists the fields of the format."""

    def of(self, format_name: str) -> Self:
        """Return the error with a hint to the page of a format."""
        return self.at(self.where, _fields_hint(f"/{format_name}"))


def _fields_hint(page: str = "") -> str:
    return f"see docs/formats{page}.md for the fields of the format"


SURROGATES = "runs with lone surrogates (halves of a character), each read as U+FFFD"

_ESCAPES = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)
"""All escapes, so that the backslash of one is never taken for the start of the next."""

NESTED = "lists or objects are nested too deeply"
_NESTED_HINT = "check the file: no engine nests JSON this deeply"


class _Unit(NamedTuple):
    """Wording of errors about a line or a document."""

    name: str
    error_id: str
    hint: str
    position: Callable[[int], str]


_LINE = _Unit(
    "line",
    error_id="json_line",
    hint="repair the line from its source, or delete it",
    position=lambda offset: f"at column {offset + 1}",
)
_DOCUMENT = _Unit(
    "file",
    error_id="json_document",
    hint="write or copy the file again",
    position=lambda offset: f"at byte {offset}",
)


class Line(NamedTuple):
    """A non-blank line."""

    number: int
    offset: int
    content: bytes


def read_lines(file: BinaryIO) -> Iterator[Line]:
    """Yield the lines of a file with numbers (from 1) and byte offsets; blank lines are skipped.

    A line longer than `MAX_LINE_BYTES` is cut off after that limit, so it is not valid JSON.
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


def first_lines(path: Path) -> Iterator[bytes]:
    """Yield the non-blank lines among the first 8 of a file; nothing if the file is unreadable.

    A line longer than 64 MiB is cut off at that length, and no further line is read.
    """
    try:
        if not path.is_file():
            return
        with open_input(path) as file:
            for _ in range(_NUM_LINES):
                line = file.readline(_LINE_BYTES)
                if line.strip():
                    yield line
                if not line.endswith(b"\n"):
                    return
    except (OSError, RolloutError):
        return


def decode_line(decoder: msgspec.json.Decoder[T], content: bytes, where: str) -> T:
    """Decode one line.

    Raises:
        InputError: `json_line`: the line is not JSON or not UTF-8; `record_type`: a field is
            missing or has the wrong type (the message contains its JSON path).
    """
    return _decode(decoder, content, where, _LINE)


def decode_document(decoder: msgspec.json.Decoder[T], content: bytes, where: str) -> T:
    """Decode a JSON document.

    Raises:
        InputError: `json_document`: the document is not JSON or not UTF-8; `record_type`: see
            `decode_line`.
    """
    refuse_not_utf8(content, where, _DOCUMENT)
    return _decode(decoder, content, where, _DOCUMENT)


def decoded(decoder: msgspec.json.Decoder[T], content: bytes | mmap) -> T:
    r"""Decode JSON in which escaped surrogates may be lone; these become U+FFFD, as in browsers.

    The run that is being read is noted (`SURROGATES`).

    Raises:
        msgspec.MsgspecError, UnicodeDecodeError, RecursionError: The content cannot be decoded.

    Example:
        >>> decoded(msgspec.json.Decoder(), rb'["cut \ud83d", "\ud83d\ude00"]')
        ['cut \ufffd', '😀']
    """
    try:
        return decoder.decode(content)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        repaired = without_lone_surrogates(bytes(content))
        if repaired == bytes(content):
            raise
        value = decoder.decode(repaired)
        note_run(SURROGATES)
        return value


def without_lone_surrogates(content: bytes) -> bytes:
    """Replace escapes of lone surrogates in JSON by those of U+FFFD; no length or offset changes."""
    if b"\\ud" not in content and b"\\uD" not in content:
        return content
    return _ESCAPES.sub(lambda match: b"\\ufffd" if match[1] else match[0], content)


def _decode(decoder: msgspec.json.Decoder[T], content: bytes, where: str, unit: _Unit) -> T:
    try:
        return decoded(decoder, content)
    except UnicodeDecodeError:
        refuse_not_utf8(content, where, unit)
        raise
    except msgspec.ValidationError as error:
        is_whole = unit is _DOCUMENT or _ENDS_LIKE_A_LINE.search(where) is not None
        raise type_error(error, where, unit.name if is_whole else None) from None
    except msgspec.DecodeError as error:
        raise _syntax_error(error, content, where, unit) from None
    except RecursionError:
        raise InputError(unit.error_id, where, NESTED, hint=_NESTED_HINT) from None


@contextmanager
def contained(where: str) -> Iterator[None]:
    """Convert an unexpected exception while reading a record to an error of that record."""
    try:
        yield
    except (RolloutError, OSError):
        raise
    except msgspec.ValidationError as error:  # of a part that is decoded by itself
        raise type_error(error, where) from None
    except RecursionError:
        raise InputError(_LINE.error_id, where, NESTED, hint=_NESTED_HINT) from None
    except OverflowError:
        finding, expected = "a number that no float holds", "a smaller number"
        raise WrongType("record_type", where, finding, expected, _fields_hint()) from None
    except Exception as error:
        finding = " ".join(
            f"reading the record failed with {type(error).__name__}: {error}".split()
        )
        hint = "report this as a bug, and attach the record"
        raise InputError(UNREADABLE, where, finding, hint=hint) from error


def refuse_not_utf8(content: bytes, where: str, unit: _Unit = _LINE) -> None:
    """Raise an error for a record that is not UTF-8; `decode_line` only checks decoded fields."""
    if content.isascii():
        return
    try:
        content.decode()
    except UnicodeDecodeError as error:
        byte, place = content[error.start], unit.position(error.start)
        finding = f"invalid UTF-8: 0x{byte:02x} {place}"
        raise InputError(
            unit.error_id, where, finding, hint="re-encode the file as UTF-8"
        ) from None


def refuse_lfs_pointer(content: bytes, where: str) -> None:
    """Raise an error for a Git LFS pointer, which replaces a large file until it is fetched."""
    if content.startswith(b"version https://git-lfs"):
        finding = f"the file is a Git LFS pointer ({len(content)} bytes), not the actual data"
        raise InputError("lfs_pointer", where, finding, hint="fetch the file with `git lfs pull`")


def read_document(decoder: msgspec.json.Decoder[T], path: Path) -> tuple[T, int]:
    """Decode a file that is one JSON document; return the value and the file's size in bytes."""
    content = read_input(path)
    refuse_lfs_pointer(content, str(path))
    return decode_document(decoder, content, str(path)), len(content)


def type_error(error: msgspec.ValidationError, where: str, whole: str | None = None) -> WrongType:
    """Return the error for a field that is missing or has the wrong type."""
    hint = _fields_hint()
    match = _MISMATCH.fullmatch(str(error))
    if match is None:
        text, _, path = str(error).partition(" - at ")
        finding = f"{text[0].lower()}{text[1:]}" + (f" in {path}" if path else "")
        return WrongType("record_type", where, finding, hint=hint)
    if whole and not match["path"]:
        finding, expected = (_WORDS.get(match[n].strip("`"), match[n]) for n in ("got", "expected"))
        return WrongType("record_type", where, f"{finding} as the entire {whole}", expected, hint)
    place = f"{where}, {match['path'].strip('`')}" if match["path"] else where
    return WrongType("record_type", place, match["got"], match["expected"], hint)


def _syntax_error(
    error: msgspec.DecodeError, content: bytes, where: str, unit: _Unit
) -> InputError:
    if "truncated" in str(error):
        finding = f"the {unit.name} is cut off after {count(len(content.rstrip()), 'byte')}"
        return InputError(unit.error_id, where, finding, hint=unit.hint)
    text = re.sub(r" \(byte (\d+)\)", lambda m: f" {unit.position(int(m[1]))}", str(error))
    finding = f"invalid JSON: {text.removeprefix('JSON is malformed: ')}"
    hint = f"repair the {unit.name}: JSON allows neither NaN nor comments"
    return InputError(unit.error_id, where, finding, hint=hint)
