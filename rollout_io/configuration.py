"""Configuration records: a dataclass from a TOML file, then from `key=value`, checked key by key."""

from __future__ import annotations

import difflib
import json
import tomllib
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypeVar

import msgspec

from schemas.errors import RolloutError

Record = TypeVar("Record")

_IN_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    dict: "a table",
    NoneType: "none",
    Ellipsis: "...",
}


def load_record(
    kind: type[Record],
    toml_path: str | Path | None,
    overrides: Sequence[str],
    *,
    required: Mapping[str, str],
    list_examples: Mapping[str, str] | None = None,
) -> Record:
    """Read a configuration record.

    Args:
        kind: Its dataclass.
        toml_path: TOML file of top-level keys, or None.
        overrides: `key=value` strings, which win over the file; the last one of a key wins. Values
            are written as in TOML, but text needs no quotes. `none` is None, and so is `"none"` in
            a file.
        required: Keys that must be there, and in a word what they are.
        list_examples: How a key that holds a list is written, for the hint.

    Raises:
        RolloutError: config_file: not readable, or no TOML; config_key: unknown (the nearest name is
            the hint), or missing; config_value: of the wrong type, and as `kind` raises.
    """
    given = read_toml(toml_path)
    values = checked_values(kind, given, overrides, str(toml_path), list_examples=list_examples)
    check_required(values, required)
    return kind(**values)


def checked_values(
    kind: type[Any],
    given: Mapping[str, Any],
    overrides: Sequence[str],
    where: str,
    *,
    table: str = "",
    list_examples: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The values of a record's keys, each of its type: `load_record` without the record.

    Args:
        kind: Its dataclass.
        given: Of a file.
        overrides: As of `load_record`, without the name of the table.
        where: The file.
        table: "NAME." of a table of another record, for messages.
        list_examples: As of `load_record`.

    Raises:
        RolloutError: config_key, config_value.
    """
    types, examples = typing.get_type_hints(kind), list_examples or {}
    values = {}
    for key, value in given.items():
        values[key] = _typed(types, examples, key, value, f"{where}, key {table}{key}")
    for override in overrides:
        key, equals, text = (part.strip() for part in override.partition("="))
        if not equals:
            raise RolloutError("config_key", f"--set {table}{override}", "no `=`", "key=value")
        value = text if types.get(key) is str else _from_text(text)
        values[key] = _typed(types, examples, key, value, f"--set {table}{override}")
    return values


def check_required(values: Mapping[str, Any], required: Mapping[str, str]) -> None:
    """Refuse a record without the keys that must be there.

    Raises:
        RolloutError: config_key.
    """
    for key, what in required.items():
        if not values.get(key):
            raise RolloutError("config_key", "configuration", f"no `{key}`", what)


def read_toml(path: str | Path | None) -> dict[str, Any]:
    """A TOML file; of None, nothing.

    Raises:
        RolloutError: config_file.
    """
    if path is None:
        return {}
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise RolloutError("config_file", str(path), error.strerror or "an error") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RolloutError("config_file", str(path), str(error), "TOML") from error


def _typed(
    types: Mapping[str, Any], examples: Mapping[str, str], key: str, value: Any, where: str
) -> Any:
    if key not in types:
        nearest = difflib.get_close_matches(key, types, n=1, cutoff=0.5)
        hint = f"did you mean `{nearest[0]}`?" if nearest else f"known keys: {', '.join(types)}"
        raise RolloutError("config_key", where, f"`{key}`", "a key of the configuration", hint)
    kind = types[key]
    if isinstance(value, str) and value.lower() == "none" and NoneType in typing.get_args(kind):
        return None
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        got = json.dumps(value, ensure_ascii=False, default=str)
        example = examples.get(key)
        shown = f"{key} = {example} in a file, --set '{key}={example}'" if example else None
        raise RolloutError("config_value", where, got, _expected(kind), shown) from error


def _expected(kind: Any) -> str:
    """A type in words.

    Example:
        >>> _expected(Literal["last", "sum"]), _expected(float | None), _expected(tuple[str, ...])
        ('one of last, sum', 'a number or none', 'a list [text, ...]')
    """
    parts, origin = typing.get_args(kind), typing.get_origin(kind)
    if origin is Literal:
        return f"one of {', '.join(parts)}"
    if origin is tuple:
        return f"a list [{', '.join(map(_expected, parts))}]"
    known = _IN_WORDS.get(origin or kind)
    return known or " or ".join(map(_expected, parts))


def _from_text(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
