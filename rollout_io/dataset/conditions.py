"""Row conditions, in SQL or as Polars expressions, restricted to the columns of one row.

SQL is parsed and checked by `sql_expressions`. The syntax tree that Polars builds then decides
whether the expression is a condition on a row, and whether its values are bounded: padding,
repetition and replacement can make gigabytes of a short text, inside Polars, where nothing
interrupts them. Their lengths must therefore be literals, and small.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import polars as pl

from schemas.errors import ConfigError

POLARS_ERRORS = (pl.exceptions.PolarsError, pl.exceptions.PanicException)
"""Exceptions that Polars raises for a condition (`PanicException` is not an `Exception`)."""

_HINT = (
    "write a condition as you would after WHERE in SQL: reward > 0 AND agent = 'main' for a row, "
    "return > 0 AND any(agent = 'main') for a trajectory"
)
_OF_TYPES = "compare string with numeric"
_QUOTES = "write numbers without quotes and text in single quotes: step_index = 1, agent = 'main'"
_VALUES = frozenset({"Column", "Literal", "FieldByName"})
_WINDOWS = frozenset({"Over", "Window"})
_LIST_SCOPE = "Eval"
_ACROSS_ROWS = {
    "Agg": "an aggregate",
    "Len": "an aggregate",
    "Rank": "a rank",
    "IntRange": "a row number",
    "Shift": "a shift",
}
_NOT_ROWWISE = {
    "SubPlan": "a subquery",
    "Selector": "a pattern of column names",
    "Explode": "an exploded list",
}

MOST_LENGTH = 10_000
"""Limit on the characters or items that padding and repetition may make."""

MOST_GROWTH = 1000
"""Limit on the product of the factors by which all replacements and joins may lengthen a text."""

_LENGTHS = {
    "PadStart": "lpad",
    "PadEnd": "rpad",
    "ZFill": "zfill",
    "RepeatBy": "repeat_by",
}
_FACTORS = {"Replace": "replace", "Join": "array_to_string"}
_REFUSED = {
    "IntRanges": "generate_series",
    "ReplaceMany": "replace_many",
}


def condition_of(condition: str | pl.Expr, text: str | None = None) -> pl.Expr:
    """Parse a condition without opening a file or evaluating a row.

    Args:
        condition: A Polars expression over any columns, or SQL such as `reward > 0 AND agent =
            'main'`. An aggregate needs a window: `max(step_index) OVER (PARTITION BY
            trajectory_id)`.
        text: The condition as the user wrote it, for messages; None: `condition`.

    Raises:
        ConfigError: `condition`: the text is not SQL, or is not a condition on each row.

    Example:
        >>> str(condition_of("reward > 0"))
        '[(col("reward")) > (dyn int: 0)]'
    """
    where = repr(text or str(condition))
    if isinstance(condition, str):
        condition = _parsed(condition, where)
    try:
        tree = _as_json(condition)
    except RecursionError:
        raise _too_long(where) from None
    if (part := _first(tree, _NOT_ROWWISE)) is not None:
        raise ConfigError("condition", where, part, "a condition on each row", _HINT)
    if (part := _first(tree, _ACROSS_ROWS)) is not None:
        finding, expected = f"{part} over the entire dataset", "a condition on each row"
        hint = "aggregate over groups: max(step_index) OVER (PARTITION BY trajectory_id)"
        raise ConfigError("condition", where, finding, expected, hint)
    if (part := _grown_text(tree)) is not None:
        hint = "compare the column itself, or add a column with the computed text first"
        raise ConfigError("condition", where, part, "", hint)
    return condition


def refused(error: BaseException, where: str, types: str = "") -> ConfigError:
    """Convert a Polars error to a `ConfigError`.

    Args:
        error: The exception that Polars raised.
        where: The condition.
        types: Result of `types_in`, to name the columns.
    """
    finding = (str(error).strip() or type(error).__name__).split("\n")[0]
    if types:
        finding = f"{finding.rstrip('.')} ({types})"
    return ConfigError("condition", where, finding, "", _QUOTES if _OF_TYPES in finding else _HINT)


def types_in(names: Iterable[str], schema: Mapping[str, pl.DataType]) -> str:
    """List columns with their types, for messages: "reward: Float64"."""
    return ", ".join(f"{n}: {schema[n]}" for n in dict.fromkeys(names) if n in schema)


def check_columns(used: Sequence[str], columns: Sequence[str], where: str, text: str) -> None:
    """Check that a table has every column that a condition uses.

    Args:
        used: Columns that the condition reads.
        columns: Columns of the table.
        where: Location to name in the message.
        text: The condition as the user wrote it.

    Raises:
        ConfigError: `known_column`: the condition uses an unknown column (the error points to the
            first one).
    """
    for name in used:
        if name in columns:
            continue
        near = difflib.get_close_matches(name, columns, 1)
        hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(columns)}."
        hint += f" Put text values in quotes: '{name}'"
        without_texts = re.sub(r"'(?:[^']|'')*'", lambda match: " " * len(match[0]), text)
        match = re.search(rf"(?<!\w){re.escape(name)}(?!\w)", without_texts)
        place = f" (character {match.start() + 1} of the condition)" if match else ""
        finding = f"the dataset has no column {name!r}{place}"
        raise ConfigError("known_column", where, finding, "", hint)


def holds(condition: str | pl.Expr) -> pl.Expr:
    """Turn a condition on a row into a Boolean expression; null is treated as false.

    Args:
        condition: See `condition_of`.

    Raises:
        ConfigError: `condition`: see `condition_of`.
    """
    return pl.when(condition_of(condition)).then(statement=True).otherwise(statement=False)


def parsed(text: str) -> tuple[pl.Expr, dict[str, tuple[str, pl.Expr]]]:
    """Parse a condition on a trajectory.

    Returns:
        The expression, with a column in place of each call of `any`, `all` and `last`; and each
        such column with the function and its argument.

    Raises:
        ConfigError: `condition`: the text is not SQL.
    """
    from rollout_io.dataset.sql_expressions import split_sql

    with _refusing(repr(text)):
        outer, parts = split_sql(text)
        inner = {name: (function, pl.sql_expr(sql)) for name, (function, sql) in parts.items()}
        return pl.sql_expr(outer), inner


def _parsed(text: str, where: str) -> pl.Expr:
    from rollout_io.dataset.sql_expressions import checked_sql

    with _refusing(where):
        return pl.sql_expr(checked_sql(text))


@contextmanager
def _refusing(where: str) -> Iterator[None]:
    """Convert what parsers raise for a text to a `ConfigError`."""
    from rollout_io.dataset.sql_expressions import NotAnExpressionError, TooLongError

    try:
        yield
    except NotAnExpressionError as error:
        raise ConfigError("condition", where, str(error), "", _HINT) from None
    except TooLongError:
        raise _too_long(where) from None
    except (*POLARS_ERRORS, OSError) as error:
        raise refused(error, where) from None


def _too_long(where: str) -> ConfigError:
    finding = (
        "the condition has too many names and operators (at most 500), or is nested too deeply"
    )
    hint = "write a list of values as trajectory_id IN ('a_0', 'a_1')"
    return ConfigError("condition", f"{where[:60]}...", finding, "", hint)


def _as_json(expression: pl.Expr) -> Any:
    try:
        return json.loads(expression.meta.serialize(format="json"))
    except pl.exceptions.PolarsError:
        return None  # the expression contains a Python function, which Polars cannot serialise


def _first(tree: Any, kinds: dict[str, str]) -> str | None:
    """Find a node of one of these kinds in a syntax tree; return its description, or None.

    For `_ACROSS_ROWS`, nodes inside windows and list operations are ignored.
    """
    nodes, bounded = [tree], kinds is _ACROSS_ROWS
    while nodes:
        node = nodes.pop()
        if isinstance(node, dict):
            for key, value in node.items():
                if key in kinds:
                    return kinds[key]
                if key not in _VALUES and not (bounded and _is_bounded(key, value)):
                    nodes.append(value)
        elif isinstance(node, list):
            nodes += node
        elif isinstance(node, str) and node in kinds:
            return kinds[node]
    return None


def _is_bounded(key: str, value: Any) -> bool:
    """True if a node is evaluated within one group of rows (a window) or within one row's list."""
    if key in _WINDOWS:
        return _first(value.get("partition_by"), {"Column": "a column"}) is not None
    return key == _LIST_SCOPE


def _grown_text(tree: Any) -> str | None:
    """Find a function that may make a value much longer than its inputs."""
    growth = 1
    for name, arguments in _functions(tree):
        if name in _REFUSED:
            return f"{_REFUSED[name]}, whose result has no bound"
        if name in _LENGTHS:
            length = _number(arguments[1:])
            if length is None or length > MOST_LENGTH:
                shown = "a computed length" if length is None else f"length {length:,}"
                return f"{_LENGTHS[name]} with {shown} (at most {MOST_LENGTH:,}, as a number)"
        if name in _FACTORS:
            text = _text(arguments[-1:])
            if text is None:
                return f"{_FACTORS[name]} with a computed text; its last argument must be a literal"
            growth *= max(len(text) + (_text(arguments[1:2]) == ""), 1)
            if growth > MOST_GROWTH:
                return f"{_FACTORS[name]} may make a text over {MOST_GROWTH:,} times longer"
    return None


def _functions(tree: Any) -> Iterator[tuple[str, list[Any]]]:
    """Yield the name and the arguments of each function in a tree."""
    nodes = [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, list):
            nodes += node
        elif isinstance(node, dict):
            nodes += [value for key, value in node.items() if key != "Literal"]
            called = node.get("Function")
            if isinstance(called, dict):
                for name in _names(called.get("function")):
                    yield name, called.get("input") or []


def _names(function: Any) -> list[str]:
    """Return the names of a function: its group's, and its own."""
    if isinstance(function, str):
        return [function]
    if not isinstance(function, dict):
        return []
    return [name for key, value in function.items() for name in (key, *_names(value))]


def _literal(arguments: list[Any], kind: type) -> Any:
    """Return the value of the first argument if it is a literal of a kind; else None."""
    node = arguments[0] if arguments else None
    if not isinstance(node, dict) or "Literal" not in node:
        return None
    while isinstance(node, dict) and len(node) == 1:  # {"Literal": {"Dyn": {"Int": 5}}}
        (node,) = node.values()
    return node if isinstance(node, kind) and not isinstance(node, bool) else None


def _number(arguments: list[Any]) -> int | None:
    number: int | None = _literal(arguments, int)
    return number


def _text(arguments: list[Any]) -> str | None:
    text: str | None = _literal(arguments, str)
    return text
