"""Members of zip archives, read within limits; nothing is unpacked to disk, nothing is run."""

from __future__ import annotations

import lzma
import struct
import zipfile
import zlib
from functools import lru_cache
from pathlib import Path

from schemas.errors import RolloutError

MAX_MEMBER_BYTES = 1 << 30
"""No member that unpacks to more is read."""

_START = b"PK\x03\x04"
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
    """Whether a file begins as a zip archive."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(len(_START)) == _START
    except OSError:
        return False


def members_of(path: Path, where: str) -> dict[str, zipfile.ZipInfo]:
    """The members of an archive by name, in its order; of one name the last, which is in force.

    Raises:
        RolloutError: zip_archive.
    """
    return {member.filename: member for member in _opened(path, where).infolist()}


def read_member(path: Path, name: str, where: str) -> bytes:
    """The bytes of a member.

    Raises:
        RolloutError: zip_archive: it is not there, damaged, encrypted, of an unknown compression, or
            of more than `MAX_MEMBER_BYTES`.
    """
    archive = _opened(path, where)
    try:
        member = archive.getinfo(name)
        if member.file_size > MAX_MEMBER_BYTES:
            got, expected = f"{member.file_size} bytes unpacked", f"at most {MAX_MEMBER_BYTES}"
            hint = "is it what it claims to be? the program that wrote it can read it"
            raise RolloutError("zip_archive", where, got, expected, hint)
        with archive.open(member) as file:
            return file.read(MAX_MEMBER_BYTES)
    except KeyError:
        got, hint = "an archive without this member", "convert a log that nobody writes"
        raise RolloutError("zip_archive", where, got, "an unchanged file", hint) from None
    except NotImplementedError:
        got, hint = "an unknown compression", "unpack it, and pack it again with a zip program"
        raise RolloutError("zip_archive", where, got, "deflate, or none", hint) from None
    except RuntimeError as error:
        got = " ".join(str(error).split())
        raise RolloutError("zip_archive", where, got, "an archive without a password") from None
    except _DAMAGE as error:
        raise _damaged(where, error) from None


def _opened(path: Path, where: str) -> zipfile.ZipFile:
    try:
        stat = path.stat()
        return _archive(path, stat.st_mtime_ns, stat.st_size)
    except (*_DAMAGE, NotImplementedError) as error:
        raise _damaged(where, error) from None


@lru_cache(maxsize=1)
def _archive(path: Path, _mtime_ns: int, _num_bytes: int) -> zipfile.ZipFile:
    """An archive, whose directory is read once; of a file that has changed, again."""
    return zipfile.ZipFile(path)


def _damaged(where: str, error: Exception) -> RolloutError:
    got = f"what cannot be unpacked ({' '.join(str(error).split()) or type(error).__name__})"
    hint = "the file is damaged or cut off: copy it again"
    return RolloutError("zip_archive", where, got, "a whole zip archive", hint)
