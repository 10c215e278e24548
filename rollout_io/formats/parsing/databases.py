"""SQLite databases in which programs keep sessions: opened without a change, also with a write-ahead log."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from rollout_io.dataset.opening import Version
from schemas.errors import InputError, RolloutError

_MAGIC = b"SQLite format 3\0"


@contextmanager
def opened(path: Path, where: str) -> Iterator[sqlite3.Connection]:
    """Open a database for reading; neither it nor its log is changed."""
    with readable(where):
        source = path
        if (wal := _wal(path)).is_file():
            source = _copied(path, Version.of(path), Version.of(wal)).path / path.name
        uri = f"{Path(source).resolve().as_uri()}?mode=ro&immutable={int(source == path)}"
        with closing(sqlite3.connect(uri, uri=True)) as database:
            database.text_factory = lambda raw: raw.decode(errors="replace")
            yield database


def row_of(database: sqlite3.Connection, query: str, session: str) -> tuple[Any, ...]:
    """Return the only row of a query about a session that the database lists."""
    row: tuple[Any, ...] | None = database.execute(query, (session,)).fetchone()
    if row is None:
        raise sqlite3.DatabaseError(f"an index lacks the session {session}")
    return row


@contextmanager
def readable(where: str) -> Iterator[None]:
    """Convert errors of a damaged database, which a query may meet late, to an error of what is read."""
    try:
        yield
    except (sqlite3.Error, OverflowError) as error:
        finding = " ".join(f"cannot read the database: {error}".split())
        hint = "copy the database again, with its -wal file"
        raise InputError("sqlite_file", where, finding, hint=hint) from None


def _wal(path: Path) -> Path:
    return path.with_name(f"{path.name}-wal")


class _Folder:
    """A temporary directory, which is removed with the object."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp())
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


@lru_cache(maxsize=2)
def _copied(path: Path, _: Version, __: Version) -> _Folder:
    """Copy a database and its write-ahead log to a directory that is kept for further sessions."""
    folder = _Folder()
    for file in (path, _wal(path)):
        shutil.copyfile(file, folder.path / file.name)
    return folder


def columns_of(path: Path) -> dict[str, set[str]]:
    """Return the columns of each table; empty if a file is no database, or a damaged one."""
    try:
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                return {}
        with opened(path, str(path)) as database:
            tables = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            return {name: columns_in(database, name) for (name,) in tables.fetchall()}
    except (OSError, RolloutError):
        return {}


def columns_in(database: sqlite3.Connection, table: str) -> set[str]:
    """Return the columns of a table; empty if there is no such table."""
    quoted = table.replace('"', '""')
    return {str(row[1]) for row in database.execute(f'PRAGMA table_info("{quoted}")')}
