"""Sessions in the rows of a database, or in another store that has many of them.

A format opens its store, which lists the sessions and yields the messages of one as JSON. The rest is
as for files of records (`engines.sessions`): the messages of a session are its records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rollout_io.formats.base import Found, Input, Place, Progress, Rejected
from rollout_io.formats.engines.sessions import Names, Sessions
from rollout_io.formats.parsing.jsonl import contained
from rollout_io.formats.parsing.records import Record
from rollout_io.formats.start import Start
from schemas.errors import InputError, RolloutError


class Store(Protocol):
    """A store of sessions, while it is open."""

    def sessions(self) -> Iterable[str]:
        """Return the names of all sessions, in order."""

    def names(self, session: str) -> Names:
        """Return the names of a session."""

    def records(self, session: str) -> Iterable[tuple[str, bytes]]:
        """Return the messages of a session in order: the name and the JSON of each."""


@dataclass(frozen=True, kw_only=True)
class Rows(Sessions):
    """A format whose sessions are in a store.

    Attributes:
        is_store: True if an input is a store of this format.
        open: Opens a store, given its path and its name in messages.
    """

    has_parts: bool = False
    is_store: Callable[[Start], bool]
    open: Callable[[Path, str], AbstractContextManager[Store]]

    def recognizes(self, start: Start) -> bool:
        """True for a store of this format."""
        return self.is_store(start)

    def find(self, inputs: Sequence[Input], progress: Progress) -> Iterator[Found]:
        """Yield one run per session; one that several stores have is read from the first database."""
        yield from super().find(sorted(inputs, key=lambda log: log.path.is_dir()), progress)

    def _sessions_in(
        self, log: Input, progress: Progress
    ) -> Iterator[tuple[Names, Iterable[Record]] | Rejected]:
        progress(log.path.stat().st_size)
        try:
            with contained(log.name), self.open(log.path, log.name) as store:
                for session in [*store.sessions()]:
                    place = Place(log.path, f"{log.name}, session {session}", None, 1)
                    try:
                        names = store.names(session)
                    except RolloutError as error:
                        yield Rejected(place, error)
                    else:
                        yield names, self._records_of(store, session, log)
        except RolloutError as error:
            yield Rejected(Place(log.path, log.name, None, 1), error)

    def _records_of(self, store: Store, session: str, log: Input) -> Iterator[Record]:
        for name, content in store.records(session):
            where = f"{log.name}, session {session}, {name}"
            yield Record(Place(log.path, where, None, len(content), session), content)

    def _read(self, places: Sequence[Place]) -> tuple[Names, list[Record]]:
        place, session = places[0], str(places[0].part)
        name = place.where.partition(", session ")[0]
        with self.open(place.path, name) as store:
            names = store.names(session)
            records = [*self._records_of(store, session, Input(name, place.path))]
        if [record.place.where for record in records[: len(places)]] != [p.where for p in places]:
            finding = "the session changed while it was being read"
            hint = "convert the log after its writer has finished"
            raise InputError("input_file", place.where, finding, hint=hint)
        return names, records[: len(places)]

    def _file_of(self, place: Place) -> Any:
        return place.path, place.part
