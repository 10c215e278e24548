"""Row conditions in SQL, restricted to expressions over the columns of one row.

Polars reads the files of a subquery (`reward IN (SELECT x FROM read_csv('...'))`) while it parses
the condition. The tokens of a condition are therefore checked first: without SELECT, FROM, WITH,
TABLE and VALUES there is no subquery, and string literals, quoted names and numbers are accepted
only in forms that all SQL tokenizers read the same way. The syntax tree that Polars builds then
decides whether the rest is a condition on a row.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from rollout_io.dataset.condition_growth import grown_text
from schemas.errors import ConfigError

MOST_OPERATORS = 500
"""Limit on names and operators per condition; thousands overflow the stack of Polars' parser."""

POLARS_ERRORS = (pl.exceptions.PolarsError, pl.exceptions.PanicException)
"""Exceptions that Polars raises for a condition (`PanicException` is not an `Exception`)."""

_TOKEN = re.compile(
    r"""\s+
    | (?P<text>'(?:[^'\\]|''|\\(?!'))*'(?!'))
    | (?P<name>"(?:[^"\\]|"")*"(?!"))
    | (?P<number>\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)(?![\w'"])
    | (?P<word>[^\W\d]\w*)(?!['"])
    | (?P<comment>--|/\*)
    | (?P<comma>,)
    | [-+*/%<>=!~|&^().\[\]:]""",
    re.VERBOSE,
)
_QUERY_WORDS = frozenset({"select", "from", "with", "table", "values"})
_HINT = "write a condition as you would after WHERE in SQL: reward > 0 AND agent = 'main'"
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


def condition_of(condition: str | pl.Expr) -> pl.Expr:
    """Parse a condition without opening a file or evaluating a row.

    Args:
        condition: A Polars expression over any columns, or SQL such as `reward > 0 AND agent =
            'main'`. An aggregate needs a window: `max(step_index) OVER (PARTITION BY
            trajectory_id)`.

    Raises:
        ConfigError: `condition`: the text is not SQL, or is not a condition on each row.

    Example:
        >>> str(condition_of("reward > 0"))
        '[(col("reward")) > (dyn int: 0)]'
    """
    where = repr(condition if isinstance(condition, str) else str(condition))
    if isinstance(condition, str):
        _check_words(condition, where)
        try:
            condition = pl.sql_expr(condition)
        except (*POLARS_ERRORS, OSError) as error:
            raise refused(error, where) from None
    try:
        tree = _as_json(condition)
    except RecursionError:
        raise _too_long(where) from None
    if (found := _first(tree, _NOT_ROWWISE)) is not None:
        raise ConfigError("condition", where, found, "a condition on each row", _HINT)
    if (found := _first(tree, _ACROSS_ROWS)) is not None:
        got, expected = f"{found} over the entire dataset", "a condition on each row"
        hint = "aggregate over groups: max(step_index) OVER (PARTITION BY trajectory_id)"
        raise ConfigError("condition", where, got, expected, hint)
    if (found := grown_text(tree)) is not None:
        hint = "compare the column itself, or add a column with the computed text first"
        raise ConfigError("condition", where, found, "", hint)
    return condition


def refused(error: BaseException, where: str, types: str = "") -> ConfigError:
    """Convert a Polars error to a `ConfigError`.

    Args:
        error: The exception that Polars raised.
        where: The condition.
        types: Result of `types_in`, to name the columns.
    """
    got = (str(error).strip() or type(error).__name__).split("\n")[0]
    if types:
        got = f"{got.rstrip('.')} ({types})"
    return ConfigError("condition", where, got, "", _HINT)


def types_in(condition: pl.Expr, schema: Mapping[str, pl.DataType]) -> str:
    """List the columns of a condition with their types, for messages: "reward: Float64"."""
    names = dict.fromkeys(condition.meta.root_names())
    return ", ".join(f"{name}: {schema[name]}" for name in names if name in schema)


def check_columns(used: Sequence[str], known: Sequence[str], where: str, text: str) -> None:
    """Check that a table has every column that a condition uses.

    Args:
        used: Columns that the condition reads.
        known: Columns of the table.
        where: Location to name in the message.
        text: The condition as the user wrote it.

    Raises:
        ConfigError: `known_column`: the condition uses an unknown column (the error points to the
            first one).
    """
    for name in used:
        if name in known:
            continue
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(known)}."
        hint += f" Put text values in quotes: '{name}'"
        without_texts = re.sub(r"'(?:[^']|'')*'", lambda found: " " * len(found[0]), text)
        found = re.search(rf"(?<!\w){re.escape(name)}(?!\w)", without_texts)
        place = f" (character {found.start() + 1} of the condition)" if found else ""
        got = f"the dataset has no column {name!r}{place}"
        raise ConfigError("known_column", where, got, "", hint)


def _check_words(text: str, where: str) -> None:
    """Reject SQL that could be anything but an expression over columns."""
    position, before, num_operators = 0, "", 0
    while position < len(text):
        token = _TOKEN.match(text, position)
        if token is None or token["comment"]:
            got = f"unexpected {text[position : position + 12]!r} at character {position + 1}"
            raise ConfigError("condition", where, got, "", _HINT)
        word = (token["word"] or "").lower()
        if word in _QUERY_WORDS and (before, word) != ("distinct", "from"):
            # `IS DISTINCT FROM` is the only use of FROM inside an expression.
            hint = f"write '{word}' for a text value, \"{word}\" for a column"
            got = f"a condition cannot contain {token[0]}, which is a keyword of SQL queries"
            raise ConfigError("condition", where, got, "", hint)
        num_operators += token.lastgroup in {None, "name", "word"} and not token[0].isspace()
        before = before if token[0].isspace() else word
        position = token.end()
    if num_operators > MOST_OPERATORS:
        raise _too_long(where)


def _too_long(where: str) -> ConfigError:
    got = f"the condition has too many names and operators (at most {MOST_OPERATORS})"
    hint = "write a list of values as trajectory_id IN ('a_0', 'a_1')"
    return ConfigError("condition", f"{where[:60]}...", got, "", hint)


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
