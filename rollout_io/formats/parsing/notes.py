"""Notes about what a log lacks or how its text was changed, counted while a run is read.

Whoever finds such a fact calls `note`; the conversion collects the notes of each run with `noted`,
and the summary adds them up. Outside of `noted`, a note has no effect.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_NOTES: ContextVar[Counter[str] | None] = ContextVar("notes", default=None)


@contextmanager
def noted() -> Iterator[Counter[str]]:
    """Collect the notes that are made in this block."""
    found: Counter[str] = Counter()
    token = _NOTES.set(found)
    try:
        yield found
    finally:
        _NOTES.reset(token)


def note(what: str, number: int = 1) -> None:
    """Add to the count of a note; nothing is added for 0.

    Args:
        what: What is counted, in the plural: "answers that ...".
        number: How many there are.
    """
    notes = _NOTES.get()
    if notes is not None and number:
        notes[what] += number


def note_run(what: str) -> None:
    """Add the current run to the count of a note, once for all its records.

    Args:
        what: What is counted, in the plural: "runs with ...".
    """
    notes = _NOTES.get()
    if notes is not None:
        notes[what] = 1
