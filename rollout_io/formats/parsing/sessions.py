"""Sessions of coding agents: one file each, whose records become the contexts of a conversation.

A format describes its files with `Sessions`, and collects what the model saw in `Contexts`. A file is
a run; a file of a sub-agent belongs to the run of the session that started it. If a record of a file
is damaged, none of its run is used.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rollout_io.dataset.opening import open_input, read_input
from rollout_io.formats.base import (
    About,
    Adapter,
    Conversation,
    Found,
    Input,
    Options,
    Place,
    Progress,
    Rejected,
    Run,
    Step,
    Trajectory,
)
from rollout_io.formats.contents import Contents, account
from rollout_io.formats.parsing.content import Message
from rollout_io.formats.parsing.forks import COPIED, copied_answers, digest, run_of
from rollout_io.formats.parsing.jsonl import (
    decode_document,
    decode_line,
    decoded,
    first_lines,
    refuse_not_utf8,
)
from rollout_io.formats.parsing.lines import Record, incomplete, lines_of, read_record
from rollout_io.formats.parsing.naming import natural_key
from rollout_io.formats.parsing.notes import note
from rollout_io.formats.parsing.records import first_values, is_document
from schemas.errors import InputError, RolloutError
from schemas.messages import is_answer

GROUPS = "inferred: each session is a separate instance"
SUMMARIES = "summaries that the model wrote for a compaction, without their prompt: left out"
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ANY = msgspec.json.Decoder()
_MAX_PARENTS = 100
DOCUMENT, _OF_MANY = "document", "event"
"""Parts of the places of records that are a whole file, and one of a directory's files."""
_MAX_SMALL = 1 << 20
_START_BYTES = 1 << 16


class Names(NamedTuple):
    """Names of a file.

    Attributes:
        session: Session of the file.
        parent: Session that started this one as a sub-agent; None if it is no sub-agent.
        agent: Name of the sub-agent.
        labels: Other labels of the run.
    """

    session: str
    parent: str | None = None
    agent: str | None = None
    labels: Mapping[str, str] = {}


class Item(NamedTuple):
    """What one record adds to a context.

    Attributes:
        key: Name of the record within the session; an answer is trained on once per key.
        messages: Its messages.
        where: Its location.
        is_given: True if its answers are part of the prompt, such as a history that was kept.
    """

    key: str
    messages: Sequence[Message]
    where: str
    is_given: bool = False


@dataclass(slots=True)
class Contexts:
    """The contexts of an agent, in order.

    Attributes:
        system: System prompt of the next context.
        tools: Tool definitions of the next context.
        copied: Locations of answers that another session has too: they are part of the prompt.
        found: Contexts in which the model wrote something.
    """

    system: str | None = None
    tools: list[Message] | None = None
    copied: Collection[str] = ()
    found: list[Conversation] = field(default_factory=list)
    _owned: set[str] = field(default_factory=set)

    def add(self, items: Sequence[Item]) -> None:
        """Add a context, unless all its answers are given or in an earlier context.

        If a given answer follows a new one, the new one gets a context of its own, which ends with it.
        """
        messages: list[Message] = []
        if self.system:
            messages.append({"role": "system", "content": self.system})
        num_given, where, is_new = 0, "", False
        for item in items:
            if not any(map(is_answer, item.messages)):
                messages += item.messages
            elif item.is_given or item.key in self._owned or item.where in self.copied:
                if is_new:
                    self._begin(messages[:], num_given, where)
                messages += item.messages
                num_given, where, is_new = len(messages), item.where, False
            else:
                messages += item.messages
                where, is_new = item.where, True
        self._owned |= {item.key for item in items if not item.is_given}
        if is_new:
            self._begin(messages, num_given, where)

    def _begin(self, messages: list[Message], num_given: int, where: str) -> None:
        step = Conversation(source=where, messages=messages, tools=self.tools)
        step.num_given = num_given
        self.found.append(step)


@dataclass(slots=True)
class Session:
    """What a file says.

    Attributes:
        contexts: Its contexts.
        error: Why the run failed, by the harness's own word.
        values: Strings about the run.
        exact: Calls with the engine's tokens, which take the place of the contexts.
    """

    contexts: Contexts
    error: str | None = None
    values: dict[str, str] = field(default_factory=dict)
    exact: list[Step] = field(default_factory=list)


@dataclass(slots=True)
class _File:
    names: Names
    places: list[Place] = field(default_factory=list)
    answers: dict[int, list[bytes]] = field(default_factory=dict)
    damage: RolloutError | None = None


@dataclass(frozen=True, kw_only=True)
class Sessions:
    """How the sessions of a format are found and read.

    Attributes:
        contents: See `Adapter`.
        names: Returns the names of a file from its path and its first records.
        read: Reads the records of a file, each with its location; with `answer`, its second argument
            are the locations of copied answers.
        is_record: True if a decoded record is of this format, for detection.
        files: Pattern of the files with one record each, if a session may be a directory of them.
        marks: Byte strings, one of which is in the first 64 KiB of every session; this check is fast.
        has_documents: True if sessions may be large documents.
        answer: Returns what identifies an answer in all its copies, for sessions that begin with the
            records of another one (forks); None for any other record.
    """

    contents: Contents
    names: Callable[[Path, Sequence[Any]], Names]
    read: Callable[..., Session]
    is_record: Callable[[Mapping[str, Any]], bool]
    marks: Sequence[bytes]
    files: str = ""
    has_documents: bool = False
    answer: Callable[[bytes], str | None] | None = None

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

    def recognizes(self, path: Path) -> bool:
        """True if a file has a record of this format among its first, or a directory has files of them."""
        first = next(iter(self._files(path)), path) if path.is_dir() else path
        if not first.is_file() or not any(mark in _start_of(first) for mark in self.marks):
            return False
        return any(map(self.is_record, self._first_of(first)))

    def _first_of(self, path: Path) -> list[Any]:
        """Return the first records of a file that are JSON objects, in lines or as a document."""
        found = [value for line in first_lines(path) if (value := _value(line)) is not None]
        if not found and (self.has_documents or path.stat().st_size <= _MAX_SMALL):
            found = first_values(path)
        return [value for value in found if isinstance(value, dict)]

    def _files(self, folder: Path) -> list[Path]:
        found = folder.glob(self.files) if self.files else ()
        return sorted(found, key=lambda path: natural_key(str(path)))

    def _key(self, place: Place) -> Path:
        """Return the file of a record, or the directory of a session of many files."""
        depth = len(Path(self.files).parts) if place.part == _OF_MANY else 0
        return place.path.parents[depth - 1] if depth else place.path

    def find(self, inputs: Sequence[Input], progress: Progress) -> Iterator[Found]:
        """Yield one run per session, with the files of its sub-agents."""
        yield About("groups", GROUPS)
        files: list[_File] = []
        for given in inputs:
            first = self._first_of(given.path) if given.path.is_file() else []
            file = _File(self.names(Path(given.name), first))
            yield from self._find_file(given, progress, file)
            if file.places:
                files.append(file)
        yield from _runs(files)

    def _find_file(self, given: Input, progress: Progress, file: _File) -> Iterator[Rejected]:
        for record in self._records(given, progress):
            place = record.place
            try:
                refuse_not_utf8(record.content, place.where)
                decode_object(record)
                told = self.answer(record.content) if self.answer is not None else None
                if told is not None:
                    file.answers[len(file.places)] = [digest(told)]
                file.places.append(place)
            except RolloutError as error:
                file.damage = file.damage or error
                yield Rejected(place, error)

    def _records(self, given: Input, progress: Progress) -> Iterator[Record]:
        if not given.path.is_dir() and not is_document(given.path):
            for place, content in lines_of([given], progress):
                yield Record(place, content)
            return
        for path in self._files(given.path) if given.path.is_dir() else [given.path]:
            is_of_many = path != given.path
            name = f"{given.name}/{path.relative_to(given.path)}" if is_of_many else given.name
            content = read_input(path)
            progress(len(content))
            part = _OF_MANY if is_of_many else DOCUMENT
            if content.strip() or is_of_many:
                yield Record(Place(path, name, 0, len(content), part), content)

    def read_run(self, run: Run, _: Options) -> Trajectory:
        """Read the contexts of a session and its sub-agents as text.

        Raises:
            InputError: `record_type`: a field has the wrong type; `no_calls`: there is no answer.
        """
        copied = {run.places[i].where for i in run.copied}
        note(COPIED, len(copied))
        files = groupby(run.places, self._key)
        found = [self._read_file([*places], copied) for _, places in files]
        main = found[0]
        steps = [step for each in found for step in each.exact or each.contexts.found]
        if not steps and main.error is None:
            raise InputError("no_calls", run.places[0].where, "the session has no model response")
        return Trajectory(steps=steps, error=main.error, user_values=main.values)

    def _read_file(self, places: Sequence[Place], copied: Collection[str]) -> Session:
        records = [Record(place, read_record(place)) for place in places]
        for record in records:
            refuse_not_utf8(record.content, record.place.where)
            account(self.contents, record.content)
        more = () if self.answer is None else (copied,)
        session = self.read(records, *more)
        names = self.names(Path(_file_of(places[0])), self._first_of(places[0].path))
        if names.parent is not None:
            for step in session.contexts.found:
                step.agent = names.agent or None
        return session


def _file_of(place: Place) -> str:
    """Return the name of the file of a record."""
    start, _, number = place.where.rpartition(":")
    return start if start and number.isdigit() else place.where


def _start_of(path: Path) -> bytes:
    try:
        with open_input(path) as file:
            return file.read(_START_BYTES)
    except (OSError, RolloutError):
        return b""


def _value(line: bytes) -> Any:
    try:
        return decoded(_ANY, line) if line.lstrip().startswith(b"{") else None
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def decode_object(record: Record) -> None:
    """Check that a record is a JSON object.

    Raises:
        InputError: `json_line`, `json_document`: it is not JSON; `record_type`: it is no object.
    """
    decode = decode_line if record.place.part is None else decode_document
    decode(_OBJECT, record.content, record.place.where)


def _runs(files: Sequence[_File]) -> Iterator[Found]:
    by_name = {file.names.session: file for file in reversed(files)}
    runs: dict[int, list[_File]] = {}
    for file in files:
        root = _root_of(file, by_name)
        runs.setdefault(id(root), [] if root is file else [root]).append(file)
    mains = {str(id(own[0])): own[0].answers for own in runs.values()}
    copies = copied_answers(dict(sorted(mains.items(), key=lambda each: len(each[1]))))
    names = {str(id(file)): file.names.session for file in files}
    copies = {key: {i: names[keeper] for i, keeper in each.items()} for key, each in copies.items()}
    for own in runs.values():
        own = list({id(file): file for file in own}.values())
        main = own[0]
        places = [place for file in own for place in file.places]
        damage = next((file.damage for file in own if file.damage is not None), None)
        if damage is not None:
            yield from incomplete(places, damage)
            continue
        labels = {"session": main.names.session, **main.names.labels}
        name = main.names.session
        yield from run_of(name, places, labels, main.answers, copies.get(str(id(main)), {}))


def _root_of(file: _File, by_name: Mapping[str, _File]) -> _File:
    """Return the session that a file belongs to: the first of a chain of sub-agents."""
    root = file
    for _ in range(_MAX_PARENTS):
        parent = by_name.get(root.names.parent or "")
        if parent is None or parent is root or parent is file:
            return root
        root = parent
    return file


def texts(values: Iterable[Any]) -> dict[str, str]:
    """Return the last value that is text, as the model of a session."""
    found = [value for value in values if isinstance(value, str) and value]
    return {"model": found[-1]} if found else {}
