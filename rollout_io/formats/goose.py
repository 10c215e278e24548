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
`agent.rs`): what is not meant for the assistant is not sent (`"annotations": {"audience": ["user"]}`),
consecutive messages of a role are one, a call without a result is no part of later prompts, a result of
which nothing is sent is "(empty result)", and messages of a command are never sent. Goose
stores the calls of one answer one by one, each with its result. The log has no reward, no token ids,
no system prompt, no tool definitions, and no `<info-msg>`, which versions without `<turn-context>`
insert into each request.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import msgspec

from rollout_io.formats.base import note
from rollout_io.formats.contexts import SUMMARIES, Contexts, Said
from rollout_io.formats.dialects import anthropic
from rollout_io.formats.engines.files import columns_in, opened, row_of
from rollout_io.formats.engines.sessions import Line, Names, Rows
from rollout_io.formats.grammar import SELF, Contents, inner
from rollout_io.formats.parsing.content import NO_JSON, Message, Part, known, same_json
from rollout_io.formats.parsing.jsonl import decode_document
from rollout_io.formats.requests import Sends

_PARTS = Contents(
    kind="type",
    default="result",
    reads={
        "text": "text annotations.audience",
        "image": "data mimeType annotations.audience",
        "resource": "resource.text annotations.audience",
        "thinking": "thinking",
        "reasoning": "text",
        "toolRequest": "id toolCall.value.name toolCall.value.arguments",
        "toolResponse": "id toolResult.error",
    },
    leaves={
        "facts about a part": "*/annotations.priority */annotations.lastModified */_meta */metadata "
        "toolRequest/toolCall.status toolResponse/toolResult.status",
        "facts about a resource": "resource/resource.uri resource/resource.mimeType "
        "resource/resource._meta",
        "why a call could not be read": "toolRequest/toolCall.error",
        "repeats the text": "result/structuredContent",
        "encrypted, for the API": "thinking/signature redactedThinking",
        "shown to the user, not sent": "systemNotification actionRequired toolConfirmationRequest "
        "contextLengthExceeded summarizationRequested conversationCompacted error",
    },
    inner={"toolResponse/toolResult.value": SELF, "result/content": SELF},
)
FAILED = "calls that Goose could not read, of which the log has only the error: left out"
_COMMANDS = {
    *("prompts", "compact", "summarize", "clear", "skills"),
    *("doctor", "goal", "grind", "status"),
}


class _Told(msgspec.Struct, gc=False):
    """What a call, or a result, is: a value or an error."""

    value: Any = None
    error: str | None = None

    @property
    def has_failed(self) -> bool:
        marked = isinstance(self.value, Mapping) and self.value.get("isError") is True
        return marked or self.error is not None


class _Annotations(msgspec.Struct, gc=False):
    audience: list[str] | None = None


class _Resource(msgspec.Struct, gc=False):
    text: str | None = None


class _Part(msgspec.Struct, gc=False, rename="camel"):
    type: str
    id: str | None = None
    text: str | None = None
    thinking: str | None = None
    data: Any = None
    mime_type: str | None = None
    tool_call: _Told | None = None
    tool_result: _Told | None = None
    annotations: _Annotations | None = None
    resource: _Resource | None = None

    @property
    def is_for_model(self) -> bool:
        """True if the assistant is in its audience, which is everyone if it names none."""
        audience = self.annotations.audience if self.annotations is not None else None
        return audience is None or "assistant" in audience


class _Metadata(msgspec.Struct, gc=False, rename="camel"):
    user_visible: bool = True
    agent_visible: bool = True
    turn_context: bool = False


class StoredMessage(msgspec.Struct, gc=False):
    """A row of `messages`."""

    role: str
    content: Annotated[list[_Part], inner(_PARTS)]
    metadata: _Metadata | None = None
    created: int | None = None

    @property
    def facts(self) -> _Metadata:
        """Who sees it."""
        return self.metadata or _Metadata()

    @property
    def is_hidden(self) -> bool:
        """True if the user does not see it."""
        return not self.facts.user_visible

    @property
    def has_tools(self) -> bool:
        """True if it has calls or results."""
        return bool(self.ids("toolRequest") or self.ids("toolResponse"))

    def ids(self, kind: str) -> list[str | None]:
        """Return the ids of its calls (`toolRequest`) or of its results (`toolResponse`)."""
        return [part.id for part in self.content if part.type == kind]

    @property
    def text(self) -> str:
        """Its text, without whitespace around it."""
        return "".join(part.text or "" for part in self.content if part.type == "text").strip()

    @property
    def is_command(self) -> bool:
        """True if it is a command, which Goose runs itself."""
        name = self.text.partition(" ")[0]
        is_named = name.startswith("/") and name[1:] in _COMMANDS
        return self.role == "user" and (is_named or self.text == "Please compact this conversation")


class _Call(msgspec.Struct, gc=False):
    name: str
    arguments: msgspec.Raw = NO_JSON


_CALL = msgspec.json.Decoder(_Call)
_PART_LIST = msgspec.json.Decoder(list[_Part])


def _part_of(part: _Part, where: str) -> Part | None:
    """Return a part as in Anthropic's API; None if it is not sent."""
    if not part.is_for_model:
        return None
    if part.type == "toolRequest" and part.tool_call is not None:
        if part.tool_call.error is not None:
            note(FAILED)
            return None
        call = decode_document(_CALL, msgspec.json.encode(part.tool_call.value), where)
        return Part(type="tool_use", id=part.id, name=call.name, input=call.arguments)
    if part.type == "toolResponse":
        result = part.tool_result or _Told()
        content = result.value.get("content") if isinstance(result.value, Mapping) else result.value
        if result.error is not None or not isinstance(content, list):
            text = result.error if result.error is not None else content
            encoded = msgspec.json.encode(text if isinstance(text, str) else "")
        else:
            inner = decode_document(_PART_LIST, msgspec.json.encode(content), where)
            shown = [sent for one in inner if (sent := _part_of(one, where)) is not None]
            if not any(p.text or p.source or p.type not in _PARTS.types for p in shown):
                shown = [Part(text="(empty result)")]
            note(PICTURED, any(p.type == "image" for p in shown))
            blocks = [{"type": p.type, "text": p.text, "source": p.source} for p in shown]
            blocks = [{name: value for name, value in b.items() if value} for b in blocks]
            encoded = msgspec.json.encode(blocks)
        return Part(
            type="tool_result",
            tool_use_id=part.id,
            content=msgspec.Raw(encoded),
            is_error=result.has_failed,
        )
    if part.type == "image":
        source = {"type": "base64", "media_type": part.mime_type, "data": part.data}
        return Part(type="image", source=known(source))
    if part.type == "resource" and part.resource is not None and part.resource.text is not None:
        return Part(text=part.resource.text)
    return Part(type=part.type, text=part.text, thinking=part.thinking) if _is_sent(part) else None


def _is_sent(part: _Part) -> bool:
    """True if a part is text, a thought, or of an unknown type."""
    return part.type in {"text", "thinking", "reasoning"} or part.type not in _PARTS.types


WRITTEN = "answers that the program wrote after a compaction: part of the prompt"
REPLACED = "summaries of single calls, which take their place in later prompts: left out"
PLACEHOLDERS = (
    "calls that the program wrote in place of those it could not read: part of the prompt"
)
REPEATED = "final outputs that the program repeats as an answer: part of the prompt"
UNSENT = "messages of commands, or for the user only, which are not sent: left out"
SPLIT = "calls that are stored one by one with the same time: read as one answer"
PICTURED = (
    "results with a picture, which providers of chat completions are sent behind the result, in a "
    "message of the user"
)
INVERTED = "calls that are stored as later than their results, which later turns may lack: kept"
_SENDS = Sends({"user": "\n", "assistant": "\n"})
_FINAL = {"recipe__final_output", "final_output"}
_TABLES = {"sessions": {"id"}, "messages": {"session_id", "role", "content_json"}}


class _Database:
    """An open database."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self.database = database
        self.has = {name: columns_in(database, name) for name in _TABLES}

    def sessions(self) -> list[str]:
        """Return the ids of all sessions."""
        rows = self.database.execute("SELECT id FROM sessions ORDER BY id")
        return [str(name) for (name,) in rows]

    def names(self, session: str) -> Names:
        """Return the names of a session; older versions lack some columns."""
        wanted = ("parent_session_id", "working_dir")
        columns = [name if name in self.has["sessions"] else "NULL" for name in wanted]
        query = f"SELECT {', '.join(columns)} FROM sessions WHERE CAST(id AS TEXT) = ?"
        row = row_of(self.database, query, session)
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
    """A stored message, or several that are one answer; `begins` is true if it begins a context."""

    message: StoredMessage
    where: str
    is_copied: bool
    begins: bool = False

    @property
    def kind(self) -> str:
        """What Goose calls its effective role."""
        return "tool" if self.message.ids("toolResponse") else self.message.role


def read(lines: Iterator[Line], log: Contexts) -> None:
    """Read the messages of a session."""
    stored = [_Entry(message, where, log.is_copied) for where, _, message in lines]
    answered = {name for one in stored for name in one.message.ids("toolResponse")}
    times = {name: one.message.created for one in stored for name in one.message.ids("toolRequest")}
    for one in stored:
        if (end := one.message.created) is not None:
            late = [times.get(name) or 0 for name in one.message.ids("toolResponse")]
            note(INVERTED, sum(time > end for time in late))
    log.sends = _SENDS
    for entry in _joined(_sent(stored)):
        if entry.begins:
            note(SUMMARIES)
            log.replace()
        sent = [_part_of(part, entry.where) for part in entry.message.content]
        parts = [part for part in sent if part is not None]
        if all(part.type == "text" and not part.text for part in parts):
            continue
        if entry.kind != "assistant":
            _drop_open_calls(log, answered)
        given = _given(entry, parts, log.tip)
        pieces = anthropic.messages_of(entry.message.role, parts, entry.where)
        log.is_copied = entry.is_copied
        is_more = entry.kind == "assistant" and log.tip is not None and log.tip.trains
        where = log.tip.where if is_more and log.tip is not None else entry.where
        log.say(pieces, where, entry.where, given=given or False, is_alone=entry.kind == "tool")


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
            note(UNSENT, int(any(map(_is_sent, message.content))))
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


def _given(entry: _Entry, parts: Sequence[Part], tip: Said | None) -> str | None:
    """Return why the model did not write a message behind the tip; None if it did."""
    if entry.kind != "assistant":
        return None
    if entry.message.is_hidden:
        return WRITTEN
    names = {part.name for part in parts if part.type == "tool_use"}
    if "unparseable_tool_call" in names:
        return PLACEHOLDERS
    answer = tip
    while answer is not None and answer.role == "tool":
        answer = answer.before
    if names or answer is None or answer is tip:
        return None
    calls = [call["function"] for m in answer.messages for call in m.get("tool_calls", ())]
    outputs = [call["arguments"].encode() for call in calls if call["name"] in _FINAL]
    text = entry.message.text.encode()
    return REPEATED if any(same_json(text, output) for output in outputs) else None


def _drop_open_calls(log: Contexts, answered: Collection[str | None]) -> None:
    """Take calls of the last answer that have no result out of what follows."""
    answer, node = list[Said](), log.tip
    while node is not None and node.role == "assistant":
        answer.insert(0, node)
        node = node.before
    calls = [call for one in answer for m in one.messages for call in m.get("tool_calls", ())]
    if any(call.get("id") not in answered for call in calls):
        log.rewind(node)
        for one in answer:
            messages = list[Message]()
            for message in one.messages:
                calls = [c for c in message.get("tool_calls", ()) if c.get("id") in answered]
                messages.append(known(message | {"tool_calls": calls or None}))
            log.keep([replace(one, messages=messages)])


ADAPTER = Rows(
    records={"": StoredMessage},
    leaves={"facts about a message": "metadata"},
    read=read,
    identity=identity,
    is_store=lambda start: all(start.tables.get(n, set()) >= has for n, has in _TABLES.items()),
    open=_open,
).adapter("sessions of Goose: its database (sessions.db); text only")
