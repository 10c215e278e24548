"""The `opencode` format: sessions of OpenCode, in its database or in the files of older versions.

    opencode.db: tables `session` (id, parent_id, ...), `message` and `part` (id, session_id, data)
    storage/session/PROJECT/*.json, storage/message/SESSION/*.json, storage/part/MESSAGE/*.json

    message: {"id": "m1", "role": "assistant", "modelID": "...", "error": {...}}
    part: {"id": "p1", "type": "text", "text": "..."}
    part: {"id": "p2", "type": "tool", "callID": "c", "tool": "bash",
           "state": {"status": "completed", "input": {...}, "output": "..."}}

A session is a run; sessions with a `parentID` are its sub-agents. A step is an answer. A compaction (an
answer with `summary`) begins a context with the summary and the end of the history that was kept. An
answer that failed is not sent again, and left out; the run failed if its last answer did. The database
is never opened where it is: with a write-ahead log beside it, a copy of both is read. A session that is
in the database and in files is read from the database.

The log has no reward, no token ids, no system prompt and no tool definitions.
"""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rollout_io.dataset.opening import Version
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
from rollout_io.formats.dialects import opencode as dialect
from rollout_io.formats.parsing.jsonl import contained
from rollout_io.formats.parsing.naming import natural_key
from rollout_io.formats.parsing.sessions import GROUPS, Contexts
from schemas.errors import InputError, RolloutError

_MAGIC = b"SQLite format 3\0"
_TABLES = {"session", "message", "part"}
_MAX_PARENTS = 100


class _Head(NamedTuple):
    """A session, not yet read."""

    id: str
    parent: str | None
    place: Place
    directory: str | None = None


def find_sessions(inputs: Sequence[Input], progress: Progress) -> Iterator[Found]:
    """Yield one run per session without a parent, with its sub-agents; databases come first."""
    yield About("groups", GROUPS)
    heads: dict[str, list[_Head]] = {}
    for given in sorted(inputs, key=lambda each: each.path.is_dir()):
        progress(given.path.stat().st_size)
        try:
            with contained(given.name):
                found = list(_heads(given))
        except RolloutError as error:
            yield Rejected(Place(given.path, given.name, None, 1), error)
            continue
        for head, defect in found:
            if defect is not None:
                yield Rejected(head.place, defect)
            else:
                heads.setdefault(head.id, []).append(head)
    runs: dict[str, list[_Head]] = {}
    for name, own in heads.items():
        root = _root_of(name, heads)
        runs.setdefault(root, [*heads[root]])
        runs[root] += own if name != root else []
    for root, own in runs.items():
        places = [head.place for head in own]
        labels = {"session": root}
        labels |= {"directory": own[0].directory} if own[0].directory else {}
        yield Run(instance_id=root, repetition_id=0, places=places, labels=labels)


def _root_of(name: str, heads: Mapping[str, Sequence[_Head]]) -> str:
    root = name
    for _ in range(_MAX_PARENTS):
        parent = heads[root][0].parent
        if parent is None or parent not in heads or parent == name:
            return root
        root = parent
    return name


def _heads(given: Input) -> Iterator[tuple[_Head, RolloutError | None]]:
    if not given.path.is_dir():
        with _opened(given.path, given.name) as database:
            columns = {row[1] for row in database.execute("PRAGMA table_info(session)")}
            names = [n if n in columns else "NULL" for n in ("parent_id", "directory")]
            rows = database.execute(f"SELECT id, {', '.join(names)} FROM session ORDER BY id")
            for name, parent, directory in rows.fetchall():
                place = Place(given.path, f"{given.name}, session {name}", None, 1, str(name))
                texts = (x if isinstance(x, str) and x else None for x in (parent, directory))
                yield _Head(str(name), next(texts), place, next(texts)), None
        return
    for file in _files(given.path / "session", "*/*.json"):
        place = Place(given.path, f"{given.name}/{file.relative_to(given.path)}", None, 1)
        try:
            fields = _object(file, place.where)
            name, parent, directory = (fields.get(n) for n in ("id", "parentID", "directory"))
            if not isinstance(name, str) or not name:
                raise InputError("record_type", f"{place.where}, $.id", repr(name), "a string")
            directory = directory if isinstance(directory, str) else None
            parent = parent if isinstance(parent, str) and parent else None
            yield _Head(name, parent, msgspec.structs.replace(place, part=name), directory), None
        except RolloutError as error:
            yield _Head("", None, place), error


def read_session(run: Run, _: Options) -> Trajectory:
    """Read the contexts of a session and its sub-agents.

    Raises:
        InputError: `record_type`, `json_document`: a message or part is damaged; `no_calls`: there is
            no answer; `sqlite_file`: the database is damaged.
    """
    steps, seen = [], set[str]()
    error: str | None = None
    models: list[str] = []
    for place in run.places:
        name = str(place.part)
        if name in seen:
            continue
        records = _rows(place, name) if not place.path.is_dir() else _documents(place, name)
        contexts = Contexts()
        failure, model, agent = dialect.add_contexts(list(records), contexts)
        if not seen:
            error = failure
        else:
            for step in contexts.found:
                step.agent = agent or name
        models += [model] if model else []
        steps += contexts.found
        seen.add(name)
    if not steps and error is None:
        raise InputError("no_calls", run.places[0].where, "the session has no model response")
    return Trajectory(steps=steps, error=error, user_values={"model": models[0]} if models else {})


def _rows(place: Place, name: str) -> Iterator[dialect.Record]:
    where = place.where
    with _opened(place.path, where) as database:
        parts: dict[str, list[tuple[Any, str]]] = {}
        query = "SELECT id, message_id, data FROM part WHERE session_id = ? ORDER BY id"
        for part_id, message, data in database.execute(query, (name,)):
            spot = f"{where}, part {part_id}"
            parts.setdefault(str(message), []).append((_decoded(data, spot), spot))
        query = "SELECT id, data FROM message WHERE session_id = ? ORDER BY time_created, id"
        for message, data in database.execute(query, (name,)).fetchall():
            spot = f"{where}, message {message}"
            found = parts.pop(str(message), [])
            yield dialect.Record(str(message), _decoded(data, spot), found, spot)


def _documents(place: Place, name: str) -> Iterator[dialect.Record]:
    root = place.path
    top = place.where.rpartition("/session/")[0]
    found = []
    for file in _files(root / "message" / name, "*.json"):
        where = f"{top}/{file.relative_to(root)}"
        fields = _object(file, where)
        message = fields.get("id")
        key = message if isinstance(message, str) and message else file.stem
        parts = [
            (_object(part, f"{top}/{part.relative_to(root)}"), f"{top}/{part.relative_to(root)}")
            for part in _files(root / "part" / key, "*.json")
        ]
        created = fields.get("time")
        time = created.get("created") if isinstance(created, Mapping) else None
        order = time if isinstance(time, int | float) else 0
        found.append((order, natural_key(file.name), dialect.Record(key, fields, parts, where)))
    return (record for _, _, record in sorted(found, key=lambda each: each[:2]))


def _files(folder: Path, pattern: str) -> list[Path]:
    """Return the files that match; none if a name leaves the folder's tree."""
    if ".." in folder.parts or not folder.is_dir():
        return []
    return sorted(folder.glob(pattern), key=lambda path: natural_key(str(path)))


def _object(file: Path, where: str) -> dict[str, Any]:
    return _decoded(file.read_bytes(), where)


def _decoded(data: Any, where: str) -> dict[str, Any]:
    return dialect.decode_object(data if isinstance(data, bytes) else str(data).encode(), where)


@contextmanager
def _opened(path: Path, where: str) -> Iterator[sqlite3.Connection]:
    """Open a database for reading; neither it nor its log is changed."""
    try:
        source = _copy(path, Version.of(path)) if _wal(path).is_file() else path
        uri = f"{Path(source).resolve().as_uri()}?mode=ro&immutable={int(source == path)}"
        with closing(sqlite3.connect(uri, uri=True)) as database:
            database.text_factory = lambda raw: raw.decode(errors="replace")
            yield database
    except (sqlite3.Error, OverflowError) as error:
        got = " ".join(f"cannot read the database: {error}".split())
        hint = "copy the database again, with its -wal file"
        raise InputError("sqlite_file", where, got, hint=hint) from None


def _wal(path: Path) -> Path:
    return path.with_name(f"{path.name}-wal")


class _Folder:
    """A temporary directory, which is removed with the object."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp())
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


@lru_cache(maxsize=2)
def _copied(path: Path, _: Version, __: Version) -> _Folder:
    folder = _Folder()
    for file in (path, _wal(path)):
        shutil.copyfile(file, folder.path / file.name)
    return folder


def _copy(path: Path, version: Version) -> Path:
    """Copy a database and its write-ahead log to a directory that is kept for further sessions."""
    return _copied(path, version, Version.of(_wal(path))).path / path.name


def recognizes(path: Path) -> bool:
    """True for a database with OpenCode's tables, or a directory of sessions and messages."""
    try:
        if path.is_dir():
            has = [any((path / name).glob("*/*.json")) for name in ("session", "message")]
            return all(has)
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                return False
        with _opened(path, str(path)) as database:
            rows: Iterable[tuple[str]] = database.execute("SELECT name FROM sqlite_master")
            return {name for (name,) in rows} >= _TABLES
    except (OSError, RolloutError):
        return False


ADAPTER = Adapter(
    summary="sessions of OpenCode: its database (opencode.db), or its storage directory; text only",
    recognizes=recognizes,
    find=find_sessions,
    read=read_session,
    is_text=True,
    noun="session",
    is_agent=True,
    contents=dialect.CONTENTS,
)
