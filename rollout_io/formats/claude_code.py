"""The `claude_code` format: sessions of Claude Code, as JSONL or as a web export (one document).

    {"type": "user", "sessionId": "s", "uuid": "u1", "parentUuid": null, "isSidechain": false,
     "message": {"role": "user", "content": "..."}, ...}
    {"type": "assistant", ..., "message": {"id": "msg_1", "content": [{"type": "text", ...}]}}

A session is a run, even if its lines are spread over several files; lines without a `sessionId`
(titles, snapshots) belong to the first session of their file, and all lines of a file in
`SESSION/subagents/` to SESSION. Recent versions log the requests, from which the prompts are taken
(`claude_code_requests`); `claude_code_contexts` builds the others from the lines. The column
`prompts` tells which: `requests`, `messages`, or both. The log has no reward and no token ids.

A fork of a session begins with copies of its lines. Their answers are trained on in the session
with the fewest answers; in the others, they are part of the prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

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
from rollout_io.formats.claude_code_contents import CONTENTS
from rollout_io.formats.claude_code_conversations import convert, refused
from rollout_io.formats.claude_code_lines import SPOKEN, Compaction, Line, read_line
from rollout_io.formats.claude_code_requests import Requests
from rollout_io.formats.contents import account
from rollout_io.formats.parsing.content import NO_JSON, canonical_json
from rollout_io.formats.parsing.documents import find_documents
from rollout_io.formats.parsing.forks import copied_answers, digest, run_of
from rollout_io.formats.parsing.jsonl import decode_document, decode_line, refuse_not_utf8
from rollout_io.formats.parsing.lines import (
    incomplete,
    lines_of,
    named_in,
    read_record,
)
from rollout_io.formats.parsing.notes import note
from rollout_io.formats.start import Start
from schemas.errors import InputError, RolloutError

_EXPORT = "export"
_GROUPS = "inferred: each session is a separate instance"
_HINT = "delete the line if the session is complete without it"
_SUB_AGENTS = "subagents"
_FORK = "fork-context-ref"


class _Said(msgspec.Struct, gc=False):
    content: msgspec.Raw = NO_JSON


class _Origin(msgspec.Struct, gc=False):
    uuid: str | None = msgspec.field(name="messageUuid", default=None)


class _Head(msgspec.Struct, gc=False):
    """The fields that identify the session of a line, and the answer in it."""

    type: str
    session_id: str | None = msgspec.field(name="sessionId", default=None)
    cwd: str | None = None
    git_branch: str | None = msgspec.field(name="gitBranch", default=None)
    version: str | None = None
    uuid: str | None = None
    forked_from: _Origin | None = msgspec.field(name="forkedFrom", default=None)
    parent_session: str | None = msgspec.field(name="parentSessionId", default=None)
    is_sidechain: bool | None = msgspec.field(name="isSidechain", default=None)
    sampled_in: str | None = msgspec.field(name="requestSessionId", default=None)
    compaction: Compaction | None = msgspec.field(name="compactMetadata", default=None)
    message: msgspec.Raw = NO_JSON


class _Shape(msgspec.Struct, gc=False):
    """A line with the fields that are specific to this format."""

    type: str
    message: dict[str, msgspec.Raw]
    session_id: str = msgspec.field(name="sessionId")
    uuid: str

    def __post_init__(self) -> None:
        if self.type not in SPOKEN or "role" not in self.message or "parts" in self.message:
            raise ValueError("the record has no message of Anthropic's API")


class _Spoken(msgspec.Struct, gc=False):
    type: str


class _ExportShape(msgspec.Struct, gc=False):
    loglines: list[_Spoken]


class _Export(msgspec.Struct, gc=False):
    loglines: list[msgspec.Raw]


@dataclass(slots=True)
class _Session:
    """A session.

    Attributes:
        answers: Digests of each answer, by the index of its place. A copy has one of them.
        kept: Uuids of the lines that compactions keep: if they are logged after the compaction, the
            log lacks the context of their answers.
        is_fork: True if a line names the session that it was copied from.
        is_side: True if all messages are a sub-agent's.
    """

    places: list[Place] = field(default_factory=list)
    labels: dict[str, str] = field(default_factory=dict)
    answers: dict[int, list[bytes]] = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)
    is_fork: bool = False
    is_side: bool = True

    def add(self, place: Place, head: _Head, name: str) -> None:
        """Add a line, with the labels of the first line that has them."""
        if head.type == "assistant" and head.uuid not in self.kept:
            self.answers[len(self.places)] = _digests(head)
        if head.compaction is not None and head.compaction.messages is not None:
            self.kept |= set(head.compaction.messages.uuids or ())
        self.is_fork |= head.forked_from is not None or head.sampled_in not in {None, name}
        self.is_side &= head.type not in SPOKEN or bool(head.is_sidechain)
        self.places.append(place)

    def take(self, other: _Session) -> None:
        """Add the lines of a sub-agent's session."""
        start = len(self.places)
        self.answers |= {start + i: digests for i, digests in other.answers.items()}
        self.places += other.places

    def label(self, head: _Head) -> None:
        """Add the labels of a line that the session does not have yet."""
        labels = {
            "session": head.session_id,
            "cwd": head.cwd,
            "git_branch": head.git_branch,
            "version": head.version,
        }
        for name, value in labels.items():
            if value:
                self.labels.setdefault(name, value)


_HEAD_DECODER = msgspec.json.Decoder(_Head)
_ANY_DECODER = msgspec.json.Decoder(dict[str, Any])
_SAID_DECODER = msgspec.json.Decoder(_Said)
_SHAPE_DECODER = msgspec.json.Decoder(_Shape)
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
    _join_sub_agents(sessions, damaged)
    intact = [n for n in sessions if n not in damaged]
    intact.sort(key=lambda n: (sessions[n].is_fork, len(sessions[n].answers)))
    copies = copied_answers({n: sessions[n].answers for n in intact})
    for name, session in sessions.items():
        if name in damaged:
            yield from incomplete(session.places, damaged[name])
        else:
            labels = {"session": name} | session.labels
            yield from run_of(name, session.places, labels, session.answers, copies[name])
    yield from find_documents(exports, progress, _find_export)


def _join_sub_agents(sessions: dict[str, _Session], damaged: dict[str, RolloutError]) -> None:
    """Add the sessions of forked sub-agents, which repeat lines of their parent, to the parent's."""
    mains = {name: session for name, session in sessions.items() if not session.is_side}
    holders = {d: n for n, s in mains.items() for found in s.answers.values() for d in found}
    for name in [name for name in sessions if name not in mains]:
        digests = [d for found in sessions[name].answers.values() for d in found]
        parent = next((holders[digest] for digest in digests if digest in holders), None)
        if parent is not None:
            sessions[parent].take(sessions.pop(name))
            if name in damaged:
                damaged.setdefault(parent, damaged[name])


def _digests(head: _Head) -> list[bytes]:
    """Return digests of an answer: with its uuid, and with the uuid of the line it was copied from."""
    try:
        content = canonical_json(bytes(_SAID_DECODER.decode(head.message).content))
    except msgspec.MsgspecError:
        return []  # the reader reports the damage
    uuids = [head.uuid, head.forked_from and head.forked_from.uuid]
    return [digest(uuid, content) for uuid in uuids if uuid]


def _find_lines(
    given: Input,
    progress: Progress,
    sessions: dict[str, _Session],
    damaged: dict[str, RolloutError],
) -> Iterator[Rejected]:
    first: str | None = None
    parent = _parent_session(given.name)
    titles: list[Place] = []
    for place, content in lines_of([given], progress):
        try:
            refuse_not_utf8(content, place.where)
            head = _head(content, place.where)
        except RolloutError as error:
            yield Rejected(place, error)
            lost = parent or named_in(content, "sessionId")
            if lost is not None:
                damaged.setdefault(lost, error)
            continue
        if head.type == _FORK and head.parent_session:
            parent = head.parent_session
        name = parent or head.session_id
        if name is None:
            titles.append(place)
        else:
            first = first or name
            session = sessions.setdefault(name, _Session())
            session.add(place, head, name)
            if name == head.session_id:
                session.label(head)
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


def _parent_session(name: str) -> str | None:
    """Return the session of a sub-agent's file, which is in `SESSION/subagents/`; else None."""
    folders = PurePosixPath(name.replace("\\", "/")).parts[:-1]
    if _SUB_AGENTS not in folders[1:]:
        return None
    return folders[len(folders) - 2 - folders[::-1].index(_SUB_AGENTS)]


def _is_export(path: Path) -> bool:
    return Start(path).is_document_of(_EXPORT_SHAPE_DECODER, [b'"loglines"'])


def _find_export(place: Place, content: bytes) -> Iterator[Run]:
    decode_document(_EXPORT_SHAPE_DECODER, content, place.where)
    labels = {_EXPORT: place.where}
    yield Run(instance_id=place.where, repetition_id=0, places=[place], labels=labels)


def read_session(run: Run, _: Options) -> Trajectory:
    """Read the contexts of a session as text; the main agent's last context comes last.

    Raises:
        InputError: `record_type`: a line is damaged; `no_calls`: there is no model response;
            `message`: every response follows content that is not text.
    """
    requests = Requests()
    is_export = _EXPORT in run.labels
    lines = list(_exported(run.places[0], requests) if is_export else _lines(run, requests))
    messages = [line.message for line in lines if line.message and not line.is_synthetic]
    models = [message.model for message in messages if message.model]
    made = convert(lines, requests)
    if not made.conversations:
        raise refused(made, run.places[0].where)
    for what, number in made.left_out.items():
        note(what, number)
    user_values = {"model": models[-1]} if models else {}
    if made.num_requested:
        user_values["prompts"] = "requests and messages" if made.num_rebuilt else "requests"
    else:
        user_values["prompts"] = "messages"
    return Trajectory(steps=made.conversations, user_values=user_values)


def _lines(run: Run, requests: Requests) -> Iterator[Line]:
    """Yield the lines of a session, those of sub-agents' files last: forks refer to the others."""
    sides = [_parent_session(place.where) is not None for place in run.places]
    for i in sorted(range(len(sides)), key=sides.__getitem__):
        place = run.places[i]
        content = read_record(place)
        refuse_not_utf8(content, place.where)
        _take(content, requests, place.where)
        yield read_line(content, place.where, is_side=sides[i], is_copied=i in run.copied)


def _take(content: bytes, requests: Requests, where: str) -> None:
    """Count what is not read of a line, and add it to the requests."""
    record = decode_line(_ANY_DECODER, content, where)
    account(CONTENTS, record)
    requests.add(record, where.rpartition(":")[0], where)


def _exported(place: Place, requests: Requests) -> Iterator[Line]:
    document = decode_document(_EXPORT_DECODER, read_record(place), place.where)
    for i, logged in enumerate(document.loglines):
        _take(bytes(logged), requests, f"{place.where}, loglines[{i}]")
        yield read_line(bytes(logged), f"{place.where}, loglines[{i}]")


def recognizes(start: Start) -> bool:
    """True if a file has messages of a Claude Code session, or is an export of one."""
    return start.has_record(_SHAPE_DECODER) or _is_export(start.path)


ADAPTER = Adapter(
    summary="sessions of Claude Code: JSONL, or the web export; text only",
    recognizes=recognizes,
    find=find_sessions,
    read=read_session,
    is_text=True,
    noun="session",
    is_agent=True,
    line=_Shape,
    contents=CONTENTS,
)
