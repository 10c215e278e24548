"""Bounds on the values that a condition computes from one row.

Padding, repetition and replacement can make gigabytes of a short text, inside Polars, where nothing
interrupts them. Their lengths must therefore be literals, and small.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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


def grown_text(tree: Any) -> str | None:
    """Find a function that may make a value much longer than its inputs.

    Args:
        tree: Polars' JSON of an expression.

    Returns:
        What was found, for an error message; None if all functions are bounded.
    """
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
    found: int | None = _literal(arguments, int)
    return found


def _text(arguments: list[Any]) -> str | None:
    found: str | None = _literal(arguments, str)
    return found
