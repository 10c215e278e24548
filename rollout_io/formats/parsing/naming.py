"""Names of runs: splitting session names, natural order, distinct names for files.

`label` and `numbers` read names and numbers in the fields of a record, `ModelNames` the models of a log.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from rollout_io.formats.base import About, Found, Run, note_run
from rollout_io.formats.parsing.jsonl import decode_line
from schemas.errors import InputError

_NUMBER = re.compile(r"([0-9]+)")
_REPETITION = re.compile(r"0|[1-9][0-9]{0,8}")

SESSION_SHAPE = "'instance/repetition', where repetition is a non-negative integer"


def full_name(session: str) -> tuple[str, int] | None:
    """Split "instance/repetition"; None if the name has a different form."""
    instance_id, _, repetition = session.rpartition("/")
    is_full = instance_id and _REPETITION.fullmatch(repetition)
    return (instance_id, int(repetition)) if is_full else None


def split_session(session: str, where: str) -> tuple[str, int]:
    """Split "instance/repetition"; the instance may contain slashes.

    Example:
        >>> split_session("math/train/12/3", "a.jsonl:1")
        ('math/train/12', 3)
    """
    key = full_name(session)
    if key is None:
        hint = "number the attempts at each instance: shop-1/0, shop-1/1, ..."
        raise InputError("session_name", where, f"session {session!r}", SESSION_SHAPE, hint)
    return key


def natural_key(name: str) -> tuple[list[str | tuple[int, str]], str]:
    """Return a key that sorts shop-2 before shop-10; numbers may have any length."""
    parts = _NUMBER.split(name)
    parts[1::2] = map(_number_key, parts[1::2])
    return parts, name


def _number_key(digits: str) -> tuple[int, str]:
    significant = digits.lstrip("0")
    return len(significant), significant


def with_files_apart(items: Iterable[Found]) -> Iterator[Found]:
    """Yield what was found; groups "NAME/KEY" of several files with one name become distinct.

    The groups of the second such file begin with "NAME/file-1".
    """
    numbers: dict[str, dict[Path, int]] = {}
    for item in items:
        if isinstance(item, Run):
            name, _, key = item.instance_id.rpartition("/")
            files = numbers.setdefault(name, {})
            if number := files.setdefault(item.places[0].path, len(files)):
                item.instance_id = f"{name}/file-{number}/{key}"
        yield item


_LABEL_DECODER = msgspec.json.Decoder(str)
_NUMBER_DECODER = msgspec.json.Decoder(float | bool)
_OBJECT_DECODER = msgspec.json.Decoder(dict[str, msgspec.Raw] | None)
_NO_NUMBERS = (b'"', b"[", b"{", b"n")
_MOST_DIGITS = 19  # of a 64-bit integer


def numbers(
    fields: Mapping[str, msgspec.Raw], where: str, objects: Iterable[str] = ()
) -> dict[str, float]:
    """Return the fields, as JSON, that are numbers or booleans (as 0 and 1).

    The numbers in `objects`, which are fields too, follow: `rewards.style`, for example.
    """
    values: dict[str, float] = {}
    for name, raw in fields.items():
        if not bytes(raw).startswith(_NO_NUMBERS):
            values[name] = float(decode_line(_NUMBER_DECODER, bytes(raw), f"{where}, {name}"))
    for name in objects:
        place = f"{where}, {name}"
        inner = decode_line(_OBJECT_DECODER, bytes(fields.get(name, b"null")), place)
        values |= {f"{name}.{key}": value for key, value in numbers(inner or {}, place).items()}
    return values


TASK_LABELS = ("task_id", "task", "problem_id", "question_id", "instance")
"""Keys that name the task of a run in logs that users write, beside `instance_id` and `id`."""

_REGROUP = "move it to the top level as `task_id`, or pass --group-by {}"
_READ = frozenset({"instance_id", *TASK_LABELS})
_NO_TASK = frozenset({"id", "prompt"})
_MOST_LABEL = 200


def task_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Return the labels in `TASK_LABELS`, which become columns."""
    return {name: labels[name] for name in TASK_LABELS if name in labels}


_PLACES = ("metadata", "extra", "extra_info", "info")
_LIKE = frozenset(
    {
        *("task", "taskid", "taskname", "problemid", "questionid", "exampleid", "promptid"),
        *("instance", "instanceid"),
    }
)


def unread_labels(fields: Mapping[str, Any]) -> dict[str, str]:
    """Return values that look like a label of the task, but are not where one is read.

    Such a value has another key at the top level, or is in `metadata`, `extra`, `extra_info` or
    `info`. `--group-by` accepts these names.

    Example:
        >>> unread_labels({"taskId": 7, "task_id": "a", "metadata": {"task_id": "b"}})
        {'taskId': '7', 'metadata.task_id': 'b'}
    """
    unread = {name: fields[name] for name in fields if name not in _READ and is_like_label(name)}
    for place in _PLACES:
        inner = _decoded(fields.get(place))
        for key, value in inner.items() if isinstance(inner, Mapping) else ():
            if is_like_label(key):
                unread[f"{place}.{key}"] = value
    values = {name: _decoded(value) for name, value in unread.items()}
    return {
        name: str(value)
        for name, value in values.items()
        if isinstance(value, str | int) and not isinstance(value, bool) and is_name(str(value))
    }


def is_like_label(key: object) -> bool:
    """True if a key is similar to a label of the task, such as `taskId` or `example_id`."""
    is_short = isinstance(key, str) and len(key) <= 20
    return is_short and str(key).replace("_", "").replace("-", "").lower() in _LIKE


def note_unread_labels(labels: Mapping[str, str], instance_id: str, hint: str = _REGROUP) -> None:
    """Note that a run has labels from `unread_labels` and no label that names its group."""
    groups = {instance_id, *instance_id.split("/")}
    unread = {name: value for name, value in labels.items() if name not in _NO_TASK}
    if _READ & labels.keys() or groups & {*unread.values()}:
        return
    for name in unread:
        note_run(f"runs with `{name}`, which looks like a task label ({hint.format(name)})")


def _decoded(value: Any) -> Any:
    """Decode JSON; None if it is damaged."""
    try:
        return msgspec.json.decode(value) if isinstance(value, msgspec.Raw) else value
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def is_name(text: str) -> bool:
    """True if a label may name a task: it is one short line."""
    return 0 < len(text) <= _MOST_LABEL and "\n" not in text


def groups_told(keys: Container[str], inferred: str) -> str | None:
    """Describe by which labels runs are grouped; None if all have an `instance_id` or `id`."""
    used = [name for name in TASK_LABELS if name in keys]
    texts = ["by " + ", ".join(used)] if used else []
    return "; ".join([*texts, *([inferred] if "prompt" in keys else [])]) or None


def label(raw: msgspec.Raw | None, where: str) -> str | None:
    """Return a name that is a string or an integer; None if it is empty or of another type."""
    text = bytes(raw or b"null")
    if text.startswith(b'"'):
        return decode_line(_LABEL_DECODER, text, where) or None
    digits = text.removeprefix(b"-")
    return text.decode() if digits.isdigit() and len(digits) <= _MOST_DIGITS else None


MODELS = "models"
_MODEL_KEY = b'"model"'
_MODEL_VALUE = re.compile(rb'\s*:\s*("(?:[^"\\\x00-\x1f]|\\.)*")')


class ModelNames:
    """Collector of the first `model` value of each record.

    Example:
        >>> names = ModelNames()
        >>> names.see(b'{"request": {"model": "smollm2"}}')
        >>> [found.value for found in names.about()]
        [['smollm2']]
    """

    def __init__(self) -> None:
        self._found: set[bytes] = set()
        self._last = b"\n"

    def see(self, record: bytes) -> None:
        """Search a record for a model name, without parsing it, for speed."""
        at = record.find(_MODEL_KEY)
        if record.startswith(self._last, at):  # the same as in the previous record
            return
        while at >= 0:
            value = _MODEL_VALUE.match(record, at + len(_MODEL_KEY))
            if value is not None:
                self._found.add(value[1])
                self._last = record[at : value.end()]
                return
            at = record.find(_MODEL_KEY, at + len(_MODEL_KEY))

    def names(self) -> list[str]:
        """Return all names, sorted."""
        distinct = set()
        for text in self._found:
            try:
                distinct.add(_LABEL_DECODER.decode(text))
            except (msgspec.MsgspecError, UnicodeDecodeError):
                continue  # the record itself is rejected elsewhere
        return sorted(name for name in distinct if name)

    def about(self) -> Iterator[About]:
        """Yield the names as a fact about the log, for `Adapter.find`."""
        names = self.names()
        if names:
            yield About(MODELS, names)
