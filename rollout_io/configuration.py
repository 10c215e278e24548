"""Configuration records: dataclasses filled from a TOML file and `key=value` overrides.

A field of a record whose type is a dataclass is a section: a table `[section]` of the file, whose
keys are set with `section.key=value`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
import typing
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from rollout_io.configuration_keys import Keys, all_unknown_keys
from rollout_io.dataset.opening import read_input
from schemas.errors import ConfigError

Record = TypeVar("Record")

Count = Annotated[int, Meta(ge=1)]
CountOrZero = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
NonNegative = Annotated[float, Meta(ge=0)]
Fraction = Annotated[float, Meta(ge=0, le=1)]

MAX_CONFIG_BYTES = 1 << 24
_SHOWN_CHARS = 200

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
    options: Mapping[str, Any] | None = None,
    *,
    required: Mapping[str, str] | None = None,
    list_examples: Mapping[str, str] | None = None,
    moved: Mapping[str, str] | None = None,
    more: Sequence[str] = (),
) -> Record:
    """Read a configuration record from a TOML file, command-line options and `--set`.

    Args:
        kind: Dataclass of the record.
        toml_path: TOML file with the record's keys, and a table for each section; or the
            `config.json` of a run; or None.
        overrides: `key=value` or `section.key=value` strings, which take precedence over file and
            options; the last one for a key wins. Values are TOML, but strings need no quotes.
            `none` means None, as does `"none"` in a file. `key.name=value` sets one entry of a key
            that is a table.
        options: Typed values, by key; a value that is not None takes precedence over the file.
        required: Required keys, each with a short description of its value; for records that do not
            check this themselves.
        list_examples: Example value of each list-valued key, for hints.
        moved: New places of keys that earlier versions had elsewhere, for hints.
        more: Further valid keys, such as entries of a key that is a table, for hints.

    Raises:
        ConfigError: `config_file`: the file is not TOML; `config_key`: a key is unknown (the hint
            suggests the closest key) or missing; `config_value`: a value has the wrong type or is
            out of bounds.
    """
    stated = with_options(read_values(toml_path), options)
    keys = Keys(kind, list_examples or {}, moved or {}, more)
    values = checked_values(kind, stated, overrides, str(toml_path), keys=keys)
    check_required(values, required or {})
    return build(kind, values)


def checked_values(
    kind: type[Any],
    given: Mapping[str, Any],
    overrides: Sequence[str],
    where: str,
    *,
    table: str = "",
    keys: Keys | None = None,
) -> dict[str, Any]:
    """Return the values of a record, each converted to its type, without building the record.

    Args:
        kind: Dataclass of the record.
        given: Values from the file and the options; those of a section are a mapping.
        overrides: As for `load_record`, without the name of the table.
        where: Path of the file, for messages.
        table: Prefix "NAME." of the keys in messages, if the record is a table of the file.
        keys: Keys of the whole configuration, for hints; None: the keys of `kind`.

    Raises:
        ConfigError: `config_key`, `config_value`: see `load_record`.
    """
    types, keys = typing.get_type_hints(kind), keys or Keys(kind)
    values: dict[str, Any] = {}
    nested: dict[str, list[str]] = {}
    with all_unknown_keys() as unknown:
        for key, value in given.items():
            with unknown.collected():
                place = f"{where}, key {table}{key}"
                if not dataclasses.is_dataclass(types.get(key)):
                    values[key] = _typed(types, keys, table, key, value, place)
                elif isinstance(value, Mapping):
                    nested[key] = []
                else:
                    hint = keys.moved.get(f"{table}{key}") or f"{key}.KEY"
                    hint = f"[{table}{key}] is a section: set `{hint}`"
                    raise ConfigError("config_value", place, _shown(value), "a table", hint)
        for override in overrides:
            with unknown.collected():
                place = f"--set {table}{_shortened(override)}"
                dotted, equals, text = (part.strip() for part in override.partition("="))
                if not equals:
                    raise ConfigError(
                        "config_key", place, "an override must have the form key=value"
                    )
                section, _, rest = dotted.partition(".")
                if dataclasses.is_dataclass(types.get(section)):
                    if not rest:
                        hint = keys.moved.get(f"{table}{section}") or f"{section}.KEY"
                        hint = f"[{table}{section}] is a section: set `{hint}=VALUE`"
                        raise ConfigError(
                            "config_key", place, f"`{section}` is not a key", hint=hint
                        )
                    nested.setdefault(section, []).append(f"{rest}={text}")
                    continue
                key, *names = _names(dotted, types, place)
                value = text if types.get(key) is str else _from_text(text)
                if names:
                    value = _with_entry(values.get(key), names, value)
                values[key] = _typed(types, keys, table, key, value, place)
        for section, section_overrides in nested.items():
            with unknown.collected():
                name = f"{table}{section}."
                values[section] = checked_values(
                    types[section],
                    given.get(section, {}),
                    section_overrides,
                    where,
                    table=name,
                    keys=keys,
                )
    return values


def build(kind: type[Record], values: Mapping[str, Any]) -> Record:
    """Build a record, with its sections, from the result of `checked_values`."""
    types = typing.get_type_hints(kind)
    sections: dict[str, Any] = {k: of for k, of in types.items() if dataclasses.is_dataclass(of)}
    built: dict[str, Any] = {key: build(of, values.get(key, {})) for key, of in sections.items()}
    return kind(**{**values, **built})


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten the keys of sections and tables to `section.key`.

    Example:
        >>> flat({"loss": {"eps": 1, "own": {}}, "evaluate": None})
        {'loss.eps': 1, 'loss.own': {}, 'evaluate': None}
    """
    flattened: dict[str, Any] = {}
    for name, value in values.items():
        is_section = isinstance(value, Mapping)
        flattened |= {f"{name}.{k}": v for k, v in value.items()} if is_section else {name: value}
    return flattened


def with_options(values: Mapping[str, Any], options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Add the command-line options that are not None, by `key` or `section.key`, to a file's values.

    Example:
        >>> with_options({"loss": {"eps": 1}}, {"loss.low": 2, "seed": None})
        {'loss': {'eps': 1, 'low': 2}}
    """
    merged = dict(values)
    for dotted, value in (options or {}).items():
        section, *names = dotted.split(".")
        # What the file has in place of a section stays, so that it is refused.
        if value is not None and (not names or isinstance(merged.get(section, {}), Mapping)):
            merged = _with_entry(merged, [section, *names], value)
    return merged


def _names(dotted: str, types: Mapping[str, Any], where: str) -> list[str]:
    """Split a dotted key at its dots if its first name is the key of a table."""
    if typing.get_origin(types.get(dotted.partition(".")[0])) is not dict:
        return [dotted]
    try:
        parsed: Any = tomllib.loads(f"{dotted} = 0")
    except tomllib.TOMLDecodeError as error:
        hint = 'quote names with characters other than letters, digits, _ and -: table."my.name"'
        finding = f"`{dotted}` is not a valid TOML key"
        raise ConfigError("config_key", where, finding, "", hint) from error
    names = []
    while isinstance(parsed, dict):
        ((name, parsed),) = parsed.items()
        names.append(name)
    return names


def _with_entry(table: Any, names: Sequence[str], value: Any) -> dict[str, Any]:
    """Return a copy of a table with an entry set at any depth.

    Values on the path to the entry that are not tables are replaced by tables.

    Example:
        >>> _with_entry({"a": {"x": 1}, "b": 2}, ["a", "y"], 3)
        {'a': {'x': 1, 'y': 3}, 'b': 2}
    """
    first, *rest = names
    table = table if isinstance(table, dict) else {}
    return {**table, first: _with_entry(table.get(first), rest, value) if rest else value}


def out_of_bounds(record: Any) -> Iterator[tuple[str, str, str]]:
    """Yield (key, value, expectation) for each value that violates the annotation of its key.

    Args:
        record: A dataclass that declares bounds as `Annotated[int, msgspec.Meta(ge=1)]`, and
            choices as `Literal`. None is always in bounds; NaN and infinity never are.

    Example:
        >>> @dataclass
        ... class Settings:
        ...     rate: Positive | None = 0.5
        >>> list(out_of_bounds(Settings(rate=0.0)))
        [('rate', '0.0', 'a finite number > 0')]
    """
    kind: Any = type(record)
    for key, bound, expected in _bounds(kind):
        value = getattr(record, key)
        if value is not None and not _is_within(value, bound):
            yield key, str(value), expected
    for key, allowed, expected in _literals(kind):
        value = getattr(record, key)
        if value is not None and value not in allowed:
            yield key, repr(value), expected


@lru_cache
def _literals(kind: Any) -> tuple[tuple[str, tuple[str, ...], str], ...]:
    """Return (key, values, description of the values) for each `Literal` field of a record."""
    return tuple(
        (key, typing.get_args(part), type_in_words(part))
        for key, hint in typing.get_type_hints(kind).items()
        for part in (hint, *typing.get_args(hint))
        if typing.get_origin(part) is Literal
    )


@lru_cache
def _bounds(kind: Any) -> tuple[tuple[str, Meta, str], ...]:
    """Return (key, bounds, description of the bounds) for each bounded number of a record."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return tuple(
        (key, bound, _bounds_in_words(typing.get_args(part)[0], bound))
        for key, hint in hints.items()
        for part in (hint, *typing.get_args(hint))
        for bound in getattr(part, "__metadata__", ())
    )


def _is_within(value: float, bound: Meta) -> bool:
    above = (bound.ge is None or value >= bound.ge) and (bound.gt is None or value > bound.gt)
    is_finite = isinstance(value, int) or math.isfinite(value)
    return is_finite and above and (bound.le is None or value <= bound.le)


def _bounds_in_words(number: type[Any], bound: Meta) -> str:
    """Describe bounds in words.

    Example:
        >>> _bounds_in_words(int, Meta(ge=1, le=9)), _bounds_in_words(float, Meta(gt=0))
        ('a whole number from 1 to 9', 'a finite number > 0')
    """
    is_whole, low, high = number is int, bound.ge, bound.le
    if high is not None:
        return (
            f"a whole number from {low} to {high}" if is_whole else f"a number in [{low}, {high}]"
        )
    noun = "a whole number" if is_whole else "a finite number"
    return f"{noun} > {bound.gt}" if low is None else f"{noun} >= {low}"


def check_required(values: Mapping[str, Any], required: Mapping[str, str]) -> None:
    """Check that no required key is missing; `section.key` names a key of a section.

    Raises:
        ConfigError: `config_key`: a required key is missing or empty.
    """
    for key, what in required.items():
        value: Any = values
        for name in key.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        if value is None or value == "":
            finding, message = f"no `{key}`", f"Missing key: {key} ({what})"
            raise ConfigError("config_key", "configuration", finding, what, message=message)


def read_values(path: str | Path | None) -> dict[str, Any]:
    """Read a TOML file, or a JSON file as runs write it; return an empty dict if the path is None.

    Raises:
        ConfigError: `config_file`: the file is not TOML, or its name ends in `.json` and it is not
            a JSON object.
        InputError: `input_file`: the file cannot be read.
    """
    if path is None:
        return {}
    kind = "JSON" if Path(path).suffix == ".json" else "TOML"
    try:
        text = read_input(path, MAX_CONFIG_BYTES).decode()
        values = json.loads(text) if kind == "JSON" else tomllib.loads(text)
    except RecursionError:
        raise ConfigError("config_file", str(path), "the file is nested too deeply") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        finding = f"the file is not valid {kind}: {error}"
        raise ConfigError("config_file", str(path), finding) from error
    if not isinstance(values, dict):
        raise ConfigError("config_file", str(path), _shown(values), "a JSON object")
    return values


def _typed(
    types: Mapping[str, Any], keys: Keys, table: str, key: str, value: Any, where: str
) -> Any:
    if key not in types:
        hint = keys.hint(key, table, list(types))
        raise ConfigError("config_key", where, f"unknown key `{_shortened(key)}`", "", hint)
    kind = types[key]
    if isinstance(value, str) and value.lower() == "none" and NoneType in typing.get_args(kind):
        return None
    if _has_huge_number(value):
        raise ConfigError("config_value", where, _shown(value), "an integer of at most 64 bits")
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, ValueError, OverflowError, RecursionError) as error:
        finding, name = _shown(value), f"{table}{key}"
        example = keys.list_examples.get(name)
        shown = example and f"write {key} = {example} in a file, or --set '{name}={example}'"
        raise ConfigError("config_value", where, finding, type_in_words(kind), shown) from error


def _has_huge_number(value: Any) -> bool:
    """True if a value is or contains an integer of more than 64 bits, which no setting can be."""
    if isinstance(value, Mapping):
        return any(map(_has_huge_number, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_huge_number, value))
    return isinstance(value, int) and value.bit_length() > 63


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def _shown(value: Any) -> str:
    """Return a value as JSON, shortened."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except (ValueError, RecursionError):
        return f"a value of type {type(value).__name__} that is too large"
    return _shortened(text)


def type_in_words(kind: Any) -> str:
    """Describe a type in words.

    Example:
        >>> (
        ...     type_in_words(Literal["last", "sum"]),
        ...     type_in_words(float | None),
        ...     type_in_words(tuple[str, ...]),
        ... )
        ('one of last, sum', 'a number or none', 'a list [text, ...]')
    """
    parts, origin = typing.get_args(kind), typing.get_origin(kind)
    if origin is Literal:
        return f"one of {', '.join(parts)}"
    if origin is tuple:
        return f"a list [{', '.join(map(type_in_words, parts))}]"
    words = _IN_WORDS.get(origin or kind)
    return words or " or ".join(map(type_in_words, parts))


def _from_text(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):  # TOMLDecodeError; an integer with too many digits
        return text
