"""Names and files of sessions: which records belong to which session."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from rollout_io.formats.base import Input, Place
from rollout_io.formats.parsing.lines import Record
from schemas.errors import RolloutError

_MAX_BASES = 100


class Base(NamedTuple):
    """Where a file begins that only refers to what precedes it.

    Attributes:
        session: Session that it continues.
        num_records: Number of that session's records that precede those of the file.
    """

    session: str
    num_records: int


class Names(NamedTuple):
    """Names of a file.

    Attributes:
        session: Session of the file.
        parent: Session that started this one as a sub-agent; None if it is no sub-agent, "" if it is
            the one whose answers it repeats.
        agent: Name of the sub-agent.
        origin: Session with copies of whose records it begins.
        base: What it continues; None if it begins on its own.
        labels: Other labels of the run; those without a value are left out.
        is_empty: True if the first records say nothing; a file without others is then left out.
        instance: Task of the run; None: the session is one of its own.
        repetition: Index of the attempt at this task; None: by the order of the log.
    """

    session: str
    parent: str | None = None
    agent: str | None = None
    origin: str | None = None
    base: Base | None = None
    labels: Mapping[str, str | None] = {}
    is_empty: bool = False
    instance: str | None = None
    repetition: int | None = None

    def joined(self, other: Names) -> Names:
        """Return the names of a session, given those in another record of it; the first ones count."""
        is_agent = self.parent is not None and other.parent is not None
        filled_in = {name: value for name, value in self.labels.items() if value}
        return self._replace(
            parent=self.parent or other.parent if is_agent else None,
            origin=self.origin or other.origin,
            labels={**other.labels, **filled_in},
        )


@dataclass(slots=True)
class File:
    """The records of a file.

    Attributes:
        answers: Digests of each record that another session may have too, by the index of its place.
        kept: Names of records that are no answers of this session where they are logged again.
    """

    names: Names
    places: list[Place] = field(default_factory=list)
    answers: dict[int, list[bytes]] = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)
    damage: RolloutError | None = None

    def take(self, other: File) -> None:
        """Add the records of another file of the same session, or of a sub-agent."""
        start = len(self.places)
        self.answers |= {start + at: digests for at, digests in other.answers.items()}
        self.places += other.places
        self.damage = self.damage or other.damage


def by_session(
    log: Input, records: Iterable[Record], names_in: Callable[[Path, bytes], Names | None]
) -> Iterator[tuple[Names, list[Record]]]:
    """Yield the sessions of a file whose records name theirs; the first one has those that do not."""
    names, sessions, rest = dict[str, Names](), dict[str, list[Record]](), list[Record]()
    for record in records:
        record_names = names_in(Path(log.name), record.content)
        if record_names is None:
            rest.append(record)
            continue
        name = record_names.session
        names[name] = names[name].joined(record_names) if name in names else record_names
        sessions.setdefault(name, []).append(record)
    first = next((name for name in sessions if name != log.name), log.name)
    sessions.setdefault(first, []).extend(rest)
    for name, session_records in sessions.items():
        yield names.get(name, Names(name)), session_records


def join_agents(sessions: dict[str, list[File]]) -> None:
    """Add the records of sub-agents that do not name their parent to the session they repeat."""
    files = {name: session_files[0] for name, session_files in sessions.items() if session_files}
    holders = {
        one: name
        for name, file in files.items()
        for digests in file.answers.values()
        for one in digests
        if file.names.parent is None
    }
    for name, file in files.items():
        if file.names.parent == "":
            repeated = (holders.get(one) for digests in file.answers.values() for one in digests)
            parent = next(filter(None, repeated), None)
            if parent is not None:
                files[parent].take(file)
                del sessions[name]


def logical(base: Base, sessions: Mapping[str, list[File]], depth: int = 0) -> list[Place]:
    """Return the first records of a session, with those that its files only refer to."""
    records: list[Place] = []
    for file in sessions.get(base.session, ()):
        before = file.names.base
        if before is not None and before.session != base.session and depth < _MAX_BASES:
            records = logical(before, sessions, depth + 1)
        records = records[: before.num_records if before is not None else 0] + file.places
    return records[: base.num_records]
