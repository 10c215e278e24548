r"""Sessions of agent programs, in files of records or in a store; each is a run with its sub-agents.

A format declares its records (`Grammar`), how a file is called (`names`), and one function that tells
what each record says to the contexts of its agent (`read`). The rest is the same for all of them:

- Files of one session are one run; so are the files of the sub-agents that it started. If a record of
  one is damaged, none of the run is used.
- A fork begins with copies of records of another session, or only refers to them. Answers that several
  sessions have are trained on in one; in the others they are part of the prompt.
- A file that continues another one from a record on (`Names.base`) begins where that record ends.
- Where each record names its session (`names_in`), a file may have several, and a session is read as
  one, whatever files its records are in.

- A store, such as a database, has many sessions (`Rows`): it lists them, and yields the messages of one
  as JSON, which are its records.

    file a:  1 2 3 4      file b, with base (a, 2):  5 6      contexts:  1 - 2 - 3 - 4
                                                                             \ 5 - 6
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from rollout_io.dataset.opening import read_input
from rollout_io.formats.base import (
    About,
    Adapter,
    Found,
    Input,
    Options,
    Place,
    Progress,
    Rejected,
    Run,
    Trajectory,
)
from rollout_io.formats.contexts import Contexts, Said
from rollout_io.formats.engines.files import Start, readable
from rollout_io.formats.engines.runs import (
    Base,
    File,
    Names,
    by_session,
    copied_answers,
    digest,
    join_agents,
    last_in,
    logical,
    repeated,
    run_of,
    without_base,
)
from rollout_io.formats.grammar import Grammar, account
from rollout_io.formats.parsing.jsonl import (
    contained,
    decode_document,
    decode_line,
    refuse_not_utf8,
)
from rollout_io.formats.parsing.messages import by_marks
from rollout_io.formats.parsing.records import (
    Record,
    incomplete,
    lines_of,
    natural_key,
    read_record,
)
from schemas.errors import InputError, RolloutError

__all__ = ["GROUPS", "Base", "File", "Line", "Names", "Rows", "Sessions"]
GROUPS = "inferred: each session is a separate instance"
_DOCUMENT, _OF_MANY = "document", "event"
"""Parts of the places of records that are a whole file, and one of a directory's files."""
_NUM_FIRST = 8


class Line(NamedTuple):
    """A record with its struct, for the reader of a format."""

    where: str
    kind: str
    record: Any


@dataclass(frozen=True, kw_only=True)
class Sessions(Grammar):
    """A format of sessions.

    Attributes:
        names: Returns the names of a file from its path and its first records; by default, the path is
            the session.
        names_in: Returns the names in a record, given the path of its file and its JSON, if records name
            their sessions; None for a record of the first session of its file. It raises no error: what
            cannot be read and names no session has the path as its session.
        read: Tells the contexts of an agent what its records say.
        is_record: True if a decoded record is of this format, for detection.
        files: Pattern of the files with one record each, if a session may be a directory of them.
        has_parts: True if a session may have several files; else a second one is an older copy.
        identity: Returns what identifies a record that other sessions may have copies of; None for any
            other. Its arguments are the type of the record and the JSON of its fields.
        is_prefix: True if a record is a copy only if all before it are, as in forks that begin with the
            records of their origin.
        names_origin: True if a fork names its origin, so that other sessions have no copies.
    """

    names: Callable[[Path, Sequence[Any]], Names] = lambda path, _: Names(str(path))
    names_in: Callable[[Path, bytes], Names | None] | None = None
    read: Callable[[Iterator[Line], Contexts], None]
    is_record: Callable[[Mapping[str, Any]], bool] = lambda _: False
    files: str = ""
    has_parts: bool = True
    identity: Callable[[str, bytes], str | None] | None = None
    is_prefix: bool = False
    names_origin: bool = True

    def adapter(self, summary: str, noun: str = "session") -> Adapter:
        """Return the adapter of the format."""
        return Adapter(
            summary=summary,
            recognizes=self.recognizes,
            find=self.find,
            read=self.read_run,
            is_text=True,
            noun=noun,
            is_agent=True,
            contents=self.contents,
        )

    def recognizes(self, start: Start) -> bool:
        """True if a file has a record of this format among its first, or a directory has files of them."""
        first = start if start.is_file else next(map(Start, start.below(self.files)), None)
        return first is not None and any(map(self.is_record, first.records))

    def find(self, inputs: Sequence[Input], progress: Progress) -> Iterator[Found]:
        """Yield one run per session, with the files of its sub-agents."""
        yield About("groups", GROUPS)
        sessions: dict[str, list[File]] = {}
        for log in inputs:
            for session in self._sessions_in(log, progress):
                if isinstance(session, Rejected):
                    yield session
                    continue
                names, records = session
                file = File(names)
                yield from self._find_file(records, file)
                others = sessions.setdefault(names.session, [])
                if self.names_in is not None and others:
                    others[0].names = others[0].names.joined(names)
                    others[0].take(file)
                    continue
                copy = next((other for other in others if self._is_copy(file, other)), None)
                if copy is not None:
                    yield from repeated(file, copy)
                elif file.places and not names.is_empty and (self.has_parts or not others):
                    others.append(file)
        join_agents(sessions)
        yield from self._runs({name: files for name, files in sessions.items() if files})

    def _sessions_in(
        self, log: Input, progress: Progress
    ) -> Iterator[tuple[Names, Iterable[Record]] | Rejected]:
        """Yield the names and the records of each session of an input."""
        records = self._records(log, progress)
        if self.names_in is not None:
            yield from by_session(log, records, self.names_in)
            return
        first = [*islice(records, _NUM_FIRST)]
        typed = self._typed(first)
        names = self.names(Path(log.name), typed)
        is_empty = names.is_empty and len(typed) == len(first) < _NUM_FIRST
        yield names._replace(is_empty=is_empty), chain(first, records)

    def _read(self, places: Sequence[Place]) -> tuple[Names, list[Record]]:
        """Return the names and the records of a session at these places, which are of one file."""
        records = [Record(place, read_record(place)) for place in places]
        name = self._name_of(places[0])
        return self.names(Path(name), self._typed(records[:_NUM_FIRST])), records

    def _records(self, log: Input, progress: Progress) -> Iterator[Record]:
        start = Start(log.path)
        if start.is_file and not start.is_document:
            yield from (Record(place, content) for place, content in lines_of([log], progress))
            return
        below = sorted(start.below(self.files), key=lambda path: natural_key(str(path)))
        for path in [log.path] if start.is_file else below:
            name = log.name
            name += "" if start.is_file else f"/{path.relative_to(log.path)}"
            content = read_input(path)
            progress(len(content))
            part = _DOCUMENT if start.is_file else _OF_MANY
            if content.strip() or part == _OF_MANY:
                yield Record(Place(path, name, 0, len(content), part), content)

    def _typed(self, records: Iterable[Record]) -> list[Any]:
        """Return the records that can be read; the others are rejected where all are."""
        typed = []
        for place, content in records:
            with suppress(RolloutError):
                typed.append(self.typed(content, place.where, _decoder(place))[1])
        return typed

    def _is_copy(self, file: File, other: File) -> bool:
        """True if two files have the same records."""
        sizes = [[place.num_bytes for place in one.places] for one in (file, other)]
        if sizes[0] != sizes[1] or not file.places:
            return False
        contents = [[record.content for record in self._read(f.places)[1]] for f in (file, other)]
        return contents[0] == contents[1]

    def _find_file(self, records: Iterable[Record], file: File) -> Iterator[Rejected]:
        for place, content in records:
            try:
                refuse_not_utf8(content, place.where)
                kind, fields = self.split(content, place.where, _decoder(place))
                if answer_names := self.names_of(kind, fields, file):
                    file.answers[len(file.places)] = [digest(name) for name in answer_names]
                file.places.append(place)
            except RolloutError as error:
                file.damage = file.damage or error
                yield Rejected(place, error)

    def names_of(self, kind: str, fields: bytes, _: File) -> Sequence[str]:
        """Return what identifies a record that other sessions may have copies of; () for any other."""
        try:
            name = self.identity(kind, fields) if self.identity is not None else None
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return ()  # the reader reports the damage
        return () if name is None else (name,)

    def _runs(self, sessions: Mapping[str, list[File]]) -> Iterator[Found]:
        parents = {name: files[0].names.parent for name, files in sessions.items()}
        parents = {name: parent for name, parent in parents.items() if parent in sessions}
        members: dict[str, list[str]] = {}
        for name in sessions:
            root = last_in(name, parents)
            members.setdefault(root, [] if root == name else [root]).append(name)
        copies = self._copies(sessions)
        for root, names in members.items():
            names = [*dict.fromkeys(names)]
            files = [(file, name, i) for name in names for i, file in enumerate(sessions[name])]
            damage = next((f.damage for f, _, _ in files if f.damage is not None), None)
            if damage is not None:
                yield from incomplete([place for f, _, _ in files for place in f.places], damage)
                continue
            places, answers = list[Place](), dict[int, list[bytes]]()
            copied, referred = dict[int, str](), set[int]()
            for file, name, i in files:
                base = file.names.base
                if base is not None and base.session not in names:
                    before = logical(base, sessions)
                    referred |= {len(places) + at for at in range(len(before))}
                    places += before
                start = len(places)
                answers |= {start + at: digests for at, digests in file.answers.items()}
                copied |= {start + at: keeper for at, keeper in copies[name, i].items()}
                places += file.places
            named = {"session": root, **sessions[root][0].names.labels}
            labels = {name: value for name, value in named.items() if value}
            for item in run_of(root, places, labels, answers, copied):
                if isinstance(item, Run):
                    item.copied |= referred
                    if (task := sessions[root][0].names.instance) is not None:
                        repetition = sessions[root][0].names.repetition
                        item.instance_id, item.repetition_id = task, repetition
                yield item

    def _copies(self, sessions: Mapping[str, list[File]]) -> dict[tuple[str, int], dict[int, str]]:
        """Return the copied answers of each file, each with the session that keeps it."""
        files = {(name, i): f for name, files in sessions.items() for i, f in enumerate(files)}
        origins = {name: copied[0].names.origin for name, copied in sessions.items()}
        forked = {last_in(name, origins) for name, origin in origins.items() if origin is not None}
        answers = dict[tuple[str, int], dict[int, list[bytes]]]()
        for key, file in files.items():
            answers[key] = file.answers
            if not self.is_prefix:
                continue
            family = last_in(key[0], origins) if self.names_origin else ""
            agent = "" if file.names.parent is None else str(file.names.agent)
            before = digest(family, agent, str(file.names.base))
            answers[key] = {}
            for at, digests in file.answers.items() if family in {*forked, ""} else ():
                before = digest(before.hex(), *(one.hex() for one in digests))
                answers[key][at] = [before]
        order = sorted(
            files, key=lambda key: (files[key].names.origin is not None, len(answers[key]))
        )
        copies = copied_answers({key: answers[key] for key in order})
        return {
            key: {at: keeper[0] for at, keeper in copied.items()} for key, copied in copies.items()
        }

    def read_run(self, run: Run, _: Options) -> Trajectory:
        """Read the contexts of a session and its sub-agents.

        Raises:
            InputError: `record_type`: a field has the wrong type; `no_calls`: there is no answer; or
                why every answer depends on something that cannot be read.
        """
        main = Contexts()
        tips: dict[str, list[Said | None]] = {}
        for _file, group in groupby(
            enumerate(run.places), lambda numbered: self._file_of(numbered[1])
        ):
            places = [*group]
            names, records = self._read([place for _, place in places])
            is_main = self.names_in is not None or names.session == run.labels["session"]
            log = main if is_main else main.agent(names.session, names.agent)
            ends = self._begin(log, names, tips)
            self.read(self._lines(records, [i in run.copied for i, _ in places], log, ends), log)
        steps = [numbered for step in main.steps() for numbered in by_marks(step)]
        if not steps and main.error is None:
            finding = "the session has no model response"
            raise main.unread or InputError("no_calls", run.places[0].where, finding)
        return Trajectory(
            steps=steps,
            error=main.error,
            reward=None if main.error is not None else main.reward,
            metrics={} if main.reward is None else {"reward": main.reward},
            user_values=main.values | ({"model": main.model} if main.model else {}),
        )

    def _file_of(self, place: Place) -> Any:
        """Return the file of a record, the directory of a session of many files, or None for all."""
        if self.names_in is not None:
            return None
        return _above(place.path, self.files) if place.part == _OF_MANY else place.path

    def _name_of(self, place: Place) -> str:
        """Return the name of the file of a record, or of the directory."""
        if place.part == _OF_MANY:
            return str(_above(Path(place.where), self.files))
        start, _, number = place.where.rpartition(":")
        return start if start and number.isdigit() else place.where

    def _begin(
        self, log: Contexts, names: Names, tips: dict[str, list[Said | None]]
    ) -> list[Said | None]:
        """Go to where a file begins, and return the tips behind each record of its session so far."""
        base = names.base
        ends = [] if base is None else tips.get(base.session, [])[: base.num_records]
        log.rewind(ends[-1] if ends else None)
        if base is not None and len(ends) < base.num_records:
            log.lose(without_base(names, base))
        tips[names.session] = ends
        return ends

    def _lines(
        self,
        records: Sequence[Record],
        copied: Sequence[bool],
        log: Contexts,
        ends: list[Said | None],
    ) -> Iterator[Line]:
        for (place, content), is_copied in zip(records, copied, strict=True):
            refuse_not_utf8(content, place.where)
            account(self.contents, content)
            log.is_copied = is_copied
            yield Line(place.where, *self.typed(content, place.where, _decoder(place)))
            ends.append(log.tip)


def _decoder(place: Place) -> Callable[..., Any]:
    return decode_line if place.part is None else decode_document


def _above(path: Path, pattern: str) -> Path:
    """Return the directory in which a pattern finds a file."""
    return path.parents[len(Path(pattern).parts) - 1]


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
                        with readable(place.where):
                            names = store.names(session)
                            records = [*self._records_of(store, session, log)]
                    except RolloutError as error:
                        yield Rejected(place, error)
                    else:
                        yield names, records
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
