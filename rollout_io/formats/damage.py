"""Files that are damaged JSON: where they break, and what they would be if they ended there.

A document that was cut off, or that breaks in its middle, matches no format. Its beginning, with all
brackets closed, usually does: so the error tells what the file is and where it breaks.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from rollout_io.dataset.opening import open_input
from rollout_io.formats.parsing.jsonl import decode_document, decode_line, first_lines
from schemas.errors import InputError, RolloutError

_MAX_BYTES = 64 << 20
_MENDED_BYTES = 4 << 20
_ANY = msgspec.json.Decoder()
_TOKEN = re.compile(
    rb'\s*(?:("[^"\\]*(?:\\.[^"\\]*)*")|([{}\[\],:])|(-?\d[\d.eE+-]*(?=[\s,\]}])|true|false|null))',
    re.DOTALL,
)
_CLOSERS = {b"{": b"}", b"[": b"]"}
_OPENERS = {closer: opener for opener, closer in _CLOSERS.items()}


def mended(content: bytes) -> bytes | None:
    """Return the beginning of damaged JSON, with all brackets closed; None if it holds no value.

    Example:
        >>> mended(b'{"a": 1, "b": ["x", "cut o')
        b'{"a": 1, "b": ["x"]}'
        >>> mended(b"{name} is a template")
    """
    position, num_values, end, open_at_end = 0, 0, 0, b""
    stack, expected = b"", "value"
    while expected != "end" and (match := _TOKEN.match(content, position)) is not None:
        text, mark, other = match.groups()
        was_value = False
        if expected == "key" and text is not None:
            expected = "colon"
        elif mark == b":" and expected == "colon":
            expected = "value"
        elif mark == b"," and expected == "comma":
            expected = "key" if stack.endswith(b"{") else "value"
        elif mark in _CLOSERS and expected == "value":
            stack += mark or b""
            expected = "key" if mark == b"{" else "value"
            end, open_at_end = match.end(), stack
        elif mark in _OPENERS and stack.endswith(_OPENERS[mark]) and expected != "colon":
            stack = stack[:-1]
            was_value = True
        elif (text or other) and expected == "value":
            was_value = True
            num_values += 1
        else:
            break
        position = match.end()
        if was_value:
            expected = "comma" if stack else "end"
            end, open_at_end = position, stack
    if not num_values:
        return None
    closers = b"".join(_CLOSERS[bytes([bracket])] for bracket in reversed(open_at_end))
    return content[:end] + closers


def damage_in(
    name: str, path: Path, formats_of: Callable[[Path], Sequence[str]]
) -> InputError | None:
    """Return the error for a file that is damaged JSON; None if it is something else."""
    for error, content in _broken(name, path):
        repaired = mended(content)
        if repaired is None:
            continue
        likely = _formats_of(repaired, path, formats_of)
        looks = f"; it looks like {' or '.join(likely)}" if likely else ""
        return error.with_got(f"{error.got}{looks}")
    return None


def _formats_of(
    content: bytes, path: Path, formats_of: Callable[[Path], Sequence[str]]
) -> Sequence[str]:
    with tempfile.TemporaryDirectory() as folder, suppress(OSError, RolloutError):
        copy = Path(folder) / path.name
        copy.write_bytes(content)
        return formats_of(copy)
    return ()


def _broken(name: str, path: Path) -> Iterator[tuple[InputError, bytes]]:
    """Yield the error of the document, or of its first damaged line, with the text up to there."""
    lines = list(first_lines(path))
    if not lines or not lines[0].lstrip().startswith((b"{", b"[")):
        return
    if _error_of(lines[0], name, decode_line) is not None:
        with open_input(path) as file:
            content = file.read(_MAX_BYTES)
        error = _error_of(content, name, decode_document)
        if error is None:
            return  # a sound document
        repaired = mended(content[:_MENDED_BYTES]) or b""
        is_one_line = b"\n" not in content.strip() and path.suffix != ".jsonl"
        if is_one_line or b"\n" in repaired.strip():  # the first value goes on after its first line
            yield error, content[:_MENDED_BYTES]
            return
    for number, line in enumerate(lines, 1):
        error = _error_of(line, f"{name}:{number}", decode_line)
        if error is not None:
            yield error, line[:_MENDED_BYTES]


def _error_of(content: bytes, where: str, decode: Callable[..., Any]) -> InputError | None:
    try:
        decode(_ANY, content, where)
    except InputError as error:
        return error
    return None
