"""What a log says that its reader did not read: texts, and marks of messages."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from rollout_io.formats.base import note_unread

_MAX_CHARS = 60
_IDENTIFIER = re.compile(
    r"[\W\d_]*"  # without a letter
    r"|[0-9a-fA-F-]{16,}"  # uuids, digests
    r"|\d{4}-\d\d-\d\d[T ][\d:.]+(?:Z|[+-]\d\d:?\d\d)?"  # times
)
_DECODER = msgspec.json.Decoder()


def account_by_text(
    record: Mapping[str, Any], converted: Any, left_out: Collection[str], where: str
) -> None:
    """Note every text of a record that is not in what it was converted to, and every mark.

    This is for records of many shapes, whose keys no `Contents` lists: a text was read if it is found
    again, apart from whitespace, and JSON text if its values are.

    Args:
        record: The record, as decoded JSON.
        converted: What it was converted to, as decoded JSON.
        left_out: Keys, at any depth, that are read as something else or left out on purpose.
        where: Name of the record, before the names of its keys.

    Example:
        >>> with noted() as notes:
        ...     account_by_text({"value": "a", "aside": "b"}, [{"content": "a"}], (), "message")
        >>> dict(notes)
        {'unread: message.aside': 1}
    """
    texts = {text for _, text in _texts(converted, (), "")}
    joined = "\n".join(map(_squeezed, texts))  # readers join and strip texts
    for name, text in _texts(record, left_out, where):
        if text not in texts and holds_text(text) and _squeezed(text) not in joined:
            note_unread(name)
    for key, value in record.items():
        is_noted = isinstance(value, dict | list) or value in texts or holds_text(value)
        if key not in left_out and is_mark(key) and value is not None and not is_noted:
            note_unread(f"{where}.{clip(key)}")


def _texts(value: Any, left_out: Collection[str], name: str) -> Iterator[tuple[str, str]]:
    """Yield each text below a value with the names of its keys; JSON text as what it says."""
    stack = [(value, name)]
    while stack:
        inner, name = stack.pop()
        if isinstance(inner, str) and inner.lstrip()[:1] in {"{", "["}:
            with suppress(msgspec.MsgspecError, RecursionError):
                inner = _DECODER.decode(inner)
        if isinstance(inner, str):
            yield name, inner
        elif isinstance(inner, list):
            stack.extend((part, name) for part in inner)
        elif isinstance(inner, dict):
            stack.extend(
                (part, f"{name}.{clip(key)}") for key, part in inner.items() if key not in left_out
            )


def _squeezed(text: str) -> str:
    return "".join(text.split())


def holds_text(value: Any) -> bool:
    """True if a value has a string that may be text: no identifier, time or number."""
    stack = [value]
    while stack:
        inner = stack.pop()
        if isinstance(inner, str):
            if _IDENTIFIER.fullmatch(inner) is None:
                return True
        elif isinstance(inner, list):
            stack.extend(inner)
        elif isinstance(inner, dict):
            stack.extend(inner.values())
    return False


_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
MARKS = frozenset(
    {
        *("base", "origin", "parent", "branch", "fork", "forked", "rewind", "revert", "reverted"),
        *("supersedes", "superseded", "replaces", "replaced", "retracted", "undone", "deleted"),
        *("removed", "excluded", "ignored", "hidden", "visible", "active", "inactive", "archived"),
        *("compacted", "condensed", "synthetic", "sidechain"),
        *("weight", "loss", "mask", "masked", "train", "trained", "trainable"),
    }
)
"""Words in the names of keys that link records to each other, or say what a message counts for."""


def is_mark(key: str) -> bool:
    """True if the name of a key has a word of `MARKS`, in snake case or camel case.

    Example:
        >>> is_mark("history_base"), is_mark("isHidden"), is_mark("baseline")
        (True, True, False)
    """
    return any(word.lower() in MARKS for word in _WORD.findall(key))


def clip(name: str) -> str:
    """Shorten a long name, such as a key that is a text."""
    return name if len(name) <= _MAX_CHARS else f"{name[:_MAX_CHARS]}..."
