"""The `goose` format: sessions of Goose, in its database (sessions.db).

    tables `sessions` (id, parent_session_id, working_dir, ...) and `messages` (session_id, role,
    content_json, metadata_json, ...), with contents such as

    {"type": "text", "text": "..."}
    {"type": "toolRequest", "id": "c", "toolCall": {"value": {"name": "shell", "arguments": {...}}}}
    {"type": "toolResponse", "id": "c", "toolResult": {"value": {"content": [{"type": "text", ...}]}}}

A session is a run; sessions with a parent are its sub-agents. A compaction begins a context: its
summary and the answer that Goose writes after it are hidden from the user (`userVisible` is false).
A fork is a session with copies of another one's messages; edits and `/clear` delete messages.

The messages of the log become those of a request as in Goose (`fix_conversation` of
`goose-provider-types/src/conversation.rs`, `filter_for_audience` of `conversation/message.rs`, and
`agent.rs`): what is not meant for the assistant is not sent, consecutive messages of a role are one,
a call without a result is no part of later prompts, and messages of a command are never sent. Goose
stores the calls of one answer one by one, each with its result. The log has no reward, no token ids,
no system prompt, no tool definitions, and no `<info-msg>`, which versions without `<turn-context>`
insert into each request.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from rollout_io.formats.base import note
from rollout_io.formats.contexts import SUMMARIES, Contexts, Said
from rollout_io.formats.dialects import anthropic
from rollout_io.formats.engines.containers import columns_in, opened
from rollout_io.formats.engines.rows import Rows
from rollout_io.formats.engines.sessions import Line, Names
from rollout_io.formats.goose_messages import StoredMessage, is_sent, part_of
from rollout_io.formats.parsing.content import Part, same_json

WRITTEN = "answers that the program wrote after a compaction: part of the prompt"
REPLACED = "summaries of single calls, which take their place in later prompts: left out"
PLACEHOLDERS = (
    "calls that the program wrote in place of those it could not read: part of the prompt"
)
REPEATED = "final outputs that the program repeats as an answer: part of the prompt"
UNSENT = "messages of commands, or for the user only, which are not sent: left out"
SPLIT = "calls that are stored one by one with the same time: read as one answer"
INVERTED = "calls that are stored as later than their results, which later turns may lack: kept"
_PLACEHOLDER = "unparseable_tool_call"
_FINAL = {"recipe__final_output", "final_output"}
_TABLES = {"sessions": {"id"}, "messages": {"session_id", "role", "content_json"}}


class _Database:
    """An open database."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self.database = database
        self.has = {name: columns_in(database, name) for name in _TABLES}

    def sessions(self) -> list[str]:
        """Return the ids of all sessions."""
        return [
            str(name) for (name,) in self.database.execute("SELECT id FROM sessions ORDER BY id")
        ]

    def names(self, session: str) -> Names:
        """Return the names of a session; older versions lack some columns."""
        columns = [
            name if name in self.has["sessions"] else "NULL"
            for name in ("parent_session_id", "working_dir")
        ]
        query = f"SELECT {', '.join(columns)} FROM sessions WHERE CAST(id AS TEXT) = ?"
        row = self.database.execute(query, (session,)).fetchone()
        parent, folder = (value if isinstance(value, str) else None for value in row)
        return Names(session, parent or None, session, labels={"directory": folder})

    def records(self, session: str) -> Iterator[tuple[str, bytes]]:
        """Yield the messages of a session."""
        has = self.has["messages"]
        metadata = "metadata_json" if "metadata_json" in has else "NULL"
        created = "created_timestamp" if "created_timestamp" in has else "NULL"
        order = "id" if "id" in has else "rowid"  # as they were written
        query = f"SELECT role, content_json, {metadata}, {created} FROM messages"
        query += f" WHERE CAST(session_id AS TEXT) = ? ORDER BY {order}"
        rows = self.database.execute(query, (session,)).fetchall()
        for number, (role, content, facts, time) in enumerate(rows):
            yield (
                f"message {number}",
                b'{"role":%s,"content":%s,"created":%s,"metadata":%s}'
                % (
                    msgspec.json.encode(role if isinstance(role, str) else None),
                    _text(content),
                    msgspec.json.encode(time),
                    _text(facts) or b"null",
                ),
            )


@contextmanager
def _open(path: Path, where: str) -> Iterator[_Database]:
    with opened(path, where) as database:
        yield _Database(database)


def _text(value: Any) -> bytes:
    return value if isinstance(value, bytes) else b"" if value is None else str(value).encode()


def identity(_: str, message: bytes) -> str | None:
    """Return an answer with its time, which a fork copies; answers without a time are no copies.

    Who sees it is left out: a compaction changes that in one of the copies.
    """
    copied = message.rpartition(b',"metadata":')[0]
    is_dated = b'"role":"assistant"' in copied and not copied.endswith(b'"created":null')
    return repr(copied) if is_dated else None


@dataclass(slots=True)
class _Entry:
    """A stored message, or several that are sent as one.

    Attributes:
        given: Why the model did not write it; None if it did.
        begins: True if it begins a context.
        tip: What it follows.
    """

    message: StoredMessage
    where: str
    is_copied: bool
    begins: bool = False
    given: str | None = None
    parts: list[Part] = field(default_factory=list)
    tip: Said | None = None

    @property
    def kind(self) -> str:
        """What Goose calls its effective role."""
        return "tool" if self.message.ids("toolResponse") else self.message.role


def read(lines: Iterator[Line], log: Contexts) -> None:
    """Read the messages of a session."""
    stored = [_Entry(message, where, log.is_copied) for where, _, message in lines]
    session = _Session(log, {name for one in stored for name in one.message.ids("toolResponse")})
    _note_inverted(stored)
    for entry in _joined(_sent(stored)):
        session.add(entry)
    session.flush()


def _note_inverted(stored: Sequence[_Entry]) -> None:
    times = {
        name: one.message.created or 0 for one in stored for name in one.message.ids("toolRequest")
    }
    for one in stored:
        if one.message.created is not None:
            late = [times.get(name, 0) for name in one.message.ids("toolResponse")]
            note(INVERTED, sum(time > one.message.created for time in late))


def _sent(stored: Sequence[_Entry]) -> Iterator[_Entry]:
    """Leave out what is not sent, and find where contexts begin."""
    for one, after in pairwise(stored):
        hides = one.message.is_hidden and not one.message.facts.turn_context
        is_start = after.message.is_hidden and after.message.role == "assistant"
        one.begins = hides and one.message.role == "user" and is_start
    last_start = max((i for i, one in enumerate(stored) if one.begins), default=-1)
    unseen = [one.message for one in stored if not one.message.facts.agent_visible]
    replaced = {message.created for message in unseen if message.ids("toolResponse")} - {None}
    is_command = False
    for i, one in enumerate(stored):
        message = one.message
        is_reply = is_command and message.role == "assistant"
        is_command = message.role == "user" and (message.is_command or _is_resolved(stored, i))
        if message.is_hidden:
            hides = message.role == "user" and not message.facts.turn_context and not one.begins
            if hides and message.created in replaced:
                note(REPLACED)
                continue
        elif not (message.facts.agent_visible or message.has_tools) and (
            i > last_start or is_command or is_reply
        ):
            note(UNSENT, int(any(map(is_sent, message.content))))
            continue
        yield one


def _is_resolved(stored: Sequence[_Entry], i: int) -> bool:
    """True if the next message is what Goose sends in place of this command."""
    after = stored[i + 1] if i + 1 < len(stored) else None
    hides = after is not None and after.message.is_hidden and after.message.role == "user"
    is_other = after is not None and not after.message.facts.turn_context and not after.begins
    return stored[i].message.text.startswith("/") and hides and is_other


def _joined(entries: Iterable[_Entry]) -> Iterator[_Entry]:
    """Join the calls of one answer, which are stored one by one, each with its result."""
    answer: _Entry | None = None
    results: list[_Entry] = []
    for entry in entries:
        if answer is not None and entry.kind == "tool":
            results.append(entry)
        elif answer is not None and results and _is_split(answer.message, entry.message):
            note(SPLIT)
            answer.message.content += [p for p in entry.message.content if p.type == "toolRequest"]
        else:
            yield from () if answer is None else (answer, *results)
            answer, results = (entry, []) if entry.kind == "assistant" else (None, [])
            yield from () if answer is not None else (entry,)
    yield from () if answer is None else (answer, *results)


def _is_split(answer: StoredMessage, after: StoredMessage) -> bool:
    thoughts, before = ({p.thinking for p in m.content} for m in (after, answer))
    calls = answer.ids("toolRequest") and after.ids("toolRequest")
    is_same = after.role == "assistant" and after.created == answer.created is not None
    return bool(calls) and is_same and not after.text and thoughts <= before | {None}


@dataclass(slots=True)
class _Session:
    """What is said of a session.

    Attributes:
        answered: Ids of the calls that have a result.
        pending: What may continue.
        before: What was said before `last`.
        last: What was said last.
    """

    log: Contexts
    answered: set[str | None]
    pending: _Entry | None = None
    before: _Entry | None = None
    last: _Entry | None = None

    def add(self, entry: _Entry) -> None:
        """Add a message to the one before, if these are sent as one."""
        if entry.begins:
            self.flush()
            note(SUMMARIES)
            self.log.replace()
            self.before = self.last = None
        sent = [part_of(part, entry.where) for part in entry.message.content]
        entry.parts = [part for part in sent if part is not None]
        entry.given = self._given(entry)
        if not any(part.type != "text" or part.text for part in entry.parts):
            return
        one = self.pending
        if one is None or (one.kind, one.given, one.is_copied) != (
            entry.kind,
            entry.given,
            entry.is_copied,
        ):
            self.flush()
            self.pending = entry
        else:
            one.parts += entry.parts

    def _given(self, entry: _Entry) -> str | None:
        if entry.kind != "assistant":
            return None
        if entry.message.is_hidden:
            return WRITTEN
        names = {part.name for part in entry.parts if part.type == "tool_use"}
        if _PLACEHOLDER in names:
            return PLACEHOLDERS
        results, answer = self.pending, self.last
        if names or results is None or results.kind != "tool" or answer is None:
            return None
        outputs = [bytes(part.input) for part in answer.parts if part.name in _FINAL]
        text = entry.message.text.encode()
        return REPEATED if any(same_json(text, output) for output in outputs) else None

    def flush(self) -> None:
        """Say what is pending."""
        entry, self.pending = self.pending, None
        if entry is None:
            return
        self._drop_open_calls(entry)
        self._say(entry)

    def _drop_open_calls(self, entry: _Entry) -> None:
        """Take calls of the last answer that have no result out of what follows."""
        answer, before = self.last, self.before
        if answer is None or answer.kind != "assistant":
            return
        rest = [p for p in answer.parts if p.type != "tool_use" or p.id in self.answered]
        if len(rest) == len(answer.parts):
            return
        self.log.rewind(answer.tip)
        self.last, self.before = before, None
        if rest:
            self._say(replace(answer, parts=rest))
        elif before is not None and before.kind == entry.kind == "user":
            self.log.rewind(before.tip)
            self.last = None
            entry.parts = [*before.parts, *entry.parts]

    def _say(self, entry: _Entry) -> None:
        pieces = anthropic.messages_of(entry.message.role, entry.parts, entry.where)
        self.log.is_copied = entry.is_copied
        before = self.log.tip
        self.log.say(pieces, entry.where, given=entry.given or False)
        entry.tip = before
        self.before, self.last = self.last, entry


ADAPTER = Rows(
    records={"": StoredMessage},
    leaves={"facts about a message": "metadata"},
    read=read,
    identity=identity,
    is_store=lambda start: all(start.tables.get(n, set()) >= has for n, has in _TABLES.items()),
    open=_open,
).adapter("sessions of Goose: its database (sessions.db); text only")
