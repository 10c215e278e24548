"""The `opencode` format: sessions of OpenCode, in its database or in the files of older versions.

    opencode.db: tables `session` (id, parent_id, ...), `message` and `part` (id, session_id, data);
                 since version 2, `session_v2` and `session_message` (id, session_id, type, seq, data)
    storage/session/PROJECT/*.json, storage/message/SESSION/*.json, storage/part/MESSAGE/*.json

    message: {"id": "m1", "role": "assistant", "modelID": "...", "error": {...}}
    part: {"id": "p1", "type": "text", "text": "..."}
    part: {"id": "p2", "type": "tool", "callID": "c", "tool": "bash",
           "state": {"status": "completed", "input": {...}, "output": "..."}}

A session is a run; sessions with a `parentID` are its sub-agents. A step is an answer. A fork copies
the messages of another session under new ids. A compaction (an answer with `summary`) begins a context
with the summary and the end of the history that was kept. An answer that failed is not sent again, and
left out; the run failed if its last answer did. Thoughts are sent to another model as text. The
database is never opened where it is: with a write-ahead log beside it, a copy of both is read. A session
that is in several tables or in files too is read from the newest table.

The log has no reward, no token ids, no system prompt, no tool definitions, and not the reminders that
the program adds to a prompt when it sends it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import msgspec

from rollout_io.formats.contents import Contents
from rollout_io.formats.contexts import SUMMARIES, Contexts, Said
from rollout_io.formats.dialects.pi import CUT
from rollout_io.formats.engines.rows import Rows
from rollout_io.formats.engines.sessions import Line, Names
from rollout_io.formats.grammar import inner
from rollout_io.formats.parsing.content import (
    NO_JSON,
    Message,
    Part,
    extend,
    json_text,
    known,
    shown,
    tool_call,
)
from rollout_io.formats.parsing.jsonl import decode_document
from rollout_io.formats.parsing.naming import natural_key
from rollout_io.formats.parsing.notes import note
from rollout_io.formats.parsing.sqlite import columns_in, opened
from rollout_io.formats.start import Start
from schemas.errors import RolloutError

_PARTS = Contents(
    kind="type",
    reads={
        "text": "text ignored synthetic",
        "reasoning": "text",
        "tool": "callID tool state.status state.input state.output state.error state.attachments "
        "state.metadata.interrupted state.metadata.output",
        "file": "mime filename url",
        "compaction": "tail_start_id",
        "subtask": "",
        "step-start": "",
    },
    leaves={
        "facts about a part": "*/id */sessionID */messageID */time */metadata "
        "tool/state tool/state.metadata file/source file/synthetic step-start/snapshot compaction/auto compaction/overflow",
        "facts about a step": "step-finish",
        "states of files, for undoing edits": "snapshot patch",
        "calls that failed, and are repeated": "retry",
        "repeats the prompt of a sub-agent, or names an agent": "subtask agent",
    },
)
_MESSAGE = Contents(
    kind="role",
    reads={
        "*": "id",
        "assistant": "summary modelID parentID error.name error.data.message agent finish "
        "time.completed time.created",
        "user": "agent time.created",
        "system": "time.created",
    },
    leaves={
        "facts about a message": "*/sessionID */time */agent */model user/parentID system/parentID "
        "*/providerID */mode */path */cost */tokens */variant assistant/error",
        "shown to the user, not sent": "user/summary",
        "settings of a request": "user/tools user/format",
    },
)
CLEARED = "tool results that were cleared from later prompts: read in full everywhere"
FILES = "files beside an answer, which are not sent with it: left out"
WRITTEN = "answers that the program wrote, such as a command of the user: part of the prompt"
_ABORTED = "MessageAbortedError"
_COMPACTION = "What did we do so far?"
_SUBTASK = "The following tool was executed by the user"
_NOT_SENT = ("text/plain", "application/x-directory")
_STOPPED = "[Tool execution was interrupted]"
REMINDED = (
    "prompts of the plan agent or after it, without the reminder that OpenCode adds when it sends "
    "them"
)
INVALID = (
    "answers with a call that the log has not, because there is no such tool or it was taken back: "
    "part of the prompt"
)
UNENDED = "answers that broke off, of which the log may lack a part: part of the prompt"
_PLAN, _INVALID, _CALLED = "plan", "invalid", "tool-calls"
_V1, _V2 = {"session", "message", "part"}, {"session_v2", "session_message"}


class _ErrorData(msgspec.Struct, gc=False):
    message: str | None = None


class _Error(msgspec.Struct, gc=False):
    name: str = "error"
    data: _ErrorData | None = None


class _Span(msgspec.Struct, gc=False):
    created: int | float | None = None
    completed: int | float | None = None


class _Message(msgspec.Struct, gc=False):
    role: str
    summary: Any = None
    model: str | None = msgspec.field(name="modelID", default=None)
    parent: str | None = msgspec.field(name="parentID", default=None)
    agent: str | None = None
    error: _Error | None = None
    finish: str | None = None
    time: _Span | None = None


class _Times(msgspec.Struct, gc=False):
    compacted: int | float | None = None


class _Facts(msgspec.Struct, gc=False):
    interrupted: bool | None = None
    output: Any = None


class _State(msgspec.Struct, gc=False):
    status: str
    input: Any = None
    output: Any = None
    error: str | None = None
    attachments: list[dict[str, Any]] | None = None
    time: _Times | None = None
    metadata: _Facts | None = None


class _Part(msgspec.Struct, gc=False):
    type: str
    text: str | None = None
    ignored: bool | None = None
    synthetic: bool | None = None
    call_id: str | None = msgspec.field(name="callID", default=None)
    tool: str | None = None
    state: _State | None = None
    mime: str | None = None
    filename: str | None = None
    url: str | None = None
    tail: str | None = msgspec.field(name="tail_start_id", default=None)


class Row(msgspec.Struct, gc=False):
    """A message with its parts."""

    id: str
    message: Annotated[_Message, inner(_MESSAGE)]
    parts: Annotated[list[_Part], inner(_PARTS)]


class _Database:
    """An open database: sessions of version 2, and those of version 1 that it has not taken over."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self.database = database
        self.columns = {name: columns_in(database, name) for name in ("session", "session_v2")}
        self.new = {name for (name,) in self._ids("session_v2")}

    def _ids(self, table: str) -> list[Any]:
        if not self.columns[table]:
            return []
        return self.database.execute(f"SELECT id FROM {table} ORDER BY id").fetchall()

    def sessions(self) -> list[str]:
        """Return the ids of all sessions."""
        return sorted({str(name) for (name,) in self._ids("session")} | {*map(str, self.new)})

    def names(self, session: str) -> Names:
        """Return the names of a session; older versions lack some columns."""
        table = "session_v2" if session in self.new else "session"
        wanted = ("parent_id", "directory", "fork_session_id")
        columns = [name if name in self.columns[table] else "NULL" for name in wanted]
        query = f"SELECT {', '.join(columns)} FROM {table} WHERE id = ?"
        parent, directory, origin = (
            value if isinstance(value, str) and value else None
            for value in self.database.execute(query, (session,)).fetchone()
        )
        return Names(session, parent, origin=origin, labels={"directory": directory})

    def records(self, session: str) -> Iterator[tuple[str, bytes]]:
        """Yield the messages of a session."""
        if session in self.new:
            query = "SELECT id, type, data FROM session_message WHERE session_id = ? ORDER BY seq"
            for message, kind, data in self.database.execute(query, (session,)).fetchall():
                yield f"message {message}", _of_version_2(str(message), str(kind), _bytes(data))
            return
        parts: dict[str, list[bytes]] = {}
        query = "SELECT message_id, data FROM part WHERE session_id = ? ORDER BY id"
        for message, data in self.database.execute(query, (session,)):
            parts.setdefault(str(message), []).append(_bytes(data))
        query = "SELECT id, data FROM message WHERE session_id = ? ORDER BY time_created, id"
        for message, data in self.database.execute(query, (session,)).fetchall():
            row = _row(str(message), _bytes(data), parts.get(str(message), []))
            yield f"message {message}", row


class _Spoken2(msgspec.Struct, gc=False):
    """A message of version 2, as far as its form differs."""

    text: str | None = None
    content: list[dict[str, Any]] | None = None
    model: Any = None
    summary: Any = None


def _of_version_2(name: str, kind: str, data: bytes) -> bytes:
    """Return a message of version 2 in the form of version 1; damaged JSON as it is."""
    try:
        fields: dict[str, Any] = msgspec.json.decode(data, type=dict[str, Any])
        spoken = msgspec.convert(fields, _Spoken2)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return _row(name, data, [])
    parts = [_part_of_version_2(part) for part in spoken.content or ()]
    parts = parts or [{"type": "text", "text": spoken.text or ""}]
    rest = {key: value for key, value in fields.items() if key not in {"text", "content"}}
    model = spoken.model.get("id") if isinstance(spoken.model, Mapping) else None
    role = {"synthetic": "user", "shell": "user"}.get(kind, kind)
    message = rest | {"role": role} | known({"modelID": model})
    return _row(name, _encoded(message), [*map(_encoded, parts)])


def _part_of_version_2(part: dict[str, Any]) -> dict[str, Any]:
    if part.get("type") != "tool" or not isinstance(part.get("state"), Mapping):
        return part
    state = dict(part["state"])
    content, error = state.pop("content", None), state.get("error")
    texts = [p.get("text") for p in content or () if isinstance(p, Mapping)]
    state.setdefault("output", "\n".join(text for text in texts if isinstance(text, str)))
    if isinstance(error, Mapping):
        state["error"] = error.get("message")
    return {"type": "tool", "callID": part.get("id"), "tool": part.get("name"), "state": state}


class _Folder:
    """A directory of sessions, of older versions."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files: dict[str, Path] = {}
        for file in _files(path / "session", "*/*.json"):
            try:
                name = decode_document(_HEAD, file.read_bytes(), str(file)).id
            except RolloutError:
                name = file.stem  # reported when its names are read
            self.files.setdefault(name, file)

    def sessions(self) -> list[str]:
        """Return the ids of all sessions."""
        return [*self.files]

    def names(self, session: str) -> Names:
        """Return the names of a session."""
        file = self.files[session]
        head = decode_document(_HEAD, file.read_bytes(), str(file))
        return Names(head.id, head.parent or None, labels={"directory": head.directory})

    def records(self, session: str) -> Iterator[tuple[str, bytes]]:
        """Yield the messages of a session."""
        rows = []
        for file in _files(self.path / "message" / session, "*.json"):
            data = file.read_bytes()
            created, key = 0.0, file.stem
            try:
                head = msgspec.json.decode(data, type=_FileHead)
                created = (head.time or _Span()).created or 0.0
                key = head.id or key
            except (msgspec.MsgspecError, ValueError, RecursionError):
                pass  # reported when the message is read
            parts = [part.read_bytes() for part in _files(self.path / "part" / key, "*.json")]
            rows.append((created, natural_key(file.name), key, _row(key, data, parts)))
        for _, _, key, row in sorted(rows, key=lambda each: each[:2]):
            yield f"message {key}", row


class _Head(msgspec.Struct, gc=False):
    id: str
    parent: str | None = msgspec.field(name="parentID", default=None)
    directory: str | None = None


class _FileHead(msgspec.Struct, gc=False):
    id: str | None = None
    time: _Span | None = None


_HEAD = msgspec.json.Decoder(_Head)


def _row(name: str, message: bytes, parts: Sequence[bytes]) -> bytes:
    return b'{"id":%s,"message":%s,"parts":[%s]}' % (_encoded(name), message, b",".join(parts))


def _bytes(data: Any) -> bytes:
    return data if isinstance(data, bytes) else str(data).encode()


def _files(folder: Path, pattern: str) -> list[Path]:
    """Return the files that match; none if a name leaves the folder's tree."""
    if ".." in folder.parts or not folder.is_dir():
        return []
    return sorted(folder.glob(pattern), key=lambda path: natural_key(str(path)))


@contextmanager
def _open(path: Path, where: str) -> Iterator[_Database | _Folder]:
    if path.is_dir():
        yield _Folder(path)
    else:
        with opened(path, where) as database:
            yield _Database(database)


class _Copy(msgspec.Struct, gc=False):
    message: _Message
    parts: list[dict[str, Any]]


_COPY = msgspec.json.Decoder(_Copy)
_IDS = frozenset({"id", "messageID", "sessionID"})


def identity(_: str, row: bytes) -> str | None:
    """Return an answer with its time and without its ids, which a fork changes."""
    try:
        copy = _COPY.decode(row)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None  # the reader reports the damage
    time = copy.message.time
    if copy.message.role != "assistant" or time is None or time.created is None:
        return None
    parts = [{name: part[name] for name in part.keys() - _IDS} for part in copy.parts]
    return f"{time.created} {msgspec.json.encode(parts, order='sorted')!r}"


def read(lines: Iterator[Line], log: Contexts) -> None:
    """Read the messages of a session.

    The program writes texts too (`synthetic`), and the answers to what the user ran: a command or a
    sub-agent. The model sees these as its own, but did not sample them.
    """
    tail: str | None = None
    ran: str | None = None
    agents = set[str | None]()
    for where, _, row in lines:
        message, parts = row.message, row.parts
        tail = next((part.tail for part in parts if part.tail), tail)
        if message.role != "assistant":
            agents.add(message.agent)
            note(REMINDED, _PLAN in agents)
            log.say([_prompt(message.role, parts)], where, row.id)
            ran = row.id if any(_is_run(part) for part in parts) else None
            continue
        log.model, log.name = message.model or log.model, log.name and (message.agent or log.name)
        log.error = _told(message.error) if message.error is not None else None
        if message.error is not None and (message.error.name != _ABORTED or not parts):
            note(CUT)
            continue
        is_ran = ran is not None and message.parent in {None, ran}
        is_written = is_ran and all(part.type != "step-start" for part in parts)
        note(FILES, sum(part.type == "file" for part in parts))
        said = [*_answers(parts, where, is_written=is_written)]
        if message.summary is True and message.error is None:
            _compact(log, row.id, where, said, tail)
            tail = None
            continue
        reason = _why_given(message, parts)
        for i, (is_given, group) in enumerate(groupby(said, key=lambda each: each[1])):
            given = WRITTEN if is_given else reason
            messages = [m for m, _ in group]
            key = f"{row.id}/{i}" if i else row.id
            log.say(messages, where, key, given=given, for_others=_as_text(messages))


def _why_given(message: _Message, parts: Sequence[_Part]) -> str | bool:
    """Return why an answer is not what the model wrote; False if it is."""
    calls = [part for part in parts if part.type == "tool"]
    if any(part.tool == _INVALID for part in calls) or (message.finish == _CALLED and not calls):
        return INVALID
    is_ended = message.finish or any(part.type == "step-finish" for part in parts)
    time = message.time or _Span()
    is_dated = time.created is not None and any(part.type == "step-start" for part in parts)
    return UNENDED if is_dated and not is_ended and time.completed is None else False


def _as_text(messages: Sequence[Message]) -> list[Message]:
    """Return answers with their thoughts as text, in front of the other text."""
    sent = []
    for message in messages:
        thought = message.get("reasoning_content", "")
        rest = {name: value for name, value in message.items() if name != "reasoning_content"}
        if thought and isinstance(message["content"], str):
            rest["content"] = thought + message["content"]
        sent.append(rest)
    return sent


def _compact(
    log: Contexts, key: str, where: str, said: Sequence[tuple[Message, bool]], tail: str | None
) -> None:
    """Begin a context with the request for a summary, the summary, and what was kept."""
    note(SUMMARIES)
    *before, ask = log.path() or [Said(where, [], where)]
    first = log.find(tail)
    kept = before[before.index(first) :] if first in before else []
    log.replace([ask])
    log.say([message for message, _ in said], where, key, given=True)
    log.keep(kept)


def _is_run(part: _Part) -> bool:
    """True if a part of a prompt says that the user ran a tool, or asks for a sub-agent."""
    return part.type == "subtask" or (part.synthetic is True and part.text == _SUBTASK)


def _told(error: _Error) -> str:
    return (error.data.message if error.data is not None else None) or error.name


def _prompt(role: str, parts: Sequence[_Part]) -> Message:
    found: list[Part] = []
    for part in parts:
        if part.type == "text" and part.text and not part.ignored:
            found.append(Part(text=part.text))
        elif part.type == "file" and part.mime not in _NOT_SENT:
            found.append(_file(part.mime, part.url, part.filename))
        elif part.type == "compaction":
            found.append(Part(text=_COMPACTION))
        elif part.type == "subtask":
            found.append(Part(text=_SUBTASK))
    return {"role": role, "content": shown(found)}


def _file(mime: Any, url: Any, name: Any) -> Part:
    kind = "image" if isinstance(mime, str) and mime.startswith("image/") else "file"
    source = {"url": url if isinstance(url, str) else "", "media_type": mime}
    return Part(type=kind, source=source, filename=name if isinstance(name, str) else None)


def _answers(
    parts: Sequence[_Part], where: str, *, is_written: bool
) -> Iterator[tuple[Message, bool]]:
    """Yield the answers of a message, each followed by the results of its calls.

    Args:
        parts: Parts of the message.
        where: Location of the message.
        is_written: True if the program wrote the message.

    Yields:
        Each message, and whether the program wrote it.
    """
    reply, results, was_written = _reply(), list[Message](), is_written
    for part in parts:
        by_program = is_written or (part.type == "text" and part.synthetic is True)
        is_spoken = part.type in {"text", "reasoning"}
        is_new = part.type == "step-start" or (is_spoken and results)
        is_other = by_program != was_written and (is_spoken or part.type == "tool")
        if (is_new or is_other) and (results or _says(reply)):
            yield from ((each, was_written) for each in (reply, *results))
            reply, results = _reply(), []
        if is_spoken or part.type == "tool":
            was_written = by_program
        piece = _reply()
        if part.type == "text":
            piece["content"] = part.text or ""
        elif part.type == "reasoning":
            piece["reasoning_content"] = part.text or ""
        elif part.type == "tool" and part.state is not None:
            raw = NO_JSON if part.state.input is None else msgspec.Raw(_encoded(part.state.input))
            piece["tool_calls"] = [tool_call(part.call_id, part.tool or "", json_text(raw, where))]
            results.append(_result(part.state, part.call_id))
        extend(reply, piece)
    if _says(reply):
        yield from ((each, was_written) for each in (reply, *results))


def _reply() -> Message:
    return {"role": "assistant", "content": ""}


def _says(reply: Message) -> bool:
    return bool(reply["content"] or reply.keys() & {"reasoning_content", "tool_calls"})


def _encoded(value: Any) -> bytes:
    return msgspec.json.encode(value)


def _result(state: _State, call_id: str | None) -> Message:
    if state.time is not None and state.time.compacted is not None:
        note(CLEARED)
    text = state.output if state.status == "completed" else state.error
    facts = state.metadata
    if state.status == "error" and facts is not None and facts.interrupted is True:
        text = facts.output if isinstance(facts.output, str) else text
    if state.status not in {"completed", "error"}:
        text = _STOPPED
    if text is not None and not isinstance(text, str):
        text = _encoded(text).decode()
    found = [Part(text=text)] if text else []
    found += [
        _file(a.get("mime"), a.get("url"), a.get("filename")) for a in state.attachments or ()
    ]
    return known({"role": "tool", "content": shown(found), "tool_call_id": call_id})


def _is_store(start: Start) -> bool:
    if start.is_file:
        return start.tables.keys() >= _V1 or start.tables.keys() >= _V2
    return all(any((start.path / name).glob("*/*.json")) for name in ("session", "message"))


ADAPTER = Rows(
    records={"": Row},
    read=read,
    identity=identity,
    is_store=_is_store,
    open=_open,
).adapter("sessions of OpenCode: its database (opencode.db), or its storage directory; text only")
