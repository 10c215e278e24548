"""Zip archives, each of whose members is a record.

A member is read into memory, with a limit on its size. pyarrow decompresses Zstandard members (method
93), because `zipfile` only supports them since Python 3.14.
"""

from __future__ import annotations

import lzma
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pyarrow as pa

from rollout_io.dataset.opening import Version, open_input
from rollout_io.formats.base import Input, Place, Progress, Rejected
from rollout_io.formats.parsing.lines import Record
from rollout_io.formats.parsing.notes import note
from schemas.errors import InputError, RolloutError

MAX_MEMBER_BYTES = 1 << 30
"""Limit on the uncompressed size of a member."""

REPLACED = "members of archives that a later member of the same name replaces"
"""Note about these members."""

_ZIP_START = b"PK\x03\x04"
_ZSTANDARD = 93  # compression method in the zip specification
_ENCRYPTED = 1  # bit 0 of the flags
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_DAMAGE = (
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
    try:
        if not path.is_file():
            return False
        with open_input(path) as file:
            return file.read(len(_ZIP_START)) == _ZIP_START
    except (OSError, RolloutError):
        return False


def members_of(path: Path, where: str) -> dict[str, zipfile.ZipInfo]:
    """Return the members of an archive by name, in order; if a name repeats, the last one wins.

    Raises:
        InputError: `zip_archive`: the archive is damaged.
    """
    members = _opened(path, where).infolist()
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
    archive = _opened(place.path, place.where)
    if len(archive.infolist()) > len(archive.NameToInfo):  # most archives have each name once
        note(REPLACED, sum(member.filename == name for member in archive.infolist()) - 1)
    return read_member(place.path, name, place.where)


def read_member(path: Path, name: str, where: str) -> bytes:
    """Read the bytes of a member.

    Raises:
        InputError: `zip_archive`: the member is missing, damaged, encrypted, compressed with an
            unknown method, or larger than `MAX_MEMBER_BYTES`.
    """
    archive = _opened(path, where)
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
        hint = "unpack the archive, and pack it again with a zip program, without a password"
        raise InputError(
            "zip_archive", where, finding, "deflate, Zstandard or none", hint
        ) from None
    except _DAMAGE as error:
        raise _damaged(where, error) from None


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


def _opened(path: Path, where: str) -> zipfile.ZipFile:
    try:
        return _archive(path, Version.of(path))
    except (*_DAMAGE, NotImplementedError) as error:
        raise _damaged(where, error) from None


@lru_cache(maxsize=1)
def _archive(path: Path, _: Version) -> zipfile.ZipFile:
    """Open an archive; its directory is cached until the file changes."""
    return zipfile.ZipFile(path)


def _damaged(where: str, error: Exception) -> InputError:
    finding = f"cannot unpack the archive: {' '.join(str(error).split()) or type(error).__name__}"
    hint = "copy the file again: it is damaged or cut off"
    return InputError("zip_archive", where, finding, hint=hint)
