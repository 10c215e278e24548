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

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
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
from rollout_io.formats.dialects import opencode as dialect
from rollout_io.formats.parsing.jsonl import contained
from rollout_io.formats.parsing.naming import natural_key
from rollout_io.formats.parsing.sessions import GROUPS, Contexts
from rollout_io.formats.parsing.sqlite import Head, columns_of, heads_in, opened, runs_of
from schemas.errors import InputError, RolloutError

_TABLES = {"session", "message", "part"}


def find_sessions(inputs: Sequence[Input], progress: Progress) -> Iterator[Found]:
    """Yield one run per session without a parent, with its sub-agents; databases come first."""
    yield About("groups", GROUPS)
    heads: dict[str, list[Head]] = {}
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
    yield from runs_of(heads)


def _heads(given: Input) -> Iterator[tuple[Head, RolloutError | None]]:
    if not given.path.is_dir():
        yield from ((head, None) for head in heads_in(given, "session", "parent_id", "directory"))
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
            yield Head(name, parent, msgspec.structs.replace(place, part=name), directory), None
        except RolloutError as error:
            yield Head("", None, place), error


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
    with opened(place.path, where) as database:
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


def recognizes(path: Path) -> bool:
    """True for a database with OpenCode's tables, or a directory of sessions and messages."""
    try:
        if path.is_dir():
            has = [any((path / name).glob("*/*.json")) for name in ("session", "message")]
            return all(has)
        return columns_of(path).keys() >= _TABLES
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
