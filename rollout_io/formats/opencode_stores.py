"""The stores of OpenCode: its database, in both versions of its tables, and the files of older versions.

A message and its parts, which are rows or files of their own, become one record:

    {"id": "m1", "message": {"role": "user", ...}, "parts": [{"type": "text", "text": "..."}]}
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from rollout_io.formats.base import note
from rollout_io.formats.engines.files import Start, columns_in, opened, row_of
from rollout_io.formats.engines.sessions import Names
from rollout_io.formats.parsing.content import known
from rollout_io.formats.parsing.jsonl import decode_document
from rollout_io.formats.parsing.records import natural_key
from schemas.errors import RolloutError

REVERTED = "answers that were taken back, whose messages are deleted: left out (the table `event` has them)"
_REVERTED = """
    SELECT COUNT(DISTINCT json_extract(data, '$.messageID')) FROM event
    WHERE aggregate_id = :session AND type LIKE 'message.removed.%'
    AND json_extract(data, '$.messageID') IN (
        SELECT json_extract(data, '$.info.id') FROM event
        WHERE aggregate_id = :session AND type LIKE 'message.updated.%'
        AND json_extract(data, '$.info.role') = 'assistant')
"""
_V1, _V2 = {"session", "message", "part"}, {"session_v2", "session_message"}


def is_store(start: Start) -> bool:
    """True for a database with OpenCode's tables, or a directory of sessions and messages."""
    if start.is_file:
        return start.tables.keys() >= _V1 or start.tables.keys() >= _V2
    return all(any((start.path / name).glob("*/*.json")) for name in ("session", "message"))


class Span(msgspec.Struct, gc=False):
    """When a message was begun and ended."""

    created: int | float | None = None
    completed: int | float | None = None


class Database:
    """An open database: sessions of version 2, and those of version 1 that it has not taken over."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self.database = database
        self.columns = {
            name: columns_in(database, name) for name in ("session", "session_v2", "event")
        }
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
            for value in row_of(self.database, query, session)
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
        if self.columns["event"]:
            note(REVERTED, self.database.execute(_REVERTED, {"session": session}).fetchone()[0])


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
    return _row(name, msgspec.json.encode(message), [*map(msgspec.json.encode, parts)])


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


class Folder:
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
                created = (head.time or Span()).created or 0.0
                key = head.id or key
            except (msgspec.MsgspecError, ValueError, RecursionError):
                pass  # reported when the message is read
            parts = [part.read_bytes() for part in _files(self.path / "part" / key, "*.json")]
            rows.append((created, natural_key(file.name), key, _row(key, data, parts)))
        for _, _, key, row in sorted(rows, key=lambda entry: entry[:2]):
            yield f"message {key}", row


class _Head(msgspec.Struct, gc=False):
    id: str
    parent: str | None = msgspec.field(name="parentID", default=None)
    directory: str | None = None


class _FileHead(msgspec.Struct, gc=False):
    id: str | None = None
    time: Span | None = None


_HEAD = msgspec.json.Decoder(_Head)


def _row(name: str, message: bytes, parts: Sequence[bytes]) -> bytes:
    return b'{"id":%s,"message":%s,"parts":[%s]}' % (
        msgspec.json.encode(name),
        message,
        b",".join(parts),
    )


def _bytes(data: Any) -> bytes:
    return data if isinstance(data, bytes) else str(data).encode()


def _files(folder: Path, pattern: str) -> list[Path]:
    """Return the files that match; none if a name leaves the folder's tree."""
    if ".." in folder.parts or not folder.is_dir():
        return []
    return sorted(folder.glob(pattern), key=lambda path: natural_key(str(path)))


@contextmanager
def open_store(path: Path, where: str) -> Iterator[Database | Folder]:
    """Open a database or a directory."""
    if path.is_dir():
        yield Folder(path)
    else:
        with opened(path, where) as database:
            yield Database(database)
