"""Logs of any names as lines of `calls`: which keys of a record hold the fields of a line (`--map`).

    session=problem,attempt=try,request=call.req,response=call.resp,reward=score
    {"problem": "p-1", "try": 0, "call": {"req": {...}, "resp": {...}}, "score": 1.0}

A path names keys, joined by dots. `[*]` is each element of a list: what is beside the list belongs to
all its calls, and its reward to the last one.

    session=id,request=turns[*].req,response=turns[*].resp,reward=score
    {"id": "p-1", "turns": [{"req": {...}, "resp": {...}}, ...], "score": 1.0}

Requests and responses may be JSON as a string, lists of messages, or text. The calls with one `session`
and `attempt` are a run; without `session`, those of a record are.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from rollout_io.formats.base import HAS_TEXT, About, Found, Input, Progress, Rejected, Run
from rollout_io.formats.dialects.bodies import prompt_of, value_of
from rollout_io.formats.engines.records import WHOLE, content_of, elements_of, records_of
from rollout_io.formats.engines.runs import gathered
from rollout_io.formats.grammar import Contents, account
from rollout_io.formats.parsing.content import NO_JSON
from rollout_io.formats.parsing.jsonl import (
    contained,
    decode_document,
    decode_line,
    decoded,
    refuse_lfs_pointer,
    refuse_not_utf8,
)
from rollout_io.formats.parsing.messages import prompt_key
from rollout_io.formats.parsing.records import ModelNames, Record, full_name, label, natural_key
from rollout_io.formats.unrecognized import paths_of
from schemas.errors import ConfigError, InputError, RolloutError, cleaned

FIELDS = (
    *("session", "attempt", "request", "response", "reward"),
    *("agent", "time", "final", "policy_version"),
)
RULE = "mapped_keys"
GROUPS = "inferred: records whose requests have the same messages"
_NEEDED = frozenset({"session", "attempt", "request", "response"})
_OF_LAST = frozenset({"reward", "final"})
_EVERY = "[*]"
_MOST_KEYS, _MOST_CHARS = 12, 40
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_LIST = msgspec.json.Decoder(list[msgspec.Raw])
_TRUTHS = {b"true": msgspec.Raw(b"1"), b"false": msgspec.Raw(b"0")}
# Begins with literal text, for which `re` searches 25 times as fast as for alternatives.
HAS_IDS = re.compile(rb'_ids(?:(?<=token_ids)|(?<=output_ids))\\*"\s*:\s*\[')
_STREAM = re.compile(r"\s*(?:data|event|id|retry)?:")

T = TypeVar("T")
Values = dict[str, msgspec.Raw]
Paths = Mapping[str, str]


class Logged(NamedTuple):
    """A call of a record.

    Attributes:
        where: Its place in messages.
        labels: What names its run.
        content: The call as a line of `calls`.
    """

    where: str
    labels: dict[str, str]
    content: bytes


def check_paths(paths: Paths) -> None:
    """Check the fields and the paths of a mapping.

    Raises:
        ConfigError: `choices`: a field is unknown, there is no response, or lists are beside each other.
    """
    for name in paths:
        if name not in FIELDS:
            expected = f"one of {', '.join(FIELDS)}"
            raise ConfigError("choices", "--map", f"the field {name!r}", expected)
    if "response" not in paths:
        raise ConfigError("choices", "--map", "no path of the response", "response=PATH")
    deepest = max((path.rpartition(_EVERY)[0] for path in paths.values()), key=len)
    for path in paths.values():
        if _EVERY in path and not f"{deepest}{_EVERY}".startswith(path.rpartition(_EVERY)[0]):
            finding = f"{path!r} is in another list than {deepest}{_EVERY}"
            raise ConfigError("choices", "--map", finding, "paths through one list")


def _segments(path: str) -> Iterator[str]:
    """Yield the keys of a path, and `[*]` for each list; a list of records is none of it."""
    for key in path.removeprefix(f"{_EVERY}.").split("."):
        name = key.removesuffix(_EVERY)
        yield from [name] if name else []
        yield from [_EVERY] if key.endswith(_EVERY) else []


def find(inputs: Sequence[Input], progress: Progress, paths: Paths) -> Iterator[Found]:
    """Yield the runs of a mapped log, in natural order of instances, then by attempt.

    Raises:
        InputError: `mapped_keys`: no record has a path.
    """
    models, missing, exact = ModelNames(), set(paths), set[str]()
    first: list[Record] = []

    def parts() -> Iterator[Found]:
        for record in _records(inputs, progress, _list_of(paths)):
            if isinstance(record, Rejected):
                yield record
                continue
            first[:] = first or [record]
            models.see(record.content)
            for item in _runs(record, paths, missing):
                if isinstance(item, Run) and HAS_IDS.search(record.content):
                    exact.add(item.instance_id)
                yield item

    items = [*gathered(parts())]
    if missing and first:
        raise _absent(first[0], min(missing, key=[*paths].index), paths, "no record has")
    yield from models.about()
    runs = [item for item in items if isinstance(item, Run)]
    yield About(HAS_TEXT, any(run.instance_id not in exact for run in runs))
    yield from (item for item in items if not isinstance(item, Run))
    if "session" not in paths:
        yield About("groups", GROUPS)
    counted = all(full_name(f"a/{run.labels.get('attempt', 0)}") for run in runs)
    for run in runs:
        run.instance_id, run.repetition_id = _name(run.labels, counted=counted)
    yield from sorted(runs, key=lambda run: (natural_key(run.instance_id), run.repetition_id or 0))


def _name(labels: Paths, *, counted: bool) -> tuple[str, int | None]:
    session = labels.get("session", labels.get("prompt", ""))
    if "attempt" in labels:
        return session, int(labels["attempt"]) if counted else None
    return full_name(session) or (session, None)


def _records(inputs: Sequence[Input], progress: Progress, key: str) -> Iterator[Record | Rejected]:
    for record in (one for log in inputs for one in records_of(log, progress)):
        try:
            refuse_lfs_pointer(record.content, record.place.where)
            if record.place.part != WHOLE:
                refuse_not_utf8(record.content, record.place.where)
            with contained(record.place.where):
                yield from elements_of(record, key)
        except RolloutError as error:
            yield Rejected(record.place, error)


def _list_of(paths: Paths) -> str:
    """Return the key of the list whose elements are records: sessions are named in it, with all else."""
    heads = {path.partition(_EVERY)[0] if _EVERY in path else "." for path in paths.values()}
    head = heads.pop() if len(heads) == 1 and "session" in paths else "."
    return "" if "." in head else head


def _runs(record: Record, paths: Paths, missing: set[str]) -> Iterator[Found]:
    names = [name for name in ("session", "attempt") if name in paths]
    try:
        with contained(record.place.where):
            labels = [logged.labels for logged in _calls(record, paths, missing)]
    except RolloutError as error:
        named = {name: _named(record.content, paths[name]) for name in names}
        if not names or None in named.values():
            yield Rejected(record.place, error)
            return
        labels = [{name: str(value) for name, value in named.items()}]  # reading it rejects the run
    for distinct in {tuple(distinct.values()): distinct for distinct in labels}.values():
        name = "\0".join(distinct.values())
        yield Run(instance_id=name, repetition_id=0, places=[record.place], labels=distinct)


def _named(content: bytes, path: str) -> str | None:
    """Return the name under the last key of a path in a damaged record, if it is still readable."""
    key = re.escape([*_segments(path)][-1].encode())
    match = re.search(rb'"%s"\s*:\s*("(?:[^"\\]|\\.)*"|-?\d+)' % key, content)
    try:
        return label(msgspec.Raw(match[1]), path) if match else None
    except RolloutError:
        return None


def calls_of(run: Run, paths: Paths) -> Iterator[Logged]:
    """Yield the calls of a run; what is not mapped is counted as unread."""
    named = {n: v for n, v in run.labels.items() if n in {"session", "attempt", "record"}}
    head = _list_of(paths)
    names = [
        path.replace(_EVERY, "").strip(".").removeprefix(f"{head}.") for path in paths.values()
    ]
    contents = Contents(reads={"": " ".join(names)})
    for place in run.places:
        record = Record(place, content_of(place))
        account(contents, record.content)
        yield from (call for call in _calls(record, paths) if named.items() <= call.labels.items())


def _calls(record: Record, paths: Paths, missing: set[str] | None = None) -> Iterator[Logged]:
    """Yield the calls of a record, and remove the fields that it has from `missing`.

    Raises:
        InputError: `mapped_keys`: a path leads to nothing; any error of `decode_line`.
    """
    place, key = record.place, _list_of(paths)
    decode = decode_document if place.part == WHOLE else decode_line
    fields = decode(_OBJECT, record.content, place.where)
    parsed = {name: (*_segments(path),)[2 if key else 0 :] for name, path in paths.items()}
    expanded = [*_expanded(msgspec.Raw(record.content), parsed, {})]
    if not expanded:
        raise InputError("no_calls", place.where, f"the list on `{paths['response']}` is empty")
    for _, values in expanded:
        (missing or set()).difference_update(values)
    extra = {name: raw for name, raw in fields.items() if _is_extra(name, raw, paths)}
    for suffix, values in expanded:
        where = f"{place.where}, {suffix}" if suffix else place.where
        for name in _NEEDED & paths.keys() - values.keys():
            raise _absent(record, name, paths, "the record does not have")
        labels = dict[str, str]()
        for name in [name for name in ("session", "attempt") if name in paths]:
            if not (text := label(values[name], where)):
                finding = (
                    f"`{paths[name]}` is {cleaned(bytes(values[name]).decode())[:_MOST_CHARS]}"
                )
                raise InputError(RULE, where, finding, "a name or a whole number")
            labels[name] = text
        request = _request(values.get("request", msgspec.Raw(b"{}")))
        if "session" not in paths:
            prompt = prompt_of(value_of(msgspec.json.decode(request)), where)
            labels["record"] = f"{place.where}{suffix.rpartition('[')[0]}"
            labels["prompt"] = prompt_key(prompt.messages if prompt else place.where)
        line = extra | values | {"request": request, "response": _response(values["response"])}
        line.pop("attempt", None)
        line["session"] = msgspec.Raw(msgspec.json.encode(labels.get("session", "")))
        reward = line.get("reward", NO_JSON)
        line["reward"] = _TRUTHS.get(bytes(reward), reward)
        yield Logged(where, labels, msgspec.json.encode(line))


def _expanded(
    content: msgspec.Raw, paths: Mapping[str, tuple[str, ...]], shared: Values, suffix: str = ""
) -> Iterator[tuple[str, Values]]:
    """Yield the values at the paths: once, or once for each element of the lists on them."""
    plain = {name: _at(content, path) for name, path in paths.items() if _EVERY not in path}
    values = shared | {name: raw for name, raw in plain.items() if raw is not None}
    inner = {name: path for name, path in paths.items() if _EVERY in path}
    if not inner:
        yield suffix, values
        return
    head = next(path[: path.index(_EVERY)] for path in inner.values())
    listed = _decoded(_LIST, _at(content, head))
    if listed is None:
        yield suffix, values
        return
    beside = {name: raw for name, raw in values.items() if name not in _OF_LAST}
    below = {name: path[len(head) + 1 :] for name, path in inner.items()}
    prefix = f"{suffix}.{'.'.join(head)}".strip(".")
    for i, element in enumerate(listed):
        outer = values if i == len(listed) - 1 else beside
        yield from _expanded(element, below, outer, f"{prefix}[{i}]")


def _at(content: msgspec.Raw, path: Sequence[str]) -> msgspec.Raw | None:
    """Return the value at a path, also in JSON that is a string; None if there is none, or null."""
    value: msgspec.Raw | None = content
    for key in path:
        fields = None if value is None else _decoded(_OBJECT, unquoted(value))
        value = None if fields is None else fields.get(key)
    return None if value is None or bytes(value) == b"null" else value


def _decoded(decoder: msgspec.json.Decoder[T], content: msgspec.Raw | None) -> T | None:
    try:
        return None if content is None else decoded(decoder, bytes(content))
    except msgspec.ValidationError:
        return None


def unquoted(content: msgspec.Raw) -> msgspec.Raw:
    """Return the JSON in a string that has an object or a list; else the value itself."""
    if not bytes(content).startswith(b'"'):
        return content
    text = msgspec.json.decode(content)
    value = value_of(text)
    if isinstance(value, str):
        return content
    is_once = text.lstrip().startswith(("{", "["))  # then its bytes are kept
    return msgspec.Raw(text.encode() if is_once else msgspec.json.encode(value))


def _request(logged: msgspec.Raw) -> msgspec.Raw:
    content = unquoted(logged)
    keys = {b"[": b"messages", b'"': b"prompt"}
    key = keys.get(bytes(content)[:1])
    return content if key is None else msgspec.Raw(b'{"%s":%s}' % (key, content))


def _response(logged: msgspec.Raw) -> msgspec.Raw:
    """Return a response; text that is no stream of events is the content of a message."""
    content = unquoted(logged)
    if not bytes(content).startswith(b'"') or _STREAM.match(msgspec.json.decode(content)):
        return content
    message = b'{"choices":[{"message":{"role":"assistant","content":%s}}]}'
    return msgspec.Raw(message % bytes(content))


def _is_extra(name: str, raw: msgspec.Raw, paths: Paths) -> bool:
    """True for a label or a number beside what is mapped, which a line of `calls` may have too."""
    if name in paths.values() or bytes(raw)[:1] in {b"{", b"[", b"n"}:
        return False
    return name not in FIELDS or (name == "reward" and not bytes(raw).startswith(b'"'))


def _absent(record: Record, field: str, paths: Paths, subject: str) -> InputError:
    head = f"{key}{_EVERY}." if (key := _list_of(paths)) else ""
    keys = [head + path for path in paths_of(msgspec.json.decode(record.content))]
    listed = ", ".join(keys[:_MOST_KEYS]) + (", ..." if keys[_MOST_KEYS:] else "")
    near = difflib.get_close_matches(paths[field], keys, 1)
    hint = f"did you mean {field}={near[0]}?" if near else f"pass {field}=PATH with one of them"
    finding = f"{subject} `{paths[field]}`, only {cleaned(listed)}"
    return InputError(RULE, record.place.where, finding, hint=hint)
