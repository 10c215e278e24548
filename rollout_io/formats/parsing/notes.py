"""Notes about what a log lacks or how its text was changed, counted while a run is read.

Whoever finds such a fact calls `note`; the conversion collects the notes of each run with `noted`,
and the summary adds them up. Outside of `noted`, a note has no effect. Notes whose name begins with
`UNREAD` count content that a reader does not know (`rollout_io.formats.contents`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

UNREAD = "unread: "
OTHER = "..."
_MAX_UNREAD = 100

_NOTES: ContextVar[Counter[str] | None] = ContextVar("notes", default=None)


@contextmanager
def noted() -> Iterator[Counter[str]]:
    """Collect the notes that are made in this block."""
    counts: Counter[str] = Counter()
    token = _NOTES.set(counts)
    try:
        yield counts
    finally:
        _NOTES.reset(token)


def note(what: str, number: int = 1) -> None:
    """Add to the count of a note; nothing is added for 0."""
    notes = _NOTES.get()
    if notes is not None and number:
        notes[what] += number


def note_run(what: str) -> None:
    """Add the current run to the count of a note, once for all its records."""
    notes = _NOTES.get()
    if notes is not None:
        notes[what] = 1


def note_unread(name: str) -> None:
    """Count content that the reader does not know; beyond 100 names, all others count as one."""
    notes = _NOTES.get()
    if notes is None:
        return
    _count(notes, UNREAD + name, 1)


def added(notes: Mapping[str, int], more: Mapping[str, int]) -> dict[str, int]:
    """Return the sums of two sets of notes, with the same limit on names as in `note_unread`."""
    total = dict(notes)
    for what, number in more.items():
        _count(total, what, number)
    return total


def _count(notes: dict[str, int], what: str, number: int) -> None:
    if what.startswith(UNREAD) and what not in notes:
        num_names = sum(key.startswith(UNREAD) for key in notes)
        what = what if num_names < _MAX_UNREAD else UNREAD + OTHER
    notes[what] = notes.get(what, 0) + number


def unread_in(notes: Mapping[str, int]) -> dict[str, int]:
    """Return the counts of unknown content among notes, by name, the most frequent first."""
    entries = [
        (what.removeprefix(UNREAD), n) for what, n in notes.items() if what.startswith(UNREAD)
    ]
    return dict(sorted(entries, key=lambda entry: (entry[0] == OTHER, -entry[1], entry[0])))
