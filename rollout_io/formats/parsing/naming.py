"""Names of runs: splitting session names, natural order, distinct names for files.

`label` and `numbers` read names and numbers in the fields of a record.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

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


@dataclass(slots=True)
class FilesApart:
    """Assigns distinct names to files whose records state the same name.

    Example:
        >>> apart = FilesApart()
        >>> [apart.name("step-3", Path(file)) for file in ("a/3.jsonl", "b/3.jsonl", "a/3.jsonl")]
        ['step-3', 'step-3/file-1', 'step-3']
    """

    _numbers: dict[str, dict[Path, int]] = field(default_factory=dict)

    def name(self, stated: str, path: Path) -> str:
        """Return the stated name; append a number if another file has stated it before."""
        numbers = self._numbers.setdefault(stated, {})
        number = numbers.setdefault(path, len(numbers))
        return f"{stated}/file-{number}" if number else stated


_LABEL_DECODER = msgspec.json.Decoder(str)
_NUMBER_DECODER = msgspec.json.Decoder(float | bool)
_NO_NUMBERS = (b'"', b"[", b"{", b"n")
_MOST_DIGITS = 19  # of a 64-bit integer


def numbers(fields: Mapping[str, msgspec.Raw], where: str) -> dict[str, float]:
    """Return the fields that are numbers or booleans (as 0 and 1).

    Args:
        fields: Valid JSON by name.
        where: Location of the fields, for error messages.

    Raises:
        InputError: `record_type`: a number does not fit into a 64-bit float.
    """
    found: dict[str, float] = {}
    for name, raw in fields.items():
        text = bytes(raw)
        if not text.startswith(_NO_NUMBERS):
            found[name] = float(decode_line(_NUMBER_DECODER, text, f"{where}, {name}"))
    return found


TASK_LABELS = ("task_id", "task", "problem_id", "question_id", "instance")
"""Keys that name the task of a run in logs that users write, beside `instance_id` and `id`."""

_MOST_LABEL = 200


def task_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Return the labels in `TASK_LABELS`, which become columns."""
    return {name: labels[name] for name in TASK_LABELS if name in labels}


def is_name(text: str) -> bool:
    """True if a label may name a task: it is one short line."""
    return 0 < len(text) <= _MOST_LABEL and "\n" not in text


def groups_told(keys: Container[str], inferred: str) -> str | None:
    """Describe by which labels runs are grouped; None if all have an `instance_id` or `id`.

    Args:
        keys: Labels that name the groups of some runs.
        inferred: Description of the groups of runs with no label but `prompt`.
    """
    told = [name for name in TASK_LABELS if name in keys]
    texts = ["by " + ", ".join(told)] if told else []
    return "; ".join([*texts, *([inferred] if "prompt" in keys else [])]) or None


def label(raw: msgspec.Raw | None, where: str) -> str | None:
    """Return a name that is a string or an integer; None if it is empty or of another type.

    Args:
        raw: Valid JSON.
        where: Location of the field, for error messages.

    Raises:
        InputError: `json_line`: the string is not UTF-8.
    """
    text = bytes(raw or b"null")
    if text.startswith(b'"'):
        return decode_line(_LABEL_DECODER, text, where) or None
    digits = text.removeprefix(b"-")
    return text.decode() if digits.isdigit() and len(digits) <= _MOST_DIGITS else None
