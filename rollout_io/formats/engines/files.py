"""Files: what is at the start of one (`Start`), and those that have many records.

The start is read once, and shown to every format that may recognize it. A SQLite database is read where
it is; neither it nor its write-ahead log is changed. A member of a zip archive is read into memory, with
a limit on its size; pyarrow decompresses Zstandard members (method 93), because `zipfile` only supports
them since Python 3.14. Rows of Parquet tables, and of the Arrow files that `datasets` saves, are read as
JSON, without the nulls that Arrow adds to structs: a row's values may have different keys.
"""

from __future__ import annotations

import lzma
import math
import os
import shutil
import sqlite3
import struct
import tempfile
import weakref
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from rollout_io.dataset.opening import Version, open_input, read_input
from rollout_io.formats.base import Input, Place, Progress, Rejected, note
from rollout_io.formats.parsing.jsonl import decoded, first_lines
from rollout_io.formats.parsing.records import Record
from schemas.errors import InputError, RolloutError

_ANY: msgspec.json.Decoder[Any] = msgspec.json.Decoder()
_MAX_DOCUMENT_BYTES = 1 << 28
"""Largest document that detection decodes completely."""

_NO_JSON = object()


class Start:
    """What is at the start of a file or directory; each part is read when a format asks for it.

    Nothing here raises an error: the reader of a format reports what is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def is_file(self) -> bool:
        """True for a file."""
        return self.path.is_file()

    @cached_property
    def lines(self) -> list[bytes]:
        """The non-blank lines among the first 8."""
        return [*first_lines(self.path)]

    @cached_property
    def _line_values(self) -> list[Any]:
        return [_value(line) for line in self.lines]

    @cached_property
    def is_document(self) -> bool:
        """True if the file is one JSON document over several lines, or no JSON at all.

        A list with a record a line has lines that are JSON too, so a file whose first line is none
        is a document if all of it is one, or if that line only opens a list or an object, and is not
        the damaged first of several records.
        """
        values = self._line_values
        if not values or values[0] is not _NO_JSON:
            return not values
        first, second = self.lines[0].strip(), b"".join(self.lines[1:2]).strip()
        if first == b"{":  # what follows in an object is a key
            is_open = second[:1] in {b"", b'"', b"}"}
        else:  # what follows in a list ends with a comma, or is the last
            is_open = first == b"[" and (len(values) < 3 or _NO_JSON in values[1:3])
        is_broken = all(value is _NO_JSON for value in values)
        return is_open or is_broken or self._whole is not _NO_JSON

    @cached_property
    def _whole(self) -> Any:
        try:
            if not self.is_file or self.path.stat().st_size > _MAX_DOCUMENT_BYTES:
                return _NO_JSON
            return _value(read_input(self.path))
        except (OSError, RolloutError):
            return _NO_JSON

    @cached_property
    def values(self) -> list[Any]:
        """The lists and objects among the first 8 lines, or the document if the file is one."""
        values = [self._whole] if self.is_document else self._line_values
        return [value for value in values if value is not _NO_JSON]

    @property
    def records(self) -> Iterator[dict[str, Any]]:
        """The objects among `values`."""
        return (value for value in self.values if isinstance(value, dict))

    @cached_property
    def document(self) -> Any:
        """The only value of a file that is one JSON document, on one line or more; else None."""
        is_one_line = len(self.lines) == 1 == len(self.values)
        return self.values[0] if (self.is_document and self.values) or is_one_line else None

    @cached_property
    def tables(self) -> dict[str, set[str]]:
        """Columns of each table of a SQLite database; empty for any other file, or a damaged one."""
        return _columns_of(self.path) if self.head.startswith(_SQLITE) else {}

    @cached_property
    def head(self) -> bytes:
        """The first 64 KiB of a file."""
        try:
            if not self.is_file:
                return b""
            with open_input(self.path) as file:
                return file.read(1 << 16)
        except (OSError, RolloutError):
            return b""

    @cached_property
    def torch_pickle(self) -> bytes:
        """The first MiB of the pickle in a file of torch.save, which is a zip archive; else empty."""
        try:
            with zipfile.ZipFile(self.path) as archive:
                names = [n for n in archive.namelist() if n.rpartition("/")[2] == "data.pkl"]
                with archive.open(names[0]) as file:
                    return file.read(1 << 20)
        except (*_ZIP_ERRORS, NotImplementedError, RuntimeError, IndexError):
            return b""

    def below(self, pattern: str) -> list[Path]:
        """Return the files of a directory that match a pattern; empty for a file."""
        return sorted(self.path.glob(pattern)) if pattern and not self.is_file else []


def _value(content: bytes) -> Any:
    if not content.lstrip().startswith((b"{", b"[")):
        return _NO_JSON
    try:
        return decoded(_ANY, content)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return _NO_JSON


MAX_MEMBER_BYTES = 1 << 30
"""Limit on the uncompressed size of a member."""

REPLACED = "members of archives that a later member of the same name replaces"
"""Note about these members."""

_ZIP_START = b"PK\x03\x04"
_ZSTANDARD = 93  # compression method in the zip specification
_ENCRYPTED = 1  # bit 0 of the flags
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_ZIP_ERRORS = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    EOFError,
    OSError,
    OverflowError,
    ValueError,
)


def is_zip(path: Path) -> bool:
    """True if a file starts with the signature of a zip archive."""
    return Start(path).head.startswith(_ZIP_START)


def members_of(path: Path, where: str) -> dict[str, zipfile.ZipInfo]:
    """Return the members of an archive by name, in order; if a name repeats, the last one wins.

    Raises:
        InputError: `zip_archive`: the archive is damaged.
    """
    members = _opened_zip(path, where).infolist()
    return {member.filename: member for member in members if not member.is_dir()}


def records_in(log: Input, prefix: str, progress: Progress) -> Iterator[Record | Rejected]:
    """Yield the members of an archive whose names start with a prefix; a damaged one is rejected.

    Raises:
        InputError: `zip_archive`: the archive is damaged.
    """
    progress(log.path.stat().st_size)
    for name, member in members_of(log.path, log.name).items():
        if not name.startswith(prefix):
            continue
        place = Place(log.path, f"{log.name}, {name}", None, member.file_size, name)
        try:
            yield Record(place, read_member(log.path, name, place.where))
        except RolloutError as error:
            yield Rejected(place, error)


def read_place(place: Place) -> bytes:
    """Return the member at a place; earlier ones of the same name are noted."""
    name = str(place.part)
    archive = _opened_zip(place.path, place.where)
    if len(archive.infolist()) > len(archive.NameToInfo):  # most archives have each name once
        note(REPLACED, sum(member.filename == name for member in archive.infolist()) - 1)
    return read_member(place.path, name, place.where)


def read_member(path: Path, name: str, where: str) -> bytes:
    """Read the bytes of a member.

    Raises:
        InputError: `zip_archive`: the member is missing, damaged, encrypted, compressed with an
            unknown method, or larger than `MAX_MEMBER_BYTES`.
    """
    archive = _opened_zip(path, where)
    try:
        member = archive.getinfo(name)
        if member.file_size > MAX_MEMBER_BYTES:
            finding = f"{member.file_size} bytes unpacked"
            expected = f"at most {MAX_MEMBER_BYTES} bytes"
            hint = "read the archive with the program that wrote it"
            raise InputError("zip_archive", where, finding, expected, hint)
        if member.compress_type == _ZSTANDARD and not member.flag_bits & _ENCRYPTED:
            return _unpacked(path, member)
        with archive.open(member) as file:
            return file.read(MAX_MEMBER_BYTES)
    except KeyError:
        finding = "the archive no longer contains this member"
        hint = "convert the log after its writer has finished"
        raise InputError("zip_archive", where, finding, hint=hint) from None
    except RuntimeError as error:  # also an unknown compression method
        finding = " ".join(f"cannot unpack the member: {error}".split())
        expected = "deflate, Zstandard or none"
        hint = "unpack the archive, and pack it again with a zip program, without a password"
        raise InputError("zip_archive", where, finding, expected, hint) from None
    except _ZIP_ERRORS as error:
        raise _damaged_zip(where, error) from None


def _unpacked(path: Path, member: zipfile.ZipInfo) -> bytes:
    """Decompress a Zstandard member; its size and checksum must match the directory entry."""
    with open_input(path) as file:
        file.seek(member.header_offset)
        start, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
        file.seek(name_bytes + extra_bytes, os.SEEK_CUR)
        packed = file.read(member.compress_size)
    with pa.CompressedInputStream(pa.BufferReader(packed), "zstd") as stream:
        content: bytes = stream.read(member.file_size + 1)
    is_whole = start == _ZIP_START and len(content) == member.file_size
    if not is_whole or zlib.crc32(content) != member.CRC:
        raise zipfile.BadZipFile(f"wrong size or checksum of {member.filename!r}")
    return content


def _opened_zip(path: Path, where: str) -> zipfile.ZipFile:
    try:
        return _archive(path, Version.of(path))
    except (*_ZIP_ERRORS, NotImplementedError) as error:
        raise _damaged_zip(where, error) from None


@lru_cache(maxsize=1)
def _archive(path: Path, _: Version) -> zipfile.ZipFile:
    """Open an archive; its directory is cached until the file changes."""
    return zipfile.ZipFile(path)


def _damaged_zip(where: str, error: Exception) -> InputError:
    finding = f"cannot unpack the archive: {' '.join(str(error).split()) or type(error).__name__}"
    hint = "copy the file again: it is damaged or cut off"
    return InputError("zip_archive", where, finding, hint=hint)


_ARROW, _PARQUET = ".arrow", b"PAR1"
_TABLE_ERRORS = (pa.ArrowException, OSError, ValueError, ArithmeticError, NotImplementedError)
_STRIDE = 1 << 32
"""A row's index is its batch times this, plus its index in the batch."""


def is_table(path: Path) -> bool:
    """True for a file of rows."""
    return (_is_arrow(path) and path.is_file()) or Start(path).head.startswith(_PARQUET)


def schema_of(path: Path) -> pa.Schema:
    """Return the columns of a table; none of a damaged one."""
    try:
        return _batches(path, Version.of(path)).schema if _is_arrow(path) else pq.read_schema(path)
    except _TABLE_ERRORS:
        return pa.schema([])


def rows_of(log: Input, columns: frozenset[str]) -> Iterator[Record]:
    """Yield the rows of a table.

    Raises:
        InputError: `parquet_file`: the file is damaged, or lacks a column; no row was yielded.
    """
    path = log.path
    try:
        batches = [*_num_rows(path)]
        if missing := sorted(columns - {*schema_of(path).names}):
            raise ValueError(f"the column {missing[0]!r} is missing")
    except _TABLE_ERRORS as error:
        raise _damaged_table(log.name, error) from None
    starts = [sum(batches[:i]) for i in range(len(batches))]
    size = path.stat().st_size // max(sum(batches), 1)
    for batch, (start, num_rows) in enumerate(zip(starts, batches, strict=True)):
        for i in range(num_rows):
            where = f"{log.name}, row {start + i}"
            place = Place(path, where, None, size, batch * _STRIDE + i)
            yield Record(place, read_row(place))


def read_row(place: Place) -> bytes:
    """Return a row as JSON.

    Raises:
        InputError: `parquet_file`: the file is damaged.
    """
    assert isinstance(place.part, int)
    batch, index = divmod(place.part, _STRIDE)
    try:
        row = _rows(place.path, Version.of(place.path), batch)[index]
        return msgspec.json.encode(_without_nulls(row))
    except (*_TABLE_ERRORS, IndexError) as error:
        raise _damaged_table(place.where, error) from None


def _without_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nulls(part) for part in value]
    if isinstance(value, dict):
        return {name: _without_nulls(part) for name, part in value.items() if part is not None}
    is_infinite = isinstance(value, float) and math.isinf(value)
    # Refused as any JSON number of that size.
    return msgspec.Raw(b"1e999") if is_infinite else value


def _is_arrow(path: Path) -> bool:
    return path.name.endswith(_ARROW)


def _num_rows(path: Path) -> Iterator[int]:
    """Yield the number of rows of each batch, after reading it: the whole file is sound."""
    if _is_arrow(path):
        yield from (batch.num_rows for batch in _batches(path, Version.of(path)).to_batches())
        return
    with pq.ParquetFile(path) as file:
        yield from (file.read_row_group(i).num_rows for i in range(file.num_row_groups))


@lru_cache(maxsize=2)
def _rows(path: Path, version: Version, batch: int) -> list[dict[str, Any]]:
    if _is_arrow(path):
        return [*_batches(path, version).to_batches()[batch].to_pylist()]
    with pq.ParquetFile(path) as file:
        return [*file.read_row_group(batch).to_pylist()]


@lru_cache(maxsize=2)
def _batches(path: Path, _: Version) -> Any:
    """Open the record batches of a memory-mapped Arrow file."""
    return pa.ipc.open_stream(pa.memory_map(str(path))).read_all()


def _damaged_table(where: str, error: Exception) -> RolloutError:
    finding = " ".join(f"cannot read the file: {str(error) or type(error).__name__}".split())
    return InputError("parquet_file", where, finding, hint="copy the file again, or write it again")


_SQLITE = b"SQLite format 3\0"


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


def _columns_of(path: Path) -> dict[str, set[str]]:
    try:
        with opened(path, str(path)) as database:
            tables = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            return {name: columns_in(database, name) for (name,) in tables.fetchall()}
    except (OSError, RolloutError):
        return {}


def columns_in(database: sqlite3.Connection, table: str) -> set[str]:
    """Return the columns of a table; empty if there is no such table."""
    quoted = table.replace('"', '""')
    return {str(row[1]) for row in database.execute(f'PRAGMA table_info("{quoted}")')}
