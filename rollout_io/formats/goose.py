"""The `goose` format: sessions of Goose, in its database (sessions.db).

    tables `sessions` (id, parent_session_id, working_dir, ...) and `messages` (session_id, role,
    content_json, metadata_json, ...), with contents such as

    {"type": "text", "text": "..."}
    {"type": "toolRequest", "id": "c", "toolCall": {"value": {"name": "shell", "arguments": {...}}}}
    {"type": "toolResponse", "id": "c", "toolResult": {"value": {"content": [{"type": "text", ...}]}}}

A session is a run; sessions with a parent are its sub-agents. A compaction begins a context: its
summary and the answer that Goose writes after it are hidden from the user (`userVisible` is false).
A fork is a session with copies of another one's messages. The log has no reward, no token ids, no system prompt and no tool definitions.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec

from rollout_io.formats.base import note
from rollout_io.formats.contexts import SUMMARIES, Contexts
from rollout_io.formats.dialects import anthropic
from rollout_io.formats.engines.containers import columns_in, opened
from rollout_io.formats.engines.rows import Rows
from rollout_io.formats.engines.sessions import Line, Names
from rollout_io.formats.grammar import SELF, Contents, inner
from rollout_io.formats.parsing.content import NO_JSON, Part, known
from rollout_io.formats.parsing.jsonl import decode_document

_PARTS = Contents(
    kind="type",
    default="result",
    reads={
        "text": "text",
        "image": "data mimeType",
        "thinking": "thinking",
        "toolRequest": "id toolCall.value.name toolCall.value.arguments",
        "toolResponse": "id toolResult.error",
    },
    leaves={
        "facts about a part": "*/annotations */_meta */metadata toolRequest/toolCall.status "
        "toolResponse/toolResult.status",
        "why a call could not be read": "toolRequest/toolCall.error",
        "repeats the text": "result/structuredContent",
        "encrypted, for the API": "thinking/signature redactedThinking",
        "shown to the user, not sent": "systemNotification actionRequired toolConfirmationRequest "
        "contextLengthExceeded summarizationRequested",
    },
    inner={"toolResponse/toolResult.value": SELF, "result/content": SELF},
)
WRITTEN = "answers that the program wrote after a compaction: part of the prompt"
FAILED = "calls that Goose could not read, of which the log has only the error: left out"
REPLACED = "summaries of single calls, which take their place in later prompts: left out"
_TABLES = {"sessions": {"id"}, "messages": {"session_id", "role", "content_json"}}


class _Told(msgspec.Struct, gc=False):
    """What a call, or a result, is: a value or an error."""

    value: Any = None
    error: str | None = None

    @property
    def has_failed(self) -> bool:
        marked = isinstance(self.value, Mapping) and self.value.get("isError") is True
        return marked or self.error is not None


class _Part(msgspec.Struct, gc=False, rename="camel"):
    type: str
    id: str | None = None
    text: str | None = None
    thinking: str | None = None
    data: Any = None
    mime_type: str | None = None
    tool_call: _Told | None = None
    tool_result: _Told | None = None


class _Metadata(msgspec.Struct, gc=False, rename="camel"):
    user_visible: bool = True
    agent_visible: bool = True


class _Message(msgspec.Struct, gc=False):
    role: str
    content: Annotated[list[_Part], inner(_PARTS)]
    metadata: _Metadata | None = None

    @property
    def is_hidden(self) -> bool:
        """True if the user does not see it."""
        return self.metadata is not None and not self.metadata.user_visible


class _Call(msgspec.Struct, gc=False):
    name: str
    arguments: msgspec.Raw = NO_JSON


_CALL = msgspec.json.Decoder(_Call)
_PART_LIST = msgspec.json.Decoder(list[_Part])


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
        order = "created_timestamp, id" if has >= {"created_timestamp", "id"} else "rowid"
        query = f"SELECT role, content_json, {metadata}, {created} FROM messages"
        query += f" WHERE CAST(session_id AS TEXT) = ? ORDER BY {order}"
        rows = self.database.execute(query, (session,)).fetchall()
        for number, (role, content, facts, time) in enumerate(rows):
            yield (
                f"message {number}",
                b'{"role":%s,"content":%s,"metadata":%s,"created":%s}'
                % (
                    msgspec.json.encode(role if isinstance(role, str) else None),
                    _text(content),
                    _text(facts) or b"null",
                    msgspec.json.encode(time),
                ),
            )


@contextmanager
def _open(path: Path, where: str) -> Iterator[_Database]:
    with opened(path, where) as database:
        yield _Database(database)


def _text(value: Any) -> bytes:
    return value if isinstance(value, bytes) else b"" if value is None else str(value).encode()


def identity(_: str, message: bytes) -> str | None:
    """Return an answer with its time, which a fork copies; answers without a time are no copies."""
    is_dated = b'"role":"assistant"' in message and not message.endswith(b'"created":null}')
    return repr(message) if is_dated else None


def read(lines: Iterator[Line], log: Contexts) -> None:
    """Read the messages of a session."""
    hidden: tuple[_Message, str] | None = None  # of the user; what follows tells what it is
    for where, _, message in lines:
        if hidden is not None:
            is_compaction = message.is_hidden and message.role == "assistant"
            _say_hidden(*hidden, log, is_compaction=is_compaction)
        hidden = (message, where) if message.is_hidden and message.role == "user" else None
        if hidden is None:
            _say(message, where, log)
    if hidden is not None:
        _say_hidden(*hidden, log, is_compaction=False)


def _say_hidden(message: _Message, where: str, log: Contexts, *, is_compaction: bool) -> None:
    """Add the summary of a compaction; leave out that of a single call."""
    if is_compaction:
        note(SUMMARIES)
        log.replace()
    elif message.metadata is not None and message.metadata.agent_visible:
        note(REPLACED)
        return
    _say(message, where, log)


def _say(message: _Message, where: str, log: Contexts) -> None:
    parts = [sent for part in message.content if (sent := _part(part, where)) is not None]
    pieces = anthropic.messages_of(message.role, parts, where) if parts else []
    is_written = message.is_hidden and message.role == "assistant"
    log.say(pieces, where, given=WRITTEN if is_written else False)


def _part(part: _Part, where: str) -> Part | None:
    """Return a part as in Anthropic's API; None if it is not sent."""
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
            shown = [sent for one in inner if (sent := _part(one, where)) is not None]
            encoded = msgspec.json.encode(
                [known({n: v for n, v in msgspec.structs.asdict(p).items() if n in _SENT and v})
                 for p in shown]
            )  # fmt: skip
        return Part(
            type="tool_result",
            tool_use_id=part.id,
            content=msgspec.Raw(encoded),
            is_error=result.has_failed,
        )
    if part.type == "image":
        source = {"type": "base64", "media_type": part.mime_type, "data": part.data}
        return Part(type="image", source=known(source))
    return Part(type=part.type, text=part.text, thinking=part.thinking) if _is_sent(part) else None


_SENT = ("type", "text", "source")


def _is_sent(part: _Part) -> bool:
    return part.type in {"text", "thinking"} or part.type not in _PARTS.types


ADAPTER = Rows(
    records={"": _Message},
    leaves={"facts about a message": "created metadata"},
    read=read,
    identity=identity,
    is_store=lambda start: all(start.tables.get(n, set()) >= has for n, has in _TABLES.items()),
    open=_open,
).adapter("sessions of Goose: its database (sessions.db); text only")
