"""The `claude_code` format: sessions of Claude Code, as JSONL or as a web export (one document).

    {"type": "user", "sessionId": "s", "uuid": "u1", "parentUuid": null, "isSidechain": false,
     "message": {"role": "user", "content": "..."}, ...}
    {"type": "assistant", ..., "message": {"id": "msg_1", "content": [{"type": "text", ...}]}}

A session is a run, even if its lines are spread over several files; lines without a `sessionId`
(titles, snapshots) belong to the first session of their file. `claude_code_contexts` builds
conversations from the lines. The log has no reward, no token ids, no system prompt and no tool
definitions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

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
from rollout_io.formats.claude_code_contexts import Line, LoggedLine, conversations
from rollout_io.formats.detect import has_record
from rollout_io.formats.parsing.documents import find_documents, is_document
from rollout_io.formats.parsing.jsonl import decode_document, decode_line, refuse_not_utf8
from rollout_io.formats.parsing.parts import decode_record
from rollout_io.formats.parsing.records import incomplete, lines_of, named_in, read_record
from schemas.errors import InputError, RolloutError

SPOKEN = ("user", "assistant")
_EXPORT = "export"
_GROUPS = "inferred: each session is a separate instance"
_HINT = "delete the line if the session is complete without it"


class _Head(msgspec.Struct, gc=False):
    """The fields that identify the session of a line."""

    type: str
    session_id: str | None = msgspec.field(name="sessionId", default=None)
    cwd: str | None = None
    git_branch: str | None = msgspec.field(name="gitBranch", default=None)
    version: str | None = None


class _Shape(msgspec.Struct, gc=False):
    """A line with the fields that are specific to this format."""

    type: str
    message: dict[str, msgspec.Raw]
    session_id: str = msgspec.field(name="sessionId")
    uuid: str

    def __post_init__(self) -> None:
        if self.type not in SPOKEN or "role" not in self.message:
            raise ValueError("the record has no message")


class _Spoken(msgspec.Struct, gc=False):
    type: str


class _ExportShape(msgspec.Struct, gc=False):
    loglines: list[_Spoken]


class _Export(msgspec.Struct, gc=False):
    loglines: list[LoggedLine]


class _Session(NamedTuple):
    places: list[Place]
    labels: dict[str, str]


_HEAD_DECODER = msgspec.json.Decoder(_Head)
_SHAPE_DECODER = msgspec.json.Decoder(_Shape)
_LINE_DECODER = msgspec.json.Decoder(LoggedLine)
_EXPORT_SHAPE_DECODER = msgspec.json.Decoder(_ExportShape)
_EXPORT_DECODER = msgspec.json.Decoder(_Export)


def find_sessions(inputs: Sequence[Input], progress: Progress) -> Iterator[Found]:
    """Yield sessions in the order in which they begin, then exports.

    A session with a damaged line is rejected if that line still names the session.
    """
    yield About("groups", _GROUPS)
    exports = [given for given in inputs if _is_export(given.path)]
    sessions: dict[str, _Session] = {}
    damaged: dict[str, RolloutError] = {}
    for given in inputs:
        if given not in exports:
            yield from _find_lines(given, progress, sessions, damaged)
    for name, session in sessions.items():
        if name in damaged:
            yield from incomplete(session.places, damaged[name])
        else:
            yield Run(instance_id=name, repetition_id=0, **session._asdict())
    yield from find_documents(exports, progress, _find_export)


def _find_lines(
    given: Input,
    progress: Progress,
    sessions: dict[str, _Session],
    damaged: dict[str, RolloutError],
) -> Iterator[Rejected]:
    first: str | None = None
    titles: list[Place] = []
    for place, content in lines_of([given], progress):
        try:
            refuse_not_utf8(content, place.where)
            head = _head(content, place.where)
        except RolloutError as error:
            yield Rejected(place, error)
            lost = named_in(content, "sessionId")
            if lost is not None:
                damaged.setdefault(lost, error)
            continue
        if head.session_id is None:
            titles.append(place)
        else:
            first = first or head.session_id
            _add(sessions.setdefault(head.session_id, _Session([], {})), head, place)
    if first is not None:
        sessions[first].places.extend(titles)
    for place in titles if first is None else ():
        got = "the line is a title or snapshot, but the file has no session"
        yield Rejected(place, InputError("no_calls", place.where, got))


def _head(content: bytes, where: str) -> _Head:
    head = decode_line(_HEAD_DECODER, content, where)
    if head.session_id is None and head.type in SPOKEN:
        got = f"the line of type {head.type!r} has no `sessionId`"
        raise InputError("session_name", where, got, hint=_HINT)
    return head


def _add(session: _Session, head: _Head, place: Place) -> None:
    session.places.append(place)
    labels = {
        "session": head.session_id,
        "cwd": head.cwd,
        "git_branch": head.git_branch,
        "version": head.version,
    }
    for name, value in labels.items():
        if value:
            session.labels.setdefault(name, value)


def _is_export(path: Path) -> bool:
    return is_document(path, _EXPORT_SHAPE_DECODER, [b'"loglines"'])


def _find_export(place: Place, content: bytes) -> Iterator[Run]:
    decode_document(_EXPORT_SHAPE_DECODER, content, place.where)
    labels = {_EXPORT: place.where}
    yield Run(instance_id=place.where, repetition_id=0, places=[place], labels=labels)


def read_session(run: Run, _: Options) -> Trajectory:
    """Read the contexts of a session as text; the main agent's last context comes last.

    Raises:
        InputError: `record_type`: a line is damaged; `no_calls`: there is no model response.
    """
    lines = list(_exported(run.places[0]) if _EXPORT in run.labels else _lines(run.places))
    steps = conversations(lines)
    if not steps:
        raise InputError("no_calls", run.places[0].where, "the session has no model response")
    models = [line.message.model for line in lines if line.message and line.message.model]
    return Trajectory(steps=steps, user_values={"model": models[-1]} if models else {})


def _lines(places: Iterable[Place]) -> Iterator[Line]:
    for place in places:
        yield Line.of(decode_record(_LINE_DECODER, place), place.where)


def _exported(place: Place) -> Iterator[Line]:
    document = decode_document(_EXPORT_DECODER, read_record(place), place.where)
    for i, logged in enumerate(document.loglines):
        yield Line.of(logged, f"{place.where}, loglines[{i}]")


def recognizes(path: Path) -> bool:
    """True if a file has messages of a Claude Code session, or is an export of one."""
    return has_record(path, _SHAPE_DECODER) or _is_export(path)


ADAPTER = Adapter(
    summary="sessions of Claude Code: JSONL, or the web export; text only",
    recognizes=recognizes,
    find=find_sessions,
    read=read_session,
    is_text=True,
    noun="session",
    line=_Shape,
)
