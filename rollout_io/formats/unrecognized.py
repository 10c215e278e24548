"""Logs that no format reads: recognized but rejected ones, damaged JSON, and model calls under other names.

The error of a rejected format says what to convert instead. A document that was cut off, or that breaks in
its middle, matches no format. Its beginning, with all brackets closed, usually does: so the error tells
what the file is and where it breaks. If a log has the bodies of model calls, the error says how to map them.
"""

from __future__ import annotations

import json
import re
import shlex
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from operator import eq
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from rollout_io.dataset.opening import open_input
from rollout_io.formats.base import Adapter, Options, Place, Run
from rollout_io.formats.dialects.bodies import value_of
from rollout_io.formats.engines.files import Start
from rollout_io.formats.engines.records import Records
from rollout_io.formats.grammar import like
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


_is_trace = like({"object": {"trace", "trace.span"}})


REFUSED = {
    "openai_agents_trace": _refused(
        "traces of OpenAI's Agents SDK: recognized but rejected, since they have no texts",
        lambda one: "the trace of OpenAI's Agents SDK has no texts" if _is_trace(one) else None,
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
        likely: Sequence[str] = ()
        with tempfile.TemporaryDirectory() as folder, suppress(OSError, RolloutError):
            copy = Path(folder) / path.name
            copy.write_bytes(repaired)
            likely = formats_of(copy)
        looks = f"; it looks like {' or '.join(likely)}" if likely else ""
        return type(error)(error.rule, error.where, f"{error.got}{looks}", hint=error.hint)
    return None


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


_REWARDS = frozenset(
    {
        *("reward", "score", "return", "outcome", "finalreward", "totalreward", "finalscore"),
        *("grade", "success", "passed", "correct", "iscorrect", "solved", "resolved"),
    }
)
_SESSIONS, _TASKS, _ATTEMPTS = (
    frozenset(name + end for name in names.split() for end in ("", "id", "name", "index"))
    for names in (
        "session conversation trajectory episode rollout run trace",
        "task problem question instance example",
        "attempt try trial repetition sample",
    )
)
_TIMES = frozenset({"time", "timestamp", "ts", "created", "createdat", "starttime", "startedat"})
_MOST_DEPTH, _MOST_KEYS, _MOST_RECORDS = 4, 64, 8
_UNMAPPABLE = re.compile(r"[.,=\[\]]")
_HAS_IDS = re.compile(r"token_ids\W+\d")
_RESPONSES: tuple[tuple[str, Collection[str], str], ...] = (
    ("choices", {"message", "delta", "text", "token_ids"}, "OpenAI completions"),
    ("output", {"type"}, "responses of OpenAI's Responses API"),
    ("content", {"type"}, "responses of Anthropic's Messages API"),
    ("candidates", {"content"}, "responses of Gemini's API"),
)
_MESSAGES: dict[str, Any] = {
    "messages": list,
    "input": (list, str),
    "prompt": (list, str),
    "contents": list,
}
_OF_REQUEST = frozenset({"model", "temperature", "max_tokens", "tools", "stream"})


def response_kind(value: Any) -> str | None:
    """Return what a value is, if it is the response of an API.

    Example:
        >>> response_kind({"choices": [{"message": {"content": "4"}}]})
        'OpenAI completions'
    """
    if isinstance(value, str) and value.lstrip().startswith("data:"):  # a stream of events
        value = value.partition("data:")[2].partition("\n")[0].strip()
    value = value_of(value)
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        value = value[0] if "choices" in value[0] else None  # streamed chunks
    if not isinstance(value, Mapping) or value.get("role", "assistant") != "assistant":
        return None
    return next((k for key, names, k in _RESPONSES if _is_list_with(value.get(key), names)), None)


def is_request(value: Any) -> bool:
    """True for the request of a model call, or a list of messages."""
    value = value_of(value)
    if isinstance(value, Mapping):
        names = [name for name, kind in _MESSAGES.items() if isinstance(value.get(name), kind)]
        return bool(names) and (bool(_OF_REQUEST & value.keys()) or is_request(value[names[0]]))
    return _is_list_with(value, {"role"})


def _is_list_with(value: Any, names: Collection[str]) -> bool:
    return isinstance(value, list) and any(
        isinstance(element, Mapping) and not element.keys().isdisjoint(names) for element in value
    )


def look(start: Start) -> tuple[str, str] | None:
    """Return what the records of a file have, and the mapping that reads it, "" if none can.

    Without bodies of model calls, the result is None.

    Example:
        A record {"req": {"messages": [...]}, "resp": {"choices": [...]}, "score": 1.0}:

        >>> look(start)
        ('OpenAI completions under `resp`', 'request=req,response=resp,reward=score')
    """
    records = [r for value in start.values for r in (value if isinstance(value, list) else [value])]
    for place, record in enumerate(records[:_MOST_RECORDS]):
        values = dict(_values(record))
        answers = {
            path: k for path, inner in values.items() if path and (k := response_kind(inner))
        }
        if answers:
            path, kind = next(iter(answers.items()))
            ids = " with token ids" if _HAS_IDS.search(str(values[path])) else ""
            # Keys that the first record lacks, such as the reward of a last call.
            for other in records[place + 1 : _MOST_RECORDS]:
                values = dict(_values(other)) | {p: v for p, v in values.items() if v is not None}
            mapping = dict(_mapping(values, path))
            if not ids and "request" not in mapping:
                return f"{kind} under `{path}`, without requests or token ids", ""
            mapped = ",".join(f"{name}={at}" for name, at in mapping.items())
            return f"{kind}{ids} under `{path}`", shlex.quote(mapped)
    return None


def _mapping(values: Mapping[str, Any], response: str) -> Iterator[tuple[str, str]]:
    beside = {
        path: re.sub("[_-]", "", path.rpartition(".")[2]).lower()
        for path, value in values.items()
        if isinstance(value, str | int | float) and response.startswith(path.rpartition("[*]")[0])
    }
    labels = [p for p in beside if not isinstance(values[p], float | bool) and values[p] != ""]
    session, task, attempt = (
        next((path for path in labels if beside[path] in names), None)
        for names in (_SESSIONS, _TASKS, _ATTEMPTS)
    )
    # A task without an attempt is no name of a run: its attempts would become one.
    session = session or (task if attempt else None)
    yield from [("session", session)] if session else []
    yield from [("attempt", attempt)] if session and attempt else []
    requests = [path for path, value in values.items() if path and is_request(value)]
    requests = requests or [p for p in beside if beside[p] in _MESSAGES and p in labels]
    if requests := [p for p in requests if p != response and not p.startswith(f"{response}.")]:
        at = response.split(".")
        yield "request", max(requests, key=lambda path: sum(map(eq, path.split("."), at)))
    yield "response", response
    numbers = [p for p in beside if isinstance(values[p], int | float) and beside[p] in _REWARDS]
    yield from [("reward", numbers[0])] if numbers else []
    times = [p for p in beside if isinstance(values[p], int | float) and beside[p] in _TIMES]
    yield from [("time", times[0])] if times else []


def _values(value: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the values of a record by path, the outer ones first, without those inside of bodies."""
    yield path, value
    if path and (response_kind(value) or is_request(value)):
        return
    value = value_of(value)
    if isinstance(value, list) and value and isinstance(value[0], Mapping) and path:
        value, path = value[0], f"{path}[*]"
    if isinstance(value, Mapping) and depth < _MOST_DEPTH:
        for key, inner in [*value.items()][:_MOST_KEYS]:
            if isinstance(key, str) and key and not _UNMAPPABLE.search(key):
                yield from _values(inner, f"{path}.{key}" if path else key, depth + 1)


def paths_of(record: Any) -> list[str]:
    """Return the paths of the values of a record, at most four keys deep; `[*]` stands for a list."""
    values = dict(_values(record))
    return [p for p in values if p and not any(q.startswith((f"{p}.", f"{p}[")) for q in values)]
