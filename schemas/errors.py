"""Errors that speak to a user: which rule, where, what was found, what was expected, what to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn


class RolloutError(ValueError):
    """A user's input breaks a rule; the message is complete without a traceback.

    Args:
        rule: Name of the rule, as reports print it ("lengths_align", "json_line", ...).
        where: Place of the breach: "file.jsonl:12", "part-00000.parquet, row 7, column 'reward'".
        got: What was found there.
        expected: What the rule asks for.
        hint: The next command or action.

    Example:
        >>> print(
        ...     RolloutError(
        ...         "json_line", "a.jsonl:3", "an unfinished object", "one JSON object a line"
        ...     )
        ... )
        json_line: a.jsonl:3: got an unfinished object, expected one JSON object a line
    """

    def __init__(
        self, rule: str, where: str, got: str, expected: str = "", hint: str | None = None
    ) -> None:
        self.rule, self.where, self.got, self.expected, self.hint = rule, where, got, expected, hint
        super().__init__(rule, where, got, expected, hint)
        if hint:
            self.add_note(f"hint: {hint}")

    def __str__(self) -> str:
        expected = f", expected {self.expected}" if self.expected else ""
        return f"{self.rule}: {self.where}: got {self.got}{expected}"


def raise_first(errors: Sequence[RolloutError]) -> NoReturn:
    """Raise the first error, saying how many more records are bad."""
    e = errors[0]
    others = f" (and {len(errors) - 1} more records rejected)" if len(errors) > 1 else ""
    got, expected = (e.got, e.expected + others) if e.expected else (e.got + others, "")
    raise RolloutError(e.rule, e.where, got, expected, e.hint)
