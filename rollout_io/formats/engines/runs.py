"""Which records belong to which run: of sessions in several files, of scattered records, of forks.

An answer that several sessions have, because a session was forked, is trained on in one of them. In the
others, it is part of the prompt (`Run.copied`).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

from rollout_io.formats.base import Found, Input, Place, Rejected, Run
from rollout_io.formats.parsing.records import DUPLICATE, Record, incomplete
from schemas.errors import InputError, RolloutError

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


def last_in(start: str, after: Mapping[str, str | None]) -> str:
    """Return the end of a chain of names; the start if it is a circle."""
    seen, name = {start}, start
    while (following := after.get(name)) not in {None, name}:
        if following in seen:
            return start
        seen.add(following)
        name = following
    return name


def without_base(names: Names, base: Base) -> InputError:
    """Return the error for a file without the records that it continues."""
    finding = f"the session continues session {base.session!r}"
    expected = f"the first {base.num_records} records of that session"
    hint = "convert both sessions together: their prompts begin with these records"
    return InputError("message", names.session, finding, expected, hint)


def repeated(file: File, other: File) -> Iterator[Rejected]:
    """Yield the rejected records of a file that is a copy of another."""
    hint = "delete the copy of the file"
    for place, first in zip(file.places, other.places, strict=True):
        finding = f"the record is a copy of {first.where}"
        yield Rejected(place, InputError(DUPLICATE, place.where, finding, hint=hint))


def gathered(
    items: Iterable[Found], key: Callable[[Place], Hashable] | None = None
) -> Iterator[Found]:
    """Yield one run per group of records, in the order of the first ones; other items come first.

    A group with a damaged record is rejected. The first value of each label counts.

    Args:
        items: What was found in the logs: a run for each record, or for each part of one.
        key: Returns what a record shares with the others of its run, even if it is damaged; None: runs
            have names of their own, and damaged records have none.
    """
    runs: dict[Hashable, tuple[Run, list[Place]]] = {}
    damage: dict[Hashable, RolloutError] = {}
    for item in items:
        if isinstance(item, Run):
            name = item.instance_id if key is None else key(item.places[0])
            run, places = runs.setdefault(name, (item, []))
            places += item.places
            run.labels = {**run.labels, **item.labels, **run.labels}  # the first values
            continue
        yield item
        if isinstance(item, Rejected) and key is not None:
            damage.setdefault(key(item.place), item.error)
    for name, (run, places) in runs.items():
        run.places = places
        yield from incomplete(places, damage[name]) if name in damage else [run]


COPIED = "answers that are part of the prompt here, because another session has them too (forks)"
"""Note about these answers."""

Answers = Mapping[int, Sequence[bytes]]
"""Digests of each answer of a session, by the index of its place."""


def digest(*parts: str) -> bytes:
    """Return a digest by which copies of an answer are found."""
    text = "\0".join(parts).encode(errors="surrogatepass")
    return hashlib.blake2b(text, digest_size=16).digest()


Name = TypeVar("Name", bound=Hashable)


def copied_answers(sessions: Mapping[Name, Answers]) -> dict[Name, dict[int, Name]]:
    """Return the copied answers of each session by index, each with the session that keeps it.

    The first session that has an answer keeps it: originals come before forks, or sessions with fewer
    answers first, or a fork could leave its original without answers.
    """
    keepers: dict[bytes, Name] = {}
    copied: dict[Name, dict[int, Name]] = {}
    for name, session in sessions.items():
        answers = session.items()
        keepers_of = {
            i: next((keepers[d] for d in digests if d in keepers), name) for i, digests in answers
        }
        copied[name] = {i: keeper for i, keeper in keepers_of.items() if keeper != name}
        for _, digests in answers:
            for one in digests:
                keepers.setdefault(one, name)
    return copied


def run_of(
    name: str,
    places: Sequence[Place],
    labels: Mapping[str, str],
    answers: Answers,
    copied: Mapping[int, str],
) -> Iterator[Found]:
    """Yield the run of a session; one without an answer of its own is rejected as a copy."""
    if not copied or len(copied) < len(answers):
        yield Run(
            instance_id=name,
            repetition_id=0,
            places=places,
            labels=labels,
            copied=frozenset(copied),
        )
        return
    others = Counter(copied.values()).most_common(1)
    finding = (
        f"the session has no answer of its own: session {others[0][0]!r} has all {len(copied)}"
    )
    hint = "delete the copy, or convert it to a separate dataset"
    for place in places:
        yield Rejected(place, InputError(DUPLICATE, place.where, finding, hint=hint))
