"""What a log of an unknown format looks like: the bodies of model calls in it, and how to map them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from rollout_io.formats.dialects.bodies import value_of
from rollout_io.formats.start import Start

_REWARDS = frozenset(
    [
        "reward",
        "score",
        "return",
        "outcome",
        "finalreward",
        "totalreward",
        "finalscore",
        "grade",
        "success",
        "passed",
        "correct",
        "iscorrect",
        "solved",
        "resolved",
    ]
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
        yield "request", max(requests, key=lambda path: _num_shared(path, response))
    yield "response", response
    numbers = [p for p in beside if isinstance(values[p], int | float) and beside[p] in _REWARDS]
    yield from [("reward", numbers[0])] if numbers else []
    times = [p for p in beside if isinstance(values[p], int | float) and beside[p] in _TIMES]
    yield from [("time", times[0])] if times else []


def _num_shared(path: str, other: str) -> int:
    return sum(a == b for a, b in zip(path.split("."), other.split("."), strict=False))


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
