"""Logs in which each record is a run: a line, a whole file, an element of a list, a row of a table.

A format declares the struct of a run, how the run is called, and one function that reads it. Finding,
detection, damage, copies and the account of unread keys are the same for all of them.

    {"id": 1, ...}            {"simulations": [{...}, {...}], "info": {...}}
    {"id": 2, ...}            a document with elements: "simulations"
    lines, or a file each
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import msgspec

from rollout_io.dataset.opening import Version, read_input
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
    Trajectory,
)
from rollout_io.formats.engines.files import (
    Start,
    is_table,
    is_zip,
    read_place,
    read_row,
    records_in,
    rows_of,
)
from rollout_io.formats.grammar import Grammar, account, like
from rollout_io.formats.parsing.jsonl import (
    contained,
    decode_document,
    decode_line,
    refuse_lfs_pointer,
    refuse_not_utf8,
    without_lone_surrogates,
)
from rollout_io.formats.parsing.messages import by_marks
from rollout_io.formats.parsing.records import (
    Record,
    lines_of,
    parts_of,
    read_record,
    refuse_repeated,
)
from schemas.errors import InputError, RolloutError

WHOLE = "document"
"""Part of the place of a record that is a whole file, whose damage is that of a document.

So is the damage of a member of an archive, whose part is its name.
"""


class Open(msgspec.Struct, dict=True):
    """A record of which other fields are read too, such as any number."""

    @property
    def fields(self) -> dict[str, msgspec.Raw]:
        """All fields of the record."""
        return _FIELDS.decode(self.__dict__["content"])

    def keeping(self, content: bytes) -> Self:
        """Return the record with its JSON, as a reader must that decodes further records of a run."""
        self.__dict__["content"] = without_lone_surrogates(content)
        return self


def _is_document(start: Start) -> bool:
    return start.is_document


@dataclass(frozen=True, kw_only=True)
class Records(Grammar):
    """A format with a run in each record.

    Attributes:
        run: Returns the run of a record at a place, or raises an error that rejects it.
        read: Reads a record: `read(record, run, options)`.
        is_record: True if a decoded value is a record of this format, or a document of them; by default,
            an object with the required fields of the struct.
        is_log: True if a file is a log of this format; by default, if a record is among its first.
        files: Returns the logs of an input, if it may be a directory of them, and what is to be said of
            it; an error rejects it.
        is_whole: True if a file is one document, whatever its lines are.
        elements: Key of the list with the runs, if a document has several; a document without it is
            one run. "": a list is the list of its runs; None: each record is one run.
        bare: Key for a record that is a list: it is read as an object with the list there.
        is_list: True if a list has a run in each element, for formats in which it may be one run.
        plain: Returns the JSON of a record, of the same length, if the program writes something else.
        members: Start of the names of members with a run each, if a log may be a zip archive.
        columns: Columns that a table must have.
        is_unique: True if equal lines are copies of one run, not runs with the same text.
        groups: How runs are grouped, for the history of the dataset; "" if `finish` tells it.
        finish: Adds facts about the whole log to what was found in it, or names its runs anew.
    """

    run: Callable[[Any, Place], Run]
    read: Callable[[Any, Run, Options], Trajectory]
    is_record: Callable[[Any], bool] | None = None
    is_log: Callable[[Start], bool] | None = None
    files: Callable[[Input], Iterable[Input | Found]] = lambda log: [log]
    is_whole: Callable[[Start], bool] = _is_document
    elements: str | None = None
    bare: str = ""
    is_list: Callable[[Sequence[msgspec.Raw]], bool] = lambda _: True
    plain: Callable[[bytes], bytes] = bytes
    members: str = ""
    columns: frozenset[str] = frozenset()
    is_unique: bool = False
    groups: str = ""
    finish: Callable[[Iterator[Found]], Iterable[Found]] = iter

    def adapter(
        self,
        summary: str,
        noun: str = "run",
        *,
        is_text: bool = True,
        is_agent: bool = False,
        is_general: bool = False,
        is_own: bool = False,
    ) -> Adapter:
        """Return the adapter of the format; for the arguments see `Adapter`."""
        return Adapter(
            summary=summary,
            recognizes=self.recognizes,
            find=self.find,
            read=self.read_run,
            is_text=is_text,
            noun=noun,
            line=self._struct,
            is_general=is_general,
            is_agent=is_agent,
            is_own=is_own,
            contents=self.contents,
        )

    @property
    def _struct(self) -> type[msgspec.Struct] | None:
        struct = self.records[self.default]
        return struct if isinstance(struct, type) and issubclass(struct, msgspec.Struct) else None

    def recognizes(self, start: Start) -> bool:
        """True if a file has a record of this format among its first lines, or is a document of it.

        A directory is recognized by the first of its logs.
        """
        if not start.is_file:
            try:
                logs = (log for log in self.files(Input("", start.path)) if isinstance(log, Input))
                first = next(logs, None)
            except (OSError, RolloutError):
                return False
            path = start.path if first is None else first.path
            return path != start.path and self.recognizes(Start(path))
        if self.is_log is not None:
            return self.is_log(start)
        is_record = self.is_record
        if is_record is None:
            assert self._struct is not None
            fields = msgspec.structs.fields(self._struct)
            is_record = like({field.encode_name: object for field in fields if field.required})
        values = [start.document] if self.is_whole(start) else start.values
        return any(map(is_record, values))

    def find(self, inputs: Sequence[Input], progress: Progress) -> Iterator[Found]:
        """Yield one run per record, in order; a record that cannot be used is rejected."""
        if self.groups:
            yield About("groups", self.groups)
        yield from self.finish(self._find(inputs, progress))

    def _find(self, inputs: Sequence[Input], progress: Progress) -> Iterator[Found]:
        first: dict[bytes, str] = {}
        for log in inputs:
            for item in self._logs(log, progress):
                if isinstance(item, Input):
                    yield from self._of_file(item, progress, first)
                else:
                    yield item

    def _logs(self, log: Input, progress: Progress) -> Iterator[Input | Found]:
        try:
            yield from self.files(log)
        except RolloutError as error:
            yield _rejected(log, progress, error)

    def _of_file(self, file: Input, progress: Progress, first: dict[bytes, str]) -> Iterator[Found]:
        try:
            if self.members and is_zip(file.path):
                records = records_in(file, self.members, progress)
            else:
                records = records_of(file, progress, self.is_whole, self.columns)
            for record in records:
                yield from [record] if isinstance(record, Rejected) else self._runs(record, first)
        except RolloutError as error:
            if not is_table(file.path) and error.rule != "lfs_pointer":
                raise
            yield _rejected(file, progress, error)

    def _runs(self, record: Record, first: dict[bytes, str]) -> Iterator[Found]:
        place, content = record = record._replace(content=self.plain(record.content))
        try:
            refuse_lfs_pointer(content, place.where)
            if place.part != WHOLE:  # a document is refused where it is decoded
                refuse_not_utf8(content, place.where)
            if place.part == WHOLE or self.is_unique:
                refuse_repeated(content.strip(), place.where, first)
            with contained(place.where):
                elements = [*elements_of(record, self.elements, self.is_list)]
        except RolloutError as error:
            yield Rejected(place, error)
            return
        for element in elements:
            try:
                with contained(element.place.where):
                    run = self.run(self._decoded(element)[0], element.place)
                yield run
            except RolloutError as error:
                yield Rejected(element.place, error)

    def _decoded(self, record: Record) -> tuple[Any, bytes]:
        """Return a record as its struct, and the JSON of that."""
        place, content = record
        if self.bare and content.lstrip()[:1] == b"[":
            content = b'{"%s":%s}' % (self.bare.encode(), content)
        typed = self.typed(content, place.where, decoder_of(place))[1]
        if isinstance(typed, Open):
            typed.keeping(content)
        return typed, content

    def read_run(self, run: Run, options: Options) -> Trajectory:
        """Read a record, with those that its format made a part of the run.

        Raises:
            InputError: `record_type`: a field has the wrong type; `no_calls`: there is no answer; or
                any error of the format.
        """
        for place in reversed(run.places):
            record, content = self._decoded(Record(place, self.plain(content_of(place))))
            account(self.contents, content)
        trajectory = self.read(record, run, options)
        trajectory.steps = [part for step in trajectory.steps for part in by_marks(step)]
        if trajectory.error is None and not run.failed and not _is_answered(trajectory):
            raise InputError("no_calls", place.where, "the run has no model response")
        return trajectory


def records_of(
    log: Input,
    progress: Progress,
    is_whole: Callable[[Start], bool] = _is_document,
    columns: frozenset[str] = frozenset(),
) -> Iterator[Record]:
    """Yield the records of a file: its lines, its rows, or the whole of it; see `Records`.

    Raises:
        InputError: `input_file`: the file is unreadable; `lfs_pointer`: it is a Git LFS pointer;
            `parquet_file`: it is a damaged table.
    """
    if is_table(log.path):
        yield from rows_of(log, columns)
        progress(log.path.stat().st_size)
    elif is_whole(Start(log.path)):
        content = without_lone_surrogates(read_input(log.path))
        progress(len(content))
        yield Record(Place(log.path, log.name, 0, len(content), WHOLE), content)
    else:
        yield from (Record(place, content) for place, content in lines_of([log], progress))


def content_of(place: Place) -> bytes:
    """Return the JSON of a record at its place."""
    if place.offset is not None:
        return read_record(place)
    return read_place(place) if isinstance(place.part, str) else read_row(place)


def elements_of(
    record: Record,
    name: str | None = "",
    is_list: Callable[[Sequence[msgspec.Raw]], bool] = lambda _: True,
) -> Iterator[Record]:
    """Yield the elements of a list, or of the list `name` of an object; else the record itself.

    Raises:
        InputError: Any error of `decode_line` or `decode_document`.
    """
    place, content = record
    start, decode = content.lstrip()[:1], decoder_of(place)
    parts: list[msgspec.Raw] | None = None
    if name is not None and start == b"[":
        parts = decode(_LIST, content, place.where)
        parts = parts if is_list(parts or ()) else None
    elif name:
        parts = decode(_document_with(name), content, place.where).elements
    has_runs = any(bytes(part)[:1] in {b"{", b"["} for part in parts or ())
    if parts is None or not (has_runs or (place.part == WHOLE and not parts)):
        yield record  # a list of numbers or texts has no runs, and an empty line is no empty file
        return
    places = parts_of(place, content, "" if start == b"[" else name or "", parts)
    yield from (Record(part, bytes(raw)) for part, raw in zip(places, parts, strict=True))


@lru_cache
def _document_with(name: str) -> msgspec.json.Decoder[Any]:
    field = msgspec.field(name=name, default=None)
    fields: list[Any] = [("elements", list[msgspec.Raw] | None, field)]
    return msgspec.json.Decoder(msgspec.defstruct("Document", fields, gc=False))


def _is_answered(trajectory: Trajectory) -> bool:
    """True if a step is not text, or has an answer."""
    return any(
        not isinstance(step, Conversation)
        or any(message["role"] == "assistant" for message in step.messages[step.num_given :])
        for step in trajectory.steps
    )


_LIST = msgspec.json.Decoder(list[msgspec.Raw])
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


def decoder_of(place: Place) -> Callable[..., Any]:
    """Return the function that decodes a record of `records_of`."""
    return decode_document if isinstance(place.part, str) else decode_line


@lru_cache(maxsize=2)
def _beside(path: Path, _: Version, kind: Any) -> Any:
    return decode_document(msgspec.json.Decoder(kind), read_input(path), str(path))


def beside(place: Place, kind: Any) -> Any:
    """Return what a document has beside its elements, as a struct; it is kept for the next element.

    Lines of a file have nothing beside them: the struct has its defaults.

    Raises:
        InputError: `record_type`: a field has the wrong type.
    """
    if not Start(place.path).is_document:
        return kind()
    return _beside(place.path, Version.of(place.path), kind)


def _rejected(log: Input, progress: Progress, error: RolloutError) -> Rejected:
    num_bytes = log.path.stat().st_size
    progress(num_bytes)
    return Rejected(Place(log.path, log.name, 0, num_bytes), error)


def joined(
    items: Iterable[Found],
    names: Callable[[Run], tuple[str, str | None]],
    belongs: Callable[[Run, Run], bool] = lambda *_: True,
) -> Iterator[Found]:
    """Yield what was found; a run has the places of those that it started, or that continue it.

    Args:
        items: What was found in the logs, for `Records.finish`.
        names: Returns the name of a run, and that of its parent.
        belongs: True if a run belongs to its parent.
    """
    runs: dict[str, Run] = {}
    parents: dict[str, str | None] = {}
    for item in items:
        name, parent = names(item) if isinstance(item, Run) else ("", None)
        if not isinstance(item, Run) or name in runs:
            yield item
        else:
            runs[name], parents[name] = item, parent
    children: dict[str, list[str]] = {}
    roots = list[str]()
    for name, parent in parents.items():
        is_child = parent in runs and parent != name and belongs(runs[name], runs[parent])
        (children.setdefault(parent or "", []) if is_child else roots).append(name)
    seen = set[str]()
    for root in [*roots, *runs]:  # runs that are each other's parents have no root
        members = [] if root in seen else [root]
        for name in members:
            seen.add(name)
            members += [child for child in children.get(name, ()) if child not in seen]
        if members:
            places = [place for name in members for place in runs[name].places]
            runs[root].places = places
            yield runs[root]
