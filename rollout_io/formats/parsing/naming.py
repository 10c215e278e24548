"""Names of runs: splitting session names, natural order, distinct names for files."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

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
