"""What a log of an unknown format looks like: the bodies of model calls in it, and how to map them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from rollout_io.formats.dialects.bodies import value_of
from rollout_io.formats.start import Start

_REWARDS = frozenset(
    {
        *("reward", "score", "return", "outcome", "finalreward", "totalreward", "finalscore"),
        *("grade", "success", "passed", "correct", "iscorrect", "solved", "resolved"),
    }
)
_SESSIONS = frozenset(
    name + end
    for name in ("session", "conversation", "trajectory", "episode", "rollout", "run", "trace")
    for end in ("", "id", "name")
)
_TASKS = frozenset(
    name + end
    for name in ("task", "problem", "question", "instance", "example")
    for end in ("", "id")
)
_ATTEMPTS = frozenset(
    name + end
    for name in ("attempt", "try", "trial", "repetition", "sample")
    for end in ("", "id", "index")
)
_MOST_DEPTH, _MOST_KEYS = 4, 64
_UNMAPPABLE = re.compile(r"[.,=\[\]]")
_HAS_IDS = re.compile(r"token_ids\W+\d")
_MESSAGES: dict[str, Any] = {
    "messages": list,
    "input": (list, str),
    "prompt": (list, str),
    "contents": list,
}
_OF_REQUEST = frozenset({"model", "temperature", "max_tokens", "tools", "stream"})


def response_kind(value: Any) -> str | None:
    """Return the API of a response; None if a value is none.

    Example:
        >>> response_kind({"choices": [{"message": {"content": "4"}}]})
        'OpenAI chat completions'
    """
    value = value_of(value)
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        value = value[0] if "choices" in value[0] else None  # streamed chunks
    if not isinstance(value, Mapping):
        return None
    choices, output, content = (value.get(name) for name in ("choices", "output", "content"))
    if _is_list_with(choices, {"message", "delta"}):
        return "OpenAI chat completions"
    if _is_list_with(choices, {"text", "token_ids"}):
        return "OpenAI text completions"
    if value.get("object") == "response" or _is_list_with(output, {"type"}):
        return "responses of OpenAI's Responses API"
    if value.get("role") == "assistant" and _is_list_with(content, {"type"}):
        return "responses of Anthropic's Messages API"
    return (
        "responses of Gemini's API" if _is_list_with(value.get("candidates"), {"content"}) else None
    )


def is_request(value: Any) -> bool:
    """True for the request of a model call, or a list of messages."""
    value = value_of(value)
    if isinstance(value, Mapping):
        found = [name for name, kind in _MESSAGES.items() if isinstance(value.get(name), kind)]
        return bool(found) and (bool(_OF_REQUEST & value.keys()) or is_request(value[found[0]]))
    return _is_list_with(value, {"role"})


def _is_list_with(value: Any, names: Collection[str]) -> bool:
    return isinstance(value, list) and any(
        isinstance(each, Mapping) and not each.keys().isdisjoint(names) for each in value
    )


def look(start: Start) -> tuple[str, str] | None:
    """Return what the records of a file have, and the mapping that reads it; None if there is none.

    Example:
        A record {"req": {"messages": [...]}, "resp": {"choices": [...]}, "score": 1.0}:

        >>> look(start)
        ('OpenAI chat completions under `resp`', 'request=req,response=resp,reward=score')
    """
    for value in start.values:
        values = dict(_values(value[0] if isinstance(value, list) and value else value))
        answers = {path: k for path, each in values.items() if path and (k := response_kind(each))}
        if answers:
            path, kind = next(iter(answers.items()))
            ids = " with token ids" if _HAS_IDS.search(str(values[path])) else ""
            mapped = ",".join(f"{name}={at}" for name, at in _mapping(values, path))
            return f"{kind}{ids} under `{path}`", shlex.quote(mapped)
    return None


def _mapping(values: Mapping[str, Any], response: str) -> Iterator[tuple[str, str]]:
    beside = {
        path: re.sub("[_-]", "", path.rpartition(".")[2]).lower()
        for path, value in values.items()
        if isinstance(value, str | int | float) and response.startswith(path.rpartition(".")[0])
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
    if requests := [p for p in requests if p != response and not p.startswith(f"{response}.")]:
        yield "request", max(requests, key=lambda path: _num_shared(path, response))
    yield "response", response
    numbers = [p for p in beside if isinstance(values[p], int | float) and beside[p] in _REWARDS]
    yield from [("reward", numbers[0])] if numbers else []


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
        for key, each in [*value.items()][:_MOST_KEYS]:
            if isinstance(key, str) and key and not _UNMAPPABLE.search(key):
                yield from _values(each, f"{path}.{key}" if path else key, depth + 1)


def paths_of(record: Any) -> list[str]:
    """Return the paths of the values of a record, at most four keys deep; `[*]` stands for a list."""
    values = dict(_values(record))
    return [p for p in values if p and not any(q.startswith((f"{p}.", f"{p}[")) for q in values)]
