"""Files that are recognized but rejected: formats without conversations, and damaged JSON.

The error of a refused format says what to convert instead. A document that was cut off, or that breaks in
its middle, matches no format. Its beginning, with all brackets closed, usually does: so the error tells
what the file is and where it breaks.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from rollout_io.dataset.opening import open_input
from rollout_io.formats.base import Adapter, Options, Place, Run
from rollout_io.formats.engines.records import Records
from rollout_io.formats.parsing.jsonl import decode_document, decode_line, first_lines
from schemas.errors import InputError, RolloutError


def _refused(summary: str, describe: Callable[[Any], str | None], hint: str) -> Adapter:
    """Return an adapter that rejects every record of its logs.

    `describe` returns what a record is, for errors; None if it is no record of the format.
    """

    def run(record: Any, place: Place) -> NoReturn:
        finding = describe(record) or "the record has no conversation"
        raise InputError("no_conversation", place.where, finding, hint=hint)

    adapter = Records(
        records={"": Any},
        run=run,
        read=_never_read,
        is_record=lambda value: any(describe(part) is not None for part in _parts(value)),
        elements="results",
    ).adapter(summary)
    return replace(adapter, contents=None)


def _parts(value: Any) -> list[Any]:
    results = value.get("results") if isinstance(value, Mapping) else None
    return results if isinstance(results, list) and results else [value]


def _never_read(_: Any, run: Run, __: Options) -> NoReturn:
    raise AssertionError(f"{run.places[0].where}: every record is rejected when it is found")


def _terminal_bench(record: Any) -> str | None:
    names = {"trial_name", "task_id", "is_resolved"}
    if not isinstance(record, Mapping) or not names <= record.keys():
        return None
    resolved = json.dumps(record["is_resolved"])[:80]
    mode = " ".join(str(record.get("failure_mode") or "unset").split())[:80]
    trial = str(record["trial_name"])
    state = f"(is_resolved {resolved}, failure_mode {mode})"
    return f"the result of trial {trial!r} has no conversation {state}"


def _agents_sdk_trace(record: Any) -> str | None:
    is_trace = isinstance(record, Mapping) and record.get("object") in {"trace", "trace.span"}
    return "the trace of OpenAI's Agents SDK has no texts" if is_trace else None


REFUSED = {
    "openai_agents_trace": _refused(
        "traces of OpenAI's Agents SDK: recognized but rejected, since they have no texts",
        _agents_sdk_trace,
        "convert the run's saved state or items, or traces of OpenInference or OpenTelemetry",
    ),
    "terminal_bench": _refused(
        "Terminal-Bench 1 results: recognized but rejected, since they have no conversation",
        _terminal_bench,
        "convert the agent's logs (sessions/ and agent-logs/ of the trial) with --rewards",
    ),
}


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
