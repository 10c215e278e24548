"""Errors that a user can act on: each has a message, a rule id and a hint.

    RolloutError
        InvariantError   rollout data breaks a named invariant
        InputError       a file, dataset, request or piece of user code cannot be used
        ConfigError      a setting is unknown, out of bounds, or contradicts another
        EngineError      an inference engine is down, rejects a request, or returns an unusable
                         response
        MissingExtra     an optional package is not installed

An error prints as its message followed by its rule id, `calls.jsonl:3: ... [json_line]`. In code,
compare `rule`, never the message.

Messages quote contents (`quoted`). In a block of `cleaning`, secrets are replaced before a content
is cut: half a secret is recognised by no scanner, and tells most of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from typing import Any, Self

_FIELDS = ("rule", "where", "got", "expected", "hint")


class RolloutError(ValueError):
    """An error in the user's data, settings or environment, described without a traceback.

    Args:
        rule: Id of the rule ("lengths_align", "json_line", ...).
        where: Location of the error: "file.jsonl:12", "part-00000.parquet, row 7", "--format".
        got: The value or problem found there.
        expected: What the rule requires.
        hint: How to fix the error: a command or an action.
        message: The complete message, including the location; if None, it is composed from `where`,
            `got` and `expected`.

    Example:
        >>> print(
        ...     RolloutError("json_line", "a.jsonl:3", "an open bracket", "a complete JSON object")
        ... )
        a.jsonl:3: found an open bracket; expected a complete JSON object. [json_line]
        >>> text = "a.jsonl:4: the line is cut off."
        >>> print(RolloutError("json_line", "a.jsonl:4", "a line cut off", message=text))
        a.jsonl:4: the line is cut off. [json_line]
    """

    def __init__(
        self,
        rule: str,
        where: str,
        got: str = "",
        expected: str = "",
        hint: str | None = None,
        *,
        message: str | None = None,
    ) -> None:
        self.rule, self.where, self.got, self.expected, self.hint = rule, where, got, expected, hint
        self.message = message
        super().__init__(rule, where, got, expected, hint)
        if hint:
            self.add_note(f"Hint: {hint}")

    def __str__(self) -> str:
        return f"{self.sentence} [{self.rule}]"

    @property
    def sentence(self) -> str:
        """The message without the rule id."""
        facts = f"found {self.got}; expected {self.expected}" if self.expected else self.got
        text = self.message or f"{self.where}: {facts}"
        return text if text.endswith((".", "!", "?")) else f"{text}."

    @property
    def failure(self) -> str:
        """Text for the `error` column; begins with the rule id, so that errors can be counted by id."""
        return f"{self.rule}: {self.sentence.removesuffix('.')}"

    def at(self, where: str, hint: str | None = None) -> Self:
        """Return a copy of the error with a more precise location and, if given, a new hint."""
        message = self.message
        if message is not None:
            named = self.where and self.where in message
            message = message.replace(self.where, where, 1) if named else f"{where}: {message}"
        return self.changed(where=where, hint=hint or self.hint, message=message)

    def changed(self, **values: Any) -> Self:
        """Return a copy of the error with other attributes."""
        error = copy(self)
        vars(error).update(values)
        error.args = tuple(getattr(error, name) for name in _FIELDS)
        error.__notes__ = [f"Hint: {error.hint}"] if error.hint else []
        return error

    def fields(self) -> dict[str, str | None]:
        """Return the structured fields and the message, for JSON."""
        return {name: getattr(self, name) for name in _FIELDS} | {"message": self.sentence}


class InvariantError(RolloutError):
    """Rollout data breaks a named invariant (`schemas.RULES`)."""


class InputError(RolloutError):
    """A file, a dataset, a request or a piece of user code cannot be used."""


class ConfigError(RolloutError):
    """A setting is unknown, out of bounds, or contradicts another one."""


class EngineError(RolloutError):
    """An inference engine is down, rejects a request, or returns an unusable response."""


class MissingExtra(RolloutError):
    """An optional package is not installed; the hint is the command that installs it."""


_KINDS: dict[str, type[RolloutError]] = {k.__name__: k for k in RolloutError.__subclasses__()}
_KINDS["RolloutError"] = RolloutError


def encode(error: RolloutError) -> dict[str, str | None]:
    """Convert an error to a JSON object that another process can `decode`."""
    kinds = [kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _KINDS]
    return {"kind": kinds[0], **error.fields()}


def decode(encoded: Mapping[str, Any]) -> RolloutError:
    """Rebuild an error from the output of `encode`."""
    fields = [encoded[name] for name in _FIELDS]
    return _KINDS[encoded["kind"]](*fields, message=encoded["message"])


def shortened(text: str, num_chars: int) -> str:
    """Shorten a text to at most `num_chars` characters, at a word and outside of brackets.

    Example:
        >>> shortened("the token ids [1, 2, 3] of step 4", 20), shortened("a" * 9, 8)
        ('the token ids...', 'aaaaa...')
    """
    if len(text) <= num_chars:
        return text
    cut = text[: num_chars - 3]
    whole = cut.rpartition(" ")[0]
    for pair in ("()", "[]", "{}"):
        while whole.count(pair[0]) > whole.count(pair[1]):
            whole = whole.rpartition(pair[0])[0]
    return f"{whole.rstrip(' ,;:') or cut}..."


def count(number: int, noun: str, ending: str = "s") -> str:
    """Format a number with its noun: `1 row`, `2 rows`, `2 trajectories`."""
    if number == 1:
        return f"1 {noun}"
    is_y = noun[-1:] == "y" and noun[-2:-1] not in set("aeiou") and ending == "s"
    return f"{number:,} {noun[:-1]}ies" if is_y else f"{number:,} {noun}{ending}"


def first_of(place: str, number: int) -> str:
    """Return the location of the first finding, followed by the total if there are several.

    Example:
        >>> first_of("row 3", 1), first_of("row 3", 12)
        ('row 3', 'row 3 (the first of 12)')
    """
    return place if number == 1 else f"{place} (the first of {number:,})"


_CLEAN: ContextVar[Callable[[str], str] | None] = ContextVar("clean", default=None)


@contextmanager
def cleaning(clean: Callable[[str], str] | None) -> Iterator[None]:
    """Clean the contents that errors quote in a block, and in the tasks that begin in it.

    Args:
        clean: Returns a text without its secrets; None: contents are quoted as they are.
    """
    token = _CLEAN.set(clean)
    try:
        yield
    finally:
        _CLEAN.reset(token)


def cleaned(text: str) -> str:
    """Return a text as errors may quote it, to be cut afterwards."""
    clean = _CLEAN.get()
    return text if clean is None else clean(text)


def fragment(text: str) -> str:
    """Quote a part of a content that was cut before; it is left out in a block of `cleaning`."""
    return repr(text if _CLEAN.get() is None else "...")


def quoted(text: str) -> str:
    """Quote the begin and the end of a long text.

    Example:
        >>> quoted("a" * 70)
        "'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa...aaaaaaaaaaaaaaa'"
    """
    text = cleaned(text)
    return repr(text if len(text) <= 60 else f"{text[:40]}...{text[-15:]}")
